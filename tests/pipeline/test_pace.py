# SPDX-License-Identifier: Apache-2.0
"""How long loads will take: the rate, and who comes too late by it."""

import pytest

from ucm.pipeline.pace import Pace, cost_of, overdue

MIB = 1 << 20


class TestPace:
    def test_nothing_is_known_before_the_first_end(self):
        """Without any measurement there is no rate."""
        assert 0.0 == Pace().seconds_per_byte

    @pytest.mark.parametrize(
        ("ends", "expected"),
        [
            ([(100, 0.0, 1.0)], 0.01),
            ([(100, 0.0, 1.0), (100, 1.0, 2.0)], 0.01),
            # Idle time in between is none of the store's.
            ([(100, 0.0, 1.0), (100, 50.0, 51.0)], 0.01),
            # Two at once for two seconds are as fast as one behind the other.
            ([(100, 0.0, 2.0), (100, 0.0, 2.0)], (0.9 * 2) / (0.9 * 100 + 100)),
            # What began before another one ended counts from there.
            ([(100, 0.0, 1.0), (100, 0.0, 2.0)], (0.9 + 1) / (0.9 * 100 + 100)),
            # A large one counts more than a small one.
            ([(900, 0.0, 1.0), (100, 1.0, 2.0)], (0.9 + 1) / (0.9 * 900 + 100)),
        ],
    )
    def test_rate_is_bytes_over_time_in_which_anything_was_loaded(self, ends, expected):
        """R-12: neither idle time nor overlap counts, and what is large counts more."""
        pace = Pace()
        for cost, begun_at, now in ends:
            pace.note(cost, begun_at, now)
        assert pytest.approx(expected) == pace.seconds_per_byte

    def test_what_is_long_ago_is_forgotten(self):
        """R-12: a store that was slow once is taken for a fast one some loads later."""
        pace = Pace()
        pace.note(MIB, 0.0, 10.0)
        for number in range(60):
            pace.note(MIB, 10.0 + number * 0.001, 10.0 + (number + 1) * 0.001)
        assert pace.seconds_per_byte < 0.004 / MIB

    def test_small_tickets_make_no_store_slow(self):
        """R-12: a block takes a ticket's time and hardly any bytes: what was measured with
        such tickets says as little of large ones."""
        pace = Pace()
        pace.note(cost_of(1, 1000), 0.0, 0.0005)
        assert pace.seconds_per_byte * cost_of(1, 16 * MIB) < 0.01
        assert 3 * MIB + 5 == cost_of(3, 5)


class TestOverdue:
    @pytest.mark.parametrize(
        ("costs", "ahead", "rate", "left", "late"),
        [
            # All fit, up to eight tenths of the time.
            ({"a": 3, "b": 5}, 0, 1.0, 10.0, ""),
            ({"a": 3, "b": 5.1}, 0, 1.0, 10.0, "b"),
            # First come, first served; a small one may still fit behind a large one.
            ({"a": 4, "b": 4, "c": 4}, 0, 1.0, 10.0, "c"),
            ({"a": 4, "b": 9, "c": 4}, 0, 1.0, 10.0, "b"),
            # What is under way counts, and so does time that has passed.
            ({"a": 4}, 5, 1.0, 10.0, "a"),
            ({"a": 4}, 4, 1.0, 10.0, ""),
            ({"a": 4}, 4, 1.0, 5.0, "a"),
            ({"a": 4}, 4, 1.0, -1.0, "a"),
            # Nothing is known, or nothing is under way: it is tried.
            ({"a": 400, "b": 400}, 400, 0.0, 10.0, ""),
            ({"a": 400}, 0, 1.0, 10.0, ""),
            ({"a": 400, "b": 1}, 0, 1.0, 10.0, "b"),
            ({}, 400, 1.0, 10.0, ""),
        ],
    )
    def test_table(self, costs, ahead, rate, left, late):
        """R-12: a request whose loads would not be there in time is late as a whole, and
        nobody waits behind it."""
        found = overdue(costs, ahead=ahead, seconds_per_byte=rate, seconds_left=left)
        assert set(late) == found
