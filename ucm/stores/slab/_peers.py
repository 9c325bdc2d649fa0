# SPDX-License-Identifier: Apache-2.0
"""The indexes of a slab, one of each size of slots, opened to look only: takes no lock."""

import contextlib
import mmap
import os
from collections.abc import Iterable
from typing import Final

import attrs

from ucm.blocks import PackedKey
from ucm.errors import ConfigError
from ucm.fates import Fate, Told
from ucm.stores.slab._extents import Geometry
from ucm.stores.slab._fates import map_fates
from ucm.stores.slab._files import (
    MANIFEST,
    Directory,
    Manifest,
    map_file,
    path_error,
)
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout
from ucm.stores.slab._locks import FileLock

__all__ = ["Peer", "open_peers"]

_MOST: Final = 16


@attrs.frozen(eq=False)
class Peer:
    """
    An index that somebody else may be changing.

    Its mapping goes with the last who has it; one that the slab has replaced stays as
    it was.

    Args:
        name: Of the file.
        mapping: Of it.
        index: What is in it.
    """

    name: str
    mapping: mmap.mmap
    index: SlotIndex

    @classmethod
    def open(cls, directory: Directory, name: str, geometry: Geometry) -> "Peer":
        """
        Open an index.

        Raises:
            ConfigError: It is no index of that size.
            OSError: It cannot be opened.
        """
        fd = directory.open(name)
        try:
            mapping = map_file(fd, at_once=False)
        finally:
            os.close(fd)
        layout = IndexLayout(geometry.num_slots)
        if len(mapping) != layout.nbytes:
            raise path_error(directory.root, f"{name} has another size than it should")
        no_lock = FileLock(-1, directory.root / name, 0.0)
        index = SlotIndex(memoryview(mapping), layout, no_lock, list)
        if not index.is_formatted():
            raise path_error(directory.root, f"{name} is no index")
        index.fates = map_fates(directory, at_once=False)
        return cls(name, mapping, index)

    def fate_of(self, key: PackedKey) -> Told:
        """Return what has become of a block, as far as this index knows; a hint."""
        if self.mapping.size() < len(self.mapping):  # a page that is gone ends us
            return Told(Fate.UNKNOWN)
        return self.index.fate_of(key)


def open_peers(directory: Directory, known: Iterable[Peer] = ()) -> tuple[Peer, ...]:
    """
    Open the indexes that a slab has, those that are not *known* yet.

    Raises:
        ConfigError: There is no slab, or one of another release.
    """
    manifest = Manifest.read(directory)
    if manifest is None:
        raise path_error(directory.root, f"it has no {MANIFEST}")
    by_name = {peer.name: peer for peer in known}
    peers = []
    for name, geometry in manifest.classes(directory):
        with contextlib.suppress(OSError, ConfigError):  # it went, or is damaged
            peers.append(by_name.get(name) or Peer.open(directory, name, geometry))
    return tuple(peers[:_MOST])
