# SPDX-License-Identifier: Apache-2.0
"""
How far the requests of one rank are, and what it has to tell its scheduler.

Both follow from what the rank's runtime tells. A request's load is over when all its
tickets have come, nothing writes its blocks any more, and the outcome of each was
noticed. A finished request's blocks are free when no save reads them, or only such as
were given up: these go nowhere any more.

A report is bounded as every message is: what is beyond goes with the next one.

Threading: all of it belongs to the engine's thread.
"""

from collections.abc import Iterable
from typing import Final, TypeVar

import attrs

from ucm.blocks import BlockHash, BlockKey, TransferId
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind, Ticket
from ucm.reasons import Reason
from ucm.scheduler.budget import failure_nbytes
from ucm.scheduler.messages import (
    MAX_MESSAGE_BYTES,
    Deferral,
    Failure,
    SpanOrder,
    StepReport,
    WeightsNews,
)

__all__ = ["MAX_IDS", "MAX_REASONS", "Load", "Outbox", "Progress"]

MAX_IDS: Final = 65536
"""Most tickets that one report names in each list."""
MAX_REASONS: Final = 1024
"""Of so many saves that failed a report says why."""
_FAILURE_NBYTES: Final = MAX_MESSAGE_BYTES // 4
_STORED = (OutcomeKind.COMMITTED, OutcomeKind.SKIPPED)

_T = TypeVar("_T")


@attrs.define
class Outbox:
    """What the next reports will say."""

    released: list[int] = attrs.Factory(list)
    quarantined: list[int] = attrs.Factory(list)
    settled_saves: list[int] = attrs.Factory(list)
    unstored_saves: list[int] = attrs.Factory(list)
    new_blocks: dict[int, int] = attrs.Factory(dict)
    why_unstored: dict[int, Reason] = attrs.Factory(dict)
    loads_done: list[int] = attrs.Factory(list)
    failures: list[Failure] = attrs.Factory(list)
    weights: WeightsNews | None = None
    reached: dict[int, int] = attrs.Factory(dict)
    told_unhealthy: bool = False
    cut_reports: int = 0

    def take(self, rank: int, *, healthy: bool) -> StepReport | None:
        """Return a report and forget what it says; None when there is nothing to tell."""
        is_told = healthy or self.told_unhealthy
        if not self._has_more() and is_told and self.weights is None:
            return None
        num_failures = self._num_failures() if self.failures else 0
        failures = _take(self.failures, num_failures)
        settled = _take(self.settled_saves, MAX_IDS)
        unstored = _take(self.unstored_saves, MAX_IDS)
        # A load whose failure is still to be told would count as loaded.
        done = () if self.failures else _take(self.loads_done, MAX_IDS)
        report = StepReport(
            rank=rank,
            released=_take(self.released, MAX_IDS),
            quarantined=_take(self.quarantined, MAX_IDS),
            settled_saves=settled,
            unstored_saves=unstored,
            new_blocks={
                each: self.new_blocks.pop(each)
                for each in (*settled, *unstored)
                if each in self.new_blocks
            },
            why_unstored=self._take_reasons(unstored) if unstored else {},
            loads_done=done,
            failures=failures,
            healthy=healthy,
            weights=self.weights,
            reached=self.reached,
        )
        self.weights, self.reached = None, {}
        self.told_unhealthy = not healthy
        self.cut_reports += self._has_more()
        return report

    def _has_more(self) -> bool:
        return bool(
            self.released
            or self.quarantined
            or self.settled_saves
            or self.unstored_saves
            or self.loads_done
            or self.failures
            or self.reached
        )

    def _take_reasons(self, unstored: Iterable[int]) -> dict[int, Reason]:
        told = [(each, self.why_unstored.pop(each, Reason.NONE)) for each in unstored]
        return dict(told[:MAX_REASONS])

    def _num_failures(self) -> int:
        """Return how many failures have room: one at least."""
        nbytes = 0
        for at, failure in enumerate(self.failures):
            nbytes += failure_nbytes(failure)
            if at and nbytes > _FAILURE_NBYTES:
                return at
        return len(self.failures)


@attrs.define
class Load:
    """
    A request that waits for its tickets.

    Args:
        waiting: Tickets whose end the engine has not been told.
        settled: Of these, tickets whose outcome was noticed.
        failed: One of the outcomes was no success.
        bad_blocks: The engine's blocks of such tickets.
    """

    waiting: set[TransferId] = attrs.Factory(set)
    settled: set[TransferId] = attrs.Factory(set)
    failed: bool = False
    bad_blocks: set[int] = attrs.Factory(set)


