# SPDX-License-Identifier: Apache-2.0
"""
Files of settings: YAML, TOML or JSON, by the end of their name.

A file may be anybody's, so it is bounded before it is parsed: in bytes, in depth, and of YAML
no alias, tag or key that comes twice. What is left is plain values.
"""

import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ucm.errors import ConfigFileError

__all__ = ["MOST_BYTES", "read_settings", "read_text"]

MOST_BYTES = 64 << 10
_MOST_DEPTH = 32
_KEY = "config_file"


def read_settings(path: Path) -> dict[str, object]:
    """
    Return what a file says; an empty one says nothing.

    Raises:
        ConfigFileError: It is missing, too large, damaged, or no mapping.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        known = ", ".join(_PARSERS)
        raise _error(path, "of no known kind", f"Give it a name that ends in {known}.")
    text = read_text(path)
    try:
        found = parse(text)
    except (ValueError, RecursionError) as exc:
        problem = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        kind = path.suffix.lower()[1:].upper()
        raise _error(path, f"not {kind}: {_line(problem)}", "Mend it.") from exc
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _error(path, "no mapping", "Give keys and values.")
    if _is_deep(found):
        raise _error(path, "nested too deeply", "Settings are flat.")
    return found


def _is_deep(found: object) -> bool:
    level = [found]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


def read_text(path: Path, *, key: str = _KEY, most_bytes: int = MOST_BYTES) -> str:
    """
    Return a small file's text; waits for nobody.

    Args:
        path: Which.
        key: By which name an error calls it.
        most_bytes: More is no such file.

    Raises:
        ConfigFileError: It is missing, no plain file, too large, or not UTF-8.
    """
    remedy = "Give the path of a file that is there."
    try:
        # Nobody may have to write first, as of a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            is_plain = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(most_bytes + 1) if is_plain else b""
    except (OSError, ValueError) as exc:  # ValueError: a NUL in its name
        why = getattr(exc, "strerror", None) or str(exc)
        raise ConfigFileError(key, str(path), why, remedy) from exc
    if not is_plain:
        raise ConfigFileError(key, str(path), "not a plain file", remedy)
    if len(data) > most_bytes:
        problem = f"larger than {most_bytes} bytes"
        raise ConfigFileError(key, str(path), problem, "Give what is meant to be read.")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        problem = f"not UTF-8 ({exc.reason})"
        raise ConfigFileError(key, str(path), problem, "Mend it.") from exc


def _json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[Any, object]]) -> dict[Any, object]:
    """Return pairs as a mapping; a key that comes twice would hide the first."""
    found: dict[Any, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} comes twice")
        found[key] = value
    return found


def _yaml(text: str) -> object:
    try:
        import yaml
    except ImportError as exc:
        raise ValueError(
            "PyYAML is not installed; run pip install PyYAML, or write TOML"
        ) from exc

    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def _check_events(events: Any) -> None:  # noqa: ANN401 - yaml has no types
    """Refuse what makes a small text large or hides a part, and all but plain values."""
    keys: list[set[str] | None] = []  # of each open mapping; None: of a list
    is_key: list[bool] = []
    for event in events:
        kind = type(event).__name__
        if getattr(event, "anchor", None):
            raise ValueError(f"it has the anchor or alias {event.anchor!r}")
        if getattr(event, "tag", None):
            raise ValueError(f"it has the tag {event.tag!r}")
        if kind in ("SequenceEndEvent", "MappingEndEvent"):
            keys.pop(), is_key.pop()
            continue
        if is_key and keys[-1] is not None:
            if is_key[-1]:
                _check_key(getattr(event, "value", None), keys[-1])
            is_key[-1] = not is_key[-1]
        if kind in ("SequenceStartEvent", "MappingStartEvent"):
            keys.append(set() if kind[0] == "M" else None)
            is_key.append(True)
            if len(keys) > _MOST_DEPTH:  # the parser's time grows with its square
                raise RecursionError


def _check_key(key: str | None, known: set[str]) -> None:
    if key is None:
        raise ValueError("a key is no text")
    if key in known:
        raise ValueError(f"{key!r} comes twice")
    known.add(key)


_PARSERS: dict[str, Callable[[str], object]] = {
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": tomllib.loads,
    ".json": _json,
}


def _line(problem: str) -> str:
    return " ".join(problem.split())


def _error(path: Path, problem: str, remedy: str) -> ConfigFileError:
    return ConfigFileError(_KEY, str(path), problem, remedy)
