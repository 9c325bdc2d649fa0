# SPDX-License-Identifier: Apache-2.0
"""
Stages and the typed chain that joins them.

A stage takes an item as the one before has left it. That has a type of its own, though
the object is the same, so that a chain that leaves a stage out does not type-check.
``LoopStage`` waits on the event loop and must not block it, a ``FenceStage`` for a device's
fence; ``CopyStage`` blocks a copy thread. Neighbouring copy stages of one worker have no
wait between them and run as one worker call, a *segment*: separate types with separate
tests and trace marks, one hop.
"""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any, Final, Generic, TypeVar, cast

import attrs

from ucm.devices.abc import Fence
from ucm.errors import PipelineError, StageFailedError, text_of
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.outcomes import OutcomeKind, outcome_of
from ucm.pipeline.ring import BEGIN, END
from ucm.pipeline.waiting import fence_passed, has_passed
from ucm.reasons import Reason
from ucm.tracing import STAGE_FAILED, STAGE_FINISHED, STAGE_STARTED

__all__ = [
    "STORE_WORKER",
    "VERIFY_WORKER",
    "Chain",
    "CopyStage",
    "FenceStage",
    "LoopStage",
    "Segment",
    "Stage",
    "fail",
]

STORE_WORKER: Final = "store"
"""The copy thread of what comes behind the device's copy."""
VERIFY_WORKER: Final = "verify"
"""The copy threads that hold bytes against their checksums, while the device copies."""


In = TypeVar("In", bound=Item)
Mid = TypeVar("Mid", bound=Item)
Out = TypeVar("Out", bound=Item)


class Stage(ABC, Generic[In, Out]):
    """One step of a chain."""

    name: str
    """Fixed word for traces and errors."""


class LoopStage(Stage[In, Out]):
    """
    A stage that waits on the event loop.

    ``awaits_copy`` tells that it waits for a copy that has begun: such a wait goes on
    when the ticket is over, and nobody knows when the copy ends if it fails.
    """

    awaits_copy = False

    def try_now(self, given: In) -> Out | None:
        """Do the step if it needs no waiting; None: ``run`` does it. Raises nothing."""
        return None

    def awaited(self, given: In) -> Fence | None:
        """Return the fence behind whose end ``try_now`` does the step, if that is all."""
        return None

    @abstractmethod
    async def run(self, given: In) -> Out:
        """Do the step. Cancelled at the ticket's deadline."""


class FenceStage(LoopStage[In, Out]):
    """A loop stage that waits for one fence."""

    @abstractmethod
    def awaited(self, given: In) -> Fence:
        """Return the fence."""

    @abstractmethod
    def passed(self, given: In) -> Out:
        """Do the step, behind the fence. Raises nothing."""

    def try_now(self, given: In) -> Out | None:
        """Do the step if the fence has passed."""
        return self.passed(given) if has_passed(self.awaited(given)) else None

    async def run(self, given: In) -> Out:
        """Wait where the fence calls nobody, or raise why it never passes."""
        await fence_passed(self.awaited(given))
        return self.passed(given)


class CopyStage(Stage[In, Out]):
    """A stage that runs on a copy thread; it may block."""

    worker: str = "copy"
    """Which of the direction's copy threads it runs on."""
    is_foreign = False
    """Whether it is a host's own: it may raise anything, and return anything."""

    def is_for(self, item: Item) -> bool:
        """Return whether there is anything to do for an item; else it passes by."""
        return True

    @abstractmethod
    def run(self, given: In) -> Out:
        """Do the step."""


class Segment:
    """
    Stages that run without a hop between them: one loop stage, or copy stages.

    Args:
        stages: At least one.
    """

    def __init__(self, stages: tuple[Stage[Any, Any], ...]) -> None:
        first = stages[0]
        self.stages = stages
        self._loop_stage = cast(LoopStage[Any, Any], first)
        """Of a segment of the loop the one that it has."""
        self._copy_stages = [
            (each, type(each).is_for is CopyStage.is_for)
            for each in stages
            if isinstance(each, CopyStage)
        ]  # each with whether it is for every item
        self._is_always = any(is_always for _, is_always in self._copy_stages)
        self.worker = first.worker if isinstance(first, CopyStage) else ""
        """The copy thread it runs on; empty for a loop stage."""
        self.is_copy = bool(self.worker)
        """Whether it runs on a copy thread."""
        self.is_behind_copy = self.worker == STORE_WORKER
        """Whether it needs slots of the store only, none of the engine's blocks."""
        self.awaits_copy = isinstance(first, LoopStage) and first.awaits_copy
        """Whether it waits for a copy that has begun."""
        self.copy_wait: Segment | None = None
        """The next one, if that does."""

    def is_for(self, item: Item) -> bool:
        """Return whether any of its copy stages has anything to do for an item."""
        return self._is_always or any(
            each.is_for(item) for each, _ in self._copy_stages
        )

    def run_copy(self, item: Item) -> None:
        """
        Run all copy stages on the calling copy thread; the last one may end the ticket.

        Raises:
            TicketOverError: The ticket has ended before or between stages.
            PipelineError: A host's own stage raised what would end the thread.
            TypeError: One returned something else than it was given.
        """
        ticket = item.ticket
        ticket.begin_work()
        try:
            for stage, is_always in self._copy_stages:
                if ticket.outcome is not None:
                    raise TicketOverError(Reason.OVER)
                if is_always or stage.is_for(item):
                    started = _begun(stage.name, item)
                    if stage.is_foreign:
                        _run_foreign(stage, item)
                    else:
                        stage.run(item)
                    _ended(stage.name, item, started)
            if item.outcome is not None:
                ticket.end(item.outcome)
        finally:
            ticket.end_work()

    def try_now(self, item: Item) -> bool:
        """Run the one loop stage if it need not wait; return whether it did."""
        if self._loop_stage.awaited(item) is not None:
            self.begin_wait(item)
        if self._loop_stage.try_now(item) is None:
            return False
        self._end_wait(item)
        return True

    def awaited(self, item: Item) -> Fence | None:
        """Return the fence that the one loop stage waits for, if for nothing else."""
        return self._loop_stage.awaited(item)

    def begin_wait(self, item: Item) -> None:
        """Begin the one loop stage, unless that was done."""
        item.waits_since = item.waits_since or _begun(self._loop_stage.name, item)

    def _end_wait(self, item: Item) -> None:
        self.begin_wait(item)
        _ended(self._loop_stage.name, item, item.waits_since)
        item.waits_since = 0.0

    async def run_loop(self, item: Item) -> None:
        """Run the one loop stage."""
        self.begin_wait(item)
        await self._loop_stage.run(item)
        self._end_wait(item)


