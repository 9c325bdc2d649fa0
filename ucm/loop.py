# SPDX-License-Identifier: Apache-2.0
"""
The loop that a pipeline runs on: one on a thread of its own, or whichever is running.

Threading: ``start`` and ``join`` belong to the thread that owns the runtime, ``serve``
to the loop; ``wake`` and ``call`` may be called from any.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import anyio

from ucm.errors import PipelineClosedError
from ucm.pipeline.pipeline import Pipeline
from ucm.threads import Thread, Threads
from ucm.waker import Waker

__all__ = ["PipelineLoop"]

_START_TIMEOUT_S: Final = 10.0


class PipelineLoop:
    """
    Runs a pipeline until it is stopped.

    Args:
        pipeline: What runs.
        threads: Where the thread, its loop and what wakes it come from.
        on_end: Called once when it runs no more, for whatever reason.
    """

    def __init__(
        self, pipeline: Pipeline, threads: Threads, on_end: Callable[[], None]
    ) -> None:
        self._pipeline = pipeline
        self._threads = threads
        self._on_end = on_end
        self._lock = threads.lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._to_call: list[Callable[[], None]] = []
        """What is to be called on the loop as it comes up."""
        self._is_begun = False
        self._waker: Waker | None = None
        self._thread: Thread | None = None
        self._started = threads.event()
        self._ended = threads.event()

    def start(self) -> bool:
        """
        Serve on a thread of its own; return whether the pipeline runs.

        Raises:
            PipelineClosedError: The system gives no thread.
        """
        thread = self._threads.thread(self._main, "ucm-loop")
        try:
            thread.start()
        except RuntimeError as exc:
            raise PipelineClosedError(f"the loop did not start: {exc}") from exc
        self._thread = thread
        return self._started.wait(_START_TIMEOUT_S) and not self._ended.is_set()

    async def serve(self, begin: Callable[[], None]) -> None:
        """
        Serve on the running loop until the pipeline is stopped.

        Args:
            begin: Called first. It may take long: who joins waits for it as well.
        """
        self._is_begun = True
        try:
            begin()
        except BaseException:
            self._ended.set()
            raise
        try:
            await self._run()
        finally:
            self._over()

    def wake(self) -> None:
        """Let the pipeline look at its queue again. Never blocks."""
        if self._waker is not None:
            self._waker.wake()

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called on the loop, also if it is yet to come up; never, if it is closed."""
        with self._lock:
            if self._loop is None:
                self._to_call.append(function)
                return
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(function)

    def join(self, timeout: float) -> bool:
        """Block up to *timeout* seconds; return whether nothing runs any more."""
        if self._thread is None:
            return not self._is_begun or self._ended.wait(timeout)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            anyio.run(
                self._run, backend_options={"loop_factory": self._threads.event_loop}
            )
        finally:
            self._over()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._waker = self._threads.waker(loop, self._pipeline.wake)
        with self._lock:
            self._loop = loop
        while self._to_call:
            loop.call_soon(self._to_call.pop(0))
        try:
            await self._pipeline.run(self._started.set, self._waker.wake)
        finally:
            self._waker.close()

    def _over(self) -> None:
        try:
            self._on_end()
        finally:
            self._ended.set()
            self._started.set()
