# SPDX-License-Identifier: Apache-2.0
"""
Who has to wait until the queue has room, and for whom there is some. Pure.

What is under way is counted here within the bounds of the pipeline's queue. All that
waits or is not stored there is under way here as well, so that the queue never refuses
what this lets through.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

__all__ = ["Room"]

_T = TypeVar("_T")
_MOST_WAITING = 1 << 16


class Room(Generic[_T]):
    """
    A line in front of a bounded queue.

    Args:
        max_items: Most that may be under way.
        max_nbytes: Most of their bytes, where there are several.
    """

    def __init__(self, max_items: int, max_nbytes: int) -> None:
        self._max_items = max_items
        self._max_nbytes = max_nbytes
        self._items = 0
        self._nbytes = 0
        # By number: any may be withdrawn, and thousands be in line.
        self._line: OrderedDict[int, tuple[_T, int, float]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """How many stand in line."""
        return len(self._line)

    def enter(self, nbytes: int) -> None:
        """Count one that goes in, whether there is room or not."""
        self._items += 1
        self._nbytes += nbytes

    def leave(self, nbytes: int) -> None:
        """Take note that one is over."""
        self._items -= 1
        self._nbytes -= nbytes

    def wait(self, number: int, item: _T, nbytes: int, until: float) -> bool:
        """Stand in line, with a number of its own; False if that is too long already."""
        if len(self._line) >= _MOST_WAITING:
            return False
        self._line[number] = item, nbytes, until
        return True

    def next(self, now: float) -> tuple[_T, bool] | None:
        """
        Take out the first in line: it goes in, or it has waited for too long.

        Returns:
            It, and whether it is in; None if nothing can be done for now.
        """
        if not self._line:
            return None
        item, nbytes, until = next(iter(self._line.values()))
        if now <= until:
            if not self._has_room(nbytes):
                return None
            self.enter(nbytes)
        self._line.popitem(last=False)
        return item, now <= until

    def withdraw(self, numbers: Iterable[int]) -> list[_T]:
        """Take out those who are meant, as far as they stand in line."""
        return [self._line.pop(each)[0] for each in numbers if each in self._line]

    def drain(self) -> list[_T]:
        """Take out all who stand in line."""
        left = [item for item, _, _ in self._line.values()]
        self._line.clear()
        return left

    def _has_room(self, nbytes: int) -> bool:
        if not self._items:
            return True
        return (
            self._items < self._max_items and self._nbytes + nbytes <= self._max_nbytes
        )
