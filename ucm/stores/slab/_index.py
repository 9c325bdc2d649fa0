# SPDX-License-Identifier: Apache-2.0
"""
Which key is in which slot: the index of a slab, in memory shared by its processes.

States of a slot::

    FREE --reserve--> RESERVED --publish--> COMMITTED --evict, forget--> FREE
                         +------discard, reclaim------------------------> FREE
    ABSENT --admit--> FREE; FREE, COMMITTED --withdraw--> ABSENT

What is kept, and what a death leaves, is told in the tables module.

Bounds. Whatever a verb is asked, it holds the lock for one change of at most ``MOST``
slots at a time, and a look at no more stamps than ``MOST_LOOKED_AT``; between two of them
others come. A publication is one change, and a lease is not larger. ``clear``,
``withdraw`` and ``admit`` are as many changes as they take, each whole by itself.

Threading. Changes are made under the lock, which excludes threads and processes
alike. Readers take none: they look, and look again if the version moved meanwhile.
A reader on hardware that reorders loads may at worst take a stale answer; block bytes
are believed only after checksum and generation were verified.
"""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ucm.blocks import PackedKey
from ucm.errors import LeaseExpiredError, StoreUnavailableError
from ucm.fates import Fate
from ucm.stores.slab._chains import NO_SLOT, KeyBatch
from ucm.stores.slab._changes import STORED
from ucm.stores.slab._layout import (
    ABSENT,
    COMMITTED,
    FREE,
    MOST,
    RESERVED,
    Grant,
    IndexLayout,
    Sighting,
    Word,
)
from ucm.stores.slab._locks import FileLock
from ucm.stores.slab._reserving import Reservation
from ucm.stores.slab._tenants import OwnOldest
from ucm.stores.slab._used import Used
from ucm.uses import Uses

__all__ = ["MAGIC", "SlotIndex"]

MAGIC = int.from_bytes(b"ucmslab2")
_ATTEMPTS = 8
# Members of an enum cost more than all else in a look at one key.
_VERSION = int(Word.VERSION)
_PUBLISHING = int(Word.PUBLISHING)
_T = TypeVar("_T")


