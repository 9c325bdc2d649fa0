# SPDX-License-Identifier: Apache-2.0
"""
Which class has which extent of the data, and which extents have their memory.

A table in shared memory, beside the indexes. Who changes an owner holds the arena's lock,
and takes the locks of indexes only within it. The order of steps makes a death harmless:

- an extent is first owned, then its slots are used: owned slots that are absent are
  admitted by whoever of the class meets them;
- a class stops using the slots of an extent before another one owns it.

What the table says follows from the indexes and from the data file, and whoever opens a
slab that nobody uses writes it anew. An extent is marked as populated when all of its
pages are there, and only such extents get an owner: no store can fail for memory.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ucm.errors import ConfigError, StoreUnavailableError
from ucm.stores.slab._chains import KeyBatch
from ucm.stores.slab._classes import ClassIndex, extents_of, uses_of
from ucm.stores.slab._extents import (
    NOBODY,
    UNUSED,
    WRITTEN,
    Geometry,
    Holding,
    choose_extent,
)
from ucm.stores.slab._files import ARENA, Directory, Manifest
from ucm.stores.slab._layout import Grant, SlotState, Word
from ucm.stores.slab._locks import FileLock, are_bound, is_bound
from ucm.uses import Uses

__all__ = ["Arena", "Part", "Supply", "drop_what_others_own", "region_of"]

_PAGE = 4096
_ASK_EVERY_S = 1.0
_PATIENCE_S = 0.1
"""With the lock of another class's index."""
_AHEAD = 64


def region_of(slot_bytes: int) -> int:
    """Return the number of a class among the ties of an arena."""
    return slot_bytes // _PAGE


