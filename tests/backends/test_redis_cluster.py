# SPDX-License-Identifier: Apache-2.0
"""The redis backend on a cluster that changes: slots that move, and a server that falls silent."""

import anyio
import pytest

from tests.backends.cluster_kit import cluster, open_cluster
from tests.backends.servers import LIMIT_S
from ucm.backends.abc import Presence, Verdict
from ucm.backends.redis import RedisBackend, name_of
from ucm.backends.wrap import DeadlineBackend
from ucm.errors import ConfigError
from ucm.testing.backend_contract import fetch_sound, seal
from ucm.testing.store_blocks import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
KEYS = make_keys(64)
LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""


def move_slot_of(key, clients):
    """Begin to move a block's slot; return its head's name, the slot, and where that goes to and comes from."""
    name = name_of(b"ucm:", key, 0, is_cluster=True)
    slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
    number = slot < 8192
    to, source = clients[number], clients[1 - number]
    there, here = (client.execute_command("CLUSTER", "MYID") for client in (to, source))
    to.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", here)
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", there)
    return name, slot, to, source


async def test_block_whose_slot_moves_is_deleted_with_its_parts(tmp_path):
    """Each by itself, as names of which some alone are there are refused meanwhile."""
    with cluster(tmp_path) as (_, ports, clients):
        backend = await open_cluster(ports[0])
        assert [Verdict.DONE] == await backend.put([seal(KEYS[0], LARGE)])
        move_slot_of(KEYS[0], clients)
        assert [Verdict.DONE] == await backend.delete(KEYS[:1])
        assert 0 == sum(client.dbsize() for client in clients)
        await backend.aclose()


async def test_blocks_of_a_cluster_lie_with_both_servers(tmp_path):
    """All of a block with one of them; what moves to the other, or has moved, is found there."""
    with cluster(tmp_path) as (_, ports, clients):
        backend = await open_cluster(ports[0])
        blocks = [seal(key, LARGE) for key in KEYS[:8]]
        assert [Verdict.DONE] * 8 == await backend.put(blocks)
        assert [True] * 8 == await fetch_sound(backend, KEYS[:8], LARGE)
        sizes = [client.dbsize() for client in clients]
        assert all(size and size % 4 == 0 for size in sizes)
        assert 8 * 4 == sum(sizes)
        # A slot that nobody uses yet goes to the other, and the backend is not told.
        name, slot, to, source = move_slot_of(KEYS[9], clients)
        assert [Verdict.DONE] == await backend.put([seal(KEYS[9])])
        assert [True] == await fetch_sound(backend, KEYS[9:10])
        for client in (to, source):
            there = to.execute_command("CLUSTER", "MYID")
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", there)
        for _ in range(2):
            assert [Verdict.PRESENT] == await backend.put([seal(KEYS[9])])
            assert [True] == await fetch_sound(backend, KEYS[9:10])
        assert to.exists(name)
        assert [Verdict.DONE] * 8 == await backend.delete(KEYS[:8])
        assert 1 == sum(client.dbsize() for client in clients)
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

        await are_there()
        servers[0].stop()
        try:
            with anyio.fail_after(LIMIT_S):
                while f"127.0.0.1:{ports[0]}" not in opened.away:
                    await fetch_sound(backend, KEYS)
            servers[0].go_on()
            await are_there()
            assert [] == opened.away  # once it answers it is asked again
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
            with anyio.fail_after(LIMIT_S):
                while {Presence.PRESENT, Presence.AWAY} != {
                    *await backend.exists(KEYS)
                }:
                    pass
                while f"127.0.0.1:{ports[1]}" not in opened.away:
                    await backend.exists(KEYS)
            await backend.aclose()
        finally:
            servers[1].go_on()


async def test_cluster_that_refuses_credentials_is_no_server_that_is_down(tmp_path):
    """At start, as one server does; redis-py says of it that no node can be reached."""
    with cluster(tmp_path) as (_, ports, clients):
        for client in clients:
            client.config_set("requirepass", "sesame")
        for login in ("", ":hush-hush@"):
            url = f"redis://{login}127.0.0.1:{ports[0]}/0"
            given = {"url": url, "cluster": True, "timeout": LIMIT_S}
            with pytest.raises(ConfigError, match="refuses the cred") as caught:
                await RedisBackend.open_configured(given, "tiers.0")
            assert "hush" not in str(caught.value)
