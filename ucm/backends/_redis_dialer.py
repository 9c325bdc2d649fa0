# SPDX-License-Identifier: Apache-2.0
"""
Connections of redis-py's that block, for an address as its clients on the loop read it.

What reads an address for connections that block is another function, which takes fewer of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from redis.asyncio import connection as on_loop
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

__all__ = ["Dialer"]

_BLOCKING: Final[Mapping[object, Callable[..., Any]]] = {
    on_loop.SSLConnection: SSLConnection,
    on_loop.UnixDomainSocketConnection: UnixDomainSocketConnection,
}
"""What is no plain connection by what is the same on the loop."""


class Dialer:
    """
    Makes connections of redis-py's to whoever is behind an address.

    Args:
        url: As redis-py reads it.
        timeout: Seconds for opening one.

    Raises:
        ValueError: It is no address.
    """

    def __init__(self, url: str, timeout: float) -> None:
        given: dict[str, Any] = dict(on_loop.parse_url(url))
        kind = given.pop("connection_class", None)
        given.pop("max_connections", None)  # of those on the loop
        self._make = _BLOCKING.get(kind, Connection)
        limits = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), timeout)
        retry = Retry(NoBackoff(), 1)
        self._given = given | limits | {"protocol": 2, "retry": retry}

    def to_one(self) -> Any:  # noqa: ANN401 - of any kind
        """Return one to the one server, not connected yet."""
        return self._make(**self._given)

    def to_node(self, given: Mapping[str, object]) -> Any:  # noqa: ANN401 - of any kind
        """Return one to a server of a cluster, by what redis-py knows of it."""
        ours = {name: value for name, value in self._given.items() if name in given}
        return self._make(**ours | {name: given[name] for name in ("host", "port")})
