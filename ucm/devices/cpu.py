# SPDX-License-Identifier: Apache-2.0
"""
The engine's blocks in host memory.

A span is copied by one native call where there is one (``ucm.native``), which gives up the
interpreter lock if it takes long. Else numpy copies, by as few calls as the host slots allow,
often by one: each gives up the lock, and beside a busy engine thread it takes up to a switch
interval (5 ms) to get it back. One ``numpy`` call over a list of indexes moves pages
of any row, because all storages lie in one address space: a *table* sees the memory
from a group's lowest to its highest page as one array of equal units, and knows the
units of block 0 and how far the next block's are. Memory between the storages is
spanned by that array and never touched. Where pages do not lie on a common grid, the
array's units overlap, one starting at each byte; numpy can then write pages in one
copy but read them only through a temporary.

Threading: see ``ucm.devices._paged``.
"""

import ctypes
import itertools
import math
import operator
import sys
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from ucm import native
from ucm.blocks import RowId
from ucm.devices._buffers import find_buffers, is_buffer
from ucm.devices._loads import KEPT_BYTES, find_loads
from ucm.devices._paged import Int64s, PagedBlocks, PagedCopy, PagedDevice, Part
from ucm.devices._pages import Pages
from ucm.devices._regions import KVMemory
from ucm.devices.abc import EventRef, Fence
from ucm.devices.driver import Direction
from ucm.devices.events import DoneFence
from ucm.errors import EventNotRecordedError
from ucm.layout import KVLayout

__all__ = ["CPUDevice"]

_STAGED_BYTES = 4 << 20
"""Bytes of one staged copy: it should stay in the cache, and calls should be few."""
_DIRECT_BYTES = 512 << 10
"""From this size up, one piece of host memory is worth a call of its own."""
_MAX_UNIT_BYTES = 8 << 10
"""Numpy keeps the interpreter lock while it assigns fewer than 500 units."""
_MAX_UNITS = 1 << 18
"""Units of one call: bounds the index list to 2 MB where units are tiny."""

_Bytes = npt.NDArray[np.uint8]
_Units = npt.NDArray[np.void]


