# SPDX-License-Identifier: Apache-2.0
"""
The life of one runtime, as the log of its process tells it.

Tickets that are over are kept for a while, so that a line too many is told apart from
one without an offer.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import attrs

from tests.kit.lockstep_rules import Event, Line, Rule, Violate, number_in, word_in
from tests.kit.lockstep_tickets import VERIFYING, TicketTrace, rows_in
from ucm.tracing import (
    HOLD_QUARANTINED,
    RUNTIME_CLOSED,
    RUNTIME_FAILED,
    RUNTIME_STARTED,
    SOURCE_RELEASED,
    STAGE_FAILED,
    STAGE_FINISHED,
    STAGE_STARTED,
    TICKET_ACCEPTED,
    TICKET_REFUSED,
    TICKET_SETTLED,
)

__all__ = ["QueueBounds", "RuntimeTrace"]

_OF_REFUSED: Final = (SOURCE_RELEASED, TICKET_SETTLED)
_CUT_OFF: Final = ("closed", "shutdown")
_KEPT: Final = 1024


@attrs.frozen
class QueueBounds:
    """
    What the queue of a runtime may hold.

    Args:
        tickets: Most saves that may wait.
        nbytes: Most bytes of saves that may wait.
    """

    tickets: int
    nbytes: int


@attrs.define
class _Lane:
    num_open: int = 0
    turns: dict[tuple[str, tuple[int, ...]], int] = attrs.Factory(dict)


def _lane_of(direction: str, event: Event) -> tuple[object, ...] | None:
    """Return what a ticket shares with others whose order counts, if it is told."""
    if "requests" in event:
        return (direction,)  # all that are of several requests, whichever these are
    # Without its generation, two lives of a request look like one lane.
    generation = event.get("generation")
    return None if generation is None else (direction, event["request_id"], generation)


class RuntimeTrace:
    """
    One runtime from its start to its end.

    Args:
        violate: Raises.
        tickets: Where tickets are counted, by direction and outcome.
        blocks: Where blocks are, likewise.
        bounds: Of the queue; not checked if none are given.
    """

    def __init__(
        self,
        violate: Violate,
        *,
        tickets: Counter[tuple[str, str]],
        blocks: Counter[tuple[str, str]],
        bounds: QueueBounds | None,
    ) -> None:
        self.is_started = False
        self._violate = violate
        self._tickets = tickets
        self._blocks = blocks
        self._bounds = bounds
        self._open: dict[int, TicketTrace] = {}
        self._over: OrderedDict[int, TicketTrace] = OrderedDict()
        self._lanes: dict[tuple[object, ...], _Lane] = {}
        self._num_offered = 0
        self._num_cut_off = 0
        self._is_closed = False
        self._is_quiet = False
        self._has_failed = False

    @property
    def num_open(self) -> int:
        """Tickets that are not settled or still keep blocks."""
        return len(self._open)

    def finish(self) -> None:
        """Check what must hold behind the last line."""
        if self.is_started and not self._is_closed:
            self._violate(Rule.CLOSED_AT_END, "there is no runtime.closed", ())
        self._check_open()

    # Offers.

    def _accepted(self, line: Line) -> None:
        self._check_quiet(line)
        ticket = self._offered(line, "")
        if ticket.lane is not None:
            self._lanes.setdefault(ticket.lane, _Lane()).num_open += 1
        if self._bounds is not None and ticket.direction == "save":
            self._check_bounds(self._bounds, ticket, line)

    def _refused(self, line: Line) -> None:
        self._offered(line, word_in(line[1], "reason"))

    def _offered(self, line: Line, refusal: str) -> TicketTrace:
        event = line[1]
        transfer_id = number_in(event, "transfer_id")
        known = self._open.get(transfer_id) or self._over.get(transfer_id)
        if known is not None:
            why = f"{known} was offered before"
            self._violate(Rule.OFFER_FIRST, why, [*known.story, line])
        direction = word_in(event, "direction")
        self._num_offered += 1
        ticket = self._open[transfer_id] = TicketTrace(
            transfer_id=transfer_id,
            direction=direction,
            lane=None if refusal else _lane_of(direction, event),
            turn=self._num_offered,
            blocks=number_in(event, "blocks"),
            nbytes=number_in(event, "nbytes"),
            rows=rows if isinstance(rows := event.get("rows"), int) else None,
            refusal=refusal,
            violate=self._violate,
            story=[line],
        )
        self._blocks[direction, "offered"] += ticket.blocks
        self._tickets[direction, "offered"] += 1
        return ticket

    def _check_bounds(
        self, bounds: QueueBounds, ticket: TicketTrace, line: Line
    ) -> None:
        """Compare the saves that waited before the offer with the bounds."""
        waited = number_in(line[1], "queue_tickets")
        nbytes = number_in(line[1], "queue_nbytes") + ticket.nbytes
        if waited >= bounds.tickets or (waited > 0 and nbytes > bounds.nbytes):
            why = f"{waited} saves waited, {nbytes} bytes with {ticket}: {bounds}"
            self._violate(Rule.QUEUE_BOUND, why, ticket.story)

    # What becomes of tickets.

    def _stage_started(self, line: Line) -> None:
        ticket = self._find(line)
        ticket.start_stage(line)
        lane = None if ticket.lane is None else self._lanes.get(ticket.lane)
        if lane is None:
            return
        stage, rows = word_in(line[1], "stage"), rows_in(line)
        is_ordered = bool(rows) or stage not in VERIFYING
        if is_ordered and ticket.turn < lane.turns.get((stage, rows), 0):
            why = f"{ticket} was overtaken before {stage}"
            self._violate(Rule.LANE_ORDER, why, ticket.story)
        lane.turns[stage, rows] = ticket.turn

    def _stage_ended(self, line: Line) -> None:
        self._find(line).end_stage(line)

    def _source_released(self, line: Line) -> None:
        ticket = self._find(line)
        ticket.release()
        self._look_if_over(ticket)

    def _quarantined(self, line: Line) -> None:
        ticket = self._find(line)
        ticket.quarantine()
        self._look_if_over(ticket)

    def _settled(self, line: Line) -> None:
        ticket = self._find(line)
        ends = ticket.settle(line)
        for word, blocks in ends.items():
            self._blocks[ticket.direction, word] += blocks
        self._tickets[ticket.direction, ticket.outcome] += 1
        if ticket.outcome == "cancelled" and line[1].get("reason") in _CUT_OFF:
            self._num_cut_off += 1
        self._look_if_over(ticket)

    def _look_if_over(self, ticket: TicketTrace) -> None:
        """Forget a ticket that is over, some time later."""
        if not ticket.is_over:
            return
        self._over[ticket.transfer_id] = self._open.pop(ticket.transfer_id)
        if len(self._over) > _KEPT:
            self._over.popitem(last=False)
        if ticket.lane is not None:
            lane = self._lanes[ticket.lane]
            lane.num_open -= 1
            if not lane.num_open:
                del self._lanes[ticket.lane]

    def _find(self, line: Line) -> TicketTrace:
        """Return the ticket of a line, which joins its story."""
        transfer_id, event = number_in(line[1], "transfer_id"), line[1]["event"]
        ticket = self._open.get(transfer_id) or self._over.get(transfer_id)
        if ticket is None:
            why = f"transfer {transfer_id} was never offered, or is long over"
            self._violate(Rule.OFFER_FIRST, why, [line])
        ticket.story.append(line)
        if not ticket.refusal:
            self._check_quiet(line)
        elif event not in _OF_REFUSED:
            why = f"{event} of {ticket}, which was refused"
            self._violate(Rule.REFUSED_ONLY, why, ticket.story)
        return ticket

    # The runtime itself.

    def _started(self, _: Line) -> None:
        self.is_started = True

    def _failed(self, line: Line) -> None:
        self._check_quiet(line)
        self._has_failed = True

    def _closed(self, line: Line) -> None:
        if self._is_closed:
            self._violate(Rule.CLOSED_LAST, "it was closed before", [line])
        self._is_closed = True
        self._is_quiet = bool(line[1].get("quiet"))
        if self._is_quiet:  # otherwise threads may be about to write their last lines
            self._check_open()
        abandoned = number_in(line[1], "abandoned")
        if not self._num_cut_off <= abandoned <= self._num_offered:
            why = f"{self._num_cut_off} of {self._num_offered} tickets were cut off"
            self._violate(Rule.ABANDONED, why, [line])

    def _check_open(self) -> None:
        for ticket in self._open.values():
            if not ticket.outcome:
                why = f"{ticket} has no last word"
                self._violate(Rule.SETTLED_AT_END, why, ticket.story)
            # Perhaps nobody was left who could tell of the end of a copy.
            is_lost = ticket.copy_began and (self._has_failed or not self._is_quiet)
            if ticket.has_blocks and not is_lost:
                why = f"{ticket} never gave its blocks back"
                self._violate(Rule.SOURCE_LEFT, why, ticket.story)

    def _check_quiet(self, line: Line) -> None:
        if self._is_closed and self._is_quiet:
            why = f"{line[1]['event']} behind the end"
            self._violate(Rule.CLOSED_LAST, why, [line])

    HANDLERS: ClassVar[Mapping[str, Callable[["RuntimeTrace", Line], None]]] = {
        RUNTIME_STARTED: _started,
        RUNTIME_FAILED: _failed,
        RUNTIME_CLOSED: _closed,
        TICKET_ACCEPTED: _accepted,
        TICKET_REFUSED: _refused,
        TICKET_SETTLED: _settled,
        STAGE_STARTED: _stage_started,
        STAGE_FINISHED: _stage_ended,
        STAGE_FAILED: _stage_ended,
        SOURCE_RELEASED: _source_released,
        HOLD_QUARANTINED: _quarantined,
    }
    """What is read, by event."""
