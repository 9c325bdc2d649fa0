# SPDX-License-Identifier: Apache-2.0
"""
Which bytes move where: host slots and coalesced copies. Pure; moves nothing.

A span's blocks are scattered over the engine's pool and, less so, over the store's
slots. Where two copies continue each other on both sides they merge into one. Planning
is vectorised: a span of thousands of pages costs a few numpy calls.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["CopyBatch", "HostSlots"]


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

    def part(self, start: int, stop: int) -> "HostSlots":
        """Return the slots of some blocks of the span."""
        return HostSlots(self.pool, self.slots[start:stop], self.block_bytes)

    def views(self) -> list[memoryview]:
        """Return the bytes of each block, for writing where the store lets."""
        rows = self.pool[:, : self.block_bytes]
        return [rows[slot].data for slot in self.slots.tolist()]

    def block(self, position: int) -> npt.NDArray[np.uint8]:
        """Return the ``[block_bytes]`` view of one block of the span."""
        view: npt.NDArray[np.uint8] = self.pool[
            self.slots[position], : self.block_bytes
        ]
        return view


@attrs.frozen(eq=False)
class CopyBatch:
    """
    Copies that are submitted by one call.

    Args:
        sources: ``[n]`` int64 addresses.
        targets: ``[n]`` int64 addresses.
        nbytes: ``[n]`` int64 sizes, each at least 1.
    """

    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)

    @classmethod
    def joined(cls, parts: Sequence["CopyBatch"]) -> "CopyBatch":
        """Return the copies of all parts, at least one, in order."""
        return cls(
            np.concatenate([each.sources for each in parts]),
            np.concatenate([each.targets for each in parts]),
            np.concatenate([each.nbytes for each in parts]),
        )

    @classmethod
    def coalesce(
        cls,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
    ) -> "CopyBatch":
        """
        Merge each copy with the one before it where both sides continue.

        Args:
            sources: ``[n]`` addresses.
            targets: ``[n]`` addresses, aligned.
            nbytes: ``[n]`` sizes, aligned.

        Raises:
            ValueError: They differ in length; a bug of the caller.
        """
        if not sources.shape == targets.shape == nbytes.shape:
            raise ValueError(
                f"{len(sources)} sources, {len(targets)} targets, {len(nbytes)} sizes"
            )
        if not len(nbytes):
            return cls(sources, targets, nbytes)
        continues = (sources[1:] == sources[:-1] + nbytes[:-1]) & (
            targets[1:] == targets[:-1] + nbytes[:-1]
        )
        starts = np.flatnonzero(np.concatenate(([True], ~continues)))
        return cls(sources[starts], targets[starts], np.add.reduceat(nbytes, starts))
