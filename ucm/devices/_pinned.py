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
        begun: As well, of a piece that is just being pinned, or just was.
    """

    def __init__(
        self, pieces: Mapping[int, int], begun: Mapping[int, int] | None = None
    ) -> None:
        self.pieces = dict(sorted(pieces.items()))
        self._runs = list(_runs(self.pieces))
        known = self.pieces | dict(begun or {})
        ends = {start + nbytes for start, nbytes in known.items()}
        self._edges = np.array(sorted(ends | known.keys()), np.int64)
        self._edge_set = frozenset(self._edges.tolist())

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
        Return copies of which none is within a piece in part, as no driver takes such.

        A slot is within one piece or none, so that only what was merged of neighbours can be.
        """
        stride = slots.pool.strides[0]
        ends = slots.pool.ctypes.data + (slots.slots + 1) * stride
        if self._edge_set.isdisjoint(ends.tolist()):
            return batch
        host = batch.targets if direction is Direction.TO_HOST else batch.sources
        first = np.searchsorted(self._edges, host, "right")
        last = np.searchsorted(self._edges, host + batch.nbytes, "left")
        if not (first < last).any():
            return batch
        return CopyBatch.joined(
            [
                self._parted(batch, at, int(host[at])) if is_cut else _one(batch, at)
                for at, is_cut in enumerate((first < last).tolist())
            ]
        )

    def _parted(self, batch: CopyBatch, at: int, host: int) -> CopyBatch:
        """Return one copy as several, parted at each edge within it."""
        edges, nbytes = self._edges.tolist(), int(batch.nbytes[at])
        begin = bisect_right(edges, host)
        inner = [edge - host for edge in edges[begin:] if edge < host + nbytes]
        starts = np.array([0, *inner], np.int64)
        sizes = np.diff(np.array([0, *inner, nbytes], np.int64))
        return CopyBatch(batch.sources[at] + starts, batch.targets[at] + starts, sizes)


def _one(batch: CopyBatch, at: int) -> CopyBatch:
    some = slice(at, at + 1)
    return CopyBatch(batch.sources[some], batch.targets[some], batch.nbytes[some])


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
