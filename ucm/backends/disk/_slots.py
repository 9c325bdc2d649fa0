# SPDX-License-Identifier: Apache-2.0
"""
Which block is in which slot, and who has to go. Pure; for one thread.

Slots of one size are a *class*; an extent belongs to one class at a time. Room is made within
the class, the block whose use is oldest first; an extent of another class is taken where its
newest use is older than that. A slot that somebody reads or writes is *held* and stays.

A free slot has no stamp on its drive. One that is taken from a block has that block's until it
is written; where nothing was written, the block is back. Until then nobody may reserve a slot for
that block, nor for one that is being deleted: else it would be in two.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from operator import attrgetter

import attrs

from ucm.backends.disk._index import Entry
from ucm.backends.disk._stamp import Geometry, Mark, pages_of
from ucm.blocks import PackedKey

__all__ = ["Extent", "Slot", "Slots"]

_NO_KEY = PackedKey(b"")
_NOBODYS = Mark(0, 0)


@attrs.define(eq=False)
class Extent:
    """
    A piece of a drive's file.

    Args:
        drive: Number of the drive.
        number: Of the extent in its file.
        mark: Of its class; drawn anew whenever it is taken.
        is_marked: That mark is on the drive.
        used: When one of its blocks was used last, as a number of uses.
        num_held: Slots that are held.
        change: Number of its last change; written down before the drive is.
        is_doubtful: A slot of it holds who knows what.
        slots: All of them.
    """

    drive: int
    number: int
    mark: Mark = _NOBODYS
    is_marked: bool = False
    used: int = 0
    num_held: int = 0
    change: int = 0
    is_doubtful: bool = False
    slots: "list[Slot]" = attrs.field(factory=list, repr=False)


@attrs.define(eq=False)
class Slot:
    """
    Room for one block.

    Args:
        extent: In which it lies.
        place: Where in the file it begins.
        key: Of the block that is in it, or is being written to it.
        nbytes: Of that block.
        used: When that block was used last, as a number of uses.
        previous: Key and length of the block that is overwritten.
        num_holders: Calls that read or write it.
        is_gone: Nobody finds its block; whoever lets go of it last frees it.
    """

    extent: Extent
    place: int
    key: PackedKey = _NO_KEY
    nbytes: int = 0
    used: int = 0
    previous: tuple[PackedKey, int] = (_NO_KEY, 0)
    num_holders: int = 0
    is_gone: bool = False


@attrs.define
class _Class:
    """Slots of one size: free ones, and those with blocks, oldest use first."""

    free: deque[Slot] = attrs.field(factory=deque)
    blocks: OrderedDict[PackedKey, Slot] = attrs.field(factory=OrderedDict)


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
        self._blocks: dict[PackedKey, Slot] = {}
        self._classes: dict[int, _Class] = {}
        self._extents: OrderedDict[int, Extent] = OrderedDict()
        """Those that belong to a class, by id, the one whose use is oldest first."""
        self.num_evicted = 0
        self.tell: Callable[[PackedKey, bool], None] = lambda key, is_there: None
        """Told of each block that is found from now on, or no more."""
        self.extents = [
            Extent(drive, number)
            for number in range(geometry.num_extents)
            for drive in range(num_drives)
        ]
        """Of all drives in turn."""
        self._nobodys = {id(extent): extent for extent in self.extents}

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self) -> list[PackedKey]:
        """Return those of all blocks that are there."""
        return list(self._blocks)

    @property
    def nbytes(self) -> int:
        """Of the extents that belong to a class."""
        return len(self._extents) * self.geometry.extent_bytes

    def find(self, key: PackedKey) -> Slot | None:
        """Return the slot of a block that is there."""
        return self._blocks.get(key)

    def use(self, slot: Slot) -> None:
        """Count a block as used now."""
        self.num_uses += 1
        slot.used = slot.extent.used = self.num_uses
        self._classes[slot.extent.mark.pages].blocks.move_to_end(slot.key)
        self._extents.move_to_end(id(slot.extent))

    def hold(self, slot: Slot) -> None:
        """Keep a slot as it is until it is let go."""
        slot.num_holders += 1
        slot.extent.num_held += slot.num_holders == 1

    def let_go(self, slot: Slot) -> None:
        """Hold a slot no longer; frees it if its block is gone."""
        slot.num_holders -= 1
        if not slot.num_holders:
            slot.extent.num_held -= 1
            if slot.is_gone:
                self._free(slot)

    # A write: reserved, then one of three ends.

    def reserve(self, key: PackedKey, nbytes: int) -> Slot | None:
        """Return a held slot to write a block to; None if all that would do are held."""
        slot = self._find_room(pages_of(nbytes))
        if slot is not None:
            slot.previous, slot.key, slot.nbytes = (slot.key, slot.nbytes), key, nbytes
            self.num_uses += 1
            slot.used = self.num_uses
            self.hold(slot)
            self.change(slot.extent)
        return slot

    def commit(self, slot: Slot) -> None:
        """Have the block found that was written to a slot."""
        self.add(slot)
        self.let_go(slot)

    def abort(self, slot: Slot, *, is_wiped: bool) -> None:
        """Let go of a slot to which nothing was written, or of which the stamp is wiped."""
        slot.key, slot.nbytes = slot.previous
        if slot.key and not is_wiped:
            self.num_evicted -= 1
            self.add(slot)
        else:
            slot.is_gone = True
        self.let_go(slot)

    def withdraw(self, slot: Slot) -> None:
        """Let nobody use a slot again while it is of this extent: it holds who knows what."""
        slot.key, slot.is_gone = _NO_KEY, False
        slot.extent.is_doubtful = True
        self.let_go(slot)

    # Blocks that are there.

    def add(self, slot: Slot) -> None:
        """Have a block found that is in a slot, used now."""
        self._blocks[slot.key] = slot
        self._classes[slot.extent.mark.pages].blocks[slot.key] = slot
        self.use(slot)
        self.change(slot.extent)
        self.tell(slot.key, True)

    def remove(self, slot: Slot) -> None:
        """Have a block found no more; its slot is freed by whoever lets go of it."""
        del self._blocks[slot.key]
        del self._classes[slot.extent.mark.pages].blocks[slot.key]
        slot.is_gone = True
        self.change(slot.extent)
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
        del self._nobodys[id(extent)]
        self._give(extent, mark)
        extent.is_marked = True
        if change is not None:
            extent.change = change
            del self._changed[extent]

    def load(self, blocks: list[Slot]) -> list[Slot]:
        """
        Have the blocks found that are in slots, used when these say; nobody is told.

        Returns:
            Those of whose block there is a later copy, not found.
        """
        blocks.sort(key=attrgetter("used"))
        self._blocks = {slot.key: slot for slot in blocks}
        older = []
        for slot in blocks:
            if self._blocks[slot.key] is slot:
                self._classes[slot.extent.mark.pages].blocks[slot.key] = slot
                slot.extent.used = slot.used
            else:
                older.append(slot)
        if blocks:
            self.num_uses = max(self.num_uses, blocks[-1].used)
        for extent in sorted(self._extents.values(), key=attrgetter("used")):
            self._extents.move_to_end(id(extent))
        return older

    def drop_older(self, slot: Slot, *, is_wiped: bool) -> None:
        """Let a slot be written to that ``load`` has returned, if its stamp is gone."""
        slot.extent.is_doubtful |= not is_wiped
        slot.key = _NO_KEY if is_wiped else slot.key

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
        if extent.is_doubtful or not extent.is_marked:
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
        mine = self._classes.get(pages)
        if mine is None:
            mine = self._classes[pages] = _Class()
        if not mine.free:
            victim = next((s for s in mine.blocks.values() if not s.num_holders), None)
            extent = self._nobodys.pop(next(iter(self._nobodys), 0), None)
            if extent is None:
                extent = self._take_older(mine, victim)
            if extent is not None:
                self._give(extent, Mark(self._draw(), pages))
                mine.free.extend(extent.slots)
            elif victim is not None:
                self._evict(victim)
                victim.is_gone = False
                return victim
        return mine.free.popleft() if mine.free else None

    def _take_older(self, mine: _Class, victim: Slot | None) -> Extent | None:
        """Take the extent of another class that is older than *victim*."""
        for extent in self._extents.values():
            if victim is not None and extent.used >= victim.used:
                return None
            theirs = self._classes[extent.mark.pages]
            if theirs is not mine and not extent.num_held:
                for slot in extent.slots:
                    if self._blocks.get(slot.key) is slot:
                        self._evict(slot)
                theirs.free = deque(s for s in theirs.free if s.extent is not extent)
                del self._extents[id(extent)]
                return extent
        return None

    def _evict(self, slot: Slot) -> None:
        self.num_evicted += 1
        self.remove(slot)

    def _give(self, extent: Extent, mark: Mark) -> None:
        geometry, pages = self.geometry, mark.pages
        self._classes.setdefault(pages, _Class())
        extent.mark, extent.is_marked, extent.is_doubtful = mark, False, False
        extent.slots = [
            Slot(extent, geometry.place(extent.number, pages, at))
            for at in range(geometry.num_slots(pages))
        ]
        self.num_uses += 1
        extent.used = self.num_uses
        self._extents[id(extent)] = extent
        self.change(extent)

    def _free(self, slot: Slot) -> None:
        slot.is_gone, slot.key = False, _NO_KEY
        self._classes[slot.extent.mark.pages].free.append(slot)
