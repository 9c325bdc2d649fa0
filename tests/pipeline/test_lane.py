# SPDX-License-Identifier: Apache-2.0
"""One request's lane: order, depth, and errors that end one ticket only."""

import asyncio
import contextlib
import time

import anyio
import pytest

from tests.pipeline.kit import TIMEOUT, HandFence, make_item, make_ticket
from tests.rig import keys_of
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
from ucm.pipeline.lane import RequestLane
from ucm.pipeline.runner import Runner
from ucm.pipeline.save import Finished
from ucm.pipeline.stage import Chain, CopyStage, LoopStage
from ucm.pipeline.tickets import (
    Direction,
    Item,
    Outcome,
    OutcomeKind,
)
from ucm.pipeline.waiting import fence_passed
from ucm.pipeline.workers import CopyThread
from ucm.reasons import Reason

pytestmark = pytest.mark.asyncio
DONE = Outcome(OutcomeKind.COMMITTED)
(KEY,) = keys_of(1)


class Wait(LoopStage):
    """Waits for the item's fence."""

    name = "wait"

    async def run(self, given):
        """Let the item pass with its fence."""
        await fence_passed(given.item.fence)
        return given


class CopyWait(Wait):
    """Waits for a copy that has begun."""

    awaits_copy = True


class Ready(Wait):
    """Has nothing to wait for."""

    def try_now(self, given):
        """Let the item pass."""
        return given

    async def run(self, given):
        """Never be asked."""
        raise AssertionError("it was waited for")


class Work(CopyStage):
    """Notes the ticket, or raises what the test planned for it."""

    name = "work"

    def __init__(self, plans):
        self.plans = plans

    def run(self, given):
        """Raise or finish."""
        plan = self.plans.get(given.ticket.transfer_id)
        if plan is not None:
            raise plan
        return Finished(given.ticket, given.row_ids, DONE)


class Lane:
    """A lane, and all that it told."""

    def __init__(self, runner, wait, plans, depth):
        self.settled, self.quarantined, self.left = [], [], []
        chain = Chain.start(wait).then(Work(plans))
        self.lane = RequestLane(
            make_ticket().lane_key,
            chain.segments(),
            runner,
            depth=depth,
            stuck_after=0.01,
            settle=self.settle,
            quarantine=lambda ticket: self.quarantined.append(ticket.transfer_id),
            on_left=lambda lane, _: self.left.append(lane.num_items),
        )

    @property
    def running(self):
        """The tickets that are in each segment."""
        return [[run.ticket.transfer_id for run in runs] for runs in self.lane._running]

    def settle(self, ticket, outcome):
        """Note a ticket's end and settle it."""
        if ticket.settle(outcome):
            self.settled.append((ticket.transfer_id, outcome))

    def put(self, number, fence=None, **options):
        """Put an item in; return its ticket."""
        ticket = make_ticket(number, **options)
        item = make_item(ticket)
        if fence is not None:
            item = type(item)(ticket, item.row_ids, fence)
        self.lane.put_nowait(item)
        return ticket


@contextlib.asynccontextmanager
async def serving(plans=None, wait=None, depth=2):
    """Serve a lane over a real copy thread until it is empty."""
    copy = CopyThread("ucm-test", asyncio.get_running_loop(), lambda _: None)
    copy.start()
    woken = anyio.Event()

    async def serve():
        """Do for the lane what the pipeline's task does."""
        nonlocal woken
        while not closing or lane.lane.num_items:
            with anyio.move_on_after(0.002):
                await woken.wait()
            woken = anyio.Event()
            runner.hand_back()
            lane.lane.check(time.monotonic())

    closing = []
    try:
        with anyio.fail_after(TIMEOUT):
            async with anyio.create_task_group() as group:
                runner = Runner(
                    {Direction.SAVE: {"copy": copy}}, group, lambda: woken.set()
                )
                lane = Lane(runner, wait or Wait(), plans or {}, depth)
                group.start_soon(serve)
                yield lane
                closing.append(True)
    finally:
        copy.stop()
        assert copy.join(TIMEOUT)


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
        assert [1, 0] == lane.left

    async def test_lane_is_bounded_by_its_depth(self):
        """A lane has room until its depth is reached, and again when an item left."""
        fence = HandFence()
        async with serving() as lane:
            assert lane.lane.has_room
            lane.put(1, fence)
            assert lane.lane.has_room
            lane.put(2, fence)
            assert not lane.lane.has_room
            with pytest.raises(AssertionError):
                lane.put(3)
            fence.open()
        assert 0 == lane.lane.num_items
        assert lane.lane.has_room

    async def test_item_that_waits_for_nothing_needs_no_task(self):
        """A segment whose stage has nothing to wait for is over at once: the item is
        with the copy thread when it is put in."""
        async with serving(wait=Ready()) as lane:
            lane.put(1)
            assert [[], [1]] == lane.running
        assert [(1, DONE)] == lane.settled

    async def test_copy_thread_has_the_next_item_before_it_is_through(self):
        """A copy thread need not stand still until the loop has taken back what it has
        done: the lane's next item is with it by then, and no third one."""
        async with serving(wait=Ready(), depth=3) as lane:
            for number in (1, 2, 3):
                lane.put(number)
            assert [[], [1, 2]] == lane.running
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

    async def test_settled_ticket_is_passed_over(self):
        """A ticket that ended while it waited runs no further stage."""
        fence = HandFence()
        async with serving({1: AssertionError("it ran")}) as lane:
            ticket = lane.put(1, fence)
            await anyio.lowlevel.checkpoint()
            ticket.settle(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            fence.open()
        assert [] == lane.settled
        assert [0] == lane.left

    async def test_settled_item_is_not_even_waited_for(self):
        """A ticket that is settled leaves its lane although its event never passes."""
        async with serving() as lane:
            ticket = make_ticket()
            ticket.settle(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            lane.lane.put_nowait(Item(ticket, (), HandFence()))
            assert [0] == lane.left
            ticket.guard.revoke("shutdown")

    async def test_begun_copy_of_a_settled_item_is_waited_for(self):
        """Whatever was said of a ticket: its item stays as long as its copy may write."""
        fence = HandFence()
        async with serving(wait=CopyWait()) as lane:
            ticket = make_ticket()
            ticket.guard.begin()
            ticket.settle(Outcome(OutcomeKind.CANCELLED, "shutdown"))
            lane.lane.put_nowait(Item(ticket, (), fence))
            left = list(lane.left)
            fence.open()
            ticket.guard.end()
        assert [] == left
        assert [0] == lane.left


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
            lane.put(2)
            lane.lane.check(ticket.deadline + 1.0)
            assert [1] == lane.left
            with anyio.move_on_after(1.0):
                while len(lane.left) < 2:
                    await anyio.lowlevel.checkpoint()
            left, lane.lane.num_items = lane.left, 0
        assert [1, 0] == left
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
            lane.lane._stuck_after = TIMEOUT
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
            lane.lane.check(ticket.deadline + TIMEOUT)
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
        assert ["device"] == [outcome.reason for _, outcome in lane.settled]
