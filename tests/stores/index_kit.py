# SPDX-License-Identifier: Apache-2.0
"""An index by itself, without a slab."""

import os
from collections.abc import Iterable

import numpy as np

from ucm import native
from ucm.blocks import PackedKey
from ucm.stores.slab import _quick
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout
from ucm.stores.slab._locks import FileLock
from ucm.stores.slab._quick import Quick
from ucm.uses import Uses

OWNER = 1
_GUARD = 1 << 16


def find_dead(owners: Iterable[int]) -> list[int]:
    """Return that everybody lives."""
    return []


class Index:
    """An index in plain memory, and blocks that are only keys."""

    def __init__(self, path, num_slots: int, data: bytes | None = None) -> None:
        layout = IndexLayout(num_slots)
        self.data = bytearray(data or bytes(layout.nbytes))
        file = FileLock(os.open(path, os.O_RDWR | os.O_CREAT), path, 60.0)
        self.index = SlotIndex(memoryview(self.data), layout, file, find_dead)
        if data is None:
            self.index.format()
            self.index.admit(np.arange(num_slots))

    def save(self, keys: list[PackedKey], uses: Uses | None = None) -> int:
        """Reserve and publish; return how many were granted."""
        index = self.index
        grant = index.reserve(index.batch(keys), 1, OWNER, uses)
        index.publish(grant, np.zeros(len(grant.slots), dtype=np.uint64), OWNER)
        return len(grant.slots)

    def has(self, keys: list[PackedKey]) -> list[bool]:
        """Return which keys are committed."""
        return self.index.look_up(self.index.batch(keys)).committed.tolist()


class Apart:
    """A copy of an index, each array between others that nobody may write to."""

    def __init__(self, made: Index, library: native.Native) -> None:
        layout, self._guards = made.index.layout, []
        self._room = np.full(2 * len(made.data) + 20 * _GUARD, 0xA5, dtype=np.uint8)
        self.arrays, at = {}, _GUARD
        for name in _quick._ARRAYS:
            offset, dtype, length = layout.place()[name]
            nbytes = dtype.itemsize * length
            part = self._room[at : at + nbytes]
            part[:] = np.frombuffer(made.data, np.uint8, nbytes, offset)
            self.arrays[name] = part.view(dtype)
            self._guards.append(self._room[at - _GUARD : at])
            at += nbytes + -nbytes % 64 + _GUARD
            self._guards.append(self._room[at - _GUARD : at])
        self.quick = Quick(library, self.arrays, layout)

    def is_whole(self) -> bool:
        """Return whether nothing stands between the arrays."""
        return all((guard == 0xA5).all() for guard in self._guards)
