# SPDX-License-Identifier: Apache-2.0
"""Which bytes of an accelerator's copy go where, and those that go in two steps."""

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from ucm.devices._paged import Int64s, PagedCopy
from ucm.devices.abc import Fence
from ucm.devices.driver import Direction
from ucm.devices.staging import StagingLease
from ucm.plan import CopyBatch, HostSlots

__all__ = ["Pages", "StagedFence", "move"]

_MOVED_BYTES = 4 << 20
"""Moved at a time between slots: the copy in between should stay in the cache."""


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
    """

    rows: Int64s
    starts: Int64s
    strides: Int64s
    nbytes: Int64s
    offsets: Int64s

    def batch(self, copy: "PagedCopy[Pages]", direction: Direction) -> CopyBatch:
        """Return the copies of a span, neighbours merged."""
        chosen = slice(None) if copy.is_whole else np.isin(self.rows, copy.row_ids)
        slots = copy.slots
        blocks = copy.blocks[:, None]
        pages = self.starts[chosen] + blocks * self.strides[chosen]
        first = slots.pool.ctypes.data + slots.slots * slots.pool.strides[0]
        places = first[:, None] + self.offsets[chosen]
        nbytes = np.broadcast_to(self.nbytes[chosen], pages.shape).ravel()
        if direction is Direction.TO_HOST:
            return CopyBatch.coalesce(pages.ravel(), places.ravel(), nbytes)
        return CopyBatch.coalesce(places.ravel(), pages.ravel(), nbytes)

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
