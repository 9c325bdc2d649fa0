# SPDX-License-Identifier: Apache-2.0
"""
One configuration of all the places where settings are given.

Of two that give the same key, the one that is nearer to this engine counts: what the engine
or host passes itself, then variables of the environment, then a file, then the default. The
file is named by the engine (``config_file``) or by ``UCM_CONFIG_FILE``. Each place is read
on its own, so that what is wrong in it is found also where another place overrides it, and
every error names its place.
"""

import enum
import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from ucm.affinity import OFF
from ucm.config import UCMConfig, settings_in_environment
from ucm.configuration.engine import check_not_engines
from ucm.configuration.files import read_settings
from ucm.configuration.foreign import Translation, translate
from ucm.errors import ConfigError, masked

__all__ = ["DEFAULT", "ENGINE", "FILE_VARIABLE", "Configuration", "flat", "load"]

DEFAULT = "default"
"""Where a value is from that nobody gave."""
ENGINE = "kv_connector_extra_config"
FILE_VARIABLE = "UCM_CONFIG_FILE"
_FILE_KEYS = ("config_file", FILE_VARIABLE)
_ORCHESTRATOR = re.compile(
    r"UCM_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""What Kubernetes sets in each container for a service whose name begins with ``ucm``."""


_WITH_OFF = frozenset(
    {"kv_events", "log.level", "store.huge_pages", "store.numa", "threads.affinity"}
)
"""Settings of which ``off`` is a value, which YAML reads as False where it has no quotes."""


@attrs.frozen
class _Source:
    """One place, and what is given there."""

    name: str
    values: Mapping[str, object]


@attrs.frozen(kw_only=True)
class Configuration:
    """
    The settings, and where they come from.

    Args:
        config: The settings.
        origins: By dotted key, where a value was given; those of defaults are not here.
        file: That was read; empty if none was.
        translation: What was given under the keys of unified-cache-manager.
    """

    config: UCMConfig
    origins: Mapping[str, str]
    file: str = ""
    translation: Translation = attrs.Factory(Translation)

    def origin(self, key: str) -> str:
        """Return where the value of a dotted key was given."""
        return self.origins.get(key, DEFAULT)


def load(
    given: Mapping[str, object] | None,
    *,
    name: str = ENGINE,
    environment: Mapping[str, str] | None = None,
) -> Configuration:
    """
    Read all places.

    Args:
        given: What the engine or host passes.
        name: What to call that place.
        environment: Variables; those of the process, if left out.

    Raises:
        ConfigError: A setting cannot be used; names key, value, place and remedy.
        ConfigFileError: The file cannot be read.
    """
    variables = settings_in_environment() if environment is None else environment
    own = _mapping(given, name)
    file = _file_of(own, name) or variables.get(FILE_VARIABLE, "")
    sources = [
        *([_Source(file, read_settings(Path(file)))] if file else []),
        *_from_environment(variables),
        _Source(name, {key: own[key] for key in own if key not in _FILE_KEYS}),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    translation = Translation()
    for source in sources:
        try:
            check_not_engines(source.values)
            found, told = translate(_with_off(source.values))
            UCMConfig.from_mapping(found)
        except ConfigError as exc:
            raise exc.given_in(source.name) from exc
        _merge(values, found)
        origins |= dict.fromkeys(dict(_leaves(found, UCMConfig, "")), source.name)
        translation = translation.joined(told)
    return Configuration(
        config=UCMConfig.from_mapping(values),
        origins=origins,
        file=file,
        translation=translation,
    )


def flat(config: UCMConfig) -> dict[str, object]:
    """Return all settings by dotted key, each as JSON has it, without credentials."""
    plain = attrs.asdict(config, value_serializer=_word)
    return {key: masked(value) for key, value in _leaves(plain, UCMConfig, "")}


def _with_off(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return settings with the word where it is a value, and False was given."""
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and not prefix:
            value = _with_off(value, f"{key}.")
        is_off = value is False and f"{prefix}{key}" in _WITH_OFF
        found[key] = OFF if is_off else value
    return found


def _word(_owner: object, _field: object, value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


def _mapping(given: object, name: str) -> Mapping[str, object]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(name, given, "not a mapping", "Give keys and values.")
    return given


def _file_of(own: Mapping[str, object], name: str) -> str:
    named = [key for key in _FILE_KEYS if key in own]
    if not named:
        return ""
    key, value = named[0], own[named[0]]
    if len(named) > 1:
        problem = f"also {named[1]} is given"
        raise ConfigError(key, value, problem, "Give one of them.", name)
    if not isinstance(value, str) or not value:
        raise ConfigError(key, value, "no path", "Give the path of a file.", name)
    return value


def _from_environment(variables: Mapping[str, str]) -> Iterator[_Source]:
    """Yield each variable as a place of its own, so that an error names it."""
    for name in sorted(variables):
        if name == FILE_VARIABLE or _ORCHESTRATOR.fullmatch(name):
            continue
        keys = name.removeprefix("UCM_").lower().split("__")
        value: object = _plain(keys, variables[name])
        for key in reversed(keys):
            value = {key: value}
        yield _Source(f"the variable {name}", typing.cast(dict[str, object], value))


def _plain(keys: list[str], text: str) -> object:
    """Return a variable's text as the value that it stands for: JSON, unless text is due."""
    hint: Any = UCMConfig
    for key in keys:
        hints = typing.get_type_hints(hint) if attrs.has(hint) else {}
        hint = hints.get(key, str)
    if isinstance(hint, type) and issubclass(hint, str | enum.Enum):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _merge(into: dict[str, Any], values: Mapping[str, object]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _leaves(
    values: Mapping[str, object], section: type, prefix: str
) -> Iterator[tuple[str, object]]:
    """Yield what is given by dotted key; what is no section is one value."""
    hints = typing.get_type_hints(section)
    for key, value in values.items():
        if attrs.has(hints[key]):
            inner = typing.cast(Mapping[str, object], value)
            yield from _leaves(inner, hints[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
