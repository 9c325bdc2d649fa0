# SPDX-License-Identifier: Apache-2.0
"""A group of commands of which each is imported when it is asked for."""

import importlib
from collections.abc import Mapping
from typing import Any

import click

__all__ = ["Lazy"]


class Lazy(click.Group):
    """
    Imports a subcommand when it is asked for; the others cost nothing.

    Args:
        places: Where each subcommand is: its name, and ``module:attribute`` of a click
            command.
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - click's
        places: Mapping[str, str],
        **named: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **{"no_args_is_help": False} | named)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were given."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand, or None if there is none of this name."""
        if cmd_name not in self._places:
            return None
        module, attribute = self._places[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command
