# SPDX-License-Identifier: Apache-2.0
"""What a worker has to tell its scheduler."""

import attrs

from ucm.scheduler.messages import Failure, StepReport

__all__ = ["Outbox"]


@attrs.define
class Outbox:
    """What the next report will say."""

    released: list[int] = attrs.Factory(list)
    quarantined: list[int] = attrs.Factory(list)
    settled_saves: list[int] = attrs.Factory(list)
    unstored_saves: list[int] = attrs.Factory(list)
    loads_done: list[int] = attrs.Factory(list)
    failures: list[Failure] = attrs.Factory(list)
    told_unhealthy: bool = False

    def take(self, rank: int, *, healthy: bool) -> StepReport | None:
        """Return a report and start afresh; None when there is nothing to tell."""
        lists = (
            self.released,
            self.quarantined,
            self.settled_saves,
            self.unstored_saves,
            self.loads_done,
            self.failures,
        )
        if not any(lists) and (healthy or self.told_unhealthy):
            return None
        report = StepReport(
            rank=rank,
            released=tuple(self.released),
            quarantined=tuple(self.quarantined),
            settled_saves=tuple(self.settled_saves),
            unstored_saves=tuple(self.unstored_saves),
            loads_done=tuple(self.loads_done),
            failures=tuple(self.failures),
            healthy=healthy,
        )
        for one in lists:
            one.clear()
        self.told_unhealthy = not healthy
        return report
