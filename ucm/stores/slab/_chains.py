# SPDX-License-Identifier: Apache-2.0
"""
Keys as fixed-width words, and the hash chains that find a key's slot.

Chains hold nothing that the slot records do not hold: whatever happens to them, they
can be built again. An operation takes a whole batch, because one numpy call over 512
keys costs little more than one over a single key. Only what ends in ``one`` does without
numpy: where a single key is all that is asked, it costs a tenth.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from ucm.blocks import PackedKey
from ucm.errors import KeyFormatError
from ucm.stores.slab._layout import KEY_WORDS, is_used

if TYPE_CHECKING:
    from ucm.stores.slab._quick import Quick

__all__ = ["NO_SLOT", "Chains", "KeyBatch", "unpack_key", "unpack_keys"]

NO_SLOT = -1
_LONGEST = 1 << 12
"""Of a chain, if memory is in order: hashes are seeded."""
_FEW = 64
"""So many slots are linked one by one: numpy's calls would cost more."""
_NONE = np.array(NO_SLOT)  # numpy compares with an array faster than with a number
_KEY_FIELD = KEY_WORDS * 8
_MAX_KEY_BYTES = 85  # the longest packed key; the last byte of the field is its length
_PADDINGS = [size.to_bytes(_KEY_FIELD - size, "big") for size in range(_KEY_FIELD)]
"""What follows a key of so many bytes in its field: zeros and the size."""


@attrs.frozen(eq=False)
class KeyBatch:
    """
    Packed keys in the form in which the index compares them.

    Args:
        fields: All keys as they stand in their records, back to back: zero padded, length
            in the last byte.
        hashes: ``[n]`` uint64, seeded.
    """

    fields: bytes
    hashes: npt.NDArray[np.uint64]

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """The fields as ``[n, KEY_WORDS]``."""
        return np.frombuffer(self.fields, dtype=np.uint64).reshape(-1, KEY_WORDS)

    @classmethod
    def of(
        cls,
        keys: Sequence[PackedKey],
        seed: int,
        hashes_of: "Callable[[bytes, int, int], npt.NDArray[np.uint64]] | None" = None,
    ) -> "KeyBatch":
        """
        Pack *keys*.

        Args:
            keys: Packed, in any order.
            seed: Of the index.
            hashes_of: Hashes keys as they stand in records, of which there are so many,
                with a seed; one by one if not given.

        Raises:
            KeyFormatError: A key is longer than any packed key.
        """
        sizes = set(map(len, keys))
        if sizes and max(sizes) > _MAX_KEY_BYTES:
            raise KeyFormatError(f"a key has more than {_MAX_KEY_BYTES} bytes")
        if len(sizes) == 1:
            fields = _PADDINGS[sizes.pop()].join([*keys, b""])
        else:
            fields = b"".join(key + _PADDINGS[len(key)] for key in keys)
        if hashes_of is not None:
            return cls(fields, hashes_of(fields, len(keys), seed))
        digests = b"".join(map(xxh3_64_digest, keys, itertools.repeat(seed)))
        return cls(fields, np.frombuffer(digests, dtype=">u8").astype(np.uint64))

    def __len__(self) -> int:
        return len(self.hashes)

    def part(self, start: int, stop: int) -> "KeyBatch":
        """Return the keys from *start* to *stop*."""
        fields = self.fields[start * _KEY_FIELD : stop * _KEY_FIELD]
        return KeyBatch(fields, self.hashes[start:stop])

    def at(self, positions: npt.NDArray[np.int64]) -> "KeyBatch":
        """Return the keys at *positions*."""
        return KeyBatch(self.words[positions].tobytes(), self.hashes[positions])


def unpack_key(words: npt.NDArray[np.uint64]) -> PackedKey:
    """Return the packed key of one ``[KEY_WORDS]`` row; any bytes give some key."""
    (key,) = unpack_keys(words[np.newaxis])
    return key


def unpack_keys(words: npt.NDArray[np.uint64]) -> list[PackedKey]:
    """Return the packed keys of ``[n, KEY_WORDS]``; any bytes give some keys."""
    fields = np.ascontiguousarray(words).tobytes()
    last = np.frombuffer(fields, np.uint8)[_KEY_FIELD - 1 :: _KEY_FIELD]
    sizes = np.minimum(last, _MAX_KEY_BYTES).tolist()
    starts = range(0, len(fields), _KEY_FIELD)
    keys = [fields[at : at + n] for at, n in zip(starts, sizes, strict=True)]
    return cast("list[PackedKey]", keys)


