# SPDX-License-Identifier: Apache-2.0
"""The load chain of whole blocks: verified beside the copy, zeroed where it fails."""

import asyncio
import contextlib
import random

import pytest
import torch

from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_streams import SimHardware
from tests.kit.simulation import Simulation
from tests.native_kit import by_python  # noqa: F401  a fixture
from tests.pipeline.kit import AsyncDevice, make_ticket
from tests.rig import (
    BLOCK_BYTES,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    NUM_ROWS,
    PAGE_BYTES,
    order,
    running,
)
from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    DeviceFailedError,
    StoreUnavailableError,
    UCMError,
)
from ucm.pipeline import load
from ucm.pipeline.guard import BlockGuard, TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.load import (
    Fetch,
    Publish,
    Scatter,
    ScatterWait,
    Verify,
)
from ucm.pipeline.outcomes import outcome_of
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.save import Commit, Gather, Transfer, copy_over
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.reasons import Reason
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultDevice, FaultPlan, FaultStore, raising

ROWS = tuple(RowId(row) for row in range(NUM_ROWS))
SPAN = 5
BLOCKS = slice(1, 1 + SPAN)
"""Of the ticket with number 1."""


class World:
    """
    A store with one span, and the memory of an engine into which it is loaded.

    Args:
        make: Makes the device.
        plan: What store and device meet.
    """

    def __init__(self, make=CPUDevice, plan=None):
        plan = plan or FaultPlan()
        self.memory = torch.zeros(NUM_ROWS, NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8)
        self.memory.random_(1, 256, generator=torch.Generator().manual_seed(1))
        self.saved = self.memory[:, BLOCKS].clone()
        self.inner = MemoryStore(16, BLOCK_BYTES)
        cpu = CPUDevice(NUM_BLOCKS)
        self.device = make(NUM_BLOCKS)
        for device in (cpu, self.device):
            device.register(LAYOUT, dict(zip(LAYERS, self.memory, strict=True)))
        save = make_ticket(num_blocks=SPAN, row_ids=ROWS)
        gathered = Gather(self.inner, cpu).run(Item(save, ROWS, DoneFence()))
        assert SPAN == Commit().run(Transfer().run(gathered)).outcome.committed
        self.memory.fill_(0xA5)
        self.rest = self.memory.clone()
        self.store = FaultStore(self.inner, plan)
        self.told = []
        self.ticket = make_ticket(
            direction=Direction.LOAD,
            num_blocks=SPAN,
            row_ids=ROWS,
            on_release=lambda _: self.told.append(self.found()),
        )
        self.scatter = Scatter(self.store, FaultDevice(self.device, plan))

    def found(self):
        """Return what is in the blocks of the load now."""
        return self.memory[:, BLOCKS].clone()

    def begin(self):
        """Open, scatter, and verify where the device copies meanwhile."""
        item = Item(self.ticket, ROWS, DoneFence())
        with self.ending():
            scattered = self.scatter.run(Fetch(self.store).run(item))
            if self.device.is_synchronous:
                return scattered
            return Verify(self.store).run(scattered)

    def publish(self, scattered):
        """Wait for the copy and publish."""
        with self.ending():
            return (
                Publish(self.store, self.device)
                .run(asyncio.run(ScatterWait().run(scattered)))
                .outcome
            )

    @contextlib.contextmanager
    def ending(self):
        """End the load where a stage raises, as who runs the stages does."""
        try:
            yield
        except UCMError as error:
            self.ticket.end(outcome_of(error))
            raise

    def rot(self, at):
        """Damage a stored block."""
        key = self.ticket.span.keys[at]
        self.inner._pool[self.inner._entries[key].slot, 7] ^= 1

    def check_zeroed(self):
        """Check that the blocks were zero when they were given back, and no others."""
        (given_back,) = self.told
        assert not given_back.any()
        self.rest[:, BLOCKS] = 0
        assert torch.equal(self.rest, self.memory)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Let a piece be two blocks."""
    monkeypatch.setattr(load, "_PIECE_BYTES", 2 * BLOCK_BYTES)


def recording(calls, *verbs):
    """Return a plan that writes down which verbs are called."""
    return FaultPlan(
        *(Fault(verb, lambda verb=verb: calls.append(verb), nth=0) for verb in verbs)
    )


@pytest.mark.usefixtures("by_python")
class TestPieces:
    def test_each_piece_is_copied_as_soon_as_it_is_verified(self):
        """A synchronous device is given what was just verified, and no more."""
        calls = []
        world = World(plan=recording(calls, "verify", "scatter", "recheck", "clear"))
        outcome = Publish(world.store, world.device).run(world.begin()).outcome
        assert ["verify", "scatter"] * 3 + ["recheck"] == calls
        assert (OutcomeKind.COMMITTED, SPAN) == (outcome.kind, outcome.committed)
        assert torch.equal(world.saved, world.found())

    @pytest.mark.parametrize("at", range(SPAN))
    def test_corrupt_block_anywhere_fails_the_load_and_leaves_zeros(self, at):
        """Whichever block is damaged is found, forgotten and blamed; what was copied
        before it is zeroed before the blocks go back."""
        world = World()
        world.rot(at)
        with pytest.raises(BlockCorruptError) as caught:
            world.begin()
        assert world.ticket.span.keys[at] == caught.value.key
        assert at == world.inner.match(world.ticket.span.keys)
        if at < 2:  # nothing was copied: nothing to zero
            assert torch.equal(world.rest, world.memory)
        else:
            world.check_zeroed()

    def test_blocks_taken_back_between_two_pieces_are_zero_and_stay_so(self):
        """A store that hangs in the middle holds no blocks: they go back at once,
        zeroed, and nothing is copied when it answers."""
        plan = FaultPlan(Fault("verify", lambda: take_back(), nth=2))
        world = World(plan=plan)

        def take_back():
            assert world.ticket.guard.revoke(Reason.DEADLINE)
            assert world.ticket.guard.is_released

        with pytest.raises(TicketOverError) as caught:
            world.begin()
        assert Reason.DEADLINE is caught.value.reason
        world.check_zeroed()
        assert 1 == plan.calls["scatter"]


class TestBeside:
    def test_copy_is_submitted_before_checksums_are_computed(self):
        """A device of its own copies while the copy thread verifies."""
        calls = []
        plan = recording(calls, "verify", "scatter", "recheck", "clear")
        world = World(AsyncDevice, plan)
        scattered = world.begin()
        assert ["scatter", "verify"] == calls
        world.device.next_fence().open()
        assert SPAN == world.publish(scattered).committed
        assert torch.equal(world.saved, world.found())
        assert ["scatter", "verify", "recheck"] == calls

    def test_corrupt_load_goes_back_behind_its_copy_and_its_zeros(self):
        """The device still writes when the damage is found: blocks go back when it is
        done and they are zero, and not before."""
        world = World(AsyncDevice)
        world.rot(3)
        scattered = world.begin()
        copy = world.device.next_fence()
        assert not world.device.was_asked
        assert world.ticket.guard.is_copying
        copy.open()
        with pytest.raises(BlockCorruptError):
            world.publish(scattered)
        assert [] == world.told
        assert world.found().any()
        world.device.next_fence().open()
        world.check_zeroed()

    def test_damaged_copy_is_not_told_as_there(self):
        """Nobody who waits for the rows goes on before the load's end is told."""
        world = World(AsyncDevice)
        world.rot(0)
        scattered = world.begin()
        world.device.next_fence().open()
        scattered = asyncio.run(ScatterWait().run(scattered))
        assert not scattered.is_whole
        assert not world.ticket.wait_copied(ROWS, 0.0)

    def test_copy_that_was_torn_is_zeroed_when_it_is_over(self):
        """Blocks that were asked for under the copy wait for it and for zeros."""
        world = World(AsyncDevice)
        world.begin()
        assert not world.ticket.guard.revoke(Reason.DEADLINE)
        copy = world.device.next_fence()
        assert not world.device.was_asked
        copy.open()
        assert [] == world.told
        world.device.next_fence().open()
        world.check_zeroed()


