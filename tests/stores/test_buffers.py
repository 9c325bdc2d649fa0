# SPDX-License-Identifier: Apache-2.0
"""Which memory a store offers to be pinned."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.rig import BLOCK_BYTES, keys_of
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
from ucm.stores.slab._files import is_in_memory
from ucm.stores.wrap import WrapperStore


def check_buffers(store: Store) -> None:
    """Check that the slots of leases lie in the buffers."""
    (buffer,) = store.buffers
    with store.reserve(keys_of(1, 2), BLOCK_BYTES) as lease:
        assert np.shares_memory(buffer, lease.slots.pool)
        assert buffer.ctypes.data == lease.slots.pool.ctypes.data
        lease.slots.pool[lease.slots.slots] = 0
        lease.seal(0, 2)
        assert 2 == lease.commit()
    with store.read(keys_of(1)) as found:
        assert buffer.ctypes.data == found.slots.pool.ctypes.data


def open_slab(path: Path, *, index_only: bool = False) -> SlabStore:
    """Open a small slab."""
    return SlabStore(
        path=str(path / "slab"),
        capacity_bytes=1 << 20,
        block_bytes=BLOCK_BYTES,
        index_only=index_only,
    )


def test_memory_store_and_its_wrappers_offer_the_pool() -> None:
    """S2-04: all slots lie in one piece of memory, which a wrapper does not hide."""
    with WrapperStore(MemoryStore(8, BLOCK_BYTES)) as store:
        check_buffers(store)


def test_slab_in_memory_offers_its_slots() -> None:
    """S2-04: a slab below /dev/shm is memory that stays where it is."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as home,
        open_slab(Path(home)) as store,
    ):
        check_buffers(store)
        with open_slab(Path(home), index_only=True) as index:
            assert () == index.buffers


def test_slab_on_a_disk_offers_nothing(tmp_path: Path) -> None:
    """The page cache of a disk is larger than memory, and is not to be locked."""
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        in_memory = is_in_memory(directory)
    finally:
        os.close(directory)
    if in_memory:
        pytest.skip("temporary files are in memory here")
    with open_slab(tmp_path) as store:
        assert () == store.buffers