class Chains:
    """
    Singly linked chains of slots, one per bucket, in shared memory.

    Only the holder of the index lock links and unlinks. Anybody may ``find`` at any
    time; what is found while somebody links is a guess. Whatever store was the last one
    of a process that died, each chain is still a chain: slots are taken out before any
    of them is put elsewhere, and point on before anything points to them.

    Args:
        heads: ``[num_buckets]`` int32, first slot of each chain; a power of two.
        nexts: ``[num_slots]`` int32, the following slot.
        states: ``[num_slots]`` uint8, 0 for a slot that belongs in no chain.
        records: ``[num_slots]`` what is known of each slot: of the fields ``key`` and
            ``hash``.
    """

    __slots__ = (
        "_bytes",
        "_hashes",
        "_heads",
        "_itemsize",
        "_key_at",
        "_mask",
        "_nexts",
        "_num_slots",
        "_record",
        "_rows",
        "hashes",
        "heads",
        "nexts",
        "quick",
        "states",
        "words",
    )

    def __init__(
        self,
        heads: npt.NDArray[np.int32],
        nexts: npt.NDArray[np.int32],
        states: npt.NDArray[np.uint8],
        records: npt.NDArray[Any],
    ) -> None:
        self.heads = heads
        self.nexts = nexts
        self.words: npt.NDArray[np.uint64] = records["key"]
        self.hashes: npt.NDArray[np.uint64] = records["hash"]
        self.states = states
        self._record = records.dtype
        self._itemsize = records.dtype.itemsize
        self._rows = records.view(f"V{records.itemsize}")  # copied in one piece each
        self._mask = np.array(len(heads) - 1, dtype=np.uint64)
        # The same as Python's own numbers and bytes, for looks at one key.
        self._heads, self._nexts = heads.data, nexts.data
        self._num_slots = len(nexts)
        self._bytes = records.view(np.uint8).data
        self._key_at = records.dtype.fields["key"][1]  # type: ignore[index]
        self._hashes = records["hash"].data
        self.quick: Quick | None = None
        """Finds keys by native code; whoever has all arrays of the index may set it."""

    def buckets(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the bucket of each hash."""
        return (hashes & self._mask).view(np.int64)

    def find(self, batch: KeyBatch) -> npt.NDArray[np.int64]:
        """Return the linked slot of each key, ``NO_SLOT`` where there is none."""
        if self.quick is not None:
            return self.quick.find(batch)
        slots = self._with_hash(batch.hashes)
        linked = (slots != _NONE).nonzero()[0]
        if len(linked):  # most keys that are saved are new
            same = self.words[slots[linked]] == batch.words[linked]
            for at in linked[~same.all(axis=1)].tolist():
                slots[at] = self._with_key(slots[at], batch.words[at])
        return slots

    def find_field(self, field: bytes, found: int) -> int:
        """Return the linked slot of a key as it stands in records, with this hash."""
        slot = self._heads[found & (len(self._heads) - 1)]
        for _ in range(_LONGEST):
            if not 0 <= slot < self._num_slots:
                return NO_SLOT
            at = slot * self._itemsize + self._key_at
            if self._bytes[at : at + _KEY_FIELD] == field:
                return slot
            slot = self._nexts[slot]
        return NO_SLOT

    def find_one(self, key: PackedKey, seed: int) -> tuple[int, int]:
        """
        Return the linked slot of one key, ``NO_SLOT`` without one, and the key's hash.

        Raises:
            KeyFormatError: It is longer than any packed key.
        """
        if len(key) > _MAX_KEY_BYTES:
            raise KeyFormatError(f"a key has more than {_MAX_KEY_BYTES} bytes")
        found = xxh3_64_intdigest(key, seed)
        slot = self._heads[found & (len(self._heads) - 1)]
        if slot != NO_SLOT:  # most keys that are looked up are new
            slot = self.find_field(key + _PADDINGS[len(key)], found)
        return slot, found

    def look(self, batch: KeyBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """
        Find the linked slot of each key.

        Returns:
            The slots, ``NO_SLOT`` where there is none, and a copy of their records,
            any record for ``NO_SLOT``.
        """
        slots = self._with_hash(batch.hashes)
        rows = self._rows[slots]
        records = rows.view(self._record)
        if records["key"].tobytes() != batch.fields:
            unlike = (records["key"] != batch.words).any(axis=1) & (slots != _NONE)
            for at in unlike.nonzero()[0].tolist():  # by chance another key's hash
                slots[at] = self._with_key(slots[at], batch.words[at])
                rows[at] = self._rows[slots[at]]
        return slots, records

    def _with_hash(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return for each hash the first slot of its chain that has it."""
        slots = self._bounded(self.heads[self.buckets(hashes)])
        asked = ((self.hashes[slots] != hashes) & (slots != _NONE)).nonzero()[0]
        ahead = slots[asked]
        for _ in range(_LONGEST):  # a chain that changes may seem endless
            if not len(asked):
                break
            slots[asked] = ahead = self._bounded(self.nexts[ahead])
            more = (self.hashes[ahead] != hashes[asked]) & (ahead != _NONE)
            asked, ahead = asked[more], ahead[more]
        slots[asked] = NO_SLOT
        return slots

    def _bounded(self, linked: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return these slots; ``NO_SLOT`` for one that is none, as in damaged memory."""
        slots = linked.astype(np.int64)
        slots[slots.view(np.uint64) >= self._num_slots] = NO_SLOT
        return slots

    def _with_key(self, slot: np.int64, words: npt.NDArray[np.uint64]) -> int:
        """Return the slot of a key, at *slot* or further on in its chain."""
        for _ in range(_LONGEST):
            if not 0 <= slot < self._num_slots:
                break
            if (self.words[slot] == words).all():
                return int(slot)
            slot = self.nexts[slot]
        return NO_SLOT

    def link(self, slots: npt.NDArray[np.int64]) -> None:
        """Put slots, none of them linked, in front of their chains."""
        if len(slots) <= _FEW:
            heads, nexts, hashes = self._heads, self._nexts, self._hashes
            mask = len(heads) - 1
            for slot in slots[::-1].tolist():
                bucket = hashes[slot] & mask
                nexts[slot] = heads[bucket]
                heads[bucket] = slot
            return
        buckets = self.buckets(self.hashes[slots])
        order = np.argsort(buckets, kind="stable")
        slots, buckets = slots[order], buckets[order]
        ends = np.ones(len(slots) + 1, dtype=np.bool_)  # of runs with equal buckets
        np.not_equal(buckets[1:], buckets[:-1], out=ends[1:-1])
        following = self.heads[buckets]
        np.copyto(following[:-1], slots[1:], where=~ends[1:-1], casting="same_kind")
        self.nexts[slots] = following
        first = ends[:-1]
        self.heads[buckets[first]] = slots[first]

    def unlink_one(self, slot: int) -> None:
        """Take one linked slot out of its chain."""
        bucket, following = self.bucket_of(slot), self._nexts[slot]
        previous = self._heads[bucket]
        if previous == slot:
            self._heads[bucket] = following
            return
        for _ in range(_LONGEST):
            if self._nexts[previous] == slot:
                self._nexts[previous] = following
                return
            previous = self._nexts[previous]

    def bucket_of(self, slot: int) -> int:
        """Return the bucket of what one slot holds."""
        bucket: int = self._hashes[slot] & (len(self._heads) - 1)
        return bucket

    def unlink(self, slots: npt.NDArray[np.int64]) -> None:
        """Take linked slots, whose state is 0 by now, out of their chains."""
        if len(slots) <= _FEW:
            for slot in slots.tolist():
                self.unlink_one(slot)
            return
        buckets = np.sort(self.buckets(self.hashes[slots]))
        distinct = np.ones(len(buckets), dtype=np.bool_)
        np.not_equal(buckets[1:], buckets[:-1], out=distinct[1:])
        self._drop(buckets[distinct], lambda current: self.states[current] == 0)

    def relink(self, slots: npt.NDArray[np.int64]) -> None:
        """
        Link exactly those of *slots* that are used, whether they are linked or not.

        A slot gets another key only after it was taken out of its chain: one that is
        linked is in the chain that its record says.
        """
        buckets = np.unique(self.buckets(self.hashes[slots]))
        buckets = buckets[self.heads[buckets] != NO_SLOT]
        self._drop(buckets, lambda current: np.isin(current, slots))
        self.link(slots[is_used(self.states[slots])])

    def _drop(
        self,
        buckets: npt.NDArray[np.int64],
        is_dead: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]],
    ) -> None:
        """
        Take what is dead out of the chains of some buckets, none of them empty.

        Raises:
            IndexError: Memory is damaged.
        """
        previous = np.full(len(buckets), NO_SLOT, dtype=np.int64)
        current = self.heads[buckets].astype(np.int64)
        for _ in range(_LONGEST):
            following = self.nexts[current].astype(np.int64)
            dead = is_dead(current)
            at_head = dead & (previous < 0)
            inside = dead & (previous >= 0)
            self.heads[buckets[at_head]] = following[at_head]
            if inside.any():
                self.nexts[previous[inside]] = following[inside]
            more = following >= 0
            if not more.any():
                return
            previous = np.where(dead, previous, current)
            buckets, previous = buckets[more], previous[more]
            current = following[more]
        raise IndexError("a chain has no end")

    def clear(self) -> None:
        """Forget all chains."""
        self.heads[:] = NO_SLOT
        self.nexts[:] = NO_SLOT
