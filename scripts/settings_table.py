# SPDX-License-Identifier: Apache-2.0
"""Write the table of settings of docs/settings.md, from ``ucm.config``."""

import enum
from pathlib import Path

import attrs

from ucm.cache.opening import ENGINES_ONLY
from ucm.config import UCMConfig

__all__ = ["PAGE", "ROOT", "put_between", "render", "rewrite", "table_of"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "settings.md"
_SHOWN = {"store.path": "`/dev/shm/ucm-<user id>`"}
"""Defaults that differ from machine to machine, as the table shows them."""


def render() -> str:
    """Return the table: one line per key with its default and help."""
    return table_of(UCMConfig())


def table_of(section: attrs.AttrsInstance) -> str:
    """Return the table of a section, and of those within it."""
    lines = ["| key | default | says |", "|---|---|---|", *_lines(section, "")]
    return "\n".join(lines)


def rewrite(text: str) -> str:
    """
    Return *text* with the table between its markers made anew.

    Raises:
        ValueError: A marker is missing.
    """
    return put_between(text, "settings", render())


def put_between(text: str, name: str, content: str) -> str:
    """
    Return *text* with *content* between the two markers called *name*.

    Raises:
        ValueError: A marker is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    for marker in (begin, end):
        if marker not in text:
            raise ValueError(f"no marker {marker!r}")
    before, rest = text.split(begin, 1)
    _, after = rest.split(end, 1)
    return f"{before}{begin}\n{content}\n{end}{after}"


def _lines(section: attrs.AttrsInstance, prefix: str) -> list[str]:
    lines: list[str] = []
    for field in attrs.fields(type(section)):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if attrs.has(type(value)):
            lines.extend(_lines(value, f"{key}."))
            continue
        shown = _SHOWN.get(
            key, _show(value, is_size=field.metadata["read"] is not None)
        )
        told = (
            f"{field.metadata['help']}{' Engines only.' if key in ENGINES_ONLY else ''}"
        )
        lines.append(f"| `{key}` | {shown} | {told} |")
    return lines


def _show(value: object, *, is_size: bool) -> str:
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


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
