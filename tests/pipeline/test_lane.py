# SPDX-License-Identifier: Apache-2.0
"""One request's lane: order, places in the window, and errors that end one ticket."""

import time

import anyio
import pytest

from tests.pipeline.kit import TIMEOUT, HandFence, make_ticket
from tests.pipeline.lane_kit import (
    DONE,
    CopyWait,
    Pass,
    Passable,
    Ready,
    Work,
    serving,
)
from tests.rig import keys_of
from ucm.devices.events import DoneFence
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    DeviceError,
    DeviceTimeoutError,
    StoreFullError,
    StoreUnavailableError,
    WorkerDiedError,
)
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.stage import CopyStage
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Gate

pytestmark = pytest.mark.asyncio
(KEY,) = keys_of(1)


class TestOrder:
    async def test_items_pass_in_order(self):
        """A second item that is ready first still comes second."""
        fence = HandFence()
        async with serving() as lane:
            lane.put(1, fence)
            lane.put(2)
            await anyio.lowlevel.checkpoint()
            assert [] == lane.settled
            fence.open()
        assert [(1, DONE), (2, DONE)] == lane.settled
        assert [lane.lane.key] == lane.left

    async def test_item_needs_no_place_behind_its_copy(self):
        """R-11: an item frees its place in the window once, with its copy, and all that
        are copied are with the store's thread at once, however many."""
        gate = Gate()
        stages = (Pass(), Work({}, gate))
        async with serving(wait=Ready(), stages=stages) as lane:
            for number in range(1, 9):
                lane.put(number)
            while len(lane.copied) < 8:
                await anyio.lowlevel.checkpoint()
            assert [[], [], list(range(1, 9))] == lane.running
            assert [] == lane.settled
            gate.open()
        assert list(range(1, 9)) == [number for number, _ in lane.settled]
        assert [Direction.SAVE] * 8 == lane.copied

    async def test_item_that_fails_frees_its_place_once(self):
        """R-11: whatever ends an item before or behind its copy, the window has its
        place back, and no more than that."""
        stages = (Pass({2}), Work({3: ValueError("a bug")}, lambda: None))
        async with serving(stages=stages) as lane:
            for number in range(1, 4):
                lane.put(number)
            lane.put(4, HandFence(), lasts=0.01)
        assert 4 == len(lane.copied)
        assert 0 == lane.lane.num_items
        assert {1, 2, 3, 4} == {number for number, _ in lane.settled}

    async def test_long_line_of_items_is_let_in_without_end(self):
        """However many items a window lets in, one event that lets all of them pass does
        not exhaust the stack."""
        fence = HandFence()
        async with serving(wait=Passable()) as lane:
            for number in range(1, 501):
                lane.put(number, fence)
            fence.open()
        assert 500 == len(lane.settled)

    async def test_item_that_waits_for_nothing_needs_no_task(self):
        """A segment whose stage has nothing to wait for is over at once: the item is
        with the copy thread when it is put in."""
        async with serving(wait=Ready()) as lane:
            lane.put(1)
            assert [[], [1]] == lane.running
        assert [(1, DONE)] == lane.settled

    async def test_copy_thread_has_the_next_items_before_it_is_through(self):
        """R-12: a copy thread need not stand still until the loop has taken back what it
        has done, nor work on what came later: all that is let in is with it by then."""
        async with serving(wait=Ready()) as lane:
            for number in (1, 2, 3):
                lane.put(number)
            assert [[], [1, 2, 3]] == lane.running
        assert [(1, DONE), (2, DONE), (3, DONE)] == lane.settled

    async def test_one_item_at_a_time_waits(self):
        """What waits on the loop is one item of a lane; the others stand behind it."""
        fence = HandFence()
        async with serving() as lane:
            lane.put(1, fence)
            lane.put(2)
            assert [[1], []] == lane.running
            fence.open()
        assert [(1, DONE), (2, DONE)] == lane.settled


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "kind", "reason", "bad_key"),
        [
            (BlockCorruptError(KEY, "x"), OutcomeKind.FAILED, "corrupt", KEY),
            (BlockNotFoundError(KEY), OutcomeKind.FAILED, "evicted", KEY),
            (StoreUnavailableError("x"), OutcomeKind.FAILED, "unavailable", b""),
            (DeviceTimeoutError("x"), OutcomeKind.FAILED, "device", b""),
            (WorkerDiedError("x"), OutcomeKind.FAILED, "worker_died", b""),
            (ValueError("a bug"), OutcomeKind.FAILED, "error", b""),
            (StoreFullError("x"), OutcomeKind.REFUSED, "store_full", b""),
            (TicketOverError(Reason.RECYCLED), OutcomeKind.CANCELLED, "recycled", b""),
            (TicketOverError(Reason.OVER), OutcomeKind.CANCELLED, "over", b""),
        ],
        ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
    )
    async def test_error_ends_one_ticket_with_its_reason(
        self, error, kind, reason, bad_key
    ):
        """S4-12: whatever a stage raises ends its ticket under a fixed word, blames
        the block if one is known, and the lane goes on."""
        async with serving({1: error}) as lane:
            lane.put(1)
            lane.put(2)
        (_, outcome), second = lane.settled
        assert (kind, reason, bad_key) == (
            outcome.kind,
            outcome.reason,
            outcome.bad_key,
        )
        assert (2, DONE) == second

    async def test_failure_names_stage_transfer_and_cause(self):
        """The text of a failed outcome says where and why."""
        async with serving({7: StoreUnavailableError("gone")}) as lane:
            lane.put(7)
        ((_, outcome),) = lane.settled
        assert "stage work failed for transfer 7" in outcome.error
        assert "StoreUnavailableError('gone')" in outcome.error

    async def test_row_behind_one_that_failed_goes_no_further(self):
        """R-20: a row's job fails on the copy thread while the next row stands behind it:
        that one finds its ticket over, whose reason is that of the first."""
        gate = Gate()
        ran = []

        def fail_first():
            ran.append(None)
            gate()
            raise StoreUnavailableError("gone")

        stages = [Work({}, fail_first)]
        async with serving(wait=Ready(), stages=stages) as lane:
            ticket = lane.ticket(7, row_ids=(0, 1))
            for row in ticket.row_ids:
                lane.lane.put_nowait(Item(ticket, (row,), DoneFence()))
            gate.open()
        ((_, outcome),) = lane.settled
        assert (OutcomeKind.FAILED, "unavailable") == (outcome.kind, outcome.reason)
        assert "StoreUnavailableError('gone')" in outcome.error
        assert 1 == len(ran)

    async def test_settled_ticket_is_passed_over(self):
        """A ticket that ended while it waited runs no further stage."""
        fence = HandFence()
        async with serving({1: AssertionError("it ran")}) as lane:
            ticket = lane.put(1, fence)
            await anyio.lowlevel.checkpoint()
            ticket.end(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            fence.open()
        assert ["shutdown"] == [outcome.reason for _, outcome in lane.settled]
        assert 1 == len(lane.left)

    async def test_settled_item_is_not_even_waited_for(self):
        """A ticket that is settled leaves its lane although its event never passes."""
        async with serving() as lane:
            ticket = lane.ticket()
            ticket.end(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            lane.lane.put_nowait(Item(ticket, (), HandFence()))
            assert 1 == len(lane.left)

    async def test_item_whose_ticket_ends_meanwhile_leaves_at_the_next_look(self):
        """R-11: an event that never passes holds no place for a ticket that is over, and
        what stands behind it goes on."""
        async with serving() as lane:
            ticket = lane.put(1, HandFence())
            lane.put(2)
            ticket.end(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            lane.check(time.monotonic())
            assert [Direction.SAVE] == lane.copied
        assert [1, 2] == [number for number, _ in lane.settled]

    async def test_items_of_ended_tickets_leave_once(self):
        """Several that end together leave together, also those that get the place of the
        one before."""
        async with serving() as lane:
            tickets = [lane.put(number, HandFence()) for number in range(1, 4)]
            for ticket in tickets:
                ticket.end(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            lane.lane.drop_ended()
            assert 0 == lane.lane.num_items
        assert 3 == len(lane.copied)

    async def test_begun_copy_of_a_settled_item_is_waited_for(self):
        """Whatever was said of a ticket: its item stays as long as its copy may write."""
        fence = HandFence()
        async with serving(wait=CopyWait()) as lane:
            ticket = lane.ticket()
            ticket.guard.begin()
            ticket.end(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            item = Item(ticket, (), fence)
            item.copy = fence
            lane.lane.put_nowait(item)
            lane.check(time.monotonic())
            left = list(lane.left)
            fence.open()
            ticket.guard.end()
        assert [] == left
        assert 1 == len(lane.left)

    async def test_copy_of_an_item_that_failed_beside_it_is_waited_for(self):
        """Who verifies beside a copy may fail: the copy still writes, and is waited for."""
        fence = HandFence()

        class Beside(CopyStage):
            name = "beside"

            def run(self, given):
                """Fail under the copy."""
                raise DeviceError("planned")

        async with serving(wait=Beside(), stages=[CopyWait()]) as lane:
            ticket = lane.ticket()
            ticket.guard.begin()
            item = Item(ticket, (), fence)
            item.copy = fence
            lane.lane.put_nowait(item)
            with anyio.fail_after(TIMEOUT):
                while not (item.has_failed and item.at == 1):  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            left = list(lane.left)
            fence.open()
            ticket.guard.end()
        assert [] == left
        assert 1 == len(lane.left)


class TestHung:
    async def test_what_waits_ends_and_what_is_worked_on_does_not(self):
        """R-14: behind a copy thread that hangs items end at once; the one at which it
        stands is told of, and ends at its own deadline."""
        gate = Gate()
        async with serving(wait=Ready(), stages=[Work({}, gate)]) as lane:
            tickets = [lane.put(number, lasts=60.0 + number) for number in (1, 2)]
            while not gate.reached.is_set():
                await anyio.lowlevel.checkpoint()
            lane.check(time.monotonic())
            assert ([], []) == (lane.hung_now, lane.settled)
            lane.check(tickets[0].deadline + 0.1)
            assert [1] == lane.hung_now
            late = Outcome(OutcomeKind.CANCELLED, "deadline")
            hung = Outcome(OutcomeKind.CANCELLED, "store_hung")
            lane.check(tickets[0].deadline + 0.1)
            assert [(1, late), (2, hung)] == lane.settled
            assert Reason.STORE_HUNG is lane.queue.refusal_of(tickets[0])
            gate.open()
            while lane.hung_now:
                lane.deadlines.look_at_hung()
                await anyio.lowlevel.checkpoint()
            assert Reason.NONE is lane.queue.refusal_of(tickets[0])

    async def test_begun_copy_goes_on(self):
        """R-14: what the device copies already does not wait for the copy thread: it is
        neither ended nor torn."""
        fence = HandFence()
        async with serving(wait=CopyWait()) as lane:
            ticket = lane.put(1, fence)
            assert ticket.guard.begin()
            lane.deadlines._hung[Direction.SAVE].add(make_ticket(9))
            lane.check(time.monotonic())
            assert "" == ticket.guard.torn
            lane.deadlines._hung[Direction.SAVE].clear()
            fence.open()
            ticket.guard.end()
        assert [(1, DONE)] == lane.settled


class TestDeadline:
    async def test_ticket_past_its_deadline_gives_its_blocks_back(self):
        """An item whose fence does not pass in time is cancelled, nothing is held."""
        async with serving() as lane:
            ticket = lane.put(1, HandFence(), lasts=0.01)
        assert [(1, Outcome(OutcomeKind.CANCELLED, "deadline"))] == lane.settled
        assert ticket.guard.is_released
        assert [] == lane.quarantined

    async def test_item_given_up_lets_the_next_one_in(self):
        """What stands behind an item whose time is over takes its place, and the lane
        is empty in the end."""
        async with serving() as lane:
            ticket = lane.put(1, HandFence())
            lane.put(2, lasts=120.0)
            lane.check(ticket.deadline + 1.0)
            with anyio.move_on_after(TIMEOUT / 2):
                while lane.lane.num_items:
                    await anyio.lowlevel.checkpoint()
            left = lane.lane.num_items
            lane.lane._items.clear()
        assert 0 == left
        assert [1, 2] == [number for number, _ in lane.settled]

    async def test_item_that_comes_too_late_is_not_begun(self):
        """No stage is run for a ticket whose time is over when it gets there."""
        async with serving({1: AssertionError("it ran")}) as lane:
            ticket = lane.put(1, lasts=-1)
            assert ticket.guard.is_released
        assert [(1, Outcome(OutcomeKind.CANCELLED, "deadline"))] == lane.settled

    async def test_begun_copy_is_waited_for_beyond_the_deadline(self):
        """A copy under way is given its own time; its ticket is marked torn."""
        fence = HandFence()
        async with serving(wait=CopyWait()) as lane:
            ticket = lane.put(1, fence)
            lane.deadlines._stuck_after = TIMEOUT
            assert ticket.guard.begin()
            ticket.deadline = time.monotonic()
            while not ticket.guard.torn:
                await anyio.lowlevel.checkpoint()
            assert [] == lane.quarantined
            assert [] == lane.left
            assert not ticket.guard.is_released
            fence.open()
            ticket.guard.end()
        assert [] == lane.quarantined
        assert "deadline" == ticket.guard.torn

    async def test_copy_that_overruns_everything_is_quarantined(self):
        """A copy that ends neither in its ticket's time nor in its own is given up."""
        async with serving(wait=CopyWait()) as lane:
            ticket = lane.put(1, HandFence())
            assert ticket.guard.begin()
            ticket.deadline = time.monotonic()
        assert [1] == lane.quarantined

    async def test_copy_is_looked_at_before_it_is_given_up(self):
        """A copy that ended while the loop was held up is not taken for a stuck one,
        however late the loop comes back."""
        fence = HandFence()
        async with serving(wait=CopyWait()) as lane:
            ticket = lane.put(1, fence)
            assert ticket.guard.begin()
            lane.check(ticket.deadline + TIMEOUT)
            assert [] == lane.quarantined
            fence.open()
            ticket.guard.end()
        assert [] == lane.quarantined

    async def test_copy_whose_fence_fails_is_quarantined(self):
        """When nobody can tell any more whether a copy is over, its blocks are not
        given back."""

        class Broken(HandFence):
            def is_done(self):
                raise DeviceError("the device is gone")

        async with serving(wait=CopyWait()) as lane:
            ticket = lane.put(1, Broken())
            assert ticket.guard.begin()
        assert [1] == lane.quarantined
        assert not ticket.guard.is_released
        assert ["stuck"] == [outcome.reason for _, outcome in lane.settled]
