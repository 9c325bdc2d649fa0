# SPDX-License-Identifier: Apache-2.0
"""
Bars over time: which lane each life and each ticket is drawn in, and what it says.

A lane is all lives, or the tickets of one process and direction; bars that overlap take
rows of their own. Moments are seconds after the first one.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from ucm.settings import seconds_text, size_text
from ucm.story.lines import Settled
from ucm.story.lives import Life
from ucm.story.misses import explain_failure, explain_missed
from ucm.story.told import summary_of

__all__ = ["MOST_EDGES", "STAGES", "Bar", "Drawing", "Lane", "draw"]

MOST_EDGES: Final = 256
"""Stages of one ticket that are drawn."""
_LONG_GAP: Final = 0.2
"""Of all the time in which there was something."""
_MOST_GAPS: Final = 50

STAGES: Final[dict[str, str]] = {
    "event_wait": "waits until the engine has written the blocks",
    "gather": "copies blocks out of the engine's memory",
    "gather_wait": "waits for that copy on the device",
    "transfer": "hands the bytes to the store",
    "confirm": "makes sure that the engine did not overwrite them meanwhile",
    "commit": "makes the blocks visible to look-ups",
    "fetch": "reads blocks out of the store and checks them",
    "scatter": "copies blocks into the engine's memory",
    "verify": "checks them while the device copies",
    "scatter_wait": "waits for that copy on the device",
    "publish": "gives the blocks to the engine",
}
"""What each stage does, in the order in which a ticket passes them."""


@attrs.frozen
class Bar:
    """
    A life or a ticket.

    Args:
        name: What is written on it.
        begin_s: When it began.
        end_s: When it ended.
        outcome: How it ended, one word.
        marks: What else befell it.
        stages: Name, begin and end, after ``begin_s``.
        owners: Requests that it belongs to.
        facts: What is told when it is pointed at.
        released_s: When the engine could reuse its blocks, after ``begin_s``.
        row: Where in its lane.
    """

    name: str
    begin_s: float
    end_s: float
    outcome: str
    marks: tuple[str, ...] = ()
    stages: tuple[tuple[str, float, float], ...] = ()
    owners: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    released_s: float | None = None
    row: int = 0


@attrs.frozen
class Lane:
    """Bars of one kind: ``requests``, ``load`` or ``save``, and whose."""

    kind: str
    process: str
    bars: tuple[Bar, ...]

    @property
    def rows(self) -> int:
        """How many rows the bars take."""
        return 1 + max(bar.row for bar in self.bars)


@attrs.frozen
class Drawing:
    """
    All lanes.

    Args:
        began_s: The first moment, in Unix time.
        span_s: Seconds to the last one.
        lanes: From the top down.
        gaps: The longest stretches in which there is nothing, to be drawn short.
        notes: What was left out.
    """

    began_s: float
    span_s: float
    lanes: tuple[Lane, ...]
    gaps: tuple[tuple[float, float], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bars(self) -> list[Bar]:
        """All bars of all lanes."""
        return [bar for lane in self.lanes for bar in lane.bars]


def draw(lives: Sequence[Life], notes: Iterable[str] = ()) -> Drawing:
    """Return the drawing of lives and their tickets."""
    tickets = {id(ticket): ticket for life in lives for ticket in life.tickets}
    moments = [
        *((life.begin_s, life.end_s) for life in lives),
        *((ticket.when_s, ticket.end_s) for ticket in tickets.values()),
    ]
    began_s = min((begin for begin, _ in moments), default=0.0)
    span_s = max((end for _, end in moments), default=0.0) - began_s
    by_lane: dict[tuple[str, str], list[Bar]] = {}
    for ticket in tickets.values():
        lane = (ticket.process, ticket.direction)
        by_lane.setdefault(lane, []).append(_bar_of_ticket(ticket, began_s))
    lanes = [
        Lane(kind, who, _pack(by_lane[who, kind])) for who, kind in sorted(by_lane)
    ]
    if lives:
        drawn = _pack([_bar_of_life(life, began_s) for life in lives])
        lanes.insert(0, Lane("requests", "", drawn))
    bars = [(bar.begin_s, bar.end_s) for lane in lanes for bar in lane.bars]
    return Drawing(began_s, span_s, tuple(lanes), _gaps(bars), tuple(notes))


def _gaps(moments: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return what is far longer than it is worth a look, of all the time between."""
    found: list[tuple[float, float]] = []
    until = busy = 0.0
    for begin, end in sorted(moments):
        if begin > until:
            found.append((until, begin))
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    long = [gap for gap in found if gap[1] - gap[0] > _LONG_GAP * busy]
    longest = sorted(long, key=lambda gap: gap[0] - gap[1])[:_MOST_GAPS]
    return tuple(sorted(longest))


def _bar_of_life(life: Life, began_s: float) -> Bar:
    facts = [("request", life.request_id)]
    if life.number:
        facts.append(("times in memory", str(life.number)))
    facts += [("outcome", word) for word in (life.outcome, *life.marks)]
    facts.append(("took", seconds_text(life.end_s - life.begin_s)))
    facts += [("", sentence) for sentence in summary_of(life)]
    ended = life.ended
    for missed in life.missed[:1]:
        facts.append(("what to do", explain_missed(missed)[0].remedy))
    if ended is not None and ended.load_failure:
        facts.append(("what to do", explain_failure(ended.load_failure).remedy))
    return Bar(
        life.request_id,
        life.begin_s - began_s,
        life.end_s - began_s,
        life.outcome,
        life.marks,
        owners=(life.request_id,),
        facts=tuple(facts),
    )


def _bar_of_ticket(ticket: Settled, began_s: float) -> Bar:
    facts = [
        ("ticket", "" if ticket.number is None else str(ticket.number)),
        ("request", ", ".join(ticket.owners)),
        ("shared by", str(ticket.num_requests) if ticket.num_requests > 1 else ""),
        ("outcome", ticket.outcome),
        ("reason", ticket.reason or ""),
        ("error", ticket.error or ""),
        ("blocks", f"{ticket.committed} of {ticket.blocks} arrived"),
        ("stored already", str(ticket.skipped) if ticket.skipped else ""),
        ("bytes", size_text(ticket.nbytes)),
        ("took", seconds_text(ticket.end_s - ticket.when_s)),
    ]
    if ticket.released_s is not None:
        facts.append(("blocks released", f"after {seconds_text(ticket.released_s)}"))
    edges = ticket.edges[:MOST_EDGES]
    end_s = max(ticket.end_s, *(ticket.when_s + end for _, _, end in edges), 0.0)
    facts += [(stage, seconds_text(end - begin)) for stage, begin, end in edges[:32]]
    return Bar(
        f"{ticket.direction} {'' if ticket.number is None else ticket.number}".strip(),
        ticket.when_s - began_s,
        end_s - began_s,
        ticket.outcome,
        stages=tuple(edges),
        owners=ticket.owners,
        facts=tuple((name, text) for name, text in facts if text),
        released_s=ticket.released_s,
    )


def _pack(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    """Give bars that overlap rows of their own, the lowest that are free."""
    packed: list[Bar] = []
    busy: list[tuple[float, int]] = []  # until when, which row
    free: list[int] = []
    for bar in sorted(bars, key=lambda bar: bar.begin_s):
        while busy and busy[0][0] <= bar.begin_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (bar.end_s, row))
        packed.append(attrs.evolve(bar, row=row))
    return tuple(packed)
