# SPDX-License-Identifier: Apache-2.0
"""On whose terms a want is fetched: from which tiers, how soon, and whether at all."""

import anyio
import pytest

from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.reasons import Reason
from ucm.testing.store_blocks import load, make_keys, payload, save, uses_at

KEYS = make_keys(80)


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 64 blocks, of which a fetch may have eight."""
    with open_slab(tmp_path / "slab", 64) as store:
        yield store


def fetch(slab, *backends, laid, **terms):
    """Fetch four blocks of tiers in which some are laid; return the want."""

    async def run():
        for backend, keys in zip(backends, laid, strict=True):
            await lay(backend, keys)
        async with open_core(slab, *backends) as core:
            want = want_of(KEYS[:4], **terms)
            await core.fetch(want)
            assert 0 == core.fetcher.num_open
            return want

    return run_virtual(run)


class TestNextTier:
    @pytest.mark.parametrize("trouble", ["flips", "lies_present", "fails_get"], ids=str)
    def test_what_one_tier_fails_to_bring_the_next_one_brings(
        self, slab, trouble
    ) -> None:
        """R-51, R-53: damaged, gone or unavailable in the first tier, a block is whole in the
        second, and comes from there."""
        first, second = Unruly(), Unruly()
        setattr(first.does, trouble, True)
        laid = [] if trouble == "lies_present" else KEYS[:4]
        want = fetch(slab, first, second, laid=[laid, KEYS[:4]])
        assert (4, Reason.NONE) == (want.found, want.reason)
        assert [payload(key) for key in KEYS[:4]] == load(slab, KEYS[:4])

    def test_what_no_tier_brings_says_why_the_first_did_not(self, slab) -> None:
        """R-51: two tiers that fail are asked once each, and the reason is a tier's own."""
        first, second = Unruly(), Unruly()
        first.does.fails_get = second.does.flips = True
        want = fetch(slab, first, second, laid=[KEYS[:4], KEYS[:4]])
        assert (0, Reason.CORRUPT) == (want.found, want.reason)
        assert [1, 1] == [each.asked.count("get") for each in (first, second)]


class TestOnly:
    @pytest.mark.parametrize(
        ("only", "found"),
        [
            (None, 4),
            ((), 0),
            ((("memory", ""),), 4),
            ((("cpu", "local"),), 4),
            ((("storage", ""),), 0),
            ((("disk", ""), ("", "local")), 4),
            ((("memory", "remote"),), 0),
        ],
    )
    def test_only_tiers_that_are_meant_are_asked(self, slab, only, found) -> None:
        """R-58: by the tier's own word, or the engine's; any of the entries will do."""
        backend = Unruly()
        want = fetch(slab, backend, laid=[KEYS[:4]], only=only)
        assert (found, found > 0) == (want.found, "exists" in backend.asked)

    def test_storage_and_remote_are_what_the_engine_calls_so(self, slab) -> None:
        """R-58: what survives a process is storage, what others see is remote."""
        near, far = Unruly(), Unruly(durable="node", shared=True, medium="s3")
        only = [("storage", "remote")]
        want = fetch(slab, near, far, laid=[KEYS[:4], KEYS[:4]], only=only)
        assert (4, 0, 4) == (want.found, len(near.got), len(far.got))

    def test_restricted_want_does_not_fail_another(self, slab) -> None:
        """R-58, R-53: a flight that may not use the tier which has a block is not joined by
        who may."""
        near, far = Unruly(), Unruly(shared=True)
        near.does.delay = 1.0

        async def run():
            await lay(far, KEYS[:4])
            async with open_core(slab, near, far) as core:
                tight = want_of(KEYS[:4], only=[("", "local")])
                free = want_of(KEYS[:4])
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, tight)
                    await anyio.sleep(0.1)
                    tasks.start_soon(core.fetch, free)
                return tight.found, free.found

        assert (0, 4) == run_virtual(run)


class TestPriority:
    @pytest.mark.parametrize(
        ("wants", "order"),
        [
            ((("a", 8, 5), ("b", 16, 0)), ["b", "a"]),
            ((("a", 8, 5), ("b", 16, 3), ("c", 8, 0)), ["a", "c", "b"]),
        ],
        ids=["of its own", "of who joins"],
    )
    def test_lowest_priority_has_its_slots_first(self, slab, wants, order) -> None:
        """R-58: of those who wait for slots the most urgent is next, whoever came first; who
        wants what another waits for has the other come as early as itself."""

        async def run():
            backend, ended = Unruly(), []
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                first = want_of(KEYS[:8])
                await core.fetch(first)

                async def fetch_one(name, start, priority):
                    want = want_of(KEYS[start : start + 8], priority=priority)
                    await core.fetch(want)
                    ended.append(name)
                    core.drop(want)

                async with anyio.create_task_group() as tasks:
                    for name, start, priority in wants:
                        tasks.start_soon(fetch_one, name, start, priority)
                        await anyio.sleep(0.1)
                    core.drop(first)
                await anyio.sleep(1.0)  # slots come back behind the flights' end
                return ended, core.fetcher._budget.left

        assert (order, 8) == run_virtual(run)


