# SPDX-License-Identifier: Apache-2.0
"""
One drive: a directory of ours with a preallocated file, and how blocks move to and from it.

Contents of the directory::

    ucm-disk.json   what it is; held by the one process that uses the directory
    lock            likewise; all that older releases look at
    blocks          the file
    index           what is in it, see ``_index``; there may be none

The file is opened with ``O_DIRECT`` where a probe says that it works. Direct I/O wants memory,
places and lengths in whole pages: whole pages of a caller's memory that begins at one, as slots
of a slab do, move without a copy; a last piece, and memory that lies otherwise, by way of the
thread's own pages.

Threading: all but opening and closing on many threads at once.
"""

import errno
import mmap
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import attrs
from xxhash import xxh3_64_intdigest

from ucm.backends._crew import Scratch
from ucm.backends._places import Head, claim, lock, path_error
from ucm.backends.abc import Fetched, Sealed, Verdict
from ucm.backends.disk._extent import Extent, Slot
from ucm.backends.disk._index import INDEX, Entry, Index, Record
from ucm.backends.disk._runs import judged_by, stamps_for
from ucm.backends.disk._stamp import PAGE, Geometry, Mark, Stamp
from ucm.native import addresses_of

__all__ = ["BLOCKS", "MANIFEST", "Drive", "Manifest", "Scanned"]

MANIFEST = "ucm-disk.json"
BLOCKS = "blocks"
_LOCK = "lock"  # and the manifest, without which nobody comes in: this may be removed
_SCHEMA = 1
_MOST_PARTS = 1024  # pieces of memory that a call may have (``IOV_MAX``)
_OF_MEMORY = {errno.ENOMEM, errno.EFAULT}
_SECTOR = 512  # of what ``stat`` counts, whatever the drive's are
_EMPTY_PAGE = mmap.mmap(-1, PAGE)  # begins at a page, as direct I/O wants it


class Manifest(Head, frozen=True, forbid_unknown_fields=True):
    """What the manifest of a drive's directory says."""

    extent_bytes: int


@attrs.frozen
class Scanned:
    """What an extent has."""

    mark: Mark
    entries: Sequence[Entry]
    change: int | None = None
    """Behind which that was written down; None: it was looked for."""
    num_swept: int = 0
    """Stamps that were removed, as their block is no longer there."""


