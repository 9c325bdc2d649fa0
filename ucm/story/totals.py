# SPDX-License-Identifier: Apache-2.0
"""
Numbers over all lines: outcomes, bytes, tokens, and how long each stage took.

Durations are kept as counts of buckets of which four double the time, so that a quantile
is at most a fifth more than it was, whatever the number of lines; mean and greatest are
exact. Tallies keep a bounded number of words.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import attrs

from ucm.story.lines import Ended, Line, Missed, Settled
from ucm.story.misses import explain_missed

__all__ = ["Durations", "End", "Tally", "Totals", "totals_of"]

_MOST_WORDS: Final = 64
_REST: Final = "(others)"
_UNSAID: Final = "unknown"
_LOST: Final = ("refused", "failed", "cancelled")
"""Outcomes of a ticket whose blocks, or some of them, did not arrive."""
_PER_DOUBLING: Final = 4
_LEAST_S: Final = 1e-6
_IN_WORDS: Final = {"tokens: computed": "tokens: in the engine's own cache"}
"""What a log's key says otherwise: those had been computed before the request came."""


class End(NamedTuple):
    """
    How tickets came to nothing.

    Args:
        direction: ``save`` or ``load``.
        outcome: ``refused``, ``failed`` or ``cancelled``.
        reason: In a word of ``ucm.reasons.Reason``; ``unknown`` where the log has none.
        tickets: How many, on all ranks.
        blocks: Of these, that did not arrive.
    """

    direction: str
    outcome: str
    reason: str
    tickets: int
    blocks: int


class Tally:
    """Amounts by word; the words beyond a bound share one."""

    def __init__(self) -> None:
        self._amounts: dict[str, int] = {}

    def add(self, word: str, amount: int = 1) -> None:
        """Count an amount more."""
        amounts = self._amounts
        if word in amounts:
            amounts[word] += amount
            return
        if len(amounts) >= _MOST_WORDS:
            word = _REST
        amounts[word] = amounts.get(word, 0) + amount

    def __getitem__(self, word: str) -> int:
        """Return the amount of a word, 0 if it was never counted."""
        return self._amounts.get(word, 0)

    def items(self) -> list[tuple[str, int]]:
        """Return words and amounts, the greatest first."""
        return sorted(self._amounts.items(), key=lambda item: (-item[1], item[0]))

    def to_dict(self) -> dict[str, int]:
        """Return the same as a mapping."""
        return dict(self.items())


