# SPDX-License-Identifier: Apache-2.0
"""What a store holds after a run of the fake host, held against what belongs there."""

import hashlib
from collections.abc import Collection, Iterable

from ucm.blocks import BlockKey, PackedKey
from ucm.layout import KVLayout
from ucm.stores.memory import MemoryStore
from ucm.testing.host.content import Pages, Stream

__all__ = ["StoredBlocks", "WrongBlockError"]


class WrongBlockError(AssertionError):
    """A block is stored with other bytes than its tokens have."""


class StoredBlocks:
    """
    Knows what belongs under each key.

    Args:
        layout: Of the engine.
        streams: All texts.
    """

    def __init__(self, layout: KVLayout, streams: Iterable[Stream]) -> None:
        self._groups = {each.group_id: at for at, each in enumerate(layout.groups)}
        self._layout = layout
        self._pages = Pages(layout)
        self._states = {
            hashlib.sha256(state.to_bytes(8, "big")).digest(): state
            for stream in streams
            for state in stream.states
        }

    def check(self, store: MemoryStore, damaged: Collection[PackedKey]) -> int:
        """
        Look at all that is stored; return how many blocks that were.

        Args:
            store: With nothing under way that would change it.
            damaged: Keys that somebody has spoilt on purpose.

        Raises:
            WrongBlockError: A block is not what it should be.
        """
        looked_at = 0
        for packed, entry in store._entries.items():
            key = BlockKey.unpack(packed)
            at = self._groups[key.group_id]
            group = self._layout.groups[at]
            found = store._pool[entry.slot]
            state = self._states[key.block_hash]
            for row, offset in zip(group.rows, group.row_offsets, strict=True):
                end = offset + row.page_bytes
                expected = self._pages.expected(
                    key.shard_id, at, row.row_id, row.page_bytes, [state]
                )
                if packed not in damaged and (expected[0] != found[offset:end]).any():
                    raise WrongBlockError(
                        f"row {row.row_id} of shard {key.shard_id}, group "
                        f"{key.group_id} begins with {bytes(found[offset:][:8]).hex()}"
                    )
            looked_at += 1
        return looked_at
