# SPDX-License-Identifier: Apache-2.0
"""
Requests that have ended and whose last blocks no plan has saved yet.

The engine keeps their blocks, so that each of them is *deferred* once its last save is
ordered, or dropped: when it has waited for too long, or nothing is saved any more. Those
that ended first come first.

Pure: time is told.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import attrs

from ucm.blocks import GroupId
from ucm.scheduler.budget import cut_deferrals
from ucm.scheduler.messages import Deferral
from ucm.scheduler.records import Record
from ucm.scheduler.shares import Run, Stay

__all__ = ["Deferrals", "Ending", "Endings"]


@attrs.define
class Ending:
    """
    A request that has ended.

    Args:
        stay: The life that it was.
        record: Of the request.
        left: Groups and runs, in the order in which they are to be saved; who takes
            some takes them out.
        until: When it has waited for too long; None before the first plan.
    """

    stay: Stay
    record: Record
    left: list[tuple[GroupId, Run]]
    until: float | None = None


class Endings:
    """
    Those that wait, in the order in which they ended.

    Used on the scheduler's thread only.

    Args:
        seconds: How long each may wait, from the first plan on that could take it.
    """

    __slots__ = ("_seconds", "_waiting")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[Ending] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ending: Ending) -> None:
        """Let one wait behind the others."""
        self._waiting.append(ending)

    def take(
        self, now: float, take: Callable[[Stay, list[tuple[GroupId, Run]]], None]
    ) -> Iterator[Ending]:
        """
        Let a plan take blocks, and yield those of which none are left.

        Args:
            now: The time, in seconds.
            take: Saves what is left of one from the start, as far as the plan has room.
        """
        for ending in self._waiting:
            if ending.until is None:
                ending.until = now + self._seconds
        while self._waiting:
            ending = self._waiting[0]
            take(ending.stay, ending.left)
            if ending.left:
                return
            yield self._waiting.popleft()

    def drop_late(self, now: float) -> Iterator[Ending]:
        """Give up those that have waited for too long, and yield them."""
        while self._waiting and now >= (self._waiting[0].until or now + 1):
            yield self._waiting.popleft()

    def drop_all(self) -> Iterator[Ending]:
        """Give all up, and yield them."""
        while self._waiting:
            yield self._waiting.popleft()


class Deferrals:
    """
    Requests that have ended and whose blocks the engine keeps for us.

    Used on the scheduler's thread only.
    """

    __slots__ = ("_deferred", "_new")

    def __init__(self) -> None:
        self._deferred: set[str] = set()
        self._new: list[Deferral] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._deferred

    def __len__(self) -> int:
        return len(self._deferred)

    @property
    def num_new(self) -> int:
        """Those that no plan has told yet, although nothing more is saved of them."""
        return len(self._new)

    def add(self, life: tuple[str, int], *, is_due: bool) -> None:
        """
        Take note of one.

        Args:
            life: Request id and generation.
            is_due: Nothing more is saved of it, so that the next plan tells.
        """
        self._deferred.add(life[0])
        if is_due:
            self.due([life])

    def due(self, lives: Iterable[tuple[str, int]]) -> None:
        """Let the next plan tell of these: their last save is ordered, or dropped."""
        self._new += [
            Deferral(request_id=request_id, generation=generation)
            for request_id, generation in lives
        ]

    def take(self) -> tuple[Deferral, ...]:
        """Take what a plan tells, as far as it has room."""
        deferred, self._new = cut_deferrals(self._new)
        return deferred

    def ended(self, request_ids: Iterable[str]) -> None:
        """Take note that the engine has freed the blocks of these."""
        self._deferred.difference_update(request_ids)
