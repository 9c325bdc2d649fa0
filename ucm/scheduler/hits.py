# SPDX-License-Identifier: Apache-2.0
"""
From where the tokens of a hit came: the slab, or a tier that brought them into it. Pure.

A token came from the outermost medium of the blocks that end with its own, over all groups and
parts; what nobody fetched was in the slab.
"""

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["SLAB", "tokens_by_medium"]

SLAB = 0


def tokens_by_medium(
    tokens: range, ends: Sequence[int], media: bytes
) -> dict[int, int]:
    """
    Return how many tokens came from each medium; their sum is that of *tokens*.

    Args:
        tokens: Of the hit.
        ends: Of the blocks that were asked for, behind which token each ends; ascending.
        media: Where those from the first on were, as far as they were found.
    """
    outermost: dict[int, int] = {}
    for end, medium in zip(ends, media, strict=False):
        if tokens.start < end <= tokens.stop:
            outermost[end] = max(outermost.get(end, SLAB), medium)
    found: dict[int, int] = {}
    for start, end in pairwise([tokens.start, *outermost]):
        medium = outermost[end]
        found[medium] = found.get(medium, 0) + end - start
    rest = len(tokens) - sum(found.values())
    if rest:
        found[SLAB] = found.get(SLAB, 0) + rest
    return found
