# SPDX-License-Identifier: Apache-2.0
"""Who of a cluster's servers is asked, by servers that answer or not, and no connection."""

import attrs
import pytest
from redis.exceptions import ResponseError

from ucm.backends._redis_link import Dialer
from ucm.backends._redis_servers import Servers
from ucm.backends._redis_settings import RedisSettings
from ucm.backends.abc import Presence, Verdict
from ucm.backends.redis import RedisBackend
from ucm.backends.wrap import BreakerBackend
from ucm.testing.backend_contract import fetch, seal
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
    """What redis-py knows of two servers, each of which has every other block, and every other part."""

    def __init__(self):
        self.nodes = [Node("first"), Node("second")]

    def get_node_from_key(self, name):
        """Return whose it is."""
        head, _, key = name.partition(b"/")
        return self.nodes[(KEYS.index(key) + int(head[-1:])) % 2]

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


async def test_parts_of_a_block_that_cannot_be_whole_are_not_moved():
    """R-52, R-55: where a server that has some, or would, is away, those of the others would be nobody's, and
    fill them with each try, or be read in vain."""
    now, breaker, first, second = opened()
    second.is_up, first.num_there = False, 0
    told = await breaker.put([seal(KEYS[1], 3 << 20)])  # whose head is the second's
    assert ([Verdict.UNAVAILABLE], []) == (told, first.asked)
    for _ in range(3):
        await breaker.exists(KEYS)
    told = await breaker.put([seal(KEYS[0], 3 << 20), seal(KEYS[2])])
    assert [Verdict.UNAVAILABLE, Verdict.DONE] == told
    assert [b"ucm:0/" + KEYS[2]] == first.asked
    ((one, _),) = await fetch(breaker, KEYS[:1], 3 << 20)
    assert Verdict.UNAVAILABLE is one.verdict
    assert 1 == len(first.asked)
    second.is_up, second.num_there = True, 0
    now[0] += 1.01
    assert [Presence.ABSENT] * 16 == await breaker.exists(KEYS)
    assert [Verdict.DONE] == await breaker.put([seal(KEYS[0], 3 << 20)])
    assert (3, 2) == (len(first.asked), len(second.asked))


async def test_parts_of_a_block_whose_head_would_be_refused_are_not_put():
    """R-55: they would be nobody's, and fill those that take them with each try; once in a while one is
    tried, and when its head is taken all of it is."""
    now, breaker, first, second = opened()
    first.num_there = second.num_there = 0
    second.refuses = True
    for key in KEYS[1:7:2]:
        await breaker.put([seal(key)])
    assert (["second"], 3) == (breaker.refusing, len(second.asked))
    client = breaker.inner._servers._client
    client.get_node_from_key = lambda name: client.nodes[name.startswith(b"ucm:0/")]
    large = [seal(KEYS[0], 3 << 20)]
    for _ in range(3):
        assert [Verdict.UNAVAILABLE] == await breaker.put(large)
    assert ([], 3) == (first.asked, len(second.asked))
    second.refuses = False
    now[0] += 1.01
    assert [Verdict.DONE] == await breaker.put(large)
    assert (3, 4, []) == (len(first.asked), len(second.asked), breaker.refusing)
