# SPDX-License-Identifier: Apache-2.0
"""
Keys as fixed-width words, and the hash chains that find a key's slot.

Chains hold nothing that the slot records do not hold: whatever happens to them, they
can be built again. Every operation takes a whole batch, because one numpy call over
512 keys costs little more than one over a single key.
"""

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ucm.blocks import PackedKey
from ucm.errors import KeyFormatError

__all__ = ["KEY_WORDS", "NO_SLOT", "Chains", "KeyBatch", "unpack_key"]

NO_SLOT = -1
KEY_WORDS = 11
_KEY_FIELD = KEY_WORDS * 8
_MAX_KEY_BYTES = 85  # the longest packed key; the last byte of the field is its length


@attrs.frozen(eq=False)
class KeyBatch:
    """
    Packed keys in the form in which the index compares them.

    Args:
        words: ``[n, KEY_WORDS]`` uint64, zero padded, length in the last byte.
        hashes: ``[n]`` uint64, seeded; also the seed of a block's checksum.
    """

    words: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Sequence[PackedKey], seed: int) -> "KeyBatch":
        """
        Pack *keys*.

        Raises:
            KeyFormatError: A key is longer than any packed key.
        """
        field = np.zeros((len(keys), _KEY_FIELD), dtype=np.uint8)
        sizes = set(map(len, keys))
        if sizes and max(sizes) > _MAX_KEY_BYTES:
            raise KeyFormatError(f"a key has more than {_MAX_KEY_BYTES} bytes")
        if len(sizes) == 1:
            size = sizes.pop()
            flat = np.frombuffer(b"".join(keys), dtype=np.uint8)
            field[:, :size] = flat.reshape(len(keys), size)
            field[:, -1] = size
        else:
            for row, key in zip(field, keys, strict=True):
                row[: len(key)] = np.frombuffer(key, dtype=np.uint8)
                row[-1] = len(key)
        hashes = [xxh3_64_intdigest(key, seed) for key in keys]
        return cls(field.view(np.uint64), np.array(hashes, dtype=np.uint64))

    def __len__(self) -> int:
        return len(self.hashes)


def unpack_key(words: npt.NDArray[np.uint64]) -> PackedKey:
    """Return the packed key of one ``[KEY_WORDS]`` row; any bytes give some key."""
    field = np.ascontiguousarray(words).tobytes()
    return PackedKey(field[: min(field[-1], _MAX_KEY_BYTES)])


@attrs.frozen(eq=False)
class Chains:
    """
    Singly linked chains of slots, one per bucket, in shared memory.

    Only the holder of the index lock links and unlinks. Anybody may ``find`` at any
    time; what is found while somebody links is a guess.

    Args:
        heads: ``[num_buckets]`` int32, first slot of each chain; a power of two.
        nexts: ``[num_slots]`` int32, the following slot.
        words: ``[num_slots, KEY_WORDS]`` uint64, the key of each slot.
        hashes: ``[num_slots]`` uint64.
        states: ``[num_slots]`` uint8, 0 for a slot that belongs in no chain.
    """

    heads: npt.NDArray[np.int32]
    nexts: npt.NDArray[np.int32]
    words: npt.NDArray[np.uint64]
    hashes: npt.NDArray[np.uint64]
    states: npt.NDArray[np.uint8]

    def buckets(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the bucket of each hash."""
        return (hashes & np.uint64(len(self.heads) - 1)).astype(np.int64)

    def find(self, batch: KeyBatch) -> npt.NDArray[np.int64]:
        """Return the linked slot of each key, ``NO_SLOT`` where there is none."""
        slots = self.heads[self.buckets(batch.hashes)].astype(np.int64)
        found = self._matching(slots, batch.words)
        if (found == slots).all():  # each found, or its chain empty
            return found
        asked = np.flatnonzero((found < 0) & (slots >= 0))
        slots = slots[asked]
        for _ in range(len(self.nexts)):  # a chain that changes may seem endless
            if not len(asked):
                break
            slots = self.nexts[slots].astype(np.int64)
            found[asked] = self._matching(slots, batch.words[asked])
            more = (found[asked] < 0) & (slots >= 0)
            asked, slots = asked[more], slots[more]
        return found

    def _matching(
        self, slots: npt.NDArray[np.int64], words: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        same = (slots >= 0) & (self.words[slots] == words).all(axis=1)
        return np.where(same, slots, NO_SLOT)

    def link(self, slots: npt.NDArray[np.int64]) -> None:
        """Put slots, none of them linked, in front of their chains."""
        if not len(slots):
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

    def unlink(self, slots: npt.NDArray[np.int64]) -> None:
        """Take linked slots, whose state is 0 by now, out of their chains."""
        buckets = np.sort(self.buckets(self.hashes[slots]))
        distinct = np.ones(len(buckets), dtype=np.bool_)
        np.not_equal(buckets[1:], buckets[:-1], out=distinct[1:])
        buckets = buckets[distinct]
        previous = np.full(len(buckets), NO_SLOT, dtype=np.int64)
        current = self.heads[buckets].astype(np.int64)
        while len(buckets):
            following = self.nexts[current].astype(np.int64)
            dead = self.states[current] == 0
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

    def rebuild(self, slots: npt.NDArray[np.int64]) -> None:
        """Forget all chains and link exactly *slots*."""
        self.heads[:] = NO_SLOT
        self.nexts[:] = NO_SLOT
        self.link(slots)
