# SPDX-License-Identifier: Apache-2.0
"""
Whom to ask: the one server of Valkey or Redis, or the server of a cluster whose affair it is.

What connections of ours cannot have is asked of redis-py, which follows a cluster's changes.

Threading: all on one loop.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as NoConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from ucm.backends._many import together
from ucm.backends._redis_link import Command, Links

__all__ = ["ERRORS", "Servers"]

_NONSENSE = (ValueError, TypeError, LookupError, AttributeError)
"""What redis-py raises over words that no server says."""
ERRORS = (RedisError, RedisClusterException, OSError, *_NONSENSE)
"""What asking raises."""
_NOBODYS = ConnectionError("no server has it")


class Servers:
    """
    One server, or those of a cluster.

    Args:
        client: redis-py's; closed with it.
        timeout: Seconds of a request.
        is_cluster: Which of both it is.
    """

    def __init__(self, client: Any, timeout: float, *, is_cluster: bool) -> None:  # noqa: ANN401 - or a cluster's
        self._client = client
        self._timeout = timeout
        self._is_cluster = is_cluster
        self._links: dict[str, Links] = {}
        """By names of servers; the one has none."""

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Ask each server for what is its; return answers or errors, of each its own."""
        told: list[Any] = [_NOBODYS] * len(commands)
        shares: dict[Links, list[int]] = {}
        for at, command in enumerate(commands):
            with contextlib.suppress(*ERRORS):
                shares.setdefault(self._links_of(command), []).append(at)

        async def ask_one(links: Links, mine: list[int]) -> None:
            answers: Sequence[Any]
            try:
                answers = await links.ask([commands[at] for at in mine])
            except ERRORS as exc:
                answers = [exc] * len(mine)
            for at, answer in zip(mine, answers, strict=True):
                told[at] = answer

        await together([functools.partial(ask_one, *share) for share in shares.items()])
        lost = [at for at, answer in enumerate(told) if _is_elsewhere(answer)]
        answers = await self._ask_client([commands[at] for at in lost])
        for at, answer in zip(lost, answers, strict=True):
            is_value = isinstance(answer, bytes) and bool(commands[at].into)
            told[at] = commands[at].take(answer) if is_value else answer
        return told

    async def aclose(self) -> None:
        """Close connections."""
        for links in self._links.values():
            links.close()
        await self._client.aclose()

    async def _ask_client(self, commands: Sequence[Command]) -> list[Any]:
        """Ask redis-py in one request."""
        if not commands:
            return []
        try:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command.plain())
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        except ERRORS as exc:
            return [exc] * len(commands)
        return answers

    def _links_of(self, command: Command) -> Links:
        """Return the connections to the server whose affair it is."""
        if not self._is_cluster:
            pool = self._client.connection_pool
            return self._links.setdefault(
                "", Links(pool.make_connection, self._timeout)
            )
        node = self._client.get_node_from_key(command.words[1])
        if node.name not in self._links:
            there = {one.name for one in self._client.get_nodes()}
            for gone in self._links.keys() - there:
                self._links.pop(gone).close()
            connect = functools.partial(node.connection_class, **node.connection_kwargs)
            self._links[node.name] = Links(connect, self._timeout)
        return self._links[node.name]


def _is_elsewhere(answer: object) -> bool:
    """Return whether another server may know, or the same by another connection."""
    if isinstance(answer, ResponseError):
        return str(answer).startswith(("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"))
    return isinstance(answer, ConnectionError | NoConnectionError)
