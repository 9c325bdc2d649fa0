# SPDX-License-Identifier: Apache-2.0
"""Blocks as objects of a Mooncake Store: a real one, and each of its client's codes."""

import ctypes
import os
import sys
import threading
from types import SimpleNamespace
from typing import ClassVar

import anyio
import pytest

from tests.backends.mooncake_kit import run_inside, why_not
from ucm.backends.abc import Fetched, Presence, Verdict
from ucm.backends.envelope import Envelope
from ucm.backends.mooncake import _STAGED_BYTES, MooncakeBackend, MooncakeSettings
from ucm.errors import ConfigError
from ucm.settings import read_section
from ucm.testing.backend_contract import BackendContract, fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(3)


class FakeClient:
    """
    What the client does of which the backend knows, over a dictionary.

    Args:
        objects: Of the store, by name.
    """

    codes: ClassVar[dict[str, int]] = {}
    """What a name answers instead, as if it had come to harm."""
    joins = 0
    """What joining answers."""

    def __init__(self, objects):
        self.objects, self.registered, self.is_closed = objects, [], False

    def setup(self, *_):
        """Join."""
        return self.joins

    def close(self):
        """End; whatever is called behind it crashes the real one."""
        assert not self.is_closed
        self.is_closed = True

    def register_buffer(self, address, nbytes):
        """Make memory known."""
        self.registered.append((address, nbytes))
        return 0

    def _told(self, name, answer):
        assert not self.is_closed
        return self.codes.get(name, answer)

    def batch_is_exist(self, names):
        """1 or 0, or a code."""
        return [self._told(name, int(name in self.objects)) for name in names]

    def get_size(self, name):
        """Bytes, or a code."""
        return len(self.objects[name]) if name in self.objects else -704

    def batch_remove(self, names, force):
        """0 or a code."""
        assert force
        told = [self._told(n, 0 if n in self.objects else -704) for n in names]
        for name, code in zip(names, told, strict=True):
            if not code:
                del self.objects[name]
        return told

    def batch_put_from_multi_buffers(self, names, addresses, sizes, _):
        """0 or a code; what is there stays."""
        told = []
        for name, *pieces in zip(names, addresses, sizes, strict=True):
            told.append(self._told(name, 0))
            data = b"".join(map(ctypes.string_at, *pieces))
            if not told[-1]:
                self.objects.setdefault(name, data)
        return told

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        """Bytes read, or a code."""
        told = []
        for name, places, lengths in zip(names, addresses, sizes, strict=True):
            data = self.objects.get(name)
            if data is None or name in self.codes:
                told.append(self._told(name, -704))
            elif len(data) != sum(lengths):
                told.append(-600 if len(data) > sum(lengths) else -800)
            else:
                for place, length in zip(places, lengths, strict=True):
                    ctypes.memmove(place, data[:length], length)
                    data = data[length:]
                told.append(sum(lengths))
        return told


def fake_native(objects, client=FakeClient):
    """Return what stands for the client's module."""
    return SimpleNamespace(
        MooncakeDistributedStore=lambda: client(objects),
        ReplicateConfig=lambda: SimpleNamespace(replica_num=1),
    )


def settings(**given):
    """Read settings."""
    return read_section(MooncakeSettings, given, "tiers.0.")


class TestFakeClient(BackendContract):
    """The fake behaves as the real store does in ``mooncake_inside.py``."""

    @pytest.fixture(autouse=True)
    def _objects(self):
        self.objects = {}

    async def open(self, place):
        """Join the dictionary."""
        return MooncakeBackend(fake_native(self.objects), settings())

    async def open_small(self, place):
        """Room is the store's affair."""

    def get_raw(self, place, key):
        """Look it up."""
        return self.objects.get("ucm/" + key.hex())

    def put_raw(self, place, key, raw):
        """Put it there; what is empty cannot be."""
        self.objects.pop("ucm/" + key.hex())
        if raw:
            self.objects["ucm/" + key.hex()] = raw


