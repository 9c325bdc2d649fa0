# SPDX-License-Identifier: Apache-2.0
"""
How many slots are free, written and committed, by groups of 256; who needs one asks here.

Derived from the states alone: after a change the groups that it touched are counted
again, and so are they after a death, which is why neither needs to know of the other.
Called under the index lock.
"""

import numpy as np
import numpy.typing as npt

from ucm.stores.slab._layout import COMMITTED, FREE, GROUP, RESERVED, Word

__all__ = ["Tally"]

_COUNTED = (FREE, RESERVED, COMMITTED)
_WORDS = (int(Word.NUM_FREE), int(Word.NUM_RESERVED), int(Word.NUM_COMMITTED))
_BYTES = tuple(bytes([state]) for state in _COUNTED)
_FREE_GROUP = int(Word.FREE_GROUP)
_FEW = 8


class Tally:
    """
    Counts of slots by state, and the way to those that are free.

    Args:
        states: ``[num_groups * GROUP]`` uint8; shared.
        counts: ``[3, num_groups]`` uint16, how many of each group are free, reserved
            and committed; shared.
        words: The header; shared.
    """

    def __init__(
        self,
        states: npt.NDArray[np.uint8],
        counts: npt.NDArray[np.uint16],
        words: memoryview,
    ) -> None:
        self._states = states.data
        self._groups = states.reshape(-1, GROUP)
        self.counts = counts
        self._free = counts[0]
        self._rows = [row.data for row in counts]
        self._words = words

    def recount(self, slots: npt.NDArray[np.int64]) -> None:
        """Count the groups of these slots again, and keep the sums right."""
        first = int(np.minimum.reduce(slots)) // GROUP
        last = int(np.maximum.reduce(slots)) // GROUP
        groups = range(first, last + 1)
        if len(groups) > _FEW:
            groups = np.unique(slots // GROUP).tolist()
        if len(groups) > _FEW:
            self._recount_many(np.array(groups))
            return
        for group in groups:
            self.recount_one(group)

    def recount_one(self, group: int) -> None:
        """Count one group again, and keep the sums right."""
        states = self._states[group * GROUP : (group + 1) * GROUP].tobytes()
        for row, state, word in zip(self._rows, _BYTES, _WORDS, strict=True):
            count = states.count(state)
            self._words[word] += count - row[group]
            row[group] = count

    def _recount_many(self, groups: npt.NDArray[np.int64]) -> None:
        before = self.counts[:, groups].sum(axis=1, dtype=np.int64)
        states = self._groups[groups]
        for row, state, word, was in zip(
            self.counts, _COUNTED, _WORDS, before.tolist(), strict=True
        ):
            count = np.count_nonzero(states == state, axis=1)
            row[groups] = count
            self._words[word] += int(count.sum()) - was

    def add_up(self) -> None:
        """Take the sums from the groups, after a death between the two."""
        for word, total in zip(
            _WORDS, self.counts.sum(axis=1, dtype=np.int64).tolist(), strict=True
        ):
            self._words[word] = total

    def rebuild(self) -> None:
        """Count everything anew."""
        for start in range(0, len(self._groups), GROUP):
            self._recount_many(np.arange(start, min(start + GROUP, len(self._groups))))
        self.add_up()

    def find_free(self, count: int) -> npt.NDArray[np.int64]:
        """Return up to *count* free slots, ascending: neighbours if there are any."""
        count = min(count, self._words[_WORDS[0]])
        if not count:
            return np.empty(0, dtype=np.int64)
        group = self._words[_FREE_GROUP]
        if self._free[group] < count:
            group = int(self._free.argmax())
        if count <= self._free[group]:
            self._words[_FREE_GROUP] = group
            start = group * GROUP
            free: npt.NDArray[np.int64] = (self._groups[group] == FREE).nonzero()[0]
            return free[:count] + start
        groups = np.flatnonzero(self._free)
        enough = int(np.cumsum(self._free[groups]).searchsorted(count)) + 1
        at, free = np.nonzero(self._groups[groups[:enough]] == FREE)
        return (groups[at] * GROUP + free)[:count]

    def find_reserved(self) -> npt.NDArray[np.int64]:
        """Return all slots that are being written."""
        groups = np.flatnonzero(self.counts[1])
        at, reserved = np.nonzero(self._groups[groups] == RESERVED)
        return groups[at] * GROUP + reserved
