# SPDX-License-Identifier: Apache-2.0
"""Blocks as values of yuanrong's data system: a real worker, and each of its client's codes."""

import hashlib
import os
import signal
from types import SimpleNamespace
from typing import ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from tests.backends.yuanrong_kit import Looker, why_not, worker
from ucm.backends import _yuanrong_client, yuanrong
from ucm.backends._yuanrong_client import Client
from ucm.backends.abc import Fetched, Presence, Verdict
from ucm.backends.wrap import BreakerBackend, DeadlineBackend
from ucm.backends.yuanrong import YuanrongBackend
from ucm.errors import ConfigError
from ucm.testing.backend_contract import BackendContract, fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(3)
_SILENT = Fetched(Verdict.UNAVAILABLE)


class FakeNative:
    """
    What the client does of which we know, over a dictionary.

    Args:
        values: Of the workers, by name.
    """

    WriteMode = SimpleNamespace(NONE_L2_CACHE_EVICT="evict")
    ExistenceOpt = SimpleNamespace(NX="nx")
    codes: ClassVar[dict[str, str]] = {}
    """What a verb answers instead, as if it had come to harm."""

    def __init__(self, values):
        self.values, self.lost, self.num_joined, self.asked = values, (), 0, []

    def KVClient(self, *_, connect_timeout_ms, req_timeout_ms):  # noqa: N802 - its name
        """Be one's own client."""
        assert 0 < connect_timeout_ms == req_timeout_ms
        return self

    def _say(self, verb, names=()):
        self.asked.append((verb, len(names)))
        if code := self.codes.get(verb):
            detail = "[x] Detail: code: [Key not found], msg: [y]"
            raise RuntimeError(f"code: [{code}], msg: [{detail}]")

    def init(self):
        """Join."""
        self._say("init")
        self.num_joined += 1

    def exist(self, names):
        """Tell of each."""
        self._say("exist", names)
        return [name in self.values for name in names]

    def get_buffers(self, names):
        """Values; none of what is lost, or an error where there is nothing at all."""
        self._say("get", names)
        found = [None if n in self.lost else self.values.get(n) for n in names]
        if not any(found):
            raise RuntimeError("code: [Key not found], msg: [Cannot get objects]")
        return found

    def msettx(self, names, values, write_mode, ttl_second, existence_opt):
        """All or nothing, of up to eight."""
        assert ("evict", 7, "nx") == (write_mode, ttl_second, existence_opt)
        self._say("set", names)
        if any(name in self.values for name in names):
            raise RuntimeError("code: [Object already exist error], msg: [object[a]]")
        self.values.update(zip(names, map(bytes, values), strict=True))

    def delete(self, names):
        """What is not there is no failure."""
        self._say("delete", names)
        for name in names:
            self.values.pop(name, None)
        return []


class Failing(FakeNative):
    """One verb of which fails."""

    def __init__(self, values, **codes):
        super().__init__(values)
        self.codes = codes


def ask(native, verb, names, values=()):
    """Return the words alone."""
    return Client(native, "here", 1, 1000, 7).answer(verb, names, list(values))[0]


class TestCodes:
    def test_each_verb_tells_of_each_block(self):
        """What is there, what is not, and what was there before; an absent one that is
        deleted is told apart though the client does not."""
        native = FakeNative({"a": b"1"})
        assert ["present", "absent"] == ask(native, "exists", ["a", "b"])
        assert ["done", "absent"] == ask(native, "get", ["a", "b"])
        assert ["present", "done"] == ask(native, "put", ["a", "b"], [b"2", b"3"])
        assert {"a": b"1", "b": b"3"} == native.values
        assert ["done", "absent", "done"] == ask(native, "delete", ["a", "c", "b"])
        assert ["absent"] * 2 == ask(native, "get", ["a", "b"])

    @pytest.mark.parametrize(
        "code", ["RPC unavailable", "Try again", "Not ready", "Runtime error", ""]
    )
    @pytest.mark.parametrize("verb", ["exist", "get", "set", "delete", "init"])
    def test_code_that_says_nothing_of_a_block_is_no_answer(self, verb, code):
        """R-51: neither a hit nor a miss, though its text may name another code inside."""
        native = Failing({"a": b"1"}, **{verb: code or "?"})
        ours = {"exist": "exists", "set": "put", "init": "get"}.get(verb, verb)
        told = ask(native, ours, ["b", "a"], [b"2", b"3"])
        assert ["unavailable"] * 2 == told

    def test_block_that_is_known_and_does_not_come_is_no_answer(self):
        """R-51: the worker that holds it is away; what nobody knows of is a miss."""
        native = FakeNative({"a": b"1", "b": b"2"})
        native.lost = ("a",)
        told = ask(native, "get", ["a", "b", "c"])
        assert ["unavailable", "done", "absent"] == told

    def test_no_room_is_told_and_asked_for_once(self):
        """A full worker says so behind a time-out, of which a call has no second one."""
        native = Failing({}, set="Out of memory")
        assert ["full"] * 4 == ask(native, "put", list("abcd"), [b"1"] * 4)
        assert [("init", 0), ("set", 1)] == native.asked

    def test_worker_that_comes_later_is_joined(self):
        """R-52: each call tries again, and joins once."""
        native = Failing({"a": b"1"}, init="RPC unavailable")
        client = Client(native, "here", 1, 1000, 7)
        assert (["unavailable"], []) == client.answer("exists", ["a"], [])
        native.codes = {}
        for _ in range(2):
            assert (["present"], []) == client.answer("exists", ["a"], [])
        assert 1 == native.num_joined


