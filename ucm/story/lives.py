# SPDX-License-Identifier: Apache-2.0
"""
Puts together what belongs to one life of a request, over all processes.

A scheduler's lines name request and life. Workers' tickets name requests, one of them with
its life: a ticket goes to the life of that number, or to the last that had begun by then,
because ids and numbers come again after a restart.
"""

import bisect
from collections.abc import Iterator
from typing import Final

import attrs

from ucm.story.collected import Collected
from ucm.story.lines import Ended, Line, Matched, Missed, Settled

__all__ = ["Life", "lives_of"]

_SKEW_S: Final = 1.0
"""Clocks of one machine are one; a line is written some time after what it tells."""
_LOOKED_AT: Final = 64
"""How many lives of a request may share its tickets."""


@attrs.define
class Life:
    """
    One stay of a request in the engine's memory, with all that is known of it.

    Args:
        request_id: The engine's name for it.
        number: Which life of the request; 0 where no line says so.
        process: The scheduler that told of it; empty if none did.
    """

    request_id: str
    number: int = 0
    process: str = ""
    ended: Ended | None = None
    missed: Missed | None = None
    matched: Matched | None = None
    tickets: list[Settled] = attrs.Factory(list)

    def lines(self) -> Iterator[Line]:
        """Yield all that was told of it."""
        told: tuple[Line | None, ...] = (self.ended, self.missed, self.matched)
        yield from filter(None, told)
        yield from self.tickets

    @property
    def begin_s(self) -> float:
        """When it began, as far as is known."""
        if self.ended is not None and self.ended.began_s is not None:
            return self.ended.began_s
        return min(line.when_s for line in self.lines())

    @property
    def end_s(self) -> float:
        """When it ended, or was heard of last; its saves may go on behind that."""
        if self.ended is not None:
            return max(self.ended.timestamp_s, self.begin_s)
        return max(line.timestamp_s for line in self.lines())

    @property
    def outcome(self) -> str:
        """How it ended: ``finished``, ``aborted``, or ``open`` if no line says so."""
        return "open" if self.ended is None else self.ended.outcome

    @property
    def marks(self) -> tuple[str, ...]:
        """What befell it, besides its outcome: ``preempted``, ``failed``, ``refused``."""
        ended = self.ended
        befell = {
            "preempted": ended is not None and ended.preemptions > 0,
            "failed": (ended is not None and bool(ended.load_failure))
            or any(ticket.outcome == "failed" for ticket in self.tickets),
            "refused": any(ticket.outcome == "refused" for ticket in self.tickets),
        }
        return tuple(mark for mark, is_so in befell.items() if is_so)


def lives_of(collected: Collected) -> list[Life]:
    """Return all lives in the order in which they began."""
    lives: dict[tuple[str, str, int], Life] = {}

    def same(line: Ended | Missed) -> Life:
        key = (line.process, line.request_id, line.life)
        return lives.setdefault(key, Life(line.request_id, line.life, line.process))

    for ended in collected.ended.lines():
        same(ended).ended = ended
    for missed in collected.missed.lines():
        same(missed).missed = missed
    known: dict[str, _Known] = {}
    for life in sorted(lives.values(), key=lambda life: life.begin_s):
        known.setdefault(life.request_id, _Known()).add(life)
    for matched in collected.matched.lines():
        _of(known, matched, matched.request_id, matched.life).matched = matched
    for ticket in collected.settled.lines():
        for owner in ticket.owners:
            _of(known, ticket, owner, ticket.generation).tickets.append(ticket)
    found = [life for candidates in known.values() for life in candidates.lives]
    return sorted(found, key=lambda life: life.begin_s)


@attrs.define
class _Known:
    """Lives of one request in the order in which they began, and when that was."""

    lives: list[Life] = attrs.Factory(list)
    begins: list[float] = attrs.Factory(list)

    def add(self, life: Life) -> None:
        self.lives.append(life)
        self.begins.append(life.begin_s)


def _of(
    known: dict[str, _Known], line: Line, request_id: str, number: int | None
) -> Life:
    """Return whose a line is; a life of which no scheduler has told if there is none."""
    candidates = known.setdefault(request_id, _Known())
    if not candidates.lives:
        life = Life(request_id, number or 0)
        candidates.lives.append(life)
        candidates.begins.append(line.when_s)
        return life
    begun = bisect.bisect_right(candidates.begins, line.when_s + _SKEW_S)
    newest = candidates.lives[max(0, begun - _LOOKED_AT) : begun]
    same = [life for life in newest if life.number == number]
    return (same or newest or candidates.lives[:1])[-1]
