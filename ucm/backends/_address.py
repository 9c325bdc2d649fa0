# SPDX-License-Identifier: Apache-2.0
"""Addresses that a backend is given, and what is said of one that it cannot use."""

from ucm.errors import ConfigError

__all__ = ["no_address", "read_server"]


def no_address(
    key: str, value: object, exc: BaseException, *, problem: str, remedy: str
) -> ConfigError:
    """Return an error that repeats nothing of what may be secret; a client's own text may name it."""
    shown = "..." if "@" in str(value) else value
    return ConfigError(key, shown, f"{type(exc).__name__}, {problem}", remedy)


def read_server(key: str, value: object, *, whose: str, example: str) -> str:
    """Read the address of a server, whose port is a number."""
    text = value if isinstance(value, str) else ""
    host, _, port = text.rpartition(":")
    if host and port.isdecimal() and 0 < int(port) < 1 << 16:
        return text
    remedy = f"Give one such as {example}."
    raise ConfigError(key, value, f"no address of a {whose}", remedy)
