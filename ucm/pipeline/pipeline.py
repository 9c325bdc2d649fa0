# SPDX-License-Identifier: Apache-2.0
"""
The pipeline: queue, lanes and copy threads put together on one event loop.

Threading: ``run`` and everything it calls stay on the loop thread. ``offer`` and
``promote`` come from the engine's thread and only touch the queue, which has its own
lock. Notices for the engine go through the mailbox, once each: *released* (or
*quarantined*), and *settled*; while a copy is under way the latter may come first.
"""

import asyncio
import enum
import logging
import math
from collections.abc import Callable, Sequence

import anyio
import anyio.abc
import attrs

from ucm.config import QueueConfig, TimeoutConfig
from ucm.devices.abc import Device
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.lane import RequestLane
from ucm.pipeline.load import load_chain
from ucm.pipeline.save import save_chain
from ucm.pipeline.stage import CopyStage
from ucm.pipeline.tickets import (
    Admission,
    Direction,
    Item,
    LaneKey,
    Outcome,
    OutcomeKind,
    Ticket,
)
from ucm.pipeline.workers import CopyThread
from ucm.stores.abc import Store
from ucm.threads import SYSTEM, Threads
from ucm.tracing import (
    HOLD_QUARANTINED,
    SOURCE_RELEASED,
    TICKET_ACCEPTED,
    TICKET_REFUSED,
    TICKET_SETTLED,
    Log,
)

__all__ = ["Notice", "NoticeKind", "Pipeline", "Recorder"]

_LANE_DEPTH = 2
_SWEEP_S = 0.05


class NoticeKind(enum.Enum):
    """What a notice tells."""

    RELEASED = "released"
    QUARANTINED = "quarantined"
    SETTLED = "settled"


@attrs.frozen
class Notice:
    """
    One message to the engine's thread.

    Args:
        kind: What it tells.
        ticket: Whose.
        outcome: With ``SETTLED``, the last word.
    """

    kind: NoticeKind
    ticket: Ticket
    outcome: Outcome | None = None


class Recorder:
    """
    Tells the world what becomes of tickets: counters, log, notices.

    Used from every thread; its parts are safe for that.
    """

    def __init__(self, counters: Counters, mailbox: Mailbox[Notice], log: Log) -> None:
        self.counters = counters
        self._mailbox = mailbox
        self._log = log

    def offered(self, tickets: Sequence[Ticket]) -> None:
        """Count what is about to be offered in one go."""
        for direction in Direction:
            mine = [ticket for ticket in tickets if ticket.direction is direction]
            blocks = sum(len(ticket.span) for ticket in mine)
            nbytes = sum(ticket.nbytes for ticket in mine)
            name = direction.value
            self.counters.add("ucm_offered_blocks_total", blocks, direction=name)
            self.counters.add("ucm_offered_bytes_total", nbytes, direction=name)

    def admitted(self, ticket: Ticket, admission: Admission, queue: DumpQueue) -> None:
        """Log what became of an offer; a refusal is the ticket's end."""
        told = {
            "blocks": len(ticket.span),
            "nbytes": ticket.nbytes,
            "queue_tickets": queue.num_tickets,
            "queue_nbytes": queue.nbytes,
        }
        if admission is not Admission.ACCEPTED:
            ticket.log.info(TICKET_REFUSED, **told, reason=admission.value)
            self.settle(ticket, Outcome(OutcomeKind.REFUSED, admission.value))
        elif self._log.is_enabled_for(logging.DEBUG):
            ticket.log.debug(TICKET_ACCEPTED, **told)

    def released(self, ticket: Ticket) -> None:
        """Tell that the engine may reuse the blocks."""
        held = ticket.released_at - ticket.accepted_at
        if ticket.direction is Direction.SAVE:
            self.counters.observe("ucm_hold_duration_seconds", held)
        self._mailbox.put(Notice(NoticeKind.RELEASED, ticket))
        ticket.log.debug(SOURCE_RELEASED, elapsed_s=held)

    def quarantined(self, ticket: Ticket) -> None:
        """Tell that a device copy never ended."""
        self._mailbox.put(Notice(NoticeKind.QUARANTINED, ticket))
        self.counters.add("ucm_quarantined_holds_total", 1)
        ticket.log.error(HOLD_QUARANTINED, blocks=len(ticket.span))

    def settle(self, ticket: Ticket, outcome: Outcome) -> bool:
        """Give a ticket its last word, once; False when it had one."""
        if not ticket.settle(outcome):
            return False
        ticket.guard.revoke(outcome.reason or "settled")
        # First of all: whatever goes wrong below, the engine must hear of it.
        self._mailbox.put(Notice(NoticeKind.SETTLED, ticket, outcome))
        try:
            self._count(ticket, outcome)
            self._write_line(ticket, outcome)
        finally:
            ticket.mark_told()
        return True

    def _write_line(self, ticket: Ticket, outcome: Outcome) -> None:
        """Write the one canonical line of a ticket."""
        stages = ticket.stage_seconds.copy()  # a copy job may still add to it
        seconds = {f"{name}_s": round(spent, 6) for name, spent in stages.items()}
        ticket.log.info(
            TICKET_SETTLED,
            outcome=outcome.kind.value,
            reason=outcome.reason,
            torn=ticket.guard.torn,
            error=outcome.error,
            blocks=len(ticket.span),
            committed=outcome.committed,
            skipped=outcome.skipped,
            nbytes=ticket.nbytes,
            total_s=round(ticket.clock() - ticket.accepted_at, 6),
            **seconds,
        )

    def _count(self, ticket: Ticket, outcome: Outcome) -> None:
        direction = ticket.direction.value
        rest = len(ticket.span) - outcome.committed - outcome.skipped
        ends = (
            (OutcomeKind.COMMITTED.value, "", outcome.committed),
            (OutcomeKind.SKIPPED.value, "stored", outcome.skipped),
            (outcome.kind.value, outcome.reason, rest),
        )
        add = self.counters.add
        for kind, reason, blocks in ends:
            labels = {"direction": direction, "outcome": kind, "reason": reason}
            add("ucm_settled_blocks_total", blocks, **labels)
            add("ucm_settled_bytes_total", blocks * ticket.block_bytes, **labels)
        elapsed = ticket.clock() - ticket.accepted_at
        if ticket.direction is Direction.SAVE:
            add("ucm_saved_blocks_total", outcome.committed)
            self.counters.observe("ucm_save_duration_seconds", elapsed)
            return
        add("ucm_loaded_blocks_total", outcome.committed)
        self.counters.observe("ucm_load_duration_seconds", elapsed)
        if outcome.kind is not OutcomeKind.COMMITTED:
            add("ucm_load_failures_total", 1, reason=outcome.reason or "error")


