# SPDX-License-Identifier: Apache-2.0
"""
The index of one class: how it is made, opened, believed, and taken along.

An index covers all slots that its class had if it owned the whole slab; those in
extents that it does not own are absent.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ucm.errors import ConfigError
from ucm.stores.slab._extents import UNUSED, Geometry
from ucm.stores.slab._fates import map_fates
from ucm.stores.slab._files import NEW, Directory, map_file, no_access, path_error
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout, SlotState, Word
from ucm.stores.slab._locks import FileLock, Owners

__all__ = [
    "ClassIndex",
    "extents_of",
    "make_index",
    "map_again",
    "map_whole",
    "take_along",
    "uses_of",
]

_CARRIED = (Word.SEED, Word.GENERATION, Word.NUM_EVICTED, Word.OWNER)


@attrs.frozen(eq=False)
class ClassIndex:
    """
    An opened index file.

    Args:
        geometry: Of its class.
        name: Of the file.
        lock: Of the index; has the file open.
        owners: Who uses it.
        index: What is in it.
    """

    geometry: Geometry
    name: str
    lock: FileLock
    owners: Owners
    index: SlotIndex

    @classmethod
    def open(
        cls,
        directory: Directory,
        name: str,
        geometry: Geometry,
        timeout: float,
        *,
        at_once: bool,
    ) -> "ClassIndex":
        """
        Open an index; the caller closes its lock.

        Args:
            directory: Where it is.
            name: Of the file.
            geometry: Of its class.
            timeout: Longest wait for its lock.
            at_once: Let no look-up wait for a page.

        Raises:
            ConfigError: It is no index of that size.
        """
        try:
            lock = FileLock(directory.open(name), directory.root / name, timeout)
        except OSError as exc:
            raise no_access(directory.root, f"{name} cannot be opened", exc) from exc
        with contextlib.ExitStack() as undo:
            undo.callback(lock.close)
            layout = IndexLayout(geometry.num_slots)
            owners = Owners(lock.fd)
            make = partial(map_whole, at_once=at_once)
            memory = map_again(directory, name, lock.fd, layout.nbytes, make)
            index = SlotIndex(memory, layout, lock, owners.find_dead)
            if not index.is_formatted():
                raise path_error(directory.root, f"{name} is no index")
            index.fates = map_fates(directory, at_once=at_once)
            undo.pop_all()
        return cls(geometry, name, lock, owners, index)

    @contextlib.contextmanager
    def closing(self) -> Iterator["ClassIndex"]:
        """Close it in the end."""
        try:
            yield self
        finally:
            self.lock.close()


def map_whole(fd: int, *, at_once: bool) -> memoryview:
    """Do as ``map_file``."""
    return memoryview(map_file(fd, at_once=at_once))


def map_again(
    directory: Directory,
    name: str,
    held_fd: int,
    nbytes: int,
    make: Callable[[int], memoryview],
) -> memoryview:
    """
    Map a file that is open: anew, as a mapping keeps its descriptor, locks and all.

    Args:
        directory: Where it is.
        name: Of the file.
        held_fd: The descriptor that is open.
        nbytes: The file's size.
        make: Maps the file of a descriptor.

    Raises:
        ConfigError: It cannot be mapped, or has another size than it should.
    """
    try:
        fd = directory.open(name)
        try:
            is_held = os.path.samestat(os.fstat(fd), os.fstat(held_fd))
            mapping = make(fd)
        finally:
            os.close(fd)
    except ConfigError:  # a ValueError that says it better
        raise
    except (OSError, ValueError) as exc:  # ValueError: it is empty
        raise no_access(directory.root, f"{name} cannot be mapped", exc) from exc
    if len(mapping) != nbytes or not is_held:  # of the mapping: a file may shrink now
        raise path_error(directory.root, f"{name} has another size than it should")
    return mapping


def make_index(directory: Directory, name: str, geometry: Geometry) -> None:
    """
    Make the index of a class that has no extent yet; whole, or not at all.

    Raises:
        OSError: There is no room.
    """
    layout = IndexLayout(geometry.num_slots)
    directory.remove(name + NEW)
    try:
        directory.allocate(name + NEW, layout.nbytes)
        lock = FileLock(directory.open(name + NEW), directory.root / name, 0.0)
        with contextlib.closing(lock):
            index = SlotIndex(memoryview(mmap.mmap(lock.fd, 0)), layout, lock, list)
            index.format()
        directory.rename(name + NEW, name)
    except OSError:
        directory.remove(name + NEW)
        raise


def extents_of(opened: ClassIndex) -> npt.NDArray[np.int64]:
    """Return the extents of which the index uses some slot."""
    there = np.flatnonzero(opened.index.state != SlotState.ABSENT)
    return np.unique(there // opened.geometry.slots_per_extent)


def uses_of(opened: ClassIndex, extents: npt.NDArray[np.int64], pick: int) -> list[int]:
    """
    Return by extent when its block was used that was used last, or first.

    Args:
        opened: The class.
        extents: Which.
        pick: -1 for the last use, 0 for the first.

    Returns:
        Nanoseconds of the machine's clock, ``UNUSED`` where nothing is stored.
    """
    index, found = opened.index, []
    for extent in extents.tolist():
        slots = opened.geometry.slots_of(extent)
        part = slice(slots[0], slots[-1] + 1) if len(slots) else slice(0)
        stamps = index.stamps[part][index.state[part] == SlotState.COMMITTED]
        use = (stamps.min(), stamps.max())[pick] if len(stamps) else UNUSED
        found.append(int(use))
    return found


def take_along(old: ClassIndex, new: ClassIndex, places: dict[int, int]) -> None:
    """
    Copy what an index says of some extents into one for another number of slots.

    Args:
        old: Where it is; used by nobody.
        new: An index with no slots yet.
        places: The new place of each extent.
    """
    moved = [(old.geometry.slots_of(at), to) for at, to in places.items()]
    sources = np.concatenate([np.empty(0, np.int64), *(slots for slots, _ in moved)])
    per_extent = old.geometry.slots_per_extent
    targets = np.concatenate(
        [
            np.empty(0, np.int64),
            *(slots % per_extent + per_extent * to for slots, to in moved),
        ]
    )
    fits = targets < new.geometry.num_slots
    sources, targets = sources[fits], targets[fits]
    with new.index.locked():
        new.index.distrust_derived()
        new.index.header[[*_CARRIED]] = old.index.header[[*_CARRIED]]
        new.index.seed = old.index.seed
        for into, of in zip(_per_slot(new.index), _per_slot(old.index), strict=True):
            into[targets] = of[sources]
        new.index.rebuild(time.monotonic_ns())


def _per_slot(index: SlotIndex) -> list[npt.NDArray[Any]]:
    """Return the arrays that say something of each slot; the rest follows from them."""
    return [index.records, index.payers, index.stamps, index.state]
