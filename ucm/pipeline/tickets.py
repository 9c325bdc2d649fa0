# SPDX-License-Identifier: Apache-2.0
"""
Tickets: one admitted save or load of one span.

A ticket's rows come as one item or, layer-wise, as several: each is copied as soon as
its fence has passed, and the ticket is whole when the copy of the last one is over.

Threading: ``settle`` may be called from any thread, once. A ticket's other fields
belong to the loop until a copy job runs on it, and to that job while it runs. One lock
serves all tickets of a runtime (``Changes``).
"""

import contextlib
import enum
import logging
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Final

import attrs

from ucm.blocks import BlockSpan, Owner, RequestId, RowId, TransferId, whose
from ucm.devices.abc import Fence
from ucm.pipeline.guard import BlockGuard, TicketOverError
from ucm.pipeline.outcomes import Outcome, OutcomeKind, outcome_of
from ucm.pipeline.waiting import Changes
from ucm.reasons import Reason
from ucm.stores.abc import ReadLease, WriteLease
from ucm.threads import SYSTEM
from ucm.tracing import Log

__all__ = [
    "Admission",
    "Direction",
    "Item",
    "LaneKey",
    "Outcome",
    "OutcomeKind",
    "Ticket",
]


class Direction(enum.Enum):
    """Which way a ticket moves bytes."""

    SAVE = "save"
    LOAD = "load"

    __hash__ = object.__hash__  # Enum's own is slow, and lanes are found by it


class Admission(enum.Enum):
    """What became of an offer; anything but ACCEPTED is a refusal with its reason."""

    ACCEPTED = "accepted"
    QUEUE_TICKETS = "queue_tickets"
    QUEUE_BYTES = "queue_bytes"
    STORE_BEHIND = "store_behind"
    """Too much was copied that the store has not stored yet."""
    STORE_HUNG = "store_hung"
    """A call of the store has not returned for longer than its ticket may take."""
    OVERLOAD = "overload"
    """The loads before it leave too little time for this one."""
    CLOSED = "closed"
    FAILED = "failed"


LaneKey = tuple[Direction, RequestId, int]
"""Direction, request and its life: what shares one lane."""

_SHARED: Final = (RequestId(""), -1)


