# SPDX-License-Identifier: Apache-2.0
"""Settings of a tier in Valkey or Redis."""

import attrs
from redis.asyncio.connection import parse_url

from ucm.backends._redis_servers import ERRORS
from ucm.errors import ConfigError
from ucm.settings import field

__all__ = ["RedisSettings", "no_address"]

_OURS = frozenset({"decode_responses", "protocol"})
"""Options of an address that are not the user's to set."""


def _read_url(key: str, value: object) -> str:
    """Read an address as redis-py does, and refuse options that are not the user's."""
    text = value if isinstance(value, str) else ""
    try:
        options = parse_url(text)
    except ERRORS as exc:
        raise no_address(key, value, exc) from None  # its text may name what is secret
    for option in _OURS & options.keys():
        raise ConfigError(
            key,
            f"...?{option}=...",
            "answers would be others than blocks are made of",
            f"Leave {option} out.",
        )
    return text


def no_address(key: str, value: object, exc: Exception) -> ConfigError:
    """Return an error that repeats nothing of what may be secret."""
    return ConfigError(
        key,
        "..." if "@" in str(value) else value,
        f"{type(exc).__name__}, it is no address of a server",
        "Give one such as redis://host:6379/0.",
    )


@attrs.frozen(kw_only=True)
class RedisSettings:
    """Settings of a tier in Valkey or Redis."""

    url: str = field(
        "", "Such as `redis://host:6379/0`, `rediss://` for TLS.", read=_read_url
    )
    cluster: bool = field(default=False, text="The address is a cluster's.")
    prefix: str = field("ucm:", "What names of values begin with.")
    ttl: int = field(86400, "Seconds that a block lives; 0: without end.", least=0)
    connections: int = field(4, "Requests at a time.", least=1)
    timeout: float = field(
        1.0, "Seconds for each 8 MB of a request; below `timeout.tier`.", least=0.01
    )