class Progress:
    """Saves, loads and delayed frees that are not over."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        """What the scheduler is to hear."""
        self._reading: dict[tuple[str, int], set[TransferId]] = {}
        self._loads: dict[str, Load] = {}
        self._deferred: dict[str, int] = {}
        self._late: set[TransferId] = set()
        self._unfinished = ""

    @property
    def is_awaited(self) -> bool:
        """Whether the engine waits for a load or for blocks."""
        return bool(self._loads or self._deferred)

    def begin_saves(self, orders: Iterable[SpanOrder]) -> None:
        """
        Take note of saves that will read blocks.

        To be called before ``defer`` with what the same plan defers: it may name a
        request whose last blocks it saves.
        """
        for order in orders:
            for owner in order.owners:
                reading = self._reading.setdefault(owner[:2], set())
                reading.add(TransferId(order.transfer_id))

    def saved_elsewhere(self, order: SpanOrder) -> None:
        """Take note of a save that a replica of this rank does."""
        self.outbox.released.append(order.transfer_id)
        self.outbox.settled_saves.append(order.transfer_id)

    def begin_loads(self, orders: Iterable[SpanOrder], unfinished: str = "") -> None:
        """
        Take note of a plan's loads.

        Args:
            orders: The loads.
            unfinished: The request of which more come with the next plan, if any.
        """
        self._unfinished = unfinished
        for order in orders:
            load = self._loads.setdefault(order.request_id, Load())
            load.waiting.add(TransferId(order.transfer_id))

    def came_late(self, transfer_ids: Iterable[int]) -> None:
        """Take note of loads whose layers did not wait: whatever is noticed, they failed."""
        for load in self._loads.values():
            self._late.update(load.waiting.intersection(transfer_ids))

    def defer(self, deferrals: Iterable[Deferral]) -> None:
        """Take note of finished requests whose blocks the engine keeps."""
        for deferral in deferrals:
            self._deferred[deferral.request_id] = deferral.generation

    def take_freed(self) -> set[str]:
        """Return deferred requests whose blocks nothing reads any more, each once."""
        freed = {
            request_id
            for request_id, generation in self._deferred.items()
            if (request_id, generation) not in self._reading
        }
        for request_id in freed:
            del self._deferred[request_id]
        return freed

    def take_loaded(self) -> dict[str, Load]:
        """Return the loads that are over, each once."""
        names = [
            name
            for name, load in self._loads.items()
            if not load.waiting and name != self._unfinished
        ]
        return {name: self._loads.pop(name) for name in names}

    def note(self, notices: Iterable[Notice]) -> None:
        """Take in what the runtime tells."""
        for notice in notices:
            if notice.ticket.direction is Direction.SAVE:
                self._save_noticed(notice)
            else:
                self._load_noticed(notice)

    def counts(self) -> dict[str, int]:
        """Return the size of every per-request container."""
        return {
            "reading": len(self._reading),
            "loads": len(self._loads),
            "deferred": len(self._deferred),
            "late": len(self._late),
        }

    def _save_noticed(self, notice: Notice) -> None:
        ticket, outbox = notice.ticket, self.outbox
        if notice.outcome is not None:
            is_stored = notice.outcome.kind in _STORED
            ids = outbox.settled_saves if is_stored else outbox.unstored_saves
            ids.append(ticket.transfer_id)
            if not is_stored:
                outbox.why_unstored[ticket.transfer_id] = notice.outcome.reason
            if notice.outcome.committed:
                outbox.new_blocks[ticket.transfer_id] = notice.outcome.committed
            return
        is_given_up = notice.kind is NoticeKind.QUARANTINED
        ids = outbox.quarantined if is_given_up else outbox.released
        ids.append(ticket.transfer_id)
        for owner in ticket.owners:
            reading = self._reading.get(life := owner[:2], set())
            reading.discard(ticket.transfer_id)
            if not reading:
                self._reading.pop(life, None)

    def _load_noticed(self, notice: Notice) -> None:
        """
        Take note of a load, which is over when nothing writes its blocks any more.

        Only notices count. A ticket's own outcome may be set already while its notice
        is still on the way; whoever trusted that would take a failure for a success.
        """
        ticket, outcome = notice.ticket, notice.outcome
        load = self._loads.get(ticket.request_id)
        if outcome is not None and ticket.transfer_id in self._late:
            self._late.discard(ticket.transfer_id)
            outcome = Outcome(OutcomeKind.FAILED, Reason.UNASKED)
        if load is not None and outcome is not None:
            load.settled.add(ticket.transfer_id)
        if outcome is not None and outcome.kind is not OutcomeKind.COMMITTED:
            if (
                outcome.reason != Reason.ROW_FAILED
            ):  # the ticket that did fail tells why
                self.outbox.failures.append(_failure(ticket, outcome))
            if load is not None:
                load.failed = True
                load.bad_blocks.update(ticket.span.block_ids)
        if load is None or not ticket.guard.is_released:
            return
        if ticket.transfer_id in load.settled & load.waiting:
            load.waiting.discard(ticket.transfer_id)
            self.outbox.loads_done.append(ticket.transfer_id)


def _failure(ticket: Ticket, outcome: Outcome) -> Failure:
    """
    Blame the block that failed, if one is known.

    No block is to blame for a load that came too late, was refused, not asked for or
    never begun: its request loads nothing any more, but others find the block, as soon
    as they may.
    """
    bad_hash = BlockHash(b"")
    if outcome.bad_key:
        bad_hash = BlockHash(BlockKey.unpack(outcome.bad_key).block_hash)
    return Failure(
        transfer_id=ticket.transfer_id,
        request_id=ticket.request_id,
        generation=ticket.generation,
        group_id=ticket.span.group_id,
        bad_hash=bad_hash,
        reason=outcome.reason,
    )


def _take(items: list[_T], most: int) -> tuple[_T, ...]:
    """Take the first items out of a list."""
    taken = tuple(items[:most])
    del items[:most]
    return taken
