# SPDX-License-Identifier: Apache-2.0
"""The redis backend on a cluster of which a server answers and takes nothing: what that costs, and its end."""

import contextlib

import anyio
import pytest
import redis

from tests.backends.cluster_kit import cluster, open_cluster
from tests.backends.servers import LIMIT_S, redis_server
from ucm.backends.abc import Presence, Verdict
from ucm.backends.redis import RedisBackend, name_of
from ucm.backends.wrap import BreakerBackend
from ucm.testing.backend_contract import BLOCK, fetch, seal
from ucm.testing.store_blocks import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""
DONE, NOTHING = Verdict.DONE, Verdict.UNAVAILABLE


class Refusals:
    """Ways in which a real server takes nothing, and answers."""

    def __init__(self, folder):
        self.folder = folder

    def misconf(self, client, *, begins):
        """Have its snapshot fail, or succeed: no file can be where a directory is."""
        client.config_set("save", "3600 1000000")
        inside = self.folder / "b" / "dump.rdb" / "inside"
        if begins:
            inside.mkdir(parents=True)
        else:
            inside.rmdir()
            inside.parent.rmdir()
        client.bgsave()
        while client.info()["rdb_bgsave_in_progress"]:
            pass
        told = client.info()["rdb_last_bgsave_status"]
        assert ("err" if begins else "ok") == told

    def noreplicas(self, client, *, begins):
        """Have it want a replica that it has not, or none."""
        client.config_set("min-replicas-to-write", int(begins))

    def noperm(self, client, *, begins):
        """Have its user only read, or do all again."""
        rules = ["-set", "-unlink"] if begins else ["+@all"]
        client.execute_command("ACL", "SETUSER", "default", *rules)


class Opened:
    """A backend on two servers behind a breaker, and their clock. Nothing is late here."""

    def __init__(self, backend, ports, clients):
        self.now = 100.0
        backend._servers._clock = lambda: self.now
        self.told = []
        self.backend = backend
        self.breaker = BreakerBackend(
            backend, clock=lambda: self.now, tell_writes=self.told.append
        )
        self.names = [f"127.0.0.1:{port}" for port in ports]
        self.clients = clients
        self.unused = iter(make_keys(400))

    def keys(self, *numbers):
        """Return a new key for each number of a server."""
        found = []
        for number in numbers:
            for key in self.unused:
                slot = self.clients[0].execute_command(
                    "CLUSTER", "KEYSLOT", name_of(b"ucm:", key, 0, is_cluster=True)
                )
                if (slot > 8191) == number:
                    found.append(key)
                    break
        return found

    async def put(self, *numbers):
        """Put a new block to each of these servers; return what became of each."""
        return await self.breaker.put([seal(key) for key in self.keys(*numbers)])

    def num_refused(self, number=1):
        """Return how many commands a server has refused."""
        stats = self.clients[number].info("commandstats")
        return sum(each["rejected_calls"] for each in stats.values())

    async def learn(self, *numbers):
        """Have servers refuse until that is known."""
        for _ in range(3):
            assert [] == self.backend.refusing
            await self.put(*numbers)
        assert [self.names[number] for number in numbers] == self.backend.refusing

    async def wait_longest(self, number):
        """Have a server that takes nothing be tried in vain until the next try is late."""
        for pause in (1.0, 2.0, 4.0):
            self.now += pause + 0.01
            assert [NOTHING] == await self.put(number)


@contextlib.asynccontextmanager
async def opened(tmp_path):
    """Open two servers."""
    with cluster(tmp_path) as (servers, ports, clients):
        backend = await open_cluster(ports[0], 10 * LIMIT_S)
        with anyio.fail_after(2 * LIMIT_S):
            yield Opened(backend, ports, clients), servers
        await backend.aclose()


@pytest.mark.parametrize("way", ["misconf", "noreplicas", "noperm"])
async def test_server_that_takes_nothing_costs_its_own_blocks_alone(tmp_path, way):
    """X-14, R-63: behind three puts it is asked to take nothing more, what others are to take they do, and
    what it has is read; a call tries it once in a while, and it joins again by itself."""
    async with opened(tmp_path) as (place, _):
        refuse = getattr(Refusals(tmp_path), way)
        there = place.keys(0, 1)
        assert [DONE] * 2 == await place.breaker.put([seal(key) for key in there])
        refuse(place.clients[1], begins=True)
        await place.learn(1)
        before = place.num_refused()
        for _ in range(9):
            assert [DONE, NOTHING] == await place.put(0, 1)
            assert [NOTHING] == await place.breaker.delete(there[1:])
            assert [Presence.PRESENT] * 2 == await place.breaker.exists(there)
            assert [DONE] * 2 == [
                one.verdict for one, _ in await fetch(place.breaker, there)
            ]
        assert ([], [], before) == (place.told, place.backend.away, place.num_refused())
        for pause in (1.0, 2.0, 4.0, 5.0, 5.0):
            before = place.num_refused()
            place.now += pause - 0.01
            assert [NOTHING] == await place.put(1)
            assert before == place.num_refused()
            place.now += 0.02
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(place.put, 0, 1)
            assert before + 1 == place.num_refused()  # one of them tries
        refuse(place.clients[1], begins=False)
        place.now += 5.01
        assert [DONE] * 2 == await place.put(0, 1)
        assert ([], []) == (place.told, place.backend.refusing)
        assert [DONE] == await place.breaker.delete(there[1:])


