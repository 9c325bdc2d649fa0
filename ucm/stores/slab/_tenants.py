# SPDX-License-Identifier: Apache-2.0
"""
How many slots each tenant has, and which of its own it would part with first.

Tenants have places in a table of a fixed size, by their number. More tenants than places,
or two that meet by chance, share one place and so one share: each may then have less than
its own, and none has more.
"""

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from ucm.stores.slab._layout import COMMITTED, NUM_TENANTS

__all__ = ["OwnOldest", "places_of", "shares_after", "tenants_at"]

_STEP = 1 << 20
_MOST_LISTS = 8
_LEAST_LISTED = 256
_LISTED_SHARE = 16
_NONE = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


def places_of(tenants: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """Return the place of each tenant; 0 for nobody."""
    places = np.where(tenants == 0, 0, tenants % (NUM_TENANTS - 1) + 1)
    return places.astype(np.uint16)


def tenants_at(places: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Return for each place the least tenant that has it; 0 for nobody's."""
    numbers = places.astype(np.uint32)
    return np.where(numbers == 1, NUM_TENANTS - 1, numbers - (numbers > 0))


def shares_after(
    places: npt.NDArray[np.int64],
    shares: npt.NDArray[np.int64],
    before: npt.NDArray[np.int64],
    after: npt.NDArray[np.uint16],
) -> npt.NDArray[np.int64]:
    """
    Return how many slots the tenants at *places* have after a change.

    Args:
        places: Of all that the change is about, ascending, without nobody's.
        shares: How many slots each of these had before it.
        before: Whose each slot was whose key goes, 0 for nobody's.
        after: Whose each slot of the change is that has a key.
    """
    for whose, sign in ((before, -1), (after, 1)):
        at = np.searchsorted(places, whose[whose != 0])
        shares = shares + sign * np.bincount(at, minlength=len(places))
    return shares


class OwnOldest:
    """
    Lists of the oldest slots of single tenants: made without a lock, kept and used with it.

    A list holds what there was when it was made. What this process has published since it is
    kept, and is older than the end of the list, ends it (``outdate``); what others published,
    or anybody while it was made, is in the next one.

    Args:
        states: ``[num_slots]`` uint8; shared.
        stamps: ``[num_slots]`` int64; shared.
        payers: ``[num_slots]`` uint16, the place of whoever a slot is counted for.
    """

    def __init__(
        self,
        states: npt.NDArray[np.uint8],
        stamps: npt.NDArray[np.int64],
        payers: npt.NDArray[np.uint16],
    ) -> None:
        self._states = states
        self._stamps = stamps
        self._payers = payers
        self._lists: dict[int, npt.NDArray[np.int64]] = {}

    def make(self, place: int, count: int) -> npt.NDArray[np.int64]:
        """Return at least *count* of a tenant's oldest slots, if it has as many, with their stamps; takes no lock."""
        found = [
            start + np.flatnonzero(self._payers[start : start + _STEP] == place)
            for start in range(0, len(self._payers), _STEP)
        ]
        slots = np.concatenate(found)
        slots = slots[self._states[slots] == COMMITTED]
        stamps = self._stamps[slots]
        count = max(count, _LEAST_LISTED, len(stamps) // _LISTED_SHARE)
        order = np.argsort(stamps)[:count]
        return np.stack((slots[order], stamps[order]))

    def keep(
        self, lists: Mapping[int, npt.NDArray[np.int64]], needed: Collection[int]
    ) -> None:
        """Have lists for ``take``; of those that are not *needed* no more than a few, locked."""
        self._lists |= lists
        others = [place for place in self._lists if place not in needed]
        for place in others[: max(0, len(self._lists) - _MOST_LISTS)]:
            del self._lists[place]

    def take(
        self, place: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return up to *count* slots of a tenant and their stamps, the oldest first; locked."""
        listed = self._lists.get(place)
        if listed is None:
            return _NONE
        slots, stamps = listed
        good = (
            (self._stamps[slots] == stamps)
            & (self._states[slots] == COMMITTED)
            & (self._payers[slots] == place)
        )
        self._lists[place] = listed = listed[:, good]
        return listed[0, :count], listed[1, :count]

    def outdate(
        self, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]
    ) -> None:
        """End the lists in which blocks belong that are published now; locked."""
        if not self._lists:
            return
        places = self._payers[slots]
        for place in set(places.tolist()) & set(self._lists):
            listed = self._lists[place]
            if not listed.size or stamps[places == place].min() < listed[1, -1]:
                del self._lists[place]
