# SPDX-License-Identifier: Apache-2.0
"""
Putting a slab in order that nobody uses, and cutting it anew, under the directory's lock.

What counts is the manifest. It names the revision of the indexes, so that one of another
size is made beside what is there and comes into force with one ``rename``; a death
before leaves the slab as it was, but for blocks that would have gone, a death after it
leaves files that the next opener removes.
"""

import contextlib
import os
from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt

from ucm.stores.slab._arena import Arena, drop_what_others_own
from ucm.stores.slab._classes import (
    ClassIndex,
    extents_of,
    make_index,
    take_along,
    uses_of,
)
from ucm.stores.slab._creation import making, require_room
from ucm.stores.slab._extents import NOBODY, UNUSED, Geometry, place_extents
from ucm.stores.slab._files import (
    DATA,
    INDEX_NAME,
    MANIFEST,
    NEW,
    Directory,
    Manifest,
    too_short,
)
from ucm.stores.slab._layout import IndexLayout, Word

__all__ = ["settle"]

_COPIED_BYTES = 8 << 20


@attrs.frozen(eq=False)
class _Slab:
    """A slab that nobody uses: its directory, what it is, its data and its classes."""

    directory: Directory
    manifest: Manifest
    data_fd: int
    classes: list[ClassIndex]

    @property
    def geometry(self) -> Geometry:
        """How it is cut, for no class in particular."""
        return _cut_of(self.manifest)


def _cut_of(manifest: Manifest) -> Geometry:
    return Geometry(manifest.data_bytes, manifest.extent_bytes, manifest.extent_bytes)


