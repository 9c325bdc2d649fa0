# SPDX-License-Identifier: Apache-2.0
"""Fetch: a tier that takes its time to say what it has does not cost what another one has."""

import itertools

import anyio
import pytest

from tests.agent.unruly import TIMEOUT_S, Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent.admission import Admission
from ucm.agent.hits import Hits
from ucm.agent.locating import Looks
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(12)
NOTHING = [Admission.AGAIN] * 2
"""Of what is fetched from one tier is spilled to the other one."""


class Far(Unruly):
    """Takes its time to look, the last one for each further look, and none to get; counts what is asked."""

    def __init__(self, *look_s: float, **can: object) -> None:
        super().__init__(**can)
        self._look_s = itertools.chain(look_s, itertools.repeat(look_s[-1]))
        self.looks: list[int] = []

    async def exists(self, keys):
        """Wait, then look."""
        self.looks.append(len(keys))
        await anyio.sleep(next(self._look_s))
        return await super().exists(keys)


def fetched(tmp_path, near, far, seconds, **terms):
    """Fetch twelve blocks of which a tier has eight, and the next one four; return what came, and when."""

    async def run(slab):
        await lay(near, KEYS[:8])
        await lay(far, KEYS[8:])
        async with open_core(slab, near, far, rules=NOTHING) as core:
            want = want_of(KEYS, seconds, **terms)
            began = anyio.current_time()
            await core.fetch(want)
            seconds_of = anyio.current_time() - began
            core.drop(want)
            await anyio.sleep(2 * TIMEOUT_S)
            assert (0, {}) == (core.fetcher.num_open, core.fetcher._budget.held)
            return want, seconds_of, core

    with open_slab(tmp_path / "slab", 120) as slab:
        return run_virtual(lambda: run(slab))


def test_tier_that_is_slow_to_look_does_not_cost_what_another_has(tmp_path) -> None:
    """R-53: the blocks of the first tier come, though the next one says what it has when nobody waits any
    more; all of them were waited for to the deadline, and none came."""
    want, seconds, _ = fetched(tmp_path, Unruly(), Far(1.2), seconds=1.0)
    assert (8, Reason.UNAVAILABLE) == (want.found, want.reason)
    assert 0.5 == pytest.approx(seconds, abs=0.01)


def test_tier_that_answers_in_half_of_the_time_is_waited_for(tmp_path) -> None:
    """R-53: what it has as well comes with the rest."""
    want, _, _ = fetched(tmp_path, Unruly(), Far(0.4), seconds=1.0)
    assert (12, Reason.NONE) == (want.found, want.reason)


def test_tier_that_hangs_is_found_out_though_nobody_waits(tmp_path) -> None:
    """R-51, R-53: a question that is not waited for has its end, and is held against the tier."""
    far = Unruly()
    far.does.hangs = True

    async def run(slab):
        await lay(near := Unruly(), KEYS)
        async with open_core(slab, near, far, rules=NOTHING) as core:
            for key in KEYS[:3]:
                await core.fetch(want_of([key, bytes(len(key))], 1.0))
            await anyio.sleep(2 * TIMEOUT_S)
            return core.fetcher._tiers[1].is_open

    with open_slab(tmp_path / "slab", 120) as slab:
        assert run_virtual(lambda: run(slab))


def test_tier_is_waited_for_where_nothing_else_is_there(tmp_path) -> None:
    """R-53: there is nothing to be lost by it."""

    async def run(slab):
        await lay(far := Far(0.8), KEYS)
        async with open_core(slab, Unruly(), far) as core:
            want = want_of(KEYS, 1.0)
            await core.fetch(want)
            return want.found, want.reason

    with open_slab(tmp_path / "slab", 120) as slab:
        assert (12, Reason.NONE) == run_virtual(lambda: run(slab))


