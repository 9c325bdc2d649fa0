# SPDX-License-Identifier: Apache-2.0
"""Which bytes of an accelerator's copy go where, and those that go in two steps."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from ucm import native
from ucm.devices._paged import Int64s, PagedBlocks, PagedCopy, Part
from ucm.devices.abc import Fence
from ucm.devices.driver import Direction
from ucm.devices.staging import StagingLease
from ucm.native import address_of
from ucm.plan import CopyBatch, HostSlots

__all__ = ["Pages", "StagedFence", "move", "part_of"]

_MOVED_BYTES = 4 << 20
"""Moved at a time between slots: the copy in between should stay in the cache."""

_LOCKED_ITEMS = 480
"""Numpy gives up the interpreter lock for arrays of more than 500 items, in each operation,
and waits for it again: beside a busy engine a thousand times as long as the operation."""
_P = TypeVar("_P")


@attrs.frozen(eq=False)
class Pages:
    """
    Where the pages of a group are.

    Args:
        rows: ``[k]`` row of each part.
        starts: ``[k]`` address of block 0's part.
        strides: ``[k]`` bytes from block to block.
        nbytes: ``[k]`` bytes of the part.
        offsets: ``[k]`` where the part is in a slot.
        zeros: As many as the largest part has bytes.
    """

    rows: Int64s
    starts: Int64s
    strides: Int64s
    nbytes: Int64s
    offsets: Int64s
    zeros: npt.NDArray[np.uint8]
    lists: tuple[int, ...] = attrs.field(init=False)
    """Where all but the first and the last of these are."""

    @lists.default
    def _find_lists(self) -> tuple[int, ...]:
        lists = (self.starts, self.strides, self.nbytes, self.offsets)
        return tuple(map(address_of, lists))

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "Pages":
        """Return the pages of a group's parts."""
        fields = [(p.row_id, p.address, p.stride, p.nbytes, p.offset) for p in parts]
        columns = np.ascontiguousarray(np.array(fields, np.int64).T)
        rows, starts, strides, nbytes, offsets = columns
        zeros = np.zeros(nbytes.max(), np.uint8)
        return cls(rows, starts, strides, nbytes, offsets, zeros)

    def batch(self, copy: PagedCopy[Any], direction: Direction) -> CopyBatch:
        """Return the copies of a span, neighbours merged; by numpy but for a few."""
        if native.LIBRARY is not None:
            saved = self._saved(native.LIBRARY.pages, copy)
        else:
            step = max(1, _LOCKED_ITEMS // len(self.rows))
            parts = [
                self._saved_by_numpy(part_of(copy, at, at + step))
                for at in range(0, len(copy.blocks), step)
            ]
            saved = parts[0] if len(parts) == 1 else CopyBatch.joined(parts)
        if direction is Direction.TO_HOST:
            return saved
        return CopyBatch(saved.targets, saved.sources, saved.nbytes)

    def _saved(self, tell: Callable[..., int], copy: PagedCopy[Any]) -> CopyBatch:
        """Return the copies to slots, neighbours merged."""
        slots = copy.slots
        lists, num_parts = self.lists, len(self.rows)
        if not copy.is_whole:
            chosen = np.isin(self.rows, copy.row_ids)
            pages = (self.starts, self.strides, self.nbytes, self.offsets)
            parts = [each[chosen] for each in pages]
            lists, num_parts = tuple(map(address_of, parts)), len(parts[0])
        spans = [
            np.ascontiguousarray(each, np.int64) for each in (copy.blocks, slots.slots)
        ]
        told = np.empty((3, len(copy.blocks) * num_parts), np.int64)
        first, step = address_of(told), told.strides[0]
        count = tell(
            *(*lists, num_parts),
            *(*map(address_of, spans), len(copy.blocks)),
            *(address_of(slots.pool), slots.pool.strides[0]),
            *(first, first + step, first + 2 * step),
        )
        return CopyBatch(*told[:, :count])

    def _saved_by_numpy(self, copy: PagedCopy[Any]) -> CopyBatch:
        """Do as ``_saved`` does."""
        slots = copy.slots
        chosen, pages = self._addresses(copy)
        first = slots.pool.ctypes.data + slots.slots * slots.pool.strides[0]
        places = first[:, None] + self.offsets[chosen]
        nbytes = np.broadcast_to(self.nbytes[chosen], pages.shape).ravel()
        return CopyBatch.coalesce(pages.ravel(), places.ravel(), nbytes)

    def zeroing(self, span: "PagedBlocks[Pages]", zeros: int) -> CopyBatch:
        """Return the copies of zeros, which lie at an address, onto each page."""
        chosen, pages = self._addresses(span)
        nbytes = np.broadcast_to(self.nbytes[chosen], pages.shape).ravel()
        return CopyBatch(np.full(len(nbytes), zeros), pages.ravel(), nbytes)

    def _addresses(
        self, span: PagedBlocks[Any]
    ) -> tuple[slice | npt.NDArray[np.bool_], Int64s]:
        """Return which parts are meant, and ``[n, k]`` where they are."""
        whole = span.is_whole
        chosen = slice(None) if whole else np.isin(self.rows, span.row_ids)
        blocks = span.blocks[:, None]
        return chosen, self.starts[chosen] + blocks * self.strides[chosen]

    def extents(self, copy: "PagedCopy[Pages]") -> list[tuple[int, int]]:
        """Return where in a slot the rows of a copy are, neighbours merged."""
        if copy.is_whole:
            return [(0, copy.slots.block_bytes)]
        merged: list[tuple[int, int]] = []
        chosen = np.isin(self.rows, copy.row_ids)
        starts, sizes = self.offsets[chosen].tolist(), self.nbytes[chosen].tolist()
        for start, nbytes in zip(starts, sizes, strict=True):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], start + nbytes)
            else:
                merged.append((start, start + nbytes))
        return merged


def part_of(copy: PagedCopy[_P], start: int, stop: int) -> PagedCopy[_P]:
    """Return the copy of some blocks of a span."""
    slots = copy.slots.part(start, stop)
    return attrs.evolve(copy, blocks=copy.blocks[start:stop], slots=slots)


class StagedFence(Fence):
    """
    A fence behind a copy into staging memory.

    Args:
        fence: Behind the copy.
        lease: Of the staging memory.
        land: Brings it to the slots.
    """

    __slots__ = ("_fence", "_land", "_lease")

    def __init__(
        self, fence: Fence, lease: StagingLease, land: Callable[[], None]
    ) -> None:
        self._fence = fence
        self._lease = lease
        self._land = land

    def is_done(self) -> bool:
        return self._fence.is_done()

    def wait(self, timeout: float) -> bool:
        return self._fence.wait(timeout)

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        return self._fence.call_when_over(callback)

    def land(self) -> None:
        self._land()
        self._lease.close()

    def close(self) -> None:
        self._lease.close()


def move(
    source: HostSlots, target: HostSlots, extents: Sequence[tuple[int, int]]
) -> None:
    """Copy parts of each block from slot to slot, on the host."""
    step = max(1, _MOVED_BYTES // source.block_bytes)
    for start, stop in extents:
        for at in range(0, len(source), step):
            part = slice(at, at + step)
            moved = source.pool[source.slots[part], start:stop]
            target.pool[target.slots[part], start:stop] = moved
