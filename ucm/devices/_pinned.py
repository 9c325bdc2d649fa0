# SPDX-License-Identifier: Apache-2.0
"""Which host memory an accelerator reaches by itself. Pure."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping

import numpy as np

from ucm.devices.driver import Direction
from ucm.plan import CopyBatch, HostSlots

__all__ = ["PinnedMemory"]


class PinnedMemory:
    """
    Memory that was pinned piece by piece, as a store came to have it.

    Never changed: copies look at the one they have.

    Args:
        pieces: By address, the bytes of each.
    """

    def __init__(self, pieces: Mapping[int, int]) -> None:
        self.pieces = dict(sorted(pieces.items()))
        self._runs = list(_runs(self.pieces))
        ends = {start + nbytes for start, nbytes in self.pieces.items()}
        self._seams = sorted(ends & self.pieces.keys())
        """Where one piece ends and the next one begins."""

    def without(self, address: int) -> "PinnedMemory":
        """Return it without a piece."""
        others = {at: nbytes for at, nbytes in self.pieces.items() if at != address}
        return PinnedMemory(others)

    def holds(self, slots: HostSlots) -> bool:
        """Return whether all of some slots is pinned."""
        first = slots.pool.ctypes.data
        stride = slots.pool.strides[0]
        start = first + int(slots.slots.min()) * stride
        stop = first + int(slots.slots.max()) * stride + slots.block_bytes
        return any(begin <= start and stop <= end for begin, end in self._runs)

    def cut(
        self, batch: CopyBatch, slots: HostSlots, direction: Direction
    ) -> CopyBatch:
        """
        Return copies of which none is of two pieces, as no driver takes such.

        A slot is of one piece, so that only what was merged of neighbours can be of two.
        """
        if not self._seams:
            return batch
        stride = slots.pool.strides[0]
        ends = slots.pool.ctypes.data + (slots.slots + 1) * stride
        if set(self._seams).isdisjoint(ends.tolist()):
            return batch
        to_host = direction is Direction.TO_HOST
        parts = []
        for source, target, nbytes in zip(
            batch.sources.tolist(),
            batch.targets.tolist(),
            batch.nbytes.tolist(),
            strict=True,
        ):
            host = target if to_host else source
            at = 0
            while at < nbytes:
                stop = min(nbytes, self._seam_behind(host + at) - host)
                parts.append((source + at, target + at, stop - at))
                at = stop
        return CopyBatch(*np.array(parts, np.int64).T.copy())

    def _seam_behind(self, address: int) -> int:
        at = bisect_right(self._seams, address)
        return self._seams[at] if at < len(self._seams) else 1 << 63


def _runs(pieces: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield where neighbouring pieces, in order, begin and end."""
    begin = end = -1
    for start, nbytes in pieces.items():
        if start != end:
            if begin >= 0:
                yield begin, end
            begin = start
        end = start + nbytes
    if begin >= 0:
        yield begin, end
