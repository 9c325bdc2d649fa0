# SPDX-License-Identifier: Apache-2.0
"""
What a follower of the ledger has been told, and what of it is news to whoever it tells.

A block counts as stored in a medium when all its parts are there, and as removed with the
first of them. With a listing that begins anew, after a lost connection or by one who was too
slow, the mirror tells the difference to what it told before: nobody has to forget all.

Pure; for one thread.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import attrs
import msgspec

from ucm.agent.protocol import Told
from ucm.blocks import PackedKey, ShardId, block_of, group_of, hash_of, shard_of
from ucm.decoding import DECODE_ERRORS

__all__ = ["Follower", "Mirror", "News", "Said"]


class Follower(Protocol):
    """Who follows the ledger; called on the client's thread, where it may use ``send``."""

    def joined(self, media: Sequence[str]) -> None:
        """Take note that an agent is there, which has these tiers, and knows nothing of us."""
        ...

    def told(self, told: Told) -> None:
        """Take what the agent says of its ledger."""
        ...


class Said(msgspec.Struct, frozen=True, array_like=True):
    """
    What a block holds, in the engine's words.

    Args:
        block_hash: The engine's hash of it.
        parent: That of the block before it; None: it is the first.
        tokens: Its tokens.
        lora_id: Number of its adapter.
        lora_name: Name of its adapter.
        extra: What else went into its hash, such as the salt and images.
    """

    block_hash: bytes
    parent: bytes | None
    tokens: list[int]
    lora_id: int | None = None
    lora_name: str | None = None
    extra: list[object] | None = None


_DECODER = msgspec.msgpack.Decoder(Said)


class News(NamedTuple):
    """
    A block that came or went.

    Args:
        medium: 0 the slab, tiers behind it.
        is_stored: It came.
        group: Of the engine's KV cache.
        block_hash: As it was, or is to be, told of.
        said: What it holds, if anybody said so.
    """

    medium: int
    is_stored: bool
    group: int
    block_hash: bytes
    said: Said | None = None


@attrs.define
class _Block:
    parts: int = 0
    """A bit for each that is there."""
    told: bytes | None = None
    """By which hash it was told of as stored; None: it was not."""
    is_bare: bool = False
    """Told of without what it holds."""


class Mirror:
    """
    What was told of blocks, by medium.

    Args:
        shards: The parts of which each block consists.
    """

    def __init__(self, shards: Collection[ShardId]) -> None:
        self._bits = {shard: 1 << at for at, shard in enumerate(shards)}
        self._all = (1 << len(self._bits)) - 1
        self._media: dict[int, dict[bytes, _Block]] = {}
        self._tells_again = False
        self._prefix = b""
        """Of a key space whose others are gone once it is listed."""

    def __len__(self) -> int:
        """Return how many blocks are told of, in each medium once."""
        return sum(
            block.told is not None
            for blocks in self._media.values()
            for block in blocks.values()
        )

    def leave_tiers(self) -> Iterator[News]:
        """Yield that all that tiers had is gone: from now on there are others by these numbers."""
        for medium in sorted(self._media.keys() - {0}):
            for name, block in self._media.pop(medium).items():
                if block.told is not None:
                    yield self._news(medium, name, block, is_stored=False)

    def tell_again(self, prefix: bytes = b"") -> None:
        """
        With the next listing that comes to its end tell of all that is there, told or not.

        Args:
            prefix: What is listed begins with it. What does not is gone first: another key space
                may have the same blocks by the engine's hashes, which are then there.
        """
        self._tells_again, self._prefix = True, prefix

    def apply(self, told: Told) -> Iterator[News]:
        """
        Yield what is new, in order; to be read to its end before the next.

        What is left unread is in the listing that begins anew, if that is the next.
        """
        if told.begins:
            for blocks in self._media.values():
                for block in blocks.values():
                    block.parts = 0
            if prefix := self._prefix:
                yield from self._sweep(
                    lambda blocks: [at for at in blocks if not at.startswith(prefix)]
                )
                self._prefix = b""
        for entry in told.entries:
            key = PackedKey(entry.key)
            if entry.is_stored:
                yield from self._stored(entry.medium, key, entry.said)
            else:
                yield from self._removed(entry.medium, key)
        if told.listed:
            whole = self._all
            yield from self._sweep(
                lambda blocks: [at for at, it in blocks.items() if it.parts != whole]
            )
            self._tells_again = False

    def _stored(self, medium: int, key: PackedKey, said: bytes) -> Iterator[News]:
        name = block_of(key)
        blocks = self._media.setdefault(medium, {})
        if (block := blocks.get(name)) is None:
            block = blocks[name] = _Block()
        had_all = block.parts == self._all
        block.parts |= self._bits.get(shard_of(key), 0)
        if block.parts != self._all:
            return
        is_due = block.told is None or (self._tells_again and not had_all)
        if not is_due and not (said and block.is_bare):
            return
        content = _decoded(said)
        block_hash = block.told or hash_of(key)
        if content is not None:
            if block.told not in (None, content.block_hash):
                yield self._gone(medium, name, block)
            block_hash = content.block_hash
        block.told, block.is_bare = block_hash, content is None
        yield self._news(medium, name, block, is_stored=True, said=content)

    def _removed(self, medium: int, key: PackedKey) -> Iterator[News]:
        name = block_of(key)
        blocks = self._media.get(medium, {})
        if (block := blocks.get(name)) is None:
            return
        block.parts &= ~self._bits.get(shard_of(key), 0)
        if not block.parts:
            del blocks[name]
        if block.told is not None:
            yield self._gone(medium, name, block)

    def _sweep(
        self, gone: Callable[[dict[bytes, _Block]], list[bytes]]
    ) -> Iterator[News]:
        """Tell of what is gone, by name."""
        for medium, blocks in self._media.items():
            for name in gone(blocks):
                if not (block := blocks[name]).parts:
                    del blocks[name]
                if block.told is not None:
                    yield self._gone(medium, name, block)

    def _gone(self, medium: int, name: bytes, block: _Block) -> News:
        """Return that a block is gone, which was told of; from now on it is not."""
        news = self._news(medium, name, block, is_stored=False)
        block.told = None
        return news

    def _news(
        self,
        medium: int,
        name: bytes,
        block: _Block,
        *,
        is_stored: bool,
        said: Said | None = None,
    ) -> News:
        assert block.told is not None
        return News(medium, is_stored, group_of(PackedKey(name)), block.told, said)


def _decoded(said: bytes) -> Said | None:
    """Return what was said of a block; None: nothing, or by another release."""
    if not said:
        return None
    try:
        return _DECODER.decode(said)
    except DECODE_ERRORS:
        return None
