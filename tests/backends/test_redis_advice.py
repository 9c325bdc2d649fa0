# SPDX-License-Identifier: Apache-2.0
"""What of a server's own settings makes it a poor place for blocks."""

import contextlib

import pytest

from tests.backends.cluster_kit import cluster, open_cluster
from tests.backends.servers import redis_server
from ucm.backends._redis_advice import advice_of
from ucm.backends.redis import RedisBackend

FINE = {"maxmemory": "1048576", "maxmemory-policy": "allkeys-lru"}


@pytest.mark.parametrize(
    ("config", "ttl", "named"),
    [
        (FINE, 0, []),
        (FINE | {"cluster-require-full-coverage": "yes"}, 0, []),  # it is alone
        ({}, 0, []),  # it does not tell
        (FINE | {"maxmemory": "0"}, 60, ["maxmemory is 0"]),
        (
            {"maxmemory": "0", "maxmemory-policy": "noeviction"},
            60,
            ["maxmemory is 0"],
        ),
        (FINE | {"maxmemory-policy": "noeviction"}, 60, ["takes no new block"]),
        (FINE | {"maxmemory-policy": "volatile-lru"}, 0, ["`ttl` is 0"]),
        (FINE | {"maxmemory-policy": "volatile-lru"}, 60, []),
    ],
)
def test_each_setting_that_loses_blocks_or_a_machine_is_named(config, ttl, named):
    """Once, with what it should be; and nothing where all is well."""
    told = advice_of(config, ttl=ttl, is_cluster=False)
    assert len(named) == len(told)
    assert all(word in one.problem for word, one in zip(named, told, strict=True))
    assert all("Set " in one.remedy for one in told)


async def problems_of(backend):
    """Return what a backend's servers should be set to otherwise."""
    async with contextlib.aclosing(backend):
        return [one.problem.partition(":")[0] for one in await backend.advice()]


async def open_one(port, **given):
    """Open a backend on one server."""
    given["url"] = f"redis://127.0.0.1:{port}/0"
    return await RedisBackend.open_configured(given, "tiers.0")


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "problems"),
    [
        (["--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lfu"], []),
        (["--maxmemory", "8mb"], ["maxmemory-policy is noeviction"]),
        (["--rename-command", "CONFIG", ""], []),  # as managed services do
    ],
)
async def test_a_server_is_asked(tmp_path, options, problems):
    """By its own words, whatever it is called; one that does not tell is left alone."""
    with redis_server(tmp_path, *options) as (_, port):
        assert problems == await problems_of(await open_one(port))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_servers_of_a_cluster_are_asked_each(tmp_path):
    """What one of them alone has set is told, and what all have is told once."""
    with cluster(tmp_path) as (_, ports, clients):
        clients[1].config_set("cluster-require-full-coverage", "yes")
        backend = await open_cluster(ports[0])
        await backend.exists([])
        told = await problems_of(backend)
        assert ["cluster-require-full-coverage is yes", "maxmemory is 0"] == sorted(
            told
        )
