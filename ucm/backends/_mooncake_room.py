# SPDX-License-Identifier: Apache-2.0
"""Where a call of Mooncake's client finds envelopes and blocks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ucm.backends.envelope import HEADER_BYTES
from ucm.native import addresses_of

__all__ = ["Room"]


class Room:
    """
    Where objects of one call begin: an envelope each, and a block behind it that is staged.

    Args:
        num_blocks: Of a call, at most.
        staged_bytes: Of a block that is staged, at most; 0: none is.
    """

    def __init__(self, num_blocks: int, staged_bytes: int) -> None:
        self._staged_bytes = staged_bytes
        self._step = HEADER_BYTES + staged_bytes
        self.memory = memoryview(bytearray(num_blocks * self._step))
        (self._first,) = addresses_of([self.memory])

    def header(self, at: int) -> memoryview:
        """Return an envelope's place."""
        return self.memory[at * self._step :][:HEADER_BYTES]

    def parts(self, data: Sequence[memoryview]) -> tuple[list[list[int]], ...]:
        """Return addresses and lengths of what each object consists of."""
        addresses, lengths = [], []
        for at, one in enumerate(data):
            start = self._first + at * self._step
            if len(one) <= self._staged_bytes:
                addresses.append([start])
                lengths.append([HEADER_BYTES + len(one)])
            else:
                addresses.append([start, *addresses_of([one])])
                lengths.append([HEADER_BYTES, len(one)])
        return addresses, lengths

    def stage(self, at: int, data: memoryview) -> None:
        """Copy a block behind its envelope, if it is to lie there."""
        if (staged := self._staged(at, data)) is not None:
            np.copyto(staged, np.frombuffer(data, np.uint8))

    def unstage(self, at: int, target: memoryview) -> None:
        """Copy a block that came behind its envelope to its target."""
        if (staged := self._staged(at, target)) is not None:
            np.copyto(np.frombuffer(target, np.uint8), staged)

    def _staged(self, at: int, data: memoryview) -> "npt.NDArray[np.uint8] | None":
        if len(data) > self._staged_bytes:
            return None
        place = self.memory[at * self._step + HEADER_BYTES :][: len(data)]
        return np.frombuffer(place, np.uint8)
