# SPDX-License-Identifier: Apache-2.0
"""Looks at a drive's file past the backend, by what its module says is on it."""

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from ucm.backends.disk import DiskBackend, _drive
from ucm.backends.disk._drive import BLOCKS
from ucm.backends.disk._extent import Slot
from ucm.backends.disk._slots import Slots
from ucm.blocks import PackedKey

__all__ = [
    "STAMP_BYTES",
    "Refused",
    "find",
    "keys_on",
    "open_disk",
    "reserve",
    "write",
]

STAMP_BYTES = 172
_PAGE = 4096


async def open_disk(*paths, capacity=4 << 20, **settings):
    """Open a disk backend."""
    given = {"path": [str(path) for path in paths], "capacity": capacity, "threads": 4}
    return await DiskBackend.open_configured(given | settings, "tiers.0")


def reserve(slots: Slots, key: PackedKey, nbytes: int) -> Slot | None:
    """Return a slot of an index to write one block to."""
    (slot,) = slots.reserve([(key, nbytes)])
    return slot


def find(path: Path, key: bytes) -> tuple[int, int, int] | None:
    """Return where a block begins and ends, and where its stamp is; the newest one."""
    data = (path / BLOCKS).read_bytes()
    found = []
    for at in _stamps(data):
        nbytes = struct.unpack_from(">Q", data, at + 8)[0]
        if data[at + 24 : at + 24 + data[at + 5]] == key:
            _, place, sequence = struct.unpack_from(">QQQ", data, at + 132)
            found.append((sequence, place, place + nbytes, at))
    return max(found)[1:] if found else None


def keys_on(path: Path) -> set[bytes]:
    """Return the keys of all blocks in a drive's file."""
    data = (path / BLOCKS).read_bytes()
    return {data[at + 24 : at + 24 + data[at + 5]] for at in _stamps(data)}


def _stamps(data: bytes) -> Iterator[int]:
    for at in range(0, len(data), _PAGE):
        if data[at : at + 4] == b"UCMB" and data[at + 128 : at + 132] == b"UCMS":
            yield at


def write(path: Path, at: int, data: bytes) -> None:
    """Write over a piece of a drive's file."""
    with (path / BLOCKS).open("r+b") as file:
        file.seek(at)
        file.write(data)


class Refused:
    """
    A call of the kernel, ``pwritev`` or ``preadv``, that a drive refuses.

    Args:
        monkeypatch: Until whose end.
        name: Of the call.
        where: Told a file's number, a place in it and how many bytes: whether it is refused there.
        how: What it does before: "at once" nothing; "torn" has written the first page of several;
            "short" has done half of the first piece, and says so.
        error: Number of what it says.
    """

    def __init__(
        self,
        monkeypatch,
        name,
        where=lambda fd, place, nbytes: True,
        how="at once",
        error=errno.EIO,
    ):
        self.where, self.how, self.places, self.error = where, how, [], error
        self._real = getattr(os, name)
        monkeypatch.setattr(_drive.os, name, self)

    def __call__(self, fd, parts, place):
        """Do it, or refuse."""
        self.places.append(place)
        nbytes = sum(map(len, parts))
        if not self.where(fd, place, nbytes):
            return self._real(fd, parts, place)
        if self.how == "short":
            return self._real(fd, [parts[0][: len(parts[0]) // 2]], place)
        if self.how == "torn" and nbytes > _PAGE:
            self._real(fd, [parts[0][:_PAGE]], place)
        raise OSError(self.error, os.strerror(self.error))