async def test_tier_of_which_no_server_takes_anything_is_asked_to_take_nothing(
    tmp_path,
):
    """X-14, R-52: its puts have a while as those of any tier, and are read all the same; one server that takes
    something again is enough."""
    async with opened(tmp_path) as (place, _):
        refuse = Refusals(tmp_path).noreplicas
        refuse(place.clients[0], begins=True)
        await place.learn(0)
        await place.wait_longest(0)
        refuse(place.clients[1], begins=True)
        for _ in range(3):
            assert ([], False) == (place.told, place.breaker.refuses)
            assert [NOTHING] * 2 == await place.put(0, 1)
        assert ([1.0], True) == (place.told, place.breaker.refuses)
        assert place.names == place.backend.refusing
        refuse(place.clients[0], begins=False)
        place.now += 1.01
        assert [DONE, NOTHING] == await place.put(0, 1)
        assert [1.0, 0.0] == place.told
        assert place.names[1:] == place.backend.refusing
        for _ in range(9):
            assert [NOTHING] == await place.put(1)
        assert not place.breaker.refuses


async def test_server_that_takes_nothing_while_the_other_is_away_is_a_tier_that_takes_nothing(
    tmp_path,
):
    """X-14: nobody is left who takes anything; what the one has that answers is read on, and nobody waits for
    the other."""
    async with opened(tmp_path) as (place, servers):
        there = place.keys(0, 1)
        await place.breaker.put([seal(key) for key in there])
        Refusals(tmp_path).noreplicas(place.clients[0], begins=True)
        await place.learn(0)
        await place.wait_longest(0)
        servers[1].kill()
        for _ in range(3):
            await place.breaker.exists(there)
        assert (place.names[1:], place.names[:1]) == (
            place.backend.away,
            place.backend.refusing,
        )
        for _ in range(3):
            assert not place.breaker.refuses
            assert [NOTHING] * 2 == await place.put(0, 1)
        assert (True, False) == (place.breaker.refuses, place.breaker.is_open)
        told = [Presence.PRESENT, Presence.UNKNOWN]
        assert told == await place.breaker.exists(there)
        Refusals(tmp_path).noreplicas(place.clients[0], begins=False)
        place.now += 1.01
        assert [DONE] == await place.put(0)
        assert ([1.0, 0.0], []) == (place.told, place.backend.refusing)


async def test_server_that_takes_nothing_costs_no_large_block_of_another(tmp_path):
    """R-55: all parts of a block are its one server's, so that none is half taken, and nobody's."""
    async with opened(tmp_path) as (place, _):
        Refusals(tmp_path).noreplicas(place.clients[1], begins=True)
        await place.learn(1)
        before = place.clients[0].dbsize()
        some = [seal(key, LARGE) for key in place.keys(*[0, 1] * 4)]
        assert [DONE, NOTHING] * 4 == await place.breaker.put(some)
        assert 4 * 4 == place.clients[0].dbsize() - before


async def test_server_that_is_full_is_full_each_time(tmp_path):
    """R-55: that is a word of its own, which says what to do, and no reason not to ask; it lets go of what is
    to be forgotten."""
    async with opened(tmp_path) as (place, _):
        there = place.keys(1)
        await place.breaker.put([seal(there[0])])
        place.clients[1].config_set("maxmemory", 1)
        for _ in range(9):
            assert [DONE, Verdict.FULL] == await place.put(0, 1)
        assert ([], []) == (place.told, place.backend.refusing)
        assert [DONE] == await place.breaker.delete(there)


async def test_one_server_that_takes_nothing_is_a_tier_that_takes_nothing(tmp_path):
    """X-14: it has no other; what it has is read, and no server is named."""
    with redis_server(tmp_path) as (_, port), redis.Redis(port=port) as client:
        given = {"url": f"redis://127.0.0.1:{port}/0", "timeout": LIMIT_S}
        backend = await RedisBackend.open_configured(given, "tiers.0")
        breaker = BreakerBackend(backend, clock=lambda: 100.0)
        keys = make_keys(5)
        assert [DONE] == await breaker.put([seal(keys[0])])
        client.execute_command("REPLICAOF", "127.0.0.1", port)
        for key in keys[1:4]:
            assert not breaker.refuses
            assert [NOTHING] == await breaker.put([seal(key)])
        assert (True, False) == (breaker.refuses, breaker.is_open)
        assert ([], []) == (backend.refusing, backend.away)
        ((one, _),) = await fetch(breaker, keys[:1], BLOCK)
        assert DONE is one.verdict
        await backend.aclose()


async def test_server_that_takes_nothing_says_why(tmp_path):
    """R-51: the log had a tier that takes nothing, and no word why: it had answered."""
    with redis_server(tmp_path) as (_, port), redis.Redis(port=port) as client:
        given = {"url": f"redis://127.0.0.1:{port}/0", "timeout": LIMIT_S}
        backend = await RedisBackend.open_configured(given, "tiers.0")
        told = []
        breaker = BreakerBackend(
            backend,
            clock=lambda: 100.0,
            tell_writes=lambda seconds: told.append(backend.trouble),
        )
        client.config_set("min-replicas-to-write", 1)
        for key in make_keys(3):
            assert [NOTHING] == await breaker.put([seal(key)])
        (why,) = told
        assert why.startswith("ResponseError NOREPLICAS")
        client.config_set("min-replicas-to-write", 0)
        assert [DONE] == await backend.put([seal(make_keys(4)[3])])
        assert "" == backend.trouble
        await backend.aclose()
