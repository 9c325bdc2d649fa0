# SPDX-License-Identifier: Apache-2.0
"""A log is opened without touching anybody's settings."""

import contextlib
import gc
import json
import os
import stat
from types import SimpleNamespace

import pytest
import structlog

from tests.clocks import AdvancingThreads
from tests.traces import Drain, filled_pipe
from ucm import line_writer, tracing
from ucm.config import LogConfig
from ucm.errors import ConfigError
from ucm.tracing import (
    LOG_DROPPED,
    RUNTIME_FAILED,
    SCHEDULER_STARTED,
    STAGE_FAILED,
    STORE_BYPASSED,
    TICKET_SETTLED,
    close_log,
    num_dropped,
    open_log,
)

PER_REQUEST = [
    *("ticket.refused", "ticket.settled"),
    *("prefix.matched", "prefix.missed", "request.ended"),
]
LATER = "store.bypassed"


class Silent:
    """Has every method, and each returns nothing."""

    def __getattr__(self, name):
        return lambda *told: None


@pytest.fixture
def full_pipe():
    """Return both ends of a pipe into which not one byte more can be written."""
    with filled_pipe() as ends:
        yield ends


def in_file(directory, *logs):
    """Return the events of the one file in a directory, once its logs are closed."""
    for log in logs:
        close_log(log)
    (path,) = directory.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def _unconfigured():
    """Give the test structlog as a host leaves it that never configured it."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture
def opened():
    """Return ``open_log``; logs are closed behind the test, as at a process's end."""
    logs = []

    def call(config, role="worker-0"):
        logs.append(open_log(config, role))
        return logs[-1]

    yield call
    for log in logs:
        close_log(log)


pytestmark = pytest.mark.usefixtures("_unconfigured")


class TestHostLog:
    def test_events_go_to_a_configured_host(self, tmp_path):
        """Where the host configured structlog, its processors see our events and no
        file is made."""
        directory = tmp_path / "logs"
        capture = structlog.testing.LogCapture()
        structlog.configure(processors=[capture])
        log = open_log(LogConfig(directory=str(directory)), "worker-0")
        log.info(TICKET_SETTLED, outcome="committed")
        assert [
            {
                "event": "ticket.settled",
                "log_level": "info",
                "outcome": "committed",
                "role": "worker-0",
            }
        ] == capture.entries
        assert not directory.exists()

    def test_opening_a_log_configures_nothing(self, tmp_path, opened):
        """A library leaves structlog's global settings to the host."""
        opened(LogConfig(directory=str(tmp_path))).info(TICKET_SETTLED)
        assert not structlog.is_configured()


