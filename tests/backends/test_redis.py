# SPDX-License-Identifier: Apache-2.0
"""Blocks as values of a real Valkey server: the contract, and a server that is away."""

import hashlib

import anyio
import pytest
import redis

from tests.backends.servers import LIMIT_S, redis_server
from tests.backends.spoiling import NONSENSE, Way, spoiled
from ucm.backends.abc import Fetched, Presence, Verdict
from ucm.backends.envelope import Envelope
from ucm.backends.redis import RedisBackend
from ucm.backends.wrap import DeadlineBackend
from ucm.errors import ConfigError
from ucm.testing.backend_contract import (
    BLOCK,
    BackendContract,
    fetch,
    fetch_sound,
    seal,
)
from ucm.testing.store_blocks import make_keys

pytestmark = pytest.mark.slow
KEYS = make_keys(4)
LARGE = (5 << 19) + 17
"""Bytes of a block of three parts."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Run a server for all tests of this file."""
    with redis_server(tmp_path_factory.mktemp("valkey")) as (server, port):
        yield server, port


def prefix_of(place):
    """Return what names begin with in a test of its own."""
    return hashlib.sha256(str(place).encode()).hexdigest()[:16] + ":"


async def open_redis(port, place, /, **settings):
    """Open a server with a prefix of the test's own."""
    given = {"url": f"redis://127.0.0.1:{port}/0", "prefix": prefix_of(place)}
    given |= {"timeout": LIMIT_S}
    return await RedisBackend.open_configured(given | settings, "tiers.0")


def seal_raw(key, nbytes):
    """Return a block as it is stored: its header, then its bytes."""
    block = seal(key, nbytes)
    return Envelope(key, nbytes, block.checksum).encode() + bytes(block.data)


def name(place, key, part=0):
    """Return the name of a value, as the module says."""
    return prefix_of(place).encode() + b"%d/" % part + key


def part_of(place, key, part):
    """Return the name of a part of a large block; its head is part 0."""
    behind = b"/%016x" % seal(key, LARGE).checksum if part else b""
    return name(place, key, part) + behind


class TestRedisBackend(BackendContract):
    """A prefix for each test, looked at by a client of the test's own."""

    @pytest.fixture(autouse=True)
    def _service(self, service):
        self.port = service[1]
        with redis.Redis(port=self.port) as self.bypass:
            yield

    async def open(self, place):
        """Open the server."""
        return await open_redis(self.port, place)

    async def open_small(self, place):
        """Room is the server's affair."""

    def get_raw(self, place, key):
        """Get the one value that blocks of the contract have."""
        return self.bypass.get(name(place, key))

    def put_raw(self, place, key, raw):
        """Set a value in its place."""
        self.bypass.set(name(place, key), raw)

    def leftovers(self, place):
        """Look for values that are no blocks of the contract's."""
        wanted = {name(place, key) for key in make_keys(64)}
        listed = set(self.bypass.keys(prefix_of(place) + "*"))
        return sorted(listed - wanted)


@pytest.fixture
def bypass(service):
    """Return a client that knows nothing of blocks."""
    with redis.Redis(port=service[1]) as client:
        yield client


