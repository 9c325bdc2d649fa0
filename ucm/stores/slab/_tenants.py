# SPDX-License-Identifier: Apache-2.0
"""
How many slots each tenant has, and which of its own it would part with first.

Tenants have places in a table of a fixed size, by their number. More tenants than places,
or two that meet by chance, share one place and so one share: each may then have less than
its own, and none has more.
"""

import numpy as np
import numpy.typing as npt

from ucm.stores.slab._layout import COMMITTED, NUM_TENANTS

__all__ = ["OwnOldest", "places_of", "shares_after", "tenants_at"]

_STEP = 1 << 20
_MOST_LISTS = 8
_LEAST_LISTED = 256
_LISTED_SHARE = 16


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
    Lists of the oldest slots of single tenants, made outside of any lock.

    A list holds what there was when it was made. What this process has published since,
    and is older than the end of the list, ends it (``outdate``); what others published
    is in the next one.

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

    def make(self, place: int) -> None:
        """List the oldest slots of a tenant; takes no lock."""
        found = [
            start + np.flatnonzero(self._payers[start : start + _STEP] == place)
            for start in range(0, len(self._payers), _STEP)
        ]
        slots = np.concatenate(found)
        slots = slots[self._states[slots] == COMMITTED]
        stamps = self._stamps[slots]
        order = np.argsort(stamps)[: max(_LEAST_LISTED, len(stamps) // _LISTED_SHARE)]
        while len(self._lists) >= _MOST_LISTS:
            self._lists.pop(next(iter(self._lists)), None)
        self._lists[place] = np.stack((slots[order], stamps[order]))

    def take(
        self, place: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return up to *count* slots of a tenant and their stamps, the oldest first."""
        listed = self._lists.get(place, np.empty((2, 0), dtype=np.int64))
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
        """End the lists in which blocks belong that are published now."""
        if not self._lists:
            return
        places = self._payers[slots]
        for place in set(places.tolist()) & set(self._lists):
            listed = self._lists[place]
            if not listed.size or stamps[places == place].min() < listed[1, -1]:
                del self._lists[place]
