# SPDX-License-Identifier: Apache-2.0
"""
How files of blocks are read: several by one call where ``ucm.native`` was built, else one by one.

Each call to the system gives the interpreter lock up, and waits for it again: sixteen threads that
read what the mount has in memory did little else. What is done is the same.

A read may hang for as long as the mount's server is away. It goes to memory of the thread, and from
there, while it is in the CPU's cache, to whoever asked, if that is still there.

Threading: on many threads at once; all of it may hang.
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np

from ucm import native, xxh3
from ucm.backends._crew import Scratch
from ucm.backends._gate import Gate
from ucm.backends.envelope import HEADER_BYTES

__all__ = [
    "LEFT",
    "WRONG",
    "Asked",
    "Came",
    "PlainReader",
    "Reader",
    "find_reader",
    "names_of",
]

WRONG: Final = -1
"""In place of a system's error: no plain file of just that length; written: one is in the way."""
LEFT: Final = -2
"""In place of a system's error: whoever asked has gone."""
_BYTE: Final = ctypes.c_char
_PIECE_BYTES: Final = 1 << 18
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Asked(msgspec.Struct, frozen=True, eq=False):
    """
    A file, where what is behind its header goes, and whether it is given the present time.

    Its digest has a seed, wherever one is told.
    """

    path: bytes
    target: memoryview
    is_marked: bool
    seed: int


class Came(msgspec.Struct, frozen=True):
    """
    The number of an error, or 0 and the header; the target has what is behind it, then.

    The digest, if it is told, is that of the target's bytes as they lie there.
    """

    error: int
    header: bytes = b""
    digest: int | None = None


class Reader(Protocol):
    """Reads and looks for files."""

    def read(self, asked: Sequence[Asked], gate: Gate) -> list[Came]:
        """Read files, for as long as the *gate* is open."""

    def find(self, paths: Sequence[bytes]) -> list[int]:
        """Return for each file 0 or the number of an error; follows no links."""


class PlainReader:
    """Makes each call from Python."""

    def __init__(self) -> None:
        self._memory = Scratch()

    def read(self, asked: Sequence[Asked], gate: Gate) -> list[Came]:
        """Read one after the other."""
        return [self._read(each, gate) for each in asked]

    def find(self, paths: Sequence[bytes]) -> list[int]:
        """Look for one after the other."""
        return list(map(_find, paths))

    def _read(self, asked: Asked, gate: Gate) -> Came:
        try:
            file = os.open(asked.path, _FLAGS)
        except OSError as exc:
            return Came(exc.errno or errno.EIO)
        try:
            return self._read_open(file, asked, gate)
        except OSError as exc:
            return Came(exc.errno or errno.EIO)
        finally:
            os.close(file)

    def _read_open(self, file: int, asked: Asked, gate: Gate) -> Came:
        info, whole = os.fstat(file), HEADER_BYTES + len(asked.target)
        if not stat.S_ISREG(info.st_mode) or info.st_size != whole:
            return Came(WRONG)
        value = self._memory.get(whole)
        done = 0
        while done < whole:
            got = os.preadv(file, [value[done:]], done)
            if not got:
                return Came(WRONG)
            done += got

        def copy() -> bool:  # by numpy, which lets others run meanwhile
            target = np.frombuffer(asked.target, np.uint8)
            np.copyto(target, np.frombuffer(value[HEADER_BYTES:], np.uint8))
            return True

        if not gate.touch(copy):
            return Came(LEFT)
        if asked.is_marked:
            with contextlib.suppress(OSError):  # of a mount that is not written to
                os.utime(file)
        return Came(0, bytes(value[:HEADER_BYTES]))


class _NativeReader:
    """
    Has ``native.c`` make the calls, and digest what has come while the CPU's cache has it.

    Args:
        library: That.
        digester: None: digests are not told.
    """

    def __init__(self, library: native.Native, digester: xxh3.Digester | None) -> None:
        self._library = library
        self._digester = None if digester is None else digester.addresses
        self._memory = Scratch()

    def read(self, asked: Sequence[Asked], gate: Gate) -> list[Came]:
        """Read all by one call."""
        count, targets = len(asked), [each.target for each in asked]
        headers = bytearray(count * HEADER_BYTES)
        errors = (ctypes.c_int * count)()
        digests = (ctypes.c_uint64 * count)()
        try:
            piece = self._memory.get(_PIECE_BYTES)
        except OSError as exc:
            return [Came(exc.errno or errno.ENOMEM)] * count
        self._library.read_files(
            names_of([each.path for each in asked]),
            bytes([each.is_marked for each in asked]),
            *(count, (_BYTE * len(headers)).from_buffer(headers), HEADER_BYTES),
            (ctypes.c_void_p * count)(*_addresses(targets)),
            (ctypes.c_size_t * count)(*map(len, targets)),
            *(*_addresses([piece]), len(piece), gate.words, self._digester),
            (ctypes.c_uint64 * count)(*[each.seed for each in asked]),
            *(digests, errors),
        )
        told = [None] * count if self._digester is None else digests
        whole, places = bytes(headers), range(0, len(headers), HEADER_BYTES)
        return [
            Came(error) if error else Came(0, whole[at : at + HEADER_BYTES], digest)
            for error, digest, at in zip(errors, told, places, strict=True)
        ]

    def find(self, paths: Sequence[bytes]) -> list[int]:
        """Look for all by one call."""
        errors = (ctypes.c_int * len(paths))()
        self._library.find_files(names_of(paths), len(paths), errors)
        return list(errors)


def find_reader(library: native.Native | None) -> Reader:
    """Return what reads files here."""
    if library is None:
        return PlainReader()
    return _NativeReader(library, xxh3.DIGESTER)


def names_of(paths: Sequence[bytes]) -> "ctypes.Array[ctypes.c_char_p]":
    """Return paths as ``native.c`` takes them."""
    return (ctypes.c_char_p * len(paths))(*paths)


def _addresses(memory: Iterable[memoryview]) -> Iterable[int]:
    """Return where memory begins that is written to; no array is made for that."""
    return map(ctypes.addressof, map(_BYTE.from_buffer, memory))


def _find(path: bytes) -> int:
    try:
        os.stat(path, follow_symlinks=False)
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0
