# SPDX-License-Identifier: Apache-2.0
"""
Which blocks a request would load if they were there: what is asked of tiers.

All parts of a block are asked for side by side, and blocks in the order in which they end,
whatever their group: so the longest prefix that comes is the longest that can be loaded.

Of a group with a window, or a state, each hit needs other blocks. Who can say of each block which hits
need it, as to the agent, names those of all hits (``wanted_hits``): it brings the longest of which
all is there. Else those are asked for that the longest hit needs, and a shorter one is none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ucm.blocks import PackedKey, ShardId
from ucm.layout import GroupKind, GroupLayout
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.matching import PrefixMatcher

__all__ = ["WantedBlocks", "falls_short", "wanted_blocks", "wanted_hits"]


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
        found += _parts_of(matcher, hashes, at, range(start, stop), part_bytes)
    found.sort(key=lambda each: each[0])
    return WantedBlocks(
        [key for _, key, _ in found],
        [size for _, _, size in found],
        [end for end, _, _ in found],
    )


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
    found: list[tuple[int, PackedKey, int, tuple[int, int]]] = []
    for at, group in enumerate(layout.groups):
        size = group.block_tokens
        blocks = range(tokens.start // size, tokens.stop // size)
        hits = {
            (block + 1) * size: _hits_with(group, block, tokens.start, align)
            for block in blocks
        }
        for end, key, nbytes in _parts_of(matcher, hashes, at, blocks, part_bytes):
            shortest, longest = hits[end]
            if shortest <= longest or not longest:
                found.append((end, key, nbytes, (shortest, longest)))
    found.sort(key=lambda each: each[0])
    return WantedBlocks(
        [key for _, key, _, _ in found],
        [size for _, _, size, _ in found],
        [end for end, _, _, _ in found],
        (
            [shortest for _, _, _, (shortest, _) in found],
            [longest for _, _, _, (_, longest) in found],
        ),
    )


def _hits_with(
    group: GroupLayout, block: int, start: int, align: int
) -> tuple[int, int]:
    """Return the shortest and the longest hit behind *start* that needs a block; 0: any longer one."""
    prefixes = group.prefixes_with(block)
    shortest = -((start - prefixes.start) // align)
    if group.kind is GroupKind.FULL:
        return shortest, 0
    return shortest, (prefixes.stop - 1 - start) // align


def _parts_of(
    matcher: PrefixMatcher,
    hashes: Sequence[bytes],
    at: int,
    blocks: range,
    part_bytes: Mapping[ShardId, Sequence[int]],
) -> Iterator[tuple[int, PackedKey, int]]:
    """Yield where each part of some blocks of a group ends, its key and its bytes."""
    if not blocks:
        return
    group = matcher.layout.groups[at]
    keys = matcher.keys_of(
        group, matcher.layout.hashes_of(group, hashes, blocks.start, blocks.stop)
    )
    of_parts = [sizes[at] for _, sizes in sorted(part_bytes.items())]
    for number, key in enumerate(keys):
        block, part = divmod(number, len(of_parts))
        end = (blocks.start + block + 1) * group.block_tokens
        yield end, key, of_parts[part]
