# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks in two parts, and who follows a ledger."""

from ucm.agent.ledger import Ledger
from ucm.agent.mirror import Mirror, News, Said
from ucm.agent.protocol import Told
from ucm.blocks import BlockHash, GroupId, KeyPacker, ShardId, keyspace_prefix

__all__ = ["DIGEST", "Follower", "hash_at", "key_of", "now"]

DIGEST = bytes(range(16))


def hash_at(number: int) -> bytes:
    """Return a block's hash."""
    return bytes([number]) * 32


def key_of(number: int, shard: int = 0, digest: bytes = DIGEST, group: int = 0):
    """Return the key of one part of a block."""
    packer = KeyPacker(digest, GroupId(group), ShardId(shard))
    return packer.pack([BlockHash(hash_at(number))])[0]


def now(reader) -> Told | None:
    """Return what a reader is told without waiting for it; nothing if there is nothing."""
    batch = reader.look()
    return None if batch is None else Told(1, *batch)


class Follower:
    """Has what a mirror tells it: what a subscriber of an engine would have."""

    def __init__(self, num_shards: int = 1, *, alone: bool = False) -> None:
        self.mirror = Mirror([ShardId(shard) for shard in range(num_shards)])
        self.alone = alone
        self.there: dict[tuple[int, int, bytes], Said | None] = {}
        self.heard: list[News] = []
        self.reader = None

    def join(self, ledger: Ledger, digest: bytes = DIGEST) -> None:
        """Follow a ledger from its beginning."""
        self.reader = ledger.read(keyspace_prefix(digest), alone=self.alone)

    def follow(self) -> None:
        """Read until there is nothing more."""
        while (told := now(self.reader)) is not None:
            self.hear(told)

    def hear(self, told: Told) -> None:
        """Take what is told."""
        for one in self.mirror.apply(told):
            self.heard.append(one)
            at = one.medium, one.group, one.block_hash
            if one.is_stored:
                self.there[at] = one.said
            else:
                del self.there[at]
