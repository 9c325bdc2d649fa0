# SPDX-License-Identifier: Apache-2.0
"""What no other test of the devices noticed when it was broken on purpose."""

import pytest

from tests.devices.accelerator_kit import (
    OLD,
    STILL,
    TIMEOUT,
    Gate,
    Watch,
    World,
    make_driver,
    running,
    simulated,
)
from tests.devices.staging_kit import NUM_SLOTS, make_pool, places_of, take
from tests.kit.accelerator_kit import BOTH
from tests.kit.accelerator_streams import Bias, Semantics
from tests.kit.simulation import Simulation
from tests.pipeline.kit import HandFence, make_item, make_ticket
from ucm.devices.events import DoneFence
from ucm.errors import DeviceFailedError
from ucm.pipeline.items import Item
from ucm.pipeline.save import EventWait, Gathered, Queued, Transfer


def stage(world: World, count: int) -> None:
    """Give a world's device staging memory for so many blocks."""
    nbytes = world.group.block_bytes
    assert "" == world.device.stage(count * nbytes, nbytes)


class TestLease:
    @BOTH
    def test_fence_of_a_borrowed_event_waits_for_it(self, semantics: Semantics) -> None:
        """S0-25: the fence of a lease stands behind the event that was lent, however
        much else the device has done."""

        def body(world: World, simulation: Simulation) -> None:
            gate, stream = Gate("gate"), world.hardware.make_stream(0)
            stream.ops.append(gate)
            fence = world.device.lease(world.event(stream))
            other = world.hardware.make_stream(0)
            for _ in range(50):
                world.driver.launch(other, lambda: None)
            assert 40 == world.hardware.run(40)
            simulation.sleep(1.0)
            assert not fence.is_done()
            gate.is_open = True
            world.hardware.drain()
            assert fence.wait(TIMEOUT)
            simulation.sleep(1.0)

        simulated(body, semantics, pace=STILL, bias=Bias.UNIFORM)


class TestStaging:
    def test_lease_that_ends_twice_frees_its_slots_once(self) -> None:
        """Design invariant 5: whoever closes a lease again gives nobody a slot twice."""
        pool = make_pool()
        lease = take(pool, 2)
        lease.close()
        lease.close()
        assert NUM_SLOTS == places_of(pool).free

    def test_staging_memory_of_a_load_is_kept_until_its_fence(self) -> None:
        """Design invariant 5: the device reads staging memory behind the call; nobody
        has it before the fence has passed."""
        with running(is_pinned=False, pace=STILL) as world:
            stage(world, 4)
            fence = world.scatter([0, 1])
            assert 2 == places_of(world.device._staging).quarantined
            world.hardware.drain()
            assert fence.wait(TIMEOUT)
            assert 4 == places_of(world.device._staging).free

    def test_staging_memory_is_free_when_its_copy_has_landed(self) -> None:
        """Whoever has brought a copy to its slots needs its staging memory no more."""
        with running(is_pinned=False) as world:
            stage(world, 4)
            fence = world.gather([0, 1])
            assert fence.wait(TIMEOUT)
            fence.land()
            assert 4 == places_of(world.device._staging).free

    def test_staging_memory_that_is_on_loan_stays_pinned(self) -> None:
        """S2-18: closing the device takes nothing from under a copy that has still to
        be brought to its slots."""
        world = World(make_driver(), is_pinned=False)
        stage(world, 4)
        fence = world.gather([0, 1])
        assert fence.wait(TIMEOUT)
        world.device.close()
        assert [world.device._staging.memory.ctypes.data] == list(world.driver.pins)
        fence.land()
        assert {OLD} == set(world.pool[:2].ravel().tolist())
        world.check_closed()


class TestFailure:
    def test_copy_that_cannot_be_waited_for_is_no_success(self) -> None:
        """C6 rule 10: where neither an event nor a synchronization is to be had behind
        a copy, its fence fails."""
        world = World(make_driver(pace=STILL))
        world.driver.fail_at("record", 1, stays=False)
        world.driver.fail_at("synchronize", 1)
        fence = world.gather()
        with pytest.raises(DeviceFailedError, match="synchronize failed as planned"):
            fence.is_done()
        world.device.close()
        world.check_closed()

    def test_failure_of_one_call_fails_what_is_pending(self) -> None:
        """C6 rule 10: whoever waits on a device that has failed is told at once, also
        when its runtime answers again."""
        world = World(make_driver(pace=STILL))
        world.write()
        fence = world.device.lease()
        world.driver.fail_at("copy", 1, stays=False)
        world.gather()
        with pytest.raises(DeviceFailedError, match="copy failed as planned"):
            fence.is_done()
        world.device.close()
        world.hardware.drain()
        world.check_closed()

    def test_first_failure_is_told_to_fences_to_come(self) -> None:
        """A poller that has failed twice names what broke first to whoever comes."""

        def body(watch: Watch) -> None:
            for word in ("first", "second"):
                watch.poller.fail(DeviceFailedError(word))
            with pytest.raises(DeviceFailedError, match="first"):
                watch.poller.watch(watch.streams[0], object()).is_done()

        Watch().run(body)


class TestSave:
    def test_save_without_its_fence_is_not_ready(self) -> None:
        """S0-21: an item whose fence has not passed is waited for, not copied."""
        ticket, fence = make_ticket(), HandFence()
        queued = Queued(Item(ticket, ticket.row_ids, fence))
        assert EventWait().try_now(queued) is None
        fence.open()
        assert queued is EventWait().try_now(queued)

    def test_slots_are_sealed_behind_the_landing_of_their_copy(self) -> None:
        """A copy by way of staging memory is brought to its slots before they are
        sealed, with each of its rows."""
        landed = []

        class Staged(DoneFence):
            def land(self) -> None:
                landed.append(True)

        item = make_item(make_ticket())
        item.copy = Staged()
        Transfer().run(Gathered(item))
        assert [True] == landed
