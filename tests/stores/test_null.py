# SPDX-License-Identifier: Apache-2.0
"""The null store passes what a store must that keeps nothing."""

from pathlib import Path

import pytest

from ucm.blocks import PackedKey
from ucm.config import StoreConfig
from ucm.errors import LeaseExpiredError, StoreFullError
from ucm.stores.abc import Store
from ucm.stores.null import NullStore
from ucm.testing.lease_contract import NUM_BLOCKS, LeaseContract
from ucm.testing.store_blocks import BLOCK_BYTES, fill, make_keys, payload, save


class TestNullStore(LeaseContract):
    """The contract of leases, over a pool in this process."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a store that fits exactly."""
        return NullStore(num_blocks, BLOCK_BYTES)

    def get_raw(self, store: Store, key: PackedKey) -> bytes | None:
        """Read the pool's row, if there were one."""
        entry = store._entries.get(key)
        return store._pool[entry.slot].tobytes() if entry else None

    def test_save_is_counted_and_evicted_at_once(self, store: Store) -> None:
        """Each block is granted, written and counted anew, however often it comes."""
        keys = make_keys(3)
        for saves in (1, 2):
            with store.reserve(keys, BLOCK_BYTES) as lease:
                assert (tuple(keys), 0) == (lease.keys, lease.num_stored)
                fill(lease)
                assert payload(keys[2]) == lease.slots.block(2).tobytes()
                assert 3 == lease.commit()
            assert 3 * saves == store.stats().evicted_blocks_total
        assert 0 == store.forget(keys) == store.clear(b"")

    def test_ended_lease_stays_ended(self, store: Store) -> None:
        """A lease commits once and gives its slots back once."""
        lease = store.reserve(make_keys(NUM_BLOCKS), BLOCK_BYTES)
        fill(lease)
        lease.commit()
        with store.reserve(make_keys(NUM_BLOCKS, first=20), BLOCK_BYTES) as other:
            lease.discard()
            with pytest.raises(LeaseExpiredError):
                lease.commit()
            with pytest.raises(StoreFullError):
                store.reserve(make_keys(1, first=40), BLOCK_BYTES)
            fill(other)
            assert NUM_BLOCKS == other.commit()
        assert NUM_BLOCKS == save(store, make_keys(NUM_BLOCKS, first=60))

    def test_slots_are_used_in_turn(self, store: Store) -> None:
        """A save writes the memory that was longest unused, not what a cache holds."""
        seen = []
        for first in range(NUM_BLOCKS):
            with store.reserve(make_keys(1, first=first), BLOCK_BYTES) as lease:
                seen.extend(lease.slots.slots.tolist())
                fill(lease)
                lease.commit()
        assert list(range(NUM_BLOCKS)) == sorted(seen)


class TestOpening:
    @pytest.mark.parametrize(
        ("capacity", "block_bytes", "index_only", "blocks"),
        [
            (10 << 20, 1 << 20, False, 10),
            pytest.param(1 << 40, 64 << 20, False, 4, marks=pytest.mark.slow),
            (1, 1 << 20, False, 1),
            (1 << 40, 1 << 20, True, 1),
        ],
    )
    def test_pool_is_bounded(self, capacity, block_bytes, index_only, blocks):
        """Nothing is kept, so no more memory is taken than is written at once; whoever
        only asks takes next to none."""
        with NullStore.open_configured(
            StoreConfig(type="null", capacity=capacity),
            block_bytes=block_bytes,
            index_only=index_only,
        ) as store:
            assert blocks == store.stats().capacity_blocks
            assert block_bytes == store.capabilities.max_block_bytes
