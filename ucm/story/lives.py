# SPDX-License-Identifier: Apache-2.0
"""
Puts together what belongs to one life of a request, over all processes.

A life is what one ``request.ended`` is about: a request from its first look-up until nothing
of it was open, in all the times that it had blocks. Other lines name a request: they go to the
last life of it that had begun by then and was not over, because ids come again. What numbers
they have says nothing here: ``life`` counts within one request, ``generation`` over all of an
engine. Engines may have one request at once, as one that computes a prompt and one that goes
on: what a scheduler told goes to what it said has ended.
"""

import bisect
from collections import Counter, defaultdict
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
    A request from its first look-up to its end, with all that is known of it.

    Args:
        request_id: The engine's name for it.
        number: How often it was given blocks; 0 where no line says so.
        process: The scheduler that told of it; empty if none did.
    """

    request_id: str
    number: int = 0
    process: str = ""
    ended: Ended | None = None
    matched: list[Matched] = attrs.Factory(list)
    missed: list[Missed] = attrs.Factory(list)
    tickets: list[Settled] = attrs.Factory(list)

    def lines(self) -> Iterator[Line]:
        """Yield all that was told of it."""
        if self.ended is not None:
            yield self.ended
        yield from self.matched
        yield from self.missed
        yield from self.tickets

    @property
    def begin_s(self) -> float:
        """When it began, as far as is known."""
        if self.ended is not None and self.ended.began_s is not None:
            return self.ended.began_s
        return min(line.when_s for line in self.lines())

    @property
    def end_s(self) -> float:
        """When nothing of it was open any more, or when it was heard of last."""
        if self.ended is not None:
            return max(self.ended.timestamp_s, self.begin_s)
        return max(line.timestamp_s for line in self.lines())

    @property
    def outcome(self) -> str:
        """How it ended: ``finished``, ``aborted``, or ``open`` if no line says so."""
        return "open" if self.ended is None else self.ended.outcome

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Tokens that were found, by where they were; none where no line says so."""
        if self.ended is not None:
            return self.ended.hit_tokens
        found: Counter[str] = Counter()
        for matched in self.matched:
            found.update(matched.hit_tokens)
        return dict(found)

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
    known: dict[tuple[str, str], _Known] = defaultdict(_Known)
    for ended in collected.ended.lines():
        life = Life(ended.request_id, ended.life, ended.process, ended)
        _add(known, life, ended.when_s)
    for missed in collected.missed.lines():
        life = _of(known, missed, missed.request_id, missed.life, by=missed.process)
        life.missed.append(missed)
    for matched in collected.matched.lines():
        life = _of(known, matched, matched.request_id, by=matched.process)
        life.matched.append(matched)
    for ticket in collected.settled.lines():
        for owner in ticket.owners:
            _of(known, ticket, owner).tickets.append(ticket)
    found = [life for (_, by), some in known.items() if not by for life in some.lives]
    return sorted(found, key=lambda life: life.begin_s)


@attrs.define
class _Known:
    """Lives of a request in the order in which they began, and when that was."""

    lives: list[Life] = attrs.Factory(list)
    begins: list[float] = attrs.Factory(list)

    def add(self, life: Life, begin_s: float) -> None:
        at = bisect.bisect_right(self.begins, begin_s)
        self.lives.insert(at, life)
        self.begins.insert(at, begin_s)

    def begun_by(self, when_s: float) -> Iterator[Life]:
        """Yield some that had begun by then, the last one first."""
        begun = bisect.bisect_right(self.begins, when_s)
        return reversed(self.lives[max(0, begun - _LOOKED_AT) : begun])


def _add(known: dict[tuple[str, str], _Known], life: Life, begin_s: float) -> Life:
    for by in {life.process, ""}:
        known[life.request_id, by].add(life, begin_s)
    return life


def _of(
    known: dict[tuple[str, str], _Known],
    line: Line,
    request_id: str,
    number: int = 0,
    by: str = "",
) -> Life:
    """
    Return whose a line is; a life whose end nobody has told of if there is none.

    Args:
        known: By their requests and schedulers; those of all schedulers by none as well.
        line: What was told.
        request_id: Of which request.
        number: How often that had been given blocks, if it is said.
        by: The scheduler that told; empty: a worker, and whose it is no line says.
    """
    candidates = known[request_id, by]
    for skew_s in (0.0, _SKEW_S):
        for life in candidates.begun_by(line.when_s + skew_s):
            if life.ended is None or life.end_s + skew_s >= line.when_s:
                return life
    if by or not candidates.lives:  # a scheduler's lines have one clock
        return _add(known, Life(request_id, number, by), line.when_s)
    return next(candidates.begun_by(line.when_s + _SKEW_S), candidates.lives[0])
