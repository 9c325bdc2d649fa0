# SPDX-License-Identifier: Apache-2.0
"""
One request's way through a chain.

A copy thread is given items at once, so that it does not stand still until the loop has
taken back the one before, and works on the items of all lanes in the order in which they
come. Other segments have one item of a lane at a time, and a line in front of them. What
is behind the device's copy holds none of the engine's blocks and leaves the window. Items
of a lane pass each stage in order; lanes do not know each other. A lane lives while it
has items.

All of it runs on the loop thread, in the pipeline's one task.
"""

import itertools
from collections import deque
from collections.abc import Callable

from ucm.errors import StageFailedError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.outcomes import Outcome, OutcomeKind, outcome_of
from ucm.pipeline.runner import Run, Runner
from ucm.pipeline.save import Finished, Queued
from ucm.pipeline.stage import Carrier, Segment, stage_of
from ucm.pipeline.tickets import Direction, Item, LaneKey, Ticket
from ucm.reasons import Reason
from ucm.tracing import STAGE_FAILED

__all__ = ["RequestLane"]

_TOO_LATE = Outcome(OutcomeKind.CANCELLED, Reason.DEADLINE)


class RequestLane:
    """
    One request's items on their way.

    Args:
        key: Direction, request and life.
        segments: Of the chain.
        runner: Runs them.
        stuck_after: Seconds that a device copy may overrun its ticket's deadline.
        settle: Called with each ticket that ends.
        quarantine: Called with a ticket whose device copy never ended.
        on_hung: Called with a ticket at which a copy thread stands behind its deadline.
        on_copied: Called with the direction of each item that needs the engine's
            blocks no more.
        on_left: Called with the ticket of each item that leaves the lane.
    """

    def __init__(
        self,
        key: LaneKey,
        segments: tuple[Segment, ...],
        runner: Runner,
        *,
        stuck_after: float,
        settle: Callable[[Ticket, Outcome], None],
        quarantine: Callable[[Ticket], None],
        on_hung: Callable[[Ticket], None],
        on_copied: Callable[[Direction], None],
        on_left: Callable[["RequestLane", Ticket], None],
    ) -> None:
        self.key = key
        self.num_items = 0
        self._segments = segments
        self._runner = runner
        self._stuck_after = stuck_after
        self._settle = settle
        self._quarantine = quarantine
        self._on_hung = on_hung
        self._on_copied = on_copied
        self._on_left = on_left
        behind = [at for at, each in enumerate(segments) if each.is_behind_copy]
        self._behind_copy = min(behind, default=len(segments))
        # Never longer than the window: what is behind the copy does not wait.
        self._waiting: list[deque[Run]] = [deque() for _ in segments]
        self._running: list[dict[Run, None]] = [{} for _ in segments]

    def put_nowait(self, item: Item) -> None:
        """Let an item in."""
        self.num_items += 1
        self._arrive(0, Queued(item.ticket, item.row_ids, item))

    def check(self, now: float, *, is_hung: bool = False) -> None:
        """
        End what is past its ticket's deadline, but no copy that has begun.

        Until a copy is over its blocks cannot be given back; one that overruns
        ``stuck_after`` too, all its segments together, is quarantined. It was seen to
        be late before: a loop that was held up looks at its fence first.

        Args:
            now: On the tickets' clock.
            is_hung: A copy thread of the direction does not get on; what stands behind
                it ends as well.
        """
        for run in self._all_runs():
            if run.is_over or run.is_given_up:
                continue  # it is about to be handed back, or ended with one before it
            ticket = run.ticket
            reason = self._why_over(ticket, now, is_hung=is_hung)
            if not reason:
                continue
            waits = run not in self._running[run.at]
            is_free = ticket.guard.revoke(reason)
            if is_free and not (run.is_late and run.segment.is_copy):
                self._look_if_hung(run)
                self._settle(ticket, Outcome(OutcomeKind.CANCELLED, reason))
            elif waits or reason is not Reason.DEADLINE:
                continue  # its copy is looked at when its turn comes
            elif run.is_late and now > ticket.deadline + self._stuck_after:
                self._quarantine(ticket)
            else:
                run.is_late = True
                self._look_if_hung(run)
                continue
            if waits:
                self._waiting[run.at].remove(run)
            else:
                del self._running[run.at][run]
            self._leave(run)
            self._start(run.at)

    def _all_runs(self) -> list[Run]:
        return [
            run
            for runs in itertools.chain(self._running, self._waiting)
            for run in runs
        ]

    def _why_over(self, ticket: Ticket, now: float, *, is_hung: bool) -> Reason:
        if now > ticket.deadline:
            return Reason.DEADLINE
        if is_hung and not (ticket.is_worked_on or ticket.guard.is_copying):
            return Reason.STORE_HUNG
        return Reason.NONE

    def _look_if_hung(self, run: Run) -> None:
        if run.segment.is_copy and run.ticket.is_worked_on:
            self._on_hung(run.ticket)

    def _arrive(self, at: int, carrier: Carrier) -> None:
        if at == self._behind_copy:
            self._on_copied(self.key[0])
        self._waiting[at].append(Run(self._segments[at], at, carrier, self._over))
        self._start(at)

    def _start(self, at: int) -> None:
        """Let the next items into a segment if it has room."""
        waiting, running = self._waiting[at], self._running[at]
        while waiting and (self._segments[at].is_copy or not running):
            run = waiting.popleft()
            ticket = run.ticket
            is_begun = run.segment.awaits_copy and ticket.guard.is_copying
            if ticket.outcome is not None and not is_begun:
                self._leave(run)  # a begun copy is waited for even then
                continue
            if ticket.clock() > ticket.deadline and ticket.guard.revoke(
                Reason.DEADLINE
            ):
                self._settle(ticket, _TOO_LATE)
                self._leave(run)
                continue
            running[run] = None
            if self._runner.start(run):
                self._pass_on(run)

    def _over(self, run: Run) -> None:
        """Let an item that is handed back go on, and the next one in."""
        self._pass_on(run)
        self._start(run.at)

    def _pass_on(self, run: Run) -> None:
        """Let an item go on to its next segment, or end."""
        del self._running[run.at][run]
        done = run.result
        if done is None:
            self._fail(run)
        elif run.at + 1 < len(self._segments):
            self._arrive(run.at + 1, done)
            return
        elif isinstance(done, Finished) and done.outcome is not None:
            self._settle(done.ticket, done.outcome)
        self._leave(run)

    def _leave(self, run: Run) -> None:
        run.give_up()
        self.num_items -= 1
        if run.at < self._behind_copy:
            self._on_copied(self.key[0])
        self._on_left(self, run.ticket)

    def _fail(self, run: Run) -> None:
        """Turn a stage's error into the ticket's end."""
        ticket, error = run.ticket, run.error
        outcome = outcome_of(error)
        if isinstance(error, TicketOverError):
            # A job on another thread may have failed first and be told later.
            outcome = ticket.failed_as or outcome
        elif outcome.kind is OutcomeKind.FAILED:
            where = stage_of(run.carrier)
            failure = StageFailedError(str(where["stage"]), ticket.transfer_id)
            text = f"{failure}: {error!r}"
            told = {**where, "reason": outcome.reason, "error": text}
            ticket.log.warning(STAGE_FAILED, **told)
            outcome = outcome_of(error, text)
        if ticket.guard.is_copying and run.segment.awaits_copy:
            self._quarantine(ticket)  # nobody can tell any more when the copy ends
        self._settle(ticket, outcome)