class Arena:
    """
    The table.

    Args:
        buffer: The mapped file.
        num_extents: That it tells of.
        lock: Held by whoever changes an owner.
    """

    def __init__(self, buffer: Any, num_extents: int, lock: FileLock) -> None:  # noqa: ANN401 - a mapping
        self.owners, self.populated = Arena.decode(buffer, num_extents)
        self.lock = lock

    @property
    def num_populated(self) -> int:
        """Extents whose memory is there."""
        return int(np.count_nonzero(self.populated))

    @staticmethod
    def nbytes(num_extents: int) -> int:
        """Return the size of the file."""
        return _PAGE * -(-9 * num_extents // _PAGE)

    @staticmethod
    def encode(
        owners: npt.NDArray[np.int64], populated: npt.NDArray[np.bool_]
    ) -> bytes:
        """Return what the file holds."""
        text = owners.tobytes() + populated.tobytes()
        return text.ljust(Arena.nbytes(len(owners)), b"\0")

    @staticmethod
    def decode(
        buffer: Any,  # noqa: ANN401 - a mapping, or bytes
        num_extents: int,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return owners and which extents are populated, in the memory that was given."""
        return (
            np.frombuffer(buffer, np.int64, num_extents),
            np.frombuffer(buffer, np.bool_, num_extents, 8 * num_extents),
        )


class Part:
    """
    What a class gets as soon as it wants it, as ``choose_extent`` says.

    Knows nothing of the index, which asks: they would hold each other.

    Args:
        manifest: Of the slab.
        arena: The table.
        geometry: Of the class.
    """

    def __init__(self, manifest: Manifest, arena: Arena, geometry: Geometry) -> None:
        self._manifest = manifest
        self._arena = arena
        self._geometry = geometry

    def num_slots(self) -> int:
        """
        Return how many slots its equal part of the memory is that is there; takes no lock.

        Raises:
            StoreUnavailableError: Nobody can be asked who else uses the slab.
        """
        geometry, arena = self._geometry, self._arena
        owners = arena.owners[: geometry.usable_extents]
        others = set(np.unique(owners).tolist()) - {NOBODY, geometry.slot_bytes}
        num_live = 1 + sum(
            are_bound(arena.lock.fd, region_of(size))
            for size in filter(self._manifest.is_class, others)
        )
        there = int(np.count_nonzero(arena.populated[: len(owners)]))
        return there // num_live * geometry.slots_per_extent


class Supply:
    """
    How one class comes to memory: what nobody has, then what others can do without.

    Args:
        directory: Of the slab.
        manifest: What it is.
        arena: The table.
        mine: The class.
    """

    def __init__(
        self, directory: Directory, manifest: Manifest, arena: Arena, mine: ClassIndex
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._arena = arena
        self._mine = mine
        self._size = mine.geometry.slot_bytes
        self._ask_at = 0.0
        mine.index.part = Part(manifest, arena, mine.geometry).num_slots

    def reserve(
        self, batch: KeyBatch, nbytes: int, owner: int, uses: Uses | None
    ) -> Grant:
        """
        Reserve slots; see ``SlotIndex``. Evict only where no memory is to be had.

        As long as there are extents that nobody has, reservations take turns: one that
        saw the slots of another as free would evict for want of them.

        Raises:
            StoreFullError: Slots were wanted and none could be had.
            StoreUnavailableError: Somebody held a lock for too long.
        """
        index = self._mine.index
        if not self._has_all():
            if self._free().any():
                with self._arena.lock.held():
                    self._claim_free(len(batch))
                    return index.reserve(batch, nbytes, owner, uses)
            self._take_from_others(batch)
        return index.reserve(batch, nbytes, owner, uses)

    def admit_own(self) -> None:
        """Use what the class owns already: whoever claimed it may have died since."""
        geometry, index = self._mine.geometry, self._mine.index
        own = np.flatnonzero(self._owners() == self._size)
        last = np.minimum((own + 1) * geometry.slots_per_extent, geometry.num_slots) - 1
        for extent in own[index.state[last] == SlotState.ABSENT].tolist():
            index.admit(geometry.slots_of(extent))

    def _has_all(self) -> bool:
        return self._mine.index.num_present == self._mine.geometry.num_slots

    def _owners(self) -> npt.NDArray[np.int64]:
        """Return the owners of what is large enough for one of our slots; shared."""
        return self._arena.owners[: self._mine.geometry.usable_extents]

    def _free(self) -> npt.NDArray[np.bool_]:
        """Return which extents have memory and no owner."""
        owners = self._owners()
        free: npt.NDArray[np.bool_] = (owners == NOBODY) & self._arena.populated[
            : len(owners)
        ]
        return free

    def _shortage(self, wanted: int) -> int:
        return wanted - int(self._mine.index.header[Word.NUM_FREE])

    def _claim_free(self, wanted: int) -> None:
        """Claim what is wanted, and some more: an empty extent is the first to go."""
        for number, extent in enumerate(self._free().nonzero()[0].tolist()):
            if number >= _AHEAD and self._shortage(wanted) <= 0:
                return
            self._own(extent)

    def _own(self, extent: int) -> None:
        self._arena.owners[extent] = self._size
        self._mine.index.admit(self._mine.geometry.slots_of(extent))

    def _take_from_others(self, batch: KeyBatch) -> None:
        """Take what others can do without; look at it once a second if that was nothing."""
        if time.monotonic() < self._ask_at or self._shortage(len(batch)) <= 0:
            return
        # Who has a lock for too long may be stopped: there are our own blocks to evict.
        with contextlib.suppress(StoreUnavailableError):
            with self._arena.lock.held():
                self.admit_own()
            seen = self._mine.index.look_up(batch)
            wanted = int(np.count_nonzero(~seen.committed))
            while self._shortage(wanted) > 0 and self._take_one():
                pass
            if self._shortage(wanted) <= 0:
                return
        self._ask_at = time.monotonic() + _ASK_EVERY_S

    def _take_one(self) -> bool:
        """Take an extent from another class, if one may go; return whether it did."""
        sizes = set(np.unique(self._owners()).tolist()) - {NOBODY, self._size}
        sizes = set(filter(self._manifest.is_class, sizes))
        with contextlib.ExitStack() as stack:
            visits = [stack.enter_context(self._visiting(size)) for size in sizes]
            others = {
                visited.geometry.slot_bytes: visited
                for visited, _ in visits
                if visited is not None
            }
            live = frozenset(
                visited.geometry.slot_bytes
                for visited, is_live in visits
                if visited is not None and is_live
            )
            seen, oldest_ns = self._look(others, live), self._oldest_ns()
            while (chosen := choose_extent(self._size, oldest_ns, seen)) is not None:
                theirs = int(seen.owners[chosen])
                try:
                    _reclaim(others[theirs])
                except StoreUnavailableError:  # of a process that may be stopped
                    seen.used_ns[seen.owners == theirs] = WRITTEN
                    continue
                if self._move(chosen, others[theirs]):
                    return True
                seen.used_ns[chosen] = WRITTEN
            return False

    @contextlib.contextmanager
    def _visiting(self, slot_bytes: int) -> Iterator[tuple[ClassIndex | None, bool]]:
        """Open another class's index, tied like a user's; nothing if it is unusable."""
        region = region_of(slot_bytes)
        geometry = attrs.evolve(self._mine.geometry, slot_bytes=slot_bytes)
        name = self._manifest.index_of(slot_bytes)
        with contextlib.ExitStack() as stack:
            visited = None
            is_live = True
            with contextlib.suppress(ConfigError, StoreUnavailableError, OSError):
                ours = FileLock(self._directory.open(ARENA), self._directory.root, 0.0)
                stack.callback(ours.close)
                is_live = are_bound(self._arena.lock.fd, region)
                opened = ClassIndex.open(
                    self._directory,
                    name,
                    geometry,
                    min(self._mine.lock.timeout, _PATIENCE_S),
                    at_once=False,
                )
                stack.enter_context(opened.closing())
                visited = opened if is_bound(ours.fd, opened.lock.fd, region) else None
            yield visited, is_live

    def _look(self, others: dict[int, ClassIndex], live: frozenset[int]) -> Holding:
        owners = self._owners().copy()
        owners[~np.isin(owners, [self._size, *others])] = NOBODY
        used_ns = np.full(len(owners), UNUSED)
        for size, visited in others.items():
            extents = np.flatnonzero(owners == size)
            used_ns[extents] = uses_of(visited, extents, -1)
        return Holding(owners, used_ns, live)

    def _oldest_ns(self) -> int:
        """Return when the oldest of our own blocks was used; now if there is none."""
        own = np.flatnonzero(self._owners() == self._size)
        uses = [use for use in uses_of(self._mine, own, 0) if use != UNUSED]
        return min(uses, default=time.monotonic_ns())

    def _move(self, extent: int, victim: ClassIndex) -> bool:
        """Make an extent of another class ours, unless some slot is being written."""
        owners = self._arena.owners
        with self._arena.lock.held():
            if owners[extent] != victim.geometry.slot_bytes:
                return False
            if not victim.index.withdraw(victim.geometry.slots_of(extent)):
                return False
            self._own(extent)
        return True


def _reclaim(opened: ClassIndex) -> None:
    """Free what the dead had reserved."""
    with opened.index.locked():
        dead = opened.owners.find_dead(opened.index.reserving_owners())
        opened.index.reclaim(dead)


def drop_what_others_own(opened: ClassIndex, owners: npt.NDArray[np.int64]) -> None:
    """Let an index that nobody uses, perhaps an old copy, use what its class owns only."""
    _reclaim(opened)
    for extent in extents_of(opened).tolist():
        if owners[extent] != opened.geometry.slot_bytes:
            opened.index.withdraw(opened.geometry.slots_of(extent))