class Pipeline:
    """
    Saves and loads what the queue accepts.

    Args:
        store: Where blocks go; the caller's.
        device: Where blocks come from; the caller's, registered.
        queue: Bounds.
        timeout: Deadlines.
        recorder: Told of everything.
        on_failure: Called once when a copy thread has died or is stuck; any thread.
        take_in: Called on the loop before the queue is looked at; offers what is new.
        threads: Where the clock, threads and locks come from.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        *,
        queue: QueueConfig,
        timeout: TimeoutConfig,
        recorder: Recorder,
        on_failure: Callable[[str], None],
        take_in: Callable[[], None],
        threads: Threads = SYSTEM,
    ) -> None:
        self.queue = DumpQueue(
            max_tickets=queue.tickets, max_nbytes=queue.nbytes, threads=threads
        )
        self.recorder = recorder
        self._segments = {
            Direction.SAVE: save_chain(store, device).segments(),
            Direction.LOAD: load_chain(store, device).segments(),
        }
        self._window = queue.window
        self._stuck_after = timeout.stuck
        self._on_failure = on_failure
        self._take_in = take_in
        self._threads = threads
        self._lanes: dict[LaneKey, RequestLane] = {}
        self._in_flight = dict.fromkeys(Direction, 0)
        self._copy: dict[Direction, dict[str, CopyThread]] = {}
        self._group: anyio.abc.TaskGroup | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._next_sweep = 0.0
        self.has_quarantined = False
        """Whether the device may still use slots of the store."""

    @property
    def num_in_flight(self) -> int:
        """Items that are in a lane."""
        return sum(self._in_flight.values())

    def wake(self) -> None:
        """Look at the queue again. Loop thread only."""
        self._wake.set()

    def stop(self) -> None:
        """End ``run`` once queue and lanes are empty. Loop thread only."""
        self._stopping = True
        self._wake.set()

    def cancel_waiting(self, reason: str) -> None:
        """Settle everything that has not reached a copy. Loop thread only."""
        for item in self.queue.close():
            self.recorder.settle(item.ticket, Outcome(OutcomeKind.CANCELLED, reason))

    async def run(self, on_started: Callable[[], None]) -> None:
        """Serve until stopped and empty; the loop thread's main task."""
        loop = asyncio.get_running_loop()
        for direction, segments in self._segments.items():
            workers = {segment.worker for segment in segments if segment.is_copy}
            self._copy[direction] = {
                worker: CopyThread(
                    f"ucm-{direction.value}-{worker}",
                    loop,
                    self._on_failure,
                    self._threads,
                )
                for worker in sorted(workers)
            }
        for thread in self._copy_threads():
            thread.start()
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                on_started()
                while not (self._stopping and self._is_empty()):
                    await self._serve_queue()
        finally:
            for thread in self._copy_threads():
                thread.stop()
                thread.close()

    def join_threads(self, timeout: float) -> bool:
        """Block until the copy threads have ended; any thread but the loop's."""
        clock = self._threads.monotonic
        limit = clock() + timeout
        return all(
            thread.join(max(0.0, limit - clock())) for thread in self._copy_threads()
        )

    def _copy_threads(self) -> list[CopyThread]:
        return [
            thread for threads in self._copy.values() for thread in threads.values()
        ]

    def _is_empty(self) -> bool:
        return not self._lanes and not self.queue.num_tickets

    async def _serve_queue(self) -> None:
        """Move what can be moved into lanes, then wait for the next reason to look."""
        self._wake.clear()
        self._take_in()
        for direction in (Direction.LOAD, Direction.SAVE):
            self._fill_lanes(direction)
        if self._stopping and self._is_empty():
            return
        pause = _SWEEP_S if self.queue.num_tickets else math.inf
        with anyio.move_on_after(pause):
            await self._wake.wait()
        now = self._threads.monotonic()
        if now >= self._next_sweep:  # looks at all that waits: not at each wake-up
            self._next_sweep = now + _SWEEP_S
            self._sweep()

    def _fill_lanes(self, direction: Direction) -> None:
        while self._in_flight[direction] < self._window:
            item = self.queue.take_nowait(direction, self._has_room)
            if item is None:
                return
            if not self._settle_if_over(item):
                self._in_flight[direction] += 1
                self._lane(item.ticket.lane_key).put_nowait(item)

    def _has_room(self, key: LaneKey) -> bool:
        lane = self._lanes.get(key)
        return lane is None or lane.has_room

    def _lane(self, key: LaneKey) -> RequestLane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = RequestLane(
                key,
                self._segments[key[0]],
                self._copy[key[0]],
                depth=_LANE_DEPTH,
                stuck_after=self._stuck_after,
                settle=self._settle,
                quarantine=self._quarantine,
                on_left=self._left,
            )
            assert self._group is not None  # lanes exist only while run() does
            self._group.start_soon(lane.run)
        return lane

    def _left(self, lane: RequestLane, ticket: Ticket) -> None:
        """
        Free the window; a lane without items ends.

        A ticket that was settled from outside, while a copy was waited for, gives its
        slots back now that nothing writes to them any more.
        """
        self._unwind_settled(ticket)
        self._in_flight[lane.key[0]] -= 1
        if not lane.num_items:
            del self._lanes[lane.key]
            lane.close()
        self._wake.set()

    def _settle(self, ticket: Ticket, outcome: Outcome) -> None:
        if self.recorder.settle(ticket, outcome):
            self._unwind_settled(ticket)

    def _unwind_settled(self, ticket: Ticket) -> None:
        """Give slots back, except those into which a copy given up may still write."""
        over = ticket.outcome is not None and not ticket.guard.is_quarantined
        if over and ticket.owns_resources:
            # Where slots are reserved: the next save finds them given back.
            copy = self._copy[ticket.direction][CopyStage.worker]
            copy.post(Ticket.unwind, ticket)

    def _quarantine(self, ticket: Ticket) -> None:
        if ticket.direction is Direction.SAVE:
            if not ticket.guard.quarantine():
                self._settle(ticket, Outcome(OutcomeKind.CANCELLED, "deadline"))
                return
            self.recorder.quarantined(ticket)
        self.has_quarantined = True
        # A load stays in its guard: should the copy end after all, its request is told.
        self._settle(ticket, Outcome(OutcomeKind.FAILED, "stuck"))
        self._on_failure(f"a device copy of transfer {ticket.transfer_id} is stuck")

    def _sweep(self) -> None:
        """Settle waiting tickets that were taken back or are past their deadline."""
        now = self._threads.monotonic()

        def is_over(item: Item) -> bool:
            return item.ticket.guard.is_released or now > item.ticket.deadline

        for item in self.queue.sweep(is_over):
            self._settle_if_over(item)

    def _settle_if_over(self, item: Item) -> bool:
        ticket = item.ticket
        if not ticket.guard.is_released and ticket.clock() <= ticket.deadline:
            return ticket.outcome is not None
        ticket.guard.revoke("deadline")
        reason = ticket.guard.revoked or "over"
        self._settle(ticket, Outcome(OutcomeKind.CANCELLED, reason))
        return True
