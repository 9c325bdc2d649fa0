# SPDX-License-Identifier: Apache-2.0
"""
Write what pages of ``docs`` have of the code: each table stands between two markers.

``python -m scripts.pages`` brings all of them up to date, and the settings' JSON schema.
"""

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import click

from scripts import features_table, modes_table
from ucm import events
from ucm.backends._redis_settings import RedisSettings
from ucm.backends.disk import DiskSettings
from ucm.backends.files import FilesSettings
from ucm.backends.memory import MemorySettings
from ucm.backends.mooncake import MooncakeSettings
from ucm.backends.object import ObjectSettings
from ucm.backends.yuanrong import YuanrongSettings
from ucm.cache.opening import ENGINES_ONLY
from ucm.cli.main import cli
from ucm.config import UCMConfig
from ucm.configuration.schema import schema
from ucm.metric_names import METRICS

__all__ = [
    "BACKENDS",
    "PAGES",
    "ROOT",
    "SCHEMA",
    "read",
    "rewrite",
    "schema_text",
    "settings",
]

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "docs" / "config.schema.json"
BACKENDS: dict[str, attrs.AttrsInstance] = {
    "disk": DiskSettings(),
    "files": FilesSettings(),
    "memory": MemorySettings(),
    "mooncake": MooncakeSettings(),
    "object": ObjectSettings(),
    "redis": RedisSettings(),
    "yuanrong": YuanrongSettings(),
}
"""By the type that a tier is given."""
_SHOWN = {"store.path": "`/dev/shm/ucm-<user id>`"}
"""Defaults that differ from machine to machine, as the table shows them."""
_PEERS = (
    "LMCache",
    "vLLM",
    "FlexKV",
    "ExampleConnector",
    "file per block",
    "own cache",
)
_WIDTH = 84


def settings(section: attrs.AttrsInstance) -> Iterator[str]:
    """Yield a line per key of a section, and of those within it, with default and help."""
    yield from ("| key | default | says |", "|---|---|---|")
    yield from _settings(section, "")


def _settings(section: attrs.AttrsInstance, prefix: str) -> Iterator[str]:
    for field in attrs.fields(type(section)):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if attrs.has(type(value)):
            yield from _settings(value, f"{key}.")
            continue
        default = _default(value, is_size=field.metadata["read"] is not None)
        told = field.metadata["help"] + " Engines only." * (key in ENGINES_ONLY)
        yield f"| `{key}` | {_SHOWN.get(key, default)} | {told} |"


def _default(value: object, *, is_size: bool) -> str:
    """Return a default as a person would write it in JSON."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value == ():
        return "empty"
    if value == {}:
        return "none"
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if is_size and isinstance(value, int) and value:
        power = max(p for p in range(5) if not value % 1024**p)
        return f"`{value // 1024**power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}`"
    return f"`{value}`" if value != "" else "empty"


def _metrics() -> Iterator[str]:
    yield from ("| metric | kind | labels | says |", "|---|---|---|---|")
    for each in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in each.labels)
        yield f"| `{each.name}` | {each.kind.value} | {labels} | {each.help} |"


def _speed() -> Iterator[str]:
    """Yield every target that was set against a peer, those that were missed first."""
    yield from (
        "| case | what | median | range | target | |",
        "|---|---|---|---|---|---|",
    )
    end = ""
    for line in read("benchmarks.md").splitlines():
        if line.startswith("## "):
            end = line.split(":")[0].removeprefix("## Targets ")
        elif end in ("missed", "met") and any(peer in line for peer in _PEERS):
            yield f"| {' | '.join(line.strip('| ').split(' | ')[1:])} | {end} |"


def _commands(
    command: click.Command = cli, name: str = "ucm", parent: click.Context | None = None
) -> Iterator[str]:
    """Yield what each command says of itself, below its name."""
    context = click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        help_option_names=["-h", "--help"],
    )
    depth = len(context.command_path.split())
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    if depth > 1:  # what it has as a whole, the page says
        text = "\n".join(lines)
        heading = "#" * min(depth + 1, 4)
        yield f"{heading} {context.command_path}\n\n```text\n{text}\n```"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _commands(found, each, context)


def _range() -> Iterator[str]:
    from ucm.integration.vllm.compat import SUPPORTED  # which imports the engine

    first, last = (f"{major}.{minor}" for major, minor in SUPPORTED)
    yield f"**vLLM {first} to {last}.**"


def _differences() -> Iterator[str]:
    from ucm.integration.vllm.compat import FEATURES

    yield from ("| since | vLLM has | in older releases ucm |", "|---|---|---|")
    for feature in sorted(FEATURES.values(), key=lambda one: one.since):
        major, minor = feature.since
        yield f"| {major}.{minor} | {feature.what} | {feature.without} |"


PAGES: Mapping[str, Mapping[str, Callable[[], Iterable[str]]]] = {
    "backends.md": {
        name: partial(settings, section) for name, section in BACKENDS.items()
    },
    "commands.md": {"commands": lambda: ["\n\n".join(_commands())]},
    "comparison.md": {"speed": _speed},
    "engines.md": {"range": _range, "differences": _differences},
    "events.md": {"events": lambda: [events.page()]},
    "features.md": {"features": features_table.table},
    "metrics.md": {"metrics": _metrics},
    "modes.md": modes_table.TABLES,
    "settings.md": {"settings": partial(settings, UCMConfig())},
}
"""By page and marker, what makes the lines between."""


def read(page: str) -> str:
    """Return the text of a page as it is."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def rewrite(page: str, text: str) -> str:
    """
    Return the text of a page with what stands between its markers made anew.

    Raises:
        ValueError: A marker is missing.
    """
    for name, make in PAGES[page].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        for marker in (begin, end):
            if marker not in text:
                raise ValueError(f"no marker {marker!r}")
        before, rest = text.split(begin, 1)
        _, after = rest.split(end, 1)
        content = "\n".join(make())
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


def main() -> None:
    """Bring all pages up to date."""
    for page in PAGES:
        (ROOT / "docs" / page).write_text(rewrite(page, read(page)), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")


def schema_text() -> str:
    """Return the JSON schema of all settings."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    main()
