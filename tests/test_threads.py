# SPDX-License-Identifier: Apache-2.0
"""What the machinery is given to wait with."""

import itertools
import threading

import pytest

from ucm.threads import SYSTEM, Threads


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
