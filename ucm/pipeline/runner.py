# SPDX-License-Identifier: Apache-2.0
"""
How lanes have their segments run, without a task for each.

A lane starts a ``Run``: one segment on one item. A copy segment goes to its copy thread,
a loop segment that has nothing to wait for is over at once, and only one that does wait
gets a task. Runs that are over are collected, and the pipeline's one task hands them
back to their lanes: a burst of them costs one wake-up.

All of it runs on the loop thread. This is the one place where any error of any stage is
caught: the lane turns it into the ticket's outcome and goes on with the next item.
"""

from collections import deque
from collections.abc import Callable, Mapping

import anyio
import anyio.abc

from ucm.pipeline.stage import Carrier, Segment
from ucm.pipeline.tickets import Direction, Ticket
from ucm.pipeline.workers import CopyThread, Job

__all__ = ["Run", "Runner"]


class Run:
    """
    One segment on one item.

    Args:
        segment: What to do.
        at: Which of the lane's segments it is.
        carrier: With what.
        on_over: The lane's: called by the pipeline's task when it is over, unless the
            lane has given it up.
    """

    __slots__ = (
        "at",
        "carrier",
        "error",
        "is_given_up",
        "is_late",
        "on_over",
        "result",
        "scope",
        "segment",
    )

    def __init__(
        self,
        segment: Segment,
        at: int,
        carrier: Carrier,
        on_over: Callable[["Run"], None],
    ) -> None:
        self.segment = segment
        self.at = at
        self.carrier = carrier
        self.on_over = on_over
        self.result: Carrier | None = None
        self.error: Exception | None = None
        self.is_late = False
        self.is_given_up = False
        self.scope: anyio.CancelScope | None = None

    @property
    def ticket(self) -> Ticket:
        """Whose item it is."""
        return self.carrier.ticket

    @property
    def is_over(self) -> bool:
        """Whether there is a result or an error."""
        return self.result is not None or self.error is not None

    def give_up(self) -> None:
        """
        Want nothing of it any more.

        A wait ends. A job on a copy thread goes on to its own end, unheard.
        """
        self.is_given_up = True
        if self.scope is not None:
            self.scope.cancel()


class Runner:
    """
    Runs segments and collects what is over.

    Args:
        copy: The copy threads, by direction and the segments' worker.
        group: For the tasks of those that wait.
        wake: Called when something is over.
    """

    def __init__(
        self,
        copy: Mapping[Direction, Mapping[str, CopyThread]],
        group: anyio.abc.TaskGroup,
        wake: Callable[[], None],
    ) -> None:
        self._copy = copy
        self._group = group
        self._wake = wake
        self._over: deque[Run] = deque()

    def start(self, run: Run) -> None:
        """Start a run; it may be over when this returns, and is not handed back then."""
        segment, carrier = run.segment, run.carrier
        if segment.is_copy:
            copy = self._copy[run.ticket.direction][segment.worker]

            def done(job: Job[Carrier, Carrier]) -> None:
                run.result, run.error = job.result, job.error
                self._end(run)

            copy.run(segment.run_copy, carrier, done)
            return
        run.result = segment.try_now(carrier)
        if run.result is None:
            self._group.start_soon(self._wait, run)

    def hand_back(self) -> None:
        """Give each run that is over back to its lane."""
        while self._over:
            run = self._over.popleft()
            if not run.is_given_up:
                run.on_over(run)

    async def _wait(self, run: Run) -> None:
        if run.is_given_up:
            return
        with anyio.CancelScope() as run.scope:
            try:
                run.result = await run.segment.run_loop(run.carrier)
            except Exception as exc:  # noqa: BLE001 - any stage's error ends its ticket, not the lane
                run.error = exc
        self._end(run)

    def _end(self, run: Run) -> None:
        self._over.append(run)
        self._wake()
