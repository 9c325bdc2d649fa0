# SPDX-License-Identifier: Apache-2.0
"""
A file of lines that is put aside when it is full.

``name.jsonl`` is the present one, ``name.jsonl.1`` the next older, and so on; each has at
most so many bytes, or one line. A file that somebody has moved or removed is made anew.

A file that another process writes, as one of the same id in a container of its own may, is left to it:
the next name is ``name-1.jsonl``. The kernel drops the lock that says so with whoever held it.

Only the log's own thread writes.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["RotatingFile"]

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
_NONE: Final = -1
_MOST_ALIKE: Final = 100
_TAKEN: Final = {errno.EAGAIN, errno.EACCES}
_NEWLINE: Final = ord("\n")


class RotatingFile:
    """
    Files of lines; a ``Sink``.

    Args:
        path: Of the present one, unless others have that. Its directory is made if need be, for us
            alone.
        max_bytes: Of each file.
        files: How many are kept, the present one among them.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, *, max_bytes: int, files: int) -> None:
        self._first = self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._is_torn = False
        """Whether the last line is not whole, and none may stand beside it."""
        self._descriptor = _NONE
        self._open()

    def write(self, text: str) -> int:
        """Write lines; return how many are lost: no disk, or no room on it."""
        left = text.count("\n")
        try:
            for data in self._parts(text):
                self._find_room(len(data))
                if self._is_torn:  # apart: it is the end of none of these lines
                    os.write(self._descriptor, b"\n")
                    self._is_torn = False
                rest = memoryview(data)
                while rest:
                    count = os.write(self._descriptor, rest)
                    left -= bytes(rest[:count]).count(b"\n")
                    self._is_torn, rest = rest[count - 1] != _NEWLINE, rest[count:]
        except OSError:
            return left
        return 0

    def close(self) -> None:
        """Close the present one. Idempotent."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor != _NONE:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, _FLAGS, 0o600)
        first, number = self._first, 0
        while number < _MOST_ALIKE and not _is_alone(self._descriptor):
            self.close()
            number += 1
            self._path = first.with_name(f"{first.stem}-{number}{first.suffix}")
            self._descriptor = os.open(self._path, _FLAGS, 0o600)
        self._is_torn = not self._ends_well()

    def _ends_well(self) -> bool:
        """Return whether who had our number before has left no line that is cut, as far as can be read."""
        last = b""
        with contextlib.suppress(OSError):
            nbytes = os.fstat(self._descriptor).st_size
            last = os.pread(self._descriptor, 1, max(0, nbytes - 1))
        return last in (b"", b"\n")

    def _parts(self, text: str) -> Iterator[bytes]:
        """Yield the lines together as far as they fit into a file."""
        part: list[bytes] = []
        size = 0
        for line in text.encode("utf-8", "backslashreplace").splitlines(keepends=True):
            if part and size + len(line) > self._max_bytes:
                yield b"".join(part)
                part, size = [], 0
            part.append(line)
            size += len(line)
        yield b"".join(part)

    def _find_room(self, nbytes: int) -> None:
        """
        See that the present file is there, and has room.

        Raises:
            OSError: It cannot be made.
        """
        if self._descriptor != _NONE:
            ours = os.fstat(self._descriptor)
            if not self._is_there(ours):
                self.close()
            elif ours.st_size and ours.st_size + nbytes > self._max_bytes:
                self._put_aside()  # while it is ours
                self.close()
        if self._descriptor == _NONE:
            self._open()

    def _is_there(self, ours: os.stat_result) -> bool:
        try:
            return os.path.samestat(ours, os.lstat(self._path))
        except OSError:
            return False

    def _put_aside(self) -> None:
        names = [self._path]
        names += [Path(f"{self._path}.{number}") for number in range(1, self._files)]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if self._files == 1:
            self._path.unlink(missing_ok=True)


def _is_alone(descriptor: int) -> bool:
    """
    Keep a file from other processes; return whether none had it.

    A lock of the process, as its logs may share a file; it goes when the first of them is closed.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:  # a file system may have no locks
        return exc.errno not in _TAKEN
    return True