@pytest.mark.asyncio
class TestSettings:
    @pytest.mark.parametrize("worker", ["", "here", ":1", "here:0", "a:70000", 7])
    async def test_wrong_address_is_refused(self, worker):
        """No process is started for it."""
        with pytest.raises(ConfigError, match=r"tiers\.0\.worker.*10\.0\.0\.1:31501"):
            await YuanrongBackend.open_configured({"worker": worker}, "tiers.0")

    @pytest.mark.parametrize("prefix", ["ucm/", "a.b", "é", "x" * 64, 7])
    async def test_prefix_that_no_name_may_have_is_refused(self, prefix):
        """The client's alphabet is small, and its names are short."""
        with pytest.raises(ConfigError, match=r"tiers\.0\.prefix.*letters, digits"):
            await YuanrongBackend.open_configured({"prefix": prefix}, "tiers.0")

    async def test_missing_client_says_what_to_install(self, monkeypatch, tmp_path):
        """R-51: a package that is not there is told at the start, by its extra."""
        package = tmp_path / "yr" / "datasystem"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('no client')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(ConfigError, match=r"no client.*\.\[yuanrong\]"):
            await YuanrongBackend.open_configured({}, "tiers.0")

    async def test_process_that_ends_at_once_is_told(self, monkeypatch, tmp_path):
        """R-52: a client that crashes when it is loaded is no tier."""
        script = tmp_path / "crash.py"
        script.write_text("import os; os.abort()")
        fake = SimpleNamespace(__file__=str(script))
        monkeypatch.setattr(yuanrong, "_yuanrong_client", fake)
        with pytest.raises(ConfigError, match="its process ends, "):
            await YuanrongBackend.open_configured({}, "tiers.0")
        assert fake is not _yuanrong_client


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Run a worker for all tests of this file that want one."""
    if reason := why_not():
        pytest.skip(reason)
    logs = str(tmp_path_factory.mktemp("yuanrong"))
    with pytest.MonkeyPatch.context() as patch:  # the client logs to the home directory
        patch.setenv("DATASYSTEM_CLIENT_LOG_DIR", logs)
        with worker() as (server, address):
            yield SimpleNamespace(server=server, address=address)


def prefix_of(place):
    """Return what names begin with in a test of its own."""
    return hashlib.sha256(str(place).encode()).hexdigest()[:16] + ":"


async def open_yuanrong(running, place, **settings):
    """Open a backend with a prefix of the test's own."""
    given = {"worker": running.address, "prefix": prefix_of(place), "timeout": 60.0}
    return await YuanrongBackend.open_configured(given | settings, "tiers.0")


@pytest.mark.slow
class TestYuanrongBackend(BackendContract):
    """A prefix for each test, looked at by a client of the test's own."""

    @pytest.fixture(scope="class")
    @classmethod
    def looker(cls, service):
        """A client that knows nothing of blocks."""
        made = Looker(service.address)
        yield made
        made.close()

    @pytest.fixture(autouse=True)
    def _service(self, service, looker):
        self.service, self.looker = service, looker

    async def open(self, place):
        """Start a process."""
        return await open_yuanrong(self.service, place)

    async def open_small(self, place):
        """Room is the workers' affair."""

    def get_raw(self, place, key):
        """Get the value."""
        return self.looker.get(prefix_of(place) + key.hex())

    def put_raw(self, place, key, raw):
        """Set another."""
        self.looker.replace(prefix_of(place) + key.hex(), raw)


