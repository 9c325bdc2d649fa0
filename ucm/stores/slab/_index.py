# SPDX-License-Identifier: Apache-2.0
"""
Which key is in which slot: the index of a slab, in memory shared by its processes.

States of a slot::

    FREE --reserve--> RESERVED --publish--> COMMITTED --evict, forget--> FREE
                         +------discard, reclaim------------------------> FREE
    ABSENT --admit--> FREE; FREE, COMMITTED --withdraw--> ABSENT

Truth and derived data. The truth is one record per slot, whose state is one byte and
is always written last (or, when a slot is given up, first). Chains, free stack and
counts follow from the records and are rebuilt when in doubt.

Death. Whoever changes something makes ``Word.VERSION`` odd, changes, and makes it
even again. The kernel drops the lock of a process that dies; the next one to take it
finds an odd version and rebuilds. A publication of many slots is one store of
``Word.PUBLISHING``: it is completed by the rebuild if that store was made, and did
not happen otherwise.

Threading. Changes are made under the lock, which excludes threads and processes
alike. Readers take none: they look, and look again if the version moved meanwhile.
A reader on hardware that reorders loads may at worst take a stale answer; block bytes
are believed only after checksum and generation were verified.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ucm.blocks import PackedKey
from ucm.errors import LeaseExpiredError, StoreFullError
from ucm.stores.slab._chains import NO_SLOT, Chains, KeyBatch, unpack_key
from ucm.stores.slab._layout import (
    RECORD,
    Grant,
    IndexLayout,
    Sighting,
    SlotState,
    Word,
)
from ucm.stores.slab._locks import FileLock
from ucm.stores.slab._oldest import NEVER, OldestFirst
from ucm.uses import Uses

__all__ = ["SlotIndex"]

_MAGIC = int.from_bytes(b"ucmslab1")
_ATTEMPTS = 8
# Members of an enum cost more than all else in a look at one key.
_VERSION = int(Word.VERSION)
_COMMITTED = np.array(SlotState.COMMITTED, dtype=np.uint8)
_IS_COMMITTED = int(SlotState.COMMITTED)
_T = TypeVar("_T")


class SlotIndex:
    """
    The index over a mapped file.

    Args:
        buffer: The mapping, ``IndexLayout.nbytes`` long.
        layout: Its arrangement.
        lock: Excludes all other processes and threads.
        find_dead: Of some owner ids, which are gone for good. Called under the lock.
    """

    def __init__(
        self,
        buffer: memoryview,
        layout: IndexLayout,
        lock: FileLock,
        find_dead: Callable[[Iterable[int]], list[int]],
    ) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(buffer, dtype, length, offset)
            for name, (offset, dtype, length) in layout.place().items()
        }
        records = arrays["records"]
        self.layout = layout
        self.header: npt.NDArray[np.int64] = arrays["header"]
        self.free: npt.NDArray[np.int32] = arrays["free"]
        self.stamps: npt.NDArray[np.int64] = arrays["stamps"]
        self.records = records
        self.state: npt.NDArray[np.uint8] = records["state"]
        self.owner: npt.NDArray[np.uint32] = records["owner"]
        self.generation: npt.NDArray[np.uint64] = records["generation"]
        self.chains = Chains(arrays["heads"], arrays["nexts"], records)
        self.seed = int(self.header[Word.SEED])
        self._words = self.header.data  # a word as an int, at a third of the cost
        self._states = self.state.data
        self._lock = lock
        self._find_dead = find_dead
        self._last_stamp = 0
        self._oldest = OldestFirst(self.stamps, self.state)

    # -- birth and new life ------------------------------------------------------

    def format(self) -> None:
        """Make a new file of zeros an index, all absent; nobody else may use it."""
        self.header[Word.SEED] = self.seed = int.from_bytes(os.urandom(7))
        self.state[:] = SlotState.ABSENT
        self.empty()
        self.header[Word.MAGIC] = _MAGIC

    def empty(self) -> None:
        """Forget everything; nobody else may be using the index."""
        self.header[Word.VERSION] |= 1
        self.state[self.state != SlotState.ABSENT] = SlotState.FREE
        self.generation[:] = 0
        for word in (Word.PUBLISHING, Word.NUM_EVICTED):  # owners' numbers only grow
            self.header[word] = 0
        self.rebuild()

    def is_formatted(self) -> bool:
        """Return whether the file is an index at all."""
        return bool(self.header[Word.MAGIC] == _MAGIC)

    def distrust(self) -> None:
        """Keep only records that are whole, after a crash of the machine."""
        self.header[Word.VERSION] |= 1
        for slot in np.flatnonzero(self._is_used(self.state)).tolist():
            key = unpack_key(self.chains.words[slot])
            if (
                self.state[slot] != SlotState.COMMITTED
                or xxh3_64_intdigest(key, self.seed) != self.chains.hashes[slot]
            ):
                self.state[slot] = SlotState.FREE
        self.header[Word.PUBLISHING] = 0
        self.rebuild()

    def start_clock(self) -> None:
        """Let stamps go on growing although the machine's clock began anew."""
        committed = self.stamps[self.state == SlotState.COMMITTED]
        newest = int(committed.max()) if len(committed) else 0
        self.header[Word.CLOCK_BASE] = newest + 1 - time.monotonic_ns()

    # -- locks and versions ------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Hold the lock; put right what a process that died left half done.

        Raises:
            StoreUnavailableError: Somebody else held it for too long.
        """
        with self._lock.held():
            if self.header[Word.VERSION] & 1:
                self.rebuild()
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Tell readers, and whoever comes after our death, that something changes."""
        self.header[Word.VERSION] |= 1
        yield  # after an exception the version stays odd: rebuilt before the next use
        self.header[Word.VERSION] += 1

    def observe(self, look: Callable[[], _T]) -> _T:
        """Return what *look* sees while nothing changes."""
        for _ in range(_ATTEMPTS):
            version = self._words[_VERSION]
            if not version & 1:
                seen = look()
                if self._words[_VERSION] == version:
                    return seen
        with self.locked():
            return look()

    def rebuild(self) -> None:
        """Finish a publication and derive everything from the records, locked."""
        with self.changing():
            reserved = self.state == SlotState.RESERVED
            publishing = int(self.header[Word.PUBLISHING])
            if publishing:
                self.state[reserved & (self.generation == publishing)] = (
                    SlotState.COMMITTED
                )
                self.header[Word.PUBLISHING] = 0
            states = self.state.copy()
            self.chains.rebuild(np.flatnonzero(self._is_used(states)))
            free = np.flatnonzero(states == SlotState.FREE)[::-1]
            self.free[: len(free)] = free
            committed = states == SlotState.COMMITTED
            self.stamps[~committed] = NEVER
            self.stamps[committed & (self.stamps == NEVER)] = self._now(1)
            self.header[Word.NUM_FREE] = len(free)
            self.header[Word.NUM_COMMITTED] = np.count_nonzero(committed)
            self.header[Word.NUM_RESERVED] = np.count_nonzero(
                states == SlotState.RESERVED
            )
            newest = int(self.generation.max())
            newest = max(newest, int(self.header[Word.GENERATION]))
            self.header[Word.GENERATION] = newest

    # -- looking -----------------------------------------------------------------

    def batch(self, keys: Sequence[PackedKey]) -> KeyBatch:
        """Return *keys* as this index compares them."""
        return KeyBatch.of(keys, self.seed)

    def are_committed(self, batch: KeyBatch) -> npt.NDArray[np.bool_]:
        """Return which keys of *batch* are committed; takes no lock."""
        return self.look_up(batch).committed

    def look_up(self, batch: KeyBatch) -> Sighting:
        """Return what is committed of *batch*; takes no lock."""
        return self.observe(lambda: self._look_up(batch))

    def slot_of(self, key: PackedKey) -> int:
        """Return the slot of one committed key, or ``NO_SLOT``; takes no lock."""
        return self.observe(lambda: self._slot_of(key))

    def _slot_of(self, key: PackedKey) -> int:
        slot = self.chains.find_one(key, self.seed)
        if slot != NO_SLOT and self._states[slot] != _IS_COMMITTED:
            return NO_SLOT
        return slot

    def _look_up(self, batch: KeyBatch) -> Sighting:
        slots, records = self.chains.look(batch)
        committed = (slots >= 0) & (records["state"] == _COMMITTED)
        return Sighting(committed, slots, records)

    def is_current(
        self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Return which slots still hold what they held under that generation."""
        current: npt.NDArray[np.bool_] = (self.state[slots] == SlotState.COMMITTED) & (
            self.generation[slots] == generations
        )
        return current

    def touch(
        self, slots: npt.NDArray[np.int64], moments: npt.NDArray[np.int64]
    ) -> None:
        """Stamp slots as used at these moments, unless they were used later."""
        self.stamps[slots] = np.maximum(self.stamps[slots], moments)

    def stamps_of(self, uses: Uses | None, count: int) -> npt.NDArray[np.int64]:
        """Return the stamps of uses; now, the first of them last, if there are none."""
        if uses is None:
            return self._now(count)[::-1]
        return uses.moments + np.int64(self.header[Word.CLOCK_BASE])

    def _now(self, count: int) -> npt.NDArray[np.int64]:
        start = time.monotonic_ns() + int(self.header[Word.CLOCK_BASE])
        start = max(start, self._last_stamp + 1)
        self._last_stamp = start + count - 1
        return np.arange(start, start + count)

    # -- changing ----------------------------------------------------------------

    def reserve(
        self, batch: KeyBatch, nbytes: int, owner: int, uses: Uses | None = None
    ) -> Grant:
        """
        Take a slot for each key that is in none; for the first keys if they are few.

        Raises:
            StoreFullError: Slots were wanted and none could be had.
        """
        with self.locked():
            found = self.chains.find(batch)
            held = found[found >= 0]
            held = held[self.state[held] == SlotState.RESERVED]
            if len(held) and self.reclaim(self._find_dead(self.owner[held].tolist())):
                found = self.chains.find(batch)
            wanted = np.flatnonzero(found < 0)
            num_stored = len(found) - len(wanted)
            if not len(wanted):
                return Grant(wanted, wanted, 0, num_stored, wanted)
            victims = self._oldest.pick(self._shortage(len(wanted)))
            if len(victims) < self._shortage(len(wanted)):
                self.reclaim(self._find_dead(self.reserving_owners()))
                victims = victims[: self._shortage(len(wanted))]
            num_free = int(self.header[Word.NUM_FREE])
            num_popped = min(num_free, len(wanted))
            popped = self.free[num_free - num_popped : num_free]
            slots = np.concatenate((popped, victims), dtype=np.int64)
            slots.sort()
            if not len(slots):
                raise StoreFullError("every slot is being written")
            wanted = wanted[: len(slots)]
            generation = int(self.header[Word.GENERATION]) + 1
            with self.changing():
                self.header[Word.GENERATION] = generation
                self._vacate(victims)
                self.header[Word.NUM_EVICTED] += len(victims)
                self.header[Word.NUM_FREE] -= num_popped
                self.header[Word.NUM_RESERVED] += len(slots)
                fresh = np.zeros(len(slots), dtype=RECORD)
                fresh["owner"] = owner
                fresh["generation"] = generation
                fresh["nbytes"] = nbytes
                fresh["hash"] = batch.hashes[wanted]
                fresh["key"] = batch.words[wanted]
                self.records[slots] = fresh
                self.state[slots] = SlotState.RESERVED
                self.chains.link(slots)
            moments = self.stamps_of(uses, len(batch))[wanted]
            return Grant(wanted, slots, generation, num_stored, moments)

    def publish(
        self,
        grant: Grant,
        checksums: npt.NDArray[np.uint64],
        owner: int,
        without: Collection[int] = (),
    ) -> None:
        """
        Make the slots of *grant* visible in one step; those at *without* are freed.

        Raises:
            LeaseExpiredError: A slot is no longer ours; nothing became visible.
        """
        with self.locked():
            slots, moments = grant.slots, grant.moments
            if not self._still_ours(grant, owner).all():
                raise LeaseExpiredError("the store took slots of this lease back")
            if without:  # first: a rebuild publishes all that is reserved together
                self._free_slots(slots[[*without]])
                slots = np.delete(slots, [*without])
                moments = np.delete(moments, [*without])
            with self.changing():
                self.records["checksum"][slots] = checksums
                self.stamps[slots] = moments
                self.header[Word.PUBLISHING] = grant.generation
                self.state[slots] = SlotState.COMMITTED
                self.header[Word.PUBLISHING] = 0
                self.header[Word.NUM_RESERVED] -= len(slots)
                self.header[Word.NUM_COMMITTED] += len(slots)

    def discard(self, grant: Grant, owner: int) -> None:
        """Free the slots of *grant* that are still ours and unpublished."""
        with self.locked():
            self._free_slots(grant.slots[self._still_ours(grant, owner)])

    def forget(self, batch: KeyBatch) -> int:
        """Free the committed slots of these keys; return how many."""
        with self.locked():
            found = np.unique(self.chains.find(batch))
            found = found[found >= 0]
            return self._free_slots(found[self.state[found] == SlotState.COMMITTED])

    def clear(self, prefix: bytes) -> int:
        """Free every committed slot whose key starts with *prefix*."""
        with self.locked():
            slots = np.flatnonzero(self.state == SlotState.COMMITTED)
            fields = self.chains.words[slots].view(np.uint8)
            wanted = np.frombuffer(prefix, dtype=np.uint8)
            if len(wanted) >= fields.shape[1]:
                return 0
            starts = (fields[:, : len(wanted)] == wanted).all(axis=1)
            return self._free_slots(slots[starts & (fields[:, -1] >= len(wanted))])

    def admit(self, slots: npt.NDArray[np.int64]) -> None:
        """Use absent slots from now on: there is memory for them."""
        with self.locked():
            absent = slots[self.state[slots] == SlotState.ABSENT]
            with self.changing():
                self.state[absent] = SlotState.FREE
                num_free = int(self.header[Word.NUM_FREE])
                self.free[num_free : num_free + len(absent)] = np.sort(absent)[::-1]
                self.header[Word.NUM_FREE] += len(absent)

    def withdraw(self, slots: npt.NDArray[np.int64]) -> bool:
        """
        Evict what is in these slots and use them no more: their memory goes.

        Returns:
            False, and nothing has changed, if one of them is being written.
        """
        with self.locked():
            if (self.state[slots] == SlotState.RESERVED).any():
                return False
            committed = slots[self.state[slots] == SlotState.COMMITTED]
            with self.changing():
                self._vacate(committed)
                self.header[Word.NUM_EVICTED] += len(committed)
                self.state[slots] = SlotState.ABSENT
                free = self.free[: int(self.header[Word.NUM_FREE])]
                kept = free[self.state[free] == SlotState.FREE]
                self.free[: len(kept)] = kept
                self.header[Word.NUM_FREE] = len(kept)
            return True

    def reserving_owners(self) -> list[int]:
        """Return who has slots reserved, locked."""
        return list(map(int, np.unique(self.owner[self._reserved()])))

    def reclaim(self, dead_owners: list[int]) -> int:
        """Free what owners that are gone had reserved, locked; return how many."""
        if not dead_owners:
            return 0
        slots = self._reserved()
        return self._free_slots(slots[np.isin(self.owner[slots], dead_owners)])

    # -- parts of a change, locked -----------------------------------------------

    @staticmethod
    def _is_used(states: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        used: npt.NDArray[np.bool_] = (states == SlotState.RESERVED) | (
            states == SlotState.COMMITTED
        )
        return used

    def _reserved(self) -> npt.NDArray[np.int64]:
        if not self.header[Word.NUM_RESERVED]:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.state == SlotState.RESERVED)

    def _shortage(self, num_wanted: int) -> int:
        return max(0, num_wanted - int(self.header[Word.NUM_FREE]))

    def _still_ours(self, grant: Grant, owner: int) -> npt.NDArray[np.bool_]:
        slots = grant.slots
        ours: npt.NDArray[np.bool_] = (
            (self.state[slots] == SlotState.RESERVED)
            & (self.generation[slots] == grant.generation)
            & (self.owner[slots] == owner)
        )
        return ours

    def _vacate(self, slots: npt.NDArray[np.int64]) -> None:
        if len(slots):
            num_committed = np.count_nonzero(self.state[slots] == SlotState.COMMITTED)
            self.state[slots] = SlotState.FREE
            self.stamps[slots] = NEVER
            self.chains.unlink(slots)
            self.header[Word.NUM_COMMITTED] -= num_committed
            self.header[Word.NUM_RESERVED] -= len(slots) - num_committed

    def _free_slots(self, slots: npt.NDArray[np.int64]) -> int:
        if len(slots):
            with self.changing():
                self._vacate(slots)
                num_free = int(self.header[Word.NUM_FREE])
                # Descending, so that what is popped together lies side by side.
                self.free[num_free : num_free + len(slots)] = np.sort(slots)[::-1]
                self.header[Word.NUM_FREE] += len(slots)
        return len(slots)
