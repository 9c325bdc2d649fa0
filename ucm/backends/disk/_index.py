# SPDX-License-Identifier: Apache-2.0
"""
What is in a drive's extents, written down beside them, so that a start reads no stamps.

The file ``index``::

    page 0         whose it is, and whether somebody has it open
    page 1 and on  for each extent the number of its last change, 8 bytes
    behind that    for each extent a record: a change's number, and the blocks behind that change

Before anything is written to an extent, the number of the change that is about to be made is
written here. So a record is of use as long as the last change is its own: who dies at any time
leaves extents of which the record does not count, and these are looked through.

A process's death takes nothing of that along. A loss of power may: so a file that somebody has
had open since an earlier start of the machine counts for nothing. Nor does one beside a file of
blocks that somebody else has written to: when it is closed, the time of that file's last write is
set to one in the past, which is looked at before it counts.

Threading: ``touch``, ``store`` and ``load`` on many threads at once, for an extent one at a time.
"""

import os
import secrets
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

from xxhash import xxh3_64_intdigest

from ucm.backends.disk._stamp import PAGE, Geometry, Mark
from ucm.blocks import PackedKey

__all__ = ["INDEX", "Entry", "Index", "Record"]

INDEX = "index"
_HEAD = struct.Struct(">4sBBxxQQQQ16s")
_RECORD = struct.Struct(">4sB3xIQQQ")
_NUMBER = struct.Struct(">Q")
_HEAD_MAGIC, _RECORD_MAGIC, _VERSION = b"UCMI", b"UCMR", 2
"""Of the first version a record could be of a later change than its blocks, and blocks could be
in two slots: such a file counts for nothing."""
_LARGEST_KEY = 96
_CHANGE_BITS = 63
_HOUR_NS = 3600 * 10**9
_BOOT = Path("/proc/sys/kernel/random/boot_id")


Entry = tuple[int, int, int, PackedKey]
"""One block of an extent: when it was used last, as a number of uses; the number of its slot; its
length; its key. There are millions of them at a start, so they are no objects of their own."""


class Record(NamedTuple):
    """
    What was in an extent behind a change.

    Args:
        mark: The extent's.
        change: The number of that change.
        entries: The blocks that were found; all other slots were free.
    """

    mark: Mark
    change: int
    entries: Sequence[Entry]

    def is_of(self, mark: Mark, geometry: Geometry) -> bool:
        """Return whether it is of an extent that is cut so, and fits it."""
        slots, capacity = range(geometry.num_slots(mark.pages)), mark.pages * PAGE
        numbers = [number for _, number, _, _ in self.entries]
        return (
            self.mark == mark
            and len(numbers) == len(set(numbers))
            and all(number in slots for number in numbers)
            and all(0 < nbytes <= capacity for _, _, nbytes, _ in self.entries)
        )

    def encode(self, extent: int) -> bytes:
        """Return its bytes, which are those of this extent only."""
        width = max((len(key) for *_, key in self.entries), default=0)
        entry = _entry(width)
        fields = _RECORD.pack(
            *(_RECORD_MAGIC, width, len(self.entries)),
            *(self.mark.serial, self.mark.pages, self.change),
        )
        data = b"".join(
            [
                fields,
                *(
                    entry.pack(used, slot, nbytes, len(key), key)
                    for used, slot, nbytes, key in self.entries
                ),
            ]
        )
        return _NUMBER.pack(xxh3_64_intdigest(data, extent)) + data

    @classmethod
    def read(cls, fd: int, at: int, extent: int, change: int) -> "Record | None":
        """
        Read the one that lies at a place of a file; None where none is of that change.

        Raises:
            OSError: The file cannot be read.
        """
        start = _NUMBER.size + _RECORD.size
        head = os.pread(fd, start, at)
        if len(head) < start:
            return None
        magic, width, count, serial, pages, told = _RECORD.unpack_from(
            head, _NUMBER.size
        )
        if (magic, told) != (_RECORD_MAGIC, change) or width > _LARGEST_KEY:
            return None
        entry = _entry(width)
        body = os.pread(fd, count * entry.size, at + start)
        data = head[_NUMBER.size :] + body
        if _NUMBER.pack(xxh3_64_intdigest(data, extent)) != head[: _NUMBER.size]:
            return None
        entries = [
            (used, slot, nbytes, PackedKey(key[:length]))
            for used, slot, nbytes, length, key in entry.iter_unpack(body)
        ]
        return cls(Mark(serial, pages), change, entries)


def _entry(width: int) -> struct.Struct:
    return struct.Struct(f">QIQB{width}s")


