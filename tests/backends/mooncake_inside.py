# SPDX-License-Identifier: Apache-2.0
"""What a real Mooncake Store does; run by ``test_mooncake.py`` in a network of its own."""

import hashlib
import itertools
import os
import sys
from types import SimpleNamespace

import anyio
import pytest
from anyio.streams.text import TextReceiveStream
from mooncake.store import MooncakeDistributedStore

from tests.backends.mooncake_kit import cluster
from tests.kit.wall_clock import COMPILER, WallClock
from ucm.backends.abc import Fetched, Presence, Verdict
from ucm.backends.mooncake import MooncakeBackend
from ucm.backends.wrap import DeadlineBackend
from ucm.testing.backend_contract import BackendContract, fetch, fetch_sound, seal
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(8)
MEGABYTE = 1 << 20
_SILENT = Fetched(Verdict.UNAVAILABLE)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Run a master and two nodes for most tests of this file."""
    with cluster(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


def prefix_of(place):
    """Return what names begin with in a test of its own."""
    return hashlib.sha256(str(place).encode()).hexdigest()[:16] + "/"


async def open_mooncake(running, place, **settings):
    """Open a store with a prefix of the test's own, and patience for a busy machine."""
    given = {"master": running.master_address, "prefix": prefix_of(place)}
    given |= {"timeout": 3.0}  # of the process: the first one's counts
    return await MooncakeBackend.open_configured(given | settings, "tiers.0")


async def answers(backend, keys):
    """Wait until the store can be asked for each of some keys."""
    with anyio.fail_after(90):
        while _SILENT in [got for got, _ in await fetch(backend, keys)]:  # noqa: ASYNC110
            await anyio.sleep(0.1)  # nobody tells


class TestMooncakeBackend(BackendContract):
    """A prefix for each test, looked at by a client of the test's own."""

    @pytest.fixture(scope="class")
    @classmethod
    def looker(cls, service):
        """A client that knows nothing of blocks."""
        client = MooncakeDistributedStore()
        address = service.master_address
        assert 0 == client.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address
        )
        yield client
        client.close()

    @pytest.fixture(autouse=True)
    def _service(self, service, looker):
        self.service, self.bypass = service, looker

    async def open(self, place):
        """Join the store."""
        return await open_mooncake(self.service, place)

    async def open_small(self, place):
        """Room is the store's affair."""

    def get_raw(self, place, key):
        """Get the object."""
        return self.bypass.get(prefix_of(place) + key.hex()) or None

    def put_raw(self, place, key, raw):
        """Set another; none where it would be empty, which there cannot be."""
        name = prefix_of(place) + key.hex()
        self.bypass.remove(name, force=True)
        assert 0 == self.bypass.put(name, raw) or not raw


