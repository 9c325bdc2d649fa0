# SPDX-License-Identifier: Apache-2.0
"""
The library's own loop, on a thread of its own, under a runtime.

Threading: ``start`` and ``join`` block.
"""

import asyncio
from collections.abc import Callable

import anyio

from ucm.cache.questions import Questions
from ucm.errors import PipelineClosedError, UCMError
from ucm.runtime import Runtime
from ucm.threads import Threads

__all__ = ["Serving"]


class Serving:
    """
    Serves a runtime until that is closed.

    Args:
        runtime: Not started yet.
        attend: Called on the loop when it was woken or there is something to poll, and
            once behind the loop's end.
        questions: Have *attend* called once the loop has died.
        threads: Where threads and loops come from.
    """

    def __init__(
        self,
        runtime: Runtime,
        attend: Callable[[], None],
        questions: Questions,
        threads: Threads,
    ) -> None:
        self._runtime = runtime
        self._attend = attend
        self._questions = questions
        self._threads = threads
        self._up = threads.event()
        self._thread = threads.thread(self._main, "ucm-loop")
        self.wake: Callable[[], None] = lambda: None
        """Have somebody attend soon; any thread, and nothing while nobody does."""
        self._refusal: UCMError | None = None
        self.is_serving = True
        """Whether somebody attends to what is asked for; from before the start on."""

    def start(self, timeout: float) -> UCMError | None:
        """Block until it serves, for *timeout* seconds; return why it does not."""
        try:
            self._thread.start()
        except RuntimeError as exc:  # the system has no more threads
            self.is_serving = False
            return PipelineClosedError(f"the loop did not start: {exc}")
        if self._up.wait(timeout) and self._refusal is None and self.is_serving:
            return None
        return self._refusal or PipelineClosedError("the loop did not start")

    def join(self, timeout: float) -> None:
        """Wait for the end of the loop, for *timeout* seconds at most."""
        if self._thread.is_alive():  # or it never began
            self._thread.join(timeout)

    def _main(self) -> None:
        try:
            loop_factory = {"loop_factory": self._threads.event_loop}
            anyio.run(self._serve, backend_options=loop_factory)
        finally:
            self.is_serving = False
            self._attend()
            self._up.set()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        waker = self._threads.waker(loop, self._attend)
        self.wake = waker.wake
        loop.call_soon(self._up.set)  # once the pipeline waits for something to do
        try:
            await self._runtime.serve(self._heard)
        except UCMError as exc:
            self._refusal = exc
        finally:
            self.is_serving = False  # before who waits for the start is told
            waker.close()

    def _heard(self) -> None:
        """Have a notice handed out; on any thread, whatever locks of ours it holds."""
        if self.is_serving:  # if not for long: it attends once more as it ends
            self.wake()
        else:
            self._questions.ask(self._attend)
