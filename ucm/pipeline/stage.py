# SPDX-License-Identifier: Apache-2.0
"""
Stages and the typed chain that joins them.

A stage turns one value into the next; the types of the values carry the order, so a
chain that leaves one out does not type-check. ``LoopStage`` waits on the event loop and
must not block it; ``CopyStage`` blocks a copy thread. Neighbouring copy stages of one
worker have no wait between them and run as one worker call, a *segment*: separate types
with separate tests and trace marks, one hop.
"""

from abc import ABC, abstractmethod
from typing import Any, Final, Generic, TypeVar, cast

import attrs

from ucm.blocks import RowId
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.tickets import Ticket
from ucm.reasons import Reason
from ucm.tracing import STAGE_FINISHED, STAGE_STARTED

__all__ = [
    "STORE_WORKER",
    "Carrier",
    "Chain",
    "CopyStage",
    "LoopStage",
    "Segment",
    "Stage",
    "stage_of",
]

STORE_WORKER: Final = "store"
"""The copy thread of what comes behind the device's copy."""


@attrs.frozen
class Carrier:
    """
    Base of the values that travel.

    Args:
        ticket: To which it belongs.
        row_ids: The rows that it brings.
    """

    ticket: Ticket
    row_ids: tuple[RowId, ...]


In = TypeVar("In", bound=Carrier)
Mid = TypeVar("Mid", bound=Carrier)
Out = TypeVar("Out", bound=Carrier)


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

    @abstractmethod
    async def run(self, given: In) -> Out:
        """Do the step. Cancelled at the ticket's deadline."""


class CopyStage(Stage[In, Out]):
    """A stage that runs on a copy thread; it may block."""

    worker: str = "copy"
    """Which of the direction's copy threads it runs on."""

    @abstractmethod
    def run(self, given: In) -> Out:
        """Do the step."""


@attrs.frozen
class Segment:
    """Stages that run without a hop between them: one loop stage, or copy stages."""

    stages: tuple[Stage[Any, Any], ...]
    worker: str = attrs.field(init=False)
    """The copy thread it runs on; empty for a loop stage."""
    is_copy: bool = attrs.field(init=False)
    """Whether it runs on a copy thread."""
    is_behind_copy: bool = attrs.field(init=False)
    """Whether it needs slots of the store only, none of the engine's blocks."""
    awaits_copy: bool = attrs.field(init=False)
    """Whether it waits for a copy that has begun."""

    @worker.default
    def _find_worker(self) -> str:
        stage = self.stages[0]
        return stage.worker if isinstance(stage, CopyStage) else ""

    @is_copy.default
    def _find_is_copy(self) -> bool:
        return bool(self.worker)

    @is_behind_copy.default
    def _find_is_behind_copy(self) -> bool:
        return self.worker == STORE_WORKER

    @awaits_copy.default
    def _find_awaits_copy(self) -> bool:
        stage = self.stages[0]
        return isinstance(stage, LoopStage) and stage.awaits_copy

    def run_copy(self, given: Carrier) -> Carrier:
        """
        Run all copy stages on the calling copy thread.

        Raises:
            TicketOverError: The ticket was settled before or between stages.
        """
        ticket = given.ticket
        with ticket.working():
            for stage in self.stages:
                if ticket.outcome is not None:
                    raise TicketOverError(Reason.OVER)
                started = _begun(stage.name, given)
                done = cast("CopyStage[Any, Any]", stage).run(given)
                _ended(stage.name, given, started)
                given = done
        return given

    def try_now(self, given: Carrier) -> Carrier | None:
        """Run the one loop stage if it need not wait; None if it must."""
        stage: LoopStage[Any, Any] = self.stages[0]  # type: ignore[assignment]
        done: Carrier | None = stage.try_now(given)
        if done is not None:
            _ended(stage.name, given, _begun(stage.name, given))
        return done

    async def run_loop(self, given: Carrier) -> Carrier:
        """Run the one loop stage."""
        if self.is_copy:
            raise TypeError(f"{self.stages[0].name} is no loop stage")
        stage: LoopStage[Any, Any] = self.stages[0]  # type: ignore[assignment]
        started = _begun(stage.name, given)
        done: Carrier = await stage.run(given)
        _ended(stage.name, given, started)
        return done


def _begun(stage: str, carrier: Carrier) -> float:
    """Take note that a stage begins; return when."""
    ticket = carrier.ticket
    ticket.stages[carrier.row_ids] = stage
    if ticket.is_traced:
        ticket.log.debug(STAGE_STARTED, **stage_of(carrier))
    return ticket.clock()


def _ended(stage: str, carrier: Carrier, started: float) -> None:
    """Take note that a stage has ended, not that it has failed."""
    ticket = carrier.ticket
    elapsed = ticket.clock() - started
    ticket.stage_seconds[stage] = ticket.stage_seconds.get(stage, 0.0) + elapsed
    if ticket.is_traced:
        ticket.log.debug(STAGE_FINISHED, **stage_of(carrier), elapsed_s=elapsed)


def stage_of(carrier: Carrier) -> dict[str, object]:
    """Return what the log says of an item: its stage, and its rows if not all."""
    ticket, rows = carrier.ticket, carrier.row_ids
    where: dict[str, object] = {"stage": ticket.stages.get(rows, "queue")}
    if len(rows) < len(ticket.row_ids):
        where["rows"] = list(rows)
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
        return tuple(Segment(tuple(group)) for group in groups)
