# SPDX-License-Identifier: Apache-2.0
"""
What a worker has to tell its scheduler.

A report is bounded as every message is: what is beyond goes with the next one.
"""

from typing import Final, TypeVar

import attrs

from ucm.scheduler.budget import failure_nbytes
from ucm.scheduler.messages import (
    MAX_MESSAGE_BYTES,
    Failure,
    StepReport,
    WeightsNews,
)

__all__ = ["MAX_IDS", "Outbox"]

MAX_IDS: Final = 65536
"""Most tickets that one report names in each list."""
_FAILURE_NBYTES: Final = MAX_MESSAGE_BYTES // 4

_T = TypeVar("_T")


@attrs.define
class Outbox:
    """What the next reports will say."""

    released: list[int] = attrs.Factory(list)
    quarantined: list[int] = attrs.Factory(list)
    settled_saves: list[int] = attrs.Factory(list)
    unstored_saves: list[int] = attrs.Factory(list)
    new_blocks: dict[int, int] = attrs.Factory(dict)
    loads_done: list[int] = attrs.Factory(list)
    failures: list[Failure] = attrs.Factory(list)
    weights: WeightsNews | None = None
    told_unhealthy: bool = False
    cut_reports: int = 0

    def take(self, rank: int, *, healthy: bool) -> StepReport | None:
        """Return a report and forget what it says; None when there is nothing to tell."""
        is_told = healthy or self.told_unhealthy
        if not self._has_more() and is_told and self.weights is None:
            return None
        failures = _take(self.failures, self._num_failures())
        settled = _take(self.settled_saves, MAX_IDS)
        unstored = _take(self.unstored_saves, MAX_IDS)
        # A load whose failure is still to be told would count as loaded.
        done = () if self.failures else _take(self.loads_done, MAX_IDS)
        report = StepReport(
            rank=rank,
            released=_take(self.released, MAX_IDS),
            quarantined=_take(self.quarantined, MAX_IDS),
            settled_saves=settled,
            unstored_saves=unstored,
            new_blocks={
                each: self.new_blocks.pop(each)
                for each in (*settled, *unstored)
                if each in self.new_blocks
            },
            loads_done=done,
            failures=failures,
            healthy=healthy,
            weights=self.weights,
        )
        self.weights = None
        self.told_unhealthy = not healthy
        self.cut_reports += self._has_more()
        return report

    def _has_more(self) -> bool:
        return bool(
            self.released
            or self.quarantined
            or self.settled_saves
            or self.unstored_saves
            or self.loads_done
            or self.failures
        )

    def _num_failures(self) -> int:
        """Return how many failures have room: one at least."""
        nbytes = 0
        for at, failure in enumerate(self.failures):
            nbytes += failure_nbytes(failure)
            if at and nbytes > _FAILURE_NBYTES:
                return at
        return len(self.failures)


def _take(items: list[_T], most: int) -> tuple[_T, ...]:
    """Take the first items out of a list."""
    taken = tuple(items[:most])
    del items[:most]
    return taken
