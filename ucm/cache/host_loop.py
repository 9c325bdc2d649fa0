# SPDX-License-Identifier: Apache-2.0
"""
The host's own loop, asyncio's or trio's, and how those are woken who wait there.

Threading: made, waited on and closed on the loop; what ends a ``Pending`` may be any.
"""

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from ucm.cache.pending import Pending
from ucm.threads import SYSTEM
from ucm.waker import LoopWaker

__all__ = ["HostLoop", "Lanes", "to_its_end"]

_T = TypeVar("_T")


class HostLoop:
    """The loop that is running; wakes it once for all that ends together."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._is_taken = SYSTEM.lock()
        """By who calls on a thread."""
        self._loop: asyncio.AbstractEventLoop | None = None
        if (trio := _running_trio()) is not None:
            self._trio = trio
            self._wake = self._wake_trio
            self._running: Callable[[], object] = trio.lowlevel.current_trio_token
            self._token = trio.lowlevel.current_trio_token()
        else:
            self._running = asyncio.get_running_loop
            self._token = self._loop = asyncio.get_running_loop()
            self._waker = SYSTEM.waker(self._loop, self._run)
            self._wake = self._waker.wake

    def close(self) -> None:
        """Wake those who wait for what has ended, and let go of the loop. Idempotent."""
        if self._loop is not None:
            self._wake = LoopWaker(self._loop, self._run).wake  # of who is late
            self._waker.close()
            while self._calls:
                with contextlib.suppress(RuntimeError):  # of a loop that is closed
                    self._run()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on it; one thread may have several in turn."""
        try:
            return self._running() is self._token
        except RuntimeError:  # none runs here
            return False

    async def in_thread(self, function: Callable[[], _T]) -> _T:
        """
        Call on a thread, one at a time, and to its end, however often somebody cancels.

        On any loop: who opened a cache on one that has ended closes it on another.
        """

        def call() -> _T:
            with self._is_taken:
                return function()

        return await to_its_end(call)

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


class Lanes:
    """
    Threads for calls of a face, each to its end; so many at a time, others wait in line.

    Args:
        count: How many at most; none before the first call.
    """

    def __init__(self, count: int) -> None:
        self._limiter = anyio.CapacityLimiter(count)
        self._threads: Executor | None = ThreadPoolExecutor(count, "ucm-lanes")

    async def call(self, function: Callable[[], _T]) -> _T:
        """Call on one of them."""
        async with self._limiter:
            return await to_its_end(function, self._threads)

    def close(self) -> None:
        """Let go of them; a call behind that has a thread of its own. Idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


async def to_its_end(call: Callable[[], _T], aside: Executor | None = None) -> _T:
    """
    Call on a thread, and to its end, however often somebody cancels.

    Who was cancelled is so behind it; what the call returned is lost then. Where asyncio
    gets no thread, as behind the end of the main one, it is made here: all is to be closed.

    Args:
        call: What is called.
        aside: On asyncio, where that thread comes from; a new one if not given.
    """
    with anyio.CancelScope(shield=True):
        if _running_trio() is not None:
            alone = anyio.CapacityLimiter(1)  # however many the host has under way
            return await anyio.to_thread.run_sync(call, limiter=alone)
        threads = aside or ThreadPoolExecutor(1, "ucm-aside")
        told, is_taken = Future[_T](), threading.Lock()

        def make() -> None:
            if is_taken.acquire(blocking=False):
                try:
                    told.set_result(call())
                except BaseException as exc:  # noqa: BLE001 - handed to who awaits it
                    told.set_exception(exc)

        try:
            threads.submit(make)
        except RuntimeError:  # the interpreter ends, or has no more
            make()  # which may stand in line all the same
        called = asyncio.wrap_future(told)
        cut: BaseException | None = None
        while not called.done():
            try:
                await asyncio.wait([called])
            except asyncio.CancelledError as exc:  # of a task, which minds no scope
                cut = exc
        if aside is None:
            threads.shutdown()  # at once: it is idle
    if cut is not None and called.exception() is None:
        raise cut
    return called.result()


def _running_trio() -> ModuleType | None:
    """Return trio if the caller runs in it, and None elsewhere."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_task() else None
