# SPDX-License-Identifier: Apache-2.0
"""
The host's own loop, asyncio's or trio's, and how other threads have it do things.

Threading: made and closed on the loop; ``ring`` from any thread.
"""

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ucm.threads import Threads

__all__ = ["HostLoop"]


class HostLoop:
    """
    Calls on the loop that is running, in one go for all that comes together.

    Args:
        threads: Where what wakes an asyncio loop comes from.
    """

    def __init__(self, threads: Threads) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._thread = threading.get_ident()
        trio: Any = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            self._trio = trio
            self._wake = self._wake_trio
            self._token = trio.lowlevel.current_trio_token()
            self.close: Callable[[], None] = lambda: None
        else:
            waker = threads.waker(asyncio.get_running_loop(), self._run)
            self._wake = waker.wake
            self.close = waker.close

    @property
    def is_here(self) -> bool:
        """Whether the loop is of the calling thread."""
        return threading.get_ident() == self._thread

    def ring(self, call: Callable[[], None]) -> None:
        """Have something called soon; never, where the loop has ended. Never blocks."""
        self._calls.append(call)
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def _wake_trio(self) -> None:
        with contextlib.suppress(self._trio.RunFinishedError):
            self._token.run_sync_soon(self._run)

    def _run(self) -> None:
        self._is_woken = False  # first: what comes from now on wakes again
        while self._calls:
            self._calls.popleft()()
