# SPDX-License-Identifier: Apache-2.0
"""
Prefixes that were used, on their way to the store.

They hit there, or in the engine's own cache, which asks the store for nothing. The store
looks each key up, on the engine's thread. So a plan has room for some, and what is beyond
it goes with the next plans. Once many prefixes wait, the oldest is dropped: its blocks
count as used when they were before. As a call costs about as much for one prefix as for some,
a few of them may wait for others, some steps at most.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ucm.blocks import PackedKey
from ucm.errors import StoreUnavailableError
from ucm.layout import GroupLayout, KVLayout
from ucm.scheduler.matching import BlockIndex, PrefixMatcher
from ucm.uses import Uses

__all__ = ["FEW_PREFIXES", "MAX_TOUCHED_KEYS", "MAX_WAITING_PREFIXES", "Touches"]

MAX_TOUCHED_KEYS: Final = 4096
"""About the most keys of one plan."""
MAX_WAITING_PREFIXES: Final = 1024
FEW_PREFIXES: Final = 16
"""So many do not wait for others; nor does anybody in each plan of so many."""
_AT: Final = np.arange(MAX_TOUCHED_KEYS)
"""Made once: numpy gives the interpreter lock up to make one, however short."""

_Blocks = tuple[GroupLayout, Sequence[bytes], npt.NDArray[np.int64]]


class _Prefix(msgspec.Struct, eq=False):
    """Blocks that hold the first tokens of a request, from one of them on."""

    moment: int
    hashes: Sequence[bytes]
    tokens: int
    group: int = 0
    block: int = 0


class Touches:
    """
    Those that wait, in the order in which they were used.

    Used on the scheduler's thread only.

    Args:
        layout: Groups.
        matcher: Knows keys.
        index: Told of them.
        waits: Whether few of them wait for others.
    """

    def __init__(
        self,
        layout: KVLayout,
        matcher: PrefixMatcher,
        index: BlockIndex,
        *,
        waits: bool,
    ) -> None:
        self._few = FEW_PREFIXES if waits else 1
        self._layout = layout
        self._matcher = matcher
        self._index = index
        self._waiting: deque[_Prefix] = deque(maxlen=MAX_WAITING_PREFIXES)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, moment: int, hashes: Sequence[bytes], tokens: int) -> None:
        """Let a prefix of so many tokens count as used at a moment; see ``Uses``."""
        if tokens:
            self._waiting.append(_Prefix(moment, hashes, tokens))

    def clear(self) -> None:
        """Drop all that wait."""
        self._waiting.clear()

    def mark(self, step: int, *, at_once: bool) -> None:
        """
        Tell the store of as many as a plan has room for, in one call.

        Args:
            step: Number of the plan.
            at_once: Nobody waits any longer: no other plan may follow.
        """
        if len(self._waiting) < self._few and step % self._few and not at_once:
            return
        keys: list[PackedKey] = []
        moments = []
        for group, hashes, used_ns in self._take():
            keys += self._matcher.keys_of(group, hashes)
            moments.append(used_ns)
        if keys:
            of_parts = np.concatenate(moments).repeat(self._matcher.num_shards)
            uses = Uses(of_parts, np.zeros(len(keys), dtype=np.uint32))
            with contextlib.suppress(StoreUnavailableError):
                self._index.touch(keys, uses)

    def _take(self) -> Iterator[_Blocks]:
        groups, room = self._layout.groups, MAX_TOUCHED_KEYS
        while self._waiting and room > 0:
            prefix = self._waiting[0]
            if prefix.group == len(groups):
                self._waiting.popleft()
                continue
            group, start = groups[prefix.group], prefix.block
            blocks = prefix.tokens // group.block_tokens
            stop = min(blocks, start + max(1, room // self._matcher.num_shards))
            if start < stop:
                hashes = self._layout.hashes_of(group, prefix.hashes, start, stop)
                depths = (start + _AT[: len(hashes)]) * group.block_tokens
                yield group, hashes, prefix.moment - depths
                room -= (stop - start) * self._matcher.num_shards
            prefix.block = stop
            if stop >= blocks:
                prefix.group, prefix.block = prefix.group + 1, 0
