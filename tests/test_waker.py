# SPDX-License-Identifier: Apache-2.0
"""How another thread wakes the loop."""

import asyncio
import os
import threading

import anyio
import pytest

from ucm.waker import EventfdWaker, LoopWaker

pytestmark = pytest.mark.asyncio
KINDS = [EventfdWaker, LoopWaker]


@pytest.mark.parametrize("kind", KINDS)
class TestWaker:
    async def test_wake_from_another_thread_calls_on_the_loop(self, kind):
        """The function runs on the loop's thread, at least once behind the last wake."""
        woken, threads = asyncio.Event(), set()

        def called():
            threads.add(threading.get_ident())
            woken.set()

        waker = kind(asyncio.get_running_loop(), called)
        for _ in range(3):
            woken.clear()
            other = threading.Thread(target=lambda: [waker.wake() for _ in range(50)])
            other.start()
            with anyio.fail_after(60):
                await woken.wait()
            other.join()
        assert {threading.get_ident()} == threads
        waker.close()

    async def test_wake_behind_close_does_nothing(self, kind):
        """A late wake touches no file, whoever has the number by now."""
        called = []
        waker = kind(asyncio.get_running_loop(), lambda: called.append(1))
        waker.close()
        waker.close()
        fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]
        waker.wake()
        for fd in fds:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
            os.close(fd)

    async def test_wake_of_a_closed_loop_is_no_error(self, kind):
        """The engine's thread is not disturbed by a loop that is gone."""
        loop = asyncio.new_event_loop()
        waker = kind(loop, lambda: None)
        waker.wake()
        if kind is LoopWaker:
            loop.close()
        waker.close()
        loop.close()
        waker.wake()
