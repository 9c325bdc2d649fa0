# SPDX-License-Identifier: Apache-2.0
"""
From what the engine's thread submits to tickets that are offered.

Threading: ``submit`` and ``add_rows`` append on the engine's thread; what they bring
waits in ``_batches`` until ``take_in`` makes tickets and items of it, in turn under
``_taking``: as a rule on the loop, on the engine's thread where that needs the tickets
at once. ``open`` maps the tickets whose end was not told; they are added by ``take_in``
and removed by the runtime when it tells.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import attrs

from ucm.blocks import BlockSpan, Owner, RequestId, RowId, TransferId
from ucm.config import TimeoutConfig
from ucm.devices.abc import Fence
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.pace import cost_of, overdue
from ucm.pipeline.recorder import Recorder
from ucm.pipeline.tickets import (
    Admission,
    Direction,
    Item,
    LaneKey,
    Outcome,
    OutcomeKind,
    Ticket,
)
from ucm.reasons import Reason
from ucm.threads import Threads
from ucm.tracing import Log

__all__ = ["UNFINISHED", "UNSUBMITTED", "Intake", "Order"]

UNFINISHED: Final = Reason.UNFINISHED
"""Why a save was dropped: the forward pass ended before it wrote all rows."""

UNSUBMITTED: Final = Reason.UNSUBMITTED
"""Why an order came to nothing: its step ended before it was carried out."""


@attrs.frozen(kw_only=True)
class Order:
    """
    What the engine's thread asks for: one ticket.

    Args:
        transfer_id: Unique within this runtime.
        direction: Save or load.
        request_id: Whose blocks.
        generation: Which life of the request.
        span: Blocks and keys.
        row_ids: Rows of the span's group.
        block_bytes: Bytes of one block over these rows.
    """

    transfer_id: TransferId
    direction: Direction
    request_id: RequestId
    generation: int
    span: BlockSpan
    row_ids: tuple[RowId, ...]
    block_bytes: int


class _Batch(NamedTuple):
    """What one call of ``submit`` brought; ``row_ids`` is None for all of them."""

    orders: Iterable[Order]
    fence: Fence
    row_ids: Sequence[RowId] | None
    submitted_at: float


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
        queue: Where items are offered.
        recorder: Told of every ticket.
        timeout: Deadlines.
        log: The process's log.
        threads: Where clock and locks come from.
        on_failure: Called with the reason when a batch turns out to be none, a bug of
            the caller: the engine would wait for its end for ever.
    """

    def __init__(
        self,
        queue: DumpQueue,
        recorder: Recorder,
        *,
        timeout: TimeoutConfig,
        log: Log,
        threads: Threads,
        on_failure: Callable[[str], None],
    ) -> None:
        self.open: dict[TransferId, Ticket] = {}
        self._queue = queue
        self._recorder = recorder
        self._timeout = timeout
        self._log = log
        self._clock = threads.monotonic
        self._changed = threads.condition()
        self._taking = threads.lock()
        self._on_failure = on_failure
        self._batches: deque[_Batch | _MoreRows] = deque()

    @property
    def num_open(self) -> int:
        """Tickets whose end was not told, and batches without tickets yet."""
        return len(self.open) + len(self._batches)

    def submit(
        self, orders: Iterable[Order], fence: Fence, row_ids: Sequence[RowId] | None
    ) -> None:
        """Take orders, of which only *row_ids* are ready if given."""
        self._batches.append(_Batch(orders, fence, row_ids, self._clock()))

    def add_rows(
        self, transfer_ids: Sequence[int], row_ids: Sequence[RowId], fence: Fence
    ) -> None:
        """Take more rows of tickets that were submitted with some."""
        more = _MoreRows(transfer_ids, row_ids, fence, self._clock())
        self._batches.append(more)

    def take_in(self) -> None:
        """Make tickets and items of what was submitted, and offer them."""
        with self._taking:
            while self._batches:
                batch, whole = self._batches[0], False
                try:
                    if isinstance(batch, _Batch):
                        self._offer(batch)
                    else:
                        self._offer_rows(batch)
                    whole = True
                finally:
                    self._batches.popleft()
                    if not whole:
                        self._on_failure("a batch of orders could not be taken in")

    def _offer(self, batch: _Batch) -> None:
        orders = list(batch.orders)  # should one be none, no ticket was made
        tickets = [self._ticket(order, batch.submitted_at) for order in orders]
        self._recorder.offered(tickets)  # before any of them can end
        late = self._overdue(batch, tickets)
        for ticket in tickets:
            # First the log, so that nothing is told of the ticket before; then the
            # list of what a failure ends; then the queue, which a failure closes first.
            admission = self._queue.admits(ticket)
            if admission is Admission.ACCEPTED and ticket.lane_key in late:
                admission = Admission.OVERLOAD
            self._recorder.admitted(ticket, admission, self._queue)
            if admission is Admission.ACCEPTED:
                self.open[ticket.transfer_id] = ticket
                rows = ticket.row_ids
                if batch.row_ids is not None:
                    rows = tuple(row for row in rows if row in batch.row_ids)
                self._offer_item(Item(ticket, rows, batch.fence))

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
        if self._queue.offer(item) is not Admission.ACCEPTED:  # closed in between
            outcome = Outcome(OutcomeKind.CANCELLED, Reason.LATE)
            self._recorder.settle(item.ticket, outcome)

    def _ticket(self, order: Order, submitted_at: float) -> Ticket:
        return Ticket(
            transfer_id=order.transfer_id,
            direction=order.direction,
            owners=(Owner(order.request_id, order.generation, len(order.span)),),
            span=order.span,
            row_ids=order.row_ids,
            block_bytes=order.block_bytes,
            accepted_at=submitted_at,
            deadline=submitted_at + self._limit(order.direction),
            on_release=self._released,
            on_settle=self._queue.over,
            log=self._log,
            changed=self._changed,
            clock=self._clock,
        )

    def _released(self, ticket: Ticket) -> None:
        self._queue.released(ticket)
        self._recorder.released(ticket)

    def _limit(self, direction: Direction) -> float:
        save = direction is Direction.SAVE
        return self._timeout.save if save else self._timeout.load
