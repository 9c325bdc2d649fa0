# SPDX-License-Identifier: Apache-2.0
"""A look at where a slab is, or is to be, before anybody opens it; changes nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from ucm.config import StoreConfig
from ucm.errors import ConfigError
from ucm.stores.slab import _creation
from ucm.stores.slab._creation import require_ours
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._files import (
    DATA,
    INDEX_NAME,
    Directory,
    Manifest,
    forbidden,
    no_directory,
    no_parent,
    path_error,
    require_memory,
    too_short,
)
from ucm.stores.slab._layout import IndexLayout
from ucm.stores.slab._memory import MemoryWishes, Mount, may_collapse, mount_of
from ucm.stores.slab._room import Room, memory_rooms, mount_room

__all__ = ["SlabLook", "look"]

_SOME = Manifest.of(Geometry(1, 1, 1)).encode()
"""Of a slab; only its beginning counts."""


@attrs.frozen(kw_only=True)
class SlabLook:
    """
    What there is, and what an engine would meet.

    Args:
        problems: Why it would not open it, or not as asked.
        mount: On what the path lies.
        needed_bytes: That must still be had until the capacity is full.
        rooms: What is left of the file system, and of memory and its limits; none where no
            slab can be.
        num_slots: For blocks of the size asked about; 0 if none was.
        data_bytes: Of the slab that is there; 0 if there is none.
        slot_sizes: That its blocks lie in.
        may_collapse: The kernel may make huge pages on request, whatever mounts say.
    """

    problems: tuple[ConfigError, ...] = ()
    mount: Mount = attrs.field(factory=Mount)
    needed_bytes: int = 0
    rooms: tuple[Room, ...] = ()
    num_slots: int = 0
    data_bytes: int = 0
    slot_sizes: tuple[int, ...] = ()
    may_collapse: bool = False


def look(
    config: StoreConfig,
    block_bytes: int | None = None,
    system: Path | None = None,
) -> SlabLook:
    """
    Look at the place that is configured.

    Args:
        config: Where it is, and how large.
        block_bytes: Of the largest part of a block that any rank stores, if known.
        system: Where ``proc`` and ``sys`` are; ``/`` if left out.
    """
    root, system = Path(config.path).absolute(), system or _creation.SYSTEM
    try:
        found = _found(root, block_bytes)
    except ConfigError as exc:
        found = SlabLook(problems=(exc,))
    except (OSError, ValueError) as exc:  # ValueError: a NUL in its name
        found = SlabLook(problems=(_unreadable(root, exc),))
    problems = [*found.problems, *_unfulfilled(config, root, system)]
    num_slots, index_bytes = 0, 0
    if block_bytes is not None:
        try:
            num_slots = Geometry.fit(config.capacity, block_bytes).num_slots
            index_bytes = IndexLayout(num_slots).nbytes
        except ConfigError as exc:
            problems.append(exc)
    try:
        require_memory(root)
        mount, rooms = _place_of(root, system)
    except ConfigError as exc:  # before anything is mended there
        return attrs.evolve(found, problems=(exc,), num_slots=num_slots)
    except (OSError, ValueError) as exc:
        told = tuple(problems) or (_unreadable(root, exc),)
        return attrs.evolve(found, problems=told, num_slots=num_slots)
    missing = max(0, config.capacity - _there(root))
    return attrs.evolve(
        found,
        problems=tuple(problems),
        mount=mount,
        needed_bytes=missing + (0 if found.data_bytes else index_bytes),
        rooms=rooms,
        num_slots=num_slots,
        may_collapse=may_collapse(system),
    )


def _place_of(root: Path, system: Path) -> tuple[Mount, tuple[Room, ...]]:
    """
    Return on what a path lies, and the room there.

    Raises:
        OSError: It cannot be asked.
    """
    room = mount_room(os.statvfs(root if root.is_dir() else root.parent))
    return mount_of(root, system), (room, *memory_rooms(system))


def _found(root: Path, block_bytes: int | None) -> SlabLook:
    """
    Return what is in the directory.

    Raises:
        ConfigError: It is somebody else's, damaged, or of another release.
        OSError: It cannot be read.
    """
    try:
        fd = os.open(root, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        if not root.parent.is_dir():
            raise no_parent(root) from exc
        _require_writable(root, root.parent)
        return SlabLook()
    except NotADirectoryError as exc:
        raise no_directory(root) from exc
    try:
        directory = Directory(root, fd)
        directory.check()
        _require_writable(root, root)
        manifest = Manifest.read(directory)
        if manifest is None:
            require_ours(directory, _SOME)
            return SlabLook()
        names = directory.names()
        info = os.stat(DATA, dir_fd=fd, follow_symlinks=False)
        if info.st_size < manifest.data_bytes:
            raise too_short(root, DATA)
    finally:
        os.close(fd)
    problems: tuple[ConfigError, ...] = ()
    if block_bytes is not None and manifest.of_class(block_bytes) is None:
        what = f"its extents of {manifest.extent_bytes} bytes hold no block of {block_bytes}"
        problems = (path_error(root, f"it was cut for another layout: {what}"),)
    sizes = {int(m[1]) for name in names if (m := INDEX_NAME.fullmatch(name))}
    return SlabLook(
        problems=problems,
        data_bytes=manifest.data_bytes,
        slot_sizes=tuple(sorted(sizes)),
    )


def _require_writable(root: Path, place: Path) -> None:
    """Refuse a place where this user can make no file, or nobody: it is mounted read-only."""
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        raise forbidden(root, f"{place} cannot be written to")


def _unfulfilled(
    config: StoreConfig, root: Path, system: Path
) -> Iterator[ConfigError]:
    """Yield what is asked of memory that the machine does not have."""
    try:
        MemoryWishes(config.huge_pages, config.numa).check(root, system)
    except ConfigError as exc:
        yield exc
    except (OSError, ValueError) as exc:
        yield _unreadable(root, exc)


def _unreadable(root: Path, exc: OSError | ValueError) -> ConfigError:
    return path_error(root, f"it cannot be looked at: {exc}")


def _there(root: Path) -> int:
    """Return the bytes that the slab's data have already."""
    try:
        return 512 * (root / DATA).lstat().st_blocks
    except (OSError, ValueError):
        return 0
