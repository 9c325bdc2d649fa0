# SPDX-License-Identifier: Apache-2.0
"""What the machinery is given to wait with."""

import itertools
import threading

import pytest

from tests.clocks import RefusingThreads
from ucm.testing.faults import raising
from ucm.threads import SYSTEM, Aside, Threads


class Ticking(Threads):
    """Threads whose clock goes on by so much at each look."""

    def __init__(self, seconds):
        self._seconds, self._looks = seconds, itertools.count()
        self.ways = 0

    def monotonic(self):
        """Return the next time."""
        return next(self._looks) * self._seconds

    def give_way(self):
        """Count it."""
        self.ways += 1


class TestSlowly:
    @pytest.mark.parametrize(("seconds", "ways"), [(1e-6, 0), (1.01e-4, 4), (1.0, 9)])
    def test_items_come_as_they_are_with_pauses_where_they_take_long(
        self, seconds, ways
    ):
        """R-18: quick ones have none; the slower they are, the more there are."""
        threads = Ticking(seconds)
        assert list(range(9)) == list(threads.slowly(range(9)))
        assert ways == threads.ways


class TestAside:
    def test_job_for_which_there_is_no_thread_is_done_with_the_next(self):
        """Who has a job done hears nothing of it, and closes as ever."""
        done, is_done = [], threading.Event()

        def do(job):
            done.append(job)
            if job == "third":
                is_done.set()

        aside = Aside("ucm-test", do, RefusingThreads("ucm-test", 2))
        for job in ("first", "second", "third"):
            aside.put(job)
        assert is_done.wait(60.0)
        assert ["first", "second", "third"] == done
        assert aside.close(60.0)

    def test_nothing_is_left_of_one_that_never_began(self):
        """A close has no thread to wait for."""
        aside = Aside(
            "ucm-test", raising(AssertionError), RefusingThreads("ucm-test", 1)
        )
        aside.put("job")
        assert aside.close(60.0)


class TestGiveWay:
    def test_other_thread_gets_on_however_long_this_one_computes(self):
        """It needs no switch by force: whoever waits for the lock has it in a pause."""
        begun, is_over = threading.Event(), []

        def other():
            begun.set()
            is_over.append(1)

        thread = threading.Thread(target=other)
        thread.start()
        assert begun.wait(60.0)
        for _ in range(1_000_000):  # a minute, about
            if is_over:
                break
            SYSTEM.give_way()
        thread.join(60.0)
        assert [1] == is_over
