# SPDX-License-Identifier: Apache-2.0
"""The scheduler's orders as the runtime's."""

import functools
from collections.abc import Callable, Iterable, Sequence

from ucm.blocks import (
    BlockId,
    BlockSpan,
    GroupId,
    KeyPacker,
    RequestId,
    ShardId,
    TransferId,
)
from ucm.intake import Order
from ucm.layerwise import SpanGroup
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.pipeline.tickets import Direction
from ucm.scheduler.messages import SpanOrder, TransferKind

__all__ = ["OrderMaker"]

_DIRECTIONS = {TransferKind.SAVE: Direction.SAVE, TransferKind.LOAD: Direction.LOAD}


class OrderMaker:
    """
    Makes orders for one rank's part of blocks.

    Args:
        layout: Groups and rows.
        shard: Which part this rank holds.
    """

    def __init__(self, layout: KVLayout, shard: ShardId) -> None:
        self._layout = layout
        self._shard = shard
        self._digest = b""
        self._packers: dict[GroupId, KeyPacker] = {}

    def made(self, digest: bytes, orders: Iterable[SpanOrder]) -> Iterable[Order]:
        """
        Return the orders, each made when it is asked for, as a rule on the loop.

        Args:
            digest: Key space of their keys.
            orders: Of the scheduler.
        """
        if digest != self._digest:
            self._digest = digest
            self._packers = {
                group.group_id: KeyPacker(digest, group.group_id, self._shard)
                for group in self._layout.groups
            }
        return map(functools.partial(_make, self._layout, self._packers), orders)

    def grouped(
        self,
        digest: bytes,
        orders: Sequence[SpanOrder],
        by: Callable[[SpanOrder], object],
    ) -> list[SpanGroup]:
        """Return the orders for layer-wise transfer, those alike by *by* and group together."""
        together: dict[tuple[object, int], list[SpanOrder]] = {}
        for order in orders:
            together.setdefault((by(order), order.group_id), []).append(order)
        return [
            self._group(digest, self._layout.group(GroupId(group_id)), alike)
            for (_, group_id), alike in together.items()
        ]

    def _group(
        self, digest: bytes, group: GroupLayout, orders: Sequence[SpanOrder]
    ) -> SpanGroup:
        """Put tickets of one group together; states may still move behind the pass."""
        return SpanGroup(
            [order.transfer_id for order in orders],
            [row.row_id for row in group.rows],
            self.made(digest, orders),
            at_end=group.kind is GroupKind.STATE,
        )


def _make(
    layout: KVLayout, packers: dict[GroupId, KeyPacker], order: SpanOrder
) -> Order:
    group = layout.group(GroupId(order.group_id))
    keys = packers[group.group_id].pack(order.split_hashes())
    return Order(
        transfer_id=TransferId(order.transfer_id),
        direction=_DIRECTIONS[order.kind],
        request_id=RequestId(order.request_id),
        generation=order.generation,
        span=BlockSpan(
            group.group_id,
            tuple(BlockId(block_id) for block_id in order.block_ids),
            tuple(keys),
        ),
        row_ids=tuple(row.row_id for row in group.rows),
        block_bytes=group.block_bytes,
    )