class SlotIndex(Used):
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
        super().__init__(buffer, layout)
        self.own = OwnOldest(self.state, self.stamps, self.payers)
        self.find_dead = find_dead
        self._lock = lock
        lock.on_taken = self._put_right

    # -- birth and new life ------------------------------------------------------

    def format(self) -> None:
        """Make a new file of zeros an index, all absent; nobody else may use it."""
        self.words[Word.SEED] = self.seed = int.from_bytes(os.urandom(7))
        self.state[:] = ABSENT
        self.rebuild(self.moment())
        self.words[Word.MAGIC] = MAGIC

    def is_formatted(self) -> bool:
        """Return whether the file is an index at all."""
        return bool(self.words[Word.MAGIC] == MAGIC)

    # -- locks and versions ------------------------------------------------------

    def locked(self) -> FileLock:
        """
        Return what holds the lock, as a context manager.

        What a process that died left half done is put right first.

        Raises, on entry:
            StoreUnavailableError: Somebody else held it for too long.
        """
        return self._lock.held()

    def _put_right(self) -> None:
        if self.words[_VERSION] & 1:
            try:
                self.repair(self.moment())
            except (
                IndexError,
                ValueError,
            ):  # damaged: what follows from records is made anew
                self.rebuild(self.moment())

    def observe(self, look: Callable[[], _T]) -> _T:
        """Return what *look* sees while nothing changes."""
        for _ in range(_ATTEMPTS):
            version = self.words[_VERSION]
            if not version & 1:
                seen = look()
                if self.words[_VERSION] == version:
                    return seen
        with self.locked():
            return look()

    # -- looking -----------------------------------------------------------------

    def batch(self, keys: Sequence[PackedKey]) -> KeyBatch:
        """Return *keys* as this index compares them."""
        hashes_of = None if self.quick is None else self.quick.hashes_of
        return KeyBatch.of(keys, self.seed, hashes_of)

    def look_up(self, batch: KeyBatch) -> Sighting:
        """Return what is committed of *batch*, all of it at one moment."""
        return self.observe(lambda: self._look_up(batch))

    def glance(self, batch: KeyBatch) -> Sighting:
        """
        Return the same for a hint, also amid changes of others that never pause.

        Any answer may be out of date when it arrives; whoever acts on it finds out.

        Raises:
            StoreUnavailableError: One change did not end while one waits for the lock.
        """
        version = self.words[_VERSION]
        try:
            return self.look_up(batch)
        except StoreUnavailableError:
            if self.words[_VERSION] == version:
                raise
            return self._look_up(batch)

    def slot_of(self, key: PackedKey) -> int:
        """Return the slot of one committed key, or ``NO_SLOT``; a hint."""
        version = self.words[_VERSION]
        slot, _ = self.chains.find_one(key, self.seed)
        is_there = slot != NO_SLOT and self.states[slot] == COMMITTED
        if version & 1 or self.words[_VERSION] != version:
            seen = self.glance(self.batch([key]))
            slot, is_there = int(seen.slots[0]), bool(seen.committed[0])
        return slot if is_there else NO_SLOT

    def num_there(self, keys: Sequence[PackedKey]) -> int:
        """Return how many of a few keys are committed, up to the first that is not; a hint."""
        version, find = self.words[_VERSION], self.chains.find_one
        states, seed, count = self.states, self.seed, 0
        for key in keys:
            slot, _ = find(key, seed)
            if slot == NO_SLOT or states[slot] != COMMITTED:
                break
            count += 1
        if version & 1 or self.words[_VERSION] != version:
            return [*map(self.slot_of, keys), NO_SLOT].index(NO_SLOT)
        return count

    def _look_up(self, batch: KeyBatch) -> Sighting:
        if self.quick is not None:
            return self.quick.look(batch)
        slots, records = self.chains.look(batch)
        committed = (slots >= 0) & (self.state[slots] == COMMITTED)
        return Sighting(committed, slots, records)

    def lost(self, seen: Sighting) -> list[bool]:
        """Return of each that was seen whether its slot no longer holds it."""
        other = self.generation[seen.slots] != seen.generations
        lost: list[bool] = (other | (self.state[seen.slots] != COMMITTED)).tolist()
        return lost

    # -- changing ----------------------------------------------------------------

    def reserve(
        self, batch: KeyBatch, nbytes: int, owner: int, uses: Uses | None = None
    ) -> Grant:
        """
        Take a slot for each key that is in none; of too many for those used last.

        Room is made by evicting what counts as used longest ago, and no block for one
        that counts as used before it; nothing that *batch* itself names is evicted. A
        tenant that has its share of the slots makes room among its own. What was found
        out holds for an instant: a key is granted if it is in no slot then.

        Raises:
            StoreFullError: Slots were wanted and none could be had.
        """
        return Reservation(self, batch, nbytes, owner, uses).grant()

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
            if self.quick is not None and len(slots) and not without:
                told = checksums, grant.generation, owner
                if self.quick.publish(slots, moments, *told):
                    self.own.outdate(slots, moments)
                    return
            if not self._still_ours(grant, owner).all():
                raise LeaseExpiredError("the store took slots of this lease back")
            if without:  # first: a repair publishes all that is reserved together
                self._free_slots(slots[[*without]])
                slots = np.delete(slots, [*without])
                moments = np.delete(moments, [*without])
            if not len(slots):
                return
            self.begin(slots)
            self.records["checksum"][slots] = checksums
            self.oldest.lower(slots, moments)
            self.stamps[slots] = moments
            self.words[_PUBLISHING] = grant.generation
            self.state[slots] = COMMITTED
            self.words[_PUBLISHING] = 0
            self.own.outdate(slots, moments)
            self.changes.add(STORED, slots)
            self.end(slots)

    def discard(self, grant: Grant, owner: int) -> None:
        """Free the slots of *grant* that are still ours and unpublished."""
        with self.locked():
            self._free_slots(grant.slots[self._still_ours(grant, owner)])

    def forget(self, batch: KeyBatch, fate: Fate = Fate.FORGOTTEN) -> int:
        """Free the committed slots of these keys; return how many."""
        num_freed = 0
        for start in range(0, len(batch), MOST):
            part = batch.part(start, start + MOST)
            with self.locked():
                found = np.unique(self.chains.find(part))
                found = found[found >= 0]
                found = found[self.state[found] == COMMITTED]
                self.part_with(found, fate)
                num_freed += self._free_slots(found)
        return num_freed

    def clear(self, prefix: bytes) -> int:
        """
        Free every committed slot whose key starts with *prefix*.

        Of what is committed meanwhile some may stay.
        """
        num_freed = 0
        for start in range(0, self.layout.num_slots, MOST):
            part = np.arange(start, min(start + MOST, self.layout.num_slots))
            if len(self._starting(part, prefix)):
                with self.locked():
                    found = self._starting(part, prefix)
                    self.part_with(found, Fate.CLEARED)
                    num_freed += self._free_slots(found)
        return num_freed

    def admit(self, slots: npt.NDArray[np.int64]) -> None:
        """Use absent slots from now on: there is memory for them."""
        for start in range(0, len(slots), MOST):
            with self.locked():
                part = slots[start : start + MOST]
                self._set(part[self.state[part] == ABSENT], FREE)

    def withdraw(self, slots: npt.NDArray[np.int64], *, evicts: bool = True) -> bool:
        """
        Evict what is in these slots, or only if they are empty, and use them no more.

        Goes from the last one to the first, and ``admit`` the other way: while any is
        absent the last one is, whoever died in between.

        Returns:
            False if one of them is being written, or has a block and is to keep it: all
            are in use as before, though what was in some of them may be gone.
        """
        parts = [slots[start : start + MOST] for start in range(0, len(slots), MOST)]
        if (self.state[slots] == RESERVED).any():
            return False
        for number in reversed(range(len(parts))):
            if not self._withdraw(parts[number], evicts=evicts):
                for part in parts[number + 1 :]:
                    self.admit(part)
                return False
        return True

    def _withdraw(self, slots: npt.NDArray[np.int64], *, evicts: bool) -> bool:
        with self.locked():
            states = self.state[slots]
            committed = slots[states == COMMITTED]
            if (states == RESERVED).any() or (len(committed) and not evicts):
                return False
            self.begin(slots, committed)
            self.part_with(committed, Fate.EVICTED)
            self.vacate(committed)
            self.words[Word.NUM_EVICTED] += len(committed)
            self.state[slots[::-1]] = ABSENT
            self.end(slots)
            return True

    def reserving_owners(self) -> list[int]:
        """Return who has slots reserved, locked."""
        if not self.words[Word.NUM_RESERVED]:
            return []
        return list(map(int, np.unique(self.owner[self.tally.find_reserved()])))

    def reclaim(self, dead_owners: list[int]) -> int:
        """Free what owners that are gone had reserved, locked; return how many."""
        if not dead_owners or not self.words[Word.NUM_RESERVED]:
            return 0
        slots = self.tally.find_reserved()
        slots = slots[np.isin(self.owner[slots], dead_owners)]
        for start in range(0, len(slots), MOST):
            self._free_slots(slots[start : start + MOST])
        return len(slots)

    # -- parts of a change, locked -----------------------------------------------

    def _starting(
        self, slots: npt.NDArray[np.int64], prefix: bytes
    ) -> npt.NDArray[np.int64]:
        """Return which of these slots hold a committed key that starts so."""
        slots = slots[self.state[slots] == COMMITTED]
        fields = self.chains.words[slots].view(np.uint8)
        wanted = np.frombuffer(prefix, dtype=np.uint8)
        if len(wanted) >= fields.shape[1]:
            return slots[:0]
        starts: npt.NDArray[np.bool_] = (fields[:, : len(wanted)] == wanted).all(axis=1)
        return slots[np.flatnonzero(starts & (fields[:, -1] >= len(wanted)))]

    def _still_ours(self, grant: Grant, owner: int) -> npt.NDArray[np.bool_]:
        slots = grant.slots
        ours: npt.NDArray[np.bool_] = self.state[slots] == RESERVED
        ours &= self.generation[slots] == grant.generation
        ours &= self.owner[slots] == owner
        return ours

    def _set(self, slots: npt.NDArray[np.int64], state: int) -> None:
        if len(slots):
            self.begin(slots)
            self.state[slots] = state
            self.end(slots)

    def _free_slots(self, slots: npt.NDArray[np.int64]) -> int:
        if len(slots):
            self.begin(slots, slots)
            self.vacate(slots)
            self.end(slots)
        return len(slots)
