# SPDX-License-Identifier: Apache-2.0
"""
Tickets: one admitted save or load of one span, from its first fact to its one end.

A ticket's rows come as one item or, layer-wise, as several: each is copied as soon as
its fence has passed, and the ticket is whole when the copy of the last one is over.

Everybody else tells a ticket *facts*; what follows from them is decided here and in its
guard, which knows of the blocks::

    fact (told by)                         what follows
    ------------------------------------   -----------------------------------------------
    copy begins, ends (stages)             the guard: COPYING, and back; the blocks are
                                           released behind the last row
    job begins, ends (segments)            ``begin_work``: none begins behind the end
    blocks taken back (engine's thread)    the guard: released at once, or torn, or lost
    all stages done (a segment)            ``end`` with what the last one says
    a stage raised (``stage.fail``)        ``end`` with what the error makes of it
    out of time, or hung (``deadlines``)   ``cancel``: ``end``; under a copy only torn
    its copy never ends (``deadlines``)    ``give_up``: quarantined, then ``end``
    it is abandoned (runtime)              ``end`` with that reason

``end`` gives the last word, once, and does all that goes with it::

    OPEN --end--> ENDED   the blocks are taken back, or torn under a copy
      |             |     whoever listens is told, and then those who wait
      |             +---> slots are given back as soon as no job and no copy uses them;
      |                   never those of a copy that was given up
      +--(a job ends behind the end, an item leaves its lane): looked at again

What may be *visible* is decided here as well: ``counting`` is asked before a save is
committed, ``BlockGuard.publish`` before a load's blocks are the engine's.

Threading: facts come from any thread. A ticket's other fields belong to the loop until a
copy job runs on it, and to that job while it runs. One lock serves all tickets of a
runtime (``Changes``).
"""

import contextlib
import enum
import logging
from collections.abc import Callable, Collection
from typing import Final

from ucm.blocks import BlockSpan, Owner, RequestId, RowId, TransferId, whose
from ucm.pipeline.guard import BlockGuard, TicketOverError
from ucm.pipeline.outcomes import NOWHERE, Origin, Outcome, OutcomeKind
from ucm.pipeline.ring import Edge
from ucm.pipeline.waiting import Changes
from ucm.reasons import Reason
from ucm.stores.abc import ReadLease, WriteLease
from ucm.threads import SYSTEM
from ucm.tracing import Log

__all__ = [
    "Direction",
    "LaneKey",
    "Listener",
    "Outcome",
    "OutcomeKind",
    "Ticket",
]


class Direction(enum.Enum):
    """Which way a ticket moves bytes."""

    SAVE = "save"
    LOAD = "load"

    __hash__ = object.__hash__  # Enum's own is slow, and lanes are found by it


LaneKey = tuple[Direction, RequestId, int]
"""Direction, request and its life: what shares one lane."""

_SHARED: Final = (RequestId(""), -1)


