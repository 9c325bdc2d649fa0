# SPDX-License-Identifier: Apache-2.0
"""The newest lines of each kind, in bounded memory and in whatever order they come."""

import heapq
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

import attrs

from ucm.story.lines import Ended, Line, Matched, Missed, Other, Settled

__all__ = ["MOST_LIVES", "MOST_TICKETS", "Collected", "Newest", "collect"]

MOST_LIVES: Final = 20_000
MOST_TICKETS: Final = 50_000
_MOST_OTHERS: Final = 2_000
_MOST_WEIGHT: Final = 4

_L = TypeVar("_L", bound=Line)


class Newest(Generic[_L]):
    """
    The newest lines of a kind.

    Args:
        most: How many are kept; fewer if they weigh more than four times that.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[float, int, _L]] = []
        self._weight = 0
        self._count = 0

    def add(self, line: _L) -> None:
        """Keep a line, instead of the oldest if there are too many."""
        self._count += 1
        self._weight += line.weight
        heapq.heappush(self._heap, (line.when_s, self._count, line))
        while len(self._heap) > self._most or (
            self._weight > _MOST_WEIGHT * self._most and len(self._heap) > 1
        ):
            self._weight -= heapq.heappop(self._heap)[2].weight

    @property
    def left_out(self) -> int:
        """How many were too many."""
        return self._count - len(self._heap)

    def lines(self) -> list[_L]:
        """Return them in the order of time."""
        return [line for _, _, line in sorted(self._heap, key=lambda entry: entry[:2])]


@attrs.define
class Collected:
    """What a story is made of, by kind."""

    ended: Newest[Ended]
    missed: Newest[Missed]
    matched: Newest[Matched]
    settled: Newest[Settled]
    others: Newest[Other]

    @classmethod
    def upto(cls, lives: int = MOST_LIVES, tickets: int = MOST_TICKETS) -> "Collected":
        """Return one that keeps so many."""
        return cls(
            Newest(lives),
            Newest(lives),
            Newest(lives),
            Newest(tickets),
            Newest(_MOST_OTHERS),
        )

    def add(self, line: Line) -> None:
        """Take a line."""
        match line:
            case Ended():
                self.ended.add(line)
            case Missed():
                self.missed.add(line)
            case Matched():
                self.matched.add(line)
            case Settled():
                self.settled.add(line)
            case Other():
                self.others.add(line)

    def notes(self) -> list[str]:
        """Return what was left out, as sentences."""
        told = {
            "older request(s) were left out": self.ended.left_out,
            "older look-up(s) were left out": max(
                self.missed.left_out, self.matched.left_out
            ),
            "older ticket(s) were left out": self.settled.left_out,
            "older line(s) of other kinds were left out": self.others.left_out,
        }
        return [f"{count} {text}" for text, count in told.items() if count]


def collect(
    lines: Iterable[Line],
    wants: Callable[[Line], bool] = lambda line: True,
    into: Collected | None = None,
) -> Collected:
    """Keep the newest of those lines that are wanted."""
    collected = into or Collected.upto()
    for line in lines:
        if wants(line):
            collected.add(line)
    return collected
