# SPDX-License-Identifier: Apache-2.0
"""What a step saves of one request, on its way into tickets. Pure."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ucm.layout import GroupLayout, KVLayout

__all__ = ["BlockRef", "Share", "Stay", "refs", "runs_of"]


class Stay(NamedTuple):
    """
    A life of a request, as its saves name it.

    Args:
        request_id: Whose.
        generation: Which.
        moment: When its first block counts as used; see ``Uses``.
        tenant: Whose share of the store its blocks take.
    """

    request_id: str
    generation: int
    moment: int = 0
    tenant: int = 0

    @property
    def life(self) -> tuple[str, int]:
        """Request id and generation, by which holds are found."""
        return self[:2]


class BlockRef(NamedTuple):
    """
    A block on its way into an order.

    Args:
        at: Position in the request's block table.
        block_id: Slot in the engine's pool.
        block_hash: The engine's hash.
    """

    at: int
    block_id: int
    block_hash: bytes


Share = tuple[Stay, Sequence[BlockRef]]
"""A life, and consecutive blocks that a step saves of it in one group."""


def refs(
    layout: KVLayout,
    group: GroupLayout,
    indexes: Iterable[int],
    table: Sequence[int],
    hashes: Sequence[bytes],
) -> list[BlockRef]:
    """Return blocks of a request by their positions in a group's table."""
    step = group.block_tokens // layout.hash_block_tokens  # as ``KVLayout.hash_index``
    return [BlockRef(at, table[at], hashes[(at + 1) * step - 1]) for at in indexes]


def runs_of(blocks: Sequence[BlockRef]) -> Iterator[Sequence[BlockRef]]:
    """Yield blocks that are consecutive: what one owner's moment in a ticket says."""
    if blocks[-1].at - blocks[0].at == len(blocks) - 1:
        yield blocks
        return
    start = 0
    for stop, (block, after) in enumerate(itertools.pairwise(blocks), start=1):
        if after.at > block.at + 1:
            yield blocks[start:stop]
            start = stop
    yield blocks[start:]
