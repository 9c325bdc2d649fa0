# SPDX-License-Identifier: Apache-2.0
"""From the keys and blocks of a host to orders, and to moments of use. Pure."""

from collections.abc import Sequence
from itertools import count
from operator import index
from typing import Final

import msgspec
import numpy as np

from ucm.blocks import GroupId, KeyPacker, Owner, ShardId
from ucm.errors import KeyFormatError
from ucm.layout import GroupLayout, KVLayout
from ucm.pipeline.tickets import Direction
from ucm.prefixes import Place
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.spans import TicketBytes
from ucm.uses import Uses

__all__ = ["Asked", "Orders"]

_KINDS: Final = {
    Direction.SAVE: TransferKind.SAVE,
    Direction.LOAD: TransferKind.LOAD,
}
_KEY_SIZES: Final = frozenset(range(8, 65))
_HOST: Final = "host"


class Asked(msgspec.Struct, frozen=True):
    """A save or load of a host, checked, and nobody else's to change."""

    direction: Direction
    hashes: bytes  # its keys, one behind the other
    blocks: Sequence[int]
    group: int
    used_ns: int  # when the first of them counts as used
    tenant: int

    def keys(self) -> list[bytes]:
        """Return the keys, one for each block."""
        size = len(self.hashes) // max(len(self.blocks), 1)
        starts = range(0, len(self.hashes), size or 1)
        return [self.hashes[at : at + size] for at in starts]


class Orders:
    """
    Makes orders under one layout.

    Args:
        layout: Groups and rows.
        shard: Which part of a block is meant.
        digest: Of the key space.
        tickets: What each of them carries at most.
    """

    def __init__(
        self,
        layout: KVLayout,
        shard: ShardId,
        digest: bytes,
        tickets: TicketBytes,
    ) -> None:
        sizes = [group.block_bytes for group in layout.groups]
        self._layout = layout
        self._groups = {group.group_id: group for group in layout.groups}
        self._most_blocks = {
            Direction.SAVE: layout.span_blocks(tickets.save, sizes),
            Direction.LOAD: layout.span_blocks(tickets.load, sizes),
        }
        self._numbers = count(1)
        self._packers = {
            group.group_id: KeyPacker(digest, group.group_id, shard)
            for group in layout.groups
        }

    def block_bytes(self, group: int) -> int:
        """Return the bytes of each block of a group."""
        return self._group(group).block_bytes

    def nbytes(self, order: SpanOrder) -> int:
        """Return the bytes of an order's blocks."""
        return self.block_bytes(order.group_id) * len(order.block_ids)

    def check(
        self,
        direction: Direction,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        group: int,
        place: Place,
        now_ns: int,
    ) -> Asked:
        """
        Return what is asked for at *now_ns*, if it can be done.

        Called on a host's loop, so that no bytecode runs for each block: what can be done
        later ``of`` does.

        Raises:
            KeyFormatError: Keys and blocks are not aligned, keys are not distinct bytes
                of one length from 8 to 64, or blocks are no whole numbers.
            LayoutError: There is no such group.
        """
        shape = self._groups.get(GroupId(group)) or self._group(group)
        used_ns = self._first_used_ns(shape, place, now_ns)
        if len(keys) != len(blocks):
            raise KeyFormatError(f"{len(keys)} keys for {len(blocks)} blocks")
        hashes = _joined(keys)
        if type(blocks) is not range:  # which nobody can change
            blocks = _whole_numbers(tuple(blocks))
        tenant = int(place.tenant)
        # The group's own number is a plain one: a tensor's element is none.
        return Asked(direction, hashes, blocks, shape.group_id, used_ns, tenant)

    def of(self, asked: Asked) -> list[SpanOrder]:
        """Return one order for each span of the blocks, in order."""
        hashes, blocks, group = asked.hashes, asked.blocks, asked.group
        shape = self._group(group)
        life = next(self._numbers)
        orders = []
        size = len(hashes) // max(len(blocks), 1)
        step = self._most_blocks[asked.direction][shape.group_id]
        for at in range(0, len(blocks), step):
            block_ids = tuple(blocks[at : at + step])
            last = at + len(block_ids) - 1
            owner = Owner(
                _HOST,
                life,
                len(block_ids),
                asked.used_ns - last * shape.block_tokens,
                asked.tenant,
            )
            orders.append(
                SpanOrder(
                    transfer_id=next(self._numbers),
                    kind=_KINDS[asked.direction],
                    owners=(owner,),
                    group_id=group,
                    block_ids=block_ids,
                    hashes=hashes[at * size : (at + step) * size],
                )
            )
        return orders

    def packer(self, keys: Sequence[bytes], group: int) -> KeyPacker:
        """
        Return what packs keys of a group, if they are keys.

        Raises:
            KeyFormatError: As ``check``.
            LayoutError: As ``check``.
        """
        shape = self._group(group)
        _joined(keys)
        return self._packers[shape.group_id]

    def uses(self, num_keys: int, group: int, place: Place, now_ns: int) -> Uses:
        """Return when blocks count as used that are asked for at *now_ns*."""
        shape = self._group(group)
        depth = np.arange(num_keys, dtype=np.int64) * shape.block_tokens
        return Uses(
            self._first_used_ns(shape, place, now_ns) - depth,
            np.full(num_keys, place.tenant, np.uint32),
        )

    @staticmethod
    def _first_used_ns(shape: GroupLayout, place: Place, now_ns: int) -> int:
        # Numpy's numbers have too few bits for what comes of them.
        return (int(place.began_ns) or now_ns) - int(place.first) * shape.block_tokens

    def _group(self, group: int) -> GroupLayout:
        shape = self._groups.get(GroupId(group))
        return shape or self._layout.group(GroupId(group))  # which raises


def _whole_numbers(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """
    Return blocks as plain numbers.

    1.5 would be taken for 1, and overwritten; a tensor's elements are all different, also
    where they are the same block.
    """
    try:
        if set(map(type, blocks)) != {int}:  # no bytecode for each; a sum may overflow
            blocks = tuple(map(index, blocks))
    except TypeError as exc:
        raise KeyFormatError(f"a block is no whole number: {exc}") from None
    return blocks


def _joined(keys: Sequence[bytes]) -> bytes:
    """Return keys one behind the other; refuse what is no list of keys."""
    try:
        joined = b"".join(keys)
        num_distinct = len(set(keys))
    except TypeError as exc:
        raise KeyFormatError(f"a key is no bytes: {exc}") from None
    sizes = set(map(len, keys))
    if len(sizes) > 1 or not sizes <= _KEY_SIZES:
        raise KeyFormatError(
            f"keys of {sorted(sizes)} bytes: all must have one length, from "
            f"{min(_KEY_SIZES)} to {max(_KEY_SIZES)}"
        )
    if num_distinct < len(keys):
        raise KeyFormatError("a key is there twice: a prefix has each of its keys once")
    return joined
