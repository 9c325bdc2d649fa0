# SPDX-License-Identifier: Apache-2.0
"""An engine's memory as regions, whatever it is made of. Knows no torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from ucm.blocks import GroupId, RowId
from ucm.errors import LayoutError
from ucm.layout import KVLayout, Region, RowLayout

__all__ = ["KVMemory", "Storage", "check_apart", "layers_of"]

_Regions = Mapping[tuple[GroupId, RowId], tuple[Region, ...]]


class Storage(Protocol):
    """A piece of memory in which regions lie; keeps it alive."""

    def data_ptr(self) -> int:
        """Return the address of its first byte."""


@attrs.frozen(eq=False)
class KVMemory:
    """
    The engine's memory, as regions.

    Args:
        storages: Indexed by ``Region.storage_id``. Keeps the memory alive.
        regions: Where each row of each group lies: its parts, which are back to back
            in a slot. A row that groups share has parts per group; they differ in
            ``page_bytes`` only.
        num_blocks: Blocks in the engine's pool.
    """

    storages: tuple[Storage, ...]
    regions: _Regions
    num_blocks: int


def layers_of(layout: KVLayout) -> Iterator[tuple[GroupId, RowLayout, str]]:
    """Yield each layer with its group and row."""
    for group in layout.groups:
        for row in group.rows:
            for name in row.layer_names:
                yield group.group_id, row, name


def check_apart(
    layout: KVLayout, regions: _Regions, storages: Sequence[Storage]
) -> None:
    """
    Refuse rows of a group that overlap, also by storages that share memory.

    Raises:
        LayoutError: Two do; names a layer of each.
    """
    for group in layout.groups:
        _check_rows(
            [
                (row, part)
                for row in group.rows
                for part in regions[group.group_id, row.row_id]
            ],
            [storage.data_ptr() for storage in storages],
        )


def _check_rows(
    rows: Sequence[tuple[RowLayout, Region]], addresses: Sequence[int]
) -> None:
    for index, (row, mine) in enumerate(rows):
        for other, theirs in rows[:index]:
            apart = addresses[theirs.storage_id] - addresses[mine.storage_id]
            if not _are_apart(mine, theirs, apart):
                raise LayoutError(
                    f"layers {other.layer_names[0]!r} and {row.layer_names[0]!r} "
                    f"overlap: {theirs} and {mine}"
                )


def _are_apart(a: Region, b: Region, apart: int) -> bool:
    """Compare places, of which *b*'s storage begins *apart* bytes behind *a*'s."""
    if a.end <= b.offset + apart or b.end + apart <= a.offset:
        return True
    if a.block_stride != b.block_stride:
        return False
    phase = (b.offset + apart - a.offset) % a.block_stride
    return a.page_bytes <= phase <= a.block_stride - b.page_bytes
