# SPDX-License-Identifier: Apache-2.0
"""
How lanes have their segments run, without a task for each.

A lane starts a ``Run``: one segment on one item. A copy segment goes to its copy thread,
a loop segment that has nothing to wait for is over at once, and only one that does wait
gets a task. Runs that are over are collected, and the pipeline hands them back to their
lanes: a burst of them costs one wake-up.

All of it runs on the loop thread but the end of a run, which copy threads tell as well.
Here and in ``Job.run`` any error of any stage is caught: the lane turns it into the
ticket's outcome and goes on with the next item.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from ucm.pipeline.stage import Carrier, Segment
from ucm.pipeline.tickets import Direction, Ticket
from ucm.pipeline.workers import CopyThread, Job

__all__ = ["Run", "Runner"]


class Run(Job[Carrier, Carrier]):
    """
    One segment on one item; the job of a copy thread if the segment copies.

    Args:
        segment: What to do.
        at: Which of the lane's segments it is.
        carrier: With what.
        on_over: The lane's: called on the loop when it is over, unless the lane has
            given it up.
    """

    __slots__ = ("at", "is_given_up", "is_late", "on_over", "segment", "task")

    def __init__(
        self,
        segment: Segment,
        at: int,
        carrier: Carrier,
        on_over: Callable[["Run"], None],
    ) -> None:
        super().__init__(segment.run_copy, carrier, None)
        self.segment = segment
        self.at = at
        self.on_over = on_over
        self.is_late = False
        self.is_given_up = False
        self.task: asyncio.Task[None] | None = None

    @property
    def carrier(self) -> Carrier:
        """The item."""
        return self.argument

    @property
    def ticket(self) -> Ticket:
        """Whose item it is."""
        return self.argument.ticket

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
        if self.task is not None:
            self.task.cancel()


class Runner:
    """
    Runs segments and collects what is over.

    Args:
        copy: The copy threads, by direction and the segments' worker.
        group: For the tasks of those that wait.
        wake: Called when something is over, on any thread; once for all that is handed
            back together.
    """

    def __init__(
        self,
        copy: Mapping[Direction, Mapping[str, CopyThread]],
        group: asyncio.TaskGroup,
        wake: Callable[[], None],
    ) -> None:
        self._copy = copy
        self._group = group
        self._wake = wake
        self._over: deque[Run] = deque()
        self._is_woken = False

    def start(self, run: Run) -> bool:
        """Start a run; return whether it is over at once and will not be handed back."""
        segment, carrier = run.segment, run.carrier
        if segment.is_copy:
            run.done = self._end
            self._copy[run.ticket.direction][segment.worker].put(run)
            return False  # though it may be over by now
        run.result = segment.try_now(carrier)
        if run.result is None:
            run.task = self._group.create_task(self._wait(run))
        return run.result is not None

    def hand_back(self) -> None:
        """Give each run that is over back to its lane."""
        self._is_woken = False  # first: what ends from now on wakes again
        while self._over:
            run = self._over.popleft()
            if not run.is_given_up:
                run.on_over(run)

    async def _wait(self, run: Run) -> None:
        try:
            run.result = await run.segment.run_loop(run.carrier)
        except Exception as exc:  # noqa: BLE001 - any stage's error ends its ticket, not the lane
            run.error = exc
        self._end(run)

    def _end(self, run: Run) -> None:
        self._over.append(run)
        if not self._is_woken:
            self._is_woken = True
            self._wake()