@attrs.frozen(eq=False)
class _Table:
    """
    Rows that are neighbours in the slot, as units of one array.

    Args:
        memory: All units from the lowest page to the highest.
        units: ``[k]`` where the units of block 0 are, in the slot's order.
        steps: ``[k]`` how far the same unit of the next block is.
        start: First byte within the slot.
        stop: First byte behind.
    """

    memory: _Units
    units: Int64s
    steps: Int64s
    start: int
    stop: int

    def index(self, blocks: Int64s) -> Int64s:
        """Return ``[n, k]`` where the units of *blocks* are."""
        index: Int64s = blocks[:, None] * self.steps + self.units
        return index

    def host(self, pool: _Bytes) -> _Units:
        """Return ``[num_slots, k]`` the table's units in each slot."""
        return pool[:, self.start : self.stop].view(self.memory.dtype)

    def pieces(self, pool: _Bytes, slots: Int64s) -> list[slice]:
        """
        Cut a span into pieces whose host memory is contiguous.

        Returns:
            Nothing when the pieces are so small that staging is cheaper.
        """
        nbytes = self.stop - self.start
        if nbytes == pool.strides[0]:
            cuts = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
        else:
            cuts = np.arange(1, len(slots))
        if (len(cuts) + 1) * _DIRECT_BYTES > len(slots) * nbytes:
            return []
        edges = [0, *cuts.tolist(), len(slots)]
        return [
            part
            for start, stop in itertools.pairwise(edges)
            for part in _cut(start, stop, _MAX_UNITS // len(self.units))
        ]

    def staged(self, span: Int64s) -> list[slice]:
        """Cut a span into parts that are staged one by one."""
        blocks = _STAGED_BYTES // (self.stop - self.start)
        return _cut(0, len(span), min(blocks, _MAX_UNITS // len(self.units)))

    def gather(self, blocks: Int64s, pool: _Bytes, slots: Int64s) -> None:
        """Copy pages into slots."""
        host = self.host(pool)
        on_grid = self.memory.flags.c_contiguous
        pieces = self.pieces(pool, slots) if on_grid else []
        for part in pieces:
            index, slot = self.index(blocks[part]), slots[part.start]
            # Only with mode="clip" does numpy write to `out` without a copy.
            self.memory.take(index, out=host[slot : slot + len(index)], mode="clip")
        if pieces:
            return
        for part in self.staged(slots):
            index = self.index(blocks[part])
            host[slots[part]] = (
                self.memory.take(index, mode="clip") if on_grid else self.memory[index]
            )

    def scatter(self, blocks: Int64s, pool: _Bytes, slots: Int64s) -> None:
        """Copy slots into pages."""
        host = self.host(pool)
        pieces = self.pieces(pool, slots)
        for part in pieces:
            index, slot = self.index(blocks[part]), slots[part.start]
            self.memory[index] = host[slot : slot + len(index)]
        if pieces:
            return
        for part in self.staged(slots):
            self.memory[self.index(blocks[part])] = host[slots[part]]

    def clear(self, blocks: Int64s) -> None:
        """Zero pages."""
        zero = np.zeros((), self.memory.dtype)
        for part in self.staged(blocks):
            self.memory[self.index(blocks[part])] = zero


def _cut(start: int, stop: int, limit: int) -> list[slice]:
    step = max(limit, 1)
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


def _build_table(parts: Sequence[Part], num_blocks: int) -> _Table:
    """Build the table of parts that are neighbours in the slot."""
    extents: list[tuple[int, int, int]] = []  # address of block 0, stride, bytes
    for part in parts:
        address, stride, nbytes = part.address, part.stride, part.nbytes
        before, before_stride, before_nbytes = extents[-1] if extents else (0, 0, 0)
        if (address, stride) == (before + before_nbytes, before_stride):
            # Neighbours in memory too: one larger extent.
            extents[-1] = (before, stride, before_nbytes + nbytes)
        else:
            extents.append((address, stride, nbytes))
    low = min(address for address, _, _ in extents)
    high = max(address + (num_blocks - 1) * step + n for address, step, n in extents)
    common = math.gcd(*(nbytes for _, _, nbytes in extents))
    unit = next(n for n in range(_MAX_UNIT_BYTES, 0, -1) if not common % n)
    on_grid = not any(
        (address - low) % unit or step % unit for address, step, _ in extents
    )
    grid = unit if on_grid else 1
    counts = [nbytes // unit for _, _, nbytes in extents]
    units = [
        (address - low + np.arange(count) * unit) // grid
        for count, (address, _, _) in zip(counts, extents, strict=True)
    ]
    return _Table(
        np.ndarray(
            ((high - low - unit) // grid + 1,),
            np.dtype((np.void, unit)),
            memoryview((ctypes.c_uint8 * (high - low)).from_address(low)),
            strides=(grid,),
        ),
        np.concatenate(units),
        np.repeat([step // grid for _, step, _ in extents], counts),
        parts[0].offset,
        parts[-1].offset + parts[-1].nbytes,
    )


@attrs.frozen(eq=False)
class _Group:
    """One group's pages, and its tables: over all rows together, and row by row."""

    pages: Pages
    whole: _Table
    rows: Mapping[RowId, _Table]

    def tables(self, pages: "PagedBlocks[_Group]") -> list[_Table]:
        if pages.is_whole:
            return [self.whole]
        return [self.rows[row_id] for row_id in pages.row_ids]


class CPUDevice(PagedDevice[_Group]):
    """
    Blocks in host memory: torch tensors, or whatever has the buffer protocol.

    torch is imported where it is given tensors only. Copies are made on the calling thread, and the engine's work is done when its call
    returns: every fence has passed. Where native code copies, a load tells the checksums of
    what it copied; a save would hold its blocks for longer.

    Args:
        num_blocks: Blocks in the engine's pool. Needed where tensors count smaller
            blocks of the kernel; otherwise their first dimension says it.
    """

    is_synchronous = True

    def __init__(self, num_blocks: int | None = None) -> None:
        super().__init__(num_blocks)
        self._loads = find_loads(native.LIBRARY)
        self.tells_digests = self._loads is not None
        self._most_hashing = 1

    def hash_on(self, most_threads: int) -> None:
        """Take so many threads for a load; see ``Device.hash_on``."""
        self._most_hashing = most_threads

    def pin(self, memory: _Bytes) -> str:
        """Do nothing: all memory is the host's."""
        return ""

    def begin_step(self, step: int) -> None:
        """Do nothing: no event is ever recorded."""

    def lease(self, event: EventRef | None = None) -> Fence:
        """
        Return a fence that has passed.

        Raises:
            DeviceError: The device is closed, or nothing is registered.
            EventNotRecordedError: Any event: torch records none on the CPU.
        """
        if self._tensors is None or self._is_closed:
            self._check_registered()
        if event is not None:
            raise EventNotRecordedError(
                f"a {type(event).__name__} proves nothing on the CPU, where no event "
                f"can be recorded"
            )
        return DoneFence()

    def synchronize(self) -> None:
        """Return at once: the engine's calls return when their work is done."""
        self._check_registered()

    def _locate(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> KVMemory:
        are_buffers = bool(kv_caches) and all(map(is_buffer, kv_caches.values()))
        if are_buffers or sys.modules.get("torch") is None:  # who has tensors has it
            return find_buffers(layout, kv_caches, num_blocks=self._num_blocks)
        import torch

        from ucm.devices._torch import find_regions

        host = torch.device("cpu")
        return find_regions(layout, kv_caches, num_blocks=self._num_blocks, device=host)

    def _prepare(self, parts: Sequence[Part], num_blocks: int) -> _Group:
        rows = itertools.groupby(parts, operator.attrgetter("row_id"))
        return _Group(
            Pages.of(parts),
            _build_table(parts, num_blocks),
            {row_id: _build_table(list(mine), num_blocks) for row_id, mine in rows},
        )

    def _copy(self, copy: PagedCopy[_Group], direction: Direction) -> Fence:
        """Copy before returning."""
        is_load = direction is Direction.TO_DEVICE
        if is_load and copy.seeds and copy.is_whole and self._loads is not None:
            return self._loads(copy, copy.group.pages, self._most_hashing)
        if (library := native.LIBRARY) is not None:
            copies = copy.group.pages.batch(copy, direction)
            is_brief = len(copy.blocks) * copy.slots.block_bytes <= KEPT_BYTES
            move = library.brief_moves if is_brief else library.moves
            lists = (copies.targets, copies.sources, copies.nbytes)
            # Of a save the checksums are next; a load leaves the caches to the engine.
            move(*map(native.address_of, lists), len(copies), not is_load)
            return DoneFence()
        pool, slots = copy.slots.pool, copy.slots.slots
        for table in copy.group.tables(copy):
            if is_load:
                table.scatter(copy.blocks, pool, slots)
            else:
                table.gather(copy.blocks, pool, slots)
        return DoneFence()

    def _clear(self, pages: PagedBlocks[_Group]) -> Fence:
        """Zero before returning."""
        for table in pages.group.tables(pages):
            table.clear(pages.blocks)
        return DoneFence()
