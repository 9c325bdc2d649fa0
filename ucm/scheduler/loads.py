# SPDX-License-Identifier: Apache-2.0
"""
Which blocks of a request a hit loads.

A hit is whole blocks of each group. Nothing is made per block: tables and hashes are cut
into tickets as they are.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ucm.errors import LayoutError
from ucm.layout import KVLayout
from ucm.scheduler.messages import Failure, SpanOrder
from ucm.scheduler.requests import NULL_BLOCK
from ucm.scheduler.transfers import OpenTransfers

__all__ = ["FailedLoads", "Hit", "load_orders"]

Hit = tuple[list[SpanOrder], list[range]]
"""Tickets, and ``[groups]`` block indexes of a hit."""


def load_orders(
    layout: KVLayout,
    transfers: OpenTransfers,
    life: tuple[str, int],
    tables: Sequence[Sequence[int]],
    hashes: Sequence[bytes],
    loaded: range,
) -> Hit:
    """
    Order what a hit needs.

    Args:
        layout: Groups, in the order of the request's tables.
        transfers: Makes the tickets.
        life: Request id and generation.
        tables: ``[groups][blocks]`` the request's block tables.
        hashes: The engine's block hashes.
        loaded: Tokens of the hit, behind those that the engine has itself.

    Returns:
        The tickets, and ``[groups]`` block indexes of the hit. Of these only the
        ones are loaded that a hit needs and that the engine has given a block.

    Raises:
        LayoutError: A table or the hashes end before the hit.
    """
    orders: list[SpanOrder] = []
    hit = []
    for group, table in zip(layout.groups, tables, strict=True):
        size = group.block_tokens
        blocks = range(loaded.start // size, loaded.stop // size)
        first = max(blocks.start, group.window_blocks(loaded.stop).start)
        wanted = layout.hashes_of(group, hashes, first, blocks.stop)
        ids = tuple(table[first : blocks.stop])
        if not len(ids) == len(wanted) == blocks.stop - first:
            raise LayoutError(
                f"request {life[0]}: a hit over {blocks.stop} blocks of group "
                f"{group.group_id}, but {first + len(ids)} of them in its table "
                f"and {first + len(wanted)} with a hash"
            )
        for run in _runs(ids):
            orders += transfers.open_load(life, group.group_id, ids[run], wanted[run])
        hit.append(blocks)
    return orders, hit


def _runs(block_ids: Sequence[int]) -> Iterator[slice]:
    """Yield where blocks lie side by side that are not the engine's null block."""
    if NULL_BLOCK not in block_ids:
        ends = [-1, len(block_ids)]
    else:
        nulls = [at for at, each in enumerate(block_ids) if each == NULL_BLOCK]
        ends = [-1, *nulls, len(block_ids)]
    for before, stop in itertools.pairwise(ends):
        if before + 1 < stop:
            yield slice(before + 1, stop)


class FailedLoads:
    """
    Loads that failed, found by ticket and by life.

    Args:
        failures: In the order in which they are told.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self._failures = failures
        self._places: dict[object, list[int]] = {}
        for at, each in enumerate(failures):
            for known in (each.transfer_id, (each.request_id, each.generation)):
                self._places.setdefault(known, []).append(at)

    def told_to(self, life: tuple[str, int], loads: Iterable[int]) -> list[Failure]:
        """Return, in order, those that were ordered for a life or that it waits for."""
        told = {at for each in (life, *loads) for at in self._places.get(each, ())}
        return [self._failures[at] for at in sorted(told)]
