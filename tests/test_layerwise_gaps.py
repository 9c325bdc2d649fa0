# SPDX-License-Identifier: Apache-2.0
"""Rows that come one by one, where they meet failures, full queues and shutdown."""

import contextlib
import threading

import pytest

from tests.pipeline.kit import AsyncDevice, make_ticket
from tests.rig import (
    KEYSPACE_DIGEST,
    LAYOUT,
    NUM_BLOCKS,
    NUM_ROWS,
    order,
    running,
    running_on,
)
from ucm.blocks import RowId, TransferId
from ucm.devices.events import DoneFence
from ucm.errors import DeviceError
from ucm.layerwise import SpanGroup
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.guard import BlockGuard
from ucm.pipeline.items import Item
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.save import Gather
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.reasons import Reason
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultDevice, FaultPlan, Gate, raising

SAVE, LOAD = Direction.SAVE, Direction.LOAD
ROWS = tuple(RowId(row) for row in range(NUM_ROWS))
TIMEOUT = 60.0


def save(number, first=0, request="r"):
    """Return the order of one save of two blocks."""
    return order(number, SAVE, range(first, first + 2), range(1, 3), request)


def load(number, first=0):
    """Return the order of one load of two blocks."""
    return order(number, LOAD, range(first, first + 2), range(20 + first, 22 + first))


def group_of(*orders):
    """Return orders whose rows go together."""
    return SpanGroup(KEYSPACE_DIGEST, orders, frozenset(ROWS))


def begin_save(rig, number, first=0):
    """Submit the first row of a save and wait until it is copied."""
    rig.runtime.submit(
        KEYSPACE_DIGEST, [save(number, first)], rig.device.lease(None), ROWS[:1]
    )
    rig.runtime._take_in()
    ticket = rig.runtime._open[TransferId(number)]
    assert ticket.wait_copied(ROWS[:1], TIMEOUT)
    return ticket


def turn_loop_until(runtime, is_so):
    """Let the loop run, turn by turn, until something is so."""
    for _ in range(1000):
        if is_so():
            return
        turned = threading.Event()
        runtime._loop.call(turned.set)
        assert turned.wait(TIMEOUT)
    raise AssertionError("it never came")


class Resource(contextlib.AbstractContextManager):
    """Slots that count how often they were given back."""

    def __init__(self):
        self.left = 0

    def __exit__(self, *_):
        self.left += 1


