# SPDX-License-Identifier: Apache-2.0
"""Who gets a slot, and at whose cost: one reservation."""

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucm.errors import StoreFullError, StoreUnavailableError
from ucm.fates import Fate
from ucm.stores.slab._chains import KeyBatch
from ucm.stores.slab._layout import COMMITTED, MOST, RECORD, RESERVED, Grant, Word
from ucm.stores.slab._quick import AT_ONCE, Wishes
from ucm.stores.slab._tenants import places_of
from ucm.uses import Uses

if TYPE_CHECKING:
    from ucm.stores.slab._index import SlotIndex

__all__ = ["Reservation"]

_PIECE = 1024
"""Keys that get their slots while the lock is held once."""
_TRIES = 64
"""Times that the lock is taken; the last time the oldest that are known must do."""
_GENERATION, _NUM_EVICTED = int(Word.GENERATION), int(Word.NUM_EVICTED)
_NUM_FREE = int(Word.NUM_FREE)
_RACE_NS = 1_000_000_000
"""By how much a use elsewhere may be later than now and still give way to it."""
_NONE = np.empty(0, dtype=np.int64)
_Slots = npt.NDArray[np.int64]


class Reservation:
    """
    Finds slots for the keys of a batch that are in none.

    Of the keys those that count as used last come first. They get free slots, then those
    of the oldest blocks, as long as these are older than the key. A tenant that has its
    share gets its own oldest only.

    Args:
        index: Where.
        batch: The keys, distinct.
        nbytes: Of one block.
        owner: Who will write.
        uses: When each counts as used, and for whom; now, and for nobody, if not given.
    """

    def __init__(
        self,
        index: "SlotIndex",
        batch: KeyBatch,
        nbytes: int,
        owner: int,
        uses: Uses | None,
    ) -> None:
        self._index = index
        self._batch = batch
        self._nbytes = nbytes
        self._owner = owner
        self._moments = _NONE
        self._places: npt.NDArray[np.uint16] | None = None
        if uses is not None:
            stamps = index.stamps_of(uses, len(batch))
            self._moments = index.within_budget(stamps)
            if uses.tenants.any():
                self._places = places_of(uses.tenants)
        self._is_now = uses is None
        self._before = self._moments
        self._generation = 0
        self._listed: set[int] = set()
        self._held = _NONE
        self._num_stored = 0
        self._ahead: _Slots | None = None  # positions to come, once all were looked at
        self._later = _NONE

    def grant(self) -> Grant:
        """
        Take slots; of many keys piece by piece, so that others come in between.

        Raises:
            StoreFullError: Slots were wanted and none could be had.
        """
        grant = self._grant_at_once()
        if grant is not None:
            return grant
        grants = [self._grant_some()]
        with contextlib.suppress(StoreFullError, StoreUnavailableError):
            while len(self._later) and len(grants) < MOST // _PIECE:
                self._ahead = self._later
                grants.append(self._grant_some())
        return grants[0] if len(grants) == 1 else _merged(grants)

    def _grant_at_once(self) -> Grant | None:
        """Take slots by one native call, if that is built and it is easily decided."""
        index, batch = self._index, self._batch
        if (
            index.quick is None
            or self._places is not None
            or not 0 < len(batch) <= AT_ONCE
        ):
            return None
        wishes = Wishes(self._nbytes, self._owner, self._moments)
        with index.locked():
            evicts = index.words[_NUM_FREE] < len(batch)
            fates = index.eviction() if evicts else None
            if self._is_now:  # locked: none is later
                latest = index.latest_of(len(batch))
                wishes = Wishes(self._nbytes, self._owner, None, latest, _RACE_NS)
            return index.quick.reserve(batch, wishes, fates)

    def _grant_some(self) -> Grant:
        """Take slots for the next keys; between looks at very many stamps others come."""
        grant, tries, own = None, 0, self._index.own
        made: dict[int, _Slots] = {}
        self._listed.clear()
        while grant is None:
            tries += 1
            with self._index.locked():
                own.keep(made, self._listed)
                unlisted, grant = self._try(is_last=tries >= _TRIES)
            made = {place: own.make(place, num) for place, num in unlisted.items()}
            self._listed |= unlisted.keys()
        return grant

    def _try(self, *, is_last: bool) -> tuple[dict[int, int], Grant | None]:
        """Return whose slots are to be listed first, and how many, or what was granted."""
        index = self._index
        if self._is_now and self._before is self._moments:  # locked: none is later
            self._moments = index.stamps_of(None, len(self._batch))
            self._before = self._moments + _RACE_NS
        wanted, later = self._find()
        held, self._later = self._held, _NONE
        if not len(wanted):
            self._later = later
            return {}, Grant(wanted, wanted, 0, self._num_stored, wanted)
        unlisted, bound, own = self._among_own(wanted, held)
        if unlisted:
            return unlisted, None
        rest = wanted[~np.isin(wanted, bound)] if len(bound) else wanted
        free = index.tally.find_free(len(rest))
        kept = np.concatenate((held, own[1])) if len(own[1]) else held
        victims, is_done = self._oldest(rest[len(free) :], kept, is_last=is_last)
        if not (is_done or is_last):
            return {}, None
        taken = rest[: len(free) + len(victims)]
        if len(own[0]):
            taken = np.concatenate((taken, own[0]))
        if len(taken) < len(wanted):
            if index.reclaim(index.find_dead(index.reserving_owners())):
                return self._try(is_last=is_last)
            index.words[Word.NUM_OVER_SHARE] += len(bound) - len(own[0])
            if not len(taken):
                raise StoreFullError("every slot is being written, or used later")
        else:
            self._later = later
        if len(own[1]):
            victims = np.concatenate((victims, own[1]))
        slots = np.concatenate((free, victims)) if len(victims) else free
        return {}, self._take(taken, slots, victims)

    def _find(self) -> tuple[_Slots, _Slots]:
        """Return which keys get a slot next, and which may after them."""
        index, ahead, batch = self._index, self._ahead, self._batch
        if ahead is not None:
            batch = batch.at(ahead[:_PIECE])
        found = index.chains.find(batch)
        held = found[found >= 0]
        states = index.state[held]
        written = held[states == RESERVED]
        if len(written) and index.reclaim(
            index.find_dead(index.owner[written].tolist())
        ):
            return self._find()
        held = held[states == COMMITTED]  # others are nobody's victims
        if ahead is not None:
            self._held = np.concatenate((self._held, held))
            return ahead[:_PIECE][found < 0], ahead[_PIECE:]
        wanted = (found < 0).nonzero()[0]
        self._held, self._num_stored = held, len(found) - len(wanted)
        if not self._is_now:
            moments = self._moments[wanted]
            if (moments[1:] > moments[:-1]).any():  # a prefix's never are
                wanted = wanted[(-moments).argsort(kind="stable")]
        return wanted[:_PIECE], wanted[_PIECE:]

    def _among_own(
        self, wanted: _Slots, held: _Slots
    ) -> tuple[dict[int, int], _Slots, tuple[_Slots, _Slots]]:
        """
        Find slots for keys of tenants that have their share.

        Returns:
            Whose slots must be listed first, and how many; which keys these are; of which of
            them the slot was found, and that slot.
        """
        index, limit = self._index, self._index.limits.of_tenant
        if self._places is None or limit >= 1:
            return {}, _NONE, (_NONE, _NONE)
        share = max(int(limit * index.num_to_have()), limit > 0)
        unlisted, bound, taken, victims = dict[int, int](), [_NONE], [_NONE], [_NONE]
        places = self._places[wanted]
        for place in set(places.tolist()) - {0}:
            over = wanted[places == place][max(0, share - int(index.shares[place])) :]
            if not len(over):
                continue
            count = len(over) + len(held)
            slots, stamps = index.own.take(place, count)
            num_others = int((~np.isin(slots, held)).sum())
            if num_others < len(over) and place not in self._listed:
                unlisted[place] = count
            slots = self._older(slots, stamps, over, held)
            bound.append(over)
            taken.append(over[: len(slots)])
            victims.append(slots)
        own = np.concatenate(taken), np.concatenate(victims)
        return unlisted, np.concatenate(bound), own

    def _oldest(
        self, wanted: _Slots, kept: _Slots, *, is_last: bool
    ) -> tuple[_Slots, bool]:
        """Return victims for some keys, and whether there are no older ones."""
        if not len(wanted):
            return _NONE, True
        slots, stamps, is_done = self._index.oldest.pick(
            len(wanted) + len(kept), int(self._before[wanted[0]]), is_last=is_last
        )
        return self._older(slots, stamps, wanted, kept), is_done

    def _older(
        self, slots: _Slots, stamps: _Slots, wanted: _Slots, kept: _Slots
    ) -> _Slots:
        """Return the slots, oldest first, that are older than their keys, latest first."""
        if len(kept):
            others = ~np.isin(slots, kept)
            slots, stamps = slots[others], stamps[others]
        slots, stamps = slots[: len(wanted)], stamps[: len(wanted)]
        younger = np.flatnonzero(stamps >= self._before[wanted[: len(stamps)]])
        return slots[: younger[0]] if len(younger) else slots

    def _take(self, positions: _Slots, slots: _Slots, victims: _Slots) -> Grant:
        index = self._index
        positions, slots = _ascending(positions), _ascending(slots)
        places = None if self._places is None else self._places[positions]
        if not self._generation:
            index.words[_GENERATION] += 1
            self._generation = index.words[_GENERATION]
        index.begin(slots, victims, places)
        if len(victims):
            index.part_with(victims, Fate.EVICTED)
            index.vacate(victims)
            index.words[_NUM_EVICTED] += len(victims)
        fresh = np.frombuffer(bytearray(len(slots) * RECORD.itemsize), RECORD)
        fresh["owner"] = self._owner
        fresh["generation"] = self._generation
        fresh["nbytes"] = self._nbytes
        batch = self._batch
        is_all = len(positions) == len(batch)
        fresh["hash"] = batch.hashes if is_all else batch.hashes[positions]
        fresh["key"] = batch.words if is_all else batch.words[positions]
        index.rows[slots] = fresh.view(index.rows.dtype)
        index.payers[slots] = 0 if places is None else places
        index.state[slots] = RESERVED
        index.chains.link(slots)
        index.end(slots)
        return Grant(
            *(positions, slots, self._generation),
            *(self._num_stored, self._moments[positions]),
        )


def _ascending(numbers: _Slots) -> _Slots:
    """Return them in order; a sort gives the interpreter lock up, and few need one."""
    if (numbers[1:] < numbers[:-1]).any():
        numbers = numbers.copy()
        numbers.sort()  # of an array, in C; np.sort is a function of Python around it
    return numbers


def _merged(grants: list[Grant]) -> Grant:
    """Return as one what was granted piece by piece."""
    positions = np.concatenate([grant.positions for grant in grants])
    order = np.argsort(positions)
    return Grant(
        positions[order],
        np.concatenate([grant.slots for grant in grants])[order],
        grants[0].generation,
        grants[0].num_stored,
        np.concatenate([grant.moments for grant in grants])[order],
    )