@pytest.mark.asyncio
class TestCodes:
    @pytest.mark.parametrize("code", [-900, -901, -707, -706, -800, -1, 2])
    async def test_code_that_says_nothing_of_a_block_is_no_answer(self, code):
        """R-51: none of them is a hit or a miss, and what is beside it is told of."""
        objects = {}
        backend = MooncakeBackend(fake_native(objects), settings())
        assert [Verdict.DONE] * 3 == await backend.put([seal(key) for key in KEYS])
        FakeClient.codes = {"ucm/" + KEYS[1].hex(): code}
        try:
            here, silent, done = Presence.PRESENT, Verdict.UNAVAILABLE, Verdict.DONE
            assert [here, Presence.UNKNOWN, here] == await backend.exists(KEYS)
            told = [one.verdict for one, _ in await fetch(backend, KEYS)]
            assert [done, silent if code < 0 else Verdict.GARBAGE, done] == told
            put = await backend.put([seal(key) for key in KEYS])
            assert [Verdict.PRESENT, silent, Verdict.PRESENT] == put
            assert [done, silent, done] == await backend.delete(KEYS)
        finally:
            FakeClient.codes = {}
        await backend.aclose()

    async def test_object_that_goes_while_it_is_read_is_absent(self):
        """R-51: its bytes did not come, and when it is asked how long it is it is gone."""
        objects = {}

        class Going(FakeClient):
            def batch_get_into_multi_buffers(self, names, *_):
                objects.clear()
                return [-800] * len(names)

        backend = MooncakeBackend(fake_native(objects, Going), settings())
        await backend.put([seal(key) for key in KEYS])
        told = [one.verdict for one, _ in await fetch(backend, KEYS)]
        assert [Verdict.ABSENT] * 3 == told
        await backend.aclose()

    async def test_master_that_is_silent_is_asked_once(self):
        """R-52: each question to it takes a time-out, in a call that nobody can end."""
        asked = []

        class Silent(FakeClient):
            def batch_get_into_multi_buffers(self, names, *_):
                return [-800] * len(names)

            def get_size(self, name):
                asked.append(name)
                return -900

        backend = MooncakeBackend(fake_native({}, Silent), settings())
        told = [one.verdict for one, _ in await fetch(backend, KEYS)]
        assert ([Verdict.UNAVAILABLE] * 3, 1) == (told, len(asked))
        await backend.aclose()

    async def test_put_that_its_master_forgets_is_no_answer(self):
        """A master that was started again amid a put says that there is no such object."""

        class Forgetful(FakeClient):
            def batch_put_from_multi_buffers(self, names, *_):
                return [-704] * len(names)

        backend = MooncakeBackend(fake_native({}, Forgetful), settings())
        put = await backend.put([seal(key) for key in KEYS])
        assert [Verdict.UNAVAILABLE] * 3 == put
        await backend.aclose()

    async def test_no_room_is_told(self):
        """A store that is full is no store that is away."""

        class Full(FakeClient):
            def batch_put_from_multi_buffers(self, names, *_):
                self.objects[names[1]] = b""
                return [-200, 0, -900]

        backend = MooncakeBackend(fake_native({}, Full), settings())
        verdicts = await backend.put([seal(key) for key in KEYS])
        assert [Verdict.FULL, Verdict.DONE, Verdict.UNAVAILABLE] == verdicts
        await backend.aclose()


@pytest.mark.asyncio
class TestJoining:
    async def test_master_that_comes_later_is_found(self):
        """Nobody there is no answer, and each verb asks again."""

        class Later(FakeClient):
            joins = -1

        backend = MooncakeBackend(fake_native({}, Later), settings())
        assert [Presence.UNKNOWN] * 3 == await backend.exists(KEYS)
        assert [Fetched(Verdict.UNAVAILABLE)] * 3 == [
            got for got, _ in await fetch(backend, KEYS)
        ]
        Later.joins = 0
        assert [Presence.ABSENT] * 3 == await backend.exists(KEYS)
        await backend.aclose()

    async def test_join_that_outlasts_who_asked_counts(self):
        """A store that takes longer to join than any verb may is joined once, served by, and
        left at the end."""
        made, may_join = [], threading.Event()

        class Slow(FakeClient):
            def setup(self, *_):
                made.append(self)
                assert may_join.wait(60)
                return 0

        backend = MooncakeBackend(fake_native({}, Slow), settings())
        with anyio.move_on_after(0.01) as asking:
            await backend.exists(KEYS)
        assert asking.cancelled_caught
        may_join.set()
        await backend._joining.wait()
        assert [Presence.ABSENT] * 3 == await backend.exists(KEYS)
        assert 1 == len(made)
        await backend.aclose()
        assert made[0].is_closed

    @pytest.mark.parametrize("protocol", ["tcp", "rdma"])
    async def test_network_cards_know_the_memory(self, protocol):
        """What they copy from and to is registered, also what came before joining."""
        made = []

        class Seen(FakeClient):
            def __init__(self, objects):
                super().__init__(objects)
                made.append(self)

        native = fake_native({}, Seen)
        backend = MooncakeBackend(native, settings(protocol=protocol, threads=3))
        slots = [memoryview(bytearray(4096)), memoryview(bytearray(8192))]
        await backend.register(slots[:1])
        assert [Presence.ABSENT] * 3 == await backend.exists(KEYS)
        await backend.register(slots[1:])
        sizes = sorted(nbytes for _, nbytes in made[0].registered)
        assert ([] if protocol == "tcp" else [1280] * 3 + [4096, 8192]) == sizes
        await backend.aclose()


