# SPDX-License-Identifier: Apache-2.0
"""
The index by one native call each, where ``native_slab.c`` is built: looks, and easy changes.

What is found, granted and written, and in which order, is the same as by the modules beside
this one. Where there is more to decide than who is oldest (tenants that have their share,
writers that may be gone, keys in another order than their uses) a call declines, with no more
changed than where to look first, and those decide.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import PackedKey
from ucm.native import Native, address_of
from ucm.stores.slab._chains import KeyBatch
from ucm.stores.slab._layout import RECORD, Grant, IndexLayout, Sighting
from ucm.xxh3 import find_whole

__all__ = ["AT_ONCE", "Quick", "Wishes"]

AT_ONCE = 1024
"""Keys of one reservation; ``native_slab.c`` has room for no more."""
_ARRAYS = (
    *("header", "journal", "tally", "bounds", "uppers", "heads", "nexts"),
    *("states", "payers", "stamps", "change_kinds", "changes", "records"),
)
"""In the order of ``struct index``."""
_RECORD_BYTES = RECORD.itemsize
_Six = ctypes.c_int64 * 6
_Hashes = npt.NDArray[np.uint64]
_SEED = 2**63 + 7


@attrs.frozen(eq=False)
class Wishes:
    """
    What a reservation asks for.

    Args:
        nbytes: Of a block.
        owner: Who will write.
        moments: When each block counts as used; None: now, the first of them last.
        latest: When the first does, if now.
        slack: By how much a use elsewhere may be later, and still gives way.
    """

    nbytes: int
    owner: int
    moments: npt.NDArray[np.int64] | None
    latest: int = 0
    slack: int = 0


class Quick:
    """
    The calls for one index: each holds the interpreter lock, for microseconds.

    Looks come from any thread; reservations and publications from whoever holds the lock
    of the index, one at a time.

    Args:
        library: With the functions.
        arrays: Of the index, by their names in its layout; held as long as this is.
        layout: Its arrangement.
    """

    __slots__ = (
        "_arrays",
        "_grant",
        "_grant_at",
        "_index",
        "_library",
        "hashes_of",
    )

    def __init__(
        self,
        library: Native,
        arrays: dict[str, npt.NDArray[Any]],
        layout: IndexLayout,
    ) -> None:
        self._library = library
        self._arrays = [arrays[name] for name in _ARRAYS]
        places = [*map(address_of, self._arrays)]
        lengths = layout.num_slots, layout.num_groups, len(arrays["uppers"])
        counts = *lengths, layout.num_buckets, layout.num_changes
        self._index = (ctypes.c_int64 * (len(places) + len(counts)))(*places, *counts)
        # One for all reservations: there is one at a time, under the lock.
        self._grant = np.zeros(2 + 3 * AT_ONCE, dtype=np.int64)
        self._grant_at = address_of(self._grant)
        digest = _find_digest(library)
        self.hashes_of = digest and functools.partial(_hash, library, digest)
        """Hashes keys for ``KeyBatch.of``; None where xxhash's own code is not to be had."""

    def find(self, batch: KeyBatch) -> npt.NDArray[np.int64]:
        """Return the linked slot of each key, ``NO_SLOT`` where there is none."""
        count = len(batch)
        slots = np.empty(count, dtype=np.int64)
        if count:
            places = _at(batch.hashes), count, _at(slots)
            self._library.slab_find(self._index, batch.fields, *places)
        return slots

    def look(self, batch: KeyBatch) -> Sighting:
        """Return what is committed; see ``SlotIndex.observe``."""
        count = len(batch)
        found = bytearray((_RECORD_BYTES + 9) * count)
        if count:
            places = _at(batch.hashes), count, _at(found)
            self._library.slab_look(self._index, batch.fields, *places)
        slots_at = _RECORD_BYTES * count
        return Sighting(
            np.frombuffer(found, np.bool_, count, slots_at + 8 * count),
            np.frombuffer(found, np.int64, count, slots_at),
            np.frombuffer(found, RECORD, count),
        )

    def reserve(
        self,
        batch: KeyBatch,
        wishes: Wishes,
        fates: "ctypes.Array[ctypes.c_uint64] | None",
    ) -> Grant | None:
        """
        Take a slot for each key of a batch that is in none, locked.

        Args:
            batch: ``AT_ONCE`` keys at most.
            wishes: What is asked for.
            fates: What is put down of blocks that go, and where; see ``Fates.place``.

        Returns:
            What was granted: all that was wanted; None if some cannot be had so easily.
        """
        count, moments, told = len(batch), wishes.moments, self._grant
        asked = _Six(
            *(0 if moments is None else _at(moments), count),
            *(wishes.latest, wishes.slack, wishes.nbytes, wishes.owner),
        )
        num = self._library.slab_reserve(
            *(self._index, batch.fields, _at(batch.hashes)),
            *(asked, fates, self._grant_at),
        )
        if num < 0:
            return None
        generation, num_stored = told[:2].tolist()
        positions, slots, granted = told[2:].reshape(3, AT_ONCE)[:, :num].copy()
        return Grant(positions, slots, generation, num_stored, granted)

    def publish(
        self,
        slots: npt.NDArray[np.int64],
        moments: npt.NDArray[np.int64],
        checksums: npt.NDArray[np.uint64],
        generation: int,
        owner: int,
    ) -> bool:
        """
        Make slots visible in one step, locked; return whether all were still ours.

        Raises:
            ValueError: There are not as many moments and checksums as slots.
        """
        if not len(slots) == len(moments) == len(checksums):
            raise ValueError(f"{len(moments)} moments and {len(checksums)} checksums")
        places = _at(slots), _at(moments), _at(checksums)
        is_ours = self._library.slab_publish(
            self._index, *places, len(slots), generation, owner
        )
        return bool(is_ours)


def _hash(
    library: Native, digest: object, fields: bytes, count: int, seed: int
) -> _Hashes:
    hashes = np.empty(count, dtype=np.uint64)
    if count:
        library.slab_hash(digest, fields, count, seed, _at(hashes))
    return hashes


@functools.cache
def _find_digest(library: Native) -> Callable[..., Any] | None:
    """Return what hashes keys for native code, if it says what xxhash says."""
    keys = [PackedKey(bytes(range(size))) for size in range(86)]
    expected = KeyBatch.of(keys, _SEED)
    try:
        digest = find_whole()
    except (ImportError, OSError, ValueError):
        return None  # another build of xxhash
    found = _hash(library, digest, expected.fields, len(keys), _SEED)
    return digest if found.tolist() == expected.hashes.tolist() else None


def _at(memory: Any) -> int:  # noqa: ANN401 - what has a buffer
    """Return where writable memory begins, of which there is some, all in one piece."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
