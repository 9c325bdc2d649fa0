# SPDX-License-Identifier: Apache-2.0
"""What stages did last is at hand when something fails, and costs next to nothing."""

import pytest
import structlog

from ucm.pipeline.ring import BEGIN, END, EdgeRing


class Clock:
    """Says what it is told to."""

    now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return a clock that stands still."""
    return Clock()


@pytest.fixture
def lines() -> structlog.testing.LogCapture:
    """Return what keeps the lines."""
    return structlog.testing.LogCapture()


@pytest.fixture
def ring(clock: Clock, lines: structlog.testing.LogCapture) -> EdgeRing:
    """Return an empty ring."""
    log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[lines])
    return EdgeRing(log, clock)


class TestDump:
    def test_edges_are_told_in_order_with_their_age(self, ring, clock, lines):
        """The line says how long before it each stage began and ended."""
        ring.mark((100.0, 7, "gather", BEGIN))
        ring.mark((101.5, 7, "gather", END))
        clock.now = 102.0
        ring.dump("failed")
        (line,) = lines.entries
        assert ("trace.ring", "failed") == (line["event"], line["reason"])
        assert [
            (2.0, 7, "gather", "begin"),
            (0.5, 7, "gather", "end"),
        ] == line["edges"]

    def test_ring_has_a_fixed_size(self, ring, lines):
        """However long a process runs, it keeps so many edges, the last ones."""
        for number in range(5000):
            ring.mark((100.0, number, "gather", BEGIN))
        ring.dump("failed")
        assert [4998, 4999] == [ticket for _, ticket, *_ in ring.last(2)]
        assert 2048 == len(ring) == len(lines.entries[0]["edges"])
        assert 4999 == lines.entries[0]["edges"][-1][1]

    def test_failures_write_it_once_in_ten_seconds(self, ring, clock, lines):
        """A store that is gone fails every ticket: the log gets one ring for them, and
        another one later; on demand there is one at any time."""
        ring.mark((100.0, 1, "gather", BEGIN))
        for clock.now in (100.0, 101.0, 109.9, 110.0, 111.0):
            ring.failed("unavailable")
        assert ["unavailable"] * 2 == [line["reason"] for line in lines.entries]
        ring.dump("failed")
        assert 3 == len(lines.entries)

    def test_empty_ring_is_not_told_of_a_failure(self, ring, lines):
        """A failure before the first stage has nothing to show."""
        ring.failed("unavailable")
        assert [] == lines.entries
