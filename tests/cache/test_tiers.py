# SPDX-License-Identifier: Apache-2.0
"""Hosts of their own over one tier: what one has saved is warm for the other."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import ucm
from tests.cache.kit import HASHER, KEYSPACE, LAYOUT, keys_of, our_threads
from tests.cache.test_opening import pool_of
from tests.kit import agents
from tests.kit.file_tier import registration
from ucm.cache import aio
from ucm.cache.forgetting import Forgotten
from ucm.cache.sync import Cache
from ucm.reasons import Reason

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

ROOT = Path(__file__).resolve().parents[2]
KEYS = keys_of(6)
LIMIT_S = 60.0


class Place:
    """Machines with a slab each, and a tier that all have in common."""

    def __init__(self, shm: Path, tier: Path) -> None:
        self.shm, self.tier = shm, tier

    def config(self, name: str) -> dict[str, object]:
        """Return the settings of a machine."""
        return {
            "store": {"path": str(self.shm / name), "capacity": "1MiB"},
            "tiers": [{"type": "file-tier", "path": str(self.tier)}],
            "log": {"level": "off"},
        }

    @contextlib.contextmanager
    def machine(self, name: str, seed: int = 0) -> Iterator[tuple[Cache, dict]]:
        """Open a cache beside its agent, which is gone behind it."""
        pool = pool_of(seed=seed)
        given = {"layout": LAYOUT, "device": pool, "keyspace": KEYSPACE}
        with ucm.blocking.open(self.config(name), **given) as cache:
            until(lambda: cache._core.fetches.is_served)
            try:
                yield cache, pool
            finally:
                end_agent(cache)

    def stored(self) -> list[Path]:
        """Return the whole files of the tier."""
        found = self.tier.iterdir() if self.tier.exists() else ()
        return [path for path in found if not path.suffix]


def end_agent(cache: Cache | aio.Cache) -> None:
    """Kill the agent that a cache has started, and have it start no other."""
    client = cache._core.fetches._client
    launch, client._launch = client._launch, lambda: ""
    agents.end_agent(launch)


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert deadline > time.monotonic()
        time.sleep(0.005)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return where it all is; the slabs' paths are short."""
    path = registration(tmp_path / "registration")
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), str(ROOT)]))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        yield Place(Path(shm), tmp_path / "tier")


def content(pool: dict, blocks: range) -> bytes:
    """Return the bytes of blocks."""
    return b"".join(
        each[blocks.start : blocks.stop].tobytes() for each in pool.values()
    )


def spill(place: Place) -> bytes:
    """Save on one machine, and wait until the tier has it; return what was saved."""
    with place.machine("a") as (cache, pool):
        assert cache.save(KEYS, range(6)).wait_committed().is_whole
        until(lambda: len(place.stored()) == 6)
        return content(pool, range(6))


async def test_prompt_of_one_host_is_warm_for_another(place: Place) -> None:
    """R-41, R-53: cold on a machine, warm through the tier on the next, byte for byte;
    without the agent, which is killed, all that is in the slab still serves."""
    saved, pool = spill(place), pool_of(seed=1)
    async with ucm.open(
        place.config("b"), layout=LAYOUT, device=pool, keyspace=KEYSPACE
    ) as cache:
        fetches = cache._core.fetches
        await anyio.to_thread.run_sync(until, lambda: fetches.is_served)
        try:
            assert 0 == await cache.match(KEYS)
            fetched = await cache.prefetch(KEYS, timeout=LIMIT_S)
            assert (6, Reason.NONE) == (fetched.found, fetched.reason)
            assert (await cache.load(KEYS, range(6))).is_whole
            assert saved == content(pool, range(6))
        finally:
            await anyio.to_thread.run_sync(end_agent, cache)
        await anyio.to_thread.run_sync(until, lambda: not fetches.is_served)
        assert 6 == (await cache.prefetch(KEYS)).found
        cold = await cache.prefetch(keys_of(2, 1))
        assert (0, Reason.UNAVAILABLE) == (cold.found, cold.reason)
    assert set() == our_threads()


def test_block_that_rots_in_a_tier_is_a_miss(place: Place) -> None:
    """R-51, R-53: what lies before it is found, and it is loaded by nobody."""
    spill(place)
    for path in place.stored():
        if path.name.endswith(KEYS[3].hex()):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    with place.machine("b", seed=1) as (cache, pool):
        fetched = cache.prefetch(KEYS, timeout=LIMIT_S)
        assert (3, Reason.CORRUPT) == (fetched.found, fetched.reason)
        assert 3 == cache.load(KEYS[:3], range(3)).leading
        assert content(pool_of(), range(3)) == content(pool, range(3))


def test_what_is_forgotten_is_in_no_tier(place: Place) -> None:
    """R-41, R-53: it leaves the slab and its tiers, and no prefetch brings it back on any machine
    whose slab has it not; what nobody wants gone stays."""
    spill(place)
    with place.machine("a") as (cache, _):
        assert Forgotten(4, 4) == cache.forget(KEYS[:4])
        assert 2 == len(place.stored())
        assert 0 == cache.prefetch(KEYS, timeout=LIMIT_S).found
    with place.machine("b") as (cache, _):
        assert 0 == cache.prefetch(KEYS, timeout=LIMIT_S).found
        assert 2 == cache.prefetch(KEYS[4:], timeout=LIMIT_S).found
        assert Forgotten(2, 2) == cache.forget(KEYS[4:])
        assert [] == place.stored()


def test_what_has_another_salt_is_never_found(place: Place) -> None:
    """As the page says, whatever tiers have kept."""
    spill(place)
    with place.machine("a") as (cache, _):
        salted = HASHER.keys([0, *range(1, 6 * 16)], salt=b"forgotten")
        assert 0 == cache.prefetch(salted, timeout=LIMIT_S).found
