# SPDX-License-Identifier: Apache-2.0
"""Settings of a tier in Valkey or Redis."""

from functools import partial
from typing import Any

import attrs
from redis.asyncio.connection import SSLConnection, parse_url

from ucm.backends._address import no_address
from ucm.backends._redis_answers import ERRORS
from ucm.errors import ConfigError
from ucm.settings import field

__all__ = ["RedisSettings", "refusal"]

_OURS = frozenset({"decode_responses", "protocol"})
"""Options of an address that are not the user's to set."""
refusal = partial(
    no_address,
    problem="it is no address of a server",
    remedy="Give one such as redis://host:6379/0.",
)


def _read_url(key: str, value: object) -> str:
    """Read an address as redis-py does, and refuse options that are not the user's, or name no files."""
    text = value if isinstance(value, str) else ""
    try:
        options = parse_url(text)
        if options.get("connection_class") is SSLConnection:
            ours: dict[str, Any] = {
                name: each for name, each in options.items() if name.startswith("ssl_")
            }
            SSLConnection(**ours).ssl_context.get()  # reads its files
    except OSError as exc:
        # Of these a connection would say no more than that there is none.
        raise ConfigError(
            key,
            "...?ssl_...",
            f"what it names for TLS is of no use ({type(exc).__name__}, {exc.strerror or exc})",
            "Give files that there are, in PEM: `ssl_ca_certs`, and `ssl_certfile` with `ssl_keyfile`; "
            "ciphers are OpenSSL's.",
        ) from None
    except ERRORS as exc:
        raise refusal(key, value, exc) from None
    for option in _OURS & options.keys():
        raise ConfigError(
            key,
            f"...?{option}=...",
            "answers would be others than blocks are made of",
            f"Leave {option} out.",
        )
    return text


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
