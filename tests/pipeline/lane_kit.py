# SPDX-License-Identifier: Apache-2.0
"""A lane over real copy threads, and stages that do what the test wants."""

import asyncio
import contextlib
import time

import anyio

from tests.pipeline.kit import TIMEOUT, make_ticket
from ucm.devices.events import DoneFence
from ucm.errors import DeviceError
from ucm.pipeline.deadlines import Deadlines
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.items import Item
from ucm.pipeline.lane import RequestLane
from ucm.pipeline.runner import Runner
from ucm.pipeline.stage import STORE_WORKER, Chain, CopyStage, LoopStage
from ucm.pipeline.tickets import Direction, Listener, Outcome, OutcomeKind
from ucm.pipeline.waiting import fence_passed
from ucm.pipeline.workers import CopyThread

DONE = Outcome(OutcomeKind.COMMITTED)


class Wait(LoopStage):
    """Waits for the item's fence."""

    name = "wait"

    async def run(self, given):
        """Let the item pass with its fence."""
        await fence_passed(given.fence)
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


class Passable(Wait):
    """Passes at once behind an event that has passed."""

    def try_now(self, given):
        """Let the item pass if it can."""
        return given if given.fence.is_done() else None


class Pass(CopyStage):
    """Copies all tickets but some."""

    name = "pass"

    def __init__(self, fails=()):
        self.fails = fails

    def run(self, given):
        """Raise or go on to the store."""
        if given.ticket.transfer_id in self.fails:
            raise DeviceError("planned")
        return given


class Work(CopyStage):
    """
    Notes the ticket, or raises what the test planned for it.

    Args:
        plans: By ticket, what to raise.
        gate: Where all stand first; the stage is the store's if there is one.
    """

    name = "work"

    def __init__(self, plans, gate=None):
        self.plans = plans
        self.gate = gate or (lambda: None)
        if gate is not None:
            self.worker = STORE_WORKER

    def run(self, given):
        """Raise or finish."""
        self.gate()
        plan = self.plans.get(given.ticket.transfer_id)
        if plan is not None:
            raise plan
        given.outcome = DONE
        return given


class Lane(Listener):
    """A lane, the deadlines of its tickets, and all that was told."""

    def __init__(self, runner, wait, plans, stages):
        self.settled, self.quarantined, self.left = [], [], []
        self.hung, self.copied, self.tickets = [], [], []
        chain = Chain.start(wait)
        for stage in stages or [Work(plans)]:
            chain = chain.then(stage)
        self.lane = RequestLane(
            make_ticket().lane_key,
            chain.segments(),
            runner,
            on_copied=self.copied.append,
            on_empty=self.left.append,
        )
        self.queue = DumpQueue(max_tickets=99, max_nbytes=1 << 30)
        self.deadlines = Deadlines(
            self.queue, stuck_after=0.01, on_failure=lambda _: None
        )

    @property
    def running(self):
        """The tickets that are in each segment."""
        lane = self.lane
        lines = [item for line in lane._lines.values() for item in line]
        return [
            [
                item.ticket.transfer_id
                for item in lane._items
                if item.at == at and item not in lines
            ]
            for at in range(len(lane._segments))
        ]

    @property
    def hung_now(self):
        """The tickets at which a copy thread stands behind their deadline."""
        (hung,) = [each for each in self.deadlines._hung.values() if each] or [()]
        return [ticket.transfer_id for ticket in hung]

    def ended(self, ticket, outcome):
        """Note a ticket's end."""
        self.settled.append((ticket.transfer_id, outcome))

    def given_up(self, ticket):
        """Note a copy that was given up."""
        self.quarantined.append(ticket.transfer_id)

    def check(self, now):
        """Do what the pipeline does at intervals."""
        self.deadlines.look_through(self.tickets, now)
        self.lane.drop_ended()

    def ticket(self, number=1, **options):
        """Return a ticket whose end is noted."""
        ticket = make_ticket(number, listener=self, **options)
        self.tickets.append(ticket)
        return ticket

    def put(self, number, fence=None, **options):
        """Put an item in; return its ticket."""
        ticket = self.ticket(number, **options)
        self.lane.put_nowait(Item(ticket, ticket.row_ids, fence or DoneFence()))
        return ticket


@contextlib.asynccontextmanager
async def serving(plans=None, wait=None, stages=()):
    """Serve a lane over real copy threads until it is empty."""
    loop = asyncio.get_running_loop()
    copy = {
        name: CopyThread(f"ucm-{name}", lambda _: None) for name in ("copy", "store")
    }
    for thread in copy.values():
        thread.start()
    woken = anyio.Event()

    def wake():
        """Be called on any thread."""
        loop.call_soon_threadsafe(lambda: woken.set())

    async def serve():
        """Do for the lane what the pipeline's task does."""
        nonlocal woken
        while not closing or lane.lane.num_items:
            with anyio.move_on_after(0.002):
                await woken.wait()
            woken = anyio.Event()
            runner.hand_back()
            lane.check(time.monotonic())

    closing = []
    try:
        with anyio.fail_after(TIMEOUT):
            async with asyncio.TaskGroup() as group:
                runner = Runner({Direction.SAVE: copy}, group, wake)
                lane = Lane(runner, wait or Wait(), plans or {}, stages)
                group.create_task(serve())
                yield lane
                closing.append(True)
    finally:
        for thread in copy.values():
            thread.stop()
            assert thread.join(TIMEOUT)
