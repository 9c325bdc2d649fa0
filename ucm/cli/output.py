# SPDX-License-Identifier: Apache-2.0
"""
How subcommands speak: tables for people, JSON for programs.

Colour and bold only on a terminal, and never with ``NO_COLOR``; progress on standard error,
so that what is piped on stays clean. ``rich`` does both. A table that is wider than the
terminal goes on in the next line, and on a narrow one each of its cells has a line: no key,
value or remedy is cut.
"""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
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

_NARROW: Final = 60
"""Columns of a terminal below which a table is hard to read."""

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


@attrs.frozen
class _Told:
    """
    A table, or below a width a line for each of its cells.

    Args:
        title: Above it; may be empty.
        columns: Their names, which may be empty.
        rows: Its cells.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """Yield what fits the width; called by ``rich``."""
        if options.max_width >= _NARROW:
            yield self._table()
            return
        if self.title:
            yield clean(self.title)
        for row in self.rows:
            yield ""
            for name, cell in zip(self.columns, row, strict=True):
                if cell != "":
                    yield clean(f"{name}: {cell}" if name else cell)

    def _table(self) -> Table:
        made = Table(title=self.title or None, box=box.SIMPLE, title_justify="left")
        for at, name in enumerate(self.columns):
            cells = [row[at] for row in self.rows]
            is_number = all(isinstance(cell, int | float) for cell in cells)
            side: JustifyMethod = "right" if cells and is_number else "left"
            made.add_column(name, justify=side, overflow="fold")
        for row in self.rows:
            made.add_row(*map(clean, row))
        return made


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> RenderableType:
    """
    Return a table to print; numbers are set to the right.

    Cells may come from files that others wrote: see ``clean``.
    """
    return _Told(title, columns, [list(row) for row in rows])


def printable(text: str) -> str:
    """Return a line that does nothing to a terminal but to stand in it."""
    mark = "\N{REPLACEMENT CHARACTER}"
    return "".join(each if each.isprintable() else mark for each in text)