@pytest.mark.asyncio
class TestParts:
    async def test_large_block_is_cut(self, service, bypass, tmp_path):
        """No value is over a megabyte, each has its time to live, and all come back."""
        backend = await open_redis(service[1], tmp_path, ttl=1000)
        assert [Verdict.DONE] * 2 == await backend.put(
            [seal(key, LARGE) for key in KEYS[:2]]
        )
        names = [part_of(tmp_path, KEYS[0], part) for part in range(5)]
        lengths = [bypass.strlen(each) for each in names]
        assert LARGE + 128 == sum(lengths)
        assert [128, 1 << 20, 1 << 20, LARGE - (2 << 20), 0] == lengths
        assert 900 < bypass.ttl(names[0]) <= 1000 < bypass.ttl(names[1]) <= 1060
        assert [True, True] == await fetch_sound(backend, KEYS[:2], LARGE)
        assert [Verdict.PRESENT] == await backend.put([seal(KEYS[0], LARGE)])
        assert [Verdict.DONE] == await backend.delete(KEYS[:1])
        assert 0 == bypass.exists(*names)
        assert [False, True] == await fetch_sound(backend, KEYS[:2], LARGE)
        await backend.aclose()

    async def test_small_block_is_one_value(self, service, bypass, tmp_path):
        """It costs one command each way, and what is there stays."""
        backend = await open_redis(service[1], tmp_path, ttl=1000)
        largest = 1 << 20
        assert [Verdict.DONE] == await backend.put([seal(KEYS[0], largest)])
        assert [seal_raw(KEYS[0], largest), None] == [
            bypass.get(name(tmp_path, KEYS[0], part)) for part in (0, 1)
        ]
        assert 900 < bypass.ttl(name(tmp_path, KEYS[0])) <= 1000
        assert [True] == await fetch_sound(backend, KEYS[:1], largest)
        assert [Verdict.PRESENT] == await backend.put([seal(KEYS[0], largest)])
        await backend.put([seal(KEYS[1], largest + 1)])
        assert 128 == bypass.strlen(name(tmp_path, KEYS[1]))
        await backend.aclose()

    @pytest.mark.parametrize("part", [b"", b"short"])
    async def test_small_block_of_an_earlier_release_is_served(
        self, service, bypass, tmp_path, part
    ):
        """Its head and its bytes were two values; without its bytes it is garbage."""
        backend, raw = await open_redis(service[1], tmp_path), seal_raw(KEYS[0], 5000)
        bypass.set(name(tmp_path, KEYS[0]), raw[:128])
        bypass.set(name(tmp_path, KEYS[0], 1), part or raw[128:])
        await backend.put([seal(KEYS[1], 5000)])
        assert [not part, True] == await fetch_sound(backend, KEYS[:2], 5000)
        assert [Verdict.DONE] == await backend.delete(KEYS[:1])
        assert 0 == bypass.exists(*(name(tmp_path, KEYS[0], part) for part in (0, 1)))
        await backend.aclose()

    @pytest.mark.parametrize("part", [0, 1, 2, 3])
    async def test_block_without_one_of_its_parts_is_none(
        self, service, bypass, tmp_path, part
    ):
        """R-51: what the server let go of is no damage, as it was called; its others go, and it can be put again."""
        backend = await open_redis(service[1], tmp_path)
        await backend.put([seal(KEYS[0], LARGE)])
        bypass.delete(part_of(tmp_path, KEYS[0], part))
        ((got, _),) = await fetch(backend, KEYS[:1], LARGE)
        assert Verdict.ABSENT is got.verdict
        left = bypass.exists(*(part_of(tmp_path, KEYS[0], one) for one in range(4)))
        assert (0 if part else 3) == left  # of one without a head nobody knows
        assert [Verdict.DONE] == await backend.put([seal(KEYS[0], LARGE)])
        assert [True] == await fetch_sound(backend, KEYS[:1], LARGE)
        await backend.aclose()

    async def test_large_block_of_an_earlier_release_is_served(
        self, service, bypass, tmp_path
    ):
        """Its parts were named by the key alone; it goes with all of them."""
        backend, raw = await open_redis(service[1], tmp_path), seal_raw(KEYS[0], LARGE)
        names = [name(tmp_path, KEYS[0], part) for part in range(4)]
        starts = [0, *range(128, len(raw), 1 << 20)]
        for each, start, stop in zip(names, starts, [*starts[1:], None], strict=True):
            bypass.set(each, raw[start:stop])
        assert [True] == await fetch_sound(backend, KEYS[:1], LARGE)
        assert [Verdict.PRESENT] == await backend.put([seal(KEYS[0], LARGE)])
        assert [Verdict.DONE] == await backend.delete(KEYS[:1])
        assert 0 == bypass.exists(*names)
        await backend.aclose()

    @pytest.mark.parametrize("nbytes", [0, 5, (1 << 20) + 1, 3 << 20])
    async def test_part_of_another_length_is_none(
        self, service, bypass, tmp_path, nbytes
    ):
        """However short or long it is; what is asked for beside it comes."""
        backend = await open_redis(service[1], tmp_path)
        await backend.put([seal(key, LARGE) for key in KEYS[:2]])
        bypass.set(part_of(tmp_path, KEYS[0], 1), b"x" * nbytes)
        told = await fetch(backend, KEYS[:2], LARGE)
        assert [Verdict.GARBAGE, Verdict.DONE] == [got.verdict for got, _ in told]
        await backend.aclose()

    async def test_block_of_which_a_part_is_refused_gets_no_head(
        self, service, bypass, tmp_path
    ):
        """The head is written last, and only when all parts are there; parts that are there go again."""
        backend = await open_redis(service[1], tmp_path)
        real = backend._servers.ask

        async def ask(commands, **given):
            answers = await real(commands, **given)
            part = part_of(tmp_path, KEYS[0], 1)
            return [
                redis.exceptions.ResponseError("OOM")
                if part in command.words
                else answer
                for command, answer in zip(commands, answers, strict=True)
            ]

        backend._servers.ask = ask
        verdicts = await backend.put([seal(key, LARGE) for key in KEYS[:2]])
        assert [Verdict.FULL, Verdict.DONE] == verdicts
        assert [0, 1] == [bypass.exists(name(tmp_path, key)) for key in KEYS[:2]]
        assert 4 == len(bypass.keys(prefix_of(tmp_path) + "*"))
        await backend.aclose()

    async def test_many_blocks_take_several_requests(self, service, tmp_path):
        """Twenty megabytes go in pieces, and come back whole."""
        backend, keys = await open_redis(service[1], tmp_path), make_keys(20)
        assert [Verdict.DONE] * 20 == await backend.put(
            [seal(k, 1 << 20) for k in keys]
        )
        assert [True] * 20 == await fetch_sound(backend, keys, 1 << 20)
        assert [Verdict.DONE] * 20 == await backend.delete(keys)
        await backend.aclose()

    async def test_without_a_time_to_live_blocks_stay(self, service, bypass, tmp_path):
        """Zero means for ever."""
        backend = await open_redis(service[1], tmp_path, ttl=0)
        await backend.put([seal(KEYS[0])])
        assert -1 == bypass.ttl(name(tmp_path, KEYS[0]))
        await backend.aclose()


