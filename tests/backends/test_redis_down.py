# SPDX-License-Identifier: Apache-2.0
"""The redis backend on a cluster that is down, or of which a server that is cut off from the others says so."""

import contextlib

import anyio
import pytest

from tests.backends.cluster_kit import cluster, open_cluster
from tests.backends.servers import LIMIT_S
from ucm.backends.abc import Presence, Verdict
from ucm.backends.redis import name_of
from ucm.backends.wrap import BreakerBackend
from ucm.testing.backend_contract import fetch, seal
from ucm.testing.store_blocks import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
KEYS = make_keys(24)
MORE = make_keys(600)[24:]
PRESENT, UNKNOWN = Presence.PRESENT, Presence.UNKNOWN
DONE, NOTHING = Verdict.DONE, Verdict.UNAVAILABLE
THERE = {DONE, Verdict.PRESENT}


class Opened:
    """A backend on three servers behind a breaker, and their clock; the first may be cut off from the others."""

    def __init__(self, backend, servers, ports, clients):
        self.now = 100.0
        backend._servers._clock = lambda: self.now
        self.told = []
        self.backend = backend
        self.breaker = BreakerBackend(
            backend,
            clock=lambda: self.now,
            tell=self.told.append,
            tell_writes=self.told.append,
        )
        self.servers, self.ports, self.clients = servers, ports, clients
        self.names = [f"127.0.0.1:{port}" for port in ports]
        self.unused = iter(MORE)

    def is_first(self, key):
        """Return whether a block is the first server's."""
        name = name_of(b"ucm:", key, 0, is_cluster=True)
        slot = self.clients[0].execute_command("CLUSTER", "KEYSLOT", name)
        return slot < 16384 // 3

    def are(self, first, others):
        """Return the first word for each key of the first server, the second for others."""
        return [first if self.is_first(key) else others for key in KEYS]

    def fresh(self, num_first=1):
        """Return new blocks: one of another server, and so many of the first."""
        found = [next(key for key in self.unused if not self.is_first(key))]
        firsts = (key for key in self.unused if self.is_first(key))
        return [
            seal(key) for key in [*found, *(next(firsts) for _ in range(num_first))]
        ]

    def cut_off(self, *, reads):
        """Have the first server lose what the others say, and answer reads or nothing."""
        client = self.clients[0]
        client.config_set("cluster-allow-reads-when-down", "yes" if reads else "no")
        client.execute_command("DEBUG", "DROP-CLUSTER-PACKET-FILTER", -2)
        self.hurry()

    def hurry(self):
        """Have the first server miss the others soon, and say so."""
        self.clients[0].config_set("cluster-node-timeout", 1)
        self.servers[0].await_ready(lambda: b"state:fail" in self.info())

    def mend(self):
        """Have it hear the others again."""
        client = self.clients[0]
        client.execute_command("DEBUG", "DROP-CLUSTER-PACKET-FILTER", -1)
        client.config_set("cluster-node-timeout", 2000)
        self.servers[0].await_ready(lambda: b"state:ok" in self.info())
        client.config_set("cluster-node-timeout", 60_000)

    def take_over(self):
        """Have its replica stand in for it, and the others know; nobody tells it."""
        self.clients[-1].execute_command("CLUSTER", "FAILOVER", "TAKEOVER")

        def is_known():
            told = [
                client.execute_command("CLUSTER", "SLOTS")
                for client in self.clients[1:]
            ]
            return all(self.ports[-1] == one[2][1] for (one, *_) in map(sorted, told))

        self.servers[0].await_ready(is_known)

    def info(self):
        """Return what the first server says of the cluster."""
        return self.clients[0].execute_command("CLUSTER", "INFO")

    async def learn_that_it_is_away(self):
        """Have the first server say that all is down until that is known."""
        for _ in range(3):
            assert [] == self.backend.away
            assert self.are(UNKNOWN, PRESENT) == await self.breaker.exists(KEYS)
        assert self.names[:1] == self.backend.away


@contextlib.asynccontextmanager
async def opened(tmp_path, timeout=10 * LIMIT_S, **options):
    """Open three servers, and put all blocks there."""
    with cluster(tmp_path, num_primaries=3, **options) as (servers, ports, clients):
        backend = await open_cluster(ports[0], timeout)
        with anyio.fail_after(2 * LIMIT_S):
            while not {*await backend.put([*map(seal, KEYS)])} <= THERE:
                pass
            yield Opened(backend, servers, ports, clients)
        await backend.aclose()


async def test_server_that_is_cut_off_costs_its_own_blocks_alone(tmp_path):
    """X-14, R-63: it says that the cluster is down, and is away as one that says nothing; the others are well,
    and it joins again by itself."""
    async with opened(tmp_path) as place:
        place.cut_off(reads=False)
        await place.learn_that_it_is_away()
        for _ in range(9):
            assert place.are(UNKNOWN, PRESENT) == await place.breaker.exists(KEYS)
            got = [one.verdict for one, _ in await fetch(place.breaker, KEYS)]
            assert place.are(NOTHING, DONE) == got
            assert [DONE, NOTHING] == await place.breaker.put(place.fresh())
        assert ([], []) == (place.told, place.backend.refusing)
        place.mend()
        while place.backend.away:
            place.now += 5.01
            await place.breaker.exists(KEYS)
        assert [PRESENT] * 24 == await place.breaker.exists(KEYS)
        assert [DONE] * 2 == await place.breaker.put(place.fresh())
        assert [] == place.told


