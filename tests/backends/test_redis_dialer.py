# SPDX-License-Identifier: Apache-2.0
"""Connections that block, by an address that is read for those on the loop."""

import asyncio

import pytest
from redis.asyncio import Redis

from tests.ports import free_ports
from ucm.backends._redis_dialer import Dialer
from ucm.backends.abc import Presence
from ucm.backends.redis import RedisBackend
from ucm.testing.store_blocks import make_keys

SAME = ("host", "port", "path", "db", "client_name", "username", "password")


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://user:hush%20hush@host:7/3?client_name=a&max_connections=2",
        "redis://[::1]:7/2?socket_keepalive=yes&health_check_interval=3",
        "REDIS://host:7?db=5",
        " redis://host:7/1?socket_timeout=9",
        "Rediss://:hush@host:7/1?ssl_check_hostname=no&ssl_min_version=771",
        "unix://user:hush@/some/socket?db=3",
    ],
)
def test_connection_is_where_the_one_on_the_loop_is(url):
    """Its kind, its other side, and who asks are the same, whatever an address looks like."""
    pool = Redis.from_url(url).connection_pool
    theirs, ours = pool.make_connection(), Dialer(url, 1.5).to_one()
    assert type(theirs).__name__ == type(ours).__name__
    for name in SAME:
        assert getattr(theirs, name, None) == getattr(ours, name, None)
    assert 1.5 == ours.socket_timeout == ours.socket_connect_timeout


@pytest.mark.asyncio
async def test_address_in_capitals_opens_a_tier():
    """R-52: what redis-py's client takes is no failure of a connection of ours."""
    url = f"REDIS://127.0.0.1:{free_ports(1)[0]}/0"
    backend = await RedisBackend.open_configured({"url": url}, "tiers.0")
    assert [Presence.UNKNOWN] == await backend.exists(make_keys(1))
    await backend.aclose()


@pytest.mark.asyncio
async def test_tls_that_fails_is_told_without_secrets():
    """R-51: such as a certificate that is over, which was a server that is down for no reason."""

    async def refuse(_, writer):
        writer.write(b"-ERR no such thing\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"rediss://user:hush-hush@127.0.0.1:{port}/0"
        backend = await RedisBackend.open_configured({"url": url}, "tiers.0")
        assert [Presence.UNKNOWN] == await backend.exists(make_keys(1))
        assert "SSL" in backend.trouble
        assert "hush" not in backend.trouble
        await backend.aclose()
