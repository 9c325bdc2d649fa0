# SPDX-License-Identifier: Apache-2.0
"""
Which blocks a request would load if they were there: what is asked of tiers.

All parts of a block are asked for side by side, and blocks in the order in which they end,
whatever their group: so the longest prefix that comes is the longest that can be loaded. Of a
group with a window those are asked for that the longest hit needs.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ucm.blocks import PackedKey, ShardId
from ucm.layout import GroupKind
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.matching import PrefixMatcher

__all__ = ["WantedBlocks", "falls_short", "wanted_blocks"]


class WantedBlocks(NamedTuple):
    """Keys in the order in which they are of use, the bytes of each, and where it ends."""

    keys: list[PackedKey]
    sizes: list[int]
    ends: list[int]
    """In tokens of the request."""


def falls_short(match: PrefixMatch, computed_tokens: int, longest: int) -> bool:
    """Return whether a request could load more than was found if more were there."""
    is_looked_up = match.reason in (MatchReason.HIT, MatchReason.MISS)
    return is_looked_up and computed_tokens + match.tokens < longest


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
    found: list[tuple[int, PackedKey, int]] = []
    for at, group in enumerate(matcher.layout.groups):
        size = group.block_tokens
        start, stop = tokens.start // size, tokens.stop // size
        if group.kind is not GroupKind.FULL:
            start = max(start, group.window_blocks(tokens.stop).start)
        if start >= stop:
            continue
        keys = matcher.keys_of(
            group, matcher.layout.hashes_of(group, hashes, start, stop)
        )
        of_parts = [sizes[at] for _, sizes in sorted(part_bytes.items())]
        for number, key in enumerate(keys):
            block, part = divmod(number, len(of_parts))
            found.append(((start + block + 1) * size, key, of_parts[part]))
    found.sort(key=lambda each: each[0])
    return WantedBlocks(
        [key for _, key, _ in found],
        [size for _, _, size in found],
        [end for end, _, _ in found],
    )