class Index:
    """
    The file of one drive; made by ``open``.

    Args:
        fd: Of it.
        geometry: Of the blocks' file.
        changes: The number of each extent's last change.
    """

    def __init__(self, fd: int, geometry: Geometry, changes: list[int]) -> None:
        self._fd = fd
        self._geometry = geometry
        self._changes = changes
        self._lock = threading.Lock()
        self._first = PAGE + PAGE * -(-_NUMBER.size * geometry.num_extents // PAGE)
        largest = _NUMBER.size + _RECORD.size
        largest += geometry.num_slots(1) * _entry(_LARGEST_KEY).size
        self._stride = PAGE * -(-largest // PAGE)

    @classmethod
    def open(cls, path: Path, geometry: Geometry, blocks: os.stat_result) -> Self:
        """
        Open the index of a drive, which this process has locked.

        Args:
            path: Of the file.
            geometry: As the blocks' file is cut.
            blocks: What the system said of that file before anybody wrote to it.

        Raises:
            OSError: It cannot be used, or there is no room for it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            changes = _read_changes(fd, geometry, blocks)
            if changes is None:
                some = secrets.randbits(_CHANGE_BITS - 1)
                changes = [some] * geometry.num_extents
                os.ftruncate(fd, 0)
            made = cls(fd, geometry, changes)
            os.posix_fallocate(fd, 0, made._first)
            os.pwrite(fd, b"".join(map(_NUMBER.pack, changes)), PAGE)
            made._write_head(blocks.st_ino, is_open=True)
            stack.pop_all()
        return made

    @property
    def last_change(self) -> int:
        """The highest number of a change."""
        return max(self._changes)

    def touch(self, extent: int, change: int) -> None:
        """
        Say that an extent is about to be written to.

        Raises:
            OSError: It could not be said; then it must not be written to.
        """
        with self._lock:
            if change > self._changes[extent]:
                at = PAGE + extent * _NUMBER.size
                os.pwrite(self._fd, _NUMBER.pack(change), at)
                self._changes[extent] = change

    def store(self, extent: int, record: Record) -> None:
        """
        Write down what is in an extent, to which nobody writes meanwhile.

        Raises:
            OSError: It could not be written; then the extent has no record.
        """
        self.touch(extent, record.change)
        os.pwrite(self._fd, record.encode(extent), self._place(extent))

    def load(self, extent: int) -> Record | None:
        """Return what is in an extent; None where that is not known."""
        with suppress(OSError):
            change = self._changes[extent]
            return Record.read(self._fd, self._place(extent), extent, change)
        return None

    def settle(self, blocks_fd: int) -> None:
        """
        Say that nobody has it open any more, once all that was written lasts.

        Raises:
            OSError: That cannot be said.
        """
        os.fdatasync(blocks_fd)
        now = time.time_ns()  # who writes later sets a later time
        os.utime(blocks_fd, ns=(now, now - _HOUR_NS - secrets.randbelow(_HOUR_NS)))
        os.fsync(blocks_fd)
        os.fsync(self._fd)
        told = os.fstat(blocks_fd)
        self._write_head(told.st_ino, is_open=False, written=told.st_mtime_ns)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _place(self, extent: int) -> int:
        return self._first + extent * self._stride

    def _write_head(self, inode: int, *, is_open: bool, written: int = 0) -> None:
        fields = _HEAD.pack(
            *(_HEAD_MAGIC, _VERSION, is_open),
            *(self._geometry.num_extents, self._geometry.extent_bytes),
            *(inode, written, _boot() if is_open else b""),
        )
        os.pwrite(self._fd, fields + _NUMBER.pack(xxh3_64_intdigest(fields)), 0)
        os.fsync(self._fd)


def _boot() -> bytes:
    """Return what start of the machine this is; empty where it does not say."""
    try:
        return bytes.fromhex(_BOOT.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return b""


def _read_changes(
    fd: int, geometry: Geometry, blocks: os.stat_result
) -> list[int] | None:
    """Return the number of each extent's last change; None where that is not known."""
    if not _counts(os.pread(fd, PAGE, 0), geometry, blocks):
        return None
    told = os.pread(fd, geometry.num_extents * _NUMBER.size, PAGE)
    if len(told) != geometry.num_extents * _NUMBER.size:
        return None
    changes = [number for (number,) in _NUMBER.iter_unpack(told)]
    return None if max(changes) >> _CHANGE_BITS else changes


def _counts(head: bytes, geometry: Geometry, blocks: os.stat_result) -> bool:
    """Return whether a file's first page says that what it tells is true."""
    end = _HEAD.size + _NUMBER.size
    fields = head[: _HEAD.size]
    if head[_HEAD.size : end] != _NUMBER.pack(xxh3_64_intdigest(fields)):
        return False
    magic, version, is_open, count, extent_bytes, inode, written, boot = _HEAD.unpack(
        fields
    )
    if (magic, version) != (_HEAD_MAGIC, _VERSION):
        return False
    told = Geometry(count, extent_bytes), inode
    if told != (geometry, blocks.st_ino):
        return False
    if is_open:
        return any(boot) and boot == _boot()
    return bool(written == blocks.st_mtime_ns)
