# SPDX-License-Identifier: Apache-2.0
"""The memory store passes the contract."""

from pathlib import Path

import numpy as np
import pytest

from ucm.blocks import PackedKey
from ucm.errors import ConfigError
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save
from ucm.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    """The contract, over a pool in this process."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a store that fits exactly."""
        return MemoryStore(num_blocks, BLOCK_BYTES)

    def make_tenant_store(
        self, directory: Path, num_blocks: int, share: float
    ) -> Store:
        """Return one that bounds its tenants."""
        return MemoryStore(num_blocks, BLOCK_BYTES, tenant_share=share)

    def get_raw(self, store: Store, key: PackedKey) -> bytes | None:
        """Read the pool's row."""
        entry = store._entries.get(key)
        return store._pool[entry.slot, : entry.nbytes].tobytes() if entry else None

    def put_raw(self, store: Store, key: PackedKey, data: bytes) -> None:
        """Write the pool's row."""
        row = store._pool[store._entries[key].slot]
        row[: len(data)] = np.frombuffer(data, dtype=np.uint8)


@pytest.mark.parametrize(
    ("capacity", "nbytes", "key"),
    [(0, 1, "store.capacity_blocks"), (1, 0, "store.block_bytes")],
)
def test_store_without_room_is_refused(capacity, nbytes, key):
    """A store that can hold nothing is refused with the setting's name."""
    with pytest.raises(ConfigError) as caught:
        MemoryStore(capacity, nbytes)
    assert key == caught.value.key


def test_slot_given_back_twice_is_free_once():
    """A lease that ended, whichever way, frees no slot that serves others since."""
    keys = make_keys(4)
    store = MemoryStore(2, BLOCK_BYTES)
    lease = store.reserve(keys[:1], BLOCK_BYTES)
    for _ in range(2):
        lease.discard()
    save(store, keys[:2])
    assert [payload(key) for key in keys[:2]] == load(store, keys[:2])
    with store.reserve(keys[2:3], BLOCK_BYTES) as lease:
        lease.seal(0, 1)
        lease.commit()
        lease.discard()
    save(store, keys[3:])
    assert [False, False, True, True] == store.contains(keys)
