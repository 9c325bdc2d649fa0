# SPDX-License-Identifier: Apache-2.0
"""Which memory a store offers to be pinned."""

from pathlib import Path

import numpy as np

from tests.rig import BLOCK_BYTES, keys_of
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.stores.slab import SlabStore
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


def test_slab_offers_its_slots(tmp_path: Path) -> None:
    """S2-04: a slab is memory that stays where it is."""
    with open_slab(tmp_path) as store:
        check_buffers(store)
        with open_slab(tmp_path, index_only=True) as index:
            assert () == index.buffers
