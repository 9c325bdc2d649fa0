# SPDX-License-Identifier: Apache-2.0
"""
The explicit queue in front of the pipeline.

Saves that wait to begin are bounded by tickets and by bytes. ``offer`` never blocks: a
full queue refuses with a reason, and a refused save is a later miss. Loads are bounded
by the blocks that the engine has allocated for them and are refused only after close.
Layer-wise tickets come row by row; those with rows to come are remembered, as nothing
else may be left of them that could end.
``take_nowait`` picks fairly: lanes take turns, so that one huge request cannot starve
others, and loads go before saves, except before saves that the engine waits for.

Threading: ``offer`` runs on one thread at a time, ``promote`` on the engine's thread,
``take_nowait`` on the loop, ``close`` on any; one short lock covers the queue.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from ucm.blocks import RowId
from ucm.pipeline.tickets import Admission, Direction, Item, LaneKey, Ticket
from ucm.threads import SYSTEM, Threads

__all__ = ["DumpQueue"]


class DumpQueue:
    """
    Items that were accepted and wait for their lane.

    Args:
        max_tickets: Most saves that may wait.
        max_nbytes: Most bytes of saves that may wait.
        threads: Where its lock comes from.
    """

    def __init__(
        self, *, max_tickets: int, max_nbytes: int, threads: Threads = SYSTEM
    ) -> None:
        self._max_tickets = max_tickets
        self._max_nbytes = max_nbytes
        self._lock = threads.lock()
        self._lanes: dict[Direction, OrderedDict[LaneKey, deque[Item]]] = {
            direction: OrderedDict() for direction in Direction
        }
        self._items = dict.fromkeys(Direction, 0)
        self._tickets = dict.fromkeys(Direction, 0)
        self._nbytes = dict.fromkeys(Direction, 0)
        self._promoted: set[LaneKey] = set()
        self._to_come: dict[Ticket, set[RowId]] = {}
        self._closed: Admission | None = None

    @property
    def num_items(self) -> int:
        """Items that wait."""
        return sum(self._items.values())

    def waiting(self, direction: Direction) -> tuple[int, int]:
        """Return how many tickets of a direction wait to begin, and their bytes."""
        return self._tickets[direction], self._nbytes[direction]

    def offer(self, item: Item) -> Admission:
        """
        Take an item in, or refuse it with the reason. Never blocks.

        What follows the first item of a ticket is refused only after close: the ticket
        was admitted whole.
        """
        ticket = item.ticket
        with self._lock:
            if item.is_first:
                admission = self.admits(ticket)
            else:
                admission = self._closed or Admission.ACCEPTED
            if admission is Admission.ACCEPTED:
                lanes = self._lanes[ticket.direction]
                lanes.setdefault(ticket.lane_key, deque()).append(item)
                self._count(item, 1)
                if len(item.row_ids) < len(ticket.row_ids):
                    self._note_rows(item)
        return admission

    def admits(self, ticket: Ticket) -> Admission:
        """
        Return what an offer would get now.

        Only who offers can make it worse, or a close.
        """
        if self._closed is not None:
            return self._closed
        if ticket.direction is Direction.SAVE:
            waiting, nbytes = self._tickets[Direction.SAVE], ticket.nbytes
            if waiting >= self._max_tickets:
                return Admission.QUEUE_TICKETS
            nbytes += self._nbytes[Direction.SAVE]
            if waiting and nbytes > self._max_nbytes:
                return Admission.QUEUE_BYTES
        return Admission.ACCEPTED

    def unfinished(self) -> list[Ticket]:
        """Return the tickets with rows to come."""
        with self._lock:
            return list(self._to_come)

    def expect_no_more(self, ticket: Ticket) -> None:
        """Forget that rows are to come: the ticket is over."""
        with self._lock:
            self._to_come.pop(ticket, None)

    def promote(self, key: LaneKey) -> None:
        """Let a lane take its turn first, also before loads: the engine waits for it."""
        with self._lock:
            lanes = self._lanes[key[0]]
            if key in lanes:
                lanes.move_to_end(key, last=False)
                self._promoted.add(key)

    def take_nowait(
        self, direction: Direction, has_room: Callable[[LaneKey], bool]
    ) -> Item | None:
        """
        Take the oldest item of the next lane that has room; None when there is none.

        Args:
            direction: Saves are held back while a load waits, unless promoted.
            has_room: Whether a lane can take one more item.
        """
        with self._lock:
            lanes = self._lanes[direction]
            held_back = direction is Direction.SAVE and self._lanes[Direction.LOAD]
            candidates = (
                filter(self._promoted.__contains__, lanes) if held_back else lanes
            )
            if held_back and not self._promoted:
                return None
            # The lanes served last are at the end: as a rule the first has room.
            key = next(filter(has_room, candidates), None)
            if key is None:
                return None
            waiting = lanes.pop(key)
            item = waiting.popleft()
            if waiting:
                lanes[key] = waiting  # to the end: the others' turn
            else:
                self._promoted.discard(key)
            self._count(item, -1)
            return item

    def sweep(self, is_over: Callable[[Item], bool]) -> list[Item]:
        """Take out every waiting item for which *is_over* holds."""
        over: list[Item] = []
        with self._lock:
            for lanes in self._lanes.values():
                for key, waiting in list(lanes.items()):
                    kept: deque[Item] = deque()
                    for item in waiting:
                        (over if is_over(item) else kept).append(item)
                    if kept:
                        lanes[key] = kept
                    else:
                        del lanes[key]
                        self._promoted.discard(key)
            for item in over:
                self._count(item, -1)
        return over

    def refuse(self, reason: Admission) -> None:
        """Refuse all offers from now on; what waits goes on. The first reason stays."""
        with self._lock:
            if self._closed is None:
                self._closed = reason

    def close(self, reason: Admission = Admission.CLOSED) -> list[Item]:
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
                if len(item.row_ids) < len(item.ticket.row_ids):
                    # Whatever its other rows own is to be given back.
                    self._to_come.setdefault(item.ticket, set()).update(item.row_ids)
        return left

    def _note_rows(self, item: Item) -> None:
        left = self._to_come.setdefault(item.ticket, set(item.ticket.row_ids))
        left.difference_update(item.row_ids)
        if not left:
            del self._to_come[item.ticket]

    def _count(self, item: Item, sign: int) -> None:
        direction = item.ticket.direction
        self._items[direction] += sign
        if not item.is_first:
            return
        self._tickets[direction] += sign
        self._nbytes[direction] += sign * item.ticket.nbytes