def test_tier_is_waited_for_where_all_or_nothing_is_of_use(tmp_path) -> None:
    """R-53: a part of a hit that needs all of its blocks is not fetched instead of it."""
    hits = Hits([1] * 12, [0] * 12, 12)
    want, _, _ = fetched(tmp_path, Unruly(), Far(0.4), seconds=1.0, hits=hits)
    assert (1, 12, Reason.NONE) == (want.reach, want.found, want.reason)


TWO_HITS = [1] * 8 + [2] * 4, [0] * 12
"""What the first tier has is the first hit."""


def test_hit_of_a_fast_tier_is_not_lost_to_a_slow_one(tmp_path) -> None:
    """R-53: of a model with windows, too, the hit comes that the answers of half of the time allow; the slow
    tier cost all of them."""
    hits = Hits(*TWO_HITS, 12)
    want, seconds, _ = fetched(tmp_path, Unruly(), Far(1.2), seconds=1.0, hits=hits)
    assert (1, 8, Reason.UNAVAILABLE) == (want.reach, want.found, want.reason)
    assert 0.5 == pytest.approx(seconds, abs=0.01)


def test_longer_hit_is_waited_for_until_half_of_the_time_is_over(tmp_path) -> None:
    """R-53: what a slower tier adds in that time is of the hit."""
    hits = Hits(*TWO_HITS, 12)
    want, _, _ = fetched(tmp_path, Unruly(), Far(0.4), seconds=1.0, hits=hits)
    assert (2, 12, Reason.NONE) == (want.reach, want.found, want.reason)


def test_hit_that_no_answer_allows_yet_is_waited_for(tmp_path) -> None:
    """R-53: where nothing can be lost by it, a tier has more than half of the time; and it is not asked
    twice for one hit, once to choose it and once to fetch it."""
    hits, far = Hits([1] * 12, [0] * 12, 12), Far(0.7)
    want, seconds, _ = fetched(tmp_path, Unruly(), far, seconds=1.0, hits=hits)
    assert (1, 12, Reason.NONE) == (want.reach, want.found, want.reason)
    assert 0.7 == pytest.approx(seconds, abs=0.01)
    assert [4] == far.looks


def test_hit_that_lost_a_tier_is_not_fetched_in_part(tmp_path) -> None:
    """R-53: where the first tier does not bring a hit after all, the others are waited for until they have
    told of all of it."""
    hits = Hits([1] * 12, [0] * 12, 12)
    near, middle, far = Unruly(), Unruly(), Far(0.7)
    near.does.fails_get = True

    async def run(slab):
        for tier, keys in (near, KEYS), (middle, KEYS[:6]), (far, KEYS[6:]):
            await lay(tier, keys)
        async with open_core(slab, near, middle, far) as core:
            want = want_of(KEYS, 1.0, hits=hits)
            await core.fetch(want)
            return want

    with open_slab(tmp_path / "slab", 120) as slab:
        want = run_virtual(lambda: run(slab))
    assert (1, 12, Reason.NONE) == (want.reach, want.found, want.reason)
    assert [2] * 6 + [3] * 6 == want.media


def test_search_goes_on_with_the_tier_that_answers(tmp_path) -> None:
    """R-53: where a slow tier does not say in half of the time whether it has the window of a longer hit,
    the first tier is asked for those of shorter ones; the slow one has one question at a time."""
    spans = [span for hit in range(1, 7) for span in ((hit, 0), (hit, hit))]
    hits = Hits(*zip(*spans, strict=True), 12)
    near, far = Unruly(), Far(1.2)

    async def run(slab):
        await lay(near, [*KEYS[::2], KEYS[1], KEYS[5]])
        async with open_core(slab, near, far) as core:
            want = want_of(KEYS, 1.0, hits=hits)
            await core.fetch(want)
            return want, anyio.current_time() - want.deadline, list(far.looks)

    with open_slab(tmp_path / "slab", 120) as slab:
        want, late, looks = run_virtual(lambda: run(slab))
    assert (3, 4, Reason.UNAVAILABLE) == (want.reach, want.found, want.reason)
    assert -0.5 == pytest.approx(late, abs=0.01)
    assert 1 == len(looks)


