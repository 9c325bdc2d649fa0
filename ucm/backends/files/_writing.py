# SPDX-License-Identifier: Apache-2.0
"""
How files of blocks are written: several by one call where ``ucm.native`` was built, else one by one.

A file takes six calls to the system, and each gives the interpreter lock up and waits for it again.
What is done is the same. Files that are to outlast a loss of power are written one by one: they wait
for the drive, not for the lock.

What is written is held against its checksum; who has read it before would have brought it from memory
twice. Native code digests each piece just before it writes it.

A write may hang for as long as the mount's server is away, and goes on with whatever lies in its
caller's memory by then. So it gets no name once whoever asked has gone.

Threading: on many threads at once; all of it may hang.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from ucm import native, xxh3
from ucm.backends._gate import Gate
from ucm.backends._places import give_name
from ucm.backends.envelope import HEADER_BYTES
from ucm.backends.files._reading import LEFT, WRONG, names_of

__all__ = [
    "DAMAGED",
    "NEW",
    "Given",
    "PlainWriter",
    "Writer",
    "find_writer",
    "write_whole",
]

NEW: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
)

DAMAGED: Final = -3
"""In place of a system's error: the bytes are not those of the checksum."""


class Given(msgspec.Struct, frozen=True, eq=False):
    """
    A file's names, at first and at last, and its bytes; two folders may have to be made.

    What is behind the header has the checksum if it is what it is to be, with the seed.
    """

    temporary: bytes
    path: bytes
    header: bytes
    data: memoryview
    seed: int
    checksum: int


class Writer(Protocol):
    """Writes files."""

    def write(self, given: Sequence[Given], gate: Gate) -> list[int]:
        """
        Write files, for as long as the *gate* is open.

        Returns:
            Of each 0, EEXIST if it was there, ``LEFT``, ``WRONG`` if another thing is in its way,
            ``DAMAGED``, or the number of another error.
        """


class PlainWriter:
    """
    Makes each call from Python.

    Args:
        is_lasting: Have each file outlast a loss of power.
    """

    def __init__(self, *, is_lasting: bool = False) -> None:
        self._is_lasting = is_lasting

    def write(self, given: Sequence[Given], gate: Gate) -> list[int]:
        """Write one after the other."""
        return [self._write(each, gate) for each in given]

    def _write(self, given: Given, gate: Gate) -> int:
        if gate.is_left:
            return LEFT
        with contextlib.suppress(OSError):
            os.stat(given.path, follow_symlinks=False)
            return errno.EEXIST
        if xxh3_64_intdigest(given.data, given.seed) != given.checksum:
            return DAMAGED
        try:
            self._write_new(given)
            return self._publish(given, gate)
        except FileExistsError:  # no block is: something else is in the way
            return WRONG
        except OSError as exc:
            return exc.errno or errno.EIO
        finally:
            with contextlib.suppress(OSError):
                os.unlink(given.temporary)

    def _write_new(self, given: Given) -> None:
        fd = os.open(given.temporary, NEW, 0o600)
        try:
            write_whole(fd, given.header, given.data)
            if self._is_lasting:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _publish(self, given: Given, gate: Gate) -> int:
        if gate.is_left:  # other bytes may lie there by now
            return LEFT
        try:
            is_new = give_name(given.temporary, given.path)
        except FileNotFoundError:  # the first one there
            _make_folders(given.path)
            is_new = give_name(given.temporary, given.path)
        if not is_new:
            return errno.EEXIST
        if self._is_lasting:
            folder = os.path.dirname(given.path)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        return 0


class _NativeWriter:
    """
    Has ``native.c`` make the calls.

    Args:
        library: That.
        digester: Digests what is written.
    """

    def __init__(self, library: native.Native, digester: xxh3.Digester) -> None:
        self._library = library
        self._digester = digester.addresses

    def write(self, given: Sequence[Given], gate: Gate) -> list[int]:
        """Write all by one call."""
        count, data = len(given), [each.data for each in given]
        headers = np.frombuffer(b"".join([each.header for each in given]), np.uint8)
        errors = (ctypes.c_int * count)()
        self._library.write_files(
            names_of([name for each in given for name in (each.temporary, each.path)]),
            *(count, headers.ctypes.data, HEADER_BYTES),
            (ctypes.c_void_p * count)(*native.addresses_of(data)),
            (ctypes.c_size_t * count)(*map(len, data)),
            *(gate.words, self._digester),
            (ctypes.c_uint64 * count)(*[each.seed for each in given]),
            (ctypes.c_uint64 * count)(*[each.checksum for each in given]),
            errors,
        )
        return list(errors)


def find_writer(library: native.Native | None, *, is_lasting: bool) -> Writer:
    """Return what writes files here."""
    if library is None or xxh3.DIGESTER is None or is_lasting:
        return PlainWriter(is_lasting=is_lasting)
    return _NativeWriter(library, xxh3.DIGESTER)


def _make_folders(path: bytes) -> None:
    """Make the folder that a file is to be in, and the one above; both for nobody else."""
    folder = os.path.dirname(path)
    for each in (os.path.dirname(folder), folder):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, mode=0o700)


def write_whole(fd: int, header: bytes, data: memoryview) -> None:
    """Write both behind one another."""
    parts = [memoryview(header), data]
    while any(map(len, parts)):
        if not (done := os.writev(fd, parts)):
            raise OSError(errno.EIO, "nothing is taken, and no error told")
        for at, part in enumerate(parts):
            parts[at] = part[min(done, len(part)) :]
            done -= min(done, len(part))
