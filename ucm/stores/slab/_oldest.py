# SPDX-License-Identifier: Apache-2.0
"""
Which committed slots count as used least recently.

Bounds. Of each group of 256 slots one bound is kept, and of each 256 groups another: no
stamp below is older than it. Whoever writes a stamp lowers the bounds first; a stamp that
grows, or goes, leaves them too low, which costs a look and nothing else. Whoever looks
for the oldest goes where bounds are lowest, and raises those to what is there.

So what is looked at does not grow with the slab, the answer is exact, and what one
process has found out serves all. Where very many stamps have grown since somebody looked
there is more to raise than one may look at under the lock: ``pick`` then says that it is
not done, and goes on where it was when it is asked again.
"""

import numpy as np
import numpy.typing as npt

from ucm.stores.slab._layout import COMMITTED, GROUP, NEVER

__all__ = ["MOST_LOOKED_AT", "Oldest"]

MOST_LOOKED_AT = 2048 * GROUP
"""Stamps after which a call gives up for now."""
_WIDEST = 1024
_FEW = GROUP // 4
"""So many are sought in one group first: more are seldom all there."""
_MANY = 16
_NONE = np.empty(0, dtype=np.int64)
_min = np.minimum.reduce  # ndarray.min() is a function of Python around it


class Oldest:
    """
    Finds victims, oldest first; called under the index lock.

    Args:
        states: ``[num_groups * GROUP]`` uint8; shared.
        stamps: ``[num_groups * GROUP]`` int64, ``NEVER`` where nothing is committed.
        bounds: Of each group, filled up to a multiple of ``GROUP``; shared.
        uppers: Of each ``GROUP`` bounds; shared.
    """

    def __init__(
        self,
        states: npt.NDArray[np.uint8],
        stamps: npt.NDArray[np.int64],
        bounds: npt.NDArray[np.int64],
        uppers: npt.NDArray[np.int64],
    ) -> None:
        self._states = states
        self._stamps = stamps
        self._groups = stamps.reshape(-1, GROUP)
        self._bounds = bounds
        self._chunks = bounds.reshape(-1, GROUP)
        self._uppers = uppers

    def lower(
        self, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]
    ) -> None:
        """Let the bounds allow for these stamps, before they are written."""
        groups = slots // GROUP
        below = stamps < self._bounds[groups]
        if below.any():
            groups, stamps = groups[below], stamps[below]
            np.minimum.at(self._uppers, groups // GROUP, stamps)
            np.minimum.at(self._bounds, groups, stamps)

    def bound_of(self, group: int) -> int:
        """Return what no stamp of a group should be below."""
        return int(max(self._bounds[group], self._uppers[group // GROUP]))

    def rebuild(self) -> None:
        """Make all bounds what the stamps say."""
        self._bounds[len(self._groups) :] = NEVER
        for start in range(0, len(self._groups), GROUP):
            lows = self._groups[start : start + GROUP].min(axis=1)
            self._bounds[start : start + len(lows)] = lows
        self._uppers[:] = self._chunks.min(axis=1)

    def pick(
        self, count: int, before: int, *, is_last: bool = False
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], bool]:
        """
        Find the oldest *count* committed slots of those with stamps below *before*.

        Args:
            count: How many at most.
            before: What is not older is of no use.
            is_last: Nobody will ask again: those that were seen must do.

        Returns:
            The slots, oldest first, their stamps, and whether these are the oldest: if
            not, there was too much to look at, and another call comes further.
        """
        if 0 < count <= _FEW:
            slots, stamps = self._pick_near(count, before)
            if len(slots):
                return slots, stamps, True
        width, looked_at = max(4, 4 * count // GROUP), 0  # of some groups all are gone
        while True:
            groups, near, limit = self._look(width)
            looked_at += near.size
            gives_up = looked_at >= MOST_LOOKED_AT
            sure = before if gives_up and is_last else min(limit + 1, before)
            if near.size > _MANY * count:  # sorting all would cost more than looking
                sure = min(sure, int(np.partition(near, count, axis=None)[count]) + 1)
            at, column = np.nonzero(near < sure)
            slots, stamps = groups[at] * GROUP + column, near[at, column]
            order = np.argsort(stamps)[:count]
            slots, stamps = slots[order], stamps[order]
            is_done = len(slots) == count or limit >= before
            if is_done or gives_up:
                gone = slots[self._states[slots] != COMMITTED]
                if not len(gone):
                    return slots, stamps, is_done
                self._stamps[gone] = NEVER  # it was touched while it went
            width = min(4 * width, max(_WIDEST, count))

    def _pick_near(
        self, count: int, before: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Find what ``pick`` is to, if it is all in the group of the lowest bound."""
        uppers = self._uppers.copy()
        chunk = _lowest_of(uppers)
        bounds = self._chunks[chunk].copy()
        at = _lowest_of(bounds)
        group = chunk * GROUP + at
        if group >= len(self._groups):
            return _NONE, _NONE
        near = self._groups[group].copy()
        order = near.argsort()[:count]
        stamps = near[order]
        self._bounds[group] = bounds[at] = stamps[0]
        self._uppers[chunk] = _min(bounds)
        bounds[at] = uppers[chunk] = NEVER
        limit = min(_min(bounds), _min(uppers))
        slots = order + group * GROUP
        is_sure = stamps[-1] <= limit and stamps[-1] < before
        if is_sure and (self._states[slots] == COMMITTED).all():
            return slots, stamps
        return _NONE, _NONE

    def _look(
        self, width: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Raise the *width* lowest bounds; return groups, stamps, and the next bound."""
        chunks, limit = _lowest(self._uppers, width)
        bounds, next_bound = _lowest(self._chunks[chunks].ravel(), width)
        groups = chunks[bounds // GROUP] * GROUP + bounds % GROUP
        groups = groups[groups < len(self._groups)]
        near = self._groups[groups]
        self._bounds[groups] = near.min(axis=1)
        self._uppers[chunks] = self._chunks[chunks].min(axis=1)
        return groups, near, min(limit, next_bound)


def _lowest_of(values: npt.NDArray[np.int64]) -> int:
    """Return where the lowest is; as ``argmin``, which gives the interpreter lock up."""
    return int((values == _min(values)).nonzero()[0][0])


def _lowest(
    values: npt.NDArray[np.int64], count: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Return where the *count* lowest values are, and the lowest of the others."""
    if count >= len(values):
        return np.arange(len(values)), NEVER
    order = np.argpartition(values, count)
    return order[:count], int(values[order[count]])
