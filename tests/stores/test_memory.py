# SPDX-License-Identifier: Apache-2.0
"""The memory store passes the contract."""

from pathlib import Path

import numpy as np
import pytest

from ucm.blocks import PackedKey
from ucm.errors import ConfigError
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.testing.store_blocks import BLOCK_BYTES
from ucm.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    """The contract, over a pool in this process."""

    def make_store(self, directory: Path, num_blocks: int) -> Store:
        """Return a store that fits exactly."""
        return MemoryStore(num_blocks, BLOCK_BYTES)

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
