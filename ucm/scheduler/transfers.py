# SPDX-License-Identifier: Apache-2.0
"""
Tickets that were ordered and have not come to their end on every rank.

A ticket is *open* from its order until each rank has reported it once; what a rank
says of an unknown ticket, or says twice, is a *stray* and counts for nothing. Open
saves name the keys that are being written, so that no two tickets write one block.
Open loads name the blocks that they fill.

A block whose load failed is denied; a save that contains it ends the denial.
"""

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from ucm.blocks import GroupId, Owner
from ucm.layout import GroupLayout
from ucm.reasons import Reason
from ucm.scheduler.denials import Denials
from ucm.scheduler.messages import Failure, SpanOrder, StepReport, TransferKind
from ucm.scheduler.records import SaveEnd
from ucm.scheduler.shares import Run, Share
from ucm.scheduler.spans import LOAD_SPANS
from ucm.scheduler.unsaved import Unsaved

__all__ = ["OpenTransfers"]

_MAX_SPAN_BLOCKS: Final = 16384
"""However small its blocks are, a ticket has to fit into a message."""


class _Open(msgspec.Struct, eq=False):
    order: SpanOrder
    ranks_left: set[int]
    hashes: Sequence[bytes] = ()
    is_stored: bool = True
    reason: Reason = Reason.NONE
    least_visible: int = sys.maxsize
    most_new: int = 0

    def saved_on(self, report: StepReport, *, is_stored: bool) -> None:
        """Take note of how many of a save's blocks a rank has stored, and how many anew."""
        number = self.order.transfer_id
        new_blocks = report.new_blocks.get(number, 0)
        visible = len(self.order.block_ids) if is_stored else new_blocks
        self.least_visible = min(self.least_visible, visible)
        self.most_new = max(self.most_new, new_blocks)
        self.is_stored &= is_stored
        self.reason = self.reason or report.why_unstored.get(number, Reason.NONE)


