# SPDX-License-Identifier: Apache-2.0
"""How many of the slab's slots wants may have: granted whole, one after the other."""

import heapq
import itertools

import anyio

__all__ = ["Budget"]


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
        self._queue: list[tuple[int, int, int, anyio.Event]] = []
        """Priority, arrival and slots of those who wait; a heap."""

    @property
    def num_waiting(self) -> int:
        """Those who wait for slots."""
        return len(self._queue)

    async def acquire(self, count: int, priority: int = 0) -> None:
        """Wait for *count* slots, ``total`` at most; the lowest priority has them first."""
        turn = priority, next(self._arrivals), count, anyio.Event()
        heapq.heappush(self._queue, turn)
        self._serve()  # also where others wait: it may come before them all
        is_ours = False
        try:
            await turn[-1].wait()
            is_ours = True
        finally:
            if not is_ours:  # cancelled, maybe just as our turn came
                if turn in self._queue:
                    self._queue.remove(turn)
                    heapq.heapify(self._queue)
                else:
                    self.left += count
                self._serve()

    def release(self, count: int) -> None:
        """Give slots back."""
        self.left += count
        self._serve()

    def _serve(self) -> None:
        while self._queue and self._queue[0][2] <= self.left:
            _, _, count, event = heapq.heappop(self._queue)
            self.left -= count
            event.set()
