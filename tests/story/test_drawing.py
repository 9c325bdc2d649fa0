# SPDX-License-Identifier: Apache-2.0
"""Bars do not hide each other, and both forms of a drawing say the same."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.story.logs import ended, run_of, settled
from ucm.story.collected import collect
from ucm.story.drawing import draw
from ucm.story.files import Reading, find_logs, read_logs
from ucm.story.lines import parse
from ucm.story.lives import lives_of
from ucm.story.perfetto import events_of


def drawing_of(*lines):
    """Return the drawing of lines."""
    parsed = (parse(json.dumps(each).encode(), "worker-0-8") for each in lines)
    return draw(lives_of(collect(parsed)))


@pytest.fixture
def drawing(tmp_path):
    """Return the drawing of a run of three requests."""
    files = find_logs(run_of(tmp_path / "run"))
    return draw(lives_of(collect(read_logs(files, Reading()))))


class TestLanes:
    def test_there_is_a_lane_for_each_process_and_direction(self, drawing):
        """Requests are on top; whose loads and saves they are is said."""
        assert [
            ("requests", ""),
            ("load", "worker-0-8"),
            ("save", "worker-0-8"),
        ] == [(lane.kind, lane.process) for lane in drawing.lanes]

    def test_a_shared_ticket_is_drawn_once(self):
        """A bar is a ticket, not each request's share of it."""
        told = drawing_of(
            ended("r1"), ended("r2"), settled("r1", requests=["r1", "r2"])
        )
        assert [("r1", "r2")] == [bar.owners for bar in told.lanes[1].bars]

    @given(
        st.lists(
            st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=30
        )
    )
    def test_bars_of_one_row_never_overlap(self, moments):
        """Whatever overlaps in time has rows of its own."""
        tickets = [
            settled("r", number, begin / 10, (begin + length) / 10)
            for number, (begin, length) in enumerate(moments)
        ]
        lane = drawing_of(*tickets).lanes[1]
        for row in range(lane.rows):
            bars = sorted(
                (bar.begin_s, bar.end_s) for bar in lane.bars if bar.row == row
            )
            assert bars
            for (_, end), (begin, _) in itertools.pairwise(bars):
                assert end <= begin + 1e-9

    def test_moments_count_from_the_first_one(self, drawing):
        """A reader sees seconds from the start, not Unix time."""
        assert 0.0 == min(bar.begin_s for bar in drawing.bars)
        assert pytest.approx(1.2) == drawing.span_s

    def test_a_stage_ends_within_its_ticket(self):
        """A ticket's line is written while its last stage returns."""
        told = drawing_of(settled(end=0.2, edges=[["commit", 0.0, 0.5]]))
        (bar,) = told.lanes[1].bars
        assert pytest.approx(0.5) == bar.end_s - bar.begin_s


class TestGaps:
    def test_a_long_pause_is_drawn_short(self):
        """Between two runs, or at night, there is nothing to look at."""
        told = drawing_of(ended("a", 0.0, 1.0), ended("b", 60.0, 61.0))
        assert [(1.0, 60.0)] == [
            tuple(round(moment, 3) for moment in gap) for gap in told.gaps
        ]

    def test_a_pause_that_is_not_long_is_drawn_as_it_was(self):
        """Among what happens, pauses tell something."""
        assert () == drawing_of(ended("a", 0.0, 1.0), ended("b", 1.3, 2.3)).gaps

    def test_there_are_not_more_than_can_be_drawn(self):
        """The longest are drawn short, in the order of time."""
        lives = [ended(str(day), day * day, day * day + 0.001) for day in range(200)]
        gaps = drawing_of(*lives).gaps
        assert sorted(gaps) == list(gaps)
        assert 50 == len(gaps)
        assert 2 * 149 <= gaps[0][1] - gaps[0][0]


class TestPerfetto:
    def test_each_bar_and_stage_is_an_event(self, drawing):
        """Microseconds, as the format has them; who, direction and outcome are told."""
        events = events_of(drawing)["traceEvents"]
        (save,) = [each for each in events if each["name"] == "save 1"]
        assert ("X", 200_000.0, "save,committed") == (
            save["ph"],
            pytest.approx(save["dur"]),
            save["cat"],
        )
        assert {"gather", "commit", "fetch", "scatter"} <= {
            each["name"] for each in events
        }
        assert {"requests", "worker-0-8 load", "worker-0-8 save"} == {
            each["args"]["name"] for each in events if each["ph"] == "M"
        }

    def test_events_of_one_thread_nest(self):
        """Stages that overlap, as layer-wise ones do, have threads of their own."""
        edges = [["gather", 0.0, 0.1], ["gather", 0.05, 0.15], ["commit", 0.1, 0.2]]
        told = drawing_of(settled(number=1, end=0.3, edges=edges), settled(number=2))
        by_thread = {}
        for each in events_of(told)["traceEvents"]:
            if each["ph"] == "X":
                key = (each["pid"], each["tid"])
                by_thread.setdefault(key, []).append((each["ts"], each["dur"]))
        for spans in by_thread.values():
            for begin, length in spans:
                for other, other_length in spans:
                    starts_inside = begin < other < begin + length - 1e-3
                    assert not starts_inside or (
                        other + other_length <= begin + length + 1e-3
                    )