class Listener:
    """What a ticket tells of itself; on any thread, and must not block."""

    mark: Callable[[Edge], object] = staticmethod(lambda _: None)
    """Take note that a stage begins or ends."""

    def released(self, ticket: "Ticket") -> None:
        """Take note, once, that the engine may reuse its blocks."""

    def given_up(self, ticket: "Ticket") -> None:
        """Take note, once, that nobody will see the end of its copy."""

    def ended(self, ticket: "Ticket", outcome: Outcome) -> None:
        """Take note, once, of its end."""

    def failed(self, why: str) -> None:
        """Take note of what nobody can mend: nothing is served any more."""

    def unwind(self, ticket: "Ticket") -> None:
        """Have ``ticket.unwind`` called on a copy thread: it may block."""
        ticket.unwind()


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
        listener: Told what becomes of it.
        log: The process's log; ``log`` of the ticket carries its ids as well.
        origin: Where the order came from.
        changed: Shared by all tickets of a runtime; its own if none is given.
        clock: In seconds.
    """

    __slots__ = (
        "_changed",
        "_listener",
        "_log",
        "_num_jobs",
        "_process_log",
        "_resources",
        "_rows_left",
        "accepted_at",
        "begun_at",
        "block_bytes",
        "clock",
        "deadline",
        "direction",
        "guard",
        "is_given_up",
        "is_late",
        "is_noticed",
        "is_told",
        "is_traced",
        "lane_key",
        "mark",
        "nbytes",
        "origin",
        "outcome",
        "owners",
        "read_lease",
        "released_at",
        "row_ids",
        "rows_to_come",
        "span",
        "stage_times",
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
        listener: Listener,
        log: Log,
        origin: Origin = NOWHERE,
        changed: Changes | None = None,
        clock: Callable[[], float] = SYSTEM.monotonic,
    ) -> None:
        self.transfer_id = transfer_id
        self.direction = direction
        self.owners = owners
        self.lane_key = _lane_key(direction, owners)
        self.span = span
        self.row_ids = row_ids
        self._rows_left: Collection[RowId] = row_ids  # a set takes 2 KB
        self.rows_to_come = len(row_ids)  # no item has brought them
        self.block_bytes = block_bytes
        self.nbytes = block_bytes * len(span.keys)
        self.accepted_at = accepted_at
        self.clock = clock
        self.begun_at = self.released_at = 0.0
        self.deadline = deadline
        self.origin = origin
        self._listener = listener
        self.mark = listener.mark
        self._process_log = log
        self.is_traced = log.is_enabled_for(logging.DEBUG)
        """Whether anybody reads each step of it."""
        self._log: Log | None = None
        self.stages: dict[tuple[RowId, ...], str] = {}
        self.stage_times: dict[str, tuple[float, float, float]] = {}
        """First begin and last end of each stage, on *clock*, and how long it took."""
        self.outcome: Outcome | None = None
        self.write_lease: WriteLease | None = None
        self.read_lease: ReadLease | None = None
        self._changed = changed or Changes()
        self.is_told = False
        """Whether it is settled and the notice of it is on its way."""
        self.is_noticed = False
        """Whether the engine's thread has seen that notice."""
        self.is_late = False
        """Whether it was under a copy behind its deadline at the last look."""
        self.is_given_up = False
        """Whether its copy was."""
        self._num_jobs = 0
        self._resources: list[contextlib.AbstractContextManager[object]] = []
        self.guard = BlockGuard(
            self._released, self._changed, len(span), self._not_zeroed
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
    def is_worked_on(self) -> bool:
        """Whether a copy job runs on it right now, or its slots are being given back."""
        return self._num_jobs > 0

    def copied(self, row_ids: Collection[RowId]) -> bool:
        """Take note, and tell the guard, of copied rows; return whether it is whole."""
        with self._changed.lock:
            self._rows_left = frozenset(self._rows_left).difference(row_ids)
            whole = not self._rows_left
            self._changed.notify()
        self.guard.end(last=whole)
        return whole

    def wait_copied(self, row_ids: Collection[RowId], timeout: float) -> bool:
        """Block until the rows' copies are over or its end was told; return whether."""
        return self._changed.wait_for(
            lambda: self.is_told or frozenset(self._rows_left).isdisjoint(row_ids),
            timeout,
        )

    def own(self, resource: contextlib.AbstractContextManager[object]) -> None:
        """Tie a resource, entered, to the ticket; ``unwind`` leaves it exactly once."""
        self._resources.append(resource)

    def end(self, outcome: Outcome) -> bool:
        """Give the last word, and do what goes with it; False when it was given before."""
        with self._changed.lock:
            if self.outcome is not None:
                return False
            self.outcome = outcome
        self.guard.revoke(outcome.reason or Reason.OVER)
        try:
            self._listener.ended(self, outcome)
        finally:
            with self._changed.lock:
                self.is_told = True
                self._changed.notify()
            self.give_back()
        return True

    def cancel(self, reason: Reason) -> bool:
        """
        End it, unless a copy is under way, which does not count then.

        Args:
            reason: Why, if its blocks were not taken back before.

        Returns:
            Whether no copy is.
        """
        if not self.guard.revoke(reason):
            return False
        self.end(Outcome(OutcomeKind.CANCELLED, self.guard.taken_back or reason))
        return True

    def give_up(self) -> None:
        """
        End it under a copy that nobody will see the end of; nothing if there is none.

        A load stays in its guard: should the copy end after all, its request is told.
        """
        is_save, guard = self.direction is Direction.SAVE, self.guard
        if not self.is_given_up and (
            guard.quarantine() if is_save else guard.is_copying
        ):
            self.is_given_up = True
            self._listener.given_up(self)
            self.end(Outcome(OutcomeKind.FAILED, Reason.STUCK))
            why = f"a device copy of transfer {self.transfer_id} is stuck"
            self._listener.failed(why)

    def counting(self) -> frozenset[int]:
        """
        Return the positions of the blocks that must not be committed; others count.

        Raises:
            TicketOverError: None of them does.
        """
        if self.guard.torn:
            raise TicketOverError(self.guard.torn)
        if self.clock() > self.deadline:
            raise TicketOverError(Reason.DEADLINE)
        return self.guard.lost

    def wait_told(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds; return whether its end was told."""
        return self._changed.wait_for(lambda: self.is_told, timeout)

    def begin_work(self) -> None:
        """
        Tell that a copy job begins, which needs the resources until ``end_work``.

        Raises:
            TicketOverError: The ticket has ended; the job must not start.
        """
        with self._changed.lock:
            if self.outcome is not None:
                raise TicketOverError(Reason.OVER)
            self._num_jobs += 1
            self.begun_at = self.begun_at or self.clock()

    def end_work(self) -> None:
        """Tell that a copy job is over, on its thread."""
        with self._changed.lock:
            self._num_jobs -= 1
        if self.outcome is not None:
            self.unwind()

    def give_back(self) -> None:
        """Have slots given back that neither the ticket nor a copy needs any more."""
        if self.outcome is not None and self._resources and not self._is_in_use():
            self._listener.unwind(self)

    def unwind(self) -> None:
        """Leave all resources unless a copy still uses them. May block: copy threads."""
        with self._changed.lock:
            if self._is_in_use():
                return
            resources, self._resources = self._resources, []
            self._num_jobs += 1  # a store may hang here as well
        try:
            _leave(resources)
        finally:
            with self._changed.lock:
                self._num_jobs -= 1

    def _is_in_use(self) -> bool:
        guard = self.guard
        return self._num_jobs > 0 or guard.is_copying or guard.is_quarantined

    def _released(self) -> None:
        self.released_at = self.clock()
        self._listener.released(self)

    def _not_zeroed(self) -> None:
        # The request of a load waits for blocks that nobody can give back.
        self._listener.failed(f"blocks of transfer {self.transfer_id} are not zeroed")


def _lane_key(direction: Direction, owners: tuple[Owner, ...]) -> LaneKey:
    """
    Return the lane that a ticket travels in.

    Shared tickets have one of their own, all of them together: they keep their order
    among themselves, and none with what travels for one of their requests alone.
    """
    if len(owners) > 1:
        return (direction, *_SHARED)
    return (direction, RequestId(owners[0].request_id), owners[0].generation)


def _leave(resources: list[contextlib.AbstractContextManager[object]]) -> None:
    """Leave all of them, the last one first, also when one fails."""
    if resources:
        try:
            resources.pop().__exit__(None, None, None)
        finally:
            _leave(resources)
