# SPDX-License-Identifier: Apache-2.0
"""How the loop waits for a fence, and threads for what becomes of tickets."""

import threading

import anyio
import pytest

from tests.pipeline.kit import TIMEOUT, HandFence
from ucm.devices.events import DoneFence
from ucm.pipeline.waiting import Changes, fence_passed
from ucm.threads import Threads


@pytest.mark.asyncio
class TestFencePassed:
    async def test_passed_fence_costs_no_turn_of_the_loop(self, monkeypatch):
        """A fence that is done is not waited for."""
        pauses = []
        monkeypatch.setattr(anyio, "sleep", pauses.append)
        await fence_passed(DoneFence())
        assert [] == pauses

    async def test_pauses_grow_up_to_a_bound(self, monkeypatch):
        """A short wait is noticed soon, a long one costs few wake-ups (half a
        millisecond, doubling to five)."""
        fence, pauses = HandFence(), []
        fence.call_when_over = lambda _: False  # it has to be looked at

        async def turn(pause):
            pauses.append(pause)
            if len(pauses) == 6:
                fence.open()

        monkeypatch.setattr(anyio, "sleep", turn)
        await fence_passed(fence)
        assert [0.0005, 0.001, 0.002, 0.004, 0.005, 0.005] == pauses

    async def test_wait_ends_with_its_scope(self):
        """The caller's scope is the deadline of a fence that never passes."""
        with anyio.move_on_after(0.01) as scope:
            await fence_passed(HandFence())
        assert scope.cancelled_caught


class CountingThreads(Threads):
    """The process's own, whose events count how often they are set."""

    def __init__(self):
        self.waits, self.num_set = threading.Semaphore(0), 0

    def event(self):
        """Return one that tells of each wait and counts each ``set``."""
        event, waits = threading.Event(), self.waits
        wait, set_it = event.wait, event.set

        def begin(timeout):
            waits.release()
            return wait(timeout)

        def count():
            self.num_set += 1
            set_it()

        event.wait, event.set = begin, count
        return event


class TestChanges:
    def test_thread_that_waits_for_many_is_woken_once(self):
        """R-18: a batch costs the engine's thread one wake-up, by the last of it."""
        threads = CountingThreads()
        changed, done, seen = Changes(threads), set(), []

        def wait():
            seen.append(changed.wait_for_all(range(12), done.__contains__, TIMEOUT))

        thread = threading.Thread(target=wait)
        thread.start()
        assert threads.waits.acquire(timeout=TIMEOUT)
        for number in reversed(range(12)):
            assert 0 == threads.num_set
            with changed.lock:
                done.add(number)
                changed.notify()
        thread.join(TIMEOUT)
        assert [True] == seen
        assert 1 == threads.num_set

    def test_wait_that_is_over_leaves_nothing_behind(self):
        """Who gave up waiting is not asked for again."""
        changed, asked = Changes(), []
        assert not changed.wait_for(lambda: asked.append(1), 0.001)
        before = len(asked)
        with changed.lock:
            changed.notify()
        assert before == len(asked)

    def test_what_is_so_is_not_waited_for(self):
        """Nor is what need not become so: neither makes an event."""
        changed = Changes(CountingThreads())
        assert changed.wait_for(lambda: True, TIMEOUT)
        assert not changed.wait_for(lambda: False, 0)
        assert not changed._event.__self__.waits.acquire(blocking=False)
