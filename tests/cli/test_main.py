# SPDX-License-Identifier: Apache-2.0
import importlib
import sys

import pytest

from tests.stores.slab_kit import open_slab
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
