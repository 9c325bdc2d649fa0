# SPDX-License-Identifier: Apache-2.0
"""Two machines that put a block of several values at once, with bytes of their own each."""

import pytest
import redis

from tests.backends.servers import redis_server
from tests.backends.test_redis import KEYS, LARGE, open_redis, prefix_of
from ucm.backends.abc import Sealed, Verdict, block_checksum
from ucm.testing.backend_contract import fetch, fetch_sound, seal

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Run a server for all tests of this file."""
    with redis_server(tmp_path_factory.mktemp("valkey")) as (_, port):
        yield port


def computed_elsewhere(key):
    """Return a block as another machine computes it, in another batch."""
    data = bytes(seal(key, LARGE).data)[::-1]
    return Sealed(key, memoryview(data), block_checksum(key, data))


async def put_between(first, second, block, other):
    """Have the first put a block, and the second one another as the first has found none there."""
    real = first._servers.ask

    async def ask(commands, *, are_writes=False):
        if are_writes:
            first._servers.ask = real
            assert [Verdict.DONE] == await second.put([other])
        return await real(commands, are_writes=are_writes)

    first._servers.ask = ask
    return await first.put([block])


async def test_block_is_that_of_one_of_two_machines(port, tmp_path):
    """X-02: who is too late leaves nothing of its own, neither in the other's block nor beside it."""
    first, second = [await open_redis(port, tmp_path) for _ in range(2)]
    other = computed_elsewhere(KEYS[0])
    told = await put_between(first, second, seal(KEYS[0], LARGE), other)
    assert [Verdict.PRESENT] == told
    ((got, data),) = await fetch(first, KEYS[:1], LARGE)
    assert (Verdict.DONE, other.checksum) == (got.verdict, got.checksum)
    assert other.data == data
    with redis.Redis(port=port) as bypass:
        assert 4 == len(bypass.keys(prefix_of(tmp_path) + "*"))
        assert [Verdict.DONE] == await second.delete(KEYS[:1])
        assert [] == bypass.keys(prefix_of(tmp_path) + "*")
    await first.aclose()
    await second.aclose()


async def test_same_bytes_of_two_machines_stay(port, tmp_path):
    """X-02: who is too late with what the other one has put as well takes nothing of it away."""
    first, second = [await open_redis(port, tmp_path) for _ in range(2)]
    block = seal(KEYS[0], LARGE)
    assert [Verdict.PRESENT] == await put_between(first, second, block, block)
    assert [True] == await fetch_sound(first, KEYS[:1], LARGE)
    await first.aclose()
    await second.aclose()