def asked(tmp_path, first, second, laid):
    """Fetch blocks that were laid in two tiers; return the want, and how long it took."""

    async def run(slab):
        for tier, keys in zip((first, second), laid, strict=True):
            await lay(tier, keys)
        async with open_core(slab, first, second, rules=NOTHING) as core:
            want = want_of(KEYS, 1.0)
            began = anyio.current_time()
            await core.fetch(want)
            return want, anyio.current_time() - began

    with open_slab(tmp_path / "slab", 120) as slab:
        return run_virtual(lambda: run(slab))


def test_first_tier_that_hangs_does_not_cost_what_the_next_one_has(tmp_path) -> None:
    """R-51, R-53: the next one is asked when an eighth of the time is over; each prompt waited for the first
    one's deadline, and most had nothing, until its circuit was open."""
    first, second = Unruly(), Unruly()
    first.does.hangs = True
    want, seconds = asked(tmp_path, first, second, ([], KEYS))
    assert (12, Reason.NONE) == (want.found, want.reason)
    assert 0.125 == pytest.approx(seconds, abs=0.01)


def test_first_tier_that_hangs_costs_no_hit_of_the_next_one(tmp_path) -> None:
    """R-51, R-53: nor of a model with windows."""
    first, second = Unruly(), Unruly()
    first.does.hangs = True

    async def run(slab):
        await lay(second, KEYS)
        async with open_core(slab, first, second, rules=NOTHING) as core:
            want = want_of(KEYS, 1.0, hits=Hits(*TWO_HITS, 12))
            await core.fetch(want)
            return want, want.deadline - anyio.current_time()

    with open_slab(tmp_path / "slab", 120) as slab:
        want, left = run_virtual(lambda: run(slab))
    assert (2, 12, Reason.NONE) == (want.reach, want.found, want.reason)
    assert 0.875 == pytest.approx(left, abs=0.01)


def test_next_tier_is_not_asked_for_what_the_first_one_says_in_time(tmp_path) -> None:
    """R-53: a tier that is well costs the next one nothing, also where it takes many calls to say all: each
    has an eighth of the time."""
    first, second = Far(0.12), Far(0.0)
    want, _ = asked(tmp_path, first, second, (KEYS, KEYS))
    assert (12, [4, 4, 4], []) == (want.found, first.looks, second.looks)


def test_first_tier_that_is_late_brings_what_both_have(tmp_path) -> None:
    """R-53: where the next one has told of a part only when its answer comes."""
    first, second = Far(0.2, 0.0), Far(0.0)
    want, seconds = asked(tmp_path, first, second, (KEYS, KEYS[:4]))
    assert (12, [1] * 12, []) == (want.found, want.media, second.got)
    assert 0.2 == pytest.approx(seconds, abs=0.01)


def test_what_was_guessed_behind_a_gap_is_asked_for_when_the_gap_is_closed(
    tmp_path,
) -> None:
    """R-53: a tier that lacks the beginning of a prefix, which a late one turns out to have, is asked for
    its end."""
    first, second = Far(0.2, 0.0), Far(0.0, shared=True)
    want, _ = asked(tmp_path, first, second, (KEYS[:8], KEYS[8:]))
    assert (12, Reason.NONE) == (want.found, want.reason)
    assert [1] * 8 + [2] * 4 == want.media


def test_nothing_is_fetched_behind_a_hole_in_all_tiers(tmp_path) -> None:
    """R-53: what is behind a block that no tier has stays where it is, also if a tier was asked for it."""
    first, second = Unruly(), Unruly()
    want, _ = asked(tmp_path, first, second, ([*KEYS[:3], *KEYS[4:]], []))
    assert (3, Reason.ABSENT) == (want.found, want.reason)
    assert KEYS[:3] == first.got