class TestFile:
    def test_events_are_json_lines_in_a_private_file(self, tmp_path, opened):
        """Without a host's settings each event is one JSON object in a file that
        only its owner reads, below a directory that is made if need be."""
        directory = tmp_path / "new" / "logs"
        before = os.umask(0)
        try:
            log = opened(LogConfig(directory=str(directory)))
        finally:
            os.umask(before)
        log.bind(request_id="r").info(TICKET_SETTLED, blocks=3)
        (path,) = directory.iterdir()
        assert f"ucm-worker-0-{os.getpid()}.jsonl" == path.name
        assert 0o600 == stat.S_IMODE(path.stat().st_mode)
        assert 0o700 == stat.S_IMODE(directory.stat().st_mode)
        (event,) = in_file(directory, log)
        assert event.pop("timestamp_s") > 0
        assert {
            "blocks": 3,
            "event": "ticket.settled",
            "level": "info",
            "request_id": "r",
            "role": "worker-0",
            "v": 1,
        } == event

    def test_second_log_of_a_process_appends(self, tmp_path, opened):
        """Opening the same log again loses nothing that was written."""
        for number in range(2):
            config = LogConfig(directory=str(tmp_path))
            log = opened(config)
            log.info(TICKET_SETTLED, number=number)
            close_log(log)
        assert [0, 1] == [event["number"] for event in in_file(tmp_path)]

    def test_exception_is_written_with_its_traceback(self, tmp_path, opened):
        """An error's text survives in the file."""
        log = opened(LogConfig(directory=str(tmp_path)))
        try:
            raise ZeroDivisionError("nought")
        except ZeroDivisionError:
            log.exception(TICKET_SETTLED)
        (event,) = in_file(tmp_path, log)
        assert "ZeroDivisionError: nought" in event["exception"]

    @pytest.mark.parametrize(
        ("level", "written"),
        [
            ("debug", ["debug", "info", "warning", "error"]),
            ("info", ["info", "warning", "error"]),
            ("warning", ["warning", "error"]),
            ("error", ["error"]),
        ],
    )
    def test_level_filters(self, tmp_path, opened, level, written):
        """Events below the configured level are not written."""
        config = LogConfig(directory=str(tmp_path), level=level)
        log = opened(config)
        for name in ("debug", "info", "warning", "error"):
            getattr(log, name)(TICKET_SETTLED)
        assert written == [event["level"] for event in in_file(tmp_path, log)]

    def test_log_that_is_off_writes_nowhere(self, tmp_path, capsys):
        """Switched off, there is no file and nothing on standard error."""
        directory = tmp_path / "logs"
        config = LogConfig(directory=str(directory), level="off")
        open_log(config, "worker-0").error(TICKET_SETTLED)
        assert not directory.exists()
        assert ("", "") == capsys.readouterr()

    def test_closed_log_gives_its_file_back(self, tmp_path, opened):
        """X-07: nothing of a log is left behind its end, and a late line harms nobody."""
        gc.collect()  # files of what others left
        before = set(os.listdir("/proc/self/fd"))
        log = opened(LogConfig(directory=str(tmp_path)))
        log.info(TICKET_SETTLED)
        for _ in range(2):
            close_log(log)
        log.info(TICKET_SETTLED)
        assert 1 == len(in_file(tmp_path))
        assert before == set(os.listdir("/proc/self/fd"))

    def test_full_file_is_put_aside(self, tmp_path, opened):
        """The present file has the newest lines, ``.1`` the next older; what is older
        than the last of them is gone."""
        config = LogConfig(directory=str(tmp_path), max_bytes=65536, files=2)
        log = opened(config)
        for number in range(2000):
            log.info(TICKET_SETTLED, number=number)
        close_log(log)
        present = tmp_path / f"ucm-worker-0-{os.getpid()}.jsonl"
        older = present.with_name(f"{present.name}.1")
        assert {present, older} == set(tmp_path.iterdir())
        texts = older.read_text() + present.read_text()
        numbers = [json.loads(line)["number"] for line in texts.splitlines()]
        assert list(range(numbers[0], 2000)) == numbers
        assert numbers[0] > 0
        assert max(path.stat().st_size for path in (present, older)) <= 65536

    def test_symlink_in_place_of_the_file_is_refused(self, tmp_path):
        """Nobody can make us append to a file of theirs."""
        victim = tmp_path / "victim"
        victim.write_text("mine\n")
        directory = tmp_path / "logs"
        directory.mkdir()
        (directory / f"ucm-worker-0-{os.getpid()}.jsonl").symlink_to(victim)
        with pytest.raises(ConfigError, match=r"log\.directory"):
            open_log(LogConfig(directory=str(directory)), "worker-0")
        assert "mine\n" == victim.read_text()

    def test_directory_that_cannot_be_made_is_refused(self, tmp_path):
        """A directory below a file is an error that names the setting."""
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError) as caught:
            open_log(LogConfig(directory=str(tmp_path / "file" / "logs")), "worker-0")
        assert "log.directory" == caught.value.key