@pytest.mark.asyncio
class TestSettings:
    @pytest.mark.parametrize(
        "master", ["", "here", "here:", ":1", "here:0", "a:70000", 7]
    )
    async def test_wrong_address_is_refused(self, master):
        """No client is imported for it."""
        with pytest.raises(ConfigError, match=r"tiers\.0\.master.*10\.0\.0\.1:50051"):
            await MooncakeBackend.open_configured({"master": master}, "tiers.0")

    async def test_missing_client_says_what_to_install(self, monkeypatch):
        """The wheel and the system's library are named."""
        monkeypatch.setitem(sys.modules, "mooncake.store", None)
        with pytest.raises(ConfigError, match=r"\.\[mooncake\].*libibverbs1"):
            await MooncakeBackend.open_configured({}, "tiers.0")


@pytest.mark.asyncio
class TestTimeouts:
    async def test_client_is_told_when_to_give_up(self, monkeypatch):
        """R-52: nodes that stop before, amid and behind a block; and that no transfer is to
        wait for another one's connection. What the operator has set stays."""
        told = {"MC_RPC_TIMEOUT_MS": "7"}
        monkeypatch.setattr(os, "environ", told)
        monkeypatch.setitem(sys.modules, "mooncake.store", fake_native({}))
        backend = await MooncakeBackend.open_configured({"timeout": 2.5}, "tiers.0")
        assert {
            "MC_RPC_TIMEOUT_MS": "7",
            "MC_RPC_CONNECT_TIMEOUT_MS": "2500",
            "MC_TCP_STATUS_TIMEOUT_SEC": "3",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
            "MC_TCP_LANES_PER_PEER": "16",
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        } == told
        await backend.aclose()

    @pytest.mark.parametrize(
        ("nbytes", "parts"), [(4096, 1), (_STAGED_BYTES, 1), (_STAGED_BYTES + 1, 2)]
    )
    @pytest.mark.parametrize("threads", [2, 4])
    async def test_calls_at_a_time_wait_two_time_outs(self, nbytes, parts, threads):
        """R-52: their transfers, one for a block or two for a large one, are twice the
        connections of a node, so that one which has stopped is waited for twice."""
        transfers = []

        class Counting(FakeClient):
            def batch_get_into_multi_buffers(self, names, addresses, sizes):
                transfers.append(sum(map(len, addresses)))
                return super().batch_get_into_multi_buffers(names, addresses, sizes)

        backend = MooncakeBackend(fake_native({}, Counting), settings(threads=threads))
        await fetch(backend, make_keys(33), nbytes)
        assert 33 * parts == sum(transfers)
        assert 2 * 16 == threads * max(transfers)
        await backend.aclose()

    async def test_many_threads_move_a_block_each(self):
        """More of them than there are transfers at a time still move what they are given."""
        backend = MooncakeBackend(fake_native({}), settings(threads=40))
        keys = make_keys(41)
        assert [Verdict.DONE] * 41 == await backend.put([seal(key) for key in keys])
        assert [True] * 41 == await fetch_sound(backend, keys)
        await backend.aclose()


@pytest.mark.asyncio
class TestStaging:
    @pytest.mark.parametrize("protocol", ["tcp", "rdma"])
    @pytest.mark.parametrize("nbytes", [_STAGED_BYTES, _STAGED_BYTES + 1])
    async def test_bytes_are_the_same_however_they_go(self, protocol, nbytes):
        """An object is the envelope and the block, copied before or not, and comes back whole."""
        objects = {}
        backend = MooncakeBackend(fake_native(objects), settings(protocol=protocol))
        blocks = [seal(key, nbytes) for key in KEYS] + [seal(make_keys(4)[3], 4096)]
        assert [Verdict.DONE] * 4 == await backend.put(blocks)
        for one in blocks:
            header = Envelope(one.key, len(one.data), one.checksum).encode()
            assert header + one.data == objects["ucm/" + one.key.hex()]
        assert [True] * 3 == await fetch_sound(backend, KEYS, nbytes)
        await backend.aclose()


@pytest.mark.slow
def test_real_store_keeps_the_contract(tmp_path):
    """R-51, R-52: ``mooncake_inside.py``, with a master and nodes that are killed."""
    reason, environment = why_not(tmp_path)
    if reason:
        pytest.skip(reason)
    told = run_inside(environment, "tests/backends/mooncake_inside.py")
    assert told.endswith("ends with 0"), told
    assert " passed" in told
