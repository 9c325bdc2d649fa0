# SPDX-License-Identifier: Apache-2.0
"""A core under wants, saves and evictions, over a tier that fails, hangs, reorders and lies."""

import random

import anyio
import pytest

from tests.agent.unruly import Behaviour, Unruly, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent.hits import Hits
from ucm.backends.envelope import HEADER_BYTES
from ucm.blocks import PackedKey
from ucm.errors import BlockNotFoundError, StoreFullError
from ucm.stores.slab import SlabStore
from ucm.testing.store_blocks import load, make_keys, payload, save

KEYS = make_keys(120)
LATE_S = 0.001


def behave(rng: random.Random) -> Behaviour:
    """Return what a tier does for a while; mostly it is well."""
    return Behaviour(
        delay=rng.choice([0.0, 0.0, 0.01, 0.3, 2.5]),
        hangs=rng.random() < 0.05,
        is_down=rng.random() < 0.05,
        lies_present=rng.random() < 0.1,
        flips=rng.random() < 0.2,
        keeps=rng.random() < 0.9,
    )


def check_bytes(slab: SlabStore, backend: Unruly) -> None:
    """Hold every block that can be seen against the bytes that its key stands for."""
    for key in KEYS:
        try:
            assert [payload(key)] == load(slab, [key])
        except BlockNotFoundError:
            continue
    for key, value in backend.shelf.values.items():
        assert payload(key) == value[HEADER_BYTES:]


class Life:
    """One run, from one seed."""

    def __init__(self, slab: SlabStore, seed: int) -> None:
        self.slab = slab
        self.rng = random.Random(seed)
        self.backend = Unruly()
        self.overdue: list[float] = []
        self.num_found = 0

    async def run(self) -> tuple:
        """Have it all happen; return the core."""
        async with open_core(self.slab, self.backend, most_waiting=20) as core:
            async with anyio.create_task_group() as tasks:
                for _ in range(60):
                    tasks.start_soon(self._want, core)
                    self._save()
                    if self.rng.random() < 0.3:
                        self.backend.does = behave(self.rng)
                    await anyio.sleep(self.rng.choice([0.0, 0.01, 0.2, 1.0]))
                    check_bytes(self.slab, self.backend)
            self.backend.does = Behaviour()
            await anyio.sleep(60.0)
            await core.drain()
            return core

    def _save(self) -> None:
        first = self.rng.randrange(len(KEYS))
        keys: list[PackedKey] = KEYS[first : first + self.rng.randrange(1, 9)]
        if self.rng.random() < 0.2:
            self.slab.forget(keys)
        else:
            try:
                save(self.slab, keys)
            except StoreFullError:
                return

    async def _want(self, core) -> None:
        first = self.rng.randrange(len(KEYS))
        want = want_of(
            KEYS[first : first + self.rng.randrange(1, 12)],
            seconds=self.rng.choice([0.05, 0.5, 3.0]),
            hold_s=1.0,
        )
        if self.rng.random() < 0.5:
            numbers = range(1, len(want.keys) + 1)
            last = [self.rng.choice([0, at, at + 3]) for at in numbers]
            want.hits = Hits(numbers, last, len(want.keys))
        await core.fetch(want)
        self.overdue.append(anyio.current_time() - want.deadline)
        self.num_found += want.found
        await anyio.sleep(self.rng.choice([0.0, 0.5]))
        core.drop(want)


class TestCore:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(12))
    def test_whatever_a_tier_does_no_byte_is_wrong(self, seed: int, tmp_path) -> None:
        """R-53, R-55, X-04: no wrong byte is seen, no want waits beyond its deadline, and
        when all is over each block and each slot is accounted for."""
        with open_slab(tmp_path / "slab", 32) as slab:
            life = Life(slab, seed)
            core = run_virtual(life.run)
            check_bytes(slab, life.backend)
            assert 60 == len(life.overdue)
            assert LATE_S > max(life.overdue)
            spiller, fetcher = core.spillers[0], core.fetcher
            spilled, fetched = spiller.counts, fetcher.counts
            ended = spilled.spilled + spilled.skipped + sum(spilled.dropped.values())
            assert (spilled.offered, True) == (ended, spiller.is_idle)
            landed = fetched.fetched + fetched.stored + sum(fetched.failed.values())
            assert (fetched.begun, 0) == (landed, fetcher.num_open)
            assert fetcher._budget.total == fetcher._budget.left
            assert 0 == slab.stats().reserved_blocks
            assert [] == slab.audit()
