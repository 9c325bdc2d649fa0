# SPDX-License-Identifier: Apache-2.0
"""
Leases over a slab's slots: the bytes are written and read where they stay.

A block's checksum is ``ucm.seals.block_checksum``, as it is below the slab and in exports.

What a checksum finds: bytes that were never wholly written, of another key, of a file
that somebody restored or cut, or that somebody wrote to who had no right to, and bits that
memory has flipped by then; not those that change between that look and a device's own
reading, unless the device itself tells what it has read. Who verifies once finds all of that
the first time that this process loads what a save has put there, and trusts the memory from
then on, but for what such a device tells. That a slot was
given to another save is found by its generation, each time.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ucm.blocks import PackedKey
from ucm.errors import (
    BlockNotFoundError,
    LeaseExpiredError,
    StoreUnavailableError,
)
from ucm.plan import HostSlots
from ucm.seals import checksum_seeds
from ucm.stores.abc import ReadLease, WriteLease
from ucm.stores.leases import aligned, check_checksum, check_size
from ucm.stores.slab._digests import digests_of
from ucm.stores.slab._layout import Grant, Sighting
from ucm.stores.slab._opened import OpenedSlab

__all__ = ["SlabReadLease", "SlabWriteLease", "Verified"]

Verified = npt.NDArray[np.uint64]
"""``[num_slots]`` the generation of each slot that this process has verified; 0: none."""


class SlabWriteLease(WriteLease):
    """
    Reserved slots of a slab.

    Args:
        slab: Where they are.
        keys: All keys that were asked for.
        grant: What was granted.
        slots: The same, as memory.
        on_end: Called once, when the lease ends.
    """

    takes_digests = True

    def __init__(
        self,
        slab: OpenedSlab,
        keys: tuple[PackedKey, ...],
        grant: Grant,
        slots: HostSlots,
        on_end: Callable[["SlabWriteLease"], None],
    ) -> None:
        self.positions = tuple(grant.positions.tolist())
        self.keys = tuple(map(keys.__getitem__, self.positions))
        self.num_stored = grant.num_stored
        self.slots = slots
        self._slab = slab
        self._grant = grant
        self._checksums: list[int | None] = [None] * len(self.keys)
        self._on_end = on_end
        self._has_ended = False
        self.is_owed = False

    def seal(self, start: int, stop: int) -> None:
        """Take the bytes of granted blocks as final; see ``WriteLease``."""
        self._check()
        part = slice(start, stop)
        positions = range(len(self.keys))[part]
        seeds = checksum_seeds(self.keys[part])
        self._checksums[part] = digests_of(
            self.slots, positions, seeds, self._slab.most_hashing
        )

    def seal_with(self, digests: Sequence[int]) -> None:
        """Take all bytes as final, as a device has read them; see ``WriteLease``."""
        self._check()
        self._checksums[:] = aligned(digests, self.keys)

    def seals(self, start: int, stop: int) -> list[int]:
        """Return the checksums of blocks that were sealed; see ``WriteLease``."""
        return self._sealed(range(start, stop))

    def _sealed(self, positions: Iterable[int]) -> list[int]:
        """
        Return checksums.

        Raises:
            ValueError: A block was not sealed.
        """
        found = []
        for at in positions:
            if (checksum := self._checksums[at]) is None:
                raise ValueError(f"block {at} was not sealed")
            found.append(checksum)
        return found

    def commit(self, without: Collection[int] = ()) -> int:
        """
        Publish every granted block in one step, but for some; see ``WriteLease``.

        Raises:
            ValueError: A block was not sealed, or is none of these; the lease goes on.
        """
        self._check()
        if without and not set(without) <= set(range(len(self.keys))):
            raise ValueError(f"{sorted(without)} of {len(self.keys)} blocks")
        kept = [at for at in range(len(self.keys)) if at not in without]
        checksums = self._sealed(kept)
        if kept:
            try:
                self._slab.index.publish(
                    self._grant,
                    np.array(checksums, dtype=np.uint64),
                    self._slab.owner_id,
                    without,
                )
            except LeaseExpiredError:
                self.discard()
                raise
            self._end()
        else:
            self.discard()
        return len(kept)

    def discard(self) -> None:
        """
        Give the slots back. Does nothing on a lease that has ended.

        While another process keeps the index locked they are owed: the store gives
        them back before it reserves again. A slab that was lost gets nothing back.
        """
        if self._has_ended:
            return
        if self.keys and self._slab.is_open:
            try:
                self._slab.check()
                self._slab.index.discard(self._grant, self._slab.owner_id)
            except StoreUnavailableError:
                self.is_owed = True
                return
        self._end()

    def _check(self) -> None:
        if self._has_ended:
            raise LeaseExpiredError("the write lease has ended")
        self._slab.check()

    def _end(self) -> None:
        self._has_ended, self.is_owed = True, False
        self._on_end(self)


class SlabReadLease(ReadLease):
    """
    Committed slots of a slab, watched but not held.

    Args:
        slab: Where they are.
        keys: The blocks.
        sighting: What the index said of them.
        slots: The same, as memory.
        verified: What need not be verified again, and where to put down what was; None:
            verify always.
    """

    takes_digests = True

    def __init__(
        self,
        slab: OpenedSlab,
        keys: tuple[PackedKey, ...],
        sighting: Sighting,
        slots: HostSlots,
        verified: Verified | None = None,
    ) -> None:
        self.keys = keys
        self.slots = slots
        self._slab = slab
        self._sighting = sighting
        self._checksums: list[int] = sighting.checksums.tolist()
        self._nbytes: list[int] = sighting.nbytes.tolist()
        self._verified = verified
        self.skips_verified = verified is not None
        self._has_ended = False

    def verify(self, start: int, stop: int) -> None:
        """Compare blocks with their checksums; see ``ReadLease``."""
        self._check_sizes(start, stop)
        doubtful = self._doubtful(start, stop)
        seeds = checksum_seeds(map(self.keys.__getitem__, doubtful))
        digests = digests_of(self.slots, doubtful, seeds, self._slab.most_hashing)
        self._compare(doubtful, digests)
        if self._verified is not None:
            part = slice(start, stop)
            slots = self.slots.slots[part]
            self._verified[slots] = self._sighting.generations[part]

    def verify_with(self, start: int, digests: Sequence[int]) -> None:
        """Compare what a device has read with their checksums; see ``ReadLease``."""
        stop = start + len(digests)
        self._check_sizes(start, stop)
        self._compare(range(start, stop), digests)

    def _check_sizes(self, start: int, stop: int) -> None:
        self._check()
        for position, nbytes in enumerate(self._nbytes[start:stop], start):
            check_size(self.keys[position], nbytes, self.slots)

    def _compare(self, positions: Sequence[int], digests: Iterable[int]) -> None:
        for position, found in zip(positions, digests, strict=True):
            check_checksum(self.keys[position], found, self._checksums[position])

    def _doubtful(self, start: int, stop: int) -> Sequence[int]:
        """Return which blocks are to be verified."""
        if self._verified is None:
            return range(start, stop)
        known = self._verified[self.slots.slots[start:stop]]
        doubtful = known != self._sighting.generations[start:stop]
        found: list[int] = (doubtful.nonzero()[0] + start).tolist()
        return found

    def recheck(self) -> None:
        """Make sure that no slot was recycled; see ``ReadLease``."""
        lost = self.recycled()
        if True in lost:
            raise BlockNotFoundError(self.keys[lost.index(True)])

    def seals(self, start: int, stop: int) -> list[int]:
        """Return the checksums of blocks, as the index has them; see ``ReadLease``."""
        return self._checksums[start:stop]

    def recycled(self) -> list[bool]:
        """Return of each block whether its slot was recycled; see ``ReadLease``."""
        self._check()
        return self._slab.index.lost(self._sighting)

    def close(self) -> None:
        """End the lease. Does nothing on a lease that has ended."""
        self._has_ended = True

    def _check(self) -> None:
        if self._has_ended:
            raise LeaseExpiredError("the read lease has ended")
        self._slab.check()
