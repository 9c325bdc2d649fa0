# SPDX-License-Identifier: Apache-2.0
"""Blocks as objects of a real S3 server: the contract, and a server that is away."""

import hashlib
import threading
from contextlib import aclosing

import anyio
import obstore
import pytest
from obstore.exceptions import NotFoundError
from obstore.store import S3Store

from tests.backends.servers import ACCESS, BUCKET, LIMIT_S, object_server
from ucm.backends.abc import Presence, Verdict
from ucm.backends.envelope import HEADER_BYTES
from ucm.backends.object import ObjectBackend, _path
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


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Run a server for all tests of this file."""
    with object_server(tmp_path_factory.mktemp("weed")) as (server, url):
        yield server, url


def name_of(place):
    """Return the prefix of a test's own."""
    return hashlib.sha256(str(place).encode()).hexdigest()[:16]


async def open_objects(url, place, /, **settings):
    """Open a bucket below a prefix."""
    options = ACCESS | {"aws_endpoint": url, "aws_region": "us-east-1"}
    given = {
        "url": f"s3://{BUCKET}/{name_of(place)}",
        "options": options,
        "client": {"allow_http": True},
        "timeout": LIMIT_S,
    }
    return await ObjectBackend.open_configured(given | settings, "tiers.0")


class TestObjectBackend(BackendContract):
    """A prefix for each test, looked at by a client of the test's own."""

    @pytest.fixture(autouse=True)
    def _service(self, service):
        self.url = service[1]

    def bypass(self, place):
        """Return a client that knows nothing of blocks."""
        return S3Store(
            BUCKET,
            prefix=name_of(place),
            config=ACCESS | {"aws_endpoint": self.url, "aws_region": "us-east-1"},
            client_options={"allow_http": True},
        )

    async def open(self, place):
        """Open the prefix."""
        return await open_objects(self.url, place)

    async def open_small(self, place):
        """Room is the service's affair."""

    def get_raw(self, place, key):
        """Get the object."""
        try:
            return bytes(obstore.get(self.bypass(place), _path(key)).bytes())
        except (NotFoundError, FileNotFoundError):
            return None

    def put_raw(self, place, key, raw):
        """Put an object in its place."""
        obstore.put(self.bypass(place), _path(key), raw)

    def leftovers(self, place):
        """Look for objects that are no blocks of the contract's."""
        wanted = {_path(key) for key in make_keys(64)}
        listed = obstore.list(self.bypass(place)).collect()
        return [one["path"] for one in listed if one["path"] not in wanted]


