# SPDX-License-Identifier: Apache-2.0
"""Who verifies beside a copy publishes where that is over; what is damaged, and what is not."""

import pytest
import torch

from tests.pipeline.kit import AsyncDevice
from tests.pipeline.test_load import ROWS, SPAN, World
from tests.rig import BLOCK_BYTES, NUM_BLOCKS, keys_of, running_on
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.errors import BlockNotFoundError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.load import Fetch, Publish, PublishVerified, Verify
from ucm.pipeline.outcomes import outcome_of
from ucm.reasons import Reason
from ucm.seals import block_checksum
from ucm.stores.memory import MemoryStore
from ucm.stores.wrap import WrapperStore
from ucm.testing.faults import Fault, FaultPlan


class Helped(WrapperStore):
    """Remembers how many threads may compute checksums."""

    asked = 1

    def hash_on(self, most_threads):
        """Take note."""
        self.asked = most_threads


class Telling(DoneFence):
    """A fence behind a copy, of which the device tells checksums."""

    tells_digests = True

    def __init__(self, told):
        self._told = told

    def digests(self):
        """Return them."""
        return self._told


@pytest.mark.parametrize(("make_device", "wanted"), [(AsyncDevice, 5), (CPUDevice, 1)])
def test_checksums_take_further_threads_beside_a_device_only(make_device, wanted):
    """Where the engine computes on the CPU, its cores are its own."""
    store = Helped(MemoryStore(8, BLOCK_BYTES))
    with running_on(store, make_device(NUM_BLOCKS), {"threads": {"verify": 5}}):
        assert wanted == store.asked


class TestPublishVerified:
    def test_copy_that_is_over_is_published_by_who_verified(self):
        """A load whose copy ended first goes no further way."""
        world = World(AsyncDevice)
        scattered = world.begin()
        publish = PublishVerified()
        assert not publish.is_for(scattered)  # the device still writes
        world.device.next_fence().open()
        assert publish.is_for(scattered)
        assert SPAN == publish.run(scattered).outcome.committed
        (given_back,) = world.told
        assert torch.equal(world.saved, given_back)

    def test_damaged_copy_is_not_published_by_who_verified(self):
        """What is wrong is not given back, though all of it is there."""
        world = World(AsyncDevice)
        world.rot(1)
        scattered = world.begin()
        world.device.next_fence().open()
        assert not PublishVerified().is_for(scattered)
        assert [] == world.told

    def test_what_the_device_compares_is_not_published_before(self):
        """A copy that is over and whose checksums nobody has looked at is nobody's yet, nor
        is one of which too few are told."""
        world = World(AsyncDevice)
        scattered = world.begin()
        copy = world.device.next_fence()
        copy.open()
        assert PublishVerified().is_for(scattered)
        keys = world.ticket.span.keys
        blocks = (world.saved[:, at].numpy().tobytes() for at in range(SPAN))
        told = [*map(block_checksum, keys, blocks)]
        for some in ([], told[:-1]):
            scattered.copy = Telling(some)
            with pytest.raises(ValueError, match="checksums for 5 blocks"):
                Publish(world.store, world.device).run(scattered)
        scattered.copy = Telling(told)
        assert not PublishVerified().is_for(scattered)
        assert not Verify(world.store).is_for(scattered)
        assert SPAN == world.publish(scattered).committed

    def test_recycled_slot_is_not_published_by_who_verified(self):
        """The slots are looked at behind copy and checksums, on this way too."""
        world = World(AsyncDevice)
        scattered = world.begin()
        world.device._on_fence = lambda fence: fence.open()
        world.device.next_fence().open()
        world.inner.forget([world.ticket.span.keys[2]])
        with pytest.raises(BlockNotFoundError), world.ending():
            PublishVerified().run(scattered)
        world.check_zeroed()

    def test_nobody_verifies_what_is_over(self):
        """A ticket that has ended under its copy costs no checksums."""
        world = World(AsyncDevice)
        item = Item(world.ticket, ROWS, DoneFence())
        scattered = world.scatter.run(Fetch(world.store).run(item))
        verify = Verify(world.store)
        assert verify.is_for(scattered)
        world.ticket.end(outcome_of(TicketOverError(Reason.OVER)))
        assert not verify.is_for(scattered)
        world.device.next_fence().open()


def test_slot_recycled_under_the_search_for_damage_is_no_corruption():
    """Where one block is damaged all are looked at: one that is stored anew meanwhile,
    elsewhere, stays stored."""
    plan = FaultPlan(Fault("verify", lambda: store_anew(), nth=2))
    world = World(plan=plan)
    world.rot(1)
    key = world.ticket.span.keys[0]

    def store_anew():
        world.inner.forget([key])
        other, anew = (world.inner.reserve([each], BLOCK_BYTES) for each in keys)
        for lease in (other, anew):
            lease.slots.block(0)[:] = 7
            lease.seal(0, 1)
            lease.commit()

    keys = (keys_of(77)[0], key)
    with pytest.raises(BlockNotFoundError):
        world.begin()
    assert [True, True] == world.inner.contains(keys)
