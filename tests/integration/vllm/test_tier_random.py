# SPDX-License-Identifier: Apache-2.0
"""Many requests at once over a small CPU tier, and a small store that fails and rots."""

import random
from pathlib import Path

import attrs
import pytest

from tests.e2e.connector import corrupt
from tests.integration.vllm.tier_kit import (
    CHUNK,
    Engine,
    content_of,
    engine,
    keys_of,
    plant,
    slab,
)
from ucm.errors import BlockNotFoundError, StoreUnavailableError
from ucm.testing.faults import Fault, FaultPlan

STEPS = 300
VERBS = ("contains", "reserve", "seal", "commit", "read", "verify", "recheck")


@attrs.define
class Asked:
    """A request and the keys of its prompt."""

    name: str
    keys: list[bytes]
    patience: int


class World:
    """
    Steps of an engine that is asked at random, each hit held against its bytes.

    Args:
        one: The engine's half.
        rng: Decides everything.
    """

    def __init__(self, one: Engine, rng: random.Random) -> None:
        self._one = one
        self._rng = rng
        self._open: list[Asked] = []
        self._number = 0
        self.hits = 0

    def step(self) -> None:
        """Begin a request now and then, look up for all, and end a step."""
        if len(self._open) < 6 and self._rng.random() < 0.6:
            self._begin()
        for asked in self._rng.sample(self._open, len(self._open)):
            self._serve(asked)
        self._one.step()
        if self._rng.random() < 0.3:
            self._one.wait_a_moment()

    def end(self) -> None:
        """Have all requests end."""
        for asked in self._open:
            self._one.finish(asked.name)
        self._open.clear()
        self._one.settle()

    def _begin(self) -> None:
        self._number += 1
        trunk = self._rng.choice("abc")
        length = self._rng.randrange(1, 7)
        shared = self._rng.randrange(length + 1)
        own = keys_of(length, trunk + self._rng.choice("xyz"))[shared:]
        keys = keys_of(shared, trunk) + own
        name = self._one.request(f"r{self._number}", keys)
        self._open.append(Asked(name, keys, self._rng.randrange(40)))

    def _serve(self, asked: Asked) -> None:
        """Do what an engine does with a request: wait, load, compute, or give up."""
        found = self._one.find(asked.name, asked.keys)
        asked.patience -= 1
        if found is None and asked.patience > 0:
            return
        if found:
            head = asked.keys[:found]
            content = self._one.content(asked.name, head)
            assert [content_of(key) for key in head] == content
            self.hits += found
        if found is not None and found < len(asked.keys):
            self._one.compute(asked.name, asked.keys[found:])
        self._one.finish(asked.name)
        self._open.remove(asked)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_chunk_is_wrong_and_nothing_is_left(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-81: whatever fails or rots and whoever gives up, a hit has its own bytes, and in
    the end each chunk of the CPU tier is free to be evicted."""
    rng = random.Random(seed)

    def fail() -> None:
        if rng.random() < 0.1:
            raise rng.choice(
                [StoreUnavailableError("gone"), BlockNotFoundError(b"k"), OSError(5)]
            )

    plant(monkeypatch, FaultPlan(*(Fault(verb, fail, nth=0) for verb in VERBS)))
    store = slab(tmp_path / "slab", str(20 * CHUNK))
    settings = {
        "timeout": {"load": 0.01, "fetch": 60.0},
        "queue": {"span_bytes": 2 * CHUNK},
    }
    with engine(store, chunks=12, **settings) as one:
        world = World(one, rng)
        for _ in range(STEPS):
            world.step()
            if rng.random() < 0.03:
                one.settle()  # what is not sealed yet has no checksum
                corrupt(tmp_path / "slab")
        world.end()
        assert 0 < world.hits
        assert {} == one.tier._jobs
        assert 0 == len(one.tier._lookups)
        assert 0 < one.tier._cache.statistics().loaded_blocks
        primary = one.primary
        assert 0 == primary._num_write_pending_chunks
        free = primary._get_num_free_chunks()
        assert 12 == free + primary._num_evictable_cache_chunks
