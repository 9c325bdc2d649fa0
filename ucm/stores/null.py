# SPDX-License-Identifier: Apache-2.0
"""
A store that takes every save at its full price and keeps nothing.

For sizing: bytes are gathered, put into slots and checksummed as they are for memory
that keeps them, and each commit is an eviction at once. Nothing is ever found, so each
prompt is saved anew and nothing is loaded.
"""

from collections.abc import Sequence

import attrs

from ucm.blocks import PackedKey
from ucm.config import StoreConfig
from ucm.stores.abc import StoreCapabilities
from ucm.stores.memory import MemoryStore

__all__ = ["NullStore"]

_POOL_BYTES = 256 << 20


class NullStore(MemoryStore):
    """
    Slots that are used in turn, so that a save writes memory that no cache holds.

    Args:
        capacity_blocks: Number of slots; more cannot be written at once.
        block_bytes: Bytes of one slot, the largest block.

    Raises:
        ConfigError: One of the two is below 1.
    """

    @classmethod
    def open_configured(
        cls, config: StoreConfig, *, block_bytes: int, index_only: bool
    ) -> "NullStore":
        """
        Open a store of this process, with up to 256 MiB of slots.

        That is more than the pipeline of a default configuration writes at once. A save
        that finds every slot taken is refused, as it is by any store.
        """
        nbytes = 0 if index_only else min(config.capacity, _POOL_BYTES)
        return cls(max(1, nbytes // block_bytes), block_bytes)

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do."""
        return attrs.evolve(super().capabilities, keeps=False)

    def _published(self, keys: Sequence[PackedKey]) -> None:
        gone = [self._entries.pop(key).slot for key in keys]
        self._moments.clear()
        self._free[:0] = gone
        self._num_evicted += len(gone)
