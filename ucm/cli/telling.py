# SPDX-License-Identifier: Apache-2.0
"""What subcommands have in common when they read numbers, and tell them to people."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ucm.cli.output import console, printable
from ucm.errors import ConfigError
from ucm.settings import read_size

__all__ = ["SIZE", "Number", "ago", "examples", "plain", "progress"]

_MOST_SHOWN = 120
_STEPS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


class _Size(click.ParamType[int]):
    """Bytes: ``64KiB``, ``100GiB``, or a number."""

    name = "size"

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int:
        """Return bytes, at least one."""
        try:
            text = str(value)
            is_whole = text.isascii() and text.isdecimal()
            nbytes = int(text[:20]) if is_whole else read_size("size", text)
        except ConfigError:
            nbytes = 0
        if not 0 < nbytes < 1 << 63:
            self.fail(f"{value!r} is no size such as 64KiB or 100GiB", param, ctx)
        return nbytes


SIZE = _Size()


class Number(click.FloatRange):
    """A number within bounds; NaN, which is neither above nor below any, is in none."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Return a finite number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number", param, ctx)
        return number


def examples(*lines: str) -> str:
    """Return the end of a subcommand's help, in which lines stay lines."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def ago(seconds: float) -> str:
    """Return how long ago something was, or when it will be: ``3 m ago``, ``in 2 h``."""
    for step, unit in _STEPS:
        if abs(seconds) >= step:
            text = f"{abs(seconds) / step:.0f} {unit}"
            return f"{text} ago" if seconds > 0 else f"in {text}"
    return "now"


def plain(text: str) -> str:
    """Return what others wrote so that a terminal takes nothing in it for a command."""
    cut = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
    return printable(cut)


@contextlib.contextmanager
def progress(
    what: str, total: int, *, is_bytes: bool = True
) -> Iterator[Callable[[int], None]]:
    """
    Show on standard error how far long work is, where somebody looks at it there.

    Args:
        what: The work, in a word.
        total: Bytes, or things, that there are; 0 if nobody knows.
        is_bytes: Which of both.

    Yields:
        What is to be told how much is done by now.
    """
    if not sys.stderr.isatty():
        yield lambda so_far: None  # of each line of a log: it is to cost nothing
        return
    done = DownloadColumn(binary_units=True) if is_bytes else MofNCompleteColumn()
    with Progress(
        *(TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn()),
        console=console(stderr=True),
        transient=True,
    ) as shown:
        task = shown.add_task(what, total=total or None)
        yield lambda so_far: shown.update(task, completed=so_far)
