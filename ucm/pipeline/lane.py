# SPDX-License-Identifier: Apache-2.0
"""
One request's way through a chain.

A lane has a bounded queue in front of each segment. A copy thread is given the lane's
next item while it works on the one before, so that it does not stand still until the
loop has taken that back; other segments have one item at a time. Items of a lane pass
each stage in order; lanes do not know each other. A lane lives while it has items.

All of it runs on the loop thread, in the pipeline's one task.
"""

from collections import deque
from collections.abc import Callable

from ucm.blocks import PackedKey
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    DeviceError,
    StageFailedError,
    StoreFullError,
    StoreUnavailableError,
    WorkerDiedError,
)
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.runner import Run, Runner
from ucm.pipeline.save import Finished, Queued
from ucm.pipeline.stage import Carrier, Segment, stage_of
from ucm.pipeline.tickets import (
    Item,
    LaneKey,
    Outcome,
    OutcomeKind,
    Ticket,
)
from ucm.reasons import Reason
from ucm.tracing import STAGE_FAILED

__all__ = ["RequestLane"]

_REASONS: dict[type[Exception], Reason] = {
    BlockCorruptError: Reason.CORRUPT,
    BlockNotFoundError: Reason.EVICTED,
    StoreUnavailableError: Reason.UNAVAILABLE,
    DeviceError: Reason.DEVICE,
    WorkerDiedError: Reason.WORKER_DIED,
}


_AHEAD = 2
"""Items of a lane that one copy segment may have, the second behind the first."""
_TOO_LATE = Outcome(OutcomeKind.CANCELLED, Reason.DEADLINE)


class RequestLane:
    """
    One request's items on their way.

    Args:
        key: Direction, request and life.
        segments: Of the chain.
        runner: Runs them.
        depth: Items that may be in the lane at once.
        stuck_after: Seconds that a device copy may overrun its ticket's deadline.
        settle: Called with each ticket that ends.
        quarantine: Called with a ticket whose device copy never ended.
        on_left: Called with the ticket of each item that leaves the lane.
    """

    def __init__(
        self,
        key: LaneKey,
        segments: tuple[Segment, ...],
        runner: Runner,
        *,
        depth: int,
        stuck_after: float,
        settle: Callable[[Ticket, Outcome], None],
        quarantine: Callable[[Ticket], None],
        on_left: Callable[["RequestLane", Ticket], None],
    ) -> None:
        self.key = key
        self.num_items = 0
        self._segments = segments
        self._runner = runner
        self._depth = depth
        self._stuck_after = stuck_after
        self._settle = settle
        self._quarantine = quarantine
        self._on_left = on_left
        # Never longer than the lane is deep.
        self._waiting: list[deque[Carrier]] = [deque() for _ in segments]
        self._running: list[list[Run]] = [[] for _ in segments]

    @property
    def has_room(self) -> bool:
        """Whether one more item may be put in."""
        return self.num_items < self._depth

    def put_nowait(self, item: Item) -> None:
        """Let an item in; the caller has checked ``has_room``."""
        assert self.has_room
        self.num_items += 1
        self._arrive(0, Queued(item.ticket, item.row_ids, item))

    def check(self, now: float) -> None:
        """
        End what is past its ticket's deadline, but no copy that has begun.

        Until a copy is over its blocks cannot be given back; one that overruns
        ``stuck_after`` too, all its segments together, is quarantined. It was seen to
        be late before: a loop that was held up looks at its fence first.
        """
        for run in [run for runs in self._running for run in runs]:
            if now <= run.ticket.deadline:
                continue
            ticket = run.ticket
            is_free = ticket.guard.revoke(Reason.DEADLINE)
            if is_free and not (run.is_late and run.segment.is_copy):
                self._give_up(run)
                self._settle(ticket, _TOO_LATE)
            elif run.is_late and now > ticket.deadline + self._stuck_after:
                self._give_up(run)
                self._quarantine(ticket)
            else:
                run.is_late = True
                continue
            self._leave(run)

    def _arrive(self, at: int, carrier: Carrier) -> None:
        self._waiting[at].append(carrier)
        self._start(at)

    def _start(self, at: int) -> None:
        """Let the next items into a segment if it has room."""
        waiting, running = self._waiting[at], self._running[at]
        segment = self._segments[at]
        most = _AHEAD if segment.is_copy else 1
        while waiting and len(running) < most:
            run = Run(segment, at, waiting.popleft(), self._over)
            ticket = run.ticket
            is_begun = segment.awaits_copy and ticket.guard.is_copying
            if ticket.outcome is not None and not is_begun:
                self._leave(run)  # a begun copy is waited for even then
                continue
            if ticket.clock() > ticket.deadline and ticket.guard.revoke(
                Reason.DEADLINE
            ):
                self._settle(ticket, _TOO_LATE)
                self._leave(run)
                continue
            running.append(run)
            self._runner.start(run)
            if run.is_over:
                self._over(run)

    def _over(self, run: Run) -> None:
        """Let an item go on, or leave, and the next one in."""
        self._running[run.at].remove(run)
        done = run.result
        if done is None:
            self._fail(run)
        elif run.at + 1 < len(self._segments):
            self._arrive(run.at + 1, done)
            self._start(run.at)
            return
        elif isinstance(done, Finished) and done.outcome is not None:
            self._settle(done.ticket, done.outcome)
        self._leave(run)

    def _give_up(self, run: Run) -> None:
        run.give_up()
        self._running[run.at].remove(run)

    def _leave(self, run: Run) -> None:
        self.num_items -= 1
        self._on_left(self, run.ticket)
        self._start(run.at)

    def _fail(self, run: Run) -> None:
        """Turn a stage's error into the ticket's end."""
        ticket, error = run.ticket, run.error
        if isinstance(error, TicketOverError):
            outcome = Outcome(OutcomeKind.CANCELLED, error.reason)
        elif isinstance(error, StoreFullError):
            outcome = Outcome(OutcomeKind.REFUSED, Reason.STORE_FULL, error=str(error))
        else:
            outcome = _failed(run.carrier, error)
        if ticket.guard.is_copying and run.segment.awaits_copy:
            self._quarantine(ticket)  # nobody can tell any more when the copy ends
        self._settle(ticket, outcome)


def _failed(carrier: Carrier, error: Exception | None) -> Outcome:
    """Turn a stage's error into an outcome, with the block to blame if known."""
    ticket, where = carrier.ticket, stage_of(carrier)
    failure = StageFailedError(str(where["stage"]), ticket.transfer_id)
    reason = next(
        (word for kind, word in _REASONS.items() if isinstance(error, kind)),
        Reason.ERROR,
    )
    text = f"{failure}: {error!r}"
    ticket.log.warning(STAGE_FAILED, **where, error=text)
    bad_key = PackedKey(b"")
    if isinstance(error, (BlockCorruptError, BlockNotFoundError)):
        bad_key = PackedKey(error.key)
    return Outcome(OutcomeKind.FAILED, reason, bad_key=bad_key, error=text)
