# SPDX-License-Identifier: Apache-2.0
"""
The explicit queue in front of the pipeline.

Saves that wait to begin are bounded by tickets and by bytes, and so are those that were
copied and are not stored: the former hold the engine's blocks, the latter slots of the
store. ``offer`` never blocks: beyond a bound it refuses with a reason, and a refused save
is a later miss. Loads are bounded by the blocks that the engine has allocated for them;
which of them would come too late is not decided here (``pace``). Layer-wise tickets come
row by row; those with rows to come are remembered, as nothing else may be left of them
that could end.

``take_nowait`` serves loads in the order in which their requests came: of loads that
cannot all be there in time, the first ones are. Saves take turns by request, so that one
huge request cannot starve others. Loads go before saves, but not for ever: for each few
bytes of loads a byte of saves goes as well, and a save that the engine waits for at once.

Threading: ``offer`` runs on one thread at a time, ``promote`` on the engine's thread,
``take_nowait``, ``tick`` and ``hold_off`` on the loop, ``released``, ``over`` and
``close`` on any; one short lock covers the queue.
"""

from collections import OrderedDict, deque
from typing import Final

from ucm.blocks import TransferId
from ucm.pipeline.items import Item
from ucm.pipeline.outcomes import OutcomeKind
from ucm.pipeline.pace import Pace, cost_of
from ucm.pipeline.tickets import Direction, LaneKey, Ticket
from ucm.reasons import Reason
from ucm.threads import SYSTEM, Threads

__all__ = ["DumpQueue"]

_LOADS_PER_SAVE: Final = 8
"""Bytes of loads for each byte of saves, while both wait."""
_STANDSTILL_TICKS: Final = 10


