# SPDX-License-Identifier: Apache-2.0
"""
Tickets that were ordered and have not come to their end on every rank.

A ticket is *open* from its order until each rank has reported it once; what a rank
says of an unknown ticket, or says twice, is a *stray* and counts for nothing. Open
saves name the keys that are being written, so that no two tickets write one block.
Open loads name the blocks that they fill.

A block whose load failed is *denied*: it counts as missing until a save that contains
it has ended, whatever the store says. Without this a request would be matched, fail
and be matched again for ever.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import attrs

from ucm.blocks import GroupId
from ucm.errors import LedgerError
from ucm.scheduler.matching import DeniedKey
from ucm.scheduler.messages import SpanOrder, TransferKind

__all__ = ["MAX_DENIED_KEYS", "BlockRef", "OpenTransfers", "split_at_request"]

MAX_DENIED_KEYS: Final = 65536


@attrs.frozen
class BlockRef:
    """
    A block on its way into an order.

    Args:
        index: Position in the request's block table.
        block_id: Slot in the engine's pool.
        block_hash: The engine's hash.
    """

    index: int
    block_id: int
    block_hash: bytes


@attrs.define
class _Open:
    order: SpanOrder
    ranks_left: set[int]
    is_stored: bool = True


class OpenTransfers:
    """
    The open tickets, by number, and the keys they touch.

    Used on the scheduler's thread only.

    Args:
        num_ranks: Workers that each carry out every ticket and report on it.
        span_blocks: By group, the most blocks of one ticket.
    """

    __slots__ = (
        "_denied",
        "_filling",
        "_ids",
        "_num_ranks",
        "_open",
        "_saving",
        "span_blocks",
        "strays",
    )

    def __init__(self, num_ranks: int, span_blocks: Mapping[GroupId, int]) -> None:
        self._num_ranks = num_ranks
        self.span_blocks = span_blocks
        self._ids = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._saving: set[DeniedKey] = set()
        self._filling: dict[int, int] = {}
        self._denied: dict[DeniedKey, None] = {}
        self.strays = 0
        """Reports of tickets that are not open."""

    def open(
        self,
        kind: TransferKind,
        life: tuple[str, int],
        group_id: GroupId,
        blocks: Sequence[BlockRef],
    ) -> list[SpanOrder]:
        """
        Cut blocks into tickets that every rank is to carry out.

        Args:
            kind: Save or load.
            life: Request id and generation.
            group_id: Group of the blocks.
            blocks: By ascending index. A ticket has consecutive ones only.
        """
        orders = []
        limit = self.span_blocks[group_id]
        start = 0
        for stop in range(1, len(blocks) + 1):
            if (
                stop < len(blocks)
                and stop - start < limit
                and blocks[stop].index == blocks[stop - 1].index + 1
            ):
                continue
            span, start = blocks[start:stop], stop
            order = SpanOrder(
                transfer_id=next(self._ids),
                kind=kind,
                request_id=life[0],
                generation=life[1],
                group_id=group_id,
                block_ids=tuple(block.block_id for block in span),
                hashes=b"".join(block.block_hash for block in span),
            )
            self._add(order)
            orders.append(order)
        return orders

    def end(
        self, kind: TransferKind, transfer_id: int, rank: int, *, is_stored: bool = True
    ) -> bool:
        """
        Take note that a ticket came to its end on a rank.

        Args:
            kind: Of the ticket.
            transfer_id: Its number.
            rank: Which.
            is_stored: Of a save, whether the rank's store has the blocks now.

        Returns:
            Whether this was the last rank.
        """
        entry = self._open.get(transfer_id)
        if (
            entry is None
            or entry.order.kind is not kind
            or rank not in entry.ranks_left
        ):
            self.strays += 1
            return False
        entry.ranks_left.remove(rank)
        entry.is_stored &= is_stored
        if entry.ranks_left:
            return False
        self._close(entry.order, is_stored=entry.is_stored)
        return True

    def end_loads_of(self, request_ids: Collection[str]) -> list[int]:
        """End the requests' loads on all ranks and return their numbers."""
        orders = [
            entry.order
            for entry in self._open.values()
            if entry.order.kind is TransferKind.LOAD
            and entry.order.request_id in request_ids
        ]
        for order in orders:
            self._close(order)
        return [order.transfer_id for order in orders]

    def is_saving(self, group_id: int, block_hash: bytes) -> bool:
        """Return whether an open ticket writes the block."""
        return (group_id, block_hash) in self._saving

    def loads_into(self, block_ids: Iterable[int]) -> set[int]:
        """Return the open loads that fill one of the blocks."""
        if not self._filling:
            return set()
        return {self._filling[each] for each in block_ids if each in self._filling}

    def deny(self, group_id: int, block_hash: bytes) -> None:
        """Let a block count as missing; the oldest one is let go beyond the bound."""
        self._denied.pop((group_id, block_hash), None)
        self._denied[group_id, block_hash] = None
        if len(self._denied) > MAX_DENIED_KEYS:
            del self._denied[next(iter(self._denied))]

    def forgive(self) -> None:
        """Deny no block any more."""
        self._denied.clear()

    @property
    def denied(self) -> Collection[DeniedKey]:
        """Blocks that count as missing."""
        return self._denied

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {
            "open_transfers": len(self._open),
            "keys_being_saved": len(self._saving),
            "blocks_being_filled": len(self._filling),
            "denied_keys": len(self._denied),
        }

    def validate(self) -> None:
        """
        Compare the indexes with the open tickets; for tests.

        Raises:
            LedgerError: They disagree.
        """
        orders = [entry.order for entry in self._open.values()]
        saves = [each for each in orders if each.kind is TransferKind.SAVE]
        loads = {each.transfer_id for each in orders} - {
            each.transfer_id for each in saves
        }
        saving = [key for order in saves for key in _keys_of(order)]
        if len(saving) != len(set(saving)) or set(saving) != self._saving:
            raise LedgerError("two open saves write one block, or the index is off")
        if not loads.issuperset(self._filling.values()):
            raise LedgerError("a block waits for a load that is not open")

    def _add(self, order: SpanOrder) -> None:
        self._open[order.transfer_id] = _Open(order, set(range(self._num_ranks)))
        if order.kind is TransferKind.SAVE:
            self._saving.update(_keys_of(order))
        else:
            for block_id in order.block_ids:
                self._filling[block_id] = order.transfer_id

    def _close(self, order: SpanOrder, *, is_stored: bool = True) -> None:
        del self._open[order.transfer_id]
        if order.kind is TransferKind.SAVE:
            for key in _keys_of(order):
                self._saving.remove(key)
                if is_stored:
                    self._denied.pop(key, None)
        else:
            for block_id in order.block_ids:
                if self._filling.get(block_id) == order.transfer_id:
                    del self._filling[block_id]


def _keys_of(order: SpanOrder) -> list[DeniedKey]:
    return [(order.group_id, each) for each in order.split_hashes()]


def split_at_request(
    orders: list[SpanOrder], max_blocks: int
) -> tuple[tuple[SpanOrder, ...], list[SpanOrder]]:
    """
    Cut a queue of loads between two requests.

    All tickets of a request belong in one plan: a worker tells of a request when all
    it knows of have ended. The first request is taken whatever its size.

    Returns:
        The orders for this plan, of about *max_blocks* blocks, and those left over.
    """
    blocks = 0
    for at, order in enumerate(orders):
        if (
            at
            and blocks >= max_blocks
            and order.generation != orders[at - 1].generation
        ):
            return tuple(orders[:at]), orders[at:]
        blocks += len(order.block_ids)
    return tuple(orders), []