@pytest.mark.parametrize("make", [CPUDevice, AsyncDevice])
class TestPublish:
    def begin(self, make, plan=None):
        """Copy, and wait until that is over."""
        world = World(make, plan)
        if make is AsyncDevice:
            world.device._on_fence = lambda fence: fence.open()
        return world, asyncio.run(ScatterWait().run(world.begin()))

    def test_blocks_go_back_with_their_publication_only(self, make):
        """What is there and verified is nobody's before the slots were looked at."""
        world, scattered = self.begin(make)
        assert [] == world.told
        outcome = Publish(world.store, world.device).run(scattered).outcome
        assert OutcomeKind.COMMITTED is outcome.kind
        (given_back,) = world.told
        assert torch.equal(world.saved, given_back)

    def test_recycled_slot_leaves_zeros(self, make):
        """Bytes that may be another block's are not given back."""
        world, scattered = self.begin(make)
        world.inner.forget([world.ticket.span.keys[2]])
        with pytest.raises(BlockNotFoundError):
            world.publish(scattered)
        world.check_zeroed()

    def test_blocks_taken_back_under_the_last_look_are_not_published(self, make):
        """Who takes them back while the store is asked gets zeros, and no load."""
        plan = FaultPlan(
            Fault("recheck", lambda: world.ticket.guard.revoke(Reason.DEADLINE))
        )
        world, scattered = self.begin(make, plan)
        with pytest.raises(TicketOverError):
            Publish(world.store, world.device).run(scattered)
        world.check_zeroed()


