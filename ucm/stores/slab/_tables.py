# SPDX-License-Identifier: Apache-2.0
"""
The arrays of an index, and how a change of them survives the death of whoever makes it.

Truth and derived data. The truth is the state of each slot, one byte, with its record
and whom it is counted for: these are written before a slot gets a key, and the state is
always written last (or, when a slot is given up, first). Chains, counts, shares and
bounds follow from it.

Death. A change writes down in the journal which slots it is about and for whom they are
counted, makes ``Word.VERSION`` odd, changes, derives and makes it
even again. The kernel drops the lock of a process that dies; the next one to take it finds
an odd version and derives the same from the same slots: it costs what a change costs,
whatever the size of the slab. A publication of many slots is one store of
``Word.PUBLISHING``: it is completed by the repair if that store was made, and did not
happen otherwise.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ucm import native
from ucm.stores.slab._chains import Chains
from ucm.stores.slab._changes import REMOVED, ChangeRing
from ucm.stores.slab._layout import (
    ABSENT,
    COMMITTED,
    FREE,
    MOST,
    NEVER,
    RECORD,
    RESERVED,
    IndexLayout,
    Word,
    is_used,
)
from ucm.stores.slab._oldest import Oldest
from ucm.stores.slab._quick import Quick
from ucm.stores.slab._tally import Tally
from ucm.stores.slab._tenants import shares_after

__all__ = ["EVERYTHING", "Tables"]

EVERYTHING = -1
"""In the journal's length: the change is about all slots."""
_VERSION = int(Word.VERSION)
_JOURNAL = int(Word.JOURNAL)
_JOURNAL_LEAVING = int(Word.JOURNAL_LEAVING)
_JOURNAL_TENANTS = int(Word.JOURNAL_TENANTS)
_NONE = np.empty(0, dtype=np.int64)
_STEP = 1 << 16


