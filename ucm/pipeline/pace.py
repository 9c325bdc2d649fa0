# SPDX-License-Identifier: Apache-2.0
"""
How long loads will take, by how long the last ones took; pure.

A load that ends behind its deadline has cost the engine the whole wait. So one that the
loads before it leave no time for is refused when it is asked for. What is measured is
bytes over time in which anything was loaded at all, so that neither idle time nor copies
that overlap count twice.

Nothing is refused while no load was measured, nor while none is under way: a rate that is
out of date is measured anew, and never refuses for ever.
"""

from collections.abc import Hashable, Mapping
from typing import Final, TypeVar

__all__ = ["Pace", "cost_of", "overdue"]

_FIXED_BYTES: Final = 1 << 20
"""What a ticket costs besides its bytes: else small ones make a store look slow."""
_REMEMBERED: Final = 0.9
"""How much of what was known still counts when the next load has ended."""
_USABLE: Final = 0.8
"""Share of the time left that may be planned for: under a steady overload every load that
is taken would otherwise end just at its deadline, half of them behind it."""

_Request = TypeVar("_Request", bound=Hashable)


class Pace:
    """
    The rate of what has ended, recent ends counting more.

    Threading: ``note`` on one thread; ``seconds_per_byte`` may be read on any.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        """Zero while nothing was measured."""
        self._cost = 0.0
        self._seconds = 0.0
        self._counted_until = 0.0

    def note(self, cost: int, begun_at: float, now: float) -> None:
        """Take note of work that was begun and has ended now."""
        busy = now - max(begun_at, self._counted_until)
        self._counted_until = now
        self._cost = _REMEMBERED * self._cost + cost
        self._seconds = _REMEMBERED * self._seconds + max(0.0, busy)
        self.seconds_per_byte = self._seconds / self._cost


def cost_of(num_tickets: int, nbytes: int) -> int:
    """Return what tickets cost, in bytes."""
    return nbytes + num_tickets * _FIXED_BYTES


def overdue(
    requests: Mapping[_Request, int],
    *,
    ahead: int,
    seconds_per_byte: float,
    seconds_left: float,
) -> set[_Request]:
    """
    Return the requests whose loads would come too late, first come first served.

    Args:
        requests: What the loads of each cost together, in the order of their turns. A
            request is of use whole or not at all.
        ahead: What is to be loaded before the first of them.
        seconds_per_byte: The rate; zero if it is not known.
        seconds_left: Until their deadline.
    """
    late = set()
    for request, cost in requests.items():
        if ahead and (ahead + cost) * seconds_per_byte > _USABLE * seconds_left:
            late.add(request)
        else:
            ahead += cost
    return late
