# SPDX-License-Identifier: Apache-2.0
"""What a terminal, or a file, is given to show."""

import io
import sys

import pytest

from ucm.cli.output import console, table

DIGEST = "269adf3b15b6933d1639fc590a0e4e3a"


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        """Return that somebody looks."""
        return True


def shown(out: io.StringIO, monkeypatch: pytest.MonkeyPatch, width: int = 80) -> str:
    """Return what becomes of a table, with this as standard output."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm-256color")
        columns = ("key space", "model", "", "blocks")
        rows = [
            (DIGEST, "a-model-of-a-name-[red]", "", 3),
            (DIGEST[::-1], "b", "as", 4),
        ]
        console().print(table("Kept", columns, rows))
    return out.getvalue()


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_cell_that_is_too_wide_goes_on_below(out, monkeypatch) -> None:
    """A key, a setting's value or a remedy is there to be used: none of it is cut."""
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown(out, monkeypatch, width=60).splitlines()
    first = [line[2:].split("  ")[0].strip() for line in lines[4:]]
    assert DIGEST + DIGEST[::-1] == "".join(first)
    assert DIGEST not in first


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_narrow_terminal_has_a_line_for_each_cell(out, monkeypatch) -> None:
    """Below 60 columns a table is a ladder of letters; a cell that is empty has no line."""
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown(out, monkeypatch, width=59).splitlines()
    assert [
        "Kept",
        "",
        f"key space: {DIGEST}",
        "model: a-model-of-a-name-[red]",
        "blocks: 3",
        "",
        f"key space: {DIGEST[::-1]}",
        "model: b",
        "as",
        "blocks: 4",
    ] == [line.rstrip() for line in lines]


@pytest.mark.parametrize(("no_color", "is_plain"), [("", False), ("1", True)])
def test_no_color_leaves_a_terminal_plain(monkeypatch, no_color, is_plain) -> None:
    """Who sets NO_COLOR, such as for a log of the terminal, has no escape sequence at all."""
    monkeypatch.setenv("NO_COLOR", no_color)
    text = shown(Terminal(), monkeypatch)
    assert is_plain == ("\x1b" not in text)