class TestSlots:
    def test_slots_of_a_row_are_given_back_when_the_next_one_still_waits(self):
        """S1-20: a save that ends while one of its rows is copied and the last waits
        for room keeps no slots: its blocks can be saved again at once."""
        gate = Gate()
        plan = FaultPlan(Fault("reserve", gate, nth=2))
        with running({"queue": {"window": 1}}, plan) as rig:
            fence = rig.device.lease(None)
            begin_save(rig, 1)
            rig.runtime.submit(KEYSPACE_DIGEST, [save(2, 10, "other")], fence)
            gate.wait_reached()
            # The copied row has left: nobody but the one that waits gives slots back.
            turn_loop_until(rig.runtime, lambda: len(rig.runtime._pipeline._lanes) == 1)
            rig.runtime.add_rows([1], ROWS[1:], fence)
            rig.runtime.abandon([1], "test")
            gate.open()
            rig.settle()
            rig.runtime.submit(KEYSPACE_DIGEST, [save(3)], fence)
            assert OutcomeKind.COMMITTED is rig.settle()[3].kind

    def test_row_behind_a_failed_one_is_not_copied(self):
        """S1-20: a row that stands behind one that fails, on the same copy thread, is
        not copied: by then its slots may be those of another save."""
        gate, copied = Gate(), []

        def fail_first():
            copied.append(None)
            if len(copied) == 1:
                gate()
                raise DeviceError("planned")

        with running({}, FaultPlan(Fault("gather", fail_first, nth=0))) as rig:
            fence = rig.device.lease(None)
            rig.runtime.submit(KEYSPACE_DIGEST, [save(1)], fence, ROWS[:1])
            gate.wait_reached()
            rig.runtime.add_rows([1], ROWS[1:], fence)
            rig.runtime.submit(KEYSPACE_DIGEST, [save(2, 10, "other")], fence)
            copy = rig.runtime._pipeline._copy[SAVE]["copy"]
            turn_loop_until(rig.runtime, lambda: copy._jobs.qsize() == 2)
            gate.open()
            outcomes = rig.settle()
        assert ("device", "") == (outcomes[1].reason, outcomes[2].reason)
        assert 2 == len(copied)

    def test_slots_of_a_row_are_given_back_at_shutdown(self):
        """S1-27: a save that is cut off with a row in its slots and another one in the
        queue leaves no slot behind."""
        gate = Gate()
        plan = FaultPlan(Fault("reserve", gate, nth=2))
        config = {"queue": {"window": 1}, "timeout": {"shutdown": 0.0}}
        with running(config, plan) as rig:
            fence = rig.device.lease(None)
            ticket = begin_save(rig, 1)
            rig.runtime.submit(KEYSPACE_DIGEST, [save(2, 10, "other")], fence)
            gate.wait_reached()
            rig.runtime.add_rows([1], ROWS[1:], fence)
            resource = Resource()
            ticket.own(resource)
            rig.runtime.close()
            gate.open()
            rig.runtime._loop.join(TIMEOUT)
            assert rig.runtime._pipeline.join_threads(TIMEOUT)
            assert 1 == resource.left

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_slots_of_a_copied_row_are_given_back_when_the_loop_dies(self):
        """S1-27: a save that waits for its next row when the loop ends keeps no slot of
        a store that others share."""
        with running() as rig:
            begin_save(rig, 1)
            assert 0 < rig.store.stats().reserved_blocks
            loop = rig.runtime._loop._loop
            loop.call_soon_threadsafe(loop.stop)
            rig.runtime._loop.join(TIMEOUT)
            assert rig.runtime._pipeline.join_threads(TIMEOUT)
            assert OutcomeKind.FAILED is rig.outcomes()[1].kind
            assert 0 == rig.store.stats().reserved_blocks

    def test_rows_of_an_ended_ticket_are_not_to_come(self):
        """A queue remembers which tickets lack rows until they end, not for good: also
        where the last word is given while a row is offered."""
        queue = DumpQueue(max_tickets=9, max_nbytes=1 << 30)
        for end_first in (False, True):
            ticket = make_ticket(row_ids=ROWS, on_settle=queue.over)
            queue.open[ticket.transfer_id] = ticket
            if end_first:
                ticket.end(Outcome(OutcomeKind.CANCELLED, "test"))
            queue.offer(Item(ticket, ROWS[:1], DoneFence()))
            if not end_first:
                assert [ticket] == queue.unfinished()
                ticket.end(Outcome(OutcomeKind.CANCELLED, "test"))
            assert [] == queue.unfinished()

    def test_failed_row_keeps_the_slots_that_another_one_is_copied_into(self):
        """S2-09: while the copy of one row is under way the slots stay, whatever job
        fails or however the ticket ends; they go when it is over."""
        ticket, resource = make_ticket(row_ids=ROWS), Resource()

        ticket.own(resource)
        assert ticket.guard.begin()
        ticket.begin_work()
        ticket.end(Outcome(OutcomeKind.FAILED, "device"))
        ticket.end_work()
        assert 0 == resource.left
        assert not ticket.copied(ROWS[:1])
        ticket.give_back()
        assert 1 == resource.left

    def test_slots_stay_while_the_device_copies_another_row(self):
        """S2-09: a row whose copy cannot be asked for frees no slot that the device
        still writes into for the row before."""
        plan = FaultPlan(Fault("gather", raising(DeviceError("lost")), nth=2))
        device, store = AsyncDevice(NUM_BLOCKS), MemoryStore(4, LAYOUT.max_block_bytes)
        faulty = FaultDevice(device, plan)
        with running_on(store, faulty) as rig:
            fence = rig.device.lease(None)
            rig.runtime.submit(KEYSPACE_DIGEST, [save(1)], fence, ROWS[:1])
            under_way = device.next_fence()
            rig.runtime.add_rows([1], ROWS[1:], fence)
            assert "device" == rig.settle()[1].reason
            assert 2 == store.stats().reserved_blocks
            under_way.open()
            while store.stats().reserved_blocks:
                rig.runtime.wait_for_notice(0.01)
            assert [1] == rig.told(NoticeKind.RELEASED)


