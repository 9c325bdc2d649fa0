# SPDX-License-Identifier: Apache-2.0
"""The redis backend on a cluster of which a server is away: what that costs, and how it comes back."""

import asyncio
import contextlib

import anyio
import pytest

from tests.backends.cluster_kit import cluster, open_cluster
from tests.backends.servers import LIMIT_S
from ucm.backends.abc import Presence, Verdict
from ucm.backends.redis import name_of
from ucm.backends.wrap import BreakerBackend
from ucm.testing.backend_contract import BLOCK, fetch, seal
from ucm.testing.store_blocks import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
KEYS = make_keys(32)
LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""
PRESENT, ABSENT, AWAY = Presence.PRESENT, Presence.ABSENT, Presence.AWAY


class Opened:
    """A backend on two servers of which the second may be away, and its clock. Nothing is late here."""

    def __init__(self, backend, ports, client):
        self.backend = backend
        self.now = 100.0
        backend._servers._clock = lambda: self.now
        self.names = [f"127.0.0.1:{port}" for port in ports]
        slots = [
            client.execute_command(
                "CLUSTER", "KEYSLOT", name_of(b"ucm:", key, 0, is_cluster=True)
            )
            for key in KEYS
        ]
        self.is_second = [slot > 8191 for slot in slots]
        self.second = next(
            key for key, second in zip(KEYS, self.is_second, strict=True) if second
        )

    def are(self, first, second):
        """Return the first word for each key of the first server, the second for others."""
        return [second if is_second else first for is_second in self.is_second]

    async def lose(self, server, backend=None):
        """Have the second server gone, and learn that it is."""
        server.kill()
        for _ in range(3):
            assert [] == self.backend.away
            told = await (backend or self.backend).exists(KEYS)
            assert self.are(PRESENT, AWAY if backend is None else Presence.UNKNOWN) == (
                told
            )
        assert self.names[1:] == self.backend.away


@contextlib.asynccontextmanager
async def opened(tmp_path):
    """Open two servers, and put all blocks there."""
    with cluster(tmp_path) as (servers, ports, clients):
        backend = await open_cluster(ports[0], 10 * LIMIT_S)
        assert [Verdict.DONE] * 32 == await backend.put([seal(key) for key in KEYS])
        with anyio.fail_after(2 * LIMIT_S):
            yield Opened(backend, ports, clients[0]), servers, ports, clients
        await backend.aclose()


class Sham:
    """Listens in a server's place; it says OK, or nothing, and leaves who asks what it is deaf to."""

    def __init__(self, *, is_silent=False, is_deaf_to=b"GET\r\n"):
        self.met = asyncio.Event()
        self.num_met = self.num_left = self.num_looks = 0
        self._is_silent = is_silent
        self._is_deaf_to = is_deaf_to
        self._writers = []

    async def meet(self, reader, writer):
        """Serve a connection."""
        self.num_met += 1
        self.met.set()
        self._writers.append(writer)
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                self.num_looks += b"EXISTS\r\n" in data
                if self._is_deaf_to in data:
                    self.num_left += 1
                    return
                words = b"-ERR no\r\n" if b"CLUSTER" in data else b"+OK\r\n"
                if not self._is_silent:
                    writer.write(words * data.count(b"*"))

    @contextlib.asynccontextmanager
    async def at(self, port):
        """Listen, and leave nobody there."""
        async with await asyncio.start_server(self.meet, "127.0.0.1", port):
            yield
            for writer in self._writers:
                writer.close()


async def test_server_that_is_away_costs_a_few_calls_and_comes_back(tmp_path):
    """R-52, R-63: behind three calls nobody connects to it, and what it has is away at once; then one
    connection looks for it with nobody waiting, once in a while. What others have comes all the time,
    and what it has when it is back, without being told."""
    async with opened(tmp_path) as (place, servers, ports, _):
        backend = place.backend
        await place.lose(servers[1])
        sham = Sham(is_silent=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.attend)
            async with sham.at(ports[1]):
                for _ in range(9):
                    assert place.are(PRESENT, AWAY) == await backend.exists(KEYS)
                    got = [one.verdict for one, _ in await fetch(backend, KEYS)]
                    assert place.are(Verdict.DONE, Verdict.AWAY) == got
                    put = await backend.put([seal(key) for key in KEYS])
                    assert place.are(Verdict.PRESENT, Verdict.AWAY) == put
                    assert [Verdict.AWAY] == await backend.delete([place.second])
                assert 0 == sham.num_met
                place.now += 1.01
                for _ in range(9):
                    assert place.are(PRESENT, AWAY) == await backend.exists(KEYS)
                await sham.met.wait()
                place.now += 100.0
                for _ in range(9):
                    assert place.are(PRESENT, AWAY) == await backend.exists(KEYS)
                assert 1 == sham.num_met  # it has not answered yet
            servers[1].start()
            told = []
            while ABSENT not in told:
                place.now += 5.01
                told = await backend.exists(KEYS)
                words = {PRESENT, AWAY, ABSENT, Presence.UNKNOWN}
                assert [PRESENT] == [*{*told} & {PRESENT}]
                assert {*told} <= words
            assert [] == backend.away
            assert place.are(PRESENT, ABSENT) == await backend.exists(KEYS)
            tasks.cancel_scope.cancel()