class Ticket:
    """
    One admitted save or load of one span.

    Args:
        transfer_id: Its number, the same on all ranks.
        direction: Save or load.
        owners: Whose blocks, in the order of the span. A load has one owner.
        span: Blocks and keys.
        row_ids: Rows whose copies must be over before the span is whole; items bring
            them.
        block_bytes: Bytes of one block over all rows.
        accepted_at: When it was asked for, on *clock*.
        deadline: Latest end, on *clock*.
        on_release: See ``BlockGuard``.
        on_settle: Called once, on the thread that settles it. Must not block.
        on_unclean: See ``BlockGuard``.
        log: The process's log; ``log`` of the ticket carries its ids as well.
        changed: Shared by all tickets of a runtime; its own if none is given.
        clock: In seconds.
    """

    __slots__ = (
        "_active_jobs",
        "_changed",
        "_log",
        "_on_settle",
        "_process_log",
        "_resources",
        "_rows_left",
        "accepted_at",
        "begun_at",
        "block_bytes",
        "clock",
        "deadline",
        "direction",
        "failed_as",
        "guard",
        "is_noticed",
        "is_told",
        "is_traced",
        "outcome",
        "owners",
        "owns_resources",
        "read_lease",
        "released_at",
        "row_ids",
        "span",
        "stage_seconds",
        "stages",
        "transfer_id",
        "write_lease",
    )

    def __init__(
        self,
        *,
        transfer_id: TransferId,
        direction: Direction,
        owners: tuple[Owner, ...],
        span: BlockSpan,
        row_ids: tuple[RowId, ...],
        block_bytes: int,
        accepted_at: float,
        deadline: float,
        on_release: Callable[["Ticket"], None],
        log: Log,
        on_settle: Callable[["Ticket"], None] = lambda _: None,
        on_unclean: Callable[["Ticket"], None] = lambda _: None,
        changed: Changes | None = None,
        clock: Callable[[], float] = SYSTEM.monotonic,
    ) -> None:
        self.transfer_id = transfer_id
        self.direction = direction
        self.owners = owners
        self.span = span
        self.row_ids = row_ids
        self._rows_left: Collection[RowId] = row_ids  # a set takes 2 KB
        self.block_bytes = block_bytes
        self.accepted_at = accepted_at
        self.clock = clock
        self.begun_at = 0.0
        self.released_at = 0.0
        self.deadline = deadline
        self._on_settle = on_settle
        self._process_log = log
        self.is_traced = log.is_enabled_for(logging.DEBUG)
        """Whether anybody reads each step of it."""
        self._log: Log | None = None
        self.stages: dict[tuple[RowId, ...], str] = {}
        self.stage_seconds: dict[str, float] = {}
        self.outcome: Outcome | None = None
        self.owns_resources = False
        self.write_lease: WriteLease | None = None
        self.read_lease: ReadLease | None = None
        self._changed = changed or Changes()
        self.is_told = False
        """Whether it is settled and the notice of it is on its way."""
        self.is_noticed = False
        """Whether the engine's thread has seen that notice."""
        self._active_jobs = 0
        self.failed_as: Outcome | None = None
        """What the first of its copy jobs to raise makes of it, told or not."""
        self._resources: contextlib.ExitStack | None = None

        def released() -> None:
            self.released_at = clock()
            on_release(self)

        self.guard = BlockGuard(
            released, self._changed, len(span), lambda: on_unclean(self)
        )

    @property
    def log(self) -> Log:
        """The log with the ticket's ids; bound when it is first used."""
        if self._log is None:
            self._log = self._process_log.bind(
                transfer_id=self.transfer_id,
                direction=self.direction.value,
                **whose(self.owners),
            )
        return self._log

    @property
    def request_id(self) -> RequestId:
        """Of the first owner."""
        return RequestId(self.owners[0].request_id)

    @property
    def generation(self) -> int:
        """Of the first owner."""
        return self.owners[0].generation

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return self.block_bytes * len(self.span)

    @property
    def is_shared(self) -> bool:
        """Whether its blocks are several requests'."""
        return len(self.owners) > 1

    @property
    def lane_key(self) -> LaneKey:
        """
        The lane it travels in.

        Shared tickets have one of their own, all of them together: they keep their order
        among themselves, and none with what travels for one of their requests alone.
        """
        request_id, generation = _SHARED
        if not self.is_shared:
            request_id, generation = self.request_id, self.generation
        return (self.direction, request_id, generation)

    @property
    def is_worked_on(self) -> bool:
        """Whether a copy job runs on it right now."""
        return self._active_jobs > 0

    def copied(self, row_ids: Collection[RowId]) -> bool:
        """
        Take note that the copy of some rows is over; ends it in the guard.

        Returns:
            Whether these were the last ones: the ticket is whole.
        """
        with self._changed.lock:
            self._rows_left = frozenset(self._rows_left).difference(row_ids)
            whole = not self._rows_left
            self._changed.notify()
        self.guard.end(last=whole)
        return whole

    def wait_copied(self, row_ids: Collection[RowId], timeout: float) -> bool:
        """
        Block the thread until the rows' copies are over, or the ticket's end was told.

        Returns:
            Whether either is so after at most *timeout* seconds.
        """
        return self._changed.wait_for(
            lambda: self.is_told or frozenset(self._rows_left).isdisjoint(row_ids),
            timeout,
        )

    def own(self, resource: contextlib.AbstractContextManager[object]) -> None:
        """Tie a resource to the ticket; ``unwind`` leaves it exactly once."""
        if self._resources is None:
            self._resources = contextlib.ExitStack()
        self._resources.enter_context(resource)
        self.owns_resources = True

    def settle(self, outcome: Outcome) -> bool:
        """Give the last word; False when it was given before."""
        with self._changed.lock:
            if self.outcome is not None:
                return False
            self.outcome = outcome
        self._on_settle(self)
        return True

    def mark_told(self) -> None:
        """Let waiters go: the ticket is settled and the notice of it is on its way."""
        with self._changed.lock:
            self.is_told = True
            self._changed.notify()

    def wait_told(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds; return whether its end was told."""
        return self._changed.wait_for(lambda: self.is_told, timeout)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """
        Mark a copy job as running on this ticket, so that resources outlive it.

        A job that raises unwinds the ticket's resources on its own thread. Jobs of other
        rows may stand behind it already: their slots are somebody else's by then.

        Raises:
            TicketOverError: The ticket is settled, or a job has raised before; the job
                must not start.
        """
        with self._changed.lock:
            if self.outcome is not None or self.failed_as is not None:
                raise TicketOverError(Reason.OVER)
            self._active_jobs += 1
            self.begun_at = self.begun_at or self.clock()
        whole = False
        try:
            yield
            whole = True
        finally:
            with self._changed.lock:
                self._active_jobs -= 1
                if not whole and self.failed_as is None:
                    self.failed_as = outcome_of(sys.exc_info()[1])
            if not whole or self.outcome is not None:
                self.unwind()

    def unwind(self) -> None:
        """Leave all resources unless a copy still uses them. May block: copy threads."""
        with self._changed.lock:
            if self._active_jobs or self.guard.is_copying or self.guard.is_quarantined:
                return
            resources, self._resources = self._resources, None
            self.owns_resources = False
        if resources is not None:
            resources.close()


@attrs.frozen
class Item:
    """
    Some rows of a ticket, as they become ready; a whole-block ticket is one item.

    Args:
        ticket: The ticket.
        row_ids: The rows this item brings.
        fence: Passes when the rows are written (save) or may be overwritten (load).
        is_first: The ticket is counted and may be refused with it, not with what
            follows.
    """

    ticket: Ticket
    row_ids: tuple[RowId, ...]
    fence: Fence
    is_first: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of its rows, were they all alike."""
        ticket = self.ticket
        return ticket.nbytes * len(self.row_ids) // len(ticket.row_ids)
