# SPDX-License-Identifier: Apache-2.0
"""
How settings are declared, and read from plain values such as a parsed JSON object.

An unknown key, a value of the wrong type or out of range is a ``ConfigError`` that
names the dotted key, the value and the remedy.
"""

import difflib
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from ucm.affinity import parse_cpulist
from ucm.errors import ConfigError

__all__ = [
    "LONGEST_FETCH_S",
    "MOST",
    "check_list",
    "check_path",
    "field",
    "read_enum",
    "read_ratio",
    "read_section",
    "read_share",
    "read_size",
    "read_tiers",
    "seconds_text",
    "size_text",
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_GONE = {
    "store.durability": "Leave it out: a slab is memory. What is to outlast the machine goes "
    "to a tier, such as disk with durability: power.",
}
_WORDS: typing.Final = {
    bool: "Give true or false, without quotes.",
    int: "Give a whole number, without quotes.",
    float: "Give a number, without quotes and without a unit.",
    str: "Give a text.",
}
"""What to give, by the type that is due."""
_T = TypeVar("_T")
MOST: typing.Final = 1e9
"""Below it is each number of seconds: for nine times that no lock waits."""
LONGEST_FETCH_S: typing.Final = 60.0
"""That a request may wait for blocks from tiers, and an agent be asked for them."""


def field(
    default: object,
    text: str,
    *,
    read: Callable[[str, object], object] | None = None,
    least: float | None = None,
    most: float | None = None,
    shape: Mapping[str, object] | None = None,
) -> Any:  # noqa: ANN401 - attrs.field is typed as the field's value
    """
    Declare a setting.

    Args:
        default: Its value when nothing is said.
        text: What it is, for people.
        read: Makes the value of what was given, from key and value.
        least: The least value of a number.
        most: The greatest one; of seconds else below ``MOST``.
        shape: JSON schema of what *read* takes, if it is none of this module's.
    """
    return attrs.field(
        default=default,
        metadata={
            "help": text,
            "read": read,
            "least": least,
            "most": most,
            "shape": shape,
        },
    )


def read_size(key: str, value: object) -> int:
    """Read bytes from an integer or from text such as ``4GiB`` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(key, value, "not a size", "Give bytes or text like '4GiB'.")
    number, unit = match.groups()
    power = _UNITS[(unit or "").lower()[:1]]
    nbytes = float(number) * 1024**power
    if nbytes == math.inf:
        raise ConfigError(key, value, "too large", "Give bytes or text like '4GiB'.")
    return int(nbytes)


def size_text(nbytes: float) -> str:
    """Return bytes as people read them, and as ``read_size`` does: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def seconds_text(seconds: float) -> str:
    """Return a duration for people."""
    if abs(seconds) < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def read_ratio(key: str, value: object) -> float | None:
    """Read a share of the whole, or None for unset."""
    if value is None:
        return None
    if not _is_a(value, float) or not 0 <= typing.cast(float, value) <= 1:
        raise ConfigError(key, value, "not a share", "Give 0 to 1, or leave it out.")
    return float(typing.cast(float, value))


def read_share(key: str, value: object) -> float:
    """Read a share of the whole."""
    share = read_ratio(key, value)
    if share is None:
        raise ConfigError(key, value, "not a share", "Give 0 to 1, or leave it out.")
    return share


def read_tiers(key: str, value: object) -> tuple[Mapping[str, object], ...]:
    """Read a list of mappings that each name a type; what else they hold is its own."""
    if not isinstance(value, (list, tuple)):
        raise ConfigError(key, value, "not a list", "Give a list of mappings.")
    for number, tier in enumerate(value):
        if not isinstance(tier, Mapping) or not isinstance(tier.get("type"), str):
            raise ConfigError(
                f"{key}.{number}",
                tier,
                "no tier",
                "Give a mapping with at least a type, such as disk.",
            )
    return tuple(value)


def read_section(cls: type[_T], given: object, prefix: str) -> _T:
    """
    Build a section of settings from a mapping.

    Args:
        cls: The section; its attributes come from ``field``.
        given: What was given for it.
        prefix: What its keys begin with, in messages; told its ``check``, if it has one,
            which refuses what does not go together.
    """
    fields = {field.name: field for field in attrs.fields(typing.cast(Any, cls))}
    if not isinstance(given, Mapping):
        raise ConfigError(
            prefix.rstrip("."), given, "not a mapping", f"Give {sorted(fields)}."
        )
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        if name not in fields:
            known = f"{_meant(str(name), cls, prefix)}Known: {sorted(fields)}."
            raise ConfigError(key, value, "unknown key", _GONE.get(key, known))
        values[name] = _read_value(key, value, hints[name], fields[name].metadata)
    section = cls(**values)
    if (check := getattr(section, "check", None)) is not None:
        check(prefix)
    return section


def _meant(name: str, cls: type, prefix: str) -> str:
    """Return what somebody may have meant by a name that is none; nothing if it is like none."""
    plain = re.sub("[^a-z0-9]+", "_", name.lower())
    for section, hint in typing.get_type_hints(cls).items():
        inner = attrs.fields_dict(hint) if attrs.has(hint) else {}
        for each in inner:
            if plain in (each, f"{section}_{each}"):
                return (
                    f"Did you mean {section}.{each}? Give it within {section}, or as the "
                    f"variable UCM_{section.upper()}__{each.upper()}. "
                )
    close = difflib.get_close_matches(name, [*attrs.fields_dict(cls)], n=1)
    return f"Did you mean {prefix}{close[0]}? " if close else ""


def _read_value(
    key: str, value: object, hint: type, metadata: types.MappingProxyType[Any, Any]
) -> object:
    if attrs.has(hint):
        return read_section(hint, value, f"{key}.")
    if metadata["read"] is not None:
        value = metadata["read"](key, value)
    elif issubclass(hint, enum.Enum):
        value = read_enum(key, value, hint)
    elif not _is_a(value, hint):
        raise ConfigError(
            key,
            value,
            f"{type(value).__name__} is not {hint.__name__}",
            _WORDS.get(hint, f"Give a {hint.__name__}."),
        )
    elif isinstance(value, str) and "\0" in value:
        raise ConfigError(key, value, "has a character 0", "Leave it out.")
    if metadata["least"] is not None:
        _check_range(key, value, hint, metadata)
    return float(typing.cast(float, value)) if hint is float else value


def _check_range(
    key: str, value: object, hint: type, metadata: types.MappingProxyType[Any, Any]
) -> None:
    least, most = metadata["least"], metadata["most"]
    below = MOST if hint is float else math.inf
    number = typing.cast(float, value)
    if least <= number < below and (most is None or number <= most):
        return
    bound = f" and below {below:g}" if hint is float else ""
    bound = bound if most is None else f" and at most {most:g}"
    remedy = f"Give a finite number of at least {least}{bound}."
    raise ConfigError(key, value, "out of range", remedy)


def _is_a(value: object, hint: type) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def read_enum(key: str, value: object, hint: type[enum.Enum]) -> enum.Enum:
    """Read one of the words of an enumeration; a boolean is ``true`` or ``false``."""
    try:
        return hint(str(value).lower() if isinstance(value, bool) else value)
    except ValueError as exc:
        known = [member.value for member in hint]
        raise ConfigError(key, value, "unknown value", f"Use one of {known}.") from exc


def check_path(key: str, value: str) -> None:
    """Refuse what would become a place that nobody means: no shell has read it; a host may give a ``Path``."""
    if not value or str(value)[0] == "~":
        problem = "~ is a directory of that name here" if value else "is empty"
        raise ConfigError(key, value, problem, "Give the whole path.")


def check_list(key: str, value: str, if_empty: str, remedy: str) -> None:
    """Refuse what is no list of CPUs or nodes, or an empty one."""
    try:
        problem = "" if parse_cpulist(value) else if_empty
    except ValueError as exc:
        problem = str(exc)
    if problem:
        raise ConfigError(key, value, problem, remedy)