@pytest.mark.slow
@pytest.mark.asyncio
class TestWorker:
    async def test_many_blocks_take_several_calls(self, service, tmp_path):
        """Small ones, and large ones by shared memory, come back whole."""
        backend = await open_yuanrong(service, tmp_path)
        small, large = make_keys(50), make_keys(10, first=500)
        assert [Verdict.DONE] * 50 == await backend.put([seal(k) for k in small])
        blocks = [seal(key, 2 << 20) for key in large]
        assert [Verdict.DONE] * 10 == await backend.put(blocks)
        assert [True] * 50 == await fetch_sound(backend, small)
        assert [True] * 10 == await fetch_sound(backend, large, 2 << 20)
        assert [Verdict.DONE] * 60 == await backend.delete(small + large)
        await backend.aclose()

    async def test_full_worker_makes_room(self, service, tmp_path):
        """The newest is there, and no more than there is room for."""
        backend, keys = await open_yuanrong(service, tmp_path), make_keys(80)
        for key in keys:
            assert [Verdict.DONE] == await backend.put([seal(key, 1 << 20)])
        there = await fetch_sound(backend, keys, 1 << 20)
        assert there[-1]
        assert 0 < sum(there) < 64
        await backend.delete(keys)
        await backend.aclose()

    async def test_stopped_worker_ends_at_its_deadline(self, service, tmp_path):
        """R-51, R-52: by the client's time-out, or with its process by a shorter deadline;
        the loop goes on beside it, and the circuit opens. It is found again when it goes on,
        and when it comes back with nothing."""
        backend = await open_yuanrong(service, tmp_path, timeout=0.5)
        patient = await open_yuanrong(service, tmp_path)
        broken = BreakerBackend(
            DeadlineBackend(patient, 0.1), clock=anyio.current_time, pause_s=600.0
        )
        assert [Verdict.DONE] * 3 == await patient.put([seal(key) for key in KEYS])
        service.server.stop()
        try:
            assert [Presence.UNKNOWN] * 3 == await backend.exists(KEYS)
            assert [_SILENT] * 3 == [got for got, _ in await fetch(backend, KEYS)]
            assert [Verdict.UNAVAILABLE] * 3 == await backend.delete(KEYS)
            answered = []
            async with anyio.create_task_group() as group:

                async def wait():
                    answered.append(await fetch(patient, KEYS))

                group.start_soon(wait)
                # What waits with the interpreter's lock lets none pass.
                for _ in range(20):
                    await anyio.lowlevel.checkpoint()
                assert not answered
                group.cancel_scope.cancel()
            for _ in range(3):
                assert [Presence.UNKNOWN] * 3 == await broken.exists(KEYS)
            assert (True, 3) == (broken.is_open, broken.inner.num_late)
        finally:
            service.server.go_on()
        with anyio.fail_after(90):
            while await fetch_sound(backend, KEYS) != [True] * 3:
                pass
        service.server.kill()
        try:
            assert [Presence.UNKNOWN] * 3 == await backend.exists(KEYS)
        finally:
            service.server.start()
        await self.answers(backend, KEYS)
        assert [False] * 3 == await fetch_sound(backend, KEYS)
        await patient.aclose()
        await backend.aclose()

    async def answers(self, backend, keys):
        """Wait until the worker can be asked."""
        with anyio.fail_after(90):
            while Presence.UNKNOWN in await backend.exists(keys):  # noqa: ASYNC110
                await anyio.sleep(0.1)  # nobody tells

    async def test_process_that_dies_is_replaced(self, service, tmp_path):
        """R-52: its call has no answer, the next one has, and none is left behind."""
        backend = await open_yuanrong(service, tmp_path, processes=1)
        await backend.put([seal(key) for key in KEYS])
        (helper,) = backend._idle
        os.kill(helper.process.pid, signal.SIGKILL)
        helper.process.wait()
        assert [Presence.UNKNOWN] * 3 == await backend.exists(KEYS)
        assert [True] * 3 == await fetch_sound(backend, KEYS)
        (helper,) = backend._idle
        await backend.aclose()
        assert helper.process.returncode is not None
        assert [] == backend._ended
