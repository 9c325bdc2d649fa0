# SPDX-License-Identifier: Apache-2.0
"""
How the index of drives is made at the start, and written down for the next one.

An extent is written down when it was not changed for longest of more than a few that were, so
that a start behind a death looks through those few only; and all of them at the end.
"""

import contextlib
import gc
from collections.abc import Collection, Iterator, Sequence

import anyio
import anyio.to_thread

from ucm.backends._crew import Crew
from ucm.backends.disk._drive import Drive, Scanned
from ucm.backends.disk._extent import Extent, Slot
from ucm.backends.disk._index import Record
from ucm.backends.disk._slots import Slots
from ucm.blocks import PackedKey

__all__ = ["Keeper"]

_SPARE, _PUTS, _PIECE = 32, 8, 16
"""So many changed extents stay as they are; one is written down with each eighth put; at start
and end so many at a time."""
_CLOSING_S = 2.0
_MANY = 100_000
"""Blocks for which the collector would stop the loop, later on as well."""


class Keeper:
    """
    Makes and keeps the index of some drives.

    Args:
        drives: Allocated.
        slots: Their index.
        crew: Threads that talk to them.
    """

    def __init__(self, drives: Sequence[Drive], slots: Slots, crew: Crew) -> None:
        self._drives = drives
        self._slots = slots
        self._crew = crew
        self._num_puts = 0

    async def load(self) -> int:
        """Make the index of what is on the drives; return how many remains were removed."""
        drives, slots, geometry = self._drives, self._slots, self._slots.geometry

        def scan(extent: Extent) -> Scanned | None:
            return drives[extent.drive].scan(geometry, extent.number)

        slots.num_changes = max(drive.last_change for drive in drives)
        scanned: list[Scanned | None] = [None] * len(slots.extents)
        with _no_collector():
            await self._crew.run(slots.extents, scan, scanned)
            pairs = zip(slots.extents, scanned, strict=True)
            there = [(extent, found) for extent, found in pairs if found is not None]
            blocks: list[Slot] = []
            for extent, found in there:
                slots.adopt(extent, found.mark, change=found.change)
                for used, number, nbytes, key in found.entries:
                    slot = extent.slots[number]
                    slot.used, slot.nbytes, slot.key = used, nbytes, key
                    blocks.append(slot)
            older = slots.load(blocks)
            if len(blocks) >= _MANY:
                gc.freeze()
        for extent, _ in there:
            slots.settle(extent)
        await self._wipe(older)
        await self._write_all_down(leave=False)
        return len(older) + sum(found.num_swept for _, found in there)

    async def before_put(self) -> None:
        """Ask drives that refused, and write down what was not changed for longest, now and then."""
        for drive in sorted(self._slots.refusing):
            await self._ask_again(drive)
        self._num_puts += 1
        if not self._num_puts % _PUTS:
            await self._write_down(1, spare=_SPARE)

    async def _ask_again(self, number: int) -> None:
        """Find out whether a drive writes again; if so, wipe what is unclear of it."""
        drive, slot, told = self._drives[number], self._slots.sample(number), [False]
        try:
            await self._crew.run([slot.extent], drive.writes, told)
        finally:
            self._slots.let_go(slot)
        if told == [True]:
            drive.is_tried = True
            mine = [each for each in self._slots.extents if each.drive == number]
            await self._wipe([slot for extent in mine for slot in extent.unclear])
            self._slots.refusing.discard(number)  # also where a spot stays unclear

    async def wipe_unclear_of(self, keys: Collection[PackedKey]) -> set[PackedKey]:
        """Wipe what may hold one of some blocks, and is nobody's; return of which blocks something may stay."""
        unclear = self._slots.unclear
        named = [(key, slot) for key in keys for slot in unclear.of(key)]
        await self._wipe([slot for _, slot in named])
        return {key for key, slot in named if slot in unclear.of(key)}

    async def mark_taken(self) -> bool:
        """Have no start find what extents had before they were taken; False where it may yet."""

        def mark(slot: Slot) -> bool:
            return self._drives[slot.extent.drive].writes(slot.extent)

        slots = self._slots.hold_unmarked()
        told = [False] * len(slots)
        try:
            await self._crew.run(slots, mark, told)
        finally:
            self._slots.let_go(*slots)
        return all(told)

    async def _wipe(self, slots: list[Slot]) -> None:
        """Wipe and clear slots; those that no thread came to when cancelled stay unclear."""

        def wipe(slot: Slot) -> bool:
            return self._drives[slot.extent.drive].renew(slot)

        for slot in slots:
            self._slots.hold(slot)
            self._slots.change(slot.extent)
        wiped = [False] * len(slots)
        try:
            await self._crew.run(slots, wipe, wiped)
        finally:
            for slot, is_wiped in zip(slots, wiped, strict=True):
                self._slots.clear(slot, is_wiped=is_wiped)

    async def aclose(self) -> None:
        """Write down all, as far as it comes to it in time, and end the threads."""
        with anyio.move_on_after(_CLOSING_S, shield=True):
            await self._write_all_down(leave=True)
        is_idle = await self._crew.aclose()
        with anyio.move_on_after(_CLOSING_S, shield=True) as settling:
            for drive in self._drives if is_idle else ():
                await anyio.to_thread.run_sync(drive.settle, abandon_on_cancel=True)
        for drive in self._drives:
            drive.close(is_used=not is_idle or settling.cancelled_caught)

    async def _write_all_down(self, *, leave: bool) -> None:
        while await self._write_down(_PIECE, spare=0, leave=leave):
            pass

    async def _write_down(self, most: int, *, spare: int, leave: bool = False) -> bool:
        """
        Write down what is in some extents that have changed.

        Args:
            most: So many.
            spare: So many may stay changed.
            leave: End at once when cancelled.

        Returns:
            Whether there may be more.
        """
        pieces: list[tuple[Extent, Record]] = []
        while len(pieces) < most:
            extent = self._slots.next_changed(spare)
            if extent is None:
                break
            entries = self._slots.entries(extent)
            if entries is not None:
                # Here, and not on the thread: the extent goes on changing meanwhile.
                record = Record(extent.mark, extent.change, entries)
                pieces.append((extent, record))

        def write(piece: tuple[Extent, Record]) -> None:
            extent, record = piece
            self._drives[extent.drive].write_down(extent.number, record)

        await self._crew.run(pieces, write, [None] * len(pieces), leave=leave)
        return len(pieces) == most


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the collector from looking at millions of objects again and again: half of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
