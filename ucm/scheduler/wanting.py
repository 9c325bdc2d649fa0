# SPDX-License-Identifier: Apache-2.0
"""
Which blocks a request would load if they were there: what is asked of tiers, and what they brought.

All parts of a block are asked for side by side, and blocks in the order in which they end,
whatever their group: so the longest prefix that comes is the longest that can be loaded.

Of a group with a window, or a state, each hit needs other blocks. Who can say of each block which hits
need it, as to the agent, names those of all hits (``wanted_hits``): it brings the longest of which
all is there. Else those are asked for that the longest hit needs, and a shorter one is none.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ucm.blocks import PackedKey, ShardId
from ucm.layout import GroupKind, GroupLayout
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.matching import PrefixMatcher

__all__ = [
    "WantedBlocks",
    "falls_short",
    "tokens_by_medium",
    "wanted_blocks",
    "wanted_hits",
]

_ANY: Final = 0
"""In place of the longest hit that needs a block: all that are longer do."""
_NONE: Final = -1
"""No hit does."""
_SLAB: Final = 0
"""Among media, which else are tiers."""


class WantedBlocks(NamedTuple):
    """Keys in the order in which they are of use, the bytes of each, and where it ends."""

    keys: list[PackedKey]
    sizes: list[int]
    ends: list[int]
    """In tokens of the request."""
    hits: tuple[list[int], list[int]] | None = None
    """The shortest and the longest hit that needs each, see ``ucm.agent.protocol.Ask``; None: all
    that are long enough. Hits are counted in alignments of the layout."""

    def ends_of(self, reach: int) -> list[int]:
        """Return where those end that a hit needs."""
        if self.hits is None:
            return self.ends
        return [
            end
            for end, shortest, longest in zip(self.ends, *self.hits, strict=True)
            if shortest <= reach and (reach <= longest or not longest)
        ]


def falls_short(match: PrefixMatch, computed_tokens: int, longest: int) -> bool:
    """Return whether a request could load more than was found if more were there."""
    is_looked_up = match.reason in (MatchReason.HIT, MatchReason.MISS)
    return is_looked_up and computed_tokens + match.tokens < longest


def tokens_by_medium(
    tokens: range, ends: Sequence[int], media: bytes
) -> dict[int, int]:
    """
    Return how many tokens of a hit came from each medium; their sum is that of *tokens*.

    A token came from the outermost medium of the blocks that end with its own, over all
    groups and parts; what nobody fetched was in the slab.

    Args:
        tokens: Of the hit.
        ends: Of the blocks that were asked for, behind which token each ends; ascending.
        media: Where those from the first on were, as far as they were found.
    """
    outermost: dict[int, int] = {}
    for end, medium in zip(ends, media, strict=False):
        if tokens.start < end <= tokens.stop:
            outermost[end] = max(outermost.get(end, _SLAB), medium)
    found = Counter[int]()
    for start, end in pairwise([tokens.start, *outermost]):
        found[outermost[end]] += end - start
    if rest := len(tokens) - found.total():
        found[_SLAB] += rest
    return found


def wanted_blocks(
    matcher: PrefixMatcher,
    hashes: Sequence[bytes],
    tokens: range,
    part_bytes: Mapping[ShardId, Sequence[int]],
) -> WantedBlocks:
    """
    Return what a hit over some tokens needs.

    Args:
        matcher: Names keys.
        hashes: The engine's block hashes.
        tokens: From those that are computed to the longest hit.
        part_bytes: Of each part of a block, by group.
    """
    parts = _Parts(matcher, hashes, part_bytes)
    for group in matcher.layout.groups:
        size = group.block_tokens
        start, stop = tokens.start // size, tokens.stop // size
        if group.kind is not GroupKind.FULL:
            start = max(start, group.window_blocks(tokens.stop).start)
        parts.add(group, range(start, stop))
    return parts.wanted(parts.in_order())


def wanted_hits(
    matcher: PrefixMatcher,
    hashes: Sequence[bytes],
    tokens: range,
    part_bytes: Mapping[ShardId, Sequence[int]],
    most: int,
) -> WantedBlocks:
    """
    Return what all hits over some tokens need, and which of them needs what.

    Args:
        matcher: Names keys.
        hashes: The engine's block hashes.
        tokens: From those that are computed to the longest hit; both are ends of hits.
        part_bytes: Of each part of a block, by group.
        most: Keys; of more tokens than they are for nothing is asked.
    """
    layout = matcher.layout
    align = layout.alignment_tokens
    of_step = sum(align // group.block_tokens for group in layout.groups)
    last = tokens.start + most // (of_step * max(1, len(part_bytes))) * align
    tokens = range(tokens.start, min(tokens.stop, last))
    parts = _Parts(matcher, hashes, part_bytes)
    spans = [np.zeros((2, 0), np.int64)]
    for group in layout.groups:
        size = group.block_tokens
        ends = parts.add(group, range(tokens.start // size, tokens.stop // size))
        spans.append(np.stack(_hits_with(group, ends - tokens.start, align)))
    shortest, longest = np.concatenate(spans, axis=1)
    order = parts.in_order()
    order = order[(longest != _NONE)[order]]
    hits = shortest[order].tolist(), longest[order].tolist()
    return parts.wanted(order)._replace(hits=hits)


def _hits_with(
    group: GroupLayout, ends: npt.NDArray[np.int64], align: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the shortest and the longest hit that needs blocks which end there, if any does."""
    shortest = -(-ends // align)
    if group.kind is GroupKind.FULL:
        return shortest, np.full_like(ends, _ANY)
    first = group.prefixes_with(0)  # of each other one they begin so much later
    longest = (ends + (first.stop - first.start) - 1) // align
    # Within the first alignment that may be 0, which is no hit and not any of them.
    return shortest, np.where(longest < shortest, _NONE, longest)


class _Parts:
    """
    Parts of blocks, group by group.

    Args:
        matcher: Names keys.
        hashes: The engine's block hashes.
        part_bytes: Of each part of a block, by group.
    """

    def __init__(
        self,
        matcher: PrefixMatcher,
        hashes: Sequence[bytes],
        part_bytes: Mapping[ShardId, Sequence[int]],
    ) -> None:
        self._matcher = matcher
        self._hashes = hashes
        self._part_bytes = [sizes for _, sizes in sorted(part_bytes.items())]
        self._keys: list[PackedKey] = []
        self._sizes: list[int] = []
        self._ends = [np.zeros(0, np.int64)]

    def add(self, group: GroupLayout, blocks: range) -> npt.NDArray[np.int64]:
        """Take all parts of some blocks of a group; return where each ends, in tokens."""
        layout = self._matcher.layout
        keys: list[PackedKey] = []
        if blocks:
            hashes = layout.hashes_of(group, self._hashes, blocks.start, blocks.stop)
            keys = self._matcher.keys_of(group, hashes)
        at = layout.groups.index(group)
        sizes = [each[at] for each in self._part_bytes]
        self._keys += keys
        self._sizes += sizes * (len(keys) // max(1, len(sizes)))
        numbers = np.arange(len(keys)) // max(1, len(sizes))
        ends = (numbers + blocks.start + 1) * group.block_tokens
        self._ends.append(ends)
        return ends

    def in_order(self) -> npt.NDArray[np.int64]:
        """Return the numbers of all parts, in the order in which they are of use."""
        return np.argsort(np.concatenate(self._ends), kind="stable")

    def wanted(self, order: npt.NDArray[np.int64]) -> WantedBlocks:
        """Return parts by their numbers."""
        numbers = order.tolist()
        return WantedBlocks(
            [self._keys[at] for at in numbers],
            [self._sizes[at] for at in numbers],
            np.concatenate(self._ends)[order].tolist(),
        )