async def test_server_that_is_cut_off_and_answers_reads_takes_nothing(tmp_path):
    """X-14, R-63: as it is set to; what it has is read, and what others are to take they do."""
    async with opened(tmp_path) as place:
        place.cut_off(reads=True)
        for _ in range(3):
            assert [] == place.backend.refusing
            assert [DONE, NOTHING] == await place.breaker.put(place.fresh())
        assert (place.names[:1], []) == (place.backend.refusing, place.backend.away)
        for _ in range(9):
            assert [DONE, NOTHING] == await place.breaker.put(place.fresh())
            assert [PRESENT] * 24 == await place.breaker.exists(KEYS)
            assert {DONE} == {
                one.verdict for one, _ in await fetch(place.breaker, KEYS)
            }
        assert [] == place.told
        place.mend()
        place.now += 5.01
        assert [DONE] * 2 == await place.breaker.put(place.fresh())
        assert ([], []) == (place.told, place.backend.refusing)


@pytest.mark.parametrize("is_known", [False, True])
async def test_who_stands_in_for_a_server_that_is_cut_off_is_asked(tmp_path, is_known):
    """R-51, R-52: it does not know, and says on that all is down; the others do, and are asked who it is. One
    that is known to be away is looked for first."""
    async with opened(tmp_path, with_replica=True) as place:
        assert 1 == place.clients[0].execute_command("WAIT", 1, 60_000)
        place.cut_off(reads=False)
        if is_known:
            await place.learn_that_it_is_away()
        place.take_over()
        if is_known:
            assert place.are(UNKNOWN, PRESENT) == await place.breaker.exists(KEYS)
            place.now += 1.01
            await place.breaker.exists(KEYS)  # nobody attends to it: this call looks
        assert [PRESENT] * 24 == await place.breaker.exists(KEYS)
        assert [DONE] * 4 == await place.breaker.put(place.fresh(3))
        assert ([], [], []) == (place.told, place.backend.away, place.backend.refusing)


async def test_who_stands_in_for_a_server_that_only_reads_takes_its_blocks(tmp_path):
    """R-55: one put that is refused is enough to learn of it, and is put there."""
    async with opened(tmp_path, with_replica=True) as place:
        place.cut_off(reads=True)
        place.take_over()
        assert [PRESENT] * 24 == await place.breaker.exists(KEYS)
        assert [DONE] * 4 == await place.breaker.put(place.fresh(3))
        assert ([], []) == (place.told, place.backend.refusing)


async def test_server_that_was_cut_off_names_who_stands_in_for_it(tmp_path):
    """R-51: nobody had asked the others by then; behind a call or two all of its blocks are found there."""
    async with opened(tmp_path, with_replica=True) as place:
        assert 1 == place.clients[0].execute_command("WAIT", 1, 60_000)
        place.cut_off(reads=False)
        await place.learn_that_it_is_away()
        place.take_over()
        place.mend()
        place.servers[0].await_ready(lambda: "slave" == place.clients[0].info()["role"])
        while UNKNOWN in await place.breaker.exists(KEYS):
            place.now += 5.01
        assert [DONE] * 4 == await place.breaker.put(place.fresh(3))
        assert ([], []) == (place.told, place.backend.refusing)


async def test_cluster_whose_majority_is_gone_is_a_tier_without_an_answer(tmp_path):
    """X-14, R-52: those that are gone say nothing, and the one that is left says that all is down: it is no
    server that is well. Once they are back all is found."""
    async with opened(tmp_path, 1.0) as place:
        for server in place.servers[1:]:
            server.stop()
        try:
            place.hurry()
            while not place.breaker.is_open:
                assert PRESENT not in await place.breaker.exists(KEYS)
            assert sorted(place.names) == sorted(place.breaker.away)
        finally:
            for server in place.servers[1:]:
                server.go_on()
        place.mend()
        while [PRESENT] * 24 != await place.breaker.exists(KEYS):
            place.now += 40.0
        assert (False, []) == (place.breaker.is_open, place.breaker.away)


def unserve(place, start, stop):
    """Have no server have these slots any more, and all know."""
    for client in place.clients:
        client.execute_command("CLUSTER", "DELSLOTSRANGE", start, stop)


async def test_slots_that_nobody_has_cost_their_own_blocks_alone(tmp_path):
    """R-63: what no server has is away; the tier is no silent one, and its servers are well."""
    async with opened(tmp_path) as place:
        unserve(place, 0, 16384 // 3 - 1)
        for _ in range(9):
            assert place.are(UNKNOWN, PRESENT) == await place.breaker.exists(KEYS)
            got = [one.verdict for one, _ in await fetch(place.breaker, KEYS)]
            assert place.are(NOTHING, DONE) == got
            assert [DONE, NOTHING] == await place.breaker.put(place.fresh())
        assert ([], [], []) == (place.told, place.backend.away, place.backend.refusing)


async def test_cluster_without_any_slots_is_a_silent_tier(tmp_path):
    """R-63: where no server has any block, it is not each block's own fault."""
    async with opened(tmp_path) as place:
        unserve(place, 0, 16383)
        for _ in range(9):
            assert {UNKNOWN} == {*await place.breaker.exists(KEYS)}
        assert place.told