@pytest.mark.asyncio
class TestStore:
    async def test_many_blocks_take_several_calls(self, service, tmp_path):
        """Three hundred small ones and twenty large ones come back whole."""
        backend = await open_mooncake(service, tmp_path)
        small, large = make_keys(300), make_keys(20, first=500)
        assert [Verdict.DONE] * 300 == await backend.put([seal(k) for k in small])
        blocks = [seal(key, 2 * MEGABYTE) for key in large]
        assert [Verdict.DONE] * 20 == await backend.put(blocks)
        assert [True] * 300 == await fetch_sound(backend, small)
        assert [True] * 20 == await fetch_sound(backend, large, 2 * MEGABYTE)
        assert [Verdict.DONE] * 20 == await backend.delete(large)
        assert [Verdict.DONE] * 300 == await backend.delete(small)
        await backend.aclose()

    async def test_replicas_survive_a_node(self, tmp_path):
        """R-52: two copies: a node that is killed takes no block along for long."""
        with cluster(tmp_path) as running:
            backend = await open_mooncake(running, tmp_path, replicas=2)
            assert "node" == backend.capabilities.durable
            assert [Verdict.DONE] * 8 == await backend.put([seal(key) for key in KEYS])
            running.nodes[0].kill()
            await answers(backend, KEYS)
            assert [True] * 8 == await fetch_sound(backend, KEYS)
            await backend.aclose()

    async def test_block_that_a_dead_writer_had_begun_is_not_called_put(self, tmp_path):
        """R-57: the store keeps what an agent had begun that was killed, and says "done" to the next one."""
        with cluster(tmp_path, segments=(512 * MEGABYTE,)) as running:
            backend, keys = await open_mooncake(running, tmp_path), make_keys(96)
            command = [sys.executable, "-m", "tests.backends.mooncake_inside"]
            command += [running.master_address, str(tmp_path)]
            writer = await anyio.open_process(command, stdout=None, stderr=None)
            with anyio.fail_after(90):
                while Presence.PRESENT not in await backend.exists(keys):
                    pass
            writer.kill()
            await writer.wait()
            blocks = [seal(key, MEGABYTE) for key in keys]
            put = await backend.put(blocks)
            there = await backend.exists(keys)
            told = [one in (Verdict.DONE, Verdict.PRESENT) for one in put]
            assert {Presence.PRESENT} == set(itertools.compress(there, told))
            await backend.aclose()

    async def test_block_of_a_dead_node_is_unavailable_and_then_absent(self, tmp_path):
        """R-51: no miss while the store still names the node; what is elsewhere comes."""
        with cluster(tmp_path) as running:
            backend, keys = await open_mooncake(running, tmp_path), make_keys(40)
            await backend.put([seal(key) for key in keys])
            running.nodes[0].kill()
            seen = set()
            with anyio.fail_after(60):
                while Verdict.ABSENT not in seen:
                    seen = {got.verdict for got, _ in await fetch(backend, keys)}
                    assert Verdict.DONE in seen
                    assert {Verdict.ABSENT, Verdict.UNAVAILABLE, Verdict.DONE} >= seen
            there = await fetch_sound(backend, keys)
            assert 0 < sum(there) < 40
            await backend.aclose()

    async def test_stopped_node_ends_at_the_client_s_own_time(self, tmp_path):
        """R-52: no call is begun behind the deadline, and none of them hangs."""
        with cluster(tmp_path) as running:
            backend, keys = await open_mooncake(running, tmp_path), make_keys(200)
            await backend.put([seal(key) for key in keys])
            running.nodes[0].stop()
            late = DeadlineBackend(backend, 0.5)
            assert [_SILENT] * 200 == [got for got, _ in await fetch(late, keys)]
            await answers(backend, keys)  # the master has given the node up
            assert any(await fetch_sound(backend, keys))
            running.nodes[0].go_on()
            await backend.aclose()

    async def test_master_that_is_away_is_no_answer(self, tmp_path):
        """R-51, R-52: stopped, killed, back again; nobody takes its silence for a miss."""
        with cluster(tmp_path) as running:
            backend = await open_mooncake(running, tmp_path)
            await backend.put([seal(KEYS[0])])
            late = DeadlineBackend(backend, 20.0)
            running.master.stop()
            assert [Presence.UNKNOWN] * 2 == await late.exists(KEYS[:2])
            got = [one for one, _ in await fetch(late, KEYS[:2])]
            assert [_SILENT] * 2 == got
            assert [Verdict.UNAVAILABLE] == await late.put([seal(KEYS[1])])
            assert [Verdict.UNAVAILABLE] == await late.delete(KEYS[:1])
            running.master.go_on()
            await answers(backend, KEYS[:1])
            running.master.kill()
            assert [Presence.UNKNOWN] == await late.exists(KEYS[:1])
            fresh = await open_mooncake(running, tmp_path)  # not there at the start
            assert [Presence.UNKNOWN] == await fresh.exists(KEYS[:1])
            running.master.start()
            await answers(fresh, KEYS[:1])
            await fresh.aclose()
            await answers(backend, KEYS[:1])
            await backend.aclose()

    @pytest.mark.skipif(not COMPILER, reason="no C compiler for the clock")
    async def test_transfer_that_is_given_up_writes_into_nobody_s_memory(
        self, tmp_path
    ):
        """R-52: the client gives transfers up once its wall clock is a minute ahead, and they go on: none
        writes behind the end of its call."""
        clock = WallClock(tmp_path)
        with cluster(tmp_path, segments=(64 * MEGABYTE,)) as running:
            command = [sys.executable, "-m", "tests.backends.mooncake_child"]
            command += [running.master_address]
            env = os.environ | clock.env
            opened = anyio.open_process(command, env=env, stderr=None)
            with anyio.fail_after(120):
                async with await opened as child:
                    said = TextReceiveStream(child.stdout)
                    assert "asks" in await said.receive()
                    running.nodes[0].stop()
                    await child.stdin.send(b"\n")
                    heard = ""
                    for seconds in itertools.count(60, 60):  # until it is amid its get
                        with anyio.move_on_after(0.05):
                            heard = await said.receive()
                        if heard:
                            break
                        clock.jump(seconds)
                    assert ["has", Verdict.UNAVAILABLE] == heard.split()
                    running.nodes[0].go_on()
                    await child.stdin.send(b"\n")
                    assert "0" == (await said.receive()).strip()

    async def test_full_store_is_full_or_makes_room(self, tmp_path):
        """No room is told apart from no answer, and what is there stays right."""
        with cluster(tmp_path, segments=(32 * MEGABYTE,)) as running:
            backend, keys = await open_mooncake(running, tmp_path), make_keys(64)
            verdicts = []
            for key in keys:
                verdicts += await backend.put([seal(key, MEGABYTE)])
            assert Verdict.DONE in verdicts
            assert {Verdict.DONE, Verdict.FULL} >= set(verdicts)
            there = await fetch_sound(backend, keys, MEGABYTE)
            assert 0 < sum(there) <= 32
            await backend.aclose()


async def _write(address, place):
    """Put until killed."""
    running = SimpleNamespace(master_address=address)
    backend = await open_mooncake(running, place, threads=4)
    await backend.put([seal(key, MEGABYTE) for key in make_keys(96)])


if __name__ == "__main__":
    anyio.run(_write, *sys.argv[1:])
