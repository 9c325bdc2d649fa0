# SPDX-License-Identifier: Apache-2.0
"""The memory of engines, for the contract of devices: drawn, built, read and written."""

import enum
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from ucm.blocks import BlockId, GroupId, RowId
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.plan import HostSlots

__all__ = ["Arrangement", "Copy", "Engine", "Nesting", "arrangements"]

_Bytes = npt.NDArray[np.uint8]


@attrs.frozen(kw_only=True)
class Copy:
    """One call of ``gather`` or ``scatter``."""

    group: GroupLayout
    row_ids: tuple[RowId, ...]
    block_ids: tuple[BlockId, ...]
    slots: HostSlots


class Nesting(enum.Enum):
    """Which dimension of the engine's memory is outermost."""

    LAYERS = enum.auto()
    BLOCKS = enum.auto()
    STORAGES = enum.auto()


@attrs.frozen(kw_only=True)
class Arrangement:
    """
    The memory of an engine, as a value.

    Args:
        num_blocks: Blocks in the pool.
        nesting: How rows and blocks nest.
        pages: ``[rows]`` bytes of each row's page.
        paddings: ``[rows]`` bytes between one page and what follows it.
        groups: Row ids of each group; a row in two groups is overlaid.
        shrink: Bytes by which pages of later groups are shorter.
        parts: Kernel blocks per block, where pages can be cut that way.
        head: Bytes before the first page of a storage.
        is_split: Layers come as tuples of keys and values where their pages can be
            halved: the first halves of all blocks, then the second ones.
    """

    num_blocks: int
    nesting: Nesting
    pages: tuple[int, ...]
    paddings: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    shrink: int = 0
    parts: int = 1
    head: int = 0
    is_split: bool = False

    @property
    def layout(self) -> KVLayout:
        """The layout, with one layer per group and row."""
        groups = [
            GroupLayout(
                group_id=GroupId(group_id),
                kind=GroupKind.FULL,
                block_tokens=16,
                rows=tuple(
                    RowLayout(
                        row_id=RowId(row),
                        page_bytes=max(1, self.pages[row] - self.shrink * group_id),
                        layer_names=(f"group{group_id}.row{row}",),
                    )
                    for row in rows
                ),
            )
            for group_id, rows in enumerate(self.groups)
        ]
        return KVLayout(groups=tuple(groups), hash_block_tokens=16, engine_tag="test")

    def place(self, row: int) -> tuple[int, int, int]:
        """Return storage, offset of block 0's page and bytes from block to block."""
        sizes = [sum(both) for both in zip(self.pages, self.paddings, strict=True)]
        if self.nesting is Nesting.STORAGES:
            return row, self.head, sizes[row]
        if self.nesting is Nesting.BLOCKS:
            return 0, self.head + sum(sizes[:row]), sum(sizes)
        return 0, self.head + sum(sizes[:row]) * self.num_blocks, sizes[row]

    def tensors(self, row: int, page_bytes: int) -> list[tuple[int, int, int, int]]:
        """Return storage, offset, bytes from block to block and bytes of each part."""
        storage, offset, stride = self.place(row)
        is_whole = self.shrink or stride % 2 or page_bytes != stride
        if is_whole or not self.is_split:
            return [(storage, offset, stride, page_bytes)]
        half = stride // 2
        behind = offset + half * self.num_blocks
        return [(storage, offset, half, half), (storage, behind, half, half)]

    @property
    def storage_bytes(self) -> list[int]:
        """Bytes of each storage."""
        places = [self.place(row) for row in range(len(self.pages))]
        sizes = [0] * (1 + places[-1][0])
        for storage, offset, stride in places:
            end = offset + stride * self.num_blocks
            sizes[storage] = max(sizes[storage], end)
        return sizes


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    """Draw memories of engines: nested, padded, cut, split and overlaid."""
    num_rows = draw(st.integers(1, 4))
    rows = tuple(range(num_rows))
    num_groups = draw(st.integers(1, num_rows))
    groups = [rows[group_id::num_groups] for group_id in range(num_groups)]
    if draw(st.booleans()):
        groups[0] = rows
    page = st.sampled_from([1, 3, 16, 24, 64, 4096])
    pages = page.map(lambda same: (same,) * num_rows) | st.tuples(*[page] * num_rows)
    padding = st.integers(0, 9)
    paddings = st.just((0,) * num_rows) | st.tuples(*[padding] * num_rows)
    return Arrangement(
        num_blocks=draw(st.integers(2, 6)),
        nesting=draw(st.sampled_from(Nesting)),
        pages=draw(pages),
        paddings=draw(paddings),
        groups=tuple(groups),
        shrink=draw(st.sampled_from([0, 0, 2])),
        parts=draw(st.integers(1, 2)),
        head=draw(st.sampled_from([0, 5, 64])),
        is_split=draw(st.booleans()),
    )


class Engine:
    """
    Stands for the engine: owns the memory and knows which byte is whose.

    Args:
        arrangement: What the memory looks like.
        make_memory: Allocates one storage.
    """

    def __init__(
        self, arrangement: Arrangement, make_memory: Callable[[int], torch.Tensor]
    ) -> None:
        self.arrangement = arrangement
        self.layout = arrangement.layout
        self.memory = [make_memory(nbytes) for nbytes in arrangement.storage_bytes]
        self.kv_caches: dict[str, object] = {
            row.layer_names[0]: self._view(row)
            for group in self.layout.groups
            for row in group.rows
        }

    def _view(self, row: RowLayout) -> object:
        views = []
        tensors = self.arrangement.tensors(row.row_id, row.page_bytes)
        for storage, offset, stride, nbytes in tensors:
            parts = self.arrangement.parts
            if nbytes % parts or stride != nbytes:
                parts = 1
            view = self.memory[storage].as_strided(
                (self.arrangement.num_blocks * parts, nbytes // parts),
                (stride // parts, 1),
                offset,
            )
            views.append(view)
        return views[0] if len(views) == 1 else tuple(views)

    def fill(self, seed: int) -> list[_Bytes]:
        """Write random bytes everywhere and return a copy of them."""
        random = np.random.default_rng(seed)
        image = [
            random.integers(0, 256, len(part), dtype=np.uint8) for part in self.memory
        ]
        self.write(image)
        return image

    def write(self, image: Sequence[_Bytes]) -> None:
        """Overwrite the memory."""
        for part, data in zip(self.memory, image, strict=True):
            part.copy_(torch.from_numpy(data))

    def read(self) -> list[_Bytes]:
        """Return a copy of the memory."""
        return [part.cpu().numpy().copy() for part in self.memory]

    def pages(
        self,
        image: Sequence[_Bytes],
        group: GroupLayout,
        row_ids: Sequence[int],
        block: int,
    ) -> Iterator[tuple[_Bytes, slice]]:
        """Yield the view of each page's parts in *image* and their place in the slot."""
        for row, at in zip(group.rows, group.row_offsets, strict=True):
            if row.row_id not in row_ids:
                continue
            tensors = self.arrangement.tensors(row.row_id, row.page_bytes)
            for storage, offset, stride, nbytes in tensors:
                start = offset + block * stride
                yield image[storage][start : start + nbytes], slice(at, at + nbytes)
                at += nbytes
