# SPDX-License-Identifier: Apache-2.0
"""
Which bytes move where: host slots and coalesced copy runs. Pure; moves nothing.

A span's blocks are scattered over the engine's pool and, less so, over the store's
slots. Where both sides advance by one, neighbours merge into one run, and a run is
copied by one call. Planning is vectorised: its cost does not grow with pages.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["CopyRun", "HostSlots", "TransferPlan"]


@attrs.frozen(eq=False)
class HostSlots:
    """
    Host memory of a span: one slot per block, all in one pool.

    Args:
        pool: ``[num_slots, slot_bytes]`` uint8, each row contiguous; the store's.
        slots: ``[n]`` int64, the row of each block, in span order.
        block_bytes: Payload at the start of each slot.
    """

    pool: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.int64]
    block_bytes: int

    def __len__(self) -> int:
        return len(self.slots)

    def block(self, position: int) -> npt.NDArray[np.uint8]:
        """Return the ``[block_bytes]`` view of one block of the span."""
        view: npt.NDArray[np.uint8] = self.pool[
            self.slots[position], : self.block_bytes
        ]
        return view


@attrs.frozen
class CopyRun:
    """
    *count* blocks that lie next to each other on both sides.

    Args:
        block_id: First block in the engine's pool.
        slot: First row in the host pool.
        count: How many, at least 1.
    """

    block_id: int
    slot: int
    count: int


@attrs.frozen
class TransferPlan:
    """The copy runs of one span, in span order."""

    runs: tuple[CopyRun, ...]

    @classmethod
    def coalesce(
        cls, block_ids: Sequence[int], slots: npt.NDArray[np.int64]
    ) -> "TransferPlan":
        """
        Merge neighbours.

        Args:
            block_ids: ``[n]`` blocks of the span.
            slots: ``[n]`` host rows, aligned.

        Raises:
            ValueError: The two differ in length; a bug of the caller.
        """
        blocks = np.asarray(block_ids, dtype=np.int64)
        if blocks.shape != slots.shape:
            raise ValueError(f"{len(blocks)} blocks for {len(slots)} slots")
        if not len(blocks):
            return cls(())
        breaks = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(slots) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((starts, [len(blocks)])))
        return cls(
            tuple(
                map(
                    CopyRun,
                    blocks[starts].tolist(),
                    slots[starts].tolist(),
                    counts.tolist(),
                )
            )
        )
