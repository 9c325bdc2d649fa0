# SPDX-License-Identifier: Apache-2.0
"""
The engine's blocks in host memory, copied by numpy.

A span is copied by as few calls as its host slots allow, often by one: each call
gives up the interpreter lock, and beside a busy engine thread it takes up to a switch
interval (5 ms) to get it back. One ``numpy`` call over a list of indexes moves pages
of any row, because all storages lie in one address space: a *table* sees the memory
from a group's lowest to its highest page as one array of equal units, and knows the
units of block 0 and how far the next block's are. Memory between the storages is
spanned by that array and never touched. Where pages do not lie on a common grid, the
array's units overlap, one starting at each byte; numpy can then write pages in one
copy but read them only through a temporary.

Threading: ``register`` and ``close`` run alone. In between nothing changes, so that
``gather``, ``scatter`` and ``lease`` need no lock. Two copies at once must not write
the same page or slot; whoever holds the blocks sees to that.
"""

import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices._torch import KVTensors, find_regions
from ucm.devices.abc import Device, EventRef, Fence
from ucm.devices.events import DoneFence
from ucm.errors import DeviceError, EventNotRecordedError
from ucm.layout import GroupLayout, KVLayout
from ucm.plan import HostSlots

__all__ = ["CPUDevice"]

_STAGED_BYTES = 4 << 20
"""Bytes of one staged copy: it should stay in the cache, and calls should be few."""
_DIRECT_BYTES = 512 << 10
"""From this size up, one piece of host memory is worth a call of its own."""
_MAX_UNIT_BYTES = 8 << 10
"""Numpy keeps the interpreter lock while it assigns fewer than 500 units."""
_MAX_UNITS = 1 << 18
"""Units of one call: bounds the index list to 2 MB where units are tiny."""