def settle(
    directory: Directory,
    manifest: Manifest,
    wanted: Geometry | None,
    data_fd: int,
    arena_fd: int,
) -> Manifest:
    """
    Make a slab that nobody uses what it should be.

    Args:
        directory: Its directory, locked.
        manifest: What it is.
        wanted: What it should hold; None to take it as it is.
        data_fd: Its data.
        arena_fd: Its arena, which is written anew.

    Returns:
        What it is now.

    Raises:
        ConfigError: Its files are damaged, or it cannot be made larger.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(making(directory, wanted or _cut_of(manifest)))
        _remove_leftovers(directory, manifest)
        _fit_data(directory, manifest.data_bytes, data_fd)
        classes = list(_open_classes(directory, manifest, stack))
        classes = [each for each in classes if not _dismiss(directory, each, wanted)]
        slab = _Slab(directory, manifest, data_fd, classes)
        owners = _owners_of(slab)
        if wanted and _must_change(manifest, wanted):
            manifest, owners = _cut_anew(slab, wanted, owners)
        populated = np.array(
            [_is_there(data_fd, manifest, extent) for extent in range(len(owners))],
            dtype=np.bool_,
        )
        text = Arena.encode(owners, populated)
        os.ftruncate(arena_fd, 0)
        os.posix_fallocate(arena_fd, 0, len(text))
        os.pwrite(arena_fd, text, 0)
    return manifest


def _must_change(manifest: Manifest, wanted: Geometry) -> bool:
    return (
        manifest.data_bytes != wanted.data_bytes
        or manifest.of_class(wanted.slot_bytes) is None
    )


def _remove_leftovers(directory: Directory, manifest: Manifest) -> None:
    directory.remove(MANIFEST + NEW)
    for name in directory.names():
        match = INDEX_NAME.fullmatch(name)
        if match and name != manifest.index_of(int(match[1])):
            directory.remove(name)


def _fit_data(directory: Directory, nbytes: int, data_fd: int) -> None:
    """Cut off what a change that was never finished had added."""
    there = os.fstat(data_fd).st_size
    if there < nbytes:
        raise too_short(directory.root, DATA)
    if there > nbytes:
        os.ftruncate(data_fd, nbytes)


def _open_classes(
    directory: Directory, manifest: Manifest, stack: contextlib.ExitStack
) -> Iterator[ClassIndex]:
    for name, geometry in manifest.classes(directory):
        opened = ClassIndex.open(directory, name, geometry, 5.0, at_once=False)
        yield stack.enter_context(opened.closing())


def _dismiss(directory: Directory, opened: ClassIndex, wanted: Geometry | None) -> bool:
    """Remove an index that has no block and is not wanted now; return whether it was."""
    with opened.index.locked():
        is_empty = not opened.index.words[Word.NUM_COMMITTED]
    if is_empty and wanted and opened.geometry.slot_bytes != wanted.slot_bytes:
        directory.remove(opened.name)
        return True
    return False


def _owners_of(slab: _Slab) -> npt.NDArray[np.int64]:
    """Return who has which extent, as the indexes say; the first one if two say so."""
    owners = np.full(slab.geometry.num_extents, NOBODY)
    for opened in slab.classes:
        extents = extents_of(opened)
        free = extents[owners[extents] == NOBODY]
        owners[free] = opened.geometry.slot_bytes
        drop_what_others_own(opened, owners)
    return owners


def _cut_anew(
    slab: _Slab, wanted: Geometry, owners: npt.NDArray[np.int64]
) -> tuple[Manifest, npt.NDArray[np.int64]]:
    """Give a slab another size; of what it holds stays what was used last and fits."""
    old, data_fd = slab.geometry, slab.data_fd
    keeps = slab.manifest.of_class(wanted.slot_bytes) is not None
    new = attrs.evolve(wanted, extent_bytes=old.extent_bytes) if keeps else wanted
    manifest = Manifest.of(new, slab.manifest.revision + 1)
    places = place_extents(_uses(slab, owners), new.num_extents) if keeps else {}
    if more := max(0, new.data_bytes - old.data_bytes):
        layouts = [
            IndexLayout(geometry.num_slots)
            for opened in slab.classes
            if (geometry := manifest.of_class(opened.geometry.slot_bytes))
        ]
        needed = more + sum(layout.nbytes for layout in layouts)
        require_room(slab.directory, needed)
        os.ftruncate(data_fd, new.data_bytes)
    _move_extents(slab, owners, places, new.data_bytes)
    new_owners = np.full(new.num_extents, NOBODY)
    for opened in slab.classes:
        size = opened.geometry.slot_bytes
        mine = {at: to for at, to in places.items() if owners[at] == size}
        geometry = manifest.of_class(size)
        if mine and geometry and geometry.num_slots:
            _take_index(slab, manifest, opened, mine, geometry)
            new_owners[[*mine.values()]] = size
    slab.directory.replace(MANIFEST, manifest.encode())
    os.ftruncate(data_fd, new.data_bytes)
    _remove_leftovers(slab.directory, manifest)
    return manifest, new_owners


def _uses(slab: _Slab, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    used_ns = np.full(len(owners), UNUSED)
    for opened in slab.classes:
        extents = np.flatnonzero(owners == opened.geometry.slot_bytes)
        used_ns[extents] = uses_of(opened, extents, -1)
    return used_ns


def _move_extents(
    slab: _Slab, owners: npt.NDArray[np.int64], places: dict[int, int], data_bytes: int
) -> None:
    """Copy extents to their new places, once nothing is stored there any more."""
    extent_bytes = slab.manifest.extent_bytes
    for opened in slab.classes:
        own = np.flatnonzero(owners == opened.geometry.slot_bytes)
        for extent in own.tolist():
            if extent not in places:
                opened.index.withdraw(opened.geometry.slots_of(extent))
    for extent, place in places.items():
        if place != extent:
            start, into = extent * extent_bytes, place * extent_bytes
            stop = start + min(extent_bytes, data_bytes - into)
            _copy(slab.data_fd, start, min(stop, slab.manifest.data_bytes), into)


def _copy(fd: int, start: int, stop: int, into: int) -> None:
    while start < stop:
        data = os.pread(fd, min(_COPIED_BYTES, stop - start), start)
        start += len(data)
        while data:
            written = os.pwrite(fd, data, into)
            data, into = data[written:], into + written


def _take_index(
    slab: _Slab,
    manifest: Manifest,
    opened: ClassIndex,
    places: dict[int, int],
    geometry: Geometry,
) -> None:
    name = manifest.index_of(geometry.slot_bytes)
    slab.directory.remove(name)
    make_index(slab.directory, name, geometry)
    new = ClassIndex.open(slab.directory, name, geometry, 5.0, at_once=False)
    with new.closing():
        take_along(opened, new, places)


def _is_there(data_fd: int, manifest: Manifest, extent: int) -> bool:
    """Return whether a file in memory has all pages of an extent."""
    start = extent * manifest.extent_bytes
    stop = min(start + manifest.extent_bytes, manifest.data_bytes)
    return os.lseek(data_fd, start, os.SEEK_HOLE) >= stop
