# SPDX-License-Identifier: Apache-2.0
"""
What else decides what a store finds: engines in front of it, retention, parts of blocks.

Part of ``benchmarks.replay``, which says how it is run.
"""

import random
from collections.abc import Callable, Iterator, Sequence

from ucm.replay.policies import LRU, Ours, Stamped
from ucm.replay.replaying import Score
from ucm.replay.traces import Request, Trace

__all__ = ["scenarios"]

_TTL_NS = 600 * 10**9
_SPAN_NS = 20_000_000
_RANKS = 8


def scenarios(trace: Trace, capacity: int) -> Iterator[dict[str, object]]:
    """Yield one finding after the other, each with its name and its ratios."""
    for engines in (1, 4):
        for name, kind in (("lru", LRU), ("ours", Ours)):
            for is_told in (False, True):
                yield _behind_engines(trace, kind, name, capacity, engines, is_told)
    for budget in (0.0, 0.1, 0.25, 0.5):
        yield _retained(trace, capacity, budget)
    for name, rule in (("apart", LRU), ("together", Ours)):
        yield _in_parts(trace, rule, name, capacity)


# -- engines -----------------------------------------------------------------------


def _behind_engines(
    trace: Trace,
    kind: Callable[[int, int], Stamped],
    name: str,
    capacity: int,
    engines: int,
    is_told: bool,  # noqa: FBT001
) -> dict[str, object]:
    """Requests take turns between engines, each with a cache of half the store's size."""
    store = kind(capacity, trace.block_tokens)
    caches = [
        Ours(max(1, capacity // 2 // engines), trace.block_tokens)
        for _ in range(engines)
    ]
    own, total = Score(), Score()
    for number, request in enumerate(trace.requests):
        first = caches[number % engines].ask(request)
        found = store.held(request.blocks, first)
        moments = store.moments(request, found)
        start = 0 if is_told else first
        store.keep(request.blocks[start:], moments[start:])
        for score, blocks in ((own, first), (total, found)):
            score.asked += request.num_tokens
            score.hit += min(blocks * trace.block_tokens, request.num_tokens)
    return {
        "scenario": "engines",
        "engines": engines,
        "policy": name,
        "touches_hits_of_engines": is_told,
        "ratio": round(total.ratio, 4),
        "ratio_of_engines_alone": round(own.ratio, 4),
        "written": store.num_written,
    }


# -- retention ---------------------------------------------------------------------


def is_retained(request: Request) -> bool:
    """Choose a tenth of the sessions, by what distinguishes them early."""
    return request.blocks[min(1, len(request.blocks) - 1)] % 10 == 0


class _Retaining(Ours):
    """Some blocks count as used in ten minutes, as many as the budget has slots."""

    def __init__(self, capacity: int, block_tokens: int, budget: float) -> None:
        super().__init__(capacity, block_tokens)
        self._budget = int(budget * capacity)
        self._until: dict[int, int] = {}

    def moments(self, request: Request, num_held: int) -> list[int]:
        """Return later moments for what is retained."""
        moments = super().moments(request, num_held)
        if not is_retained(request):
            return moments
        if len(self._until) + len(request.blocks) > self._budget:
            still = {b: t for b, t in self._until.items() if t > request.moment}
            self._until = still
        for at, block in enumerate(request.blocks):
            if block not in self._until and len(self._until) >= self._budget:
                break
            self._until[block] = request.moment + _TTL_NS
            moments[at] += _TTL_NS
        return moments


def _retained(trace: Trace, capacity: int, budget: float) -> dict[str, object]:
    policy = _Retaining(capacity, trace.block_tokens, budget)
    scores = {True: Score(), False: Score()}
    for request in trace.requests:
        if not request.blocks:
            continue
        score = scores[is_retained(request)]
        score.asked += request.num_tokens
        found = policy.ask(request) * trace.block_tokens
        score.hit += min(found, request.num_tokens)
    asked = sum(each.asked for each in scores.values())
    return {
        "scenario": "retention",
        "budget": budget,
        "share_of_tokens_retained": round(scores[True].asked / asked, 4),
        "ratio_of_retained": round(scores[True].ratio, 4),
        "ratio_of_others": round(scores[False].ratio, 4),
        "ratio": round(sum(each.hit for each in scores.values()) / asked, 4),
    }


# -- parts of blocks ---------------------------------------------------------------


def _in_parts(
    trace: Trace, rule: Callable[[int, int], Stamped], name: str, capacity: int
) -> dict[str, object]:
    """Eight ranks keep a part of each block; it is found when all of them are."""
    moments_of = rule(1, trace.block_tokens)
    slots = rule(capacity * _RANKS, trace.block_tokens)
    draw = random.Random(1)
    score, num_broken = Score(), 0
    for request in trace.requests:
        parts = [
            range(block * _RANKS, (block + 1) * _RANKS) for block in request.blocks
        ]
        present = [sum(part in slots for part in each) for each in parts]
        found = next((at for at, n in enumerate(present) if n < _RANKS), len(parts))
        num_broken += any(0 < number < _RANKS for number in present)
        score.asked += request.num_tokens
        score.hit += min(found * trace.block_tokens, request.num_tokens)
        moments = moments_of.moments(request, found)
        for rank in range(_RANKS):
            late = _delays(len(parts), draw) if rule is LRU else [0] * len(parts)
            slots.keep(
                [each[rank] for each in parts],
                [a + b for a, b in zip(moments, late, strict=True)],
            )
    return {
        "scenario": "parts",
        "evicted": name,
        "ratio": round(score.ratio, 4),
        "requests_that_meet_a_broken_block": num_broken,
    }


def _delays(count: int, draw: random.Random) -> Sequence[int]:
    """Return how much later than the first a rank comes to each block, span by span."""
    spans = [(at + draw.random()) * _SPAN_NS for at in range(-(-count // 8))]
    return [int(spans[at // 8]) for at in range(count)]