@pytest.mark.asyncio
class TestServer:
    async def test_full_server_is_full(self, tmp_path):
        """R-51: no room is told apart from no answer; a part that found none has no head."""
        limits = "--maxmemory", "24mb", "--maxmemory-policy", "noeviction"
        with redis_server(tmp_path, *limits) as (_, port):
            backend, keys = await open_redis(port, tmp_path), make_keys(10)
            verdicts = []
            for key in keys:  # what is on its way counts as well: one after the other
                verdicts += await backend.put([seal(key, LARGE)])
            assert {Verdict.DONE, Verdict.FULL} == set(verdicts)
            there = await fetch_sound(backend, keys, LARGE)
            assert [verdict is Verdict.DONE for verdict in verdicts] == there
            assert there == [
                one is Presence.PRESENT for one in await backend.exists(keys)
            ]
            await backend.aclose()

    async def test_stopped_server_ends_at_the_deadline(self, service, tmp_path):
        """R-52: no answer in time, whatever is asked; and answers when it goes on."""
        backend = await open_redis(service[1], tmp_path)
        await backend.put([seal(KEYS[0])])
        late = DeadlineBackend(backend, 0.2)
        service[0].stop()
        try:
            assert [Presence.UNKNOWN] == await late.exists(KEYS[:1])
            ((got, _),) = await fetch(late, KEYS[:1])
            assert Verdict.UNAVAILABLE is got.verdict
            assert [Verdict.UNAVAILABLE] == await late.put([seal(KEYS[1])])
            assert [Verdict.UNAVAILABLE] == await late.delete(KEYS[:1])
        finally:
            service[0].go_on()
        assert 4 == late.num_late
        assert [Presence.ABSENT] == await backend.exists(KEYS[2:3])
        await backend.aclose()

    async def test_words_of_no_server_are_no_answer(self, service, tmp_path):
        """R-51, R-52: whatever is said in a server's place, nothing is raised, and no block
        is found in it; and answers when the server says them again."""
        with spoiled(tmp_path, service[1]) as spoiler:
            backend = await open_redis(spoiler.port, tmp_path)
            assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
            spoiler.do(Way.GARBAGE)
            late = DeadlineBackend(backend, 0.2)  # of a list some wait for the rest
            for _ in range(3 * len(NONSENSE)):
                assert Presence.ABSENT not in await late.exists(KEYS[1:2])
                ((got, _),) = await fetch(late, KEYS[:1])
                assert got.verdict in {Verdict.UNAVAILABLE, Verdict.GARBAGE}
                (told,) = await late.delete(KEYS[1:2])
                assert told in {Verdict.UNAVAILABLE, Verdict.DONE}
            spoiler.do(Way.FORWARD)
            with anyio.fail_after(LIMIT_S):
                while await fetch_sound(backend, KEYS[:1]) != [True]:
                    pass
            await backend.aclose()

    async def test_killed_server_is_no_miss_and_joins_again(self, tmp_path):
        """R-51: nobody listens; when somebody does, it serves without being told."""
        with redis_server(tmp_path) as (server, port):
            backend = await open_redis(port, tmp_path)
            await backend.put([seal(KEYS[0])])
            server.kill()
            assert [Presence.UNKNOWN] == await backend.exists(KEYS[:1])
            ((got, _),) = await fetch(backend, KEYS[:1])
            assert Fetched(Verdict.UNAVAILABLE) == got
            ((got, _),) = await fetch(backend, KEYS[:1], LARGE)
            assert Fetched(Verdict.UNAVAILABLE) == got
            assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[0])])
            assert [Verdict.UNAVAILABLE] == await backend.delete(KEYS[:1])
            server.start()
            server.await_ready(lambda: _answers(port))
            assert [Presence.ABSENT] == await backend.exists(KEYS[:1])
            assert [Verdict.DONE] == await backend.put([seal(KEYS[0])])
            await backend.aclose()

    async def test_value_of_another_kind_is_garbage(self, service, bypass, tmp_path):
        """A list, or a value of a hundred megabytes, in a block's place harms nobody."""
        backend = await open_redis(service[1], tmp_path)
        bypass.rpush(name(tmp_path, KEYS[0]), b"x")
        bypass.setrange(name(tmp_path, KEYS[1]), 100 << 20, b"x")
        told = [got.verdict for got, _ in await fetch(backend, KEYS[:2])]
        assert [Verdict.GARBAGE] * 2 == told
        assert [Verdict.DONE] * 2 == await backend.delete(KEYS[:2])
        await backend.aclose()

    async def test_cluster_is_asked_through_its_slots(self, tmp_path):
        """A cluster of one node that has all slots serves blocks of several parts."""
        with redis_server(tmp_path, "--cluster-enabled", "yes") as (server, port):
            with redis.Redis(port=port) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
                server.await_ready(
                    lambda: b"cluster_state:ok" in _raw(client, "CLUSTER", "INFO")
                )
            backend = await open_redis(port, tmp_path, cluster=True)
            blocks = [seal(KEYS[0], LARGE), seal(KEYS[1], LARGE)]
            assert [Verdict.DONE] * 2 == await backend.put(blocks)
            assert [True, True] == await fetch_sound(backend, KEYS[:2], LARGE)
            assert [Verdict.DONE] == await backend.delete(KEYS[:1])
            await backend.aclose()

    async def test_block_of_no_bytes_is_one(self, tmp_path):
        """It has a head, as others have, and the first of a call may be such a one."""
        with redis_server(tmp_path) as (_, port):
            backend = await open_redis(port, tmp_path)
            assert [Verdict.DONE] == await backend.put([seal(KEYS[0], 0)])
            assert [True] == await fetch_sound(backend, KEYS[:1], 0)
            await backend.aclose()

    async def test_wrong_credentials_are_refused_without_being_told(self, tmp_path):
        """At start, by the setting's name; no secret is in the text."""
        with redis_server(tmp_path, "--requirepass", "sesame") as (_, port):
            for login in ("", ":hush-hush@"):
                url = f"redis://{login}127.0.0.1:{port}/0"
                with pytest.raises(ConfigError, match="refuses the cred") as caught:
                    await open_redis(port, tmp_path, url=url)
                assert "hush" not in str(caught.value)
            url = f"redis://:sesame@127.0.0.1:{port}/0"
            backend = await open_redis(port, tmp_path, url=url)
            assert [Verdict.DONE] == await backend.put([seal(KEYS[0], BLOCK)])
            await backend.aclose()

    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({"url": "http://host"}, "url"),
            ({"url": ""}, "url"),
            ({"url": "redis+x://user:hush-hush@host"}, "url"),
            ({"ttl": -1}, "ttl"),
            ({"cluster": "yes"}, "cluster"),
            ({"connections": 0}, "connections"),
            ({"host": "x"}, "host"),
            ({"url": "redis://u:hush-hush@h:1?decode_responses=true"}, "url"),
            ({"url": "redis://host:1/0?protocol=3"}, "url"),
            ({"url": "user:hush-hush@host:6379"}, "url"),
            ({"url": "redis://u:hush-hush@h:1?no_such=1"}, "url"),
            ({"url": "redis://u:hush-hush@h:1?no_such=1", "cluster": True}, "url"),
            ({"url": "rediss://u:hush-hush@h:1?ssl_ca_certs=/no"}, "url"),
            ({"url": "rediss://u:h@h:1?ssl_certfile=/no", "cluster": True}, "url"),
            ({"url": "rediss://u:h@h:1?ssl_ciphers=NO"}, "url"),
        ],
    )
    async def test_wrong_setting_is_named(self, tmp_path, settings, key):
        """Refused at start, by its dotted key."""
        with pytest.raises(ConfigError) as caught:
            await open_redis(1, tmp_path, **settings)
        assert "hush" not in str(caught.value)
        assert "None)" not in str(caught.value)
        assert f"tiers.0.{key}" == caught.value.key


def _answers(port):
    with redis.Redis(port=port) as client:
        try:
            return client.ping()
        except redis.RedisError:
            return False


def _raw(client, *command):
    answer = client.execute_command(*command)
    return answer if isinstance(answer, bytes) else repr(answer).encode()
