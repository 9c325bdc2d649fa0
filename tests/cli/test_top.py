# SPDX-License-Identifier: Apache-2.0
"""``ucm top`` shows each engine of a slab, in wide terminals and narrow ones."""

import contextlib
import fcntl
import io
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.cli.call import call
from ucm.cli.main import NOT_WELL, UNREADABLE, main
from ucm.cli.top import rendered
from ucm.cli.top_view import engines_of
from ucm.status import Status, Statuses, StatusServer

SAVED = "ucm_settled_part_bytes_total|save|committed|"


def scheduler(engine="e1", **said):
    """Return what a scheduler says."""
    gauges = {
        "ucm_healthy": 1,
        "ucm_open_tickets|save": 3,
        "ucm_store_capacity_parts": 200,
        "ucm_store_committed_parts": 50,
        "ucm_store_capacity_bytes": 4 << 30,
    }
    counters = {
        "ucm_loaded_tokens_total": 4096,
        "ucm_missed_lookups_total|evicted": 9,
        "ucm_missed_lookups_total|never_offered": 31,
        "ucm_load_failures_total|deadline": 2,
    }
    told = {
        "role": "scheduler",
        "pid": 7,
        "uptime_s": 120.0,
        "sizes": {"requests": 5, "held_blocks": 12},
    }
    return Status(
        **told | {"engine": engine, "gauges": gauges, "counters": counters} | said
    )


def worker(engine="e1", saved=0, number=0, **said):
    """Return what a worker says."""
    told = {"role": f"worker-{number}", "pid": 8 + number, "uptime_s": 100.0}
    return Status(**told | {"engine": engine, "counters": {SAVED: saved}} | said)


def shown(statuses, width):
    """Return what a terminal of a width shows."""
    out = Console(record=True, width=width, file=io.StringIO())
    found = statuses if isinstance(statuses, Statuses) else Statuses(list(statuses))
    out.print(rendered(Path("/slab"), engines_of(found.answers), found, out))
    return out.export_text()


class TestEngines:
    def test_several_engines_are_several_rows(self):
        """Processes join by the name of their engine."""
        two = engines_of([worker("b"), scheduler("a"), worker("a"), scheduler("b")])
        assert [("a", 2), ("b", 2)] == [
            (each.name, len(each.processes)) for each in two
        ]

    def test_counters_of_ranks_add_up(self):
        """Each rank moves its own part of a block."""
        (engine,) = engines_of(
            [scheduler(), worker(saved=10), worker(saved=5, number=1)]
        )
        assert 15 == engine.total(SAVED)

    def test_a_rate_is_of_the_time_between_two_looks(self):
        """What was saved before does not count for now."""
        before = {"e1": {SAVED: 1000.0}}
        (engine,) = engines_of([scheduler(), worker(saved=3000)], before, 2.0)
        assert 1000.0 == engine.rate("ucm_settled_part_bytes_total", "save")

    def test_the_first_rate_is_of_all_the_time(self):
        """With one look only, the rate is that since the start."""
        (engine,) = engines_of([scheduler(), worker(saved=1200)])
        assert 10.0 == engine.rate(SAVED)

    def test_states_are_told_apart(self):
        """Well, bypassed, and a worker whose scheduler does not tell yet; a rank that serves
        nothing more is told of although the scheduler hears of it with the next step only."""
        failed = {"ucm_healthy": 0}
        told = [scheduler("a"), scheduler("b", gauges=failed), worker("c")]
        found = engines_of([*told, scheduler("d"), worker("d", gauges=failed)])
        states = ["ok", "bypassed", "starting", "bypassed"]
        assert states == [each.state for each in found]

    def test_a_cache_of_a_host_is_an_engine(self):
        """A library's process has no engine's name; its own stands for it, and in another container
        is another's, whatever its process id."""
        names = ["cache-0-4", "cache-0-4.1"]
        told = [Status(role="cache-0", pid=4, name=name) for name in names]
        found = engines_of(told)
        assert [(name, "ok") for name in names] == [
            (engine.name, engine.state) for engine in found
        ]


