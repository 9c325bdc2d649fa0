# SPDX-License-Identifier: Apache-2.0
"""Who of a cluster's servers is asked, by servers that answer or not, and no connection."""

import attrs
import pytest
from redis.exceptions import ResponseError

from ucm.backends._redis_dialer import Dialer
from ucm.backends._redis_servers import Servers
from ucm.backends._redis_settings import RedisSettings
from ucm.backends.abc import Presence
from ucm.backends.redis import RedisBackend
from ucm.backends.wrap import BreakerBackend
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.asyncio
KEYS = make_keys(16)


@attrs.define(eq=False)
class Node:
    """One server, as redis-py knows it."""

    name: str
    is_up: bool = True
    says: Exception = attrs.Factory(ConnectionError)
    """While it is not."""
    refuses: bool = False
    """It takes nothing."""
    num_there: int = 1
    """Of each value that is asked for."""
    asked: list[bytes] = attrs.Factory(list)
    connection_kwargs: dict = attrs.Factory(dict)
    connection_class: type = object


class Client:
    """What redis-py knows of two servers, each of which has every other block."""

    def __init__(self):
        self.nodes = [Node("first"), Node("second")]

    def get_node_from_key(self, name):
        """Return whose it is."""
        return self.nodes[KEYS.index(name.partition(b"}")[2]) % 2]

    def get_nodes(self):
        """Return both."""
        return self.nodes

    get_primaries = get_nodes


class Answering(Servers):
    """Servers that have everything, and say so if they are up, whichever way they are asked."""

    async def _ask_client(self, commands):
        nodes = [self._client.get_node_from_key(each.words[1]) for each in commands]
        return [
            self._answer(node, each) if node.is_up else node.says
            for node, each in zip(nodes, commands, strict=True)
        ]

    def _answer(self, node, command):
        if command.words[0] == b"EXISTS":
            return node.num_there
        node.asked.append(command.words[1])
        return ResponseError("MISCONF of a snapshot") if node.refuses else b"OK"

    async def _ask_directly(self, _, commands):
        return await self._ask_client(commands)


def opened():
    """Return the time, a breaker over a backend on two servers, and these."""
    now = [100.0]
    client = Client()
    url = "redis://127.0.0.1"
    dialer = Dialer(url, 1.0)
    backend = RedisBackend(client, RedisSettings(url=url, cluster=True))
    backend._servers = Answering(
        client, dialer, 1.0, is_cluster=True, clock=lambda: now[0]
    )
    return now, BreakerBackend(backend, clock=lambda: now[0]), *client.nodes


async def test_server_that_is_back_is_enough_for_a_tier_that_was_all_away():
    """X-14, R-63: one call that it has answered closes the circuit, whoever else is asked by it and still
    away; the tier was not asked for another while, and the longest one by then."""
    now, breaker, first, second = opened()
    first.is_up = second.is_up = False
    while breaker.wait_s < 30.0:
        now[0] += breaker.wait_s
        assert [Presence.UNKNOWN] * 16 == await breaker.exists(KEYS)
    first.is_up = True
    now[0] += breaker.wait_s
    there = [Presence.PRESENT, Presence.UNKNOWN] * 8
    assert there == await breaker.exists(KEYS)
    assert (False, ["second"]) == (breaker.is_open, breaker.away)
    assert there == await breaker.exists(KEYS)


async def test_server_that_loads_its_data_is_away():
    """X-14, R-63: it says so to each question, for minutes maybe; the others' blocks are there, and its own
    once it answers."""
    now, breaker, _, second = opened()
    second.is_up, second.says = False, ResponseError("LOADING the dataset in memory")
    for _ in range(9):
        there = [Presence.PRESENT, Presence.UNKNOWN] * 8
        assert there == await breaker.exists(KEYS)
    assert (False, ["second"]) == (breaker.is_open, breaker.away)
    second.is_up = True
    now[0] += 1.01
    assert [Presence.PRESENT] * 16 == await breaker.exists(KEYS)
    assert [] == breaker.away
