# SPDX-License-Identifier: Apache-2.0
"""How many of the slab's slots wants may have: granted whole, one after the other."""

import heapq
import itertools

import anyio
import attrs

__all__ = ["Budget", "Place"]


@attrs.define(order=True)
class Place:
    """Where one who waits stands: by priority, the lowest first, then by arrival."""

    priority: int
    arrival: int = 0
    count: int = attrs.field(default=0, order=False)
    came: anyio.Event = attrs.field(factory=anyio.Event, order=False)


class Budget:
    """
    Slots that fetched blocks may take, by priority and then in order of arrival.

    Args:
        total: Slots.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self._arrivals = itertools.count()
        self._queue: list[Place] = []
        """Those who wait; a heap."""

    @property
    def num_waiting(self) -> int:
        """Those who wait for slots."""
        return len(self._queue)

    async def acquire(self, count: int, place: Place) -> None:
        """Wait for *count* slots, ``total`` at most, at a place that may be moved on."""
        place.arrival, place.count = next(self._arrivals), count
        heapq.heappush(self._queue, place)
        self._serve()  # also where others wait: it may come before them all
        is_ours = False
        try:
            await place.came.wait()
            is_ours = True
        finally:
            if not is_ours:  # cancelled, maybe just as our turn came
                if any(place is each for each in self._queue):
                    self._queue = [each for each in self._queue if each is not place]
                    heapq.heapify(self._queue)
                else:
                    self.left += count
                self._serve()

    def move_on(self, place: Place, priority: int) -> None:
        """Let one who waits come as early as *priority* does, if that is earlier."""
        if priority < place.priority:
            place.priority = priority
            heapq.heapify(self._queue)
            self._serve()

    def take(self, count: int) -> bool:
        """Take *count* slots before all who wait, if they are left; return whether."""
        is_enough = count <= self.left
        self.left -= count * is_enough
        return is_enough

    def release(self, count: int) -> None:
        """Give slots back."""
        self.left += count
        self._serve()

    def _serve(self) -> None:
        while self._queue and self._queue[0].count <= self.left:
            place = heapq.heappop(self._queue)
            self.left -= place.count
            place.came.set()
