# SPDX-License-Identifier: Apache-2.0
"""What is said of an address that a backend cannot use."""

from ucm.errors import ConfigError

__all__ = ["no_address"]


def no_address(
    key: str, value: object, exc: Exception, *, problem: str, remedy: str
) -> ConfigError:
    """Return an error that repeats nothing of what may be secret; a client's own text may name it."""
    shown = "..." if "@" in str(value) else value
    return ConfigError(key, shown, f"{type(exc).__name__}, {problem}", remedy)
