# SPDX-License-Identifier: Apache-2.0
"""Fetch: of several hits of a request the longest comes of which all is there, and nothing else."""

import anyio
import pytest

from tests.agent.unruly import (
    TIMEOUT_S,
    Unruly,
    lay,
    open_core,
    run_virtual,
    want_of,
)
from tests.stores.slab_kit import open_slab
from ucm.agent.hits import Hits
from ucm.reasons import Reason
from ucm.testing.store_blocks import load, make_keys, payload, save

FULL, WINDOWS = make_keys(8), make_keys(16)[8:]
KEYS = [key for pair in zip(FULL, WINDOWS, strict=True) for key in pair]
"""Of each of eight hits the block of a full group, and one that this hit and the next need."""


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 128 blocks, of which a fetch may have sixteen."""
    with open_slab(tmp_path / "slab", 128) as store:
        yield store


def hits() -> Hits:
    """Return which hits need the keys."""
    numbers = range(1, 9)
    pairs = [span for hit in numbers for span in ((hit, 0), (hit, hit + 1))]
    return Hits(*zip(*pairs, strict=True), len(pairs))


def fetch(slab, *backends, laid, **terms):
    """Have the hits fetched; return the want and the core."""

    async def run():
        for backend, keys in zip(backends, laid, strict=True):
            await lay(backend, keys)
        async with open_core(slab, *backends) as core:
            want = want_of(KEYS, hits=hits(), **terms)
            await core.fetch(want)
            return want, core

    return run_virtual(run)


def needed(hit: int) -> list:
    """Return the keys that a hit needs."""
    of_hit = {*FULL[:hit], *WINDOWS[max(0, hit - 2) : hit]}
    return [key for key in KEYS if key in of_hit]


def test_longest_hit_of_which_all_is_there_is_brought(slab) -> None:
    """R-53: a prompt that goes on otherwise than what was stored has the windows of its own hit,
    and no other blocks; a block of it that the slab has stays there, too."""
    backend = Unruly()
    save(slab, [WINDOWS[3], WINDOWS[7]])
    want, core = fetch(slab, backend, laid=[[*FULL, *WINDOWS[:5]]])
    assert (5, Reason.ABSENT) == (want.reach, want.reason)
    assert needed(5) == want.keys
    assert (7, [1, 1, 1, 1, 0, 1, 1]) == (want.found, want.media)
    assert sorted(set(needed(5)) - {WINDOWS[3]}) == sorted(backend.got)
    assert [payload(key) for key in needed(5)] == load(slab, needed(5))
    assert 6 == core.fetcher.counts.fetched


def test_whole_prompt_that_is_there_is_brought(slab) -> None:
    """R-53: from several tiers, with what the longest hit needs."""
    first, second = Unruly(), Unruly()
    want, _ = fetch(slab, first, second, laid=[FULL[:6], [*FULL[6:], *WINDOWS[6:]]])
    assert (8, 10, Reason.NONE) == (want.reach, want.found, want.reason)
    assert (6, 4) == (len(first.got), len(second.got))
    assert [payload(key) for key in needed(8)] == load(slab, needed(8))


@pytest.mark.parametrize("laid", [[], FULL, WINDOWS])
def test_half_of_every_hit_is_nothing(slab, laid) -> None:
    """R-53: where no hit has all that it needs nothing is fetched."""
    backend = Unruly()
    want, core = fetch(slab, backend, laid=[laid])
    assert (0, 0, Reason.ABSENT) == (want.reach, want.found, want.reason)
    assert ([], 0) == (backend.got, core.fetcher.counts.begun)


def test_hit_has_no_more_blocks_than_there_are_slots(tmp_path) -> None:
    """R-53: eight slots bring the hit that needs eight blocks, whole."""
    with open_slab(tmp_path / "slab", 64) as slab:
        want, _ = fetch(slab, Unruly(), laid=[KEYS])
        assert (6, 8, Reason.STORE_FULL) == (want.reach, want.found, want.reason)


def test_tier_that_cannot_be_asked_is_no_miss(slab) -> None:
    """R-51: which hit it has is not known then."""
    backend = Unruly()
    backend.does.is_down = True
    want, _ = fetch(slab, backend, laid=[KEYS])
    assert (0, Reason.UNAVAILABLE) == (want.reach, want.reason)


def test_tier_that_does_not_say_what_it_has_costs_the_deadline(slab) -> None:
    """R-55: looks for hits are within the time of the want."""
    backend = Unruly()
    backend.does.delay = 1.0

    async def run():
        async with open_core(slab, backend) as core:
            want = want_of(KEYS, seconds=0.5, hits=hits())
            await core.fetch(want)
            return anyio.current_time() - want.deadline, want

    late, want = run_virtual(run)
    assert late < 0.01
    assert (0, 0, Reason.DEADLINE) == (want.reach, want.found, want.reason)


@pytest.mark.parametrize("gap", range(8))
def test_hit_with_a_gap_gives_way_to_the_one_before_it(slab, gap: int) -> None:
    """R-53: of a prefix in a shared tier not each block is looked for; where one of it is missing the
    hit that ends before it is brought, with what came already."""
    backend = Unruly(shared=True)
    there = [key for key in KEYS if key != FULL[gap]]
    want, core = fetch(slab, backend, laid=[there])
    assert (gap, needed(gap), Reason.ABSENT) == (want.reach, want.keys, want.reason)
    assert len(needed(gap)) == want.found == len(want.media)
    assert [payload(key) for key in needed(gap)] == load(slab, needed(gap))
    assert len(set(backend.got)) == len(backend.got)
    assert 2 * len(KEYS) >= core.fetcher.counts.begun


def test_damaged_block_costs_no_shorter_hit(slab) -> None:
    """R-53: a block that came damaged is nowhere: the hit that does without it is brought."""
    backend = Unruly()

    async def run():
        await lay(backend, KEYS)
        backend.shelf.values[WINDOWS[7]] = backend.shelf.values[WINDOWS[6]]
        async with open_core(slab, backend) as core:
            want = want_of(KEYS, hits=hits())
            await core.fetch(want)
            core.drop(want)
            await anyio.sleep(TIMEOUT_S)
            return want, core.fetcher

    want, fetcher = run_virtual(run)
    assert (7, len(needed(7)), Reason.CORRUPT) == (want.reach, want.found, want.reason)
    assert (0, fetcher._budget.total) == (fetcher.num_open, fetcher._budget.left)


class Uneven(Unruly):
    """A tier of which some calls take longer: by the first block, for so many seconds."""

    def __init__(self, seconds: dict) -> None:
        super().__init__()
        self._seconds = seconds

    async def get(self, keys, targets):
        """Wait, then get."""
        await anyio.sleep(self._seconds.get(keys[0], 0.0))
        return await super().get(keys, targets)


def test_hit_behind_a_damaged_one_does_not_wait_for_slots_of_its_own(tmp_path) -> None:
    """R-53, R-63: what is on its way for the longest hit has slots as well; a shorter one is brought that
    has no more than are left, at once."""
    backend = Uneven({FULL[4]: 0.2, FULL[6]: 1.0})
    spans = [span for hit in range(1, 9) for span in ((hit, 0), (hit, hit + 3))]

    async def run():
        await lay(backend, KEYS)
        backend.shelf.values[WINDOWS[4]] = backend.shelf.values[WINDOWS[0]]
        with open_slab(tmp_path / "slab", 104) as slab:  # a fetch may have thirteen
            async with open_core(slab, backend) as core:
                want = want_of(KEYS, hits=Hits(*zip(*spans, strict=True), 16))
                began = anyio.current_time()
                await core.fetch(want)
                return want, anyio.current_time() - began

    want, seconds = run_virtual(run)
    assert (1, 2, Reason.CORRUPT) == (want.reach, want.found, want.reason)
    assert seconds < 2.0


def test_tier_that_hangs_is_found_out_by_wants_that_wait_for_less(slab) -> None:
    """R-51, X-14: a look goes on when who wanted it has no time left, and how it ends counts: from then on
    nobody waits for that tier."""
    hung, well = Unruly(), Unruly()
    hung.does.hangs = True

    async def run():
        await lay(well, KEYS)
        async with open_core(slab, hung, well) as core:
            for key in FULL[:3]:
                early = want_of([key], seconds=TIMEOUT_S / 4, hits=Hits([1], [1], 1))
                await core.fetch(early)
                core.drop(early)
            await anyio.sleep(TIMEOUT_S)
            late = want_of(KEYS, seconds=TIMEOUT_S / 4, hits=hits())
            began = anyio.current_time()
            await core.fetch(late)
            return late, anyio.current_time() - began

    late, seconds = run_virtual(run)
    assert (8, 10, Reason.NONE) == (late.reach, late.found, late.reason)
    assert seconds < 0.01


def test_hit_of_which_a_part_would_come_late_is_computed_whole(slab) -> None:
    """R-59: where a tier would take longer for the end of a hit than computing, its beginning is
    of no use, and is not fetched."""
    near, far = Unruly(), Unruly()
    far.does.delay = 0.5

    async def run():
        await lay(near, KEYS[:8])
        await lay(far, KEYS[8:])
        async with open_core(slab, near, far) as core:
            wants = [
                want_of(KEYS, seconds=30.0, compute_s=seconds, hits=hits())
                for seconds in [0.0] * 5 + [0.1]
            ]
            for want in wants:
                near.got.clear()
                await core.fetch(want)
                core.drop(want)
                slab.clear(b"")
            return wants

    *first, last = run_virtual(run)
    assert {(8, 10)} == {(want.reach, want.found) for want in first}
    assert (0, Reason.SLOWER, []) == (last.found, last.reason, near.got)
