# SPDX-License-Identifier: Apache-2.0
"""
When slots count as used: stamps that only grow, and how many may be still to come.

A stamp is a moment of the machine's monotonic clock, which lives as long as its memory. What
becomes of blocks that are used no more is put down by the same clock.
"""

import ctypes
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ucm.blocks import PackedKey
from ucm.fates import Fate, Told
from ucm.stores.slab._chains import NO_SLOT
from ucm.stores.slab._fates import Fates
from ucm.stores.slab._layout import COMMITTED, NEVER, IndexLayout, Limits, Word
from ucm.stores.slab._tables import Tables
from ucm.uses import Uses

__all__ = ["Used"]

_SAMPLE = 4096
_THERE = (int(Word.NUM_FREE), int(Word.NUM_COMMITTED), int(Word.NUM_RESERVED))
_EARLIEST = -(1 << 62)
_AHEAD_NS = 1 << 55  # over a year: a clock that goes on from there has centuries left


class Used(Tables):
    """
    The tables with their clock, and a memory of what is no longer in them.

    Args:
        buffer: The mapping, ``IndexLayout.nbytes`` long.
        layout: Its arrangement.
    """

    def __init__(self, buffer: memoryview, layout: IndexLayout) -> None:
        super().__init__(buffer, layout)
        self.limits = Limits(retained=1.0, of_tenant=1.0)  # until whoever opens it says
        self.part: Callable[[], int] = lambda: layout.num_slots  # likewise
        """Returns how many slots there are for this index beside others, if it wants them."""
        self._last_stamp = 0
        self._sampled_from = 0
        self.seed = self.words[Word.SEED]
        self.fates = Fates()
        """Where is put down what becomes of blocks; nowhere until somebody opens it."""

    @property
    def num_present(self) -> int:
        """Slots that there is memory for."""
        return sum(map(self.words.__getitem__, _THERE))

    def num_to_have(self) -> int:
        """
        Return how many slots this index can count on: the limits are shares of these.

        Raises:
            StoreUnavailableError: Nobody can be asked who else uses the slab.
        """
        there, most = self.num_present, self.layout.num_slots
        return there if there == most else min(max(there, self.part()), most)

    def part_with(self, slots: npt.NDArray[np.int64], fate: Fate) -> None:
        """Put down what becomes of blocks whose slots are about to be vacated."""
        self.fates.put(self.chains.hashes[slots], fate, time.monotonic_ns())

    def eviction(self) -> "ctypes.Array[ctypes.c_uint64] | None":
        """Return what native code puts down of blocks that it evicts, and where."""
        return self.fates.place(Fate.EVICTED, time.monotonic_ns())

    def fate_of(self, key: PackedKey) -> Told:
        """Return what has become of one key: a hint, takes no lock."""
        slot, found = self.chains.find_one(key, self.seed)
        if slot == NO_SLOT:
            return self.fates.of(found, time.monotonic_ns())
        is_there = self.states[slot] == COMMITTED
        return Told(Fate.STORED if is_there else Fate.WRITING)

    def touch(
        self, slots: npt.NDArray[np.int64], moments: npt.NDArray[np.int64]
    ) -> None:
        """Stamp slots as used at these moments, unless they were used later."""
        stamps = self.stamps[slots]
        latest = np.maximum(stamps, self.within_budget(moments, stamps))
        there = stamps != NEVER  # what comes into a slot later has its own stamp
        self.stamps[slots[there]] = latest[there]

    def stamps_of(self, uses: Uses | None, count: int) -> npt.NDArray[np.int64]:
        """
        Return the stamps of uses; now, the first of them last, if there are none.

        Raises:
            ValueError: They are not those of so many keys.
        """
        if uses is None:
            return self._now(count)[::-1]
        uses.check(count)
        latest = time.monotonic_ns() + _AHEAD_NS
        stamps: npt.NDArray[np.int64]
        stamps = np.minimum(np.maximum(uses.moments, _EARLIEST), latest)
        return stamps

    def within_budget(
        self,
        moments: npt.NDArray[np.int64],
        stamps: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.int64]:
        """
        Return stamps of which no more are still to come than the slab may retain.

        What is beyond counts as used now, the first of it last. How many slots are
        retained is counted in a sample of 4096, so that the bound holds within about two
        of a hundred slots.

        Args:
            moments: What was asked for.
            stamps: Those that the blocks have: what is retained already may stay so.
        """
        now = time.monotonic_ns()
        later = moments > now
        if not later.any():
            return moments
        if stamps is not None:
            later &= stamps <= now
        most = int(self.limits.retained * self.num_to_have())
        room = most - self._count_retained(now)
        beyond = np.flatnonzero(later)[max(0, room) :]
        moments = moments.copy()
        moments[beyond] = now - np.arange(len(beyond))
        self.words[Word.NUM_CURBED] += len(beyond)
        return moments

    def _count_retained(self, now: int) -> int:
        stride = -(-len(self.stamps) // _SAMPLE)
        self._sampled_from = (self._sampled_from + 1) % stride
        sample = self.stamps[self._sampled_from :: stride]
        return stride * int(np.count_nonzero((sample > now) & (sample != NEVER)))

    def moment(self) -> int:
        """Return a stamp for a use right now."""
        now = time.monotonic_ns()
        self._last_stamp = max(now, self._last_stamp + 1)
        return self._last_stamp

    def latest_of(self, count: int) -> int:
        """Return the last of as many stamps for uses right now, a nanosecond apart."""
        latest = max(time.monotonic_ns(), self._last_stamp + count)
        self._last_stamp = latest
        return latest

    def _now(self, count: int) -> npt.NDArray[np.int64]:
        latest = self.latest_of(count)
        return np.arange(latest - count + 1, latest + 1)
