# SPDX-License-Identifier: Apache-2.0
"""Fetch: what others write to the slab, and what it loses, while blocks are on their way."""

from collections.abc import Callable

import anyio
import pytest

from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import die, open_slab
from ucm.reasons import Reason
from ucm.stores.abc import WriteLease
from ucm.testing.store_blocks import BLOCK_BYTES, fill, load, make_keys, payload, save

KEYS = make_keys(8)
WRITTEN_S = 1.0


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 64 blocks, of which a fetch may have eight."""
    with open_slab(tmp_path / "slab", 64) as store:
        yield store


@pytest.fixture
def other(slab, tmp_path):
    """Return the same slab, as another engine has it."""
    with open_slab(tmp_path / "slab", 64) as store:
        yield store


def publish(lease: WriteLease) -> None:
    """Write all of it, and let it be seen."""
    fill(lease)
    lease.commit()


def fetch_beside(slab, backend, lease: WriteLease, end: Callable, **terms: object):
    """Want all blocks while another writes those of *lease*, which *end* ends after a while."""

    async def fetch():
        await lay(backend, KEYS)
        async with open_core(slab, backend) as core:
            want = want_of(KEYS, **terms)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(core.fetch, want)
                await anyio.sleep(WRITTEN_S)
                end(lease)
            now = anyio.current_time()
            await anyio.sleep(WRITTEN_S)
            core.drop(want)
            budget = core.fetcher._budget
            assert (0, budget.total) == (core.fetcher.num_open, budget.left)
            return want, now, core.fetcher.counts

    return run_virtual(fetch)


class TestWritten:
    def test_block_that_another_commits_meanwhile_is_used(self, slab, other) -> None:
        """R-53: what another engine is writing is there once it has, and comes from no tier."""
        backend = Unruly()
        lease = other.reserve(KEYS[2:4], BLOCK_BYTES)
        want, now, counts = fetch_beside(slab, backend, lease, publish)
        assert (8, Reason.NONE) == (want.found, want.reason)
        assert [1, 1, 0, 0, 1, 1, 1, 1] == want.media
        assert WRITTEN_S <= now < 1.1 * WRITTEN_S
        assert {*KEYS[:2], *KEYS[4:]} == set(backend.got)
        assert (2, 6, {}) == (counts.stored, counts.fetched, counts.failed)

    def test_tier_is_not_asked_while_another_writes(self, slab, other) -> None:
        """R-53: waiting for a writer costs the tier no question."""
        backend = Unruly()
        lease = other.reserve(KEYS, BLOCK_BYTES)
        asked = []

        def end(lease: WriteLease) -> None:
            asked.extend(backend.asked)
            publish(lease)

        want, _, _ = fetch_beside(slab, backend, lease, end)
        assert (8, ["exists"]) == (want.found, asked)

    @pytest.mark.parametrize("dies", [False, True])
    def test_block_whose_writer_gives_up_is_fetched(self, slab, other, dies) -> None:
        """R-53: where nothing comes of another's write, or it dies, the tier brings the block."""

        def end(lease: WriteLease) -> None:
            if dies:
                die(other)
            else:
                lease.discard()

        lease = other.reserve(KEYS[2:4], BLOCK_BYTES)
        want, now, counts = fetch_beside(slab, Unruly(), lease, end)
        assert (8, Reason.NONE) == (want.found, want.reason)
        assert now < 1.1 * WRITTEN_S
        assert (0, 8, {}) == (counts.stored, counts.fetched, counts.failed)
        assert [payload(key) for key in KEYS] == load(slab, KEYS)

    def test_writer_that_does_not_end_costs_a_want_its_deadline(
        self, slab, other
    ) -> None:
        """R-54: nobody waits for a writer longer than it said, and nothing of it is left."""
        lease = other.reserve(KEYS[2:4], BLOCK_BYTES)
        seconds = WRITTEN_S / 2
        want, _, counts = fetch_beside(
            slab, Unruly(), lease, lambda _: None, seconds=seconds
        )
        assert (2, Reason.DEADLINE) == (want.found, want.reason)
        assert {Reason.DEADLINE: 2} == counts.failed

    def test_block_on_its_way_for_who_may_use_other_tiers_is_waited_for(
        self, slab
    ) -> None:
        """R-53, R-58: two that want a block from different tiers have it once, and both."""
        backend = Unruly()
        backend.does.delay = WRITTEN_S

        async def fetch():
            await lay(backend, KEYS)
            async with open_core(slab, backend, Unruly(shared=True)) as core:
                wants = [want_of(KEYS[:4]), want_of(KEYS[:4], only=[("", "local")])]
                async with anyio.create_task_group() as tasks:
                    for want in wants:
                        tasks.start_soon(core.fetch, want)
                return wants, core.fetcher.counts

        (first, second), counts = run_virtual(fetch)
        assert (4, 4) == (first.found, second.found)
        assert (KEYS[:4], 4, 4) == (backend.got, counts.fetched, counts.stored)


