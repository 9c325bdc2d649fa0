# SPDX-License-Identifier: Apache-2.0
"""
Which blocks of a request a step saves.

Complete blocks of ``FULL`` and ``WINDOW`` groups queue up in the request's life and are
taken as far as a step and its message have room. A state that the engine offers is taken at once, or
dropped: there is no queue for what is overwritten next.
"""

from collections.abc import Iterable, Iterator, Sequence

from ucm.blocks import GroupId
from ucm.layout import GroupKind, GroupLayout, KVLayout
from ucm.scheduler.budget import (
    MAX_HOLDS,
    SAVE_NBYTES,
    order_nbytes,
)
from ucm.scheduler.holds import HoldLedger
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.requests import NULL_BLOCK, Life, ScheduledRequest, StepFacts
from ucm.scheduler.transfers import BlockRef, OpenTransfers

__all__ = ["SaveSelector"]


class SaveSelector:
    """
    Orders saves of blocks that are not stored and that nobody saves already.

    Used on the scheduler's thread only.

    Args:
        layout: Groups, in the order of the requests' tables.
        matcher: Knows which blocks are stored.
        transfers: Knows which are being saved, and which count as missing.
        ledger: Where the blocks of each save are held.
        num_ranks: Workers that each carry out every order.
        max_blocks: The most blocks of one step.
    """

    __slots__ = (
        "_layout",
        "_ledger",
        "_matcher",
        "_max_blocks",
        "_ranks",
        "_transfers",
        "dropped_blocks",
    )

    def __init__(
        self,
        layout: KVLayout,
        matcher: PrefixMatcher,
        transfers: OpenTransfers,
        ledger: HoldLedger,
        *,
        num_ranks: int,
        max_blocks: int,
    ) -> None:
        self._layout = layout
        self._matcher = matcher
        self._transfers = transfers
        self._ledger = ledger
        self._ranks = range(num_ranks)
        self._max_blocks = max_blocks
        self.dropped_blocks = 0
        """Blocks whose turn came, or whose only chance it was, but were not taken."""

    def orders(self, facts: StepFacts, lives: Iterable[Life]) -> tuple[SpanOrder, ...]:
        """Order what became complete, as far as the step has room, and hold it."""
        room = min(self._max_blocks, MAX_HOLDS - self._ledger.num_holds)
        nbytes = SAVE_NBYTES
        orders: list[SpanOrder] = []
        for request, life in zip(facts.scheduled, lives, strict=True):
            most = min(room, nbytes // life.block_nbytes)
            for group_id, blocks in self.select(life, request, most):
                room -= len(blocks)
                for order in self._transfers.open(
                    TransferKind.SAVE, life.key, group_id, blocks
                ):
                    self._ledger.take(
                        order.transfer_id, life.key, order.block_ids, self._ranks
                    )
                    nbytes -= order_nbytes(order)
                    orders.append(order)
        return tuple(orders)

    def select(
        self, life: Life, request: ScheduledRequest, room: int
    ) -> Iterator[tuple[GroupId, list[BlockRef]]]:
        """
        Take at most *room* blocks of a scheduled request, group by group.

        Args:
            life: In which it runs. Of one that waits for loads nothing is taken: its
                blocks are garbage if they fail.
            request: The facts of this step.
            room: Blocks that the step may still save.
        """
        if life.loads or not life.may_save:
            room = 0
        else:
            life.advance(self._layout, request, self._stored)
        for at, group in enumerate(self._layout.groups):
            if group.kind is GroupKind.STATE:
                blocks = self._take_offered(life, request, at, room)
            else:
                blocks = self._take_pending(life, request, at, room)
            room -= len(blocks)
            yield group.group_id, blocks

    def _take_pending(
        self, life: Life, request: ScheduledRequest, at: int, room: int
    ) -> list[BlockRef]:
        blocks: list[BlockRef] = []
        if not room:
            return blocks
        group, pending = self._layout.groups[at], life.pending[at]
        while pending and len(blocks) < room:
            index = pending.popleft()
            block = BlockRef(
                index,
                request.tables[at][index],
                request.hashes[self._layout.hash_index(group, index)],
            )
            if block.block_id == NULL_BLOCK:
                self.dropped_blocks += 1
            elif not self._transfers.is_saving(group.group_id, block.block_hash):
                blocks.append(block)
        return blocks

    def _take_offered(
        self, life: Life, request: ScheduledRequest, at: int, room: int
    ) -> list[BlockRef]:
        if not request.states:
            return []
        group = self._layout.groups[at]
        offered = [
            block
            for block in life.offered(self._layout, at, request)
            if not self._transfers.is_saving(group.group_id, block.block_hash)
        ]
        stored = self._stored(group, [block.block_hash for block in offered])
        wanted = [
            block
            for block, is_stored in zip(offered, stored, strict=True)
            if not is_stored
        ]
        self.dropped_blocks += len(wanted[room:])
        return wanted[:room]

    def _stored(self, group: GroupLayout, hashes: Sequence[bytes]) -> list[bool]:
        return self._matcher.stored(group, hashes, self._transfers.denied)
