# SPDX-License-Identifier: Apache-2.0
"""
The entry point of ``ucm``: its subcommands by name, and what becomes of errors.

Exit codes are the same everywhere: 0 done and well; 1 done, and what was looked at is not
well; 2 the call is wrong (its arguments or a setting); 3 what was named cannot be read: it is
missing, foreign, damaged or does not answer; 141 nobody reads the answer to its end, as behind
``| head``: the code that a shell gives of other commands then. Whatever the input, an error is one line on
standard error and no traceback.
"""

import io
import signal
import sys
from collections.abc import Sequence
from typing import Final

import click

from ucm.cli.lazy import Lazy
from ucm.cli.output import printable
from ucm.errors import ConfigError, ConfigFileError, UCMError
from ucm.streams import open_streams

__all__ = ["COMMANDS", "NOT_WELL", "UNREADABLE", "USAGE", "cli", "main"]

NOT_WELL: Final = 1
"""Done, and what was looked at is not well."""
USAGE: Final = 2
"""The call is wrong."""
UNREADABLE: Final = 3
"""What was named cannot be read."""
_UNREAD: Final = 128 + signal.SIGPIPE
"""Nobody reads the answer to its end."""

COMMANDS: Final[dict[str, str]] = {
    "config": "ucm.cli.config:config",
    "doctor": "ucm.cli.doctor:doctor",
    "top": "ucm.cli.top:top",
    "keys": "ucm.cli.keys:keys",
    "trace": "ucm.cli.trace:trace",
    "store": "ucm.cli.store.group:store",
    "bench": "ucm.cli.bench:bench",
    "replay": "ucm.cli.replay:replay",
}
"""Where each subcommand is: its name, and ``module:attribute`` of a click command."""


@click.command(
    cls=Lazy,
    places=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="ucm")
def cli() -> None:
    """See what the KV cache of an inference server does, and look after it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run ``ucm`` and return its exit code.

    Args:
        arguments: Those of the process, if left out.
    """
    _open_streams()
    try:
        answer = cli.main(
            None if arguments is None else list(arguments),
            prog_name="ucm",
            standalone_mode=False,
        )
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except click.Abort:
        return _tell("stopped", NOT_WELL)
    except click.UsageError as exc:
        where = exc.ctx.command_path if exc.ctx else "ucm"
        return _tell(f"{exc.format_message()} ({where} --help)", USAGE)
    except click.ClickException as exc:
        return _tell(exc.format_message(), USAGE)
    except ConfigError as exc:
        code = UNREADABLE if isinstance(exc, ConfigFileError) else USAGE
        return _tell(str(exc), code)
    except UCMError as exc:
        return _tell(str(exc), UNREADABLE)
    except SystemExit as exc:
        if exc.code != 1:
            raise
        return _UNREAD  # click and rich say so that standard output is closed
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        return _tell(f"{where}{exc.strerror or exc}", UNREADABLE)
    return answer if isinstance(answer, int) else 0


def _open_streams() -> None:
    """Have all; what a terminal has no sign for, which is not of UTF-8, has a mark in its place."""
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _tell(text: str, code: int) -> int:
    """Write one line on standard error."""
    line = " ".join(text.split()) or "no reason was given"
    print(f"ucm: {printable(line)}", file=sys.stderr)  # noqa: T201 - a command's own voice
    return code
