# SPDX-License-Identifier: Apache-2.0
"""
From the scheduler's orders, as the engine's thread submits them, to tickets offered.

Threading: ``submit`` and ``add_rows`` append on the engine's thread; what they bring
waits in ``_batches`` until ``take_in`` makes tickets and items of it, in turn under
``_taking``: as a rule on the loop, on the engine's thread where that needs the tickets
at once. ``open`` maps the tickets whose end was not told; they are added by ``take_in``
and removed by the runtime when it tells.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from ucm.blocks import (
    BlockId,
    BlockSpan,
    GroupId,
    KeyPacker,
    Owner,
    PackedKey,
    RowId,
    ShardId,
    TransferId,
)
from ucm.config import TimeoutConfig
from ucm.devices.abc import Fence
from ucm.layout import KVLayout
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.items import Item
from ucm.pipeline.outcomes import NOWHERE, Origin
from ucm.pipeline.pace import cost_of, overdue
from ucm.pipeline.recorder import Recorder
from ucm.pipeline.tickets import (
    Direction,
    LaneKey,
    Listener,
    Outcome,
    OutcomeKind,
    Ticket,
)
from ucm.pipeline.waiting import Changes
from ucm.reasons import Reason
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.threads import Threads
from ucm.tracing import Log
from ucm.uses import Uses

__all__ = ["Intake"]

_DIRECTIONS: Final = {
    TransferKind.SAVE: Direction.SAVE,
    TransferKind.LOAD: Direction.LOAD,
}


class _Part(NamedTuple):
    """What this rank holds of the blocks of a group, and how their keys are packed."""

    group_id: GroupId
    row_ids: tuple[RowId, ...]
    block_bytes: int
    block_tokens: int
    packer: KeyPacker


class _Batch(NamedTuple):
    """
    What one call of ``submit`` brought.

    ``row_ids`` is None for all of them; *declined* says why nothing is to be done.
    """

    digest: bytes
    orders: Sequence[SpanOrder]
    fence: Fence
    row_ids: Sequence[RowId] | None
    submitted_at: float
    origin: Origin
    declined: Reason


class _MoreRows(NamedTuple):
    """What one call of ``add_rows`` brought."""

    transfer_ids: Sequence[int]
    row_ids: Sequence[RowId]
    fence: Fence
    submitted_at: float


class Intake:
    """
    Makes tickets of orders, and items of tickets and rows.

    A ticket's time begins anew with each row that is brought: what it waits for in
    between is the engine's forward pass, which may take as long as it likes.

    Args:
        layout: Groups and rows.
        shard: Which part of a block this rank holds.
        queue: Where items are offered.
        recorder: Told of every ticket that is offered.
        listener: What tickets tell of themselves goes there.
        timeout: Deadlines.
        log: The process's log.
        threads: Where clock and locks come from.
        on_failure: Called with the reason when a batch turns out to be none, a bug of
            the caller.
    """

    def __init__(
        self,
        layout: KVLayout,
        shard: ShardId,
        queue: DumpQueue,
        recorder: Recorder,
        listener: Listener,
        *,
        timeout: TimeoutConfig,
        log: Log,
        threads: Threads,
        on_failure: Callable[[str], None],
    ) -> None:
        self.open = queue.open
        self.origin = NOWHERE
        """Of what is submitted from now on."""
        self._layout = layout
        self._shard = shard
        self._digest = b""
        self._parts: dict[int, _Part] = {}
        self._queue = queue
        self._recorder = recorder
        self._listener = listener
        self._timeout = timeout
        self._log = log
        self._threads = threads
        self._clock = threads.monotonic
        self.changed = Changes(threads)
        self._taking = threads.lock()
        self._on_failure = on_failure
        self._batches: deque[_Batch | _MoreRows] = deque()

    @property
    def num_open(self) -> int:
        """Tickets whose end was not told, and batches without tickets yet."""
        return len(self.open) + len(self._batches)

    def submit(
        self,
        digest: bytes,
        orders: Sequence[SpanOrder],
        fence: Fence,
        row_ids: Sequence[RowId] | None,
        declined: Reason = Reason.NONE,
    ) -> None:
        """
        Take orders under a key space, of which only *row_ids* are ready if given.

        Those that are *declined*, for a reason, are counted and end.
        """
        now = self._clock()
        batch = _Batch(digest, orders, fence, row_ids, now, self.origin, declined)
        self._batches.append(batch)

    def add_rows(
        self, transfer_ids: Sequence[int], row_ids: Sequence[RowId], fence: Fence
    ) -> None:
        """Take more rows of tickets that were submitted with some."""
        more = _MoreRows(transfer_ids, row_ids, fence, self._clock())
        self._batches.append(more)

    def take_in(self, *, gives_way: bool = False) -> None:
        """
        Make tickets and items of what was submitted, and offer them.

        Args:
            gives_way: Whether others may have the interpreter lock meanwhile: not where
                the engine's thread waits for it itself.
        """
        with self._taking:
            while self._batches:
                batch, whole = self._batches[0], False
                try:
                    if isinstance(batch, _Batch):
                        self._offer(batch, self._threads.slowly if gives_way else iter)
                    else:
                        self._offer_rows(batch)
                    whole = True
                finally:
                    self._batches.popleft()
                    if not whole:
                        self._on_failure("a batch of orders could not be taken in")

    def _offer(self, batch: _Batch, each_of: Callable[[Any], Iterator[Any]]) -> None:
        """Make tickets and offer them; should that break off, none is left without an end."""
        tickets, is_whole = self._tickets(batch, each_of), False
        try:
            self._offer_tickets(batch, tickets, each_of)
            is_whole = True
        finally:
            if not is_whole:  # those that are open end with the runtime
                for ticket in tickets:
                    if ticket.outcome is None and ticket.transfer_id not in self.open:
                        self._recorder.admitted(ticket, Reason.FAILED, self._queue)

    def _offer_tickets(
        self,
        batch: _Batch,
        tickets: Sequence[Ticket],
        each_of: Callable[[Any], Iterator[Any]],
    ) -> None:
        self._recorder.offered(tickets)  # before any of them can end
        late = self._overdue(batch, tickets)
        for ticket in each_of(tickets):
            # First the log, so that nothing is told of the ticket before; then the
            # list of what a failure ends; then the queue, which a failure closes first.
            refusal = self._queue.refusal_of(ticket)
            if not refusal and ticket.lane_key in late:
                refusal = Reason.OVERLOAD
            self._recorder.admitted(ticket, refusal, self._queue)
            if batch.declined and not refusal:
                ticket.end(Outcome(OutcomeKind.CANCELLED, batch.declined))
            elif not refusal:
                self.open[ticket.transfer_id] = ticket
                rows = ticket.row_ids
                if batch.row_ids is not None:
                    rows = tuple(row for row in rows if row in batch.row_ids)
                self._offer_item(Item(ticket, rows, batch.fence))

    def _tickets(
        self, batch: _Batch, each_of: Callable[[Any], Iterator[Any]]
    ) -> list[Ticket]:
        """Return a ticket for each order; should one be none, all of them are refused."""
        tickets: list[Ticket] | None = None
        try:
            if batch.digest != self._digest:
                self._parts = self._parts_under(batch.digest)
                self._digest = batch.digest
            tickets = [self._ticket(order, batch) for order in each_of(batch.orders)]
        finally:
            if tickets is None:
                self._refuse(batch)
        return tickets

    def _refuse(self, batch: _Batch) -> None:
        """Tell the end of orders of which there are no tickets: somebody waits for it."""
        for order in batch.orders:
            block_ids = cast("tuple[BlockId, ...]", order.block_ids)
            keys = (PackedKey(b""),) * len(block_ids)
            span = BlockSpan(GroupId(order.group_id), block_ids, keys)
            ticket = self._ticket_over(order, batch, span, (), 0)
            self._recorder.offered([ticket])
            self._recorder.admitted(ticket, Reason.FAILED, self._queue)

    def _overdue(self, batch: _Batch, tickets: Sequence[Ticket]) -> set[LaneKey]:
        """
        Return the loads that would come too late, so that the engine computes at once.

        Layer-wise ones come at the pace of the layers that wait for them, not at ours,
        and their time begins anew with each row.
        """
        costs: dict[LaneKey, int] = {}
        for ticket in tickets:
            if ticket.direction is Direction.LOAD and batch.row_ids is None:
                cost = costs.get(ticket.lane_key, 0) + cost_of(1, ticket.nbytes)
                costs[ticket.lane_key] = cost
        if not costs:
            return set()
        return overdue(
            costs,
            ahead=cost_of(*self._queue.due(Direction.LOAD)),
            seconds_per_byte=self._queue.pace.seconds_per_byte,
            seconds_left=batch.submitted_at + self._timeout.load - self._clock(),
        )

    def _offer_rows(self, more: _MoreRows) -> None:
        for transfer_id in more.transfer_ids:
            ticket = self.open.get(TransferId(transfer_id))
            if ticket is not None and ticket.outcome is None:
                limit = self._limit(ticket.direction)
                ticket.deadline = max(ticket.deadline, more.submitted_at + limit)
                rows = tuple(row for row in ticket.row_ids if row in more.row_ids)
                self._offer_item(Item(ticket, rows, more.fence, is_first=False))

    def _offer_item(self, item: Item) -> None:
        if self._queue.offer(item):  # refused: closed in between
            item.ticket.end(Outcome(OutcomeKind.CANCELLED, Reason.LATE))

    def _parts_under(self, digest: bytes) -> dict[int, _Part]:
        """Return what this rank holds of each group's blocks, under a key space."""
        return {
            group.group_id: _Part(
                group.group_id,
                tuple(row.row_id for row in group.rows),
                group.block_bytes,
                group.block_tokens,
                KeyPacker(digest, group.group_id, self._shard),
            )
            for group in self._layout.groups
        }

    def _ticket(self, order: SpanOrder, batch: _Batch) -> Ticket:
        part = self._parts[order.group_id]
        keys = tuple(part.packer.pack(order.split_hashes()))
        block_ids = cast("tuple[BlockId, ...]", order.block_ids)
        uses = None
        if order.kind is TransferKind.SAVE:
            now_ns = int(batch.submitted_at * 1e9)
            uses = _uses_of(order.owners, part.block_tokens, now_ns)
        span = BlockSpan(part.group_id, block_ids, keys, uses)
        return self._ticket_over(order, batch, span, part.row_ids, part.block_bytes)

    def _ticket_over(
        self,
        order: SpanOrder,
        batch: _Batch,
        span: BlockSpan,
        row_ids: tuple[RowId, ...],
        block_bytes: int,
    ) -> Ticket:
        direction = _DIRECTIONS[order.kind]
        return Ticket(
            transfer_id=TransferId(order.transfer_id),
            direction=direction,
            owners=order.owners,
            span=span,
            row_ids=row_ids,
            block_bytes=block_bytes,
            accepted_at=batch.submitted_at,
            deadline=batch.submitted_at + self._limit(direction),
            listener=self._listener,
            log=self._log,
            origin=batch.origin,
            changed=self.changed,
            clock=self._clock,
        )

    def _limit(self, direction: Direction) -> float:
        save = direction is Direction.SAVE
        return self._timeout.save if save else self._timeout.load


def _uses_of(owners: Sequence[Owner], block_tokens: int, now_ns: int) -> Uses:
    """Return when the blocks of a ticket count as used, and whose they are."""
    lasts = np.array([owner.used_ns or now_ns for owner in owners], dtype=np.int64)
    counts = np.array([owner.num_blocks for owner in owners])
    ends = np.cumsum(counts)  # each owner's last block is the one before
    starts = lasts + (ends - 1) * block_tokens
    moments = starts.repeat(counts) - np.arange(ends[-1]) * block_tokens
    tenants = np.array([owner.tenant for owner in owners], dtype=np.uint32)
    return Uses(moments, tenants.repeat(counts))
