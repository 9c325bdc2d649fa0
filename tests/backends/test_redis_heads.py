# SPDX-License-Identifier: Apache-2.0
"""Large blocks in Redis whose head changes, goes or has no answer amid a call, and what is left of their parts."""

import pytest
import redis

from tests.backends.servers import redis_server
from tests.backends.test_redis import KEYS, LARGE, name, open_redis, prefix_of
from tests.backends.test_redis_machines import computed_elsewhere
from ucm.backends._redis_servers import AWAY
from ucm.backends.abc import Verdict
from ucm.testing.backend_contract import fetch, fetch_sound, seal

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
BLOCK = seal(KEYS[0], LARGE)
OTHER = computed_elsewhere(KEYS[0])


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """Run a server for all tests of this file."""
    with redis_server(tmp_path_factory.mktemp("valkey")) as (_, port):
        yield port


@pytest.fixture
def bypass(port):
    """Return a client that knows nothing of blocks."""
    with redis.Redis(port=port) as client:
        yield client


def names(bypass, place):
    """Return the names of all values of a test."""
    return bypass.keys(prefix_of(place) + "*")


def amid(backend, acts):
    """Have something happen before the requests of these numbers, from 0 on."""
    real, left = backend._servers.ask, dict(acts)
    number = iter(range(100))

    async def ask(commands, **given):
        if act := left.pop(next(number), None):
            await act()
        return await real(commands, **given)

    backend._servers.ask = ask


def unanswered(backend, answer, verb=b"GETRANGE"):
    """Have looks for heads be answered so, or what another word asks for."""
    real = backend._servers.ask

    async def ask(commands, **given):
        if commands and commands[0].words[0] == verb:
            return [answer] * len(commands)
        return await real(commands, **given)

    backend._servers.ask = ask


def putting(backend, block, *, bypass, place, with_parts=True):
    """Return what puts a block anew; the parts of the one before stay for a while."""

    async def put():
        if with_parts:
            await backend.delete(KEYS[:1])
        bypass.delete(name(place, KEYS[0]))
        assert [Verdict.DONE] == await backend.put([block])

    return put


@pytest.mark.parametrize("with_parts", [True, False])
async def test_block_that_is_put_anew_meanwhile_is_read_again(
    port, bypass, tmp_path, with_parts
):
    """R-51: with other bytes than those whose head was read; it is no damage, and no bytes are taken for others."""
    first, second = [await open_redis(port, tmp_path) for _ in range(2)]
    await second.put([BLOCK])
    given = {"bypass": bypass, "place": tmp_path, "with_parts": with_parts}
    amid(first, {1: putting(second, OTHER, **given)})
    ((got, data),) = await fetch(first, KEYS[:1], LARGE)
    assert (Verdict.DONE, OTHER.checksum) == (got.verdict, got.checksum)
    assert OTHER.data == data
    await first.aclose()
    await second.aclose()


async def test_block_that_is_put_anew_twice_meanwhile_is_not_there(
    port, bypass, tmp_path
):
    """R-51: nobody is told that it is damaged, who would delete it; it is there for whoever asks next."""
    first, second = [await open_redis(port, tmp_path) for _ in range(2)]
    await second.put([BLOCK])
    given = {"bypass": bypass, "place": tmp_path}
    acts = {
        1: putting(second, OTHER, **given),
        2: putting(second, BLOCK, **given),
    }
    amid(first, acts)
    ((got, _),) = await fetch(first, KEYS[:1], LARGE)
    assert Verdict.ABSENT is got.verdict
    assert [True] == await fetch_sound(first, KEYS[:1], LARGE)
    await first.aclose()
    await second.aclose()


async def test_value_without_a_byte_is_garbage(port, bypass, tmp_path):
    """It is there for who looks, and who puts; deleted as damaged it makes way for a block."""
    backend = await open_redis(port, tmp_path)
    bypass.set(name(tmp_path, KEYS[0]), b"")
    told = await fetch(backend, KEYS[:2], LARGE)
    assert [Verdict.GARBAGE, Verdict.ABSENT] == [got.verdict for got, _ in told]
    assert [Verdict.DONE] == await backend.delete(KEYS[:1])
    assert [Verdict.DONE] == await backend.put([BLOCK])
    await backend.aclose()


async def test_parts_of_who_is_too_late_go_with_the_head_of_the_other(
    port, bypass, tmp_path
):
    """X-02: the other's block was deleted before its head was looked at; nobody could name the parts any more."""
    first, second = [await open_redis(port, tmp_path) for _ in range(2)]

    async def put():
        assert [Verdict.DONE] == await second.put([OTHER])

    async def delete():
        assert [Verdict.DONE] == await second.delete(KEYS[:1])

    amid(first, {1: put, 3: delete})
    assert [Verdict.PRESENT] == await first.put([BLOCK])
    assert [] == names(bypass, tmp_path)
    await first.aclose()
    await second.aclose()


async def test_parts_stay_where_nobody_says_whose_they_are(port, tmp_path):
    """X-02: they may be the other's as well, as they are here."""
    first, second = [await open_redis(port, tmp_path) for _ in range(2)]

    async def put():
        assert [Verdict.DONE] == await second.put([BLOCK])

    unanswered(first, ConnectionError())
    amid(first, {1: put})
    assert [Verdict.PRESENT] == await first.put([BLOCK])
    assert [True] == await fetch_sound(second, KEYS[:1], LARGE)
    await first.aclose()
    await second.aclose()


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(ConnectionError(), Verdict.UNAVAILABLE), (AWAY, Verdict.AWAY)],
)
async def test_block_whose_head_has_no_answer_is_not_deleted(
    port, bypass, tmp_path, answer, verdict
):
    """R-51: its parts would stay, which nobody could name any more."""
    backend, late = [await open_redis(port, tmp_path) for _ in range(2)]
    await backend.put([BLOCK])
    unanswered(late, answer)
    assert [verdict] == await late.delete(KEYS[:1])
    assert [True] == await fetch_sound(backend, KEYS[:1], LARGE)
    assert [Verdict.DONE] == await backend.delete(KEYS[:1])
    assert [] == names(bypass, tmp_path)
    await backend.aclose()
    await late.aclose()


async def test_deletion_that_is_refused_is_none(port, tmp_path):
    """R-51: the block is there, and nobody says otherwise."""
    backend = await open_redis(port, tmp_path)
    await backend.put([BLOCK])
    unanswered(backend, redis.exceptions.ResponseError("NOPERM"), b"UNLINK")
    assert [Verdict.UNAVAILABLE] == await backend.delete(KEYS[:1])
    assert [True] == await fetch_sound(backend, KEYS[:1], LARGE)
    await backend.aclose()


@pytest.mark.parametrize("nbytes", [LARGE - (1 << 20), LARGE + (1 << 20)])
async def test_block_of_another_length_is_garbage_and_stays(port, tmp_path, nbytes):
    """R-51: that it has fewer parts than were asked for is no word that some went for room."""
    backend = await open_redis(port, tmp_path)
    await backend.put([BLOCK])
    ((got, _),) = await fetch(backend, KEYS[:1], nbytes)
    assert Verdict.GARBAGE is got.verdict
    assert [True] == await fetch_sound(backend, KEYS[:1], LARGE)
    await backend.aclose()
