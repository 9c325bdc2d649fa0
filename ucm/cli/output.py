# SPDX-License-Identifier: Apache-2.0
"""
How subcommands speak: tables for people, JSON for programs.

Colour and bold only on a terminal, and never with ``NO_COLOR``; progress on standard error,
so that what is piped on stays clean. ``rich`` does both. A table that is wider than the
terminal goes on in the next line: no key, value or remedy is cut.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

__all__ = [
    "clean",
    "console",
    "json_option",
    "printable",
    "say_json",
    "table",
    "writing",
]

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Answer with JSON, for programs."
)
"""The flag that every subcommand takes which answers something."""


def console(*, stderr: bool = False) -> Console:
    """Return what to print to; plain when it is no terminal, and with ``NO_COLOR``."""
    soft_wrap = not sys.stdout.isatty()
    made = Console(stderr=stderr, highlight=False, soft_wrap=soft_wrap)
    if made.no_color:  # of rich's own: it would leave bold
        made = Console(
            stderr=stderr, highlight=False, soft_wrap=soft_wrap, color_system=None
        )
    return made


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that could not be written: the system names one only where it opens it."""
    try:
        yield
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, exc.filename or str(path)) from exc


def say_json(answer: object) -> None:
    """Print a value as JSON, one document."""
    click.echo(json.dumps(answer, indent=2, sort_keys=False, default=str))


def clean(text: object) -> str:
    """
    Return a text that others wrote so that it can be printed and means nothing more.

    Neither markup of ``rich`` nor anything that a terminal would obey, such as escape
    sequences or marks that turn the direction of writing.
    """
    return escape(printable(str(text)))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """
    Return a table; numbers are set to the right.

    Cells may come from files that others wrote: see ``clean``.
    """
    made = Table(title=title or None, box=box.SIMPLE, title_justify="left")
    rows = [list(row) for row in rows]
    for at, name in enumerate(columns):
        is_number = bool(rows) and all(isinstance(row[at], int | float) for row in rows)
        side: JustifyMethod = "right" if is_number else "left"
        made.add_column(name, justify=side, overflow="fold")
    for row in rows:
        made.add_row(*map(clean, row))
    return made


def printable(text: str) -> str:
    """Return a line that does nothing to a terminal but to stand in it."""
    mark = "\N{REPLACEMENT CHARACTER}"
    return "".join(each if each.isprintable() else mark for each in text)
