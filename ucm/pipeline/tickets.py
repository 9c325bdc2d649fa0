# SPDX-License-Identifier: Apache-2.0
"""
Tickets: one admitted save or load of one span, and who may touch its blocks.

States of a ``BlockGuard``, which stands between copy threads and the engine::

    FREE ──begin──▶ COPYING ──end────────▶ RELEASED
      │                └──quarantine──▶ QUARANTINED (the copy never ended in time)
      └──revoke────────────────────────▶ RELEASED (nothing was or will be copied)

``revoke`` on COPYING does not stop the copy; it marks the guard *torn*: the engine may
overwrite the blocks meanwhile, so what was copied must never be committed.

Threading: guards are used from engine, loop and copy threads. One lock serves all
tickets of a runtime: it is held for a few instructions, and a lock of its own would
cost each ticket more than all the rest of it.
A ticket's other fields belong to the loop until a copy job runs on it, and to that job
while it runs; ``settle`` may be called from any thread, once.
"""

import contextlib
import enum
from collections.abc import Callable, Iterator

import attrs

from ucm.blocks import BlockSpan, RequestId, RowId, TransferId
from ucm.devices.abc import Fence
from ucm.errors import PipelineError
from ucm.stores.abc import ReadLease, WriteLease
from ucm.threads import SYSTEM, Condition
from ucm.tracing import Log

