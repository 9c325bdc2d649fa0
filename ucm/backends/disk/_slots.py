# SPDX-License-Identifier: Apache-2.0
"""
Which block is in which slot, and who has to go. Pure; for one thread.

Slots of one size are a *class*; an extent belongs to one class at a time. Room is made within
the class, the block whose use is oldest first; an extent of another class is taken where its
newest use is older than that. A slot that somebody reads or writes is *held* and stays.

A free slot has no stamp on its drive. One that is taken from a block has that block's until it
is written; where nothing was written, the block is back. Until then nobody may reserve a slot for
that block, nor for one that is being deleted: else it would be in two.

Of a drive that refuses writes no slot is reserved, so that nothing has to go for what cannot be
written. A slot that holds who knows what is nobody's until its drive has wiped it.
"""

import itertools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from operator import attrgetter

import attrs

from ucm.backends.disk._extent import NO_KEY, NOTHING, Extent, Slot, Unclear
from ucm.backends.disk._index import Entry
from ucm.backends.disk._stamp import Geometry, Mark, pages_of
from ucm.blocks import PackedKey

__all__ = ["Slots"]

_EXTENT = attrgetter("extent")


@attrs.define
class _Class:
    """Slots of one size on one drive: free ones, and those with blocks, oldest use first."""

    free: deque[Slot] = attrs.field(factory=deque)
    blocks: OrderedDict[PackedKey, Slot] = attrs.field(factory=OrderedDict)

    @property
    def oldest(self) -> Slot | None:
        """The slot of the block that goes first; None where all are held."""
        return next((s for s in self.blocks.values() if not s.num_holders), None)


