# SPDX-License-Identifier: Apache-2.0
"""
What an index knows of an extent, and of a slot in it.

Changed by ``_slots``, and by ``_keeping`` while an index is made; ``is_marked``, when that is so,
by ``_drive``.
"""

import attrs

from ucm.backends.disk._stamp import Mark
from ucm.blocks import PackedKey

__all__ = ["NOTHING", "NO_KEY", "Extent", "Slot", "Unclear"]

NO_KEY = PackedKey(b"")
NOTHING = NO_KEY, 0
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
        unclear: Those of its slots that are.
        slots: All of them.
    """

    drive: int
    number: int
    mark: Mark = _NOBODYS
    is_marked: bool = False
    used: int = 0
    num_held: int = 0
    change: int = 0
    unclear: "dict[Slot, None]" = attrs.field(factory=dict, repr=False)
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
    key: PackedKey = NO_KEY
    nbytes: int = 0
    used: int = 0
    previous: tuple[PackedKey, int] = NOTHING
    num_holders: int = 0
    is_gone: bool = False

    @property
    def keys(self) -> tuple[PackedKey, PackedKey]:
        """Of the blocks that may be in it, where a write or a deletion has failed."""
        return self.key, self.previous[0]


class Unclear:
    """Slots that hold who knows what, and are nobody's until they were wiped."""

    def __init__(self) -> None:
        self._of_key: dict[PackedKey, dict[Slot, None]] = {}

    def of(self, key: PackedKey) -> list[Slot]:
        """Return those in which a block may be."""
        return list(self._of_key.get(key, ()))

    def add(self, slot: Slot) -> None:
        """Count one among them, for as long as its keys stay."""
        slot.extent.unclear[slot] = None
        for key in slot.keys:
            self._of_key.setdefault(key, {})[slot] = None

    def discard(self, slot: Slot) -> None:
        """Count one no more, if it is one of them."""
        if slot in slot.extent.unclear:
            del slot.extent.unclear[slot]
            for key in slot.keys:
                some = self._of_key[key]
                del some[slot]
                if not some:
                    del self._of_key[key]
