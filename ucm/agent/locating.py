# SPDX-License-Identifier: Apache-2.0
"""
Which tier has which block, one tier asked after the other for what those before it lack.

A tier that takes its time does not cost what those before it have. Where they have the first blocks, for
half of the time at most, and then of the rest, is waited for what more the next one may have. That is
unknown then; the question goes on, so that a tier that hangs is found out.
"""

import math
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from ucm.agent.flight import Flight
from ucm.agent.looking import LastingLooks, look_through
from ucm.backends.abc import Backend, Presence

__all__ = ["locate"]


async def locate(
    flights: Sequence[Flight],
    tiers: Sequence[Backend],
    deadline: float,
    tasks: TaskGroup,
) -> tuple[dict[Flight, int], set[Flight]]:
    """
    Return which tier has each block, and of which blocks one has told nothing.

    Args:
        flights: In the order in which they are of use.
        tiers: In the order in which they are asked.
        deadline: Until which the first of these blocks are of use; infinite: only all of them are.
        tasks: In which questions go on that are not waited for.
    """
    tier_of: dict[Flight, int] = {}
    unknown: set[Flight] = set()
    for number, tier in enumerate(tiers):
        asked = [
            each for each in flights if number in each.tiers and each not in tier_of
        ]
        if not asked:
            continue
        until, looked_at = math.inf, tier
        if flights[0] in tier_of and deadline < math.inf:
            now = anyio.current_time()
            until = now + max(0.0, deadline - now) / 2
            looked_at = LastingLooks(tier, tasks)
        answers = [Presence.UNKNOWN] * len(asked)
        with anyio.move_on_at(until):
            keys = [flight.key for flight in asked]
            is_last = number == len(tiers) - 1
            answers = await look_through([looked_at], keys, is_prefix=is_last)
        for flight, answer in zip(asked, answers, strict=True):
            if answer is Presence.PRESENT:
                tier_of[flight] = number
            elif answer is Presence.UNKNOWN:
                unknown.add(flight)
    return tier_of, unknown
