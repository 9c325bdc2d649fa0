# SPDX-License-Identifier: Apache-2.0
"""
Requests that have ended and whose last blocks no plan has saved yet.

The engine keeps their blocks, so that each of them is *deferred* once its last save is
ordered, or dropped: when it has waited for too long, a load on which it stands has failed,
or nothing is saved any more. Those that ended first come first, except that one whose loads
are not over yet lets others pass.

Pure: time is told.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ucm.blocks import GroupId
from ucm.scheduler.budget import cut_deferrals
from ucm.scheduler.lives import Life
from ucm.scheduler.messages import Deferral
from ucm.scheduler.shares import Run, Stay

__all__ = ["Deferrals", "Ending", "Endings", "Left"]

Left = tuple[Stay, list[tuple[GroupId, Run]]]
"""A life, and blocks of it that are to be saved; who takes some takes them out."""


class Ending(msgspec.Struct, eq=False):
    """
    A request that has ended.

    Args:
        life: The one that it was; with loads, as long as these are not over.
        left: Groups and runs, in the order in which they are to be saved; who takes
            some takes them out.
        until: When it has waited for too long; None before the first plan.
    """

    life: Life
    left: list[tuple[GroupId, Run]]
    until: float | None = None


class Endings:
    """
    Those that wait, in the order in which they ended.

    Used on the scheduler's thread only.

    Args:
        seconds: How long each may wait, from the first plan on that could take it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: deque[Ending] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ending: Ending) -> None:
        """Let one wait behind the others."""
        self._waiting.append(ending)

    def take(self, now: float, take: Callable[[list[Left]], None]) -> list[Ending]:
        """
        Let a plan take blocks, and return those of which none are left.

        Args:
            now: The time, in seconds.
            take: Saves what is left of them from the start, as far as the plan has room.
        """
        for ending in self._waiting:
            if ending.until is None:
                ending.until = now + self._seconds
        ended = [each for each in self._waiting if not each.life.loads]
        take([(each.life.stay, each.left) for each in ended])
        ended = [each for each in ended if not each.left]
        self._waiting = deque(each for each in self._waiting if each.left)
        return ended

    def drop_late(self, now: float) -> Iterator[Ending]:
        """Give up those that have waited for too long, or that a load failed, and yield them."""
        for ending in list(self._waiting):
            if not ending.life.may_save or now >= (ending.until or now + 1):
                self._waiting.remove(ending)
                yield ending

    def drop_all(self) -> Iterator[Ending]:
        """Give all up, and yield them."""
        while self._waiting:
            yield self._waiting.popleft()


class Deferrals:
    """
    Requests that have ended and whose blocks the engine keeps for us.

    Used on the scheduler's thread only.
    """

    def __init__(self) -> None:
        self._deferred: set[str] = set()
        self.new: list[Deferral] = []
        """Those that no plan has told yet, although nothing more is saved of them."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._deferred

    def __len__(self) -> int:
        return len(self._deferred)

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
        self.new += [
            Deferral(request_id=request_id, generation=generation)
            for request_id, generation in lives
        ]

    def take(self) -> tuple[Deferral, ...]:
        """Take what a plan tells, as far as it has room."""
        deferred, self.new = cut_deferrals(self.new)
        return deferred

    def ended(self, request_ids: Iterable[str]) -> None:
        """Take note that the engine has freed the blocks of these."""
        self._deferred.difference_update(request_ids)
