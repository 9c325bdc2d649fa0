# SPDX-License-Identifier: Apache-2.0
"""
Saves that wait for others. Pure: time is told.

A ticket costs its threads about as much with one block as with a dozen. So what is less than a
full span waits for what the next steps save, a few steps and a short time at most. The blocks
stay where they are meanwhile: those of a request that runs are its own, and those of one that
ended are kept by the engine. Nothing waits in a step that computes nothing: no other may follow.
"""

from collections.abc import Callable
from typing import Final

from ucm.blocks import GroupId
from ucm.scheduler.endings import Left
from ucm.scheduler.lives import Life
from ucm.scheduler.shares import Run

__all__ = ["MOST_STEPS", "Company", "most_waiting"]

MOST_STEPS: Final = 8
_POOL_PARTS: Final = 16


def most_waiting(span_nbytes: int, pool_nbytes: int) -> int:
    """Return how much may wait: what a ticket takes, of the engine's blocks a small part."""
    return min(span_nbytes, pool_nbytes // _POOL_PARTS)


class Company:
    """
    Running requests with blocks that wait, in the order in which they began to.

    Used on the scheduler's thread, except where it says otherwise.

    Args:
        nbytes: As soon as so much waits, it goes.
        seconds: How long it waits at most. If either is 0 nothing ever waits.
    """

    def __init__(self, nbytes: int, seconds: float) -> None:
        self.most, self._seconds = (nbytes if seconds else 0), seconds
        """What is less of one request is worth waiting."""
        self._lives: dict[tuple[str, int], Life] = {}
        self._nbytes = 0
        self._plan = 0, 0.0
        self._since: tuple[int, float] | None = None
        """The plan with which, or behind which, the first of what waits began to."""

    def __len__(self) -> int:
        """Return how many requests have blocks that wait; on any thread."""
        return len(self._waiting())

    def _waiting(self) -> list[Life]:
        """Return those with blocks that wait, and are still their own."""
        lives = list(self._lives.values())  # at once, whatever the scheduler does
        return [
            life for life in lives if life.queued and life.may_save and not life.is_over
        ]

    def add(self, nbytes: int) -> None:
        """Take note that so much more waits, be it of a request that ended."""
        self._nbytes += nbytes
        self._since = self._since or self._plan

    def put(self, life: Life, group_id: GroupId, run: Run, nbytes: int) -> None:
        """Let blocks of a life wait, which are so much."""
        self._lives[life.key] = life
        self._nbytes += nbytes
        self._since = self._since or self._plan
        for at, (other, before) in enumerate(life.queued):
            if other == group_id and before.at.stop == run.start:
                life.queued[at] = group_id, before.then(run)
                return
        life.queued.append((group_id, run))

    def goes(self, step: int, now: float) -> bool:
        """Return whether what waits goes with this plan, which begins."""
        self._plan = step, now
        if self._since is None:
            return False
        if self._nbytes >= self.most:
            return True
        since, began = self._since
        return step - since >= MOST_STEPS or now - began >= self._seconds

    def leave(self, take: Callable[[list[Left]], None]) -> None:
        """Let *take* take who waits; each is let go of once nothing of it is queued any more."""
        waiting = self._waiting()
        take([(life.stay, life.queued) for life in waiting])
        self._lives = {life.key: life for life in waiting if life.queued}

    def leave_all(self) -> None:
        """Let go of all; what is queued is left to those whose it is."""
        self._lives.clear()
        self.is_gone()

    def is_gone(self) -> None:
        """Take note that nothing waits any more."""
        self._nbytes, self._since = 0, None
