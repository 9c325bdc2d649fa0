# SPDX-License-Identifier: Apache-2.0
import importlib
import io
import os
import signal
import subprocess
import sys

import pytest

from tests.stores.slab_kit import open_slab
from tests.story.logs import run_of
from ucm.cli.main import COMMANDS, USAGE, main


def test_an_unknown_command_is_one_line_and_no_traceback(capsys):
    """Whatever is wrong with a call, an operator reads one line and scripts a code."""
    assert main(["no-such-command"]) == USAGE
    told = capsys.readouterr().err
    assert told.startswith("ucm: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", ["", "config", "keys", "store", "trace"])
def test_command_without_the_next_one_says_where_they_are(name, capsys):
    """A group that is called alone names what is missing; its help is no error's one line."""
    assert main(name.split()) == USAGE
    command = " ".join(["ucm", *name.split()])
    assert f"ucm: Missing command. ({command} --help)\n" == capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["store", "stat"], ["store", "ls", "--json"]])
def test_answer_to_nobody_is_no_error(tmp_path, monkeypatch, arguments):
    """A process may be started without standard output: what it tells goes nowhere."""
    open_slab(tmp_path / "slab").close()
    with monkeypatch.context() as without:
        without.setattr(sys, "stdout", None)
        code = main([*arguments, str(tmp_path / "slab")])
        sys.stdout.close()
    assert 0 == code


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_answer_that_is_read_in_part_is_nothing_that_is_not_well(tmp_path, more):
    """Behind ``| head`` a command said with its code that what it had looked at was not well."""
    code = "import sys; from ucm.cli.main import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "trace", "stats", "--log"]
    out, into = os.pipe()
    os.close(out)
    try:
        told = subprocess.run(
            [*words, run_of(tmp_path / "log"), *more],
            stdout=into,
            stderr=subprocess.PIPE,
            timeout=300.0,
            check=False,
        )
    finally:
        os.close(into)
    assert (128 + signal.SIGPIPE, b"") == (told.returncode, told.stderr)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name):
    """The table of subcommands names attributes that exist and explain themselves."""
    module, attribute = COMMANDS[name].split(":")
    assert getattr(importlib.import_module(module), attribute).help


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(
    "words", [["top", "--interval"], ["doctor", "--tokens-per-second"]]
)
def test_number_that_is_none_is_refused(words, number, capsys):
    """NaN is within any bounds: a live view ended at it with a traceback, and a doctor said nothing of traffic."""
    assert main([*words, number]) == USAGE
    assert 1 == capsys.readouterr().err.count("\n")


def test_terminal_without_a_sign_for_all_that_is_told_is_no_error(
    tmp_path, monkeypatch
):
    """Bars of durations, and names that others gave, have marks in their place where it is not of UTF-8."""
    told = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", told)
        patch.setenv("COLUMNS", "140")
        code = main(["trace", "stats", "--log", str(run_of(tmp_path / "run"))])
    assert 0 == code
    assert b"? from " in told.buffer.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_killed_command_leaves_nothing(memory_path, number):
    """Whoever kills it, or closes its terminal, which is told twice, has memory back that it
    took to measure; it dies of that, so that a script sees it."""
    memory_path.mkdir()
    code = (
        "import shutil, signal, sys; from ucm.cli import bench; from ucm.cli.main import main\n"
        f"signal.signal({number}, signal.SIG_DFL)\n"  # nohup has one ignored
        "bench.measure_store = lambda *_: print(flush=True) or signal.pause()\n"
        "remove = shutil.rmtree\n"
        "def removed(*given, **more):\n"
        f"    signal.raise_signal({number})\n"
        "    remove(*given, **more)\n"
        "shutil.rmtree = removed\n"
        "sys.exit(main())"
    )
    words = [sys.executable, "-c", code, "bench", str(memory_path), "--size", "1MiB"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as measured:
        assert measured.stdout.readline()
        assert list(memory_path.iterdir())
        measured.send_signal(number)
        try:
            assert -number == measured.wait(60.0)
        finally:
            measured.kill()
    assert [] == list(memory_path.iterdir())