class OpenTransfers:
    """
    The open tickets, by number, and the keys they touch.

    Used on the scheduler's thread only.

    Args:
        num_ranks: Workers that each carry out every ticket and report on it.
        span_blocks: By group, the most blocks of one ticket.
        load_spans: So many times as many has a load's.
    """

    def __init__(
        self,
        num_ranks: int,
        span_blocks: Mapping[GroupId, int],
        load_spans: int = LOAD_SPANS,
    ) -> None:
        self._num_ranks = num_ranks
        self._load_spans = load_spans
        self.limits: dict[GroupId, int] = {}
        """By group, the most blocks of one ticket."""
        self.resize(span_blocks)
        self._ids = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self.saving: dict[int, set[bytes]] = {group: set() for group in span_blocks}
        """By group, the blocks that a ticket writes, or is about to be opened for."""
        self.filling: dict[int, int] = {}
        """By block of the engine, the last load that fills it."""
        self.denied = Denials()
        """Blocks that count as missing."""
        self.num_open = dict.fromkeys(TransferKind, 0)
        """Tickets that have not ended on every rank."""
        self._keyed = b""
        self.unsaved = Unsaved()
        """Why blocks are not stored."""
        self.saved_blocks = 0
        """Blocks that became visible with their last part, since the start."""
        self.strays = 0
        """Reports of tickets that are not open."""

    def resize(self, span_blocks: Mapping[GroupId, int]) -> None:
        """Cut tickets to other sizes from now on."""
        for group_id, most in span_blocks.items():
            self.limits[group_id] = min(most, _MAX_SPAN_BLOCKS)

    def open_load(
        self,
        life: tuple[str, int],
        group_id: GroupId,
        block_ids: tuple[int, ...],
        hashes: Sequence[bytes],
    ) -> list[SpanOrder]:
        """
        Cut consecutive blocks of a request into tickets that every rank is to load.

        Args:
            life: Request id and generation.
            group_id: Group of the blocks.
            block_ids: Where they go.
            hashes: As many; the engine's.
        """
        limit = min(self._load_spans * self.limits[group_id], _MAX_SPAN_BLOCKS)
        orders = []
        for at in range(0, len(block_ids), limit):
            ids, some = block_ids[at : at + limit], hashes[at : at + limit]
            owners = (Owner(*life, num_blocks=len(ids)),)
            orders.append(
                self._open_one(TransferKind.LOAD, owners, group_id, ids, some)
            )
        return orders

    def open_saves(
        self, group: GroupLayout, shares: Iterable[Share]
    ) -> Iterator[SpanOrder]:
        """
        Cut what several lives save of one group into tickets, as few as fit.

        The blocks were claimed, and all of a life come together, in its order.

        Full spans of a life are tickets of its own; what is left of it goes with what
        is left of others. So of one life, earlier blocks are in tickets that come first,
        and of a ticket with several owners no order is promised to any other of theirs.
        """
        limit = self.limits[group.group_id]
        together, size = list[Share](), 0
        for stay, run in shares:
            rest = len(run.block_ids) % limit
            is_more = together and together[-1][0] == stay  # behind a gap
            if is_more or size + rest > limit:
                yield self._save(group, together)
                together, size = [], 0
            whole = len(run.block_ids) - rest
            for start in range(0, whole, limit):
                yield self._save(group, [(stay, run.part(start, start + limit))])
            if rest:
                together.append((stay, run.part(whole, whole + rest) if whole else run))
                size += rest
        if together:
            yield self._save(group, together)

    def _save(self, group: GroupLayout, shares: Sequence[Share]) -> SpanOrder:
        size = group.block_tokens
        ids, hashes, owners = list[int](), list[bytes](), list[Owner]()
        for stay, run in shares:
            num_blocks = len(run.block_ids)
            ids += run.block_ids
            hashes += run.hashes
            last = stay.moment - (run.start + num_blocks - 1) * size
            told = stay.request_id, stay.generation, num_blocks, last, stay.tenant
            owners.append(tuple.__new__(Owner, told))  # its own is a call of Python
        return self._open_one(
            TransferKind.SAVE, tuple(owners), group.group_id, tuple(ids), hashes
        )

    def _open_one(
        self,
        kind: TransferKind,
        owners: tuple[Owner, ...],
        group_id: GroupId,
        block_ids: tuple[int, ...],
        hashes: Sequence[bytes],
    ) -> SpanOrder:
        order = SpanOrder(
            transfer_id=next(self._ids),
            kind=kind,
            owners=owners,
            group_id=group_id,
            block_ids=block_ids,
            hashes=b"".join(hashes),
        )
        entry = _Open(order, set(range(self._num_ranks)))
        self._open[order.transfer_id] = entry
        self.num_open[kind] += 1
        if kind is TransferKind.SAVE:
            entry.hashes = hashes
        else:
            self.filling.update(dict.fromkeys(block_ids, order.transfer_id))
        return order

    def end_load(self, transfer_id: int, rank: int) -> bool:
        """Take note of the end of a load on a rank; return whether it was the last one."""
        entry = self._told(TransferKind.LOAD, transfer_id, rank)
        if entry is None or entry.ranks_left:
            return False
        self._close(entry)
        return True

    def end_saves(self, report: StepReport) -> list[SaveEnd]:
        """Take note of the saves that a rank ended; return those that all ranks have."""
        ends = []
        saves = ((report.settled_saves, True), (report.unstored_saves, False))
        for ids, is_stored in saves:
            for each in ids:
                entry = self._told(TransferKind.SAVE, each, report.rank)
                if entry is None:
                    continue
                entry.saved_on(report, is_stored=is_stored)
                if not entry.ranks_left:
                    order, visible = entry.order, entry.least_visible
                    self.saved_blocks += min(entry.least_visible, entry.most_new)
                    self._close(entry)
                    ends.append(SaveEnd(order.owners, len(order.block_ids), visible))
        return ends

    def _told(self, kind: TransferKind, transfer_id: int, rank: int) -> _Open | None:
        """Return the ticket that a rank has ended; None, and counted, if it is a stray."""
        entry = self._open.get(transfer_id)
        if (
            entry is None
            or entry.order.kind is not kind
            or rank not in entry.ranks_left
        ):
            self.strays += 1
            return None
        entry.ranks_left.remove(rank)
        return entry

    def rekeyed(self, keyspace_digest: bytes) -> None:
        """Deny no block any more, and forget what is known of those under other keys."""
        self.denied.clear()
        if keyspace_digest and keyspace_digest != self._keyed:
            self._keyed = keyspace_digest
            self.unsaved = Unsaved()

    def load_failed(self, failure: Failure) -> None:
        """Deny the block that is to blame for a failed load, if any, and remember why."""
        if failure.bad_hash:
            group_id, hashes = failure.group_id, [failure.bad_hash]
            self.denied.deny((group_id, failure.bad_hash))
            self.unsaved.ended(group_id, hashes, failure.reason, self.denied.now)

    def end_loads_of(self, request_ids: Collection[str]) -> list[int]:
        """End the requests' loads on all ranks and return their numbers."""
        if not request_ids:  # as in most steps, whatever is being saved
            return []
        entries = [
            entry
            for entry in self._open.values()
            if entry.order.kind is TransferKind.LOAD
            and entry.order.request_id in request_ids
        ]
        for entry in entries:
            self._close(entry)
        return [entry.order.transfer_id for entry in entries]

    def claim(self, group_id: int, run: Run, *, is_saved: bool = True) -> list[Run]:
        """
        Return what of a run no ticket writes, or is about to be opened for.

        The next ``open_saves`` saves it, unless it *is_saved* later, or never.
        """
        saving, hashes = self.saving[group_id], run.hashes
        mine = [run]
        if not saving.isdisjoint(hashes) or len(set(hashes)) < len(hashes):
            first = {each: at for at, each in reversed(list(enumerate(hashes)))}
            taken = (
                each in saving or first[each] < at for at, each in enumerate(hashes)
            )
            mine = list(run.without(taken))
        if is_saved:
            for each in mine:
                saving.update(each.hashes)
        return mine

    def loads_into(self, block_ids: Iterable[int]) -> set[int]:
        """Return the open loads that fill one of the blocks."""
        return {self.filling[each] for each in block_ids if each in self.filling}

    def counts(self) -> dict[str, int]:
        """Return the size of each container."""
        return {
            "open_saves": self.num_open[TransferKind.SAVE],
            "open_loads": self.num_open[TransferKind.LOAD],
            "keys_being_saved": sum(map(len, self.saving.values())),
            "blocks_being_filled": len(self.filling),
            "denied_keys": len(self.denied),
        }

    def _close(self, entry: _Open) -> None:
        order = entry.order
        del self._open[order.transfer_id]
        self.num_open[order.kind] -= 1
        if order.kind is TransferKind.SAVE:
            group_id = order.group_id
            self.saving[group_id].difference_update(entry.hashes)
            if not entry.is_stored:
                hashes, now = entry.hashes, self.denied.now
                self.unsaved.ended(group_id, hashes, entry.reason, now)
            elif self.denied:
                self.denied.forgive((group_id, each) for each in entry.hashes)
        else:
            filling, number = self.filling, order.transfer_id
            for block_id in order.block_ids:
                if filling.get(block_id) == number:
                    del filling[block_id]
