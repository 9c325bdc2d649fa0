# SPDX-License-Identifier: Apache-2.0
"""
Copies by way of staging memory, of slots that the device cannot reach by itself.

A save goes whole: its last step, from there to the slots, is the fence's ``land``. A load goes
part by part, as one ticket may be larger than the memory, and all of a window are; the device
copies one part while the host brings the next, and its stream does them in order, so that the
last fence is behind all. What gets no memory in time goes straight: slower, but it goes.

Threading: one copy per direction at a time; see ``AcceleratorDevice``.
"""

import functools
from collections.abc import Callable
from typing import Final

import attrs

from ucm.devices._paged import PagedCopy
from ucm.devices._pages import Pages, StagedFence, move, part_of
from ucm.devices.abc import Fence
from ucm.devices.driver import Direction
from ucm.devices.events import DoneFence, FailedFence
from ucm.devices.staging import StagingLease, StagingPool
from ucm.errors import DeviceError

__all__ = ["StagedCopies"]

_TIMEOUT_S: Final = 0.05
_PARTS: Final = 16
"""A part of a load takes so small a share of the memory: a save has not long to wait."""


class StagedCopies:
    """
    Copies between blocks and slots by way of a pool.

    Args:
        pool: The memory.
        submit: Submits a span's copies to the direction's stream.
    """

    def __init__(
        self,
        pool: StagingPool,
        submit: Callable[[PagedCopy[Pages], Direction], Fence],
    ) -> None:
        self._pool = pool
        self._submit = submit

    def gather(self, copy: PagedCopy[Pages]) -> Fence:
        """Copy blocks to slots; they are there when the fence has landed."""
        extents = copy.group.extents(copy)
        if (lease := self._borrow(copy)) is None:
            return self._submit(copy, Direction.TO_HOST)
        is_kept = False
        try:
            fence = self._move(copy, lease, Direction.TO_HOST)
            is_kept = True
        finally:
            if not is_kept:
                lease.close()
        land = functools.partial(move, lease.slots, copy.slots, extents)
        return StagedFence(fence, lease, land)

    def scatter(self, copy: PagedCopy[Pages]) -> Fence:
        """Copy slots to blocks, a part at a time."""
        count = len(copy.blocks)
        fence: Fence = DoneFence()
        step = max(1, len(self._pool.memory) // _PARTS)
        for at in range(0, count, step):
            part = part_of(copy, at, at + step)
            try:
                if (lease := self._borrow(part)) is None:
                    rest = part_of(copy, at, count)
                    return self._submit(rest, Direction.TO_DEVICE)
                with lease:
                    move(part.slots, lease.slots, part.group.extents(part))
                    fence = self._move(part, lease, Direction.TO_DEVICE)
            except Exception as exc:  # whatever: others are under way
                if not at:
                    raise
                if not isinstance(exc, DeviceError):
                    exc = DeviceError(repr(exc))
                return FailedFence(exc)  # an error would give their blocks back
        return fence

    def _borrow(self, copy: PagedCopy[Pages]) -> StagingLease | None:
        """Return memory for a copy, if there is any."""
        return self._pool.borrow(len(copy.slots), copy.slots.block_bytes, _TIMEOUT_S)

    def _move(
        self, copy: PagedCopy[Pages], lease: StagingLease, direction: Direction
    ) -> Fence:
        """Submit a copy between blocks and staging memory, which is lent until it is over."""
        fence = self._submit(attrs.evolve(copy, slots=lease.slots), direction)
        lease.quarantine(fence)
        return fence
