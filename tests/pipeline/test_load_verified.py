# SPDX-License-Identifier: Apache-2.0
"""Who verifies beside a copy publishes where that is over; what is damaged, and what is not."""

import attrs
import pytest
import torch

from tests.native_kit import by_native, by_python  # noqa: F401  fixtures
from tests.pipeline.kit import AsyncDevice
from tests.pipeline.test_load import ROWS, SPAN, World, recording
from tests.rig import BLOCK_BYTES, NUM_BLOCKS, keys_of, running_on
from ucm import affinity
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.errors import BlockCorruptError, BlockNotFoundError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.load import Fetch, Publish, PublishVerified, Verify
from ucm.pipeline.outcomes import OutcomeKind, outcome_of
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


class Helping(CPUDevice):
    """Remembers how many threads may compute checksums of loads."""

    asked = 1

    def hash_on(self, most_threads):
        """Take note."""
        self.asked = most_threads


def test_checksums_of_saves_take_further_threads_beside_a_device_only():
    """Where the engine computes on the CPU its cores are its own, but for loads, for which it
    waits."""
    threads = {"threads": {"verify": 5}}
    store = Helped(MemoryStore(8, BLOCK_BYTES))
    with running_on(store, AsyncDevice(NUM_BLOCKS), threads):
        assert 5 == store.asked
    store, device = Helped(MemoryStore(8, BLOCK_BYTES)), Helping(NUM_BLOCKS)
    with running_on(store, device, threads):
        assert (1, 5) == (store.asked, device.asked)


def test_loads_on_the_cpu_have_all_cpus_and_checksums_beside_a_device_half(monkeypatch):
    """R-18: an engine that computes on them waits for its load; one with a device goes on."""
    monkeypatch.setattr(affinity, "process_cpus", lambda: frozenset(range(6)))
    monkeypatch.setattr(affinity, "_quotas", lambda _: ())
    store, device = Helped(MemoryStore(8, BLOCK_BYTES)), Helping(NUM_BLOCKS)
    with running_on(store, device):
        assert (1, 6) == (store.asked, device.asked)
    with running_on(store, AsyncDevice(NUM_BLOCKS)):
        assert 3 == store.asked


@pytest.mark.parametrize("make", [CPUDevice, AsyncDevice])
def test_block_that_is_said_to_have_another_size_is_forgotten(make):
    """What a store knows of a block may rot as well: left there it would fail each load. Those that are read
    with it are well."""
    world = World(make)
    key, *others = world.ticket.span.keys
    entry = world.inner._entries[key]
    world.inner._entries[key] = attrs.evolve(entry, nbytes=entry.nbytes - 1)
    with pytest.raises(BlockCorruptError):
        world.begin()
    assert [False] == world.inner.contains([key])
    assert [True] * 4 == world.inner.contains(others)
    assert torch.equal(world.rest, world.memory)


class Untold(CPUDevice):
    """Says that it tells checksums, and tells none."""

    def scatter(self, group_id, row_ids, slots, block_ids, seeds=None):
        """Copy."""
        assert seeds is not None
        return super().scatter(group_id, row_ids, slots, block_ids)


@pytest.mark.usefixtures("by_native")
class TestAtOnce:
    """A synchronous device that tells the checksums of what it copies."""

    def test_all_is_copied_and_then_compared(self):
        """R-18: one call does all, and nobody reads the blocks before they are given back."""
        calls = []
        world = World(plan=recording(calls, "verify", "scatter", "recheck", "clear"))
        outcome = Publish(world.store, world.device).run(world.begin()).outcome
        assert ["scatter", "verify", "recheck"] == calls
        assert (OutcomeKind.COMMITTED, SPAN) == (outcome.kind, outcome.committed)
        assert torch.equal(world.saved, world.found())

    @pytest.mark.parametrize("at", range(SPAN))
    def test_corrupt_block_anywhere_fails_the_load_and_leaves_zeros(self, at):
        """Whichever block is damaged is found, forgotten and blamed, not the device; the
        blocks are zeroed before they go back."""
        world = World()
        world.rot(at)
        scattered = world.begin()
        with pytest.raises(BlockCorruptError) as caught:
            world.publish(scattered)
        assert world.ticket.span.keys[at] == caught.value.key
        assert at == world.inner.match(world.ticket.span.keys)
        assert world.device.tells_digests
        world.check_zeroed()

    def test_what_a_device_does_not_tell_is_verified(self):
        """It may tell none, of whatever it likes: nothing is published unseen."""
        world = World(Untold)
        world.rot(3)
        with pytest.raises(BlockCorruptError) as caught:
            world.begin()
        assert world.ticket.span.keys[3] == caught.value.key
        world.check_zeroed()

    def test_what_was_verified_before_is_not_digested_again(self):
        """``store.verify: once`` says so: the lease leaves out what it knows."""
        calls = []
        world = World(plan=recording(calls, "verify", "scatter"))
        item = Item(world.ticket, ROWS, DoneFence())
        fetched = Fetch(world.store).run(item)
        world.ticket.read_lease.skips_verified = True
        world.scatter.run(fetched)
        assert ["verify", "scatter"] == calls


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


@pytest.mark.usefixtures("by_python")
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
