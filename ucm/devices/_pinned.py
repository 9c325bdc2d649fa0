# SPDX-License-Identifier: Apache-2.0
"""Which host memory an accelerator reaches by itself. Pure."""

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
        self._edge_list = sorted(ends | known.keys())
        self._edges = np.array(self._edge_list, np.int64)

    def without(self, address: int) -> "PinnedMemory":
        """Return it without a piece."""
        others = {at: nbytes for at, nbytes in self.pieces.items() if at != address}
        return PinnedMemory(others)

    def holds(self, slots: HostSlots) -> bool:
        """Return whether all of some slots is pinned."""
        first, stride = slots.pool.ctypes.data, slots.pool.strides[0]
        rows = slots.slots.tolist()
        start = first + min(rows) * stride
        stop = first + max(rows) * stride + slots.block_bytes
        return any(begin <= start and stop <= end for begin, end in self._runs)

    def cut(
        self, batch: CopyBatch, slots: HostSlots, direction: Direction
    ) -> CopyBatch:
        """
        Return copies of which none is within a piece in part, as no driver takes such.

        A slot is within one piece or none, so that only what was merged of neighbours can be.
        Few slots are next to an edge; to find that out no operation of numpy is used, which
        would give the interpreter lock up for many of them.
        """
        first, stride = slots.pool.ctypes.data, slots.pool.strides[0]
        before_edges = {(edge - first) // stride - 1 for edge in self._edge_list}
        if before_edges.isdisjoint(slots.slots.tolist()):
            return batch
        host = batch.targets if direction is Direction.TO_HOST else batch.sources
        inner = np.searchsorted(self._edges, host, "right")
        behind = np.searchsorted(self._edges, host + batch.nbytes, "left")
        if not (inner < behind).any():
            return batch
        counts = 1 + np.maximum(behind - inner, 0)
        copy = np.repeat(np.arange(len(host)), counts)
        nth = np.arange(len(copy)) - np.repeat(np.cumsum(counts) - counts, counts)
        edge = inner[copy] + nth
        ends = np.where(
            edge < behind[copy],
            np.append(self._edges, 0)[edge],
            (host + batch.nbytes)[copy],
        )
        starts = np.where(nth > 0, np.roll(ends, 1), host[copy])
        skipped = starts - host[copy]
        return CopyBatch(
            batch.sources[copy] + skipped, batch.targets[copy] + skipped, ends - starts
        )


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
