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

import anyio
from redis.exceptions import ConnectionError as NoConnectionError
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as LateError

from ucm.backends._many import together
from ucm.backends._redis_link import Links, seconds_for
from ucm.backends._resp import Command

__all__ = ["ERRORS", "ROUNDS", "Servers"]

_NONSENSE = (ValueError, TypeError, LookupError, AttributeError)
"""What redis-py raises over words that no server says."""
ERRORS = (RedisError, RedisClusterException, OSError, *_NONSENSE)
"""What asking raises."""
_NOBODYS = ConnectionError("no server has it")
_TIMEOUTS = (TimeoutError, LateError)
ROUNDS = 3
"""Of redis-py within one timeout: to a server that is silent, to who knows better, and to that one. What
others have said of their blocks waits for these."""
_LIMITS = ("socket_timeout", "socket_connect_timeout")


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
        self._is_open = True
        self._links: dict[str, Links] = {}
        """By names of servers; the one has none."""
        self._asking: set[anyio.CancelScope] = set()
        """Of what redis-py is asked."""

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """
        Ask each server for what is its; return answers or errors, of each its own.

        What is asked anew, as a connection was lost, may have been done before.
        """
        told: list[Any] = [_NOBODYS] * len(commands)
        if not self._is_open:
            return told
        shares: dict[Links, list[int]] = {}
        for at, command in enumerate(commands):
            with contextlib.suppress(*ERRORS):
                shares.setdefault(self._links_of(command), []).append(at)
        silent = [links for links in shares if links.is_silent]

        async def ask_one(links: Links, mine: list[int]) -> None:
            answers: list[Any] = []
            try:
                await links.ask([commands[at] for at in mine], answers)
            except ERRORS as exc:
                links.is_silent = self._is_cluster and isinstance(exc, _TIMEOUTS)
                answers += [exc] * (len(mine) - len(answers))
            for at, answer in zip(mine, answers, strict=True):
                told[at] = answer

        await together(
            [
                functools.partial(ask_one, *share)
                for share in shares.items()
                if share[0] not in silent
            ]
        )
        lost = [at for at, answer in enumerate(told) if _is_elsewhere(answer)]
        answers = await self._ask_client([commands[at] for at in lost])
        for at, answer in zip(lost, answers, strict=True):
            is_value = isinstance(answer, bytes) and bool(commands[at].into)
            told[at] = commands[at].take(answer) if is_value else answer
        for links in silent:
            links.is_silent = any(map(_is_silence, answers))
        return told

    async def aclose(self) -> None:
        """Close connections; calls that are under way have no answer."""
        self._is_open = False
        for scope in self._asking:
            scope.cancel()
        for links in self._links.values():
            links.close()
        await self._client.aclose()

    async def _ask_client(self, commands: Sequence[Command]) -> list[Any]:
        """Ask redis-py in one request."""
        answers: list[Any] = [_NOBODYS] * len(commands)
        if not commands or not self._is_open:
            return answers
        with anyio.move_on_after(seconds_for(commands, self._timeout)) as scope:
            self._asking.add(scope)
            try:
                pipeline = self._client.pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command.plain())
                answers = await pipeline.execute(raise_on_error=False)
            except ERRORS as exc:
                answers = [exc] * len(commands)
            finally:
                self._asking.discard(scope)
        return answers

    def _links_of(self, command: Command) -> Links:
        """Return the connections to the server whose affair it is."""
        node, name = None, ""
        if self._is_cluster:
            node = self._client.get_node_from_key(command.words[1])
            name = node.name
        if name not in self._links:
            self._links[name] = self._links_to(node)
        return self._links[name]

    def _links_to(self, node: Any) -> Links:  # noqa: ANN401 - redis-py's; None is the one server
        if node is None:
            return Links(self._client.connection_pool.make_connection, self._timeout)
        there = {one.name for one in self._client.get_nodes()}
        for gone in self._links.keys() - there:
            self._links.pop(gone).close()
        limits = dict.fromkeys(_LIMITS, self._timeout)
        given = node.connection_kwargs | limits
        connect = functools.partial(node.connection_class, **given)
        return Links(connect, self._timeout)


def _is_silence(answer: object) -> bool:
    return isinstance(answer, ERRORS) and not isinstance(answer, ResponseError)


def _is_elsewhere(answer: object) -> bool:
    """Return whether another server may know, or the same by another connection."""
    if isinstance(answer, ResponseError):
        return str(answer).startswith(("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"))
    return isinstance(answer, ConnectionError | NoConnectionError)
