# SPDX-License-Identifier: Apache-2.0
"""How many of the slab's slots wants may have: granted whole, one after the other."""

from collections import deque

import anyio

__all__ = ["Budget"]


class Budget:
    """
    Slots that fetched blocks may take, in order of arrival.

    Args:
        total: Slots.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.left = total
        self._queue: deque[tuple[int, anyio.Event]] = deque()

    async def acquire(self, count: int) -> None:
        """Wait for *count* slots, ``total`` at most; whoever came first has them first."""
        if not self._queue and count <= self.left:
            self.left -= count
            return
        turn = count, anyio.Event()
        self._queue.append(turn)
        is_ours = False
        try:
            await turn[1].wait()
            is_ours = True
        finally:
            if not is_ours:  # cancelled, maybe just as our turn came
                if turn in self._queue:
                    self._queue.remove(turn)
                else:
                    self.left += count
                self._serve()

    def release(self, count: int) -> None:
        """Give slots back."""
        self.left += count
        self._serve()

    def _serve(self) -> None:
        while self._queue and self._queue[0][0] <= self.left:
            count, event = self._queue.popleft()
            self.left -= count
            event.set()