def test_tier_of_many_slow_calls_does_not_cost_what_another_has(tmp_path) -> None:
    """R-53: each is in time, and all of them are not; what they said by half of the time is used."""
    keys = make_keys(60)
    near, far, last = Unruly(), Far(0.11), Unruly()

    async def run(slab):
        await lay(near, keys[:4])
        await lay(far, keys[4:])
        async with open_core(slab, near, far, last) as core:
            want = want_of(keys, 1.0)
            await core.fetch(want)
            return want, want.deadline - anyio.current_time()

    with open_slab(tmp_path / "slab", 800) as slab:
        want, left = run_virtual(lambda: run(slab))
    assert (20, Reason.UNAVAILABLE) == (want.found, want.reason)
    assert 0.5 == pytest.approx(left, abs=0.01)


def test_question_that_ends_with_all_else_tells_nothing() -> None:
    """R-51: who waits for tiers of an agent that ends has an answer: it is not known."""

    async def run():
        tier = Unruly()
        tier.does.hangs = True
        async with anyio.create_task_group() as agent, anyio.create_task_group() as own:
            looks = Looks([tier], [0], anyio.current_time() + 10.0, agent)
            own.start_soon(lambda: looks.ask(KEYS, is_prefix=True))
            await anyio.sleep(1.0)
            agent.cancel_scope.cancel()
        return looks.is_unknown(KEYS[-1]), await looks.have(KEYS[:1])

    assert (True, [False]) == run_virtual(run)


def test_hit_that_was_told_of_while_shorter_ones_were_looked_for_is_brought(
    tmp_path,
) -> None:
    """R-53: a late tier answers for the longest hit while the next one is asked for shorter ones."""
    hits = Hits([1, 2, 3], [1, 2, 3], 3)
    first, second = Far(0.6, 0.0), Far(0.0, 0.11)

    async def run(slab):
        await lay(first, KEYS[2:3])
        async with open_core(slab, first, second, rules=NOTHING) as core:
            want = want_of(KEYS[:3], 1.0, hits=hits)
            await core.fetch(want)
            return want

    with open_slab(tmp_path / "slab", 120) as slab:
        want = run_virtual(lambda: run(slab))
    assert (3, 1, Reason.NONE) == (want.reach, want.found, want.reason)


def test_first_answer_of_many_is_used_where_nothing_else_is_there(tmp_path) -> None:
    """R-53: of a tier whose first call takes more than half of the time; all of its calls were waited for,
    and nothing was found."""
    want, seconds = asked(tmp_path, Far(0.6), Unruly(), (KEYS, []))
    assert (4, Reason.UNAVAILABLE) == (want.found, want.reason)
    assert 0.6 == pytest.approx(seconds, abs=0.01)


def test_block_that_no_tier_has_is_not_waited_for(tmp_path) -> None:
    """R-53: nor what is behind it, of a tier whose other calls take their time; they cost the whole time."""
    want, seconds = asked(tmp_path, Far(0.0, 3.0), Unruly(), ([], []))
    assert (0, Reason.ABSENT) == (want.found, want.reason)
    assert 0.125 == pytest.approx(seconds, abs=0.01)


def test_tier_is_asked_nothing_more_for_a_prompt_whose_time_is_over(tmp_path) -> None:
    """R-51: calls that nobody waited for made a slow tier slower for all who came behind."""
    far = Far(0.3)

    async def run(slab):
        async with open_core(slab, far, Unruly(), rules=NOTHING) as core:
            await core.fetch(want_of(make_keys(60), 1.0))
            await anyio.sleep(10.0)

    with open_slab(tmp_path / "slab", 800) as slab:
        run_virtual(lambda: run(slab))
    assert 4 == len(far.looks)


def test_late_tier_is_asked_for_what_the_next_one_fails_to_bring(tmp_path) -> None:
    """R-51, R-53: a tier that had not told when another was tried was never asked, and the block was said to
    be nowhere."""
    first, second = Far(0.6, 0.0), Unruly()
    second.does.flips = True
    want, _ = asked(tmp_path, first, second, (KEYS[:4], KEYS))
    assert ([1] * 4, Reason.CORRUPT) == (want.media, want.reason)