class Slots:
    """
    The index of one backend.

    Args:
        geometry: Of each drive's file.
        num_drives: How many there are.
        draw: Returns numbers that no extent has had, in all likelihood.
    """

    def __init__(
        self, geometry: Geometry, num_drives: int, draw: Callable[[], int]
    ) -> None:
        self.geometry = geometry
        self._draw = draw
        self.num_uses = 0
        """So far; the number of the next one, less one."""
        self.num_changes = 0
        """Of extents, so far; likewise."""
        self._changed: dict[Extent, None] = {}
        """Since they were told to be written down, the one that was changed first first."""
        self._unmarked: set[Extent] = set()
        """Those that belong to a class and had no mark of it when they were looked at last."""
        self._blocks: dict[PackedKey, Slot] = {}
        self._classes: dict[tuple[int, int], _Class] = defaultdict(_Class)
        """By pages and drive."""
        self._extents = [OrderedDict[int, Extent]() for _ in range(num_drives)]
        """Of each drive those that belong to a class, by id, whose use is oldest first."""
        self._drives = frozenset(range(num_drives))
        self.refusing: set[int] = set()
        """Drives that have refused to write, until they do again."""
        self.unclear = Unclear()
        self.num_evicted = 0
        self.tell: Callable[[PackedKey, bool], None] | None = None
        """Told of each block that is found from now on, or no more."""
        self.extents = [
            Extent(drive, number)
            for number in range(geometry.num_extents)
            for drive in range(num_drives)
        ]
        """Of all drives in turn."""
        self._nobodys = [
            {id(extent): extent for extent in self.extents[drive::num_drives]}
            for drive in range(num_drives)
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> list[PackedKey]:
        """Return those of all blocks that are there."""
        return list(self._blocks)

    @property
    def nbytes(self) -> int:
        """Of the extents that belong to a class."""
        return sum(map(len, self._extents)) * self.geometry.extent_bytes

    def find(self, key: PackedKey) -> Slot | None:
        """Return the slot of a block that is there."""
        return self._blocks.get(key)

    def find_each(self, keys: Iterable[PackedKey]) -> list[Slot | None]:
        """Do as ``find`` for many."""
        return list(map(self._blocks.get, keys))

    def use(self, *slots: Slot) -> None:
        """Count blocks as used now, one after the other."""
        for extent, alike in itertools.groupby(slots, _EXTENT):
            blocks = self._class_of(extent).blocks
            for slot in alike:
                self.num_uses += 1
                slot.used = self.num_uses
                blocks.move_to_end(slot.key)
            extent.used = self.num_uses
            self._extents[extent.drive].move_to_end(id(extent))

    def hold(self, *slots: Slot) -> None:
        """Keep slots as they are until they are let go."""
        for slot in slots:
            slot.num_holders += 1
            slot.extent.num_held += slot.num_holders == 1

    def hold_unmarked(self) -> list[Slot]:
        """Return a slot, held, of each extent on whose drive is what it had before it was taken."""
        self._unmarked = {each for each in self._unmarked if not each.is_marked}
        slots = [each.slots[0] for each in self._unmarked]
        self.hold(*slots)
        return slots

    def let_go(self, *slots: Slot) -> None:
        """Hold slots no longer; frees those whose block is gone."""
        for slot in slots:
            slot.num_holders -= 1
            if not slot.num_holders:
                slot.extent.num_held -= 1
                if slot.is_gone:
                    self._free(slot)

    # A write: reserved, then one of three ends.

    def reserve(self, blocks: Iterable[tuple[PackedKey, int]]) -> list[Slot | None]:
        """Return held slots for blocks that are not there; None where all that would do are held or refuse."""
        slots = []
        for key, nbytes in blocks:
            slot = self._find_room(pages_of(nbytes))
            if slot is not None:
                slot.previous = slot.key, slot.nbytes
                slot.key, slot.nbytes = key, nbytes
                self.num_uses += 1
                slot.used = self.num_uses
                slot.num_holders += 1  # at once: the next one is not to have it
                slot.extent.num_held += slot.num_holders == 1
            slots += [slot]
        for extent in dict.fromkeys([slot.extent for slot in slots if slot]):
            self.change(extent)
        return slots

    def commit(self, *slots: Slot) -> None:
        """Have the blocks found that were written to slots."""
        for slot in slots:
            slot.previous = NOTHING
        self.add(*slots)
        self.let_go(*slots)

    def abort(self, slot: Slot, *, is_refused: bool) -> None:
        """Let go of a slot to which nothing was written, as its drive refused, or was not asked."""
        if is_refused:
            self.refusing.add(slot.extent.drive)
        slot.key, slot.nbytes = slot.previous
        if slot.key:
            self.num_evicted -= 1
            self.commit(slot)
        else:
            self.clear(slot, is_wiped=True)

    def clear(self, slot: Slot, *, is_wiped: bool) -> None:
        """
        Let go of a slot whose stamp was to be wiped, and that has no block.

        Args:
            slot: Held.
            is_wiped: It is free. Else it holds who knows what: its drive has refused, and
                nobody uses it until that writes again.
        """
        slot.is_gone = is_wiped
        if is_wiped:
            self.unclear.discard(slot)
        else:
            self.unclear.add(slot)
            self.refusing.add(slot.extent.drive)
        self.let_go(slot)

    # A drive that has refused.

    def sample(self, drive: int) -> Slot:
        """Return a held slot of a drive, whose extent belongs to a class; each time another."""
        extents = list(self._extents[drive].values())
        slot = extents[self._draw() % len(extents)].slots[0]
        self.hold(slot)
        return slot

    # Blocks that are there.

    def add(self, *slots: Slot) -> None:
        """Have blocks found that are in slots, used now."""
        for extent, alike in itertools.groupby(slots, _EXTENT):
            blocks = {slot.key: slot for slot in alike}
            self._blocks.update(blocks)
            self._class_of(extent).blocks.update(blocks)
            self.change(extent)
        self.use(*slots)
        if self.tell is not None:
            for slot in slots:
                self.tell(slot.key, True)

    def remove(self, slot: Slot) -> None:
        """Have a block found no more; its slot is freed by whoever lets go of it."""
        del self._blocks[slot.key]
        del self._class_of(slot.extent).blocks[slot.key]
        slot.is_gone = True
        self.change(slot.extent)
        if self.tell is not None:
            self.tell(slot.key, False)

    def restore(self, slot: Slot) -> None:
        """Have a block found again that was removed."""
        slot.is_gone = False
        self.add(slot)

    # What is on a drive already.

    def adopt(self, extent: Extent, mark: Mark, *, change: int | None) -> None:
        """
        Take an extent as it is on the drive; its slots are neither free nor used.

        Args:
            extent: Which.
            mark: That it has there.
            change: Behind which it was written down; None: it is to be.
        """
        del self._nobodys[extent.drive][id(extent)]
        self._give(extent, mark)
        extent.is_marked = True
        if change is not None:
            extent.change = change
            del self._changed[extent]

    def load(self, blocks: list[Slot]) -> list[Slot]:
        """
        Have the blocks found that are in slots, used when these say; nobody is told.

        Returns:
            Those of whose block there is a later copy, not found: to be wiped and cleared.
        """
        blocks.sort(key=attrgetter("used"))
        self._blocks = {slot.key: slot for slot in blocks}
        older = []
        for slot in blocks:
            if self._blocks[slot.key] is slot:
                self._class_of(slot.extent).blocks[slot.key] = slot
                slot.extent.used = slot.used
            else:
                older.append(slot)
        if blocks:
            self.num_uses = max(self.num_uses, blocks[-1].used)
        for extents in self._extents:
            for extent in sorted(extents.values(), key=attrgetter("used")):
                extents.move_to_end(id(extent))
        return older

    def settle(self, extent: Extent) -> None:
        """Let those slots of an adopted extent be written to that have no block."""
        for slot in extent.slots:
            if not slot.key:
                self._free(slot)

    # What is written down of it.

    def next_changed(self, spare: int) -> Extent | None:
        """Return the extent that was not changed for longest, if there are more than *spare*."""
        if len(self._changed) <= spare:
            return None
        free = (each for each in self._changed if not each.num_held)
        extent = next(free, None)
        if extent is not None:
            del self._changed[extent]
        return extent

    def entries(self, extent: Extent) -> list[Entry] | None:
        """Return the blocks of an extent; None where they are not all that is on the drive."""
        if extent.unclear or not extent.is_marked:
            return None
        return [
            (slot.used, number, slot.nbytes, slot.key)
            for number, slot in enumerate(extent.slots)
            if self._blocks.get(slot.key) is slot
        ]

    def change(self, extent: Extent) -> None:
        """Give a change that is about to be made its number."""
        self.num_changes += 1
        extent.change = self.num_changes
        self._changed.pop(extent, None)
        self._changed[extent] = None

    # Making room.

    def _find_room(self, pages: int) -> Slot | None:
        drives = self._drives - self.refusing
        free: deque[Slot] | None = None
        victim: Slot | None = None
        for drive in drives:
            mine = self._classes[pages, drive]
            if mine.free:
                # Side by side within a batch, and the next one on another drive.
                if free is None or mine.free[0].extent.used < free[0].extent.used:
                    free = mine.free
            elif (slot := mine.oldest) and (victim is None or slot.used < victim.used):
                victim = slot
        if free is not None:
            return free.popleft()
        extent = self._take_nobodys(drives) or self._take_older(pages, drives, victim)
        if extent is not None:
            self._give(extent, Mark(self._draw(), pages))
            free = self._class_of(extent).free
            free.extend(extent.slots)
            return free.popleft()
        if victim is not None:
            self._evict(victim)
            victim.is_gone = False
        return victim

    def _take_nobodys(self, drives: frozenset[int]) -> Extent | None:
        """Take one of the drive that has most of them left, so that all are filled in turn."""
        if not any(self._nobodys):
            return None
        some = max((self._nobodys[drive] for drive in drives), key=len, default={})
        return some.pop(next(iter(some), 0), None)

    def _take_older(
        self, pages: int, drives: frozenset[int], victim: Slot | None
    ) -> Extent | None:
        """Take the oldest extent of another class that is older than *victim*."""
        found: Extent | None = None
        than = math.inf if victim is None else victim.used
        for drive in drives:
            for extent in self._extents[drive].values():
                if extent.used >= than:
                    break
                if extent.mark.pages != pages and not extent.num_held:
                    found, than = extent, extent.used
                    break
        if found is not None:
            for slot in found.slots:
                if self._blocks.get(slot.key) is slot:
                    self._evict(slot)
            theirs = self._class_of(found)
            theirs.free = deque(s for s in theirs.free if s.extent is not found)
            del self._extents[found.drive][id(found)]
        return found

    def _class_of(self, extent: Extent) -> _Class:
        return self._classes[extent.mark.pages, extent.drive]

    def _evict(self, slot: Slot) -> None:
        self.num_evicted += 1
        self.remove(slot)

    def _give(self, extent: Extent, mark: Mark) -> None:
        geometry, pages = self.geometry, mark.pages
        extent.mark, extent.is_marked = mark, False
        for slot in list(extent.unclear):
            self.unclear.discard(slot)
        extent.slots = [
            Slot(extent, geometry.place(extent.number, pages, at))
            for at in range(geometry.num_slots(pages))
        ]
        self.num_uses += 1
        extent.used = self.num_uses
        self._extents[extent.drive][id(extent)] = extent
        self._unmarked.add(extent)
        self.change(extent)

    def _free(self, slot: Slot) -> None:
        slot.is_gone, slot.key = False, NO_KEY
        self._class_of(slot.extent).free.append(slot)
