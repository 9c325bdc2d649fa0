# SPDX-License-Identifier: Apache-2.0
"""
How a slab comes to be, in a directory that is ours, under the directory's lock.

Order: a file that says what is being made (``MARK``), index, data; then the mark gets
the manifest's name. A creation that was killed leaves the mark, by which the next one
knows what it may remove; without it nothing in a directory is touched.
"""

import contextlib
import errno
import mmap
import os
import uuid
from pathlib import Path

import numpy as np

from ucm.config import Durability
from ucm.errors import ConfigError
from ucm.stores.slab._files import (
    DATA,
    INDEX,
    MANIFEST,
    MARK,
    Directory,
    Geometry,
    Manifest,
    foreign,
    is_in_memory,
    path_error,
)
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout, Word
from ucm.stores.slab._locks import FileLock
from ucm.stores.slab._room import Room, memory_rooms

__all__ = ["boot_words", "create"]

_SPARE_BYTES = 1 << 20  # the directory and what is small in it
_SYSTEM = Path("/")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFAULT, errno.ENOMEM, errno.EFBIG}


def boot_words() -> list[int]:
    """Return what tells this run of the machine from any other."""
    data = uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    return [int(word) for word in np.frombuffer(data, dtype=np.int64)]


def create(directory: Directory, geometry: Geometry, durability: Durability) -> None:
    """
    Make a slab in a directory that has none.

    Raises:
        ConfigError: The directory is not ours, or there is no room or no permission;
            what was there before is still there, and nothing else is.
    """
    manifest = Manifest.of(geometry, durability).encode()
    layout = IndexLayout(geometry.num_slots)
    in_memory = is_in_memory(directory.fd)
    try:
        _require_ours(directory, manifest)
        directory.remove(DATA, INDEX, MARK)
        _require_room(directory, geometry, layout, in_memory=in_memory)
        try:
            directory.write(MARK, manifest)
            directory.allocate(INDEX, layout.nbytes, in_memory=in_memory)
            directory.allocate(DATA, geometry.data_bytes, in_memory=in_memory)
            _format(directory, layout)
            os.rename(MARK, MANIFEST, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        except (OSError, ConfigError):
            directory.remove(DATA, INDEX, MARK)
            raise
        os.fsync(directory.fd)
    except OSError as exc:
        if exc.errno in _NO_ROOM:
            raise _no_room(directory, geometry, layout, str(exc)) from exc
        raise path_error(directory.root, f"a slab cannot be made in it: {exc}") from exc


def _require_ours(directory: Directory, manifest: bytes) -> None:
    names = directory.names()
    if MARK in names:
        found, start = directory.read(MARK), manifest[: manifest.index(b",") + 1]
        if found.startswith(start) or (names == {MARK} and start.startswith(found)):
            return
    if names:
        raise foreign(directory.root, f"it has {min(names)!r}, but no {MANIFEST}")


def _format(directory: Directory, layout: IndexLayout) -> None:
    lock = FileLock(directory.open(INDEX), directory.root / INDEX, 0.0)
    with contextlib.closing(lock):
        index = SlotIndex(memoryview(mmap.mmap(lock.fd, 0)), layout, lock, list)
        index.format()
        index.admit(np.arange(layout.num_slots))
        index.header[Word.BOOT : Word.BOOT + 2] = boot_words()
        os.fsync(lock.fd)


def _require_room(
    directory: Directory, geometry: Geometry, layout: IndexLayout, *, in_memory: bool
) -> None:
    system = os.fstatvfs(directory.fd)
    rooms = [Room(system.f_bavail * system.f_frsize, "the file system")]
    if in_memory:
        rooms += memory_rooms(_SYSTEM)
    least = min(rooms, key=lambda room: room.left)
    if least.left < geometry.data_bytes + layout.nbytes + _SPARE_BYTES:
        raise _no_room(
            directory, geometry, layout, f"free are {least.left} bytes of {least.what}"
        )


def _no_room(
    directory: Directory, geometry: Geometry, layout: IndexLayout, found: str
) -> ConfigError:
    needed = geometry.data_bytes + layout.nbytes + _SPARE_BYTES
    return ConfigError(
        "store.capacity",
        geometry.data_bytes,
        f"{geometry.num_slots} slots of {geometry.slot_bytes} bytes + index "
        f"{layout.nbytes} + {_SPARE_BYTES} = {needed} bytes needed in "
        f"{directory.root}, but {found}",
        "Ask for less, free some, raise the limit, or use a path on a larger file system.",
    )
