# SPDX-License-Identifier: Apache-2.0
"""What the machinery is given to wait with."""

import threading

from ucm.threads import SYSTEM, slowly


class TestSlowly:
    def test_items_come_as_they_are_with_a_pause_behind_each_so_many(self):
        """The last ones have none behind them: whoever asked goes on by itself."""
        for num_items, num_pauses in ((0, 0), (3, 0), (4, 1), (6, 1), (7, 2)):
            pauses = []
            seen = list(slowly(range(num_items), 3, lambda: pauses.append(1)))  # noqa: B023
            assert list(range(num_items)) == seen
            assert num_pauses == len(pauses)


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
        while not is_over:
            SYSTEM.give_way()
        thread.join(60.0)
        assert [1] == is_over
