# SPDX-License-Identifier: Apache-2.0
"""An index by itself, without a slab."""

import os
from collections.abc import Iterable

import numpy as np

from ucm.blocks import PackedKey
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import IndexLayout
from ucm.stores.slab._locks import FileLock
from ucm.uses import Uses

OWNER = 1


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