def fail(item: Item, error: Exception) -> None:
    """End an item's ticket with what a stage has raised; on any thread."""
    ticket = item.ticket
    item.has_failed = True
    outcome = outcome_of(error)
    if outcome.kind is OutcomeKind.FAILED:
        where = _where(item)
        failure = StageFailedError(str(where["stage"]), ticket.transfer_id)
        outcome = attrs.evolve(outcome, error=f"{failure}: {outcome.error}")
        told = {"reason": outcome.reason, "error": outcome.error}
        ticket.log.warning(STAGE_FAILED, **where, **told)
    if item.segment.awaits_copy:
        ticket.give_up()  # nobody can tell any more when the copy ends
    ticket.end(outcome)


def _run_foreign(stage: CopyStage[Any, Any], item: Item) -> None:
    """Run a host's own stage, so that what it does is its item's end at the worst."""
    try:
        returned = stage.run(item)
    except BaseException as exc:
        if isinstance(exc, Exception):
            raise
        raise PipelineError(f"it raised {text_of(exc)}") from exc
    if returned is not item:
        raise TypeError(f"it returned {returned!r}, not what it was given")


def _begun(stage: str, item: Item) -> float:
    """Take note that a stage begins; return when."""
    ticket = item.ticket
    ticket.stages[item.row_ids] = stage
    if ticket.is_traced:
        ticket.log.debug(STAGE_STARTED, **_where(item))
    now = ticket.clock()
    if stage not in ticket.stage_times:
        ticket.stage_times[stage] = (now, 0.0, 0.0)
    ticket.mark((now, ticket.transfer_id, stage, BEGIN))
    return now


def _ended(stage: str, item: Item, started: float) -> None:
    """Take note that a stage has ended, not that it has failed."""
    ticket = item.ticket
    now = ticket.clock()
    first, last, spent = ticket.stage_times[stage]
    elapsed = now - max(started, last)  # rows that wait beside each other wait once
    ticket.stage_times[stage] = (first, now, spent + elapsed)
    ticket.mark((now, ticket.transfer_id, stage, END))
    if ticket.is_traced:
        ticket.log.debug(STAGE_FINISHED, **_where(item), elapsed_s=elapsed)


def _where(item: Item) -> dict[str, object]:
    """Return what the log says of an item: its stage, and its rows if not all."""
    where: dict[str, object] = {"stage": item.ticket.stages.get(item.row_ids, "queue")}
    if item.is_partial:
        where["rows"] = list(item.row_ids)
    return where


@attrs.frozen
class Chain(Generic[In, Out]):
    """Stages in order; ``Chain.start(a).then(b)`` type-checks that b takes a's value."""

    stages: tuple[Stage[Any, Any], ...]

    @classmethod
    def start(cls, stage: Stage[In, Out]) -> "Chain[In, Out]":
        """Return a chain of one stage."""
        return cls((stage,))

    def then(self, stage: Stage[Out, Mid]) -> "Chain[In, Mid]":
        """Return this chain with one more stage at its end."""
        return Chain((*self.stages, stage))

    def join(self, other: "Chain[Out, Mid]") -> "Chain[In, Mid]":
        """Return this chain with the stages of another one at its end."""
        return Chain((*self.stages, *other.stages))

    def segments(self) -> tuple[Segment, ...]:
        """Return the stages grouped so that neighbours on one thread share a call."""
        groups: list[list[Stage[Any, Any]]] = []
        for stage in self.stages:
            last = groups[-1][-1] if groups else None
            if (
                isinstance(last, CopyStage)
                and isinstance(stage, CopyStage)
                and last.worker == stage.worker
            ):
                groups[-1].append(stage)
            else:
                groups.append([stage])
        segments = tuple(Segment(tuple(group)) for group in groups)
        for segment, after in pairwise(segments):
            segment.copy_wait = after if after.awaits_copy else None
        return segments