async def test_tier_of_which_a_server_is_away_is_no_silent_tier(tmp_path):
    """X-14, R-63: its circuit stays closed, for puts as well; once all servers are away it opens as that of any
    tier, and closes once one of them answers."""
    async with opened(tmp_path) as (place, servers, _, clients):
        told = []
        breaker = BreakerBackend(
            place.backend,
            clock=lambda: place.now,
            tell=told.append,
            tell_writes=told.append,
        )
        await place.lose(servers[1], breaker)
        unknown = place.are(PRESENT, Presence.UNKNOWN)
        for _ in range(9):
            assert unknown == await breaker.exists(KEYS)
            assert [Presence.UNKNOWN] == await breaker.exists([place.second])
            for nbytes in (BLOCK, LARGE):
                put = await breaker.put([seal(place.second, nbytes)])
                assert [Verdict.UNAVAILABLE] == put
        assert ([], place.names[1:]) == (told, breaker.away)
        assert [] == clients[0].keys("ucm:[1-9]*")  # nobody would find these parts
        servers[0].kill()
        for _ in range(3):
            assert not breaker.is_open
            assert [Presence.UNKNOWN] * 32 == await breaker.exists(KEYS)
        assert breaker.is_open
        assert sorted(place.names) == sorted(breaker.away)
        servers[0].start()
        # Amid its start it may answer some of a call, which is a bad one then.
        while ABSENT not in await breaker.exists(KEYS) or told[-1]:
            place.now += 40.0
        assert (0.0, place.names[1:]) == (told[-1], breaker.away)
        assert [Presence.UNKNOWN] == await breaker.exists([place.second])
        assert not breaker.is_open


async def test_what_a_server_had_that_is_away_is_asked_of_whose_it_is(tmp_path):
    """R-51: whoever is given its slots is asked as soon as that is known; the rest is away on."""
    async with opened(tmp_path) as (place, servers, _, clients):
        await place.lose(servers[1])
        name = name_of(b"ucm:", place.second, 0, is_cluster=True)
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
        mine = clients[0].execute_command("CLUSTER", "MYID")
        clients[0].execute_command("CLUSTER", "SETSLOT", slot, "NODE", mine)
        assert [AWAY] == await place.backend.exists([place.second])
        place.now += 1.01
        # Where nobody attends to it a call looks.
        assert [AWAY] == await place.backend.exists([place.second])
        assert [Verdict.DONE] == await place.backend.put([seal(place.second)])
        told = place.are(PRESENT, AWAY)
        told[KEYS.index(place.second)] = PRESENT
        assert told == await place.backend.exists(KEYS)
        assert place.names[1:] == place.backend.away


async def test_server_that_answers_small_questions_alone_is_tried_by_one_call(tmp_path):
    """R-52: as where a network loses what is large; the next try is later each time."""
    async with opened(tmp_path) as (place, servers, ports, _):
        backend, sham = place.backend, Sham()
        await place.lose(servers[1])
        async with sham.at(ports[1]):
            for number, pause in enumerate((1.0, 2.0, 4.0, 5.0, 5.0)):
                before = sham.num_left
                place.now += pause - 0.01
                await fetch(backend, [place.second])
                assert (before, number) == (sham.num_left, sham.num_looks)
                place.now += 0.02
                async with anyio.create_task_group() as tasks:
                    for _ in range(4):
                        tasks.start_soon(fetch, backend, [place.second])
                assert 1 <= sham.num_left - before <= 3  # redis-py asks as well
                assert place.names[1:] == backend.away


async def test_server_that_stays_away_is_looked_for_ever_less_often(tmp_path):
    """R-52: up to a bound, however often what it has is asked for."""
    async with opened(tmp_path) as (place, servers, ports, _):
        backend, sham = place.backend, Sham(is_deaf_to=b"EXISTS\r\n")
        await place.lose(servers[1])
        async with sham.at(ports[1]):
            for pause in (1.0, 2.0, 4.0, 5.0, 5.0):
                before = sham.num_met
                for step in (pause - 0.01, 0.0, 0.02, 0.0):
                    place.now += step
                    is_due = step == 0.02
                    assert [AWAY] == await backend.exists([place.second])
                    assert is_due == (sham.num_met > before)
                    before = sham.num_met
                assert place.names[1:] == backend.away


async def test_server_that_names_one_who_is_away_is_not(tmp_path):
    """R-51: who says that a block is another's has answered."""
    async with opened(tmp_path) as (place, servers, _, clients):
        there = clients[1].execute_command("CLUSTER", "MYID")
        servers[1].kill()
        keys = [
            key for key, second in zip(KEYS, place.is_second, strict=True) if not second
        ]
        for key in keys[:4]:  # redis-py learns of each by asking for it
            name = name_of(b"ucm:", key, 0, is_cluster=True)
            slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
            clients[0].execute_command("CLUSTER", "DELSLOTS", slot)
            clients[0].execute_command("CLUSTER", "SETSLOT", slot, "NODE", there)
            assert {*await place.backend.exists([key])} <= {AWAY, Presence.UNKNOWN}
        assert place.names[0] not in place.backend.away
        assert [PRESENT] == await place.backend.exists(keys[4:5])