class TestScreen:
    @pytest.mark.parametrize("width", [80, 160])
    def test_nothing_is_wider_than_the_terminal(self, width):
        """In 80 and 160 columns no line is broken within a cell."""
        text = shown([scheduler("a" * 60), worker("a" * 60, saved=10**12)], width)
        lines = text.splitlines()
        assert width >= max(len(line.rstrip()) for line in lines)
        row = next(line for line in lines if "aaa" in line and "ok" in line)
        for part in ("ok", " 5 ", " 3 ", " 12 ", "GiB"):
            assert part in row

    @pytest.mark.parametrize("width", [50, 80, 160])
    def test_engines_whose_names_differ_at_the_end_are_told_apart(self, width):
        """Those of one vLLM with data parallelism have one name with a number behind it."""
        names = [f"9d3c0b1e-8a5f-4f0e-b7a1-0c2d4e6f8a9b_dp{rank}" for rank in (0, 1)]
        text = "".join(shown(map(scheduler, names), width).split())
        assert all(f"{name}:missed" in text for name in names)

    def test_a_wide_terminal_shows_more(self):
        """Columns for which there is room."""
        for name in ("tokens loaded", "held for", "processes"):
            assert name in shown([scheduler()], 160)
            assert name not in shown([scheduler()], 80)

    @pytest.mark.parametrize("width", [80, 160])
    def test_reasons_and_the_slab_are_told(self, width):
        """R-71: why look-ups missed, the most frequent first, and how full the slab is."""
        text = " ".join(shown([scheduler()], width).split())
        assert "missed: never_offered 31, evicted 9" in text
        assert "failed loads: deadline 2" in text
        assert "50 of 200 slots (25%) of 4 GiB" in text

    @pytest.mark.parametrize("is_up", [True, False])
    def test_agent_and_tiers_that_are_away_are_told(self, is_up):
        """R-71: an engine is well without them, and finds less."""
        gauges = {
            "ucm_agent_up": is_up,
            "ucm_tier_up|disk": 1,
            "ucm_tier_up|redis": is_up,
        }
        (engine,) = engines_of([scheduler(gauges=gauges)])
        is_told = "the agent is away; silent tiers: redis" in engine.text()
        assert ("ok", not is_up) == (engine.state, is_told)

    def test_servers_of_tiers_that_are_away_or_take_nothing_are_told(self):
        """R-71: the first ones by name; one that is away takes nothing either, and one that is well is left out."""
        name = "ucm_tier_server_up|redis"
        gauges = {f"{name}|{each}|a:1": 0 for each in ("load", "save")}
        gauges |= {f"{name}|load|b:{number}": 1 for number in range(5)}
        gauges |= {f"{name}|save|b:{number}": number == 0 for number in range(5)}
        (engine,) = engines_of([scheduler(gauges=gauges)])
        assert (
            "silent servers: a:1 (redis); servers that take nothing: "
            "b:1 (redis), b:2 (redis), b:3 (redis), 1 more"
        ) in engine.text()
        assert "ok" == engine.state

    @pytest.mark.slow
    @given(
        st.lists(
            st.builds(
                Status,
                role=st.text(),
                pid=st.integers(),
                engine=st.text(),
                problem=st.text(),
                uptime_s=st.floats(allow_nan=False, allow_infinity=False),
                counters=st.dictionaries(st.text(), st.floats(allow_nan=False)),
                gauges=st.dictionaries(
                    st.sampled_from(["ucm_healthy", "ucm_store_capacity_parts", "x"]),
                    st.floats(allow_nan=False, allow_infinity=False),
                ),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_whatever_processes_say_can_be_shown(self, statuses):
        """Names and numbers are somebody else's word; nothing in them is obeyed."""
        text = shown(Statuses(statuses, ["[red]\x1b[31m"]), 80)
        assert "\x1b" not in text
        assert "[red]" in text


_NUMBERS = st.dictionaries(
    st.sampled_from(["ucm_healthy", "ucm_store_capacity_parts", SAVED]) | st.text(),
    st.integers() | st.floats(allow_nan=False) | st.text(),
    max_size=3,
)
_ANSWERS = st.binary(max_size=200) | st.fixed_dictionaries(
    {"role": st.just("scheduler") | st.text(), "pid": st.integers() | st.none()},
    optional={
        "kind": st.just("ucm-status") | st.text(),
        "v": st.just(1) | st.integers(),
        "engine": st.text(),
        "uptime_s": st.floats() | st.text(),
        "problem": st.text(),
        "counters": _NUMBERS,
        "gauges": _NUMBERS,
        "sizes": _NUMBERS,
        "edges": st.lists(st.tuples(st.floats(), st.integers(), st.text(), st.text())),
    },
).map(lambda told: json.dumps(told).encode())


class TestHostile:
    @pytest.mark.slow
    @settings(max_examples=100)
    @given(
        answers=st.lists(_ANSWERS, max_size=3),
        names=st.lists(st.text(min_size=1, max_size=40), max_size=3),
    )
    def test_whatever_answers_ends_in_a_table_or_a_line(
        self, answers, names, tmp_path_factory
    ):
        """Sockets that say anything, between files of any name: an answer or one line, a
        documented code, and nothing that a terminal would obey."""
        slab = tmp_path_factory.mktemp("slab")
        folder = slab / "status"
        folder.mkdir(mode=0o700)
        for name in names:
            with contextlib.suppress(OSError, ValueError):  # no name of a file
                (folder / name.replace("/", "-")).write_text("")
        with contextlib.ExitStack() as served:
            for number, answer in enumerate(answers):
                path = folder / f"worker-{number}-1.sock"
                served.enter_context(_answering(path, answer))
            for arguments in (("--once",), ("--json",)):
                told = call("top", slab, *arguments)
                assert told.is_tidy(), told
                assert "\x1b" not in told.out


@contextlib.contextmanager
def _answering(path, answer):
    """Answer with the same bytes whoever connects to a socket, until the end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                with connection, contextlib.suppress(OSError):
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60.0)


class TestCommand:
    @pytest.fixture
    def slab(self, tmp_path):
        """Return a directory in which an engine's scheduler tells that it is well."""
        server = StatusServer(
            tmp_path,
            "scheduler",
            lambda: {
                "engine": "e1",
                "gauges": {"ucm_healthy": 1},
                "edges": [(0.5, 7, "gather", "begin")],
            },
        )
        yield tmp_path
        server.close()

    def test_without_a_terminal_it_looks_once(self, slab, capsys):
        """A pipe gets plain text, and an end."""
        assert main(["top", str(slab)]) == 0
        told = capsys.readouterr().out
        assert "e1" in told
        assert "\x1b" not in told

    def test_programs_get_all_numbers(self, slab, capsys):
        """The keys are those that each process tells, and stay."""
        assert main(["top", str(slab), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        (engine,) = told["engines"]
        assert [[[0.5, 7, "gather", "begin"]]] == list(told["edges"].values())
        assert ("e1", "ok", {"ucm_healthy": 1}) == (
            engine["name"],
            engine["state"],
            engine["gauges"],
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [80, 160])
    def test_in_a_terminal_it_looks_until_it_is_stopped(self, slab, width):
        """A live view: drawn again at each look, as wide as the terminal; Ctrl-C ends it."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, width, 0, 0))
        code = "import sys; from ucm.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "top", str(slab), "--interval", "0.1"]
        plain = {"TERM": "xterm", "PYTHONPATH": os.getcwd(), "PATH": os.environ["PATH"]}
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=plain
        ) as shown:
            os.close(theirs)
            seen = ""
            while seen.count("e1") < 3:
                seen += os.read(ours, 65536).decode()
            shown.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # its end of the terminal is closed
                while os.read(ours, 65536):
                    pass
            assert 0 == shown.wait(60.0)
        os.close(ours)
        assert (width == 160) == ("tokens loaded" in seen)

    def test_an_engine_that_restarts_is_waited_for(self, tmp_path):
        """A live view goes on over the moment in which nobody runs, and shows who is next."""
        server = StatusServer(tmp_path, "scheduler", lambda: {"engine": "e7"})
        ours, theirs = pty.openpty()
        code = "import sys; from ucm.cli.main import main; sys.exit(main())"
        command = [
            sys.executable,
            "-c",
            code,
            "top",
            str(tmp_path),
            "--interval",
            "0.1",
        ]
        plain = {"TERM": "xterm", "PYTHONPATH": os.getcwd(), "PATH": os.environ["PATH"]}
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=plain
        ) as shown:
            os.close(theirs)
            for word, act in (
                ("e7", server.close),
                ("no engine runs here now", lambda: None),
            ):
                seen = ""
                while word not in seen:
                    seen += os.read(ours, 65536).decode()
                act()
            shown.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # its end of the terminal is closed
                while os.read(ours, 65536):
                    pass
            assert NOT_WELL == shown.wait(60.0)
        os.close(ours)

    def test_an_engine_that_is_bypassed_is_not_well(self, tmp_path, capsys):
        """The code says it to a script."""
        server = StatusServer(
            tmp_path, "scheduler", lambda: {"gauges": {"ucm_healthy": 0}}
        )
        assert main(["top", str(tmp_path), "--once"]) == NOT_WELL
        server.close()
        assert "bypassed" in capsys.readouterr().out

    def test_an_engine_that_is_silent_is_not_well(self, tmp_path):
        """A stopped process is one, and who asks for JSON gets its name."""
        (tmp_path / "status").mkdir(mode=0o700)
        with _answering(tmp_path / "status" / "worker-0-1.sock", b""):
            told = call("top", tmp_path, "--json")
            assert (NOT_WELL, "") == (told.code, told.err)
            assert ([], ["worker-0-1.sock"]) == (
                told.json()["engines"],
                told.json()["silent"],
            )
            told = call("top", tmp_path)
            assert (NOT_WELL, "") == (told.code, told.err)
        assert "worker-0-1.sock does not answer" in told.out
        assert "no engine" not in told.out

    def test_a_slab_that_nobody_uses_is_one_line(self, tmp_path, capsys):
        """Missing, empty or a file: nobody answers there."""
        (tmp_path / "file").write_text("")
        for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
            assert main(["top", str(path)]) == UNREADABLE
            told = capsys.readouterr().err
            assert (1, True) == (told.count("\n"), told.startswith("ucm: "))