__all__ = [
    "Admission",
    "BlockGuard",
    "Direction",
    "Item",
    "LaneKey",
    "Outcome",
    "OutcomeKind",
    "Ticket",
    "TicketOverError",
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
    CLOSED = "closed"
    FAILED = "failed"


class OutcomeKind(enum.Enum):
    """How blocks end."""

    COMMITTED = "committed"
    SKIPPED = "skipped"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"


@attrs.frozen
class Outcome:
    """
    The last word on a ticket.

    Args:
        kind: How the ticket as a whole ended; blocks that are neither committed nor
            skipped ended this way.
        reason: A short fixed word; empty for a plain success.
        committed: Blocks that were stored, or loaded.
        skipped: Blocks that needed no work because the store has them.
        bad_key: For a failed load, the packed key to blame; otherwise empty.
        error: Text of the exception behind a failure.
    """

    kind: OutcomeKind
    reason: str = ""
    committed: int = attrs.field(default=0, kw_only=True)
    skipped: int = attrs.field(default=0, kw_only=True)
    bad_key: bytes = attrs.field(default=b"", kw_only=True)
    error: str = attrs.field(default="", kw_only=True)


LaneKey = tuple[Direction, RequestId, int]
"""Direction, request and its life: what shares one lane."""


class TicketOverError(PipelineError):
    """A stage came too late: the ticket was settled, or its blocks were taken back."""


class _Guarded(enum.Enum):
    FREE = "free"
    COPYING = "copying"
    RELEASED = "released"
    QUARANTINED = "quarantined"


class BlockGuard:
    """
    Who may touch a ticket's blocks in the engine's pool.

    Args:
        on_release: Called once, on the thread that releases, when the blocks are free
            of us. Must not block.
        changed: Shared by all guards of a runtime; its own if none is given.
    """

    __slots__ = ("_changed", "_on_release", "_state", "revoked", "torn")

    def __init__(
        self,
        on_release: Callable[[], None],
        changed: Condition | None = None,
    ) -> None:
        self._changed = changed or SYSTEM.condition()
        self._on_release = on_release
        self._state = _Guarded.FREE
        self.revoked = ""
        self.torn = ""

    @property
    def is_released(self) -> bool:
        """Whether the engine may reuse the blocks."""
        return self._state is _Guarded.RELEASED

    @property
    def is_copying(self) -> bool:
        """Whether a copy touches the blocks right now."""
        return self._state is _Guarded.COPYING

    @property
    def is_quarantined(self) -> bool:
        """Whether a copy was given up that may still touch blocks and slots."""
        return self._state is _Guarded.QUARANTINED

    def begin(self) -> bool:
        """Ask to touch the blocks; False when they were taken back."""
        with self._changed:
            if self._state is _Guarded.FREE:
                self._state = _Guarded.COPYING
            return self._state is _Guarded.COPYING

    def end(self) -> None:
        """Tell that no copy will touch the blocks any more. Idempotent."""
        with self._changed:
            if self._state in (_Guarded.RELEASED, _Guarded.QUARANTINED):
                return
            self._mark_released("")
        self._on_release()

    def revoke(self, reason: str) -> bool:
        """
        Take the blocks back without waiting.

        Returns:
            True when nothing touches them; False while a copy does, which is then
            marked torn.
        """
        with self._changed:
            if self._state in (_Guarded.COPYING, _Guarded.QUARANTINED):
                self.torn = self.torn or reason
                return False
            if self._state is _Guarded.RELEASED:
                return True
            self._mark_released(reason)
        self._on_release()
        return True

    def quarantine(self) -> bool:
        """Give a copy up that does not end; False when none is under way."""
        with self._changed:
            if self._state is not _Guarded.COPYING:
                return False
            self._state = _Guarded.QUARANTINED
            self._changed.notify_all()
        return True

    def wait_released(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds; return whether it is released."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._state is _Guarded.RELEASED, timeout
            )

    def _mark_released(self, reason: str) -> None:
        self._state = _Guarded.RELEASED
        self.revoked = reason
        self._changed.notify_all()


class Ticket:
    """
    One admitted save or load of one span.

    Args:
        transfer_id: Its number, the same on all ranks.
        direction: Save or load.
        request_id: Whose blocks.
        generation: Which life of the request.
        span: Blocks and keys.
        row_ids: Rows that must arrive before the span is whole; items bring them.
        block_bytes: Bytes of one block over all rows.
        accepted_at: When it was asked for, on *clock*.
        deadline: Latest end, on *clock*.
        on_release: See ``BlockGuard``.
        log: The process's log; ``log`` of the ticket carries its ids as well.
        changed: Shared by all tickets of a runtime; its own if none is given.
        clock: In seconds.
    """

    __slots__ = (
        "_active_jobs",
        "_changed",
        "_is_told",
        "_log",
        "_process_log",
        "_resources",
        "accepted_at",
        "block_bytes",
        "clock",
        "deadline",
        "direction",
        "generation",
        "guard",
        "outcome",
        "owns_resources",
        "read_lease",
        "released_at",
        "request_id",
        "row_ids",
        "rows_left",
        "span",
        "stage",
        "stage_seconds",
        "transfer_id",
        "write_lease",
    )

    def __init__(
        self,
        *,
        transfer_id: TransferId,
        direction: Direction,
        request_id: RequestId,
        generation: int,
        span: BlockSpan,
        row_ids: tuple[RowId, ...],
        block_bytes: int,
        accepted_at: float,
        deadline: float,
        on_release: Callable[["Ticket"], None],
        log: Log,
        changed: Condition | None = None,
        clock: Callable[[], float] = SYSTEM.monotonic,
    ) -> None:
        self.transfer_id = transfer_id
        self.direction = direction
        self.request_id = request_id
        self.generation = generation
        self.span = span
        self.row_ids = row_ids
        self.rows_left = set(row_ids)
        self.block_bytes = block_bytes
        self.accepted_at = accepted_at
        self.clock = clock
        self.released_at = 0.0
        self.deadline = deadline
        self._process_log = log
        self._log: Log | None = None
        self.stage = "queue"
        self.stage_seconds: dict[str, float] = {}
        self.outcome: Outcome | None = None
        self.owns_resources = False
        self.write_lease: WriteLease | None = None
        self.read_lease: ReadLease | None = None
        self._changed = changed or SYSTEM.condition()
        self._is_told = False
        self._active_jobs = 0
        self._resources: contextlib.ExitStack | None = None

        def released() -> None:
            self.released_at = clock()
            on_release(self)

        self.guard = BlockGuard(released, self._changed)

    @property
    def log(self) -> Log:
        """The log with the ticket's ids; bound when it is first used."""
        if self._log is None:
            self._log = self._process_log.bind(
                request_id=self.request_id,
                transfer_id=self.transfer_id,
                direction=self.direction.value,
                generation=self.generation,
            )
        return self._log

    @property
    def nbytes(self) -> int:
        """Bytes of all its blocks."""
        return self.block_bytes * len(self.span)

    @property
    def lane_key(self) -> LaneKey:
        """The lane it travels in."""
        return (self.direction, self.request_id, self.generation)

    def own(self, resource: contextlib.AbstractContextManager[object]) -> None:
        """Tie a resource to the ticket; ``unwind`` leaves it exactly once."""
        if self._resources is None:
            self._resources = contextlib.ExitStack()
        self._resources.enter_context(resource)
        self.owns_resources = True

    def settle(self, outcome: Outcome) -> bool:
        """Give the last word; False when it was given before."""
        with self._changed:
            if self.outcome is not None:
                return False
            self.outcome = outcome
        return True

    def mark_told(self) -> None:
        """Let waiters go: the ticket is settled and the notice of it is on its way."""
        with self._changed:
            self._is_told = True
            self._changed.notify_all()

    def wait_told(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds; return whether its end was told."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_told, timeout)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """
        Mark a copy job as running on this ticket, so that resources outlive it.

        A job that raises unwinds the ticket's resources on its own thread.

        Raises:
            TicketOverError: The ticket is settled; the job must not start.
        """
        with self._changed:
            if self.outcome is not None:
                raise TicketOverError(f"transfer {self.transfer_id} is settled")
            self._active_jobs += 1
        whole = False
        try:
            yield
            whole = True
        finally:
            with self._changed:
                self._active_jobs -= 1
            if not whole or self.outcome is not None:
                self.unwind()

    def unwind(self) -> None:
        """Leave all resources unless a job still uses them. May block: copy threads."""
        with self._changed:
            if self._active_jobs:
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
    """

    ticket: Ticket
    row_ids: tuple[RowId, ...]
    fence: Fence
