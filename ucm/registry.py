# SPDX-License-Identifier: Apache-2.0
"""Name to class for stores, backends and devices, through entry points and only on demand."""

from importlib.metadata import entry_points

from ucm.errors import ConfigError

__all__ = ["how_to_install", "load_class", "registered"]


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
        ConfigError: Nobody registered the name, or its packages are not installed.
    """
    for point in entry_points(group=group):
        if point.name != name:
            continue
        try:
            loaded = point.load()
        except ImportError as exc:
            raise ConfigError(
                key,
                name,
                f"cannot be imported ({exc})",
                how_to_install(name),
            ) from exc
        if not isinstance(loaded, type):
            raise ConfigError(key, name, "is not a class", "Mend its entry point.")
        return loaded
    raise ConfigError(key, name, "unknown name", f"Registered: {registered(group)}.")