class TestTenant:
    def test_fetched_blocks_take_their_tenants_share(self, tmp_path) -> None:
        """R-55: a tenant that has its share of the slab makes room among its own blocks, and
        leaves all others theirs, also where its blocks come from a tier."""
        with open_slab(tmp_path / "slab", 64, tenant_share=0.125) as slab:
            uses = [uses_at([at] * 8, tenant) for at, tenant in ((1, 3), (2, 7))]
            save(slab, KEYS[:8], uses=uses[0])
            save(slab, KEYS[8:16], uses=uses[1])

            async def run():
                await lay(backend := Unruly(), KEYS)
                async with open_core(slab, backend) as core:
                    want = want_of(KEYS[16:24], tenant=7)
                    await core.fetch(want)
                    return want.found

            assert 8 == run_virtual(run)
            there = slab.contains(KEYS[:24])
        assert [True] * 8 + [False] * 8 + [True] * 8 == there

    def test_want_beyond_its_tenants_share_takes_no_kept_block(self, tmp_path) -> None:
        """R-55: what is kept for one request is not taken for the same tenant's next."""
        with open_slab(tmp_path / "slab", 64, tenant_share=0.09375) as slab:

            async def run():
                await lay(backend := Unruly(), KEYS)
                async with open_core(slab, backend) as core:
                    await core.fetch(first := want_of(KEYS[:4], tenant=7))
                    await core.fetch(second := want_of(KEYS[4:8], tenant=7))
                    return first, second

            first, second = run_virtual(run)
            there = slab.contains(KEYS[:8])
        assert (4, Reason.NONE) == (first.found, first.reason)
        assert (2, Reason.STORE_FULL) == (second.found, second.reason)
        assert [True] * 6 + [False] * 2 == there

    def test_later_blocks_of_a_want_take_no_slots_of_its_first(self, tmp_path) -> None:
        """R-53: what does not fit is what is of least use, however many calls it takes."""
        with open_slab(tmp_path / "slab", 64, tenant_share=0.09375) as slab:

            async def run():
                await lay(backend := Unruly(in_flight=1), KEYS)
                async with open_core(slab, backend) as core:
                    await core.fetch(want := want_of(KEYS[:8], tenant=7))
                    return want

            want = run_virtual(run)
        assert (6, Reason.STORE_FULL) == (want.found, want.reason)


class TestSlower:
    def run(self, slab, *backends, laid, times=5, compute_s=0.5):
        """Fetch other blocks again and again; return how it ended each time."""

        async def run():
            for backend, where in zip(backends, laid, strict=True):
                await lay(backend, [KEYS[at] for at in where])
            async with open_core(slab, *backends) as core:
                ends = []
                for start in range(0, 4 * times, 4):
                    keys = KEYS[start : start + 4]
                    want = want_of(keys, compute_s=compute_s)
                    began = anyio.current_time()
                    await core.fetch(want)
                    took = anyio.current_time() - began
                    ends.append((want.found, want.reason, took))
                    core.drop(want)
                    slab.forget(keys)
                return ends, core.fetcher.counts.failed[Reason.SLOWER]

        return run_virtual(run)

    def test_fetch_that_is_slower_than_computing_is_not_taken(self, slab) -> None:
        """R-59: once a tier is known to take a second, half a second of computing is not
        waited for; the want hears why as soon as it is known which tier it would be."""
        backend = Unruly()
        backend.does.delay = 1.0
        ends, counted = self.run(slab, backend, laid=[range(20)])
        assert [(4, Reason.NONE)] * 4 == [each[:2] for each in ends[:4]]
        assert (0, Reason.SLOWER, 1.0) == ends[4]
        assert 4 == counted

    @pytest.mark.parametrize("compute_s", [0.0, 1.5])
    def test_fetch_that_is_faster_or_not_measured_is_taken(
        self, slab, compute_s
    ) -> None:
        """R-59: an engine that has not measured itself, or is slower, is fetched for."""
        backend = Unruly()
        backend.does.delay = 1.0
        ends, _ = self.run(slab, backend, laid=[range(20)], compute_s=compute_s)
        assert {(4, Reason.NONE)} == {each[:2] for each in ends}

    def test_part_of_a_prefix_on_a_fast_tier_is_taken(self, slab) -> None:
        """R-59: where a slow tier has the rest, what is before it comes from the fast one."""
        fast, slow = Unruly(), Unruly()
        slow.does.delay = 1.0
        laid = (
            [at for at in range(20) if at % 4 < 2],
            [at for at in range(20) if at % 4 > 1],
        )
        ends, counted = self.run(slab, fast, slow, laid=laid)
        assert (2, Reason.SLOWER) == ends[4][:2]
        assert 2 == counted

    def test_slow_tier_is_tried_again_and_believed(self, slab) -> None:
        """R-59: a stale estimate recovers: one want in a few is fetched all the same."""
        backend = Unruly()
        backend.does.delay = 1.0

        async def run():
            await lay(backend, KEYS[:4])
            async with open_core(slab, backend) as core:
                found = []
                for number in range(80):
                    if number == 4:
                        backend.does.delay = 0.001
                    want = want_of(KEYS[:4], compute_s=0.5)
                    await core.fetch(want)
                    found.append(want.found)
                    core.drop(want)
                    slab.forget(KEYS[:4])
                return found

        found = run_virtual(run)
        assert [0] * 15 == found[4:19]
        assert {4} == set(found[-20:])
