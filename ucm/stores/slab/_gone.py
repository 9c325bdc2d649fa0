# SPDX-License-Identifier: Apache-2.0
"""An index's word on blocks: what has become of each, also of those that are gone."""

import time

import numpy as np
import numpy.typing as npt

from ucm.blocks import PackedKey
from ucm.fates import Fate, Told
from ucm.stores.slab._chains import NO_SLOT
from ucm.stores.slab._fates import Fates
from ucm.stores.slab._layout import COMMITTED, IndexLayout, Word
from ucm.stores.slab._used import Used

__all__ = ["Gone"]


class Gone(Used):
    """
    The tables with their clock, and a memory of what is no longer in them.

    Args:
        buffer: The mapping, ``IndexLayout.nbytes`` long.
        layout: Its arrangement.
    """

    def __init__(self, buffer: memoryview, layout: IndexLayout) -> None:
        super().__init__(buffer, layout)
        self.seed = self.words[Word.SEED]
        self.fates = Fates()
        """Where it is put down; nowhere until somebody opens it."""

    def part_with(self, slots: npt.NDArray[np.int64], fate: Fate) -> None:
        """Put down what becomes of blocks whose slots are about to be vacated."""
        self.fates.put(self.chains.hashes[slots], fate, time.monotonic_ns())

    def part_with_one(self, slot: int) -> None:
        """Put down that the block in a slot is evicted."""
        found = int(self.chains.hashes[slot])
        self.fates.put_one(found, Fate.EVICTED, time.monotonic_ns())

    def fate_of(self, key: PackedKey) -> Told:
        """Return what has become of one key: a hint, takes no lock."""
        slot, found = self.chains.find_one(key, self.seed)
        if slot == NO_SLOT:
            return self.fates.of(found, time.monotonic_ns())
        is_there = self.states[slot] == COMMITTED
        return Told(Fate.STORED if is_there else Fate.WRITING)
