# SPDX-License-Identifier: Apache-2.0
"""
How lanes have their segments run, without a task for each.

A copy segment goes to its copy thread, a loop segment that has nothing to wait for is
over at once, one that waits for a fence is called back by it, and only one that waits for
something else gets a task. Items whose segment is over are collected, and the pipeline
hands them back to their lanes: a burst of them costs one wake-up, and a copy that the next
stage waits for wakes nobody before its end. Any error of any stage is caught here and ends
the item's ticket, on the thread on which it was raised.

All of it runs on the loop thread but the end of a copy segment, and what fences call.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from ucm.devices.abc import Fence
from ucm.errors import WorkerDiedError
from ucm.pipeline.items import Item
from ucm.pipeline.stage import fail
from ucm.pipeline.tickets import Direction
from ucm.pipeline.workers import CopyThread

__all__ = ["Runner"]


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
        self._over: deque[Item] = deque()
        self._is_woken = False

    def start(self, item: Item) -> bool:
        """
        Start an item's segment.

        Returns:
            Whether it is over at once, and will not be handed back.
        """
        segment = item.segment
        if segment.is_copy:
            if not segment.is_for(item):
                return True
            thread = self._copy[item.ticket.direction][segment.worker]
            thread.put(self._run_copy, item, self._died)
            return False  # though it may be over by now
        if _is_over(item):
            return True
        if not self._is_called_back(item):
            self._begin_wait(item)
        return False

    def hand_back(self) -> None:
        """Give each item whose segment is over back to its lane, unless given up."""
        self._is_woken = False  # first: what ends from now on wakes again
        while self._over:
            item = self._over.popleft()
            if item.is_given_up:
                continue
            if item.is_over or _is_over(item):
                item.is_over = True
                item.lane.over(item)
            else:
                self._begin_wait(item)  # the fence failed: it says why

    def _run_copy(self, item: Item) -> None:
        copy = None
        try:
            item.segment.run_copy(item)
            copy = _begin_copy_wait(item)
        except Exception as exc:  # noqa: BLE001 - any stage's error ends its ticket, not the thread
            fail(item, exc)
        item.is_over = True
        self._over.append(item)
        # While the copy is under way the loop need not know.
        if copy is None or not _calls(copy, self._ring):
            self._ring()

    def _is_called_back(self, item: Item) -> bool:
        """Return whether all that an item waits for is a fence that calls."""
        fence = item.segment.awaited(item)
        return fence is not None and _calls(fence, partial(self._tell, item))

    def _died(self, item: Item, error: WorkerDiedError) -> None:
        fail(item, error)
        self._end(item)

    def _begin_wait(self, item: Item) -> None:
        item.task = self._group.create_task(self._wait(item))

    async def _wait(self, item: Item) -> None:
        try:
            await item.segment.run_loop(item)
        except Exception as exc:  # noqa: BLE001 - any stage's error ends its ticket, not the lane
            fail(item, exc)
        self._end(item)

    def _end(self, item: Item) -> None:
        item.is_over = True
        self._tell(item)

    def _tell(self, item: Item) -> None:
        """Have an item looked at on the loop; on any thread."""
        self._over.append(item)
        self._ring()

    def _ring(self) -> None:
        """Have the loop look at what is over; on any thread."""
        if not self._is_woken:
            self._is_woken = True
            self._wake()


def _begin_copy_wait(item: Item) -> Fence | None:
    """Begin what is next for an item if it waits for its copy; return the copy's fence."""
    copy_wait, copy = item.segment.copy_wait, item.copy
    if copy_wait is None or copy is None or item.ticket.outcome is not None:
        return None
    copy_wait.begin_wait(item)
    return copy


def _is_over(item: Item) -> bool:
    """Run a segment of the loop if it need not wait; return whether it is over, well or not."""
    try:
        return item.segment.try_now(item)
    except Exception as exc:  # noqa: BLE001 - any stage's error ends its ticket, not the loop
        fail(item, exc)  # and not once more: half of the step may be done
        return True


def _calls(fence: Fence, callback: Callable[[], None]) -> bool:
    """Return whether a fence calls when it is over; the wait for one that raises says why."""
    try:
        return fence.call_when_over(callback)
    except Exception:  # noqa: BLE001 - a host's own: it ends its ticket, not the thread
        return False