class TestQueue:
    def test_rows_of_one_save_are_one_ticket(self):
        """S1-18: a save counts once against the bounds, however many of its rows wait."""
        queue = DumpQueue(max_tickets=2, max_nbytes=1 << 30)
        first, second = make_ticket(1, row_ids=ROWS), make_ticket(9, row_ids=ROWS)
        for at, row in enumerate(ROWS):
            queue.offer(Item(first, (row,), DoneFence(), at == 0))
        assert (1, first.nbytes) == queue.waiting(SAVE)
        assert Reason.NONE is queue.offer(Item(second, ROWS, DoneFence()))
        while queue.take_nowait(SAVE) is not None:
            pass
        assert (0, 0) == queue.waiting(SAVE)


class TestIntake:
    def test_rows_of_a_ticket_that_is_over_go_nowhere(self):
        """What comes for a ticket that has ended, but was not polled, is passed over."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("reserve", gate))) as rig:
            fence = rig.device.lease(None)
            rig.runtime.submit(KEYSPACE_DIGEST, [save(1)], fence)
            gate.wait_reached()  # the loop is idle
            rig.runtime.submit(KEYSPACE_DIGEST, [save(2, 10)], fence, ROWS[:1])
            rig.runtime.abandon([2], "test")
            rig.runtime._loop._waker.wake = lambda: None
            waited = rig.runtime._pipeline.queue.num_items
            rig.runtime.add_rows([2], ROWS[1:], fence)
            rig.runtime._take_in()
            assert waited >= rig.runtime._pipeline.queue.num_items
            gate.open()

    def test_save_is_given_up_before_the_loop_saw_it(self):
        """A ticket can be given up right after it was submitted."""
        with running() as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST, [save(1)], rig.device.lease(None), ROWS[:1]
            )
            rig.runtime.abandon([1], "test")
            assert {1: "test"} == {n: one.reason for n, one in rig.outcomes().items()}

    def test_giving_up_wakes_the_loop(self):
        """Slots of a save that was given up are free at once, not at the next look."""
        with running() as rig:
            begin_save(rig, 1)
            woken = []
            wake = rig.runtime._loop._waker.wake
            rig.runtime._loop._waker.wake = lambda: (woken.append(1), wake())
            rig.runtime.abandon([1], "test")
            assert [1] == woken

    def test_close_gives_up_rows_that_the_loop_has_not_seen(self):
        """S1-27: a save whose first row was submitted a moment before the end is not
        waited for."""
        with running({"timeout": {"shutdown": 5.0}}) as rig:
            rig.runtime._loop._waker.wake = lambda: None
            rig.runtime.submit(
                KEYSPACE_DIGEST, [save(1)], rig.device.lease(None), ROWS[:1]
            )
            rig.runtime.close()
            assert {"unfinished"} == {one.reason for one in rig.outcomes().values()}


class TestWaits:
    def begun(self, rig, rows):
        """Store two blocks, and begin to load some rows of them."""
        rig.submit(order(1, SAVE, range(2), range(1, 3)))
        rig.settle()
        rig.runtime.submit(KEYSPACE_DIGEST, [load(2)], DoneFence(), rows)

    def test_layer_does_not_wait_for_rows_of_others(self):
        """S4-04: a row that is there is enough for its layer; what was never submitted
        cannot hold it up."""
        with running({"timeout": {"load": 2.0}}) as rig:
            self.begun(rig, ROWS[:1])
            assert [] == rig.runtime.wait_rows([2], ROWS[:1])
            rig.runtime.add_rows([2], ROWS[1:], DoneFence())
            assert [] == rig.runtime.wait_loaded([2])

    def test_layer_goes_on_when_its_row_is_copied(self):
        """S4-04: a layer that waits before its row is copied is woken by the copy."""
        ticket = make_ticket(1, LOAD, row_ids=ROWS)
        waiting, went_on = threading.Event(), []

        def wait():
            waiting.set()
            went_on.append(ticket.wait_copied(ROWS[:1], TIMEOUT))

        thread = threading.Thread(target=wait)
        assert ticket.guard.begin()
        thread.start()
        assert waiting.wait(TIMEOUT)
        while not ticket._changed._awaited:
            waiting.wait(0.001)
        ticket.copied(ROWS[:1])
        thread.join(TIMEOUT / 5)
        assert [True] == went_on

    def test_load_that_was_broken_off_is_waited_for_also_behind_its_notice(self):
        """R-08: a step that breaks off gives its load up and hears of its end while a
        row is still copied: its blocks are not said to be untouched before that ends."""
        device, store = AsyncDevice(NUM_BLOCKS), MemoryStore(4, LAYOUT.max_block_bytes)
        with running_on(store, device, {"timeout": {"stuck": 0.01}}) as rig:
            rig.submit(order(1, SAVE, range(2), range(1, 3)))
            device.next_fence().open()
            rig.settle()
            rig.runtime.submit(KEYSPACE_DIGEST, [load(2)], DoneFence(), ROWS[:1])
            under_way = device.next_fence()
            rig.runtime.abandon([2], "broken_off")
            assert "broken_off" == rig.outcomes()[2].reason
            assert not rig.runtime.quiesce()
            assert 1 == rig.runtime.num_open
            under_way.open()
            assert rig.runtime.wait_loaded([2]) == [2]
            assert rig.runtime.quiesce()
            assert [1, 2] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.runtime.num_open

    def test_load_that_is_not_open_counts_as_failed(self):
        """S4-12: a load that was refused, or of which nobody knows, is not there."""
        with running() as rig:
            rig.runtime._pipeline.queue.refuse(Reason.FAILED)
            rig.runtime.submit(KEYSPACE_DIGEST, [load(2)], DoneFence(), ROWS[:1])
            assert [2, 77] == rig.runtime.wait_rows([2, 77], ROWS[:1])
            assert [2, 77] == rig.runtime.wait_loaded([2, 77])


class TestReasons:
    def test_failed_copy_releases_nothing_before_the_last_word(self):
        """S1-25: a row whose copy could not begin leaves the blocks to the ticket, whose
        end then says why; a sweep that came first could not."""
        store = MemoryStore(4, LAYOUT.max_block_bytes)
        plan = FaultPlan(Fault("gather", raising(DeviceError("lost"))))
        device = FaultDevice(AsyncDevice(NUM_BLOCKS), plan)
        ticket = make_ticket(row_ids=ROWS)
        with store, pytest.raises(DeviceError, match="lost"):
            Gather(store, device).run(Item(ticket, ROWS[:1], DoneFence()))
        assert not ticket.guard.is_released
        assert not ticket.guard.is_copying

    def test_save_torn_under_a_row_says_why(self):
        """S1-25: blocks that were reused under the copy of one row end their save with
        that reason, though its other rows never come."""
        gate = Gate()
        plan = FaultPlan(Fault("gather", gate))
        with running({"timeout": {"fence": 0.02}}, plan) as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST, [save(1)], rig.device.lease(None), ROWS[:1]
            )
            gate.wait_reached()
            rig.runtime.fence([1])
            gate.open()
            assert "recycled" == rig.settle()[1].reason


class TestGuard:
    def test_blocks_are_released_when_the_copies_of_all_rows_are_over(self):
        """S2-09: with two rows under way, the end of the last one to be submitted
        releases nothing while the other is still copied."""
        released = []
        guard = BlockGuard(lambda: released.append(1))
        assert guard.begin()
        assert guard.begin()
        guard.end(last=True)
        assert guard.is_copying
        guard.end(last=True)
        assert [1] == released