class Tables:
    """
    The mapped arrays, and the changes that are common to all verbs.

    Args:
        buffer: The mapping, ``IndexLayout.nbytes`` long.
        layout: Its arrangement.
    """

    def __init__(self, buffer: memoryview, layout: IndexLayout) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(buffer, dtype, length, offset)
            for name, (offset, dtype, length) in layout.place().items()
        }
        num_slots = layout.num_slots
        self.layout = layout
        self.header: npt.NDArray[np.int64] = arrays["header"]
        self.words = self.header.data  # a word as an int, at a third of the cost
        self.records = arrays["records"]
        self.rows = self.records.view(f"V{RECORD.itemsize}")  # copied in one piece each
        self.state: npt.NDArray[np.uint8] = arrays["states"][:num_slots]
        self.states = arrays["states"].data
        self.payers: npt.NDArray[np.uint16] = arrays["payers"]
        self.shares: npt.NDArray[np.int64] = arrays["shares"]
        self.stamps: npt.NDArray[np.int64] = arrays["stamps"][:num_slots]
        self.owner: npt.NDArray[np.uint32] = self.records["owner"]
        self.generation: npt.NDArray[np.uint64] = self.records["generation"]
        self.chains = Chains(arrays["heads"], arrays["nexts"], self.state, self.records)
        self.quick: Quick | None = None
        if native.LIBRARY is not None:
            self.quick = Quick(native.LIBRARY, arrays, layout)
        self.chains.quick = self.quick
        self.tally = Tally(arrays["states"], arrays["tally"].reshape(3, -1), self.words)
        self.oldest = Oldest(
            arrays["states"], arrays["stamps"], arrays["bounds"], arrays["uppers"]
        )
        self.changes = ChangeRing(
            arrays["change_kinds"], arrays["changes"], self.words, self.records
        )
        self._padding = arrays["states"][num_slots:], arrays["stamps"][num_slots:]
        self._journal = arrays["journal"].reshape(2, MOST)
        self._journal_tenants = arrays["journal_tenants"].reshape(2, -1)

    # -- a change, locked --------------------------------------------------------

    def begin(
        self,
        slots: npt.NDArray[np.int64],
        leaving: npt.NDArray[np.int64] = _NONE,
        places: npt.NDArray[np.uint16] | None = None,
    ) -> None:
        """
        Write down what a change is about to touch, and tell readers that it begins.

        Args:
            slots: One to ``MOST``, distinct.
            leaving: Those of them whose keys go.
            places: For whom those are counted whose keys come; nobody if not given.
        """
        journal, words, num_leaving = self._journal, self.words, len(leaving)
        journal[0, : len(slots)] = slots
        involved = places
        if num_leaving:
            payers = self.payers[leaving]
            journal[1, :num_leaving] = payers
            involved = payers if places is None else np.concatenate((payers, places))
        num_involved = 0
        if involved is not None and involved.any():
            involved = np.unique(involved[involved != 0])
            num_involved = len(involved)
            self._journal_tenants[0, :num_involved] = involved
            self._journal_tenants[1, :num_involved] = self.shares[involved]
        words[_JOURNAL] = len(slots)
        words[_JOURNAL_LEAVING] = num_leaving
        words[_JOURNAL_TENANTS] = num_involved
        words[_VERSION] |= 1

    def end(self, slots: npt.NDArray[np.int64]) -> None:
        """Derive what follows from the states of these slots; the change is over."""
        self.tally.recount(slots)
        self._recount_tenants(slots)
        self.words[_VERSION] += 1

    def _recount_tenants(self, slots: npt.NDArray[np.int64]) -> None:
        if num_involved := self.words[_JOURNAL_TENANTS]:
            before = self._journal[1, : self.words[_JOURNAL_LEAVING]]
            after = self.payers[slots[is_used(self.state[slots])]]
            places, shares = self._journal_tenants[:, :num_involved]
            self.shares[places] = shares_after(places, shares, before, after)

    def vacate(self, slots: npt.NDArray[np.int64]) -> None:
        """Take used slots out of everything, within a change."""
        if len(slots):
            removed = slots[self.state[slots] == COMMITTED]
            if len(removed):
                self.changes.add(REMOVED, removed)
            self.state[slots] = FREE
            self.stamps[slots] = NEVER
            self.chains.unlink(slots)

    # -- after a death -----------------------------------------------------------

    def repair(self, now: int) -> None:
        """Put right what a process that died left half done, locked."""
        count = self.words[_JOURNAL]
        self.changes.new_epoch()
        if count == EVERYTHING:
            self.rebuild(now)
            return
        if count:
            slots = self._journal[0, :count]
            self._finish_publication(slots)
            self.words[Word.PUBLISHING] = 0
            self.chains.relink(slots)
            self._stamp(slots, now)
            self.tally.recount(slots)
            self._recount_tenants(slots)
        self.tally.add_up()
        self.words[_VERSION] += 1

    def distrust_derived(self) -> None:
        """Have everything rebuilt by whoever comes next, if we do not come to it."""
        self.words[_JOURNAL] = EVERYTHING
        self.words[_VERSION] |= 1

    def rebuild(self, now: int) -> None:
        """Finish a publication and derive everything; for who is alone with it."""
        self.distrust_derived()
        states, stamps = self._padding
        states[:], stamps[:] = ABSENT, NEVER
        self.chains.clear()
        self.shares[:] = 0
        newest = self.words[Word.GENERATION]
        for start in range(0, self.layout.num_slots, _STEP):
            slots = np.arange(start, min(start + _STEP, self.layout.num_slots))
            self._finish_publication(slots)
            self._stamp(slots, now)
            used = slots[is_used(self.state[slots])]
            self.chains.link(used)
            self.shares += np.bincount(self.payers[used], minlength=len(self.shares))
            newest = max(newest, int(self.generation[used].max(initial=0)))
        self.shares[0] = 0
        self.words[Word.PUBLISHING] = 0
        self.words[Word.GENERATION] = newest
        self.tally.rebuild()
        self.oldest.rebuild()
        self.changes.new_epoch()
        self.words[_JOURNAL] = 0
        self.words[_VERSION] += 1

    def _finish_publication(self, slots: npt.NDArray[np.int64]) -> None:
        publishing = self.words[Word.PUBLISHING]
        if publishing:
            shown = (self.state[slots] == RESERVED) & (
                self.generation[slots] == publishing
            )
            self.state[slots[shown]] = COMMITTED

    def _stamp(self, slots: npt.NDArray[np.int64], now: int) -> None:
        committed = self.state[slots] == COMMITTED
        self.stamps[slots[~committed]] = NEVER
        fresh = slots[committed & (self.stamps[slots] == NEVER)]
        self.oldest.lower(fresh, np.full(len(fresh), now))
        self.stamps[fresh] = now
