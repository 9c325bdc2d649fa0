# SPDX-License-Identifier: Apache-2.0
"""
What time asks of tickets: the one place where deadlines are looked at while they wait.

All open tickets are looked through at intervals, wherever they are: in the queue, in a
lane, with rows to come, or ended under a copy that goes on; and those that have ended, at
which a copy thread is, as it is to give slots back. For each of them::

    blocks taken back, nobody works on it        it ends with the reason
    past its deadline, no copy touches blocks    it ends; if a copy thread stands at it,
                                                 that *hangs*, as a rule in the store
    ... and it has ended before                  that hangs if it stands there for a second
    past its deadline, under a copy              torn; the copy is waited for
    ... for ``stuck_after`` and longer           given up, which ends the service
    behind a copy thread that hangs              it ends: nothing gets on there
    blocks being zeroed for ``stuck_after``      that ends the service too

A copy is given up only once it was seen to be late: a loop that was held up itself looks
at its fence first. Until a copy thread that hangs has returned its direction is refused;
the other one has threads of its own.

All of it runs on the loop thread.
"""

from collections.abc import Callable, Iterable

from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.tickets import Direction, Ticket
from ucm.reasons import Reason
from ucm.tracing import STORE_ANSWERS, STORE_HUNG

__all__ = ["Deadlines"]

_BRIEF_S = 1.0
"""Slots are given back in less, also where others have the store's lock."""


class Deadlines:
    """
    Looks at tickets.

    Args:
        queue: Told which direction is to be refused.
        stuck_after: Seconds that a copy, or zeros, may come behind their deadline.
        on_failure: Called with the reason why nothing can go on.
    """

    def __init__(
        self,
        queue: DumpQueue,
        *,
        stuck_after: float,
        on_failure: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self._stuck_after = stuck_after
        self._on_failure = on_failure
        self._hung: dict[Direction, set[Ticket]] = {each: set() for each in Direction}
        """Tickets past their deadline at which a copy thread still stands."""
        self._left: dict[Ticket, float] = {}
        """Tickets that have ended and at which a copy thread was at the last look, and since when."""
        self._clearing: dict[Ticket, float] = {}
        """Loads whose blocks are being zeroed, and until when they may."""
        self.num_watched = 0
        """Tickets at the last look of which there may be something to end."""

    def look_through(self, tickets: Iterable[Ticket], now: float) -> None:
        """Look at all tickets; *now* is on their clock."""
        self.num_watched = 0
        left, self._left = self._left, {}
        for ticket in tickets:
            if ticket.outcome is not None and ticket.is_worked_on:
                self._left[ticket] = left.get(ticket, now)
            guard = ticket.guard
            is_over = ticket.outcome or ticket.is_late or now > ticket.deadline
            if not (
                is_over or guard.torn or guard.revoked or self._hung[ticket.direction]
            ):
                self.num_watched += 1  # as nearly all are: no call for each of them
                continue
            self.look(ticket, now)
            is_open = ticket.outcome is None or ticket.is_worked_on
            is_touched = guard.is_touched and not ticket.is_given_up
            self.num_watched += is_open or is_touched
        for ticket in [each for each in self._clearing if not each.guard.is_clearing]:
            del self._clearing[ticket]

    def look(self, ticket: Ticket, now: float) -> None:
        """Do what time asks of one ticket."""
        guard = ticket.guard
        is_late = now > ticket.deadline
        if is_late and ticket.is_worked_on and self._is_long(ticket, now):
            self._note_hung(ticket)
        was_late, ticket.is_late = ticket.is_late, is_late and guard.is_copying
        if ticket.is_late:
            guard.revoke(Reason.DEADLINE)
            if was_late and now > ticket.deadline + self._stuck_after:
                ticket.give_up()
        elif guard.is_clearing:
            limit = self._clearing.setdefault(ticket, now + self._stuck_after)
            if now > limit:
                late = f"blocks of transfer {ticket.transfer_id} are not zeroed in time"
                self._on_failure(late)
        else:
            self.end_if_over(ticket, now)

    def _is_long(self, ticket: Ticket, now: float) -> bool:
        """Return whether a copy thread is at a ticket for more than to give its slots back."""
        return ticket.outcome is None or now > self._left.get(ticket, now) + _BRIEF_S

    def end_if_over(self, ticket: Ticket, now: float) -> None:
        """End a ticket that need not wait any more, unless a copy is under way."""
        if ticket.outcome is None and not ticket.guard.is_copying:
            why = self._why_over(ticket, now)
            if why:
                ticket.cancel(why)

    def look_at_hung(self) -> None:
        """Go on where a copy thread has returned."""
        for direction, hung in self._hung.items():
            for ticket in [each for each in hung if not each.is_worked_on]:
                hung.remove(ticket)
                ticket.log.info(STORE_ANSWERS)
                self._queue.hold_off(direction, is_hung=bool(hung))

    def _why_over(self, ticket: Ticket, now: float) -> Reason:
        """Return why a ticket under no copy need not wait any more, if so."""
        if now > ticket.deadline:
            return Reason.DEADLINE
        if ticket.is_worked_on:
            return Reason.NONE
        hung = Reason.STORE_HUNG if self._hung[ticket.direction] else Reason.NONE
        return ticket.guard.taken_back or hung

    def _note_hung(self, ticket: Ticket) -> None:
        hung = self._hung[ticket.direction]
        if ticket not in hung:
            hung.add(ticket)
            ticket.log.warning(STORE_HUNG, stages=sorted(ticket.stages.values()))
            self._queue.hold_off(ticket.direction, is_hung=True)