class DumpQueue:
    """
    Items that were accepted and wait for their lane, and what came of those before.

    Args:
        max_tickets: Most saves that may wait, and that may be copied and not stored.
        max_nbytes: Most bytes of either.
        threads: Where its lock comes from.
    """

    def __init__(
        self, *, max_tickets: int, max_nbytes: int, threads: Threads = SYSTEM
    ) -> None:
        self.pace = Pace()
        """How fast loads go."""
        self.open: dict[TransferId, Ticket] = {}
        """Accepted tickets of which the engine's thread expects to hear; added by who
        offers, and removed by who has told it."""
        self._max_tickets = max_tickets
        self._max_nbytes = max_nbytes
        self._lock = threads.lock()
        self._lanes: dict[Direction, OrderedDict[LaneKey, deque[Item]]] = {
            direction: OrderedDict() for direction in Direction
        }
        self._items = dict.fromkeys(Direction, 0)
        self._tickets: dict[Direction, set[Ticket]] = {
            each: set() for each in Direction
        }
        self._nbytes = dict.fromkeys(Direction, 0)
        self._due: dict[Direction, set[Ticket]] = {each: set() for each in Direction}
        self._due_nbytes = dict.fromkeys(Direction, 0)
        self._promoted: set[LaneKey] = set()
        self._credit = 0
        """Bytes of loads that saves have let go first; above zero it is a save's turn."""
        self._ticks_without_load = 0
        self._closed = Reason.NONE
        """Why all offers are refused, if they are."""
        self._held_off: set[Direction] = set()

    @property
    def num_items(self) -> int:
        """Items that wait."""
        return sum(self._items.values())

    def waiting(self, direction: Direction) -> tuple[int, int]:
        """Return how many tickets of a direction wait to begin, and their bytes."""
        return len(self._tickets[direction]), self._nbytes[direction]

    def due(self, direction: Direction) -> tuple[int, int]:
        """
        Return how many tickets the store has yet to see to the end of, and their bytes.

        All loads that were accepted; of the saves those that were copied.
        """
        return len(self._due[direction]), self._due_nbytes[direction]

    def offer(self, item: Item) -> Reason:
        """
        Take an item in, or return why it is refused. Never blocks.

        What follows the first item of a ticket is refused only after close: the ticket
        was admitted whole.
        """
        ticket = item.ticket
        with self._lock:
            refusal = self.refusal_of(ticket) if item.is_first else self._closed
            if not refusal:
                lanes = self._lanes[ticket.direction]
                lanes.setdefault(ticket.lane_key, deque()).append(item)
                self._count(item, 1)
                if item.is_first and ticket.direction is Direction.LOAD:
                    self._add_due(ticket)
                ticket.rows_to_come -= len(item.row_ids)
        return refusal

    def refusal_of(self, ticket: Ticket) -> Reason:
        """
        Return why an offer would be refused now; ``NONE`` if it would not.

        Only who offers can make it worse, or a close, or a store that hangs.
        """
        if self._closed:
            return self._closed
        if ticket.direction in self._held_off:
            return Reason.STORE_HUNG
        if ticket.direction is Direction.SAVE:
            return self._refusal_of_save(ticket)
        return Reason.NONE

    def _refusal_of_save(self, ticket: Ticket) -> Reason:
        waiting, nbytes = self.waiting(Direction.SAVE)
        if waiting >= self._max_tickets:
            return Reason.QUEUE_TICKETS
        if waiting and nbytes + ticket.nbytes > self._max_nbytes:
            return Reason.QUEUE_BYTES
        due, due_nbytes = self.due(Direction.SAVE)
        if due >= self._max_tickets or due_nbytes >= self._max_nbytes:
            return Reason.STORE_BEHIND
        return Reason.NONE

    def released(self, ticket: Ticket) -> None:
        """Take note that a ticket's blocks are free: a save's bytes are in slots now."""
        if ticket.direction is Direction.SAVE:
            with self._lock:
                self._add_due(ticket)

    def over(self, ticket: Ticket) -> None:
        """Take note that a ticket has ended, accepted or not."""
        with self._lock:
            self._waits_no_more(ticket)  # though its item may still be here
            if ticket in self._due[ticket.direction]:
                self._due[ticket.direction].remove(ticket)
                self._due_nbytes[ticket.direction] -= ticket.nbytes
            outcome = ticket.outcome
            is_load = ticket.direction is Direction.LOAD
            if is_load and outcome and outcome.kind is OutcomeKind.COMMITTED:
                cost = cost_of(1, ticket.nbytes)
                self.pace.note(cost, ticket.begun_at, ticket.clock())

    def _add_due(self, ticket: Ticket) -> None:
        if ticket.outcome is None:  # else it was ``over`` before
            self._due[ticket.direction].add(ticket)
            self._due_nbytes[ticket.direction] += ticket.nbytes

    def hold_off(self, direction: Direction, *, is_hung: bool) -> None:
        """Refuse tickets of a direction, or no longer; rows of others still come."""
        with self._lock:
            (self._held_off.add if is_hung else self._held_off.discard)(direction)

    def unfinished(self) -> list[Ticket]:
        """Return the tickets with rows to come; any thread."""
        tickets = list(self.open.values())
        return [each for each in tickets if each.rows_to_come and not each.outcome]

    def promote(self, key: LaneKey) -> None:
        """Let a lane take its turn first, also before loads: the engine waits for it."""
        with self._lock:
            lanes = self._lanes[key[0]]
            if key in lanes:
                lanes.move_to_end(key, last=False)
                self._promoted.add(key)

    def tick(self) -> None:
        """
        Let a save go although loads wait, if these have not got on for ten ticks.

        To be called at regular intervals.
        """
        loads_wait = bool(self._lanes[Direction.LOAD])
        self._ticks_without_load = self._ticks_without_load + 1 if loads_wait else 0
        if self._ticks_without_load > _STANDSTILL_TICKS:
            self._credit = max(self._credit, 1)

    def take_nowait(self, direction: Direction) -> Item | None:
        """
        Take the oldest item of the next lane; None when there is none.

        Args:
            direction: Saves get their share only while a load waits, unless promoted.
        """
        if not self._items[direction]:  # whoever offers one now wakes us behind it
            return None
        with self._lock:
            lanes = self._lanes[direction]
            is_save = direction is Direction.SAVE
            is_beside = is_save and bool(self._lanes[Direction.LOAD])
            key = next(iter(lanes), None)
            if is_beside and self._credit <= 0:
                # Without a look through all lanes, which may be thousands.
                promoted = filter(self._promoted.__contains__, lanes)
                key = next(promoted, None) if self._promoted else None
            if key is None:
                return None
            waiting = lanes[key]
            item = waiting.popleft()
            self._give_credit(item, is_beside=is_beside and key not in self._promoted)
            if not waiting:
                del lanes[key]
                self._promoted.discard(key)
            elif is_save:
                lanes.move_to_end(key)  # the others' turn
            self._count(item, -1)
            return item

    def _give_credit(self, item: Item, *, is_beside: bool) -> None:
        if is_beside:
            self._credit -= _LOADS_PER_SAVE * item.nbytes
        elif item.ticket.direction is Direction.LOAD:
            saves_wait = bool(self._lanes[Direction.SAVE])
            self._credit = self._credit + item.nbytes if saves_wait else 0
            self._ticks_without_load = 0

    def drop_ended(self) -> None:
        """Forget every waiting item whose ticket has ended."""
        with self._lock:
            for lanes in self._lanes.values():
                for key, waiting in list(lanes.items()):
                    ended = [
                        each for each in waiting if each.ticket.outcome is not None
                    ]
                    for item in ended:
                        waiting.remove(item)
                        self._count(item, -1)
                    if not waiting:
                        del lanes[key]
                        self._promoted.discard(key)

    def refuse(self, reason: Reason) -> None:
        """Refuse all offers from now on; what waits goes on. The first reason stays."""
        with self._lock:
            self._closed = self._closed or reason

    def close(self, reason: Reason = Reason.CLOSED) -> list[Item]:
        """Refuse all offers from now on and give back what still waits."""
        self.refuse(reason)
        with self._lock:
            left = [
                item
                for lanes in self._lanes.values()
                for waiting in lanes.values()
                for item in waiting
            ]
            for lanes in self._lanes.values():
                lanes.clear()
            self._promoted.clear()
            for item in left:
                self._count(item, -1)
        return left

    def _count(self, item: Item, sign: int) -> None:
        direction, ticket = item.ticket.direction, item.ticket
        self._items[direction] += sign
        if not item.is_first:
            return
        if sign < 0:
            self._waits_no_more(ticket)
        else:
            self._tickets[direction].add(ticket)
            self._nbytes[direction] += ticket.nbytes

    def _waits_no_more(self, ticket: Ticket) -> None:
        if ticket in self._tickets[ticket.direction]:
            self._tickets[ticket.direction].remove(ticket)
            self._nbytes[ticket.direction] -= ticket.nbytes
