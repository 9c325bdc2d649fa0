# SPDX-License-Identifier: Apache-2.0
"""What subcommands have in common when they read numbers, and tell them to people."""

import sys
import time

import click

from ucm.cli.output import printable
from ucm.errors import ConfigError
from ucm.settings import read_size, size_text

__all__ = ["SIZE", "Progress", "ago", "examples", "plain"]

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


class Progress:
    """
    Says on standard error how far long work is: after a second, and once a second.

    Args:
        what: The work, in a word.
        total: Bytes, or things, that there are; 0 if nobody knows.
        is_bytes: Which of both.
    """

    def __init__(self, what: str, total: int, *, is_bytes: bool = True) -> None:
        self._what = what
        self._total = total
        self._is_bytes = is_bytes
        self._tell_at = time.monotonic() + 1.0

    def tell(self, done: int) -> None:
        """Say that so much is done by now."""
        now = time.monotonic()
        if now < self._tell_at:
            return
        self._tell_at = now + 1.0
        total = f" of {self._text(self._total)}" if self._total else ""
        print(  # noqa: T201 - a command's own voice
            f"{self._what}: {self._text(done)}{total}", file=sys.stderr, flush=True
        )

    def _text(self, number: int) -> str:
        return size_text(number) if self._is_bytes else str(number)
