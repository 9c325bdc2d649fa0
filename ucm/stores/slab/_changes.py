# SPDX-License-Identifier: Apache-2.0
"""
What was stored and removed of late: a ring in the index, for who follows the slab.

Written under the index lock, within the change that it tells of, so that a reader sees
both or neither. It has a number for each change ever, and is short: who reads too seldom
finds that the oldest are overwritten, and lists what is there instead. A repair after a
death cannot know what the dead one had written down; it begins a new epoch, and readers
list again.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ucm.stores.abc import Change, Changes, Cursor
from ucm.stores.slab._chains import KeyBatch, unpack_keys
from ucm.stores.slab._layout import COMMITTED, RECORD, Word
from ucm.stores.slab._tenants import tenants_at

if TYPE_CHECKING:
    from ucm.stores.slab._index import SlotIndex

__all__ = ["REMOVED", "STORED", "ChangeRing", "changes_since"]

STORED = 1
REMOVED = 0
_AT_ONCE = 1024
"""Changes, or slots of a listing, in one answer."""
_SEQUENCE, _EPOCH = int(Word.CHANGES), int(Word.EPOCH)
_SIZE = RECORD.itemsize
_CHANGE: Callable[[Iterable[object]], Change] = partial(tuple.__new__, Change)
"""Makes one with no line of Python, as its own way does."""
_STEPS = np.arange(
    _AT_ONCE
)  # to make them gives the interpreter lock up, amid a change


class ChangeRing:
    """
    The ring's arrays.

    Args:
        kinds: ``[length]`` uint8, stored or removed; a power of two.
        entries: ``[length]`` the records that slots had.
        words: The index's header.
        records: Of the slots.
    """

    __slots__ = (
        "_kinds",
        "_mask",
        "_rows",
        "_slots",
        "_words",
    )

    def __init__(
        self,
        kinds: npt.NDArray[np.uint8],
        entries: npt.NDArray[Any],
        words: memoryview,
        records: npt.NDArray[Any],
    ) -> None:
        self._kinds = kinds
        self._rows = entries.view(f"V{_SIZE}")
        self._slots = records.view(f"V{_SIZE}")
        self._words = words
        self._mask = len(kinds) - 1

    def __len__(self) -> int:
        return self._mask + 1

    def add(self, kind: int, slots: npt.NDArray[np.int64]) -> None:
        """Write down what these slots hold, as many as the ring has places at most."""
        start = self._words[_SEQUENCE]
        count = len(slots)
        steps = _STEPS[:count] if count <= len(_STEPS) else np.arange(count)
        at = (steps + start) & self._mask
        self._kinds[at] = kind
        self._rows[at] = self._slots[slots]
        self._words[_SEQUENCE] = start + len(slots)

    def new_epoch(self) -> None:
        """Have every reader list what is there."""
        self._words[_EPOCH] += 1

    def since(self, sequence: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        """Return copies of the records that came behind a number, and their kinds."""
        stop = min(self._words[_SEQUENCE], sequence + _AT_ONCE)
        at = np.arange(sequence, stop) & self._mask
        return self._rows[at].view(RECORD), self._kinds[at]


def changes_since(index: "SlotIndex", cursor: Cursor | None) -> Changes:
    """
    Return what comes next for a reader; see ``Store.changes``.

    Takes no lock, unless others change the index all the time.
    """
    return index.observe(lambda: _changes_since(index, cursor))


def _changes_since(index: "SlotIndex", cursor: Cursor | None) -> Changes:
    epoch, newest = index.words[_EPOCH], index.words[_SEQUENCE]
    begins = False
    if (
        cursor is None
        or cursor.epoch != epoch
        or not 0 <= newest - cursor.sequence <= len(index.changes)
    ):
        begins, cursor = True, Cursor(epoch, newest, 0)
    if cursor.unlisted_from < index.layout.num_slots:
        start = cursor.unlisted_from
        stop = min(start + _AT_ONCE, index.layout.num_slots)
        slots = np.flatnonzero(index.state[start:stop] == COMMITTED) + start
        records, kinds = index.records[slots], np.ones(len(slots), dtype=np.uint8)
        places = index.payers[slots]
        cursor = Cursor(epoch, cursor.sequence, stop)
    else:
        records, kinds = index.changes.since(cursor.sequence)
        places = _places_of(index, records, kinds)
        cursor = cursor._replace(sequence=cursor.sequence + len(kinds))
    sizes = np.where(kinds == STORED, records["nbytes"], 0).tolist()
    tenants = tenants_at(places).tolist()
    told = map(_CHANGE, zip(unpack_keys(records["key"]), sizes, tenants, strict=True))
    is_all = (
        cursor.unlisted_from >= index.layout.num_slots and cursor.sequence == newest
    )
    return Changes(tuple(told), cursor, begins=begins, is_all=is_all)


def _places_of(
    index: "SlotIndex", records: npt.NDArray[Any], kinds: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint16]:
    """Return whose the blocks are that were stored; nobody's where they are gone since."""
    hashes = np.ascontiguousarray(records["hash"])
    slots = index.chains.find(KeyBatch(records["key"].tobytes(), hashes))
    places = index.payers[slots]
    places[(slots < 0) | (kinds != STORED)] = 0
    return places