class Drive:
    """
    A drive that this process alone uses.

    Args:
        path: Its directory.
        extent_bytes: Of a new one.
        key: The setting that named the directory.

    Raises:
        ConfigError: The directory is somebody else's, or cannot be used.
    """

    def __init__(self, path: Path, extent_bytes: int, key: str) -> None:
        self.path = path
        self._key = key
        self._pages = Scratch()
        self._fd = -1
        self._index: Index | None = None
        self._marked: set[int] = set()  # extents; each has had a mark on the drive
        self.is_direct = False
        self.is_silent = False
        """Nothing could be read when somebody asked last."""
        self.is_tried = False
        """It wrote a page when it was asked, having refused, and no block since."""
        self.trouble = ""
        """Why it takes no blocks; empty if it does, or nobody knows."""
        try:
            mine = Manifest("ucm-disk", _SCHEMA, extent_bytes)
            told = claim(path, MANIFEST, mine, key)
            self._lock_fds = lock(path, (_LOCK, MANIFEST), key)
        except OSError as exc:
            raise path_error(key, path, f"it cannot be used: {exc}") from exc
        self.extent_bytes = told.extent_bytes

    def allocate(self, geometry: Geometry) -> None:
        """
        Open the file, as long as it has to be.

        Raises:
            ConfigError: There is no room for it; the drive is as full as it was.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        path = self.path / BLOCKS
        room = os.statvfs(self.path)
        free = room.f_bavail * room.f_frsize
        try:
            self._fd = os.open(path, flags, 0o600)
            before = os.fstat(self._fd)
            with ExitStack() as undo:
                undo.callback(self._shrink, path, before)
                self._stretch(before, free, geometry.nbytes)
                direct = self._open_direct(path, flags)
                undo.pop_all()
        except OSError as exc:
            raise path_error(
                self._key,
                self.path,
                f"{geometry.nbytes} bytes for blocks cannot be had, free are {free} ({exc})",
                "Give a smaller capacity, or another drive.",
            ) from exc
        if direct >= 0:
            os.close(self._fd)
            self._fd, self.is_direct = direct, True
        try:
            self._index = Index.open(self.path / INDEX, geometry, before)
        except OSError:  # every start looks through the drive, then
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(self.path / INDEX)  # nobody keeps it true from now on

    def _stretch(self, before: os.stat_result, free: int, nbytes: int) -> None:
        """Have a file so long, and all of it there; where that is in vain nothing is taken."""
        if before.st_blocks * _SECTOR + free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if before.st_size > nbytes:
            os.ftruncate(self._fd, nbytes)
        os.posix_fallocate(self._fd, 0, nbytes)

    def _shrink(self, path: Path, before: os.stat_result) -> None:
        """Give back what a file has got that cannot be as long as it has to be."""
        if not before.st_size:
            os.unlink(path)
        elif os.fstat(self._fd).st_size > before.st_size:
            os.ftruncate(self._fd, before.st_size)

    def _open_direct(self, path: Path, flags: int) -> int:
        """Return the file opened for direct I/O; -1 if a probe says that it cannot be."""
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            return -1
        try:
            os.preadv(fd, [self._pages.get(PAGE)], 0)
        except OSError:
            os.close(fd)
            return -1
        return fd

    @property
    def last_change(self) -> int:
        """The highest number that a change of an extent has had here."""
        return 0 if self._index is None else self._index.last_change

    def settle(self) -> None:
        """Say that what was written down stays true, once nobody writes any more."""
        if self._index is not None:
            with suppress(OSError):
                self._index.settle(self._fd)

    def close(self, *, is_used: bool) -> None:
        """Let go of the files, unless threads still use them: their I/O stays where it was."""
        for fd in (self._fd, *self._lock_fds):
            if fd >= 0 and not is_used:
                os.close(fd)
        if self._index is not None and not is_used:
            self._index.close()
        self._index = None
        self._fd, self._lock_fds = -1, []

    # Blocks. On any thread.

    def write(self, run: Sequence[tuple[Slot, Sealed]]) -> bool | None:
        """
        Write blocks to slots side by side, and behind each block its stamp.

        Returns:
            False if the drive refused; some may have been written. None: there was no memory.
        """
        extent, place = run[0][0].extent, run[0][0].place
        data = [block.data for _, block in run]
        wholes = self._whole_pages(data)
        slot_bytes = (extent.mark.pages + 1) * PAGE
        try:
            left = self._pages.get(len(run) * slot_bytes - sum(wholes))
        except OSError:
            return None
        try:
            self._touch(extent)
            parts, firsts, ends = [], [], []
            for each, whole in zip(data, wholes, strict=True):
                rest, left = left[: slot_bytes - whole], left[slot_bytes - whole :]
                if tail := each.nbytes - whole:
                    rest[:tail] = each[whole:]
                rest[tail:-PAGE] = bytes(rest.nbytes - PAGE - tail)
                parts += [each[:whole], rest] if whole else [rest]
                firsts.append(each[:PAGE] if whole else rest[:PAGE])
                ends.append(rest[-PAGE:])
            for end, stamp in zip(ends, stamps_for(run, firsts), strict=True):
                end[:] = stamp
            is_whole = os.pwritev(self._fd, parts, place) == len(run) * slot_bytes
        except OSError:
            is_whole = False
        self.is_tried &= not is_whole
        return is_whole

    def _mark(self, extent: Extent) -> None:
        """Say on the drive how an extent is cut."""
        page = self._pages.get(PAGE)
        page[:] = extent.mark.encode()
        if os.pwritev(self._fd, [page], extent.number * self.extent_bytes) != PAGE:
            raise OSError(errno.EIO, "an extent's mark was cut short")
        extent.is_marked = True
        self._marked.add(extent.number)

    def writes(self, extent: Extent) -> bool:
        """Find out whether the drive writes: an extent's mark once more, which changes nothing."""
        try:
            self._touch(extent)
            self._mark(extent)
        except OSError:
            return False
        return True

    def _touch(self, extent: Extent) -> None:
        """Say that an extent is about to be written to, and before the first time how it is cut."""
        if not os.fstat(self._fd).st_nlink:
            self.trouble = f"{self.path / BLOCKS} was removed: end the agent (SIGTERM), the next one makes it anew"
            raise OSError(errno.ESTALE, self.trouble)  # nobody would find it again
        if self._index is not None:
            self._index.touch(extent.number, extent.change)
        if not extent.is_marked:
            self._mark(extent)

    def wipe(self, slot: Slot) -> bool:
        """Remove the stamp of a slot; False if the drive refused."""
        try:
            self._touch(slot.extent)
        except OSError:
            return False
        return self._wipe(slot.place, slot.extent.mark.pages)

    def renew(self, slot: Slot) -> bool:
        """Wipe a slot, and find out whether each of its pages is written to; False if one is not."""
        pages = slot.extent.mark.pages
        pieces = range(0, pages, _MOST_PARTS)
        return self.wipe(slot) and all(
            self._empty(slot.place + at * PAGE, min(_MOST_PARTS, pages - at))
            for at in pieces
        )

    def _wipe(self, place: int, pages: int) -> bool:
        return self._empty(place + pages * PAGE, 1)

    def _empty(self, place: int, count: int) -> bool:
        """Write so many empty pages."""
        try:
            return os.pwritev(self._fd, [_EMPTY_PAGE] * count, place) == count * PAGE
        except OSError:
            return False

    def read(self, run: Sequence[tuple[Slot, memoryview]]) -> list[Fetched] | None:
        """
        Read blocks from slots side by side into targets of their length.

        Returns:
            What became of each, by its stamp; None if the drive refused.
        """
        extent, place = run[0][0].extent, run[0][0].place
        slots, targets = [slot for slot, _ in run], [target for _, target in run]
        wholes = self._whole_pages(targets)
        slot_bytes = (extent.mark.pages + 1) * PAGE
        parts, rests = [], []
        try:
            left = self._pages.get(len(run) * slot_bytes - sum(wholes))
            for target, whole in zip(targets, wholes, strict=True):
                rest, left = left[: slot_bytes - whole], left[slot_bytes - whole :]
                rests += [rest]
                parts += [target[:whole], rest] if whole else [rest]
            if os.preadv(self._fd, parts, place) != len(run) * slot_bytes:
                return None
        except OSError as exc:
            is_ours = exc.errno in _OF_MEMORY  # which is no word on any block
            return [Fetched(Verdict.UNAVAILABLE)] * len(run) if is_ours else None
        self.is_silent = False
        told = judged_by(slots, [rest[-PAGE:] for rest in rests])
        for target, whole, rest in zip(targets, wholes, rests, strict=True):
            if tail := target.nbytes - whole:
                target[whole:] = rest[:tail]
        return told

    def is_as_before(self, slot: Slot) -> bool:
        """Return whether a write that failed has left a slot as it was, as far as can be read."""
        try:
            view = self._pages.get(2 * PAGE)
            first, last = view[:PAGE], view[PAGE:]
            nbytes = os.preadv(self._fd, [first], slot.place)
            end = slot.place + slot.extent.mark.pages * PAGE
            if nbytes + os.preadv(self._fd, [last], end) != len(view):
                return False
        except OSError:
            return False
        stamp = Stamp.decode(last)
        if stamp is None or not stamp.belongs(slot.extent.mark, slot.place):
            return not slot.previous[0]
        there = stamp.envelope.key, stamp.envelope.nbytes
        return there == slot.previous and stamp.first == xxh3_64_intdigest(first)

    def answers(self) -> bool:
        """Return whether one of two marks can be read from the drive, and not from memory."""
        marks = [number * self.extent_bytes for number in list(self._marked)]
        for place in random.sample(marks, min(2, len(marks))):
            with suppress(OSError):
                os.posix_fadvise(self._fd, place, PAGE, os.POSIX_FADV_DONTNEED)
                if os.preadv(self._fd, [self._pages.get(PAGE)], place) == PAGE:
                    self.is_silent = False
                    return True
        self.is_silent = bool(marks)  # else nobody knows
        return False

    def flush(self) -> bool:
        """Have all that was written outlast a loss of power; False if it may not."""
        try:
            os.fdatasync(self._fd)
        except OSError:
            return False
        return True

    def write_down(self, extent: int, record: Record) -> None:
        """Write down what an extent had behind a change."""
        if self._index is not None:
            with suppress(OSError):  # it is looked through, then
                self._index.store(extent, record)

    def scan(self, geometry: Geometry, extent: int) -> "Scanned | None":
        """Return what is in an extent; None where nothing is, or it cannot be read."""
        view = self._pages.get(2 * PAGE)
        try:
            os.preadv(self._fd, [view], extent * geometry.extent_bytes)
            mark = Mark.decode(view[:PAGE], geometry)
            if mark is None:
                return None
            self._marked.add(extent)
            record = None if self._index is None else self._index.load(extent)
            if record is not None and record.is_of(mark, geometry):
                return Scanned(mark, record.entries, record.change)
            return self._look_through(geometry, extent, mark, view)
        except OSError:
            return None

    def _look_through(
        self, geometry: Geometry, extent: int, mark: Mark, view: memoryview
    ) -> "Scanned | None":
        """Look at each slot of an extent, of which the first two pages were read."""
        entries: list[Entry] = []
        num_swept = 0
        for at in range(geometry.num_slots(mark.pages)):
            first = xxh3_64_intdigest(view[PAGE:])
            place = geometry.place(extent, mark.pages, at)
            os.preadv(self._fd, [view], place + mark.pages * PAGE)
            stamp = Stamp.decode(view[:PAGE])
            if stamp is None or not stamp.belongs(mark, place):
                continue
            if stamp.first == first:
                envelope = stamp.envelope
                entries.append((stamp.sequence, at, envelope.nbytes, envelope.key))
            elif self._wipe(place, mark.pages):
                num_swept += 1
            else:
                return None
        return Scanned(mark, entries, num_swept=num_swept)

    def _whole_pages(self, run: Sequence[memoryview]) -> list[int]:
        """Return how many bytes of each piece of memory can be moved from or to where they are."""
        sizes = list(map(len, run))
        if min(sizes) < PAGE:  # and there may be none that has an address
            return [0] * len(run)
        at = addresses_of(run) if self.is_direct else [0] * len(run)
        return [
            0 if address % PAGE else nbytes - nbytes % PAGE
            for address, nbytes in zip(at, sizes, strict=True)
        ]
