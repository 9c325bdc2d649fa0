# SPDX-License-Identifier: Apache-2.0
"""Write the commands of docs/commands.md, as ``--help`` tells of each."""

from collections.abc import Iterator

import click

from scripts.settings_table import ROOT, put_between
from ucm.cli.main import cli

__all__ = ["PAGE", "render", "rewrite"]

PAGE = ROOT / "docs" / "commands.md"
_WIDTH = 84


def render() -> str:
    """Return what each command says of itself, below its name."""
    return "\n\n".join(_tell(cli, "ucm", None))


def rewrite(text: str) -> str:
    """
    Return *text* with the commands between its markers made anew.

    Raises:
        ValueError: A marker is missing.
    """
    return put_between(text, "commands", render())


def _tell(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[str]:
    context = click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        help_option_names=["-h", "--help"],
    )
    depth = len(context.command_path.split())
    heading = "#" * min(depth + 1, 4)
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    if depth > 1:  # what it has as a whole, the page says
        text = "\n".join(lines)
        yield f"{heading} {context.command_path}\n\n```text\n{text}\n```"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None:
                yield from _tell(found, each, context)


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
