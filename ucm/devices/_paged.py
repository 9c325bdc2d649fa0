# SPDX-License-Identifier: Apache-2.0
"""
What all devices check before a byte moves.

A device that copies pages of memory derives from ``PagedDevice`` and says what
it makes of a group at registration, and how it copies.

Threading: ``register``, ``unregister`` and ``close`` run alone. In between nothing changes here, so that
``gather`` and ``scatter`` need no lock. Two copies at once must not write the same page
or slot; whoever holds the blocks sees to that.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices._regions import KVMemory
from ucm.devices.abc import Device, Fence
from ucm.devices.driver import Direction
from ucm.errors import DeviceError
from ucm.layout import GroupLayout, KVLayout
from ucm.plan import HostSlots

__all__ = ["Int64s", "PagedBlocks", "PagedCopy", "PagedDevice", "Part"]

Int64s = npt.NDArray[np.int64]
G = TypeVar("G")
_Prepared = TypeVar("_Prepared")


@attrs.frozen
class Part:
    """
    One part of a group's page: all of a row, or one tensor's share of it.

    Args:
        row_id: The row.
        address: Of the part of block 0.
        stride: Bytes from one block's part to the next.
        nbytes: Of the part.
        offset: Where it starts within a slot.
    """

    row_id: RowId
    address: int
    stride: int
    nbytes: int
    offset: int


@attrs.frozen(eq=False)
class PagedBlocks(Generic[_Prepared]):
    """
    Pages that were checked.

    Args:
        group: What the device has prepared for the group.
        row_ids: Rows whose pages are meant, ascending.
        is_whole: These are all rows of the group.
        blocks: ``[n]`` in the engine's pool, in range.
    """

    group: _Prepared
    row_ids: tuple[RowId, ...]
    is_whole: bool
    blocks: Int64s


@attrs.frozen(eq=False)
class PagedCopy(PagedBlocks[_Prepared]):
    """
    One copy that was checked.

    Args:
        slots: ``[n]``, in range.
        seeds: ``[n]`` of the checksums that are wanted; None: none are.
    """

    slots: HostSlots
    seeds: Sequence[int] | None = None


@attrs.frozen(eq=False)
class _Group(Generic[_Prepared]):
    layout: GroupLayout
    row_ids: frozenset[RowId]
    prepared: _Prepared


class PagedDevice(Device, Generic[G]):
    """
    The checks of ``Device``, once for all.

    Args:
        num_blocks: Blocks in the engine's pool. Needed where tensors count smaller
            blocks of the kernel; otherwise their first dimension says it.
    """

    def __init__(self, num_blocks: int | None) -> None:
        if num_blocks is not None and num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} is not positive")
        self._num_blocks = num_blocks
        self._tensors: KVMemory | None = None
        self._groups: dict[GroupId, _Group[G]] = {}
        self._is_closed = False

    @abstractmethod
    def _locate(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> KVMemory:
        """Find every row of every group; raises ``LayoutError``."""

    @abstractmethod
    def _prepare(self, parts: Sequence[Part], num_blocks: int) -> G:
        """Return what copies of a group need."""

    @abstractmethod
    def _copy(self, copy: PagedCopy[G], direction: Direction) -> Fence:
        """Copy pages into slots or back."""

    @abstractmethod
    def _clear(self, pages: PagedBlocks[G]) -> Fence:
        """Zero pages."""

    def register(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> None:
        """Take the engine's KV cache; see ``Device.register``."""
        self._check_open()
        if self._tensors is not None:
            raise DeviceError("a KV cache is registered already")
        tensors = self._locate(layout, kv_caches)
        self._groups = {
            group.group_id: _Group(
                group,
                frozenset(row.row_id for row in group.rows),
                self._prepare(_parts(tensors, group), tensors.num_blocks),
            )
            for group in layout.groups
        }
        self._tensors = tensors

    def unregister(self) -> None:
        """Let go of the engine's tensors; see ``Device.unregister``."""
        self._groups = {}
        self._tensors = None

    def gather(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
        slots: HostSlots,
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """
        Copy pages of blocks into their slots; see ``Device.gather``.

        Raises:
            DeviceError: A group, row, block or slot does not exist; nothing moved.
            ValueError: Blocks and slots do not match; a bug of the caller.
        """
        copy = self._check_copy(group_id, row_ids, block_ids, slots, seeds)
        return self._copy(copy, Direction.TO_HOST)

    def scatter(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        slots: HostSlots,
        block_ids: Sequence[BlockId],
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """Copy slots into pages; raises as ``gather`` does."""
        copy = self._check_copy(group_id, row_ids, block_ids, slots, seeds)
        return self._copy(copy, Direction.TO_DEVICE)

    def clear(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
    ) -> Fence:
        """Zero pages of blocks; see ``Device.clear``."""
        _, pages = self._check_blocks(group_id, row_ids, block_ids)
        return self._clear(pages)

    def close(self) -> None:
        """Let go of the engine's tensors. Idempotent; no copy may be under way."""
        self._is_closed = True
        PagedDevice.unregister(self)

    def _check_open(self) -> None:
        if self._is_closed:
            raise DeviceError("the device is closed")

    def _check_registered(self) -> KVMemory:
        self._check_open()
        if self._tensors is None:
            raise DeviceError("no KV cache is registered")
        return self._tensors

    def _check_copy(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
        slots: HostSlots,
        seeds: Sequence[int] | None,
    ) -> PagedCopy[G]:
        layout, pages = self._check_blocks(group_id, row_ids, block_ids)
        if len(block_ids) != len(slots):
            raise ValueError(f"{len(block_ids)} blocks for {len(slots)} slots")
        if seeds is not None and len(block_ids) != len(seeds):
            raise ValueError(f"{len(block_ids)} blocks for {len(seeds)} seeds")
        if slots.block_bytes != layout.block_bytes:
            raise ValueError(
                f"slots of {slots.block_bytes} bytes for blocks of {layout.block_bytes}"
            )
        _check_range("slot", slots.slots, len(slots.pool))
        return PagedCopy(
            *(pages.group, pages.row_ids, pages.is_whole, pages.blocks),
            *(slots, seeds),
        )

    def _check_blocks(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
    ) -> tuple[GroupLayout, PagedBlocks[G]]:
        """Return the group, and pages that are all there."""
        tensors = self._check_registered()
        group = self._groups.get(group_id)
        if group is None:
            raise DeviceError(f"no group {group_id} is registered")
        unknown = [row_id for row_id in row_ids if row_id not in group.row_ids]
        if unknown:
            raise DeviceError(f"row {unknown[0]} is not of group {group_id}")
        try:
            blocks = np.asarray(block_ids, dtype=np.int64)
        except OverflowError as exc:
            raise DeviceError(f"a block is in no pool: {exc}") from None
        # Numpy takes negative indexes from the end, so that nothing would stop them.
        _check_range("block", blocks, tensors.num_blocks)
        wanted = tuple(sorted(set(row_ids)))
        is_whole = len(wanted) == len(group.row_ids)
        return group.layout, PagedBlocks(group.prepared, wanted, is_whole, blocks)


def _parts(tensors: KVMemory, group: GroupLayout) -> list[Part]:
    """Return the group's parts in the slot's order."""
    parts = []
    offset = 0
    for row in group.rows:
        for region in tensors.regions[group.group_id, row.row_id]:
            start = tensors.storages[region.storage_id].data_ptr() + region.offset
            nbytes = region.page_bytes
            parts.append(Part(row.row_id, start, region.block_stride, nbytes, offset))
            offset += nbytes
    return parts


def _check_range(what: str, ids: Int64s, count: int) -> None:
    wrong = ids[(ids < 0) | (ids >= count)]
    if len(wrong):
        raise DeviceError(f"{what} {wrong[0]} is not in 0..{count - 1}")
