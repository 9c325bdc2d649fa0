# SPDX-License-Identifier: Apache-2.0
"""``ucm store``: what lies in a slab, and looking after it, while engines use it."""

import importlib
from typing import Final

import click

from ucm.cli.telling import examples

__all__ = ["PARTS", "store"]

PARTS: Final = {
    "ls": "look:ls",
    "stat": "look:stat",
    "verify": "look:verify",
    "compact": "change:compact",
    "rm": "change:rm",
    "export": "move:export",
    "import": "move:import_",
    "warm": "move:warm",
}
"""Where each subcommand is: its name, and ``module:attribute`` beside this one."""


class _Parts(click.Group):
    """Imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of ``PARTS``."""
        return list(PARTS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand, or None if there is none of this name."""
        if cmd_name not in PARTS:
            return None
        module, attribute = PARTS[cmd_name].split(":")
        command: click.Command = getattr(
            importlib.import_module(f"ucm.cli.store.{module}"), attribute
        )
        return command


@click.command(cls=_Parts, epilog=examples("ucm store ls /dev/shm/ucm"))
def store() -> None:
    """
    See what lies in a slab, and look after it, while engines use it.

    PATH is the slab's directory (store.path). Nothing is made there, and a directory that
    has no slab of ours is left as it is. Exit codes: 0 done; 1 something is damaged, or
    was left undone; 2 the call is wrong; 3 what was named cannot be read.
    """
