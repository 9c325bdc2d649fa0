# SPDX-License-Identifier: Apache-2.0
"""What users of the package write: ids, keys, a store as a context manager."""

from collections.abc import Sequence

from ucm import BlockKey, BlockSpan
from ucm.blocks import BlockHash, BlockId, GroupId, PackedKey, ShardId
from ucm.errors import BlockNotFoundError
from ucm.stores.memory import MemoryStore
from ucm.stores.wrap import WrapperStore


class CountingStore(WrapperStore):
    """A wrapper that overrides one verb."""

    asked = 0

    def match(self, keys: Sequence[PackedKey]) -> int:
        """Count and forward."""
        self.asked += 1
        return super().match(keys)


def use(digest: bytes, block_hash: bytes) -> BlockSpan:
    """Build a key and a span over it."""
    key = BlockKey(digest, GroupId(0), ShardId(0), BlockHash(block_hash)).pack()
    with CountingStore(MemoryStore(1, 1)) as store:
        try:
            store.read([key]).close()
        except BlockNotFoundError as exc:
            key = PackedKey(exc.key)
    return BlockSpan(GroupId(0), (BlockId(1),), (key,))
