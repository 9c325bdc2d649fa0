# SPDX-License-Identifier: Apache-2.0
"""
Asking models of a cache for all requests of a trace, in virtual time.

The hit ratio is of tokens: those of the blocks found from the start of a prompt on, by
those of all prompts. All blocks of a prompt are stored at once when it has arrived.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ucm.replay.policies import POLICIES
from ucm.replay.policy import Policy
from ucm.replay.traces import Trace

__all__ = ["Score", "play", "replay", "usual_capacities"]

_SHARES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Percent of the distinct blocks."""


@attrs.define
class Score:
    """What a replay came to, in tokens and blocks."""

    asked: int = 0
    hit: int = 0
    written: int = 0

    @property
    def ratio(self) -> float:
        """Of the tokens asked for, those that were found."""
        return self.hit / max(1, self.asked)


def play(trace: Trace, policy: Policy) -> Score:
    """Ask for all requests of a trace in order."""
    score = Score()
    for request in trace.requests:
        found = policy.ask(request) * trace.block_tokens
        score.asked += request.num_tokens
        score.hit += min(found, request.num_tokens)
    score.written = policy.num_written
    return score


def usual_capacities(trace: Trace) -> list[int]:
    """Return ten, from a thousandth of the distinct blocks up to all of them."""
    distinct = trace.distinct_blocks()
    return sorted({max(1, int(distinct * share / 100)) for share in _SHARES})


def replay(
    trace: Trace,
    capacities: Sequence[int],
    policies: Sequence[str],
    told: Callable[[str], None],
) -> dict[str, Any]:
    """
    Ask each policy at each capacity for all of a trace.

    Args:
        trace: What is asked for.
        capacities: In blocks.
        policies: Names in ``POLICIES``.
        told: Called after each, with what it was.

    Returns:
        What the trace is, and a row for each capacity and policy; plain JSON.
    """
    distinct = trace.distinct_blocks()
    rows = []
    for capacity in capacities:
        for name in policies:
            # More than there are blocks changes nothing, but for the memory it takes.
            score = play(trace, POLICIES[name](min(capacity, distinct), trace))
            rows.append(
                {
                    "capacity_blocks": capacity,
                    "share_percent": float(f"{100 * capacity / distinct:.3g}"),
                    "policy": name,
                    "ratio": round(score.ratio, 4),
                    "written_blocks": score.written,
                }
            )
            told(f"{trace.name}, {capacity} blocks, {name}")
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "seconds": round(trace.seconds()),
        "block_tokens": trace.block_tokens,
        "distinct_blocks": distinct,
        "used_once": round(trace.used_once(), 4),
        "rows": rows,
    }