class TestBlockGuard:
    def test_blocks_that_cannot_be_zeroed_are_never_released(self):
        """A device that fails to zero them keeps them."""
        plan = FaultPlan(Fault("clear", fail))
        world = World(plan=plan)
        world.begin()
        world.ticket.guard.revoke(Reason.DEADLINE)
        assert [] == world.told
        assert not world.ticket.guard.is_released
        assert not world.ticket.guard.publish()

    def test_runtime_fails_whose_device_does_not_zero_blocks(self):
        """Nobody gives such blocks back: the engine hears of it, and so do people."""
        fails = raising(StoreUnavailableError("planned"))
        plan = FaultPlan(Fault("recheck", fails), Fault("clear", fail))
        with running(plan=plan) as rig:
            rig.submit(order(1, Direction.SAVE, range(2), range(1, 3)))
            rig.settle()
            rig.submit(order(2, Direction.LOAD, range(2), range(20, 22)))
            assert OutcomeKind.FAILED is rig.settle()[2].kind
            assert "blocks of transfer 2 are not zeroed" == rig.failure()
            assert [1] == rig.told(NoticeKind.RELEASED)

    def test_blocks_without_bytes_of_ours_go_back_as_they_are(self):
        """Nothing is zeroed that was not soiled, and nothing twice."""
        told = []
        guard = BlockGuard(lambda: told.append(True))
        assert guard.begin()
        guard.end(last=False)
        guard.revoke(Reason.DEADLINE)
        guard.revoke(Reason.DEADLINE)
        assert [True] == told


def fail():
    """Raise as a device does that has failed."""
    raise DeviceFailedError("gone")


class SlowDriver(SimulatedDriver):
    """
    Hardware that takes so long for a copy to the device, in virtual time.

    Args:
        simulation: Its clock.
        seconds: Of a copy.
    """

    def __init__(self, simulation, seconds):
        hardware = SimHardware(random.Random(1), pause=simulation.pause)
        super().__init__(0, hardware)
        self.simulation = simulation
        self.seconds = seconds
        self.until = 0.0

    def copy(self, batch, direction, stream, *, is_pinned):
        """Submit; the hardware stands still until the time is over."""
        super().copy(batch, direction, stream, is_pinned=is_pinned)
        self.until = self.simulation.now + self.seconds

    def is_done(self, event):
        """Ask the hardware."""
        is_over = self.simulation.now >= self.until
        self.hardware.pace = (1000,) if is_over else (0,)
        return super().is_done(event)


class TestTime:
    @pytest.mark.parametrize(
        ("verify_s", "copy_s"), [(5.0, 3.0), (3.0, 5.0), (4.0, 4.0)]
    )
    def test_load_takes_the_longer_of_verifying_and_copying(self, verify_s, copy_s):
        """On an accelerator checksums cost no time beside a copy that takes longer,
        and a copy none beside them: never the sum."""
        simulation = Simulation(1)
        took = []

        def main():
            driver = SlowDriver(simulation, copy_s)

            def make(num_blocks):
                return AcceleratorDevice(driver, num_blocks, simulation.threads)

            plan = FaultPlan(Fault("verify", lambda: simulation.sleep(verify_s)))
            world = World(make, plan)
            with contextlib.closing(world.device):
                world.device.pin(world.inner._pool)
                begun = simulation.now
                scattered = world.begin()
                assert scattered.copy.wait(60.0)
                copy_over(scattered, scattered.copy)
                Publish(world.store, world.device).run(scattered)
                took.append(simulation.now - begun)
                assert torch.equal(world.saved, world.found())
            assert [] == driver.hardware.violations

        simulation.run(main)
        longer = max(verify_s, copy_s)
        assert longer <= took[0] < longer + 1.0


def test_rows_of_a_block_are_zeroed_one_by_one():
    """A device zeroes exactly the rows it is asked for, all of them."""
    world = World()
    fence = world.device.clear(GroupId(0), (RowId(0), RowId(2)), (BlockId(3),))
    assert fence.is_done()
    world.rest[[0, 2], 3] = 0
    assert torch.equal(world.rest, world.memory)
