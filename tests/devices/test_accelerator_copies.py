# SPDX-License-Identifier: Apache-2.0
"""Copies of any accelerator, and its end."""

import contextlib
import gc
import weakref

import attrs
import numpy as np
import pytest

from tests.devices.accelerator_kit import (
    ARRANGEMENT,
    NEW,
    NUM_BLOCKS,
    OLD,
    STILL,
    TIMEOUT,
    Gate,
    World,
    make_driver,
    running,
    simulated,
)
from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_kit import BOTH, on_a_thread
from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.driver import Direction
from ucm.devices.events import DoneFence
from ucm.testing.device_memory import Nesting
from ucm.threads import Threads

SEEDS = range(6)


class NotedThreads(Threads):
    """Plain threads, which a test can ask for."""

    def __init__(self):
        self.made = []

    def thread(self, target, name):
        """Note the thread."""
        self.made.append(super().thread(target, name))
        return self.made[-1]


class StuckDriver(SimulatedDriver):
    """A runtime that does not answer whether an event has passed."""

    is_stuck = False

    def is_done(self, event):
        """Wait for ever."""
        self.is_stuck = True
        self.sleep(1e6)


class StrictDriver(SimulatedDriver):
    """A runtime whose streams are used by one thread at a time."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.busy = []

    def copy(self, batch, direction, stream, *, is_pinned):
        """Submit copies, slowly."""
        with self.using(stream):
            super().copy(batch, direction, stream, is_pinned=is_pinned)

    def record(self, event, stream):
        """Record, slowly."""
        with self.using(stream):
            super().record(event, stream)

    @contextlib.contextmanager
    def using(self, stream):
        """Let others come by meanwhile, who must not use the stream."""
        assert stream not in self.busy
        self.busy.append(stream)
        self.hardware.pause()
        yield
        self.hardware.pause()
        self.busy.remove(stream)


class TestCopies:
    def test_one_call_has_the_addresses_of_all_pages(self):
        """S2-02: blocks times tensors are submitted in one call per direction, each page
        with its own address and size."""
        blocks, slots = [5, 2, 7], [0, 4, 1]
        with running() as world:
            pairs = {
                (
                    memory.data_ptr() + block * size,
                    world.pool[slot].ctypes.data + offset,
                    size,
                )
                for block, slot in zip(blocks, slots, strict=True)
                for memory, size, offset in zip(
                    world.engine.memory, (64, 32, 16), (0, 64, 96), strict=True
                )
            }
            assert world.gather(blocks, world.slots(slots)).wait(TIMEOUT)
            assert world.scatter(blocks, world.slots(slots)).wait(TIMEOUT)
            assert 2 == world.driver.calls["copy"]
            save, load = (copy.batch for copy in world.driver.copies)
            assert 9 == len(save) == len(load)
            assert pairs == set(
                zip(save.sources, save.targets, save.nbytes, strict=True)
            )
            assert pairs == set(
                zip(load.targets, load.sources, load.nbytes, strict=True)
            )

    def test_neighbours_on_both_sides_are_one_copy(self):
        """S2-03: what continues in the blocks and in the slots is one descriptor, and
        what continues on one side only is not."""
        dense = attrs.evolve(ARRANGEMENT, nesting=Nesting.BLOCKS)
        for blocks, slots, expected in (
            (range(8), range(8), [8]),
            ([0, 1, 2, 5, 6], range(5), [3, 2]),
            ([0, 1, 2], [3, 4, 6], [2, 1]),
            ([2, 1, 0], [2, 1, 0], [1, 1, 1]),
        ):
            with running(arrangement=dense) as world:
                assert world.gather(blocks, world.slots(slots)).wait(TIMEOUT)
                assert world.scatter(blocks, world.slots(slots)).wait(TIMEOUT)
                for copy in world.driver.copies:
                    assert [112 * count for count in expected] == list(
                        copy.batch.nbytes
                    )

    def test_one_row_has_its_pages_only(self):
        """A row of its own, as layer by layer saves ask for, moves only its pages."""
        with running() as world:
            assert world.gather([3], rows=[RowId(1)]).wait(TIMEOUT)
            assert [32] == list(world.driver.copies[0].batch.nbytes)
            assert {OLD} == set(world.pool[3, 64:96])
            assert {0} == set(world.pool[3, :64]) | set(world.pool[3, 96:])

    def test_nothing_to_copy_is_done_at_once(self):
        """Without blocks or rows nothing is submitted and the fence has passed."""
        with running() as world:
            assert world.gather([]).is_done()
            assert world.scatter([]).is_done()
            assert world.gather(rows=[]).is_done()
            assert 0 == world.driver.calls["copy"]

    @BOTH
    def test_memory_that_cannot_be_pinned_is_copied_all_the_same(self, semantics):
        """S2-04: ``pin`` says why memory is not pinned, the runtime is told so with each
        copy, and the bytes are right."""
        with running(semantics, is_pinned=False, can_pin=False) as world:
            assert "memory cannot be pinned here" == world.device.pin(world.pool)
            assert world.gather().wait(TIMEOUT)
            assert {OLD} == world.saved()
            world.pool[:] = NEW
            assert world.scatter().wait(TIMEOUT)
            assert {NEW} == world.loaded()
            assert [False, False] == [copy.is_pinned for copy in world.driver.copies]

    def test_memory_is_pinned_only_where_all_of_it_is(self):
        """S2-04: slots are pinned where all of them is, whatever of their pool is, and a
        store that grows has its memory pinned in pieces; no copy is of two pieces."""
        with running(is_pinned=False) as world:
            memory = np.zeros((2 * NUM_BLOCKS, world.group.block_bytes), np.uint8)
            for first, last in ((0, 2), (2, NUM_BLOCKS)):
                assert world.device.pin(memory[first:last]) == ""
            spans = [[0], [1, 2], [NUM_BLOCKS], [0, NUM_BLOCKS], [1, 2, 3]]
            for slots in spans:
                ids = range(len(slots))
                assert world.gather(ids, world.slots(slots, memory)).wait(TIMEOUT)
            told = [copy.is_pinned for copy in world.driver.copies]
            assert [True, True, False, False, True] == told

    @pytest.mark.parametrize("num_staged", [0, 1, 4])
    def test_no_copy_is_within_a_piece_in_part(self, num_staged):
        """S2-04: a driver takes no copy of which a part is registered, or two parts are
        apart; slots of a store that grows may be in several pieces, and in none."""
        one_row = attrs.evolve(ARRANGEMENT, pages=(64,), paddings=(0,), groups=((0,),))
        with running(is_pinned=False, arrangement=one_row) as world:
            for first, last in ((1, 2), (2, 5)):
                assert world.device.pin(world.pool[first:last]) == ""
            if num_staged:
                nbytes = world.group.block_bytes
                assert world.device.stage(num_staged * nbytes, nbytes) == ""
            for ids in (range(NUM_BLOCKS), range(1, 4), range(6), range(3, 8)):
                assert world.gather(ids).wait(TIMEOUT)
                assert world.scatter(ids).wait(TIMEOUT)
            most = max(len(copy.batch) for copy in world.driver.copies)
            assert 4 == most  # all others are one

    def test_each_direction_has_a_stream_of_its_own(self):
        """S2-06: saves run in one stream, loads in another, neither in the engine's."""
        with running() as world:
            for _ in range(2):
                assert world.gather().wait(TIMEOUT)
                assert world.scatter().wait(TIMEOUT)
            streams = list(map(world.stream_of, world.driver.copies))
            assert streams[:2] == streams[2:]
            engine = world.driver.current_stream().name
            assert 3 == len({*streams, engine})

    def test_load_waits_neither_for_saves_nor_for_the_engine(self):
        """S2-06: a load gets on while a save, a borrowed event and the engine's own
        stream are held up."""
        with running(pace=STILL) as world:
            gates = [Gate(f"gate-{number}") for number in range(3)]
            lane = world.device._lanes[Direction.TO_HOST].stream
            engine, other = world.driver.current_stream(), world.hardware.make_stream(0)
            for gate, stream in zip(gates, (engine, other, lane), strict=True):
                stream.ops.append(gate)
            fences = [world.device.lease(world.event(other)), world.gather([0])]
            load = world.scatter([1])
            assert 4 == world.hardware.run(4)  # three pages and the event
            assert load.wait(TIMEOUT)
            assert [False, False] == [fence.is_done() for fence in fences]
            for gate in gates:
                gate.is_open = True

    @BOTH
    def test_fence_passes_behind_the_whole_copy(self, semantics):
        """C6 rule 9: the fence is an event of ours behind all of a copy, after which
        neither blocks nor slots are touched any more."""
        for seed in SEEDS:
            with running(semantics, seed) as world:
                for move in (world.gather, world.scatter, world.gather):
                    fence = move()
                    assert fence.wait(TIMEOUT)
                    assert world.driver.copies[-1].is_done
                world.driver.forbid(world.pool)

    def test_copy_on_any_thread_binds_it_first_and_once(self):
        """C6 rule 8: a thread that copies makes the device its current one before
        anything else, once."""
        with running() as world:
            assert world.device.lease().wait(TIMEOUT)  # the poller's is bound
            before = world.driver.calls["bind_thread"]

            def copy_twice():
                return [world.gather().wait(TIMEOUT) for _ in range(2)]

            assert [True, True] == on_a_thread(copy_twice)
            assert before + 1 == world.driver.calls["bind_thread"]

    @pytest.mark.slow
    def test_threads_that_copy_take_turns_at_a_stream(self):
        """A stream takes copies and events of one thread at a time, so that each fence
        is right behind its copy."""

        def copy_at_once(world, simulation):
            def copy():
                for _ in range(3):
                    assert world.gather().wait(TIMEOUT)
                    assert world.scatter().wait(TIMEOUT)

            threads = [simulation.threads.thread(copy, "copy") for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        for seed in SEEDS:
            simulated(copy_at_once, seed=seed, driver=StrictDriver)


class TestClose:
    @BOTH
    def test_thread_ends_before_events_are_dropped(self, semantics):
        """S2-18: whatever is left is dropped after the thread that asks for it has
        ended, not under it."""
        threads = NotedThreads()
        world = World(make_driver(semantics, pace=STILL), threads)
        world.write()
        world.device.lease()
        (own,) = world.device.events._own.values()
        alive_at_drop = []
        weakref.finalize(own, lambda: alive_at_drop.append(threads.made[0].is_alive()))
        del own
        assert threads.made[0].is_alive()
        world.device.close()
        gc.collect()
        assert [False] == alive_at_drop
        assert {} == world.device._lanes
        world.hardware.drain()
        world.check_closed()

    def test_thread_that_does_not_end_is_waited_for_in_bounds(self):
        """S2-18: a runtime that never answers holds ``close`` for ten seconds; then
        nothing is let go of, which it may still use."""

        def close(world, simulation):
            world.driver.sleep = simulation.sleep
            world.device.lease()
            simulation.sleep(1.0)
            assert world.driver.is_stuck
            start = simulation.now
            world.device.close()
            assert 9.9 < simulation.now - start < 10.5
            assert 1 == world.device.events.num_own
            assert [world.pool.ctypes.data] == list(world.driver.pins)

        simulated(close, driver=StuckDriver, close=False, pace=STILL)

    def test_memory_is_unpinned_once(self):
        """Closing takes back each pin, once, and closing again does nothing."""
        with running() as world:
            world.device.close()
            world.device.close()
            assert 1 == world.driver.calls["unpin"]

    def test_pin_that_the_runtime_refuses_to_undo_does_not_stop_close(self):
        """C6 rule 12: a runtime that is gone when the process ends does not matter."""
        with running() as world:
            world.driver.fail_at("unpin", 1)
            world.device.close()
            assert {} == world.device._pinned.pieces
            world.driver.pins.clear()

    @BOTH
    def test_close_asks_the_runtime_for_nothing_about_events(self, semantics):
        """C6 rule 12: events are dropped; none is recorded, waited for or synchronized,
        and the runtime is only told to unpin."""
        with running(semantics, pace=STILL) as world:
            event = world.event()
            fence = world.device.lease(event)
            world.hardware.drain()
            assert fence.wait(TIMEOUT)
            world.device.lease()
            before = world.driver.calls.copy()
            world.device.close()
            asked = world.driver.calls - before
            del asked["is_done"]  # by the thread, before it ended
            assert {"unpin": 1} == asked  # the thread is bound
            assert {"record": 1, "wait": 1} == event.uses


class WaitedFence(DoneFence):
    """A fence that knows whether somebody has waited for it."""

    __slots__ = ("was_waited_for",)

    def __init__(self):
        self.was_waited_for = False

    def wait(self, timeout):
        """Take note, with the engine's memory still there."""
        self.was_waited_for = True
        return True


class TestClear:
    def test_zeros_wait_for_no_copy_before_them(self):
        """Whoever gives blocks back, such as the loop, which looks at deadlines, does not stand
        still behind a copy that does not end: of memory that is not pinned CUDA waits for the
        stream before it returns."""
        with running() as world:
            assert "" == world.device.stage(1 << 12, world.group.block_bytes)
            gate = Gate("gate")
            world.device._lanes[Direction.TO_DEVICE].stream.ops.append(gate)
            blocks = [BlockId(3), BlockId(5)]
            fence = world.device.clear(GroupId(0), world.row_ids, blocks)
            assert not fence.is_done()
            gate.is_open = True
            world.hardware.drain()
            assert fence.wait(TIMEOUT)
            assert world.gather().wait(TIMEOUT)
            found = [set(slot.tolist()) for slot in world.pool]
            assert [{0} if at in blocks else {OLD} for at in range(NUM_BLOCKS)] == found

    def test_zeros_that_do_not_end_stay_pinned(self):
        """A close amid them ends in time, and unpins nothing that a copy reads."""

        def close_amid_zeros(world, simulation):
            assert "" == world.device.stage(1 << 12, world.group.block_bytes)
            world.device._lanes[Direction.TO_DEVICE].stream.ops.append(Gate("gate"))
            world.device.clear(GroupId(0), world.row_ids, [BlockId(3)])
            world.device.close()
            assert [world.device._zeros.ctypes.data] == list(world.driver.pins)

        simulated(close_amid_zeros, pace=STILL, close=False)

    @pytest.mark.parametrize("verb", ["unregister", "close"])
    def test_memory_goes_away_behind_its_zeros(self, verb):
        """Zeros that are under way reach the engine's memory before it is let go of."""
        world = World(make_driver())
        fence = WaitedFence()
        world.device._cleared = fence
        getattr(world.device, verb)()
        assert fence.was_waited_for
        world.device.close()