class TestStandardError:
    def test_without_a_directory_events_go_to_standard_error(self, capsys, opened):
        """Standard output belongs to the program; events are JSON lines beside it."""
        log = opened(LogConfig(), "scheduler")
        log.info(SCHEDULER_STARTED)
        close_log(log)
        out, err = capsys.readouterr()
        assert "" == out
        assert "scheduler.started" == json.loads(err)["event"]

    @pytest.mark.parametrize(
        ("level", "seen"), [("debug", [*PER_REQUEST, LATER]), ("info", [LATER])]
    )
    def test_standard_error_gets_no_line_for_each_request(
        self, capsys, opened, level, seen
    ):
        """R-22: at its default a server's standard error is not flooded; whoever asks
        for more gets it."""
        log = opened(LogConfig(level=level))
        for event in PER_REQUEST:
            log.info(event)
        log.warning(LATER)
        close_log(log)
        lines = capsys.readouterr().err.splitlines()
        assert seen == [json.loads(line)["event"] for line in lines]

    def test_standard_error_gets_one_line_for_failures_of_a_kind(
        self, capsys, opened, monkeypatch
    ):
        """A store that is gone fails every ticket; a server's standard error is told of
        the first, of other kinds, and after a while how many there were."""
        threads = AdvancingThreads()
        monkeypatch.setattr(tracing, "SYSTEM", threads)
        log = opened(LogConfig())
        for number in range(1000):
            log.warning(STAGE_FAILED, reason="unavailable", transfer_id=number)
        log.warning(STAGE_FAILED, reason="corrupt", transfer_id=1000)
        threads.advance(10.0)
        log.warning(STAGE_FAILED, reason="unavailable", transfer_id=1001)
        close_log(log)
        lines = map(json.loads, capsys.readouterr().err.splitlines())
        seen = [(each["transfer_id"], each.get("left_out", 0)) for each in lines]
        assert [(0, 0), (1000, 0), (1001, 999)] == seen

    @pytest.mark.parametrize("level", ["warning", "debug"])
    def test_file_gets_every_failure(self, tmp_path, opened, level):
        """Who names a directory can follow each ticket to its end."""
        log = opened(LogConfig(level=level, directory=str(tmp_path)))
        for _ in range(3):
            log.warning(STAGE_FAILED, reason="unavailable")
        assert 3 == len(in_file(tmp_path, log))

    def test_file_gets_every_line_of_its_level(self, tmp_path, opened):
        """R-22: who names a directory gets a line for each request as before."""
        log = opened(LogConfig(directory=str(tmp_path)))
        for event in PER_REQUEST:
            log.info(event)
        assert PER_REQUEST == [event["event"] for event in in_file(tmp_path, log)]

    def test_standard_error_of_a_host_s_own_needs_write_only(self, monkeypatch, opened):
        """Python asks no more of what stands in its place, such as a copier of lines: no cache
        could be opened there, and no engine started."""
        lines: list[str] = []
        monkeypatch.setattr("sys.stderr", SimpleNamespace(write=lines.append))
        log = opened(LogConfig())
        log.error(RUNTIME_FAILED)
        close_log(log)
        (line,) = lines
        assert RUNTIME_FAILED == json.loads(line)["event"]
        assert 0 == num_dropped(log)

    @pytest.mark.parametrize("error", [RuntimeError, AttributeError, RecursionError])
    def test_lines_that_a_host_s_own_standard_error_refuses_are_counted(
        self, monkeypatch, opened, error
    ):
        """What else than a file's errors it raised ended the log's thread: all lines behind it
        were lost, and none counted."""

        def refuse(text: str) -> None:
            raise error(text)

        monkeypatch.setattr("sys.stderr", SimpleNamespace(write=refuse))
        log = opened(LogConfig())
        log.error(RUNTIME_FAILED)
        close_log(log)
        assert 1 == num_dropped(log)

    def test_standard_error_that_answers_all_with_nothing_refuses_no_log(
        self, monkeypatch, opened
    ):
        """Who silences a library may put such an object there: it was asked for its descriptor."""
        monkeypatch.setattr("sys.stderr", Silent())
        log = opened(LogConfig())
        log.error(RUNTIME_FAILED)
        close_log(log)
        assert 0 == num_dropped(log)

    def test_process_without_standard_error_logs_nowhere(self, monkeypatch, opened):
        """A daemon may have none; its log is lost, and nothing else."""
        monkeypatch.setattr("sys.stderr", None)
        log = opened(LogConfig())
        log.error(RUNTIME_FAILED)
        close_log(log)


class TestFullPipe:
    """R-22, R-73: standard error is a pipe that nobody reads, and it is full."""

    def test_who_logs_never_waits_and_what_is_dropped_is_told(
        self, monkeypatch, opened, full_pipe
    ):
        """R-22: every call returns; lines beyond the bound are dropped, and once somebody
        reads again a line says how many."""
        reader, writer = full_pipe
        monkeypatch.setattr(line_writer, "MAX_CHARS", 5000)
        with os.fdopen(writer, "w") as stream, contextlib.redirect_stderr(stream):
            log = opened(LogConfig())
        assert 0 == num_dropped(log)
        for number in range(1000):
            log.warning(STORE_BYPASSED, number=number)
        drained = Drain(reader)
        close_log(log)
        events = drained.events()
        told = [each["number"] for each in events if each["event"] == STORE_BYPASSED]
        dropped = [each["lines"] for each in events if each["event"] == LOG_DROPPED]
        assert told == sorted(told)
        assert 1000 == len(told) + sum(dropped)
        assert dropped
        assert sum(dropped) == num_dropped(log)
        assert {"worker-0"} == {each["role"] for each in events}

    def test_close_waits_for_a_moment_only(self, monkeypatch, opened, full_pipe):
        """R-22: an engine that stops is not held up by a log that nobody reads."""
        reader, writer = full_pipe
        monkeypatch.setattr(tracing, "_CLOSE_S", 0.01)
        with os.fdopen(writer, "w") as stream, contextlib.redirect_stderr(stream):
            log = opened(LogConfig())
        log.warning(STORE_BYPASSED)
        close_log(log)
        assert [STORE_BYPASSED] == [each["event"] for each in Drain(reader).events()]
