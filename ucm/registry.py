# SPDX-License-Identifier: Apache-2.0
"""Name to class for stores, backends and devices, through entry points and only on demand."""

from importlib.metadata import entry_points
from typing import Final

from ucm.errors import ConfigError, text_of

__all__ = ["how_to_install", "load_class", "registered"]


_OURS: Final = "ucm."
"""Modules of this package."""


def how_to_install(extra: str) -> str:
    """Return what installs the packages of an extra; by name it would be another project's."""
    return f"Run in a copy of ucm's repository: pip install '.[{extra}]'."


def registered(group: str) -> list[str]:
    """Return the names of an entry point group, without importing anything."""
    return sorted({point.name for point in entry_points(group=group)})


def load_class(group: str, name: str, key: str) -> type:
    """
    Import and return a registered class.

    Args:
        group: Entry point group, such as ``ucm.stores``.
        name: The name asked for.
        key: Setting that asked for it, for the error.

    Raises:
        ConfigError: Nobody registered the name, or several did; or it cannot be imported, as its
            packages are not installed, or for whatever else a plug-in raises.
    """
    named = [point for point in entry_points(group=group) if point.name == name]
    found = {point.value: point for point in named}
    if not found:
        remedy = f"Registered: {registered(group)}."
        raise ConfigError(key, name, "unknown name", remedy)
    if len(found) > 1:  # whose comes first is a matter of where it lies
        problem = f"is registered more than once, as {sorted(found)}"
        raise ConfigError(key, name, problem, "Uninstall all but one.")
    ((value, point),) = found.items()
    try:
        loaded = point.load()
    except Exception as exc:  # a plug-in may raise anything as it is imported
        remedy = f"Install what {value} needs, or another release of it."
        if value.startswith(_OURS):
            remedy = how_to_install(name)
        problem = f"cannot be imported ({text_of(exc)})"
        raise ConfigError(key, name, problem, remedy) from exc
    if not isinstance(loaded, type):
        raise ConfigError(key, name, "is not a class", "Mend its entry point.")
    return loaded
