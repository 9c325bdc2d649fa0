# SPDX-License-Identifier: Apache-2.0
"""
What became of blocks that a slab no longer has: a sketch that all its processes share.

Whoever evicts, forgets or clears puts it down, under the lock that it holds anyway; who
looks takes none. It is for people: a file that is lost, cut short or not ours, and a
death between two lines, cost the reason of a miss and nothing else. So it stands outside
of what says what a slab is, and a release that does not know it passes it over.

Entries are four times the slots of whoever makes it, rounded up to a power of two, sixteen
thousand at least and a million at most. How much is forgotten is told in its module; fingerprints are the
hashes of the index. Moments are those of its clock, without the time the machine was off.
"""

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Final

import numpy as np
import numpy.typing as npt

from ucm.errors import ConfigError
from ucm.fates import ENTRY_BYTES, Fate, Sketch, Told, packed
from ucm.native import address_of
from ucm.stores.slab._files import FATES, NEW, Directory, map_file, seek

__all__ = ["Fates", "fates_nbytes", "make_fates", "map_fates"]

_FEWEST: Final = 1 << 14
_MOST: Final = 1 << 20
_KEPT: Final = (Fate.EVICTED, Fate.FORGOTTEN, Fate.CLEARED, Fate.CORRUPT)
_CODES: Final = {fate: code for code, fate in enumerate(_KEPT, start=1)}
_NS_PER_MS: Final = 1_000_000
_UNKNOWN: Final = Told(Fate.UNKNOWN)
_NEVER: Final = Told(Fate.NEVER)
_Four = ctypes.c_uint64 * 4


def fates_nbytes(num_slots: int) -> int:
    """Return the size of the file for a slab of so many slots."""
    entries = min(max(4 * num_slots, _FEWEST), _MOST)
    return ENTRY_BYTES << (entries - 1).bit_length()


class Fates:
    """
    The mapped sketch, or none.

    Args:
        mapping: The file; None if there is none that can be used.
        fd: Of the file, of which a copy is kept.
    """

    __slots__ = ("__weakref__", "_fd", "_nbytes", "_rows", "_sketch", "_words")

    def __init__(self, mapping: mmap.mmap | None = None, fd: int = -1) -> None:
        self._sketch: Sketch | None = None
        if mapping is not None:
            self._fd, self._nbytes = os.dup(fd), len(mapping)
            weakref.finalize(self, os.close, self._fd)
            words = np.frombuffer(mapping, dtype=np.uint64).reshape(2, -1)
            self._sketch = Sketch(words)
            self._words = words  # who has been given its place may write there late
            self._rows = *map(address_of, words), words.shape[1] - 1

    def put(self, prints: npt.NDArray[np.uint64], fate: Fate, now_ns: int) -> None:
        """Put down what becomes of blocks with these hashes."""
        if len(prints) and (sketch := self._usable()) is not None:
            sketch.put(prints, _CODES[fate], now_ns // _NS_PER_MS)

    def place(self, fate: Fate, now_ns: int) -> "ctypes.Array[ctypes.c_uint64] | None":
        """Return where and what native code is to put down, as ``struct fates`` has it."""
        if self._usable() is None:
            return None
        return _Four(*self._rows, packed(_CODES[fate], now_ns // _NS_PER_MS))

    def of(self, fingerprint: int, now_ns: int) -> Told:
        """Return what became of a block that is not there."""
        sketch = self._sketch  # as ``_usable``, without its call
        if sketch is None or seek(self._fd, 0, os.SEEK_END) < self._nbytes:
            self._sketch = None
            return _UNKNOWN
        found = sketch.get(fingerprint)
        if found is None or not 1 <= found[0] <= len(_KEPT):
            return _NEVER
        code, moment_ms = found
        return Told(_KEPT[code - 1], max(0, now_ns // _NS_PER_MS - moment_ms) / 1000)

    def _usable(self) -> Sketch | None:
        """
        Return the sketch, unless its file was cut: a page that is gone ends us.

        Asked with the interpreter lock held, which others would not give back at once.
        """
        if self._sketch is not None and seek(self._fd, 0, os.SEEK_END) < self._nbytes:
            self._sketch = None
        return self._sketch


def make_fates(directory: Directory, num_slots: int) -> None:
    """
    Make the sketch of a slab, if it has none that can be used.

    Best effort; to be called under the directory's lock.
    """
    with contextlib.suppress(OSError):
        if not _is_there(directory):
            directory.remove(FATES, FATES + NEW)
            directory.allocate(FATES + NEW, fates_nbytes(num_slots))
            directory.rename(FATES + NEW, FATES)


def map_fates(directory: Directory, *, at_once: bool) -> Fates:
    """Open the sketch that a slab has; one that cannot be used is none."""
    with contextlib.suppress(OSError, ConfigError):
        fd = directory.open(FATES)
        try:
            if _has_size(fd):
                return Fates(map_file(fd, at_once=at_once), fd)
        finally:
            os.close(fd)
    return Fates()


def _is_there(directory: Directory) -> bool:
    """Return whether there is a sketch, or something that is not to be touched."""
    try:
        fd = directory.open(FATES, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except ConfigError:  # a link, or somebody else's
        return True
    try:
        return _has_size(fd)
    finally:
        os.close(fd)


def _has_size(fd: int) -> bool:
    nbytes = os.fstat(fd).st_size
    in_bounds = ENTRY_BYTES * _FEWEST <= nbytes <= ENTRY_BYTES * _MOST
    return in_bounds and nbytes & (nbytes - 1) == 0
