# SPDX-License-Identifier: Apache-2.0
"""Looks at a drive's file past the backend, by what its module says is on it."""

import struct
from collections.abc import Iterator
from pathlib import Path

from ucm.backends.disk import DiskBackend
from ucm.backends.disk._drive import BLOCKS

__all__ = ["STAMP_BYTES", "find", "keys_on", "open_disk", "write"]

STAMP_BYTES = 172
_PAGE = 4096


async def open_disk(*paths, capacity=4 << 20, **settings):
    """Open a disk backend."""
    given = {"path": [str(path) for path in paths], "capacity": capacity, "threads": 4}
    return await DiskBackend.open_configured(given | settings, "tiers.0")


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
