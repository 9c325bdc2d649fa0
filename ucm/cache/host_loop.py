# SPDX-License-Identifier: Apache-2.0
"""
The host's own loop, asyncio's or trio's, and how those are woken who wait there.

Threading: made, waited on and closed on the loop; what ends a ``Pending`` may be any.
"""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from ucm.cache.pending import Pending
from ucm.threads import Threads

__all__ = ["HostLoop", "in_thread"]

_T = TypeVar("_T")


class HostLoop:
    """
    The loop that is running; wakes it once for all that ends together.

    Args:
        threads: Where what wakes an asyncio loop comes from.
    """

    def __init__(self, threads: Threads) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        trio: Any = sys.modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            self._trio = trio
            self._wake = self._wake_trio
            self._running: Callable[[], object] = trio.lowlevel.current_trio_token
            self._token = trio.lowlevel.current_trio_token()
            self.close: Callable[[], None] = lambda: None
        else:
            self._running = asyncio.get_running_loop
            self._token = self._loop = asyncio.get_running_loop()
            waker = threads.waker(self._loop, self._run)
            self._wake = waker.wake
            self.close = waker.close

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on it; one thread may have several in turn."""
        try:
            return self._running() is self._token
        except RuntimeError:  # none runs here
            return False

    async def wait(self, pending: Pending[Any], limit: float) -> None:
        """Wait until something has ended, for *limit* seconds at most."""
        loop = self._loop
        if loop is None:
            await self._wait_trio(pending, limit)
            return
        # A server does this twice for each request, and anyio's way takes five times
        # as long: a future and a timer are all it needs.
        over: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        def wake() -> None:
            self._ring(end)

        if not pending.subscribe(wake):
            await anyio.lowlevel.checkpoint()
            return
        late = loop.call_later(limit, end)
        try:
            await over
        finally:
            late.cancel()
            pending.unsubscribe(wake)

    async def _wait_trio(self, pending: Pending[Any], limit: float) -> None:
        over = anyio.Event()

        def wake() -> None:
            self._ring(over.set)

        if not pending.subscribe(wake):
            await anyio.lowlevel.checkpoint()
            return
        try:
            with anyio.move_on_after(limit):
                await over.wait()
        finally:
            pending.unsubscribe(wake)

    def _ring(self, call: Callable[[], None]) -> None:
        """Have something called soon; never, where the loop has ended. Any thread."""
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


async def in_thread(function: Callable[[], _T]) -> _T:
    """Call on a thread of its own, however many the host has under way; to its end."""
    return await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1))
