# SPDX-License-Identifier: Apache-2.0
"""R-72: a server's standard error gets little, and a line of numbers once a minute."""

import contextlib
import json
import os
import threading

import pytest
import structlog

from tests.traces import Drain
from ucm import events, tracing
from ucm.config import LogConfig
from ucm.events import unknown_keys
from ucm.tracing import close_log, open_log, summarize

TIMEOUT = 60.0
ONCE = ["scheduler.started", "runtime.started", "runtime.closed", "scheduler.closed"]
QUIET = [*ONCE, "thread.bound", "store.grown", "weights.read", "store.answers"]


@pytest.fixture(autouse=True)
def _unconfigured():
    """Give the test structlog as a host leaves it that never configured it."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


class TestQuiet:
    def test_standard_error_gets_a_process_s_start_and_end_once(self, capsys):
        """R-72: what comes and goes while it serves is for who names a directory."""
        log = open_log(LogConfig(), "worker-0")
        for _ in range(2):
            for event in QUIET:
                log.info(event)
        close_log(log)
        lines = map(json.loads, capsys.readouterr().err.splitlines())
        assert ONCE == [line["event"] for line in lines]

    def test_what_it_gets_is_what_the_table_calls_so(self):
        """R-72: a new event is quiet unless it is of a process as a whole, or a warning;
        and one that comes for each ticket that fails is told sparingly."""
        per = {
            kind: {event.name for event in events.EVENTS.values() if event.per is kind}
            for kind in events.Per
        }
        at_info = {
            name
            for name in per[events.Per.PROCESS]
            if "info" == events.EVENTS[name].level
        }
        assert at_info == tracing._PER_PROCESS
        assert per[events.Per.FAILURE] == tracing._PER_FAILURE | {"trace.ring"}

    def test_ring_is_for_files_only(self, tmp_path, capsys):
        """R-72: a hundred thousand characters help nobody on standard error."""
        logs = [
            open_log(LogConfig(), "worker-0"),
            open_log(LogConfig(directory=str(tmp_path)), "worker-0"),
        ]
        for log in logs:
            log.warning(tracing.TRACE_RING, edges=[])
            close_log(log)
        assert "" == capsys.readouterr().err
        (path,) = tmp_path.iterdir()
        lines = map(json.loads, path.read_text().splitlines())
        assert ["trace.ring"] == [line["event"] for line in lines]


class TestSummary:
    """R-72: once a minute a line says what was counted, if anything was."""

    def lines(self, monkeypatch, level, *totals):
        """Return the summaries of a log whose minutes are short, up to a warning."""
        reader, writer = os.pipe()
        told = iter(totals)
        is_over = threading.Event()

        def counted():
            with contextlib.suppress(StopIteration):
                return next(told)
            is_over.set()
            return totals[-1]

        monkeypatch.setattr(tracing, "_SUMMARY_S", 0.01)
        with os.fdopen(writer, "w") as stream, contextlib.redirect_stderr(stream):
            log = open_log(LogConfig(level=level), "worker-0")
            log.warning(tracing.STORE_BYPASSED)
            summarize(log, counted)
            if level != "warning":
                assert is_over.wait(TIMEOUT)
            close_log(log)
        return [each for each in Drain(reader).events() if each["event"] == "summary"]

    def test_each_says_what_is_new(self, monkeypatch):
        """Counts of the last minute, those that did not change left out; nothing at all
        of a minute in which nothing happened."""
        first, second = {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 5.0, "c": 1.0}
        lines = self.lines(monkeypatch, "info", first, first, second)
        assert [first, {"b": 3.0, "c": 1.0}] == [line["totals"] for line in lines]
        assert {"worker-0"} == {line["role"] for line in lines}
        assert set() == unknown_keys(lines[0])

    def test_who_wants_warnings_only_gets_none(self, monkeypatch):
        """The level counts for it as for any line."""
        assert [] == self.lines(monkeypatch, "warning", {"a": 1.0})

    def test_host_with_a_log_of_its_own_gets_none(self):
        """It has the counters, and we have no thread there."""
        capture = structlog.testing.LogCapture()
        structlog.configure(processors=[capture])
        summarize(open_log(LogConfig(), "worker-0"), dict)
        assert [] == capture.entries
