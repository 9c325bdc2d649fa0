# SPDX-License-Identifier: Apache-2.0
"""
Which of several hits to bring, where a longer one does without blocks of a shorter one.

Of layers with a window a hit needs the blocks that its window touches, of those with a state the
last one. Half of the blocks of the longest hit are no hit then, and a prompt that was continued
otherwise has the windows of a shorter one. So the longest is looked for of which all is there,
from the end, with looks that double, before anything is brought. Pure: who searches answers what is asked.
"""

from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ucm.errors import MessageError

__all__ = ["Hits", "Question", "Search"]

_Ints = npt.NDArray[np.int64]
_MORE: Final = 16
"""Blocks of windows that are asked for beyond those that are needed, in the second look,"""
_MOST: Final = 512
"""and in each of the last ones."""


class Question(NamedTuple):
    """Which of some blocks can be brought."""

    blocks: list[int]
    is_prefix: bool
    """Those of a prefix: behind the first that cannot none is of use."""


Search = Generator[Question, Sequence[bool], tuple[int, int | None]]
"""Asks, is told of each block of its question, and returns what ``Hits.choose`` says."""


class Hits:
    """
    Which hits need which blocks; hits are numbers, the longest the highest, from 1 on.

    Args:
        shortest: Of the hits that need each block.
        longest: Likewise; 0: all that are longer, too. Such blocks come in the order of their hits.
        num_blocks: How many there are; the highest number that a hit may have.

    Raises:
        MessageError: They are no such hits.
    """

    def __init__(
        self, shortest: Sequence[int], longest: Sequence[int], num_blocks: int
    ) -> None:
        if not 0 < len(shortest) == len(longest) == num_blocks:
            raise MessageError(f"hits of {len(shortest)} and {len(longest)} blocks")
        if min(shortest) < 1 or max(shortest) > num_blocks or min(longest) < 0:
            raise MessageError("hits that there are none of")
        self._shortest: _Ints = np.array(shortest)
        self.top = int(self._shortest.max())
        """The longest hit."""
        given: _Ints = np.array([min(each or self.top, self.top) for each in longest])
        self._longest = given
        self._is_window = np.array(longest, dtype=bool)

    def needed_for(self, hit: int) -> list[int]:
        """Return which blocks a hit needs, in order."""
        needed: list[int] = np.flatnonzero(self._needs(hit)).tolist()
        return needed

    def choose(
        self, is_there: Sequence[bool], most: int, lost: Sequence[int] = ()
    ) -> Search:
        """
        Search for the longest hit of which all is there, and a block that a longer one lacks.

        Args:
            is_there: Of each block, whether it need not be brought.
            most: How many can be brought.
            lost: Blocks that cannot be brought, whatever is told of them.

        Returns:
            The hit, 0 for none, and what was looked for in vain; None: nothing was.
        """
        absent = ~np.array(is_there, dtype=bool)
        is_out = self._counts(absent) > most
        is_out |= self._counts(np.array(lost, dtype=np.int64)) > 0
        lacked: int | None = None
        prefix = np.flatnonzero(absent & ~self._is_window)
        gone = yield from _gone(prefix, is_prefix=True)
        if gone.size:
            lacked = int(gone[0])
            is_out[self._shortest[lacked] :] = True
        unasked, more = absent & self._is_window, 0
        while (left := np.flatnonzero(~is_out[1:])).size:
            hit = int(left[-1]) + 1
            needed = np.flatnonzero(unasked & self._needs(hit))
            if not needed.size:
                return hit, lacked
            near = np.flatnonzero(unasked & (self._shortest <= hit))
            near = near[max(0, int(np.searchsorted(near, needed[0])) - more) :]
            gone = yield from _gone(near, is_prefix=False)
            unasked[near] = False
            if gone.size:
                lacked = int(gone[-1]) if lacked is None else lacked
                is_out |= self._counts(gone) > 0
            more = min(max(_MORE, 2 * more), _MOST)
        return 0, lacked

    def _needs(self, hit: int) -> npt.NDArray[np.bool_]:
        return (self._shortest <= hit) & (hit <= self._longest)

    def _counts(self, blocks: npt.NDArray[Any]) -> _Ints:
        """Return of each hit, and of none, how many of some blocks it needs."""
        size = self.top + 2
        begun = np.bincount(self._shortest[blocks], minlength=size)
        ended = np.bincount(self._longest[blocks] + 1, minlength=size)
        counts: _Ints = np.cumsum(begun - ended)[:-1]
        return counts


def _gone(
    blocks: _Ints, *, is_prefix: bool
) -> Generator[Question, Sequence[bool], _Ints]:
    """Return which of some blocks are nowhere."""
    if not blocks.size:
        return blocks
    there = yield Question(blocks.tolist(), is_prefix)
    gone: _Ints = blocks[~np.array(there, dtype=bool)]
    return gone
