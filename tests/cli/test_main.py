# SPDX-License-Identifier: Apache-2.0
import importlib

import pytest

from ucm.cli.main import COMMANDS, USAGE, main


def test_an_unknown_command_is_one_line_and_no_traceback(capsys):
    """Whatever is wrong with a call, an operator reads one line and scripts a code."""
    assert main(["no-such-command"]) == USAGE
    told = capsys.readouterr().err
    assert told.startswith("ucm: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name):
    """The table of subcommands names attributes that exist and explain themselves."""
    module, attribute = COMMANDS[name].split(":")
    assert getattr(importlib.import_module(module), attribute).help