@pytest.mark.asyncio
class TestService:
    async def test_racing_creates_leave_one_block(self, service, tmp_path):
        """R-51: losers are told that it is there, or that nobody knows; never wrongly."""
        verdicts = []
        async with aclosing(await open_objects(service[1], tmp_path)) as backend:

            async def put():
                verdicts.extend(await backend.put([seal(KEYS[0])]))

            async with anyio.create_task_group() as group:
                for _ in range(16):
                    group.start_soon(put)
            assert 1 == verdicts.count(Verdict.DONE)
            assert {Verdict.DONE, Verdict.PRESENT} >= set(verdicts)
            assert [True] == await fetch_sound(backend, KEYS[:1])

    async def test_stopped_server_ends_at_the_deadline(self, service, tmp_path):
        """R-52: no answer in time, whatever is asked; answers when it goes on, and nothing is deleted then."""
        async with aclosing(await open_objects(service[1], tmp_path)) as backend:
            await backend.put([seal(KEYS[0])])
            late = DeadlineBackend(backend, 0.3)
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
            assert [True] == await fetch_sound(backend, KEYS[:1])
            await backend.aclose()  # behind the threads that were asked
            assert 0 == backend._crew.num_hung
        again = await open_objects(service[1], tmp_path)
        async with aclosing(again):
            assert [True] == await fetch_sound(again, KEYS[:1])

    async def test_nothing_of_a_caller_that_has_left_is_used(self, service, tmp_path):
        """R-52: its memory is another's once the call has ended, whatever a service sends behind that."""
        async with aclosing(await open_objects(service[1], tmp_path)) as backend:
            await backend.put([seal(KEYS[0])])
            late, target = DeadlineBackend(backend, 0.3), bytearray(BLOCK)
            service[0].stop()
            try:
                (got,) = await late.get(KEYS[:1], [memoryview(target)])
                assert Verdict.UNAVAILABLE is got.verdict
            finally:
                service[0].go_on()
            await backend.aclose()  # behind the thread that was asked
            assert 0 == backend._crew.num_hung
            assert bytes(BLOCK) == target

    async def test_deletion_is_behind_a_put_whose_caller_has_left(
        self, service, tmp_path, monkeypatch
    ):
        """R-55: what is put too late is deleted behind that; until then it is not known to be
        absent. Else it would be there again once it was told to be forgotten."""
        goes_on, put = threading.Event(), obstore.put

        def late_put(*args, **kwargs):
            goes_on.wait(LIMIT_S)
            return put(*args, **kwargs)

        monkeypatch.setattr(obstore, "put", late_put)
        async with aclosing(await open_objects(service[1], tmp_path)) as backend:
            late, told = DeadlineBackend(backend, 0.3), []

            async def delete():
                told.extend(await backend.delete(KEYS[:1]))

            assert [Verdict.UNAVAILABLE] == await late.put([seal(KEYS[0])])
            assert [Verdict.UNAVAILABLE] == await late.delete(KEYS[:1])
            async with anyio.create_task_group() as group:
                group.start_soon(delete)
                await anyio.wait_all_tasks_blocked()
                goes_on.set()
            assert [Verdict.DONE] == told
            assert [Presence.ABSENT] == await backend.exists(KEYS[:1])

    async def test_server_that_is_away_is_no_miss(self, tmp_path):
        """Nobody listens: unknown and unavailable, from the start, and no error."""
        async with aclosing(
            await open_objects("http://127.0.0.1:9", tmp_path, timeout=0.2)
        ) as backend:
            assert [Presence.UNKNOWN] == await backend.exists(KEYS[:1])
            ((got, _),) = await fetch(backend, KEYS[:1])
            assert Verdict.UNAVAILABLE is got.verdict
            assert [Verdict.UNAVAILABLE] == await backend.put([seal(KEYS[0])])

    async def test_huge_object_is_not_fetched(self, service, tmp_path):
        """A foreign object of another length is garbage; no more of it is asked for than a block has."""
        async with aclosing(await open_objects(service[1], tmp_path)) as backend:
            await backend.put([seal(KEYS[0], 8 << 20)])
            ((got, _),) = await fetch(backend, KEYS[:1], BLOCK)
            assert Verdict.GARBAGE is got.verdict

    @pytest.mark.parametrize("length", [0, 1, HEADER_BYTES])
    async def test_object_that_is_cut_short_is_garbage(
        self, service, tmp_path, length: int
    ):
        """Also one without a byte, of which a service gives no range: else it is asked for again and again."""
        async with aclosing(await open_objects(service[1], tmp_path)) as backend:
            await backend.put([seal(KEYS[0])])
            obstore.put(backend._store, _path(KEYS[0]), bytes(length))
            ((got, _),) = await fetch(backend, KEYS[:1], BLOCK)
            assert Verdict.GARBAGE is got.verdict

    async def test_wrong_credentials_are_refused_without_being_told(
        self, service, tmp_path
    ):
        """At start, by the setting's name and the service's own word, as for a clock that is
        wrong; no secret is in the text, and no thread is left."""
        options = {"aws_access_key_id": "ucm", "aws_secret_access_key": "hush-hush"}
        options |= {"aws_endpoint": service[1], "aws_region": "us-east-1"}
        with pytest.raises(ConfigError, match="SignatureDoesNotMatch") as caught:
            await open_objects(service[1], tmp_path, options=options)
        assert "tiers.0.options" == caught.value.key
        assert "refuses the credentials" in str(caught.value)
        assert "hush" not in str(caught.value)
        names = {thread.name for thread in threading.enumerate()}
        assert "ucm-object" not in names

    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({"url": "s4://bucket"}, "url"),
            ({"url": ""}, "url"),
            ({"url": 3}, "url"),
            ({"url": "s4://user:hush-hush@bucket"}, "url"),
            ({"options": {"aws_no_such": "x"}}, "url"),
            ({"options": {"aws_region": 3}}, "options"),
            ({"client": ["x"]}, "client"),
            ({"requests": 0}, "requests"),
            ({"bucket": "x"}, "bucket"),
            ({"url": "s4:/user:hush-hush@bucket"}, "url"),
            ({"options": {"aws_allow_http": "true"}}, "url"),
        ],
    )
    async def test_wrong_setting_is_named(self, service, tmp_path, settings, key):
        """Refused at start, by its dotted key."""
        with pytest.raises(ConfigError) as caught:
            await open_objects(service[1], tmp_path, **settings)
        assert "hush" not in str(caught.value)
        assert f"tiers.0.{key}" == caught.value.key
