# SPDX-License-Identifier: Apache-2.0
"""
The explicit queue in front of the pipeline.

Waiting saves are bounded by tickets and by bytes. ``offer`` never blocks: a full queue
refuses with a reason, and a refused save is a later miss. Loads are bounded by the
blocks that the engine has allocated for them and are refused only after close.
``take_nowait`` picks fairly: lanes take turns, so that one huge request cannot starve
others, and loads go before saves, except before saves that the engine waits for.

Threading: ``offer`` runs on one thread at a time, ``promote`` on the engine's thread,
``take_nowait`` on the loop, ``close`` on any; one short lock covers the queue.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

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
        self._tickets = dict.fromkeys(Direction, 0)
        self._nbytes = dict.fromkeys(Direction, 0)
        self._promoted: set[LaneKey] = set()
        self._closed: Admission | None = None

    @property
    def num_tickets(self) -> int:
        """Items that wait."""
        return sum(self._tickets.values())

    def waiting(self, direction: Direction) -> tuple[int, int]:
        """Return how many items of a direction wait, and their bytes."""
        return self._tickets[direction], self._nbytes[direction]

    def offer(self, item: Item) -> Admission:
        """Take an item in, or refuse it with the reason. Never blocks."""
        ticket = item.ticket
        with self._lock:
            admission = self.admits(ticket)
            if admission is Admission.ACCEPTED:
                lanes = self._lanes[ticket.direction]
                lanes.setdefault(ticket.lane_key, deque()).append(item)
                self._count(item, 1)
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
        return left

    def _count(self, item: Item, sign: int) -> None:
        direction = item.ticket.direction
        self._tickets[direction] += sign
        self._nbytes[direction] += sign * item.ticket.nbytes
