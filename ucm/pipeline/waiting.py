# SPDX-License-Identifier: Apache-2.0
"""
How the loop waits for a device fence, and threads for tickets.

One lock serves all tickets of a runtime: it is held for a few instructions, and a lock
of its own would cost each ticket more than all the rest of it. Whoever changes a ticket
under it asks what the waiting threads wait for, and lets go only those for whom it is so:
a thread that waits for twelve tickets is woken once, by the last of them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import anyio

from ucm.devices.abc import Fence
from ucm.errors import DeviceError
from ucm.threads import SYSTEM, Event, Threads

__all__ = ["Changes", "fence_passed", "has_passed"]

_FIRST_POLL_S = 0.0005
_LAST_POLL_S = 0.005

_T = TypeVar("_T")


class Changes:
    """
    The lock of what changes, and the threads that wait for something about it.

    Args:
        threads: Where lock and events come from.
    """

    def __init__(self, threads: Threads = SYSTEM) -> None:
        self.lock = threads.lock()
        """Held by whoever changes something; not reentrant."""
        self._event = threads.event
        self._awaited: list[tuple[Callable[[], bool], Event]] = []

    def notify(self) -> None:
        """Let those go for whom it is so now. With the lock held."""
        for is_so, event in self._awaited:
            if is_so():
                event.set()

    def wait_for(self, is_so: Callable[[], bool], timeout: float) -> bool:
        """
        Block the thread up to *timeout* seconds until something is so.

        Args:
            is_so: Called with the lock held, on any thread; brief, and raises nothing.
            timeout: In seconds.

        Returns:
            Whether it is.
        """
        with self.lock:
            if is_so() or timeout <= 0:
                return is_so()
            waiter = (is_so, self._event())
            self._awaited.append(waiter)
        try:
            waiter[1].wait(timeout)
        finally:
            with self.lock:
                self._awaited.remove(waiter)
        return is_so()  # as nobody else asks any more

    def wait_for_all(
        self, things: Iterable[_T], is_so: Callable[[_T], bool], timeout: float
    ) -> bool:
        """Wait as ``wait_for`` does, until it is so of every one; what was so stays so."""
        pending = deque(things)

        def is_all() -> bool:
            while pending and is_so(pending[0]):
                pending.popleft()
            return not pending

        return self.wait_for(is_all, timeout)


def has_passed(fence: Fence) -> bool:
    """Return whether *fence* has passed; False also if it never will."""
    try:
        return fence.is_done()
    except DeviceError:
        return False


async def fence_passed(fence: Fence) -> None:
    """
    Return when *fence*, which calls nobody, has passed: look at growing intervals.

    Raises:
        DeviceError: It never will.
    """
    pause = _FIRST_POLL_S
    while not fence.is_done():
        await anyio.sleep(pause)
        pause = min(pause * 2, _LAST_POLL_S)
