# SPDX-License-Identifier: Apache-2.0
"""The redis backend on a cluster that changes: slots that move, and a server that falls silent."""

import contextlib

import anyio
import pytest
import redis

from tests.backends.servers import LIMIT_S, redis_server
from ucm.backends.abc import Presence, Verdict
from ucm.backends.redis import RedisBackend
from ucm.backends.wrap import DeadlineBackend
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
KEYS = make_keys(64)
LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""


async def open_cluster(port, timeout=LIMIT_S):
    """Open a cluster by one of its servers."""
    given = {"url": f"redis://127.0.0.1:{port}/0", "cluster": True, "timeout": timeout}
    return await RedisBackend.open_configured(given, "tiers.0")


@contextlib.contextmanager
def cluster(folder, *, with_replica=False):
    """Run two servers that share the slots, and maybe one that follows the first."""
    wants = ["--cluster-enabled", "yes", "--cluster-node-timeout", "60000"]
    wants += [
        "--cluster-require-full-coverage",
        "no",
        "--repl-diskless-sync-delay",
        "0",
    ]
    with contextlib.ExitStack() as stack:
        servers, ports, clients = [], [], []
        for name in "abc" if with_replica else "ab":
            (folder / name).mkdir()
            server, port = stack.enter_context(redis_server(folder / name, *wants))
            servers.append(server)
            ports.append(port)
            clients.append(stack.enter_context(redis.Redis(port=port)))
        for client, slots in zip(clients, ((0, 8191), (8192, 16383)), strict=False):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
        for port in ports[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        server.await_ready(
            lambda: all(_knows(client, len(ports)) for client in clients)
        )
        if with_replica:
            number = clients[0].execute_command("CLUSTER", "MYID")
            clients[2].execute_command("CLUSTER", "REPLICATE", number)
            server.await_ready(lambda: "up" == clients[2].info()["master_link_status"])
        yield servers, ports, clients


def _knows(client, count):
    told = client.execute_command("CLUSTER", "INFO")
    nodes = b"cluster_known_nodes:%d\r" % count
    return all(word in told for word in (b"cluster_state:ok", b"cluster_size:2", nodes))


async def test_blocks_of_a_cluster_lie_with_both_servers(tmp_path):
    """Parts of a block are asked of whose they are; what moves to the other, or has moved, is
    found there."""
    with cluster(tmp_path) as (_, ports, clients):
        backend = await open_cluster(ports[0])
        blocks = [seal(key, LARGE) for key in KEYS[:8]]
        assert [Verdict.DONE] * 8 == await backend.put(blocks)
        assert [True] * 8 == await fetch_sound(backend, KEYS[:8], LARGE)
        assert all(client.dbsize() for client in clients)
        assert 8 * 4 == sum(client.dbsize() for client in clients)
        # A slot that nobody uses yet goes to the other, and the backend is not told.
        name = b"ucm:0/" + KEYS[9]
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
        number = slot < 8192
        to, source = clients[number], clients[1 - number]
        there, here = (
            client.execute_command("CLUSTER", "MYID") for client in (to, source)
        )
        to.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", here)
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", there)
        assert [Verdict.DONE] == await backend.put([seal(KEYS[9])])
        assert [True] == await fetch_sound(backend, KEYS[9:10])
        for client in (to, source):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", there)
        for _ in range(2):
            assert [Verdict.PRESENT] == await backend.put([seal(KEYS[9])])
            assert [True] == await fetch_sound(backend, KEYS[9:10])
        assert to.exists(name)
        await backend.aclose()


async def test_server_of_a_cluster_that_falls_silent_is_replaced(tmp_path):
    """R-52: one whose machine is gone ends no connection; once another stands in for it that one
    is asked, by calls of no more than their deadline."""
    with cluster(tmp_path, with_replica=True) as (servers, ports, clients):
        patient = await open_cluster(ports[0])
        assert {Verdict.DONE} == {*await patient.put([seal(key) for key in KEYS])}
        assert 1 == clients[0].execute_command("WAIT", 1, 10_000)
        await patient.aclose()
        opened = await open_cluster(ports[0], 0.5)
        backend = DeadlineBackend(opened, 1.0)

        async def are_there():
            with anyio.fail_after(LIMIT_S):
                while not all(await fetch_sound(backend, KEYS)):
                    pass
                while {*await backend.exists(KEYS)} != {Presence.PRESENT}:
                    pass

        def are_silent():
            return [links.is_silent for links in opened._servers._links.values()]

        await are_there()
        servers[0].stop()
        try:
            with anyio.fail_after(LIMIT_S):
                while True not in are_silent():
                    await fetch_sound(backend, KEYS)
            servers[0].go_on()
            await are_there()
            assert [False, False] == are_silent()  # once it answers it is asked again
            servers[0].stop()
            clients[2].execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
            await are_there()
            await backend.aclose()
        finally:
            servers[0].go_on()


async def test_server_of_a_cluster_that_is_silent_costs_the_others_nothing(tmp_path):
    """R-52: as long as nobody stands in for it, calls that ask it as well tell what the others have, by
    the deadlines that are set where nobody sets any; they told nothing of any block."""
    with cluster(tmp_path) as (servers, ports, _):
        opened = await open_cluster(ports[0], 1.0)
        backend = DeadlineBackend(opened, 2.0)
        assert {Verdict.DONE} == {*await opened.put([seal(key) for key in KEYS])}
        servers[1].stop()
        try:
            told = []
            with anyio.fail_after(LIMIT_S):
                while len(told) < 3:
                    links = opened._servers._links.values()
                    is_known = any(each.is_silent for each in links)
                    told += [{*await backend.exists(KEYS)}] * is_known
            assert {Presence.PRESENT, Presence.UNKNOWN} in told
            await backend.aclose()
        finally:
            servers[1].go_on()