@attrs.define
class Durations:
    """How long something took, each time."""

    count: int = 0
    sum_s: float = 0.0
    greatest_s: float = 0.0
    _buckets: dict[int, int] = attrs.Factory(dict)

    def add(self, seconds: float) -> None:
        """Count one more."""
        bucket = 0
        if seconds > _LEAST_S:
            bucket = math.ceil(math.log2(seconds / _LEAST_S) * _PER_DOUBLING)
        elif seconds < 0:
            seconds = 0.0
        self.count += 1
        self.sum_s += seconds
        self.greatest_s = max(self.greatest_s, seconds)
        buckets = self._buckets
        buckets[bucket] = buckets.get(bucket, 0) + 1

    @property
    def mean_s(self) -> float:
        """The mean, 0 of none."""
        return self.sum_s / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return what this share took at most; up to a fifth too much."""
        rank, seen = math.ceil(share * self.count), 0
        for bucket, count in sorted(self._buckets.items()):
            seen += count
            if seen >= rank:
                limit: float = _LEAST_S * 2 ** (bucket / _PER_DOUBLING)
                return min(limit, self.greatest_s)
        return 0.0

    def histogram(self) -> list[tuple[float, int]]:
        """Return (upper bound in seconds, count) by doubling, from the least up."""
        doubled: dict[int, int] = {}
        for bucket, count in self._buckets.items():
            octave = -(-bucket // _PER_DOUBLING)
            doubled[octave] = doubled.get(octave, 0) + count
        octaves = range(min(doubled, default=0), max(doubled, default=-1) + 1)
        return [(_LEAST_S * 2.0**octave, doubled.get(octave, 0)) for octave in octaves]

    def to_dict(self) -> dict[str, object]:
        """Return counts, quantiles and histogram, for programs."""
        return {
            "count": self.count,
            "mean_s": self.mean_s,
            "p50_s": self.quantile(0.5),
            "p95_s": self.quantile(0.95),
            "max_s": self.greatest_s,
            "at_most_s": [[bound, count] for bound, count in self.histogram()],
        }


@attrs.define
class Totals:
    """What all lines amount to."""

    first_s: float = math.inf
    last_s: float = 0.0
    lives: Tally = attrs.Factory(Tally)
    """``finished``, ``aborted``; and how many were ``preempted``."""
    tokens: Tally = attrs.Factory(Tally)
    at_once: Tally = attrs.Factory(Tally)
    """Likewise of requests that ran and were never preempted; others load what they computed."""
    blocks: Tally = attrs.Factory(Tally)
    misses: Tally = attrs.Factory(Tally)
    missing_tokens: Tally = attrs.Factory(Tally)
    """By reason, tokens that were wanted and not found."""
    remedies: dict[str, Tally] = attrs.Factory(dict)
    """By reason, what to do about how many misses."""
    failed_loads: Tally = attrs.Factory(Tally)
    tickets: dict[str, Tally] = attrs.Factory(dict)
    """By direction, how many tickets had which outcome."""
    reasons: dict[tuple[str, str], Tally] = attrs.Factory(dict)
    """By direction and outcome, why tickets were refused, failed or were cancelled."""
    lost_blocks: dict[tuple[str, str], Tally] = attrs.Factory(dict)
    """Likewise, their blocks that did not arrive, on all ranks."""
    nbytes: dict[str, Tally] = attrs.Factory(dict)
    """By direction, bytes that arrived (``committed``), of those that were asked for."""
    durations: dict[str, Durations] = attrs.Factory(dict)
    """Of stages; of tickets, until their blocks were released and until they settled."""

    def add(self, line: Line) -> None:
        """Count a line."""
        self.first_s = min(self.first_s, line.when_s)
        self.last_s = max(self.last_s, line.timestamp_s)
        match line:
            case Ended():
                self._add_life(line)
            case Missed():
                self.misses.add(line.reason)
                missing = max(0, line.wanted_tokens - line.found_tokens)
                self.missing_tokens.add(line.reason, missing)
                self._add_remedy(line)
            case Settled():
                self._add_ticket(line)

    def _add_remedy(self, missed: Missed) -> None:
        reason = missed.reason if self.misses[missed.reason] else _REST
        remedy = explain_missed(missed)[0].remedy
        self.remedies.setdefault(reason, Tally()).add(remedy)

    def _add_life(self, ended: Ended) -> None:
        self.lives.add(ended.outcome)
        if ended.preemptions:
            self.lives.add("preempted")
        if ended.load_failure:
            self.failed_loads.add(ended.load_failure)
        for name in ("prompt", "computed", "matched", "loaded"):
            count = getattr(ended, f"{name}_tokens")
            self.tokens.add(name, count)
            if not (ended.preemptions or ended.never_ran):
                self.at_once.add(name, count)
        self.blocks.add("saved", ended.saved_blocks)
        self.blocks.add("dropped", ended.dropped_blocks)
        if ended.load_s:
            self._took("request: its load", ended.load_s)

    def _add_ticket(self, ticket: Settled) -> None:
        direction = ticket.direction if ticket.direction in ("save", "load") else _REST
        self.tickets.setdefault(direction, Tally()).add(ticket.outcome)
        if ticket.outcome in _LOST:
            how, reason = (direction, ticket.outcome), ticket.reason or _UNSAID
            lost = max(0, ticket.blocks - ticket.committed - ticket.skipped)
            self.reasons.setdefault(how, Tally()).add(reason)
            self.lost_blocks.setdefault(how, Tally()).add(reason, lost)
        nbytes = self.nbytes.setdefault(direction, Tally())
        nbytes.add("committed", ticket.committed_bytes)
        nbytes.add("asked for", ticket.nbytes)
        self._took(f"{direction}: settled", ticket.end_s - ticket.when_s)
        if ticket.released_s is not None:
            self._took(f"{direction}: released", ticket.released_s)
        for stage, begin, end in ticket.edges:
            self._took(f"{direction}: {stage}", end - begin)

    def _took(self, name: str, seconds: float) -> None:
        took = self.durations.get(name)
        if took is None:
            if len(self.durations) >= _MOST_WORDS:
                name = _REST
            took = self.durations.setdefault(name, Durations())
        took.add(seconds)

    def ends(self) -> Iterator[End]:
        """Yield how tickets came to nothing, by direction and outcome, the most first."""
        for (direction, outcome), tally in sorted(self.reasons.items()):
            lost = self.lost_blocks[direction, outcome]
            for reason, count in tally.items():
                yield End(direction, outcome, reason, count, lost[reason])

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last line."""
        return max(0.0, self.last_s - self.first_s)

    def hit_ratio(self, name: str = "loaded") -> tuple[int, int]:
        """Return tokens that need not be computed, and prompt tokens: ``at_once``."""
        return self.at_once[name], self.at_once["prompt"]

    def to_dict(self) -> dict[str, object]:
        """Return all of it, for programs."""
        loaded, prompt = self.hit_ratio()
        return {
            "first_s": None if math.isinf(self.first_s) else self.first_s,
            "last_s": self.last_s,
            "requests": self.lives.to_dict(),
            "tokens": self.tokens.to_dict(),
            "hit_ratio": {
                "loaded_tokens": loaded,
                "prompt_tokens": prompt,
                "ratio": loaded / prompt if prompt else None,
            },
            "blocks": self.blocks.to_dict(),
            "misses": self.misses.to_dict(),
            "missing_tokens": self.missing_tokens.to_dict(),
            "failed_loads": self.failed_loads.to_dict(),
            "tickets": {name: each.to_dict() for name, each in self.tickets.items()},
            "ends": [end._asdict() for end in self.ends()],
            "bytes": {name: each.to_dict() for name, each in self.nbytes.items()},
            "durations": {
                name: each.to_dict() for name, each in sorted(self.durations.items())
            },
        }

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Yield names and numbers that two runs can be compared by."""
        yield "seconds from first to last line", round(self.span_s, 3)
        groups = (
            ("requests", self.lives),
            ("tokens", self.tokens),
            ("blocks", self.blocks),
            ("misses", self.misses),
            ("failed loads", self.failed_loads),
            *((f"{name} tickets", each) for name, each in sorted(self.tickets.items())),
            *(
                (f"{direction} {outcome}", each)
                for (direction, outcome), each in sorted(self.reasons.items())
            ),
            *((f"{name} bytes", each) for name, each in sorted(self.nbytes.items())),
        )
        for group, tally in groups:
            for word, amount in sorted(tally.items()):
                name = f"{group}: {word}"
                yield _IN_WORDS.get(name, name), amount
        loaded, prompt = self.hit_ratio()
        if prompt:
            yield "hit ratio in percent", round(100 * loaded / prompt, 2)
        for name, took in sorted(self.durations.items()):
            yield f"{name}, mean ms", round(took.mean_s * 1e3, 3)
            yield f"{name}, p95 ms", round(took.quantile(0.95) * 1e3, 3)


def totals_of(lines: Iterable[Line]) -> Totals:
    """Return what all lines amount to."""
    totals = Totals()
    for line in lines:
        totals.add(line)
    return totals
