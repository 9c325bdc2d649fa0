# SPDX-License-Identifier: Apache-2.0
"""
A runtime on the loop of whoever embeds it, with tickets that can be awaited.

For hosts that run on asyncio themselves: no thread of ours polls or is polled, and what a
ticket came to is the result of a call. Copy threads do what blocks, as ever::

    async with asyncio.TaskGroup() as group:
        embedded = EmbeddedRuntime(runtime)
        serving = group.create_task(embedded.serve())
        outcomes = await embedded.carry_out(digest, orders, device.lease(None))
        await embedded.close()

Threading: everything runs on the loop that ``serve`` runs on, and so does the runtime:
of its other methods none that waits is to be called there. ``serve`` may begin after the
first orders, which wait for it.
"""

import asyncio
from collections.abc import Callable, Sequence

import anyio.to_thread

from ucm.devices.abc import Fence
from ucm.pipeline.recorder import Notice
from ucm.pipeline.tickets import Outcome
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder
from ucm.threads import SYSTEM, Threads

__all__ = ["EmbeddedRuntime"]


class EmbeddedRuntime:
    """
    Carries out orders for coroutines.

    Args:
        runtime: Not started; closed with this.
        tell: Called on the loop with every notice, in order: with the release of blocks
            too, which for a save comes long before its outcome.
        threads: Where what wakes the loop comes from.
    """

    def __init__(
        self,
        runtime: Runtime,
        tell: Callable[[Notice], None] = lambda _: None,
        threads: Threads = SYSTEM,
    ) -> None:
        self._runtime = runtime
        self._tell = tell
        self._threads = threads
        self._awaited: dict[int, asyncio.Future[Outcome]] = {}
        self._is_serving = True
        self._closing = asyncio.Lock()

    async def serve(self) -> None:
        """
        Serve until ``close``; raises what ends the pipeline early.

        Raises:
            ConfigError: ``queue.staging_bytes`` is less than a block.
            PipelineClosedError: It was closed before.
        """
        waker = self._threads.waker(asyncio.get_running_loop(), self._hand_out)
        try:
            await self._runtime.serve(waker.wake)
        finally:
            self._is_serving = False
            waker.close()
            self._hand_out()

    async def carry_out(
        self, digest: bytes, orders: Sequence[SpanOrder], fence: Fence
    ) -> list[Outcome]:
        """
        Submit orders, and wait for the last word on each of them.

        Whoever is cancelled meanwhile hears nothing more; the tickets go on.

        Args:
            digest: Key space of their keys.
            orders: As ``Runtime.submit`` takes them.
            fence: Behind everything that was done to the blocks so far.
        """
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in orders]
        for order, end in zip(orders, ends, strict=True):
            self._awaited[order.transfer_id] = end
        self._runtime.submit(digest, orders, fence)
        if not self._is_serving:
            self._hand_out()
        return [await end for end in ends]

    async def close(self) -> None:
        """
        Close the runtime while the loop goes on. Idempotent.

        Until that is over another thread has the runtime; what it has left is handed
        out then, so that every call comes back.
        """
        async with self._closing:
            await anyio.to_thread.run_sync(self._runtime.close)
        self._is_serving = False
        self._hand_out()

    def _hand_out(self) -> None:
        """Take what there is to poll; on the loop."""
        if self._closing.locked():
            return
        notices = self._runtime.poll()
        for notice in notices:
            if notice.outcome is None:
                continue
            end = self._awaited.pop(notice.ticket.transfer_id, None)
            if end is not None and not end.cancelled():
                end.set_result(notice.outcome)
        for notice in notices:
            self._tell(notice)
