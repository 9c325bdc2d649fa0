# SPDX-License-Identifier: Apache-2.0
"""
How a slab comes to be, in a directory that is ours, under the directory's lock.

Order: a file that says what is being made (``MARK``), arena, data, index; then the mark
gets the manifest's name. A creation that was killed leaves the mark, by which the next
one knows what it may remove; without it nothing in a directory is touched. Data in
memory are made without their memory: see the module that populates them.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ucm.errors import ConfigError
from ucm.stores.slab._arena import Arena
from ucm.stores.slab._classes import make_index
from ucm.stores.slab._extents import NOBODY, Geometry
from ucm.stores.slab._fates import fates_nbytes
from ucm.stores.slab._files import (
    ARENA,
    DATA,
    INDEX_NAME,
    MANIFEST,
    MARK,
    NEW,
    Directory,
    Manifest,
    foreign,
    no_access,
)
from ucm.stores.slab._layout import IndexLayout
from ucm.stores.slab._room import Room, memory_rooms, mount_room

__all__ = [
    "SYSTEM",
    "find_or_create",
    "least_room",
    "making",
    "require_ours",
    "require_room",
]

SYSTEM = Path("/")
_SPARE_BYTES = 1 << 20  # the directory and what is small in it
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFAULT, errno.ENOMEM, errno.EFBIG}


class _NoRoomError(ConfigError):
    """There is no room for what was asked for."""


def find_or_create(
    directory: Directory,
    geometry: Geometry | None,
) -> Manifest:
    """
    Return what the slab in a directory is; make one if there is none.

    Args:
        directory: Where, locked.
        geometry: How it is cut if it is made; None: make none.

    Raises:
        ConfigError: The directory is not ours, there is no slab and none is to be made,
            or there is no room or no permission; what was there before is still there,
            and nothing else is.
    """
    found = Manifest.read(directory)
    if found is not None:
        return found
    if geometry is None:
        raise foreign(directory.root, f"it has no {MANIFEST}")
    return _create(directory, geometry)


def _create(directory: Directory, geometry: Geometry) -> Manifest:
    manifest = Manifest.of(geometry)
    index = manifest.index_of(geometry.slot_bytes)
    with making(directory, geometry):
        require_ours(directory, manifest.encode())
        made = (DATA, ARENA, *_indexes(directory), index, index + NEW, MARK)
        directory.remove(*made)
        require_room(directory, _needed(geometry))
        try:
            directory.write(MARK, manifest.encode())
            owners = np.full(geometry.num_extents, NOBODY)
            directory.write(ARENA, Arena.encode(owners, owners != NOBODY))
            directory.write(DATA, b"")
            fd = directory.open(DATA)
            try:
                os.ftruncate(fd, geometry.data_bytes)
            finally:
                os.close(fd)
            make_index(directory, index, geometry)
            directory.rename(MARK, MANIFEST)
        except (OSError, ConfigError):
            directory.remove(*made)
            raise
    return manifest


@contextlib.contextmanager
def making(directory: Directory, geometry: Geometry) -> Iterator[None]:
    """
    Say what went wrong while files are made or put in order.

    Raises:
        ConfigError: There is no room, or no permission.
    """
    capacity = geometry.data_bytes
    try:
        yield
    except _NoRoomError as exc:  # who found it knows no capacity
        raise _NoRoomError(exc.key, capacity, exc.problem, exc.remedy) from exc
    except OSError as exc:
        if exc.errno in _NO_ROOM:
            needed = _needed(geometry) + _SPARE_BYTES
            raise _no_room(directory, capacity, needed, str(exc)) from exc
        problem = "a slab cannot be made or used in it"
        raise no_access(directory.root, problem, exc) from exc


def require_room(directory: Directory, nbytes: int) -> None:
    """
    Make sure that so much can be made in a directory, without a kill for memory.

    Raises:
        ConfigError: It cannot; tells both numbers, and of which limit.
    """
    least = least_room(directory)
    if least.left < nbytes + _SPARE_BYTES:
        there = Manifest.read(directory)
        raise _no_room(
            directory,
            nbytes if there is None else there.data_bytes,
            nbytes + _SPARE_BYTES,
            f"free are {least.left} bytes of {least.what}",
        )


def least_room(directory: Directory) -> Room:
    """Return what is shortest: the file system, the machine's memory or a limit."""
    mount = mount_room(os.fstatvfs(directory.fd))
    return min([mount, *memory_rooms(SYSTEM)], key=lambda room: room.left)


def _needed(geometry: Geometry) -> int:
    """Return the bytes of the slots and of all that is kept of them."""
    index = IndexLayout(geometry.num_slots).nbytes
    return geometry.data_bytes + index + fates_nbytes(geometry.num_slots)


def require_ours(directory: Directory, manifest: bytes) -> None:
    """
    Make sure that a directory without a slab is one in which we may make it.

    Args:
        directory: Which.
        manifest: Of a slab; whoever began one left a mark that begins alike.

    Raises:
        ConfigError: It is somebody else's.
    """
    names = directory.names()
    if MARK in names:
        found, start = directory.read(MARK), manifest[: manifest.index(b",") + 1]
        if found.startswith(start) or (names == {MARK} and start.startswith(found)):
            return
    if names:
        raise foreign(directory.root, f"it has {min(names)!r}, but no {MANIFEST}")


def _indexes(directory: Directory) -> list[str]:
    """Return indexes that a creation for other blocks has left."""
    return [name for name in directory.names() if INDEX_NAME.fullmatch(name)]


def _no_room(
    directory: Directory, capacity: int, needed: int, found: str
) -> ConfigError:
    return _NoRoomError(
        "store.capacity",
        capacity,
        f"slots + index + {_SPARE_BYTES} = {needed} bytes needed in {directory.root}, "
        f"but {found}",
        "Ask for less, free some, raise the limit, or use a path on a larger file system.",
    )
