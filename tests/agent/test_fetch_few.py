# SPDX-License-Identifier: Apache-2.0
"""Fetch: what small blocks cost beside their bytes, and what a guess may not cost."""

import anyio

from tests.agent.unruly import (
    TIMEOUT_S,
    Unruly,
    guarded,
    inline,
    lay,
    open_core,
    run_virtual,
    want_of,
)
from tests.stores.slab_kit import open_slab
from ucm.agent.core import AgentCore
from ucm.agent.landing import land
from ucm.reasons import Reason
from ucm.stores import leases
from ucm.stores.slab import _leases
from ucm.testing.store_blocks import make_keys, save

KEYS = make_keys(40)


class TestFewRequests:
    def test_batch_costs_two_calls_of_the_slab(self, tmp_path) -> None:
        """R-53: slots are taken in one call on a thread, and published in another."""
        called = []

        async def counted(function):
            called.append(function)
            return await inline(function)

        async def fetch(slab):
            await lay(backend := Unruly(), KEYS[:8])
            core = AgentCore(slab, [guarded(backend)], counted)
            async with anyio.create_task_group() as tasks:
                ready = anyio.Event()
                tasks.start_soon(core.fetcher.run, ready.set)
                await ready.wait()
                await core.fetch(want_of(KEYS[:8]))
                tasks.cancel_scope.cancel()

        with open_slab(tmp_path / "slab", 80) as slab:
            run_virtual(lambda: fetch(slab))
        assert 2 + 2 * 2 == len(called)  # two batches; and two looks at what is there

    def test_next_blocks_come_while_those_before_are_looked_at(self, tmp_path) -> None:
        """R-53: a drive does not stand still while checksums are compared."""
        backend = Unruly(in_flight=1)
        backend.does.delay = 1.0

        async def slow(function):
            if getattr(function, "func", None) is land:
                await anyio.sleep(1.0)
            return await inline(function)

        async def fetch(slab):
            await lay(backend, KEYS[:12])
            async with open_core(slab, backend, call=slow) as core:
                want = want_of(KEYS[:12])
                await core.fetch(want)
                return want.found, anyio.current_time()

        with open_slab(tmp_path / "slab", 120) as slab:
            found, now = run_virtual(lambda: fetch(slab))
        # One question, three calls one behind the other, and the last one's look.
        assert (12, 1 + 3 + 1) == (found, round(now))

    def test_bytes_are_hashed_once_on_their_way(self, tmp_path, monkeypatch) -> None:
        """R-55: to a tier and from it a block goes with the checksum that seals its slot."""
        hashed, real = [], _leases.digests_of

        def digests_of(slots, positions, seeds, *more):
            hashed.extend(positions)
            return real(slots, positions, seeds, *more)

        def block_checksum(key, data):
            hashed.append(key)
            return 0

        monkeypatch.setattr(_leases, "digests_of", digests_of)
        monkeypatch.setattr(leases, "block_checksum", block_checksum)
        backend, counts = Unruly(), []

        async def move(slab):
            async with open_core(slab, backend) as core:
                await core.drain()
                counts.append(len(hashed))
                slab.clear(b"")
                await core.fetch(want := want_of(KEYS[:8]))
                assert 8 == want.found

        with open_slab(tmp_path / "slab", 80) as slab:
            save(slab, KEYS[:8])
            hashed.clear()
            run_virtual(lambda: move(slab))
        assert [8, 16] == [*counts, len(hashed)]

    def test_hole_that_a_look_passed_over_ends_the_want(self, tmp_path) -> None:
        """R-53: a tier that is not asked for each block says with the bytes what it lacks."""
        backend = Unruly(shared=True)

        async def fetch(slab):
            await lay(backend, [*KEYS[:20], *KEYS[21:]])
            async with open_core(slab, backend) as core:
                want = want_of(KEYS)
                await core.fetch(want)
                return want, core

        with open_slab(tmp_path / "slab", 400) as slab:
            want, core = run_virtual(lambda: fetch(slab))
        assert (20, Reason.ABSENT) == (want.found, want.reason)
        assert 1 == core.fetcher.counts.failed[Reason.ABSENT]

    def test_tier_before_another_is_asked_for_each_block(self, tmp_path) -> None:
        """R-53: what a tier lacks in the middle comes from the next one, and the rest from
        the first."""
        first, second = Unruly(shared=True), Unruly(shared=True)

        async def fetch(store):
            await lay(first, [*KEYS[:21], *KEYS[22:]])
            await lay(second, KEYS[21:22])
            async with open_core(store, first, second) as core:
                want = want_of(KEYS)
                await core.fetch(want)
                return want

        with open_slab(tmp_path / "large", 400) as store:
            want = run_virtual(lambda: fetch(store))
        assert (40, KEYS[21:22]) == (want.found, second.got)
        assert KEYS[21] not in first.got

    def test_tier_before_another_has_more_looks_than_fit_into_a_call(
        self, tmp_path
    ) -> None:
        """R-51, R-53: a long prompt's blocks are looked for in several calls; one of all of them did not
        end in time, and a few such prompts had the tier taken for silent."""

        class Slow(Unruly):
            async def exists(self, keys):
                await anyio.sleep(len(keys) * TIMEOUT_S / 20)
                return await super().exists(keys)

        first = Slow(shared=True)

        async def fetch(store):
            await lay(first, KEYS)
            async with open_core(store, first, Unruly(shared=True)) as core:
                want = want_of(KEYS)
                await core.fetch(want)
                return want

        with open_slab(tmp_path / "large", 400) as store:
            want = run_virtual(lambda: fetch(store))
        assert (40, Reason.NONE) == (want.found, want.reason)