class Late(Unruly):
    """Takes its time to say what it has."""

    async def exists(self, keys):
        """Wait, then look."""
        await anyio.sleep(WRITTEN_S / 2)
        return await super().exists(keys)


class TestTiers:
    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_each_tier_has_one_turn_where_a_writer_gives_up(
        self, slab, other, order
    ) -> None:
        """R-51, R-53: a tier that had not told by then is asked for what the one that had does not bring,
        and one that failed is not asked again: the former was forgotten, and the block said to be nowhere."""
        late, quick = Late(), Unruly()
        quick.does.flips = True
        lease = other.reserve(KEYS[:1], BLOCK_BYTES)

        async def fetch():
            await lay(late, KEYS[:1])
            await lay(quick, KEYS[:1])
            tiers = [(late, quick)[at] for at in order]
            async with open_core(slab, *tiers) as core:
                want = want_of(KEYS[:1], seconds=2.0)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, want)
                    await anyio.sleep(0.9 * WRITTEN_S)
                    lease.discard()
                return want

        want = run_virtual(fetch)
        assert (1, [1 + order.index(0)]) == (want.found, want.media)
        assert (KEYS[:1], KEYS[:1]) == (quick.got, late.got)


class TestFull:
    def test_block_that_another_writes_to_a_full_slab_is_told_apart(
        self, slab, other
    ) -> None:
        """R-53: where no slot can be had, what others write is used all the same."""
        backend = Unruly()
        lease = other.reserve(KEYS[:2], BLOCK_BYTES)
        with other.reserve(make_keys(62, first=100), BLOCK_BYTES):
            want, _, counts = fetch_beside(slab, backend, lease, publish)
        assert (2, Reason.STORE_FULL) == (want.found, want.reason)
        assert ([], 2) == (backend.got, counts.stored)
        assert {Reason.STORE_FULL: 6} == counts.failed


class Overtaken(Unruly):
    """Is asked for blocks that somebody saves before they are got."""

    def __init__(self, slab) -> None:
        super().__init__()
        self._slab = slab

    async def exists(self, keys):
        """Say what is here, too late."""
        told = await super().exists(keys)
        save(self._slab, keys)
        return told


class TestSpeed:
    def test_block_that_a_save_brought_says_nothing_of_its_tier(self, slab) -> None:
        """R-53: only what a tier brought tells how fast it is."""
        backend = Overtaken(slab)

        async def fetch():
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                await core.fetch(want := want_of(KEYS))
                flights = core.fetcher._flights
                return want, flights._choices[0], flights._lines[0]

        want, choice, line = run_virtual(fetch)
        assert (8, [0] * 8) == (want.found, want.media)
        assert (0, 0) == (choice.speed.num_seen, line._speed.num_seen)


class Forgetful(Unruly):
    """Has the slab lose a block while others are got."""

    def __init__(self, slab) -> None:
        super().__init__()
        self._slab = slab

    async def get(self, keys, targets):
        """Get."""
        self._slab.forget(KEYS[2:3])
        return await super().get(keys, targets)


class TestGone:
    def test_block_that_goes_before_the_rest_has_come_is_not_told_of(
        self, slab
    ) -> None:
        """R-53: a want says of its blocks what is there at its end, and why not more."""
        save(slab, KEYS[:4])
        backend = Forgetful(slab)

        async def fetch():
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                await core.fetch(want := want_of(KEYS))
                return want

        want = run_virtual(fetch)
        assert (2, Reason.EVICTED) == (want.found, want.reason)
        assert [True, True, False] == slab.contains(KEYS[:3])
