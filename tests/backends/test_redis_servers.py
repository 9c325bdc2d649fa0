# SPDX-License-Identifier: Apache-2.0
"""Who of a cluster's servers is asked, by servers that answer or not, and no connection."""

import anyio
import attrs
import pytest
from redis.exceptions import ResponseError

from ucm.backends._redis_dialer import Dialer
from ucm.backends._redis_servers import AWAY, Servers
from ucm.backends._redis_settings import RedisSettings
from ucm.backends._resp import Command
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


class Links:
    """Connections to a node that answers all alike."""

    def __init__(self, node):
        self.node = node

    async def ask(self, commands, told):
        """Answer."""
        self.node.asked += [each.words[1] for each in commands]
        told += [self.node.says] * len(commands)

    def close(self):
        """Be nobody's."""


class Direct(Servers):
    """Servers that are asked by connections of ours; what redis-py is asked is noted."""

    def __init__(self, client, timeout):
        dialer = Dialer("redis://127.0.0.1", 1.0)
        super().__init__(client, dialer, timeout, is_cluster=True)
        self.passed_on = []

    def _links_to(self, node):
        return Links(node)

    async def _ask_client(self, commands):
        self.passed_on += [each.words[1] for each in commands]
        return [b"OK"] * len(commands)


class Following(Client):
    """A client that knows of three servers, each of which has each third block, until it has asked one of them."""

    def __init__(self):
        self.nodes = [Node(name, says=b"OK") for name in ("first", "second", "third")]
        self.nodes_manager = self
        self.startup_nodes = {node.name: node for node in self.nodes}
        self.asked = []
        self.moved = self.has_learned = False
        self.has_answer = anyio.Event()
        self.is_asked = anyio.Event()

    def get_node_from_key(self, name):
        """Return whose it is."""
        return self.nodes[2 if self.moved else KEYS.index(name) % 3]

    async def initialize(self):
        """Ask, as redis-py does."""
        self.asked.append(sorted(self.startup_nodes))
        self.is_asked.set()
        await self.has_answer.wait()
        self.has_learned = True

    async def aclose(self):
        """Be nobody's."""


SETS = [Command((b"SET", key, (b"",))) for key in KEYS]
DOWN = ResponseError("CLUSTERDOWN The cluster is down")


async def test_those_that_are_well_are_asked_who_stands_in_for_one_that_is_cut_off():
    """R-51: not one that takes nothing, as it may be cut off as well; and nothing is sent anew while nobody is
    known to stand in."""
    client = Following()
    client.has_answer.set()
    servers = Direct(client, 60.0)
    client.nodes[1].says = ResponseError("MISCONF of a snapshot")
    await servers.ask(SETS[1:2], are_writes=True)
    client.nodes[0].says = DOWN
    told = await servers.ask(SETS[:3], are_writes=True)
    assert [AWAY, AWAY, b"OK"] == told
    assert ([["third"]], []) == (client.asked, servers.passed_on)


async def test_who_stands_in_is_sent_what_one_that_is_cut_off_refused():
    """R-52: by the same call."""
    client = Following()
    servers = Direct(client, 60.0)
    await servers.ask(SETS[1:3], are_writes=True)
    client.nodes[0].says = DOWN
    async with anyio.create_task_group() as tasks:
        told = []

        async def ask():
            told.extend(await servers.ask(SETS[:1], are_writes=True))

        tasks.start_soon(ask)
        await client.is_asked.wait()
        client.moved = True
        client.has_answer.set()
    assert ([b"OK"], [KEYS[0]]) == (told, servers.passed_on)


async def test_nobody_waits_for_what_a_server_is_asked_behind_the_end():
    """R-52: of whose the slots are, which it may never say."""
    client = Following()
    servers = Direct(client, 3600.0)
    await servers.ask(SETS[1:3])
    client.nodes[0].says = DOWN
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(servers.ask, SETS[:1])
        await client.is_asked.wait()
        await servers.aclose()
        client.has_answer.set()
    assert not client.has_learned