_Int64s = npt.NDArray[np.int64]
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
    units: _Int64s
    steps: _Int64s
    start: int
    stop: int

    def index(self, blocks: _Int64s) -> _Int64s:
        """Return ``[n, k]`` where the units of *blocks* are."""
        index: _Int64s = blocks[:, None] * self.steps + self.units
        return index

    def host(self, pool: _Bytes) -> _Units:
        """Return ``[num_slots, k]`` the table's units in each slot."""
        return pool[:, self.start : self.stop].view(self.memory.dtype)

    def pieces(self, pool: _Bytes, slots: _Int64s) -> list[slice]:
        """
        Cut a span into pieces whose host memory is contiguous.

        Returns:
            Nothing when the pieces are so small that staging is cheaper.
        """
        nbytes = self.stop - self.start
        if nbytes == pool.strides[0]:
            cuts = np.flatnonzero(np.diff(slots) != 1) + 1
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

    def staged(self, slots: _Int64s) -> list[slice]:
        """Cut a span into parts that are staged one by one."""
        blocks = _STAGED_BYTES // (self.stop - self.start)
        return _cut(0, len(slots), min(blocks, _MAX_UNITS // len(self.units)))

    def gather(self, blocks: _Int64s, pool: _Bytes, slots: _Int64s) -> None:
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

    def scatter(self, blocks: _Int64s, pool: _Bytes, slots: _Int64s) -> None:
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


def _cut(start: int, stop: int, limit: int) -> list[slice]:
    step = max(limit, 1)
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


def _build_table(
    tensors: KVTensors, group: GroupLayout, first: int, last: int
) -> _Table:
    """Build the table of the group's rows *first* up to, without, *last*."""
    extents: list[tuple[int, int, int]] = []  # address of block 0, stride, bytes
    for row in group.rows[first:last]:
        region = tensors.regions[group.group_id, row.row_id]
        storage = tensors.storages[region.storage_id]
        address = storage.data_ptr() + region.offset
        stride, nbytes = region.block_stride, region.page_bytes
        before, before_stride, before_nbytes = extents[-1] if extents else (0, 0, 0)
        if (address, stride) == (before + before_nbytes, before_stride):
            # Neighbours in memory too: one larger extent.
            extents[-1] = (before, stride, before_nbytes + nbytes)
        else:
            extents.append((address, stride, nbytes))
    low = min(address for address, _, _ in extents)
    blocks_behind = tensors.num_blocks - 1
    high = max(address + blocks_behind * step + n for address, step, n in extents)
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
    offset = group.row_offsets[first]
    return _Table(
        np.ndarray(
            ((high - low - unit) // grid + 1,),
            np.dtype((np.void, unit)),
            memoryview((ctypes.c_uint8 * (high - low)).from_address(low)),
            strides=(grid,),
        ),
        np.concatenate(units),
        np.repeat([step // grid for _, step, _ in extents], counts),
        offset,
        offset + sum(nbytes for _, _, nbytes in extents),
    )


@attrs.frozen(eq=False)
class _Group:
    """One group's tables: over all rows together, and row by row."""

    block_bytes: int
    whole: _Table
    rows: Mapping[RowId, _Table]

    def tables(self, row_ids: Sequence[RowId]) -> list[_Table]:
        unknown = [row_id for row_id in row_ids if row_id not in self.rows]
        if unknown:
            raise DeviceError(f"row {unknown[0]} is not of the group")
        wanted = set(row_ids)
        if len(wanted) == len(self.rows):
            return [self.whole]
        return [self.rows[row_id] for row_id in sorted(wanted)]


class CPUDevice(Device):
    """
    Blocks of an engine that computes on the CPU.

    Copies are made on the calling thread, and the engine's work is done when its call
    returns: every fence has passed.

    Args:
        num_blocks: Blocks in the engine's pool. Needed where tensors count smaller
            blocks of the kernel; otherwise their first dimension says it.
    """

    is_synchronous = True

    def __init__(self, num_blocks: int | None = None) -> None:
        if num_blocks is not None and num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is not positive")
        self._num_blocks = num_blocks
        self._tensors: KVTensors | None = None
        self._groups: dict[GroupId, _Group] = {}
        self._is_closed = False

    def register(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> None:
        """Take the engine's KV cache; see ``Device.register``."""
        self._check_open()
        if self._tensors is not None:
            raise DeviceError("a KV cache is registered already")
        tensors = find_regions(
            layout, kv_caches, num_blocks=self._num_blocks, device_type="cpu"
        )
        self._groups = {
            group.group_id: _Group(
                group.block_bytes,
                _build_table(tensors, group, 0, len(group.rows)),
                {
                    row.row_id: _build_table(tensors, group, at, at + 1)
                    for at, row in enumerate(group.rows)
                },
            )
            for group in layout.groups
        }
        self._tensors = tensors

    def pin(self, memory: _Bytes) -> None:
        """Do nothing: all memory is the host's."""

    def begin_step(self, step: int) -> None:
        """Do nothing: no event is ever recorded."""

    def lease(self, event: EventRef | None = None) -> Fence:
        """
        Return a fence that has passed.

        Raises:
            DeviceError: The device is closed.
            EventNotRecordedError: Any event: torch records none on the CPU.
        """
        self._check_open()
        if event is not None:
            raise EventNotRecordedError(
                f"a {type(event).__name__} proves nothing on the CPU, where no event "
                f"can be recorded"
            )
        return DoneFence()

    def synchronize(self) -> None:
        """Return at once: the engine's calls return when their work is done."""
        self._check_open()

    def gather(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
        slots: HostSlots,
    ) -> Fence:
        """
        Copy pages of blocks into their slots before returning.

        Raises:
            DeviceError: A group, row, block or slot does not exist; nothing moved.
            ValueError: Blocks and slots do not match; a bug of the caller.
        """
        group, blocks = self._check_copy(group_id, block_ids, slots)
        for table in group.tables(row_ids):
            table.gather(blocks, slots.pool, slots.slots)
        return DoneFence()

    def scatter(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        slots: HostSlots,
        block_ids: Sequence[BlockId],
    ) -> Fence:
        """Copy slots into pages before returning; raises as ``gather`` does."""
        group, blocks = self._check_copy(group_id, block_ids, slots)
        for table in group.tables(row_ids):
            table.scatter(blocks, slots.pool, slots.slots)
        return DoneFence()

    def close(self) -> None:
        """Let go of the engine's tensors. Idempotent; no copy may be under way."""
        self._is_closed = True
        self._groups = {}
        self._tensors = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise DeviceError("the device is closed")

    def _check_copy(
        self, group_id: GroupId, block_ids: Sequence[BlockId], slots: HostSlots
    ) -> tuple[_Group, _Int64s]:
        self._check_open()
        if self._tensors is None:
            raise DeviceError("no KV cache is registered")
        group = self._groups.get(group_id)
        if group is None:
            raise DeviceError(f"no group {group_id} is registered")
        if len(block_ids) != len(slots):
            raise ValueError(f"{len(block_ids)} blocks for {len(slots)} slots")
        if slots.block_bytes != group.block_bytes:
            raise ValueError(
                f"slots of {slots.block_bytes} bytes for blocks of {group.block_bytes}"
            )
        blocks = np.asarray(block_ids, dtype=np.int64)
        # Numpy takes negative indexes from the end, so that nothing would stop them.
        _check_range("block", blocks, self._tensors.num_blocks)
        _check_range("slot", slots.slots, len(slots.pool))
        return group, blocks


def _check_range(what: str, ids: _Int64s, count: int) -> None:
    wrong = ids[(ids < 0) | (ids >= count)]
    if len(wrong):
        raise DeviceError(f"{what} {wrong[0]} is not in 0..{count - 1}")
