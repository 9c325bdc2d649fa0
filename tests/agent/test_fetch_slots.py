# SPDX-License-Identifier: Apache-2.0
"""Fetch: wants that are short of slots do not wait for each other's."""

import anyio
import pytest

from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent.hits import Hits
from ucm.reasons import Reason
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(32)
LOOK_S = 0.1


class Far(Unruly):
    """Takes its time to look."""

    async def exists(self, keys):
        """Wait, then look."""
        await anyio.sleep(LOOK_S)
        return await super().exists(keys)


@pytest.fixture
def slab(tmp_path):
    """Return a slab of which a fetch may have eight blocks."""
    with open_slab(tmp_path / "slab", 64) as store:
        yield store


async def seconds_of(core, want, waits_s: float = 0.0) -> float:
    """Fetch after a while; return how long that took."""
    await anyio.sleep(waits_s)
    began = anyio.current_time()
    await core.fetch(want)
    return anyio.current_time() - began


async def let_go(core, want, waits_s: float) -> None:
    """Drop a want after a while."""
    await anyio.sleep(waits_s)
    core.drop(want)


class TestJoined:
    def test_who_joined_others_takes_no_slots_that_these_wait_for(self, slab) -> None:
        """R-53, R-63: of two prompts with one beginning the second one's end was found first; it had its
        slots, and each waited for the other's to its deadline. Now both have what they can have."""
        near, far = Unruly(), Far()

        async def run():
            await lay(far, KEYS[:6])
            await lay(near, KEYS[6:10])
            async with open_core(slab, near, far) as core:
                first = want_of(KEYS[:6], seconds=2.0, hold_s=1.0)
                second = want_of([*KEYS[:4], *KEYS[6:10]], seconds=10.0)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(seconds_of, core, second, LOOK_S / 2)
                    seconds = await seconds_of(core, first)
                    await anyio.sleep(1.0)
                    core.drop(first)
                return seconds, first, second

        seconds, first, second = run_virtual(run)
        assert (6, Reason.NONE) == (first.found, first.reason)
        assert seconds < 1.0
        assert (8, Reason.NONE) == (second.found, second.reason)

    def test_blocks_that_wait_behind_others_wait_for_nobody(self, slab) -> None:
        """R-53: who comes first, and wants what another had begun and has given up, does not wait for the
        slots of what that one had joined."""
        tier = Unruly()

        async def run():
            await lay(tier, KEYS)
            async with open_core(slab, tier) as core:
                held = want_of(KEYS[20:24])
                await core.fetch(held)
                async with anyio.create_task_group() as tasks:
                    large = want_of(KEYS[:6])
                    tasks.start_soon(core.fetch, large)
                    await anyio.sleep(0.1)
                    given_up = want_of(KEYS[:8], seconds=0.1)
                    await core.fetch(given_up)
                    want = want_of(KEYS[6:8], priority=-1)
                    seconds = await seconds_of(core, want)
                    for each in (held, want):
                        core.drop(each)
                return seconds, want, large, core.fetcher.num_open

        seconds, want, large, num_open = run_virtual(run)
        assert (2, 6, 0) == (want.found, large.found, num_open)
        assert seconds < 1.0

    def test_who_has_what_another_had_begun_waits_for_no_more(self, slab) -> None:
        """R-53, R-63: of a want that inherits the slots of one that gave up, the rest is more than is left
        beside those: it has what it can have at once; it waited for its own to its deadline."""
        tier = Unruly()

        async def run():
            await lay(tier, KEYS)
            async with open_core(slab, tier) as core:
                held, want = want_of(KEYS[24:30]), want_of(KEYS[:12], seconds=10.0)
                given_up = want_of(KEYS[:4], seconds=0.2)
                await core.fetch(held)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, given_up)
                    tasks.start_soon(seconds_of, core, want, 0.1)
                    await anyio.sleep(1.0)
                    core.drop(held)
                    began = anyio.current_time()
                return anyio.current_time() - began, want

        seconds, want = run_virtual(run)
        assert (4, Reason.STORE_FULL) == (want.found, want.reason)
        assert seconds < 1.0

    @pytest.mark.parametrize(
        ("order", "found"),
        [("given own other", 6), ("own given other", 6), ("own other given", 2)],
    )
    def test_who_inherits_slots_stands_behind_nobody_who_waits_for_them(
        self, slab, order, found
    ) -> None:
        """R-53, R-63: who stood behind another's slots as it inherited some of a third that gave up kept
        those while that other waited for them, each until a deadline; whichever of its blocks come first."""
        tier = Unruly()

        async def run():
            await lay(tier, KEYS)
            async with open_core(slab, tier) as core:
                held, other = want_of(KEYS[24:30]), want_of(KEYS[8:14], seconds=20.0)
                given_up = want_of(KEYS[:4], seconds=0.2)
                of = {"given": KEYS[:4], "own": KEYS[20:22], "other": KEYS[8:10]}
                keys = [key for each in order.split() for key in of[each]]
                want = want_of(keys, seconds=10.0)
                await core.fetch(held)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, given_up)
                    tasks.start_soon(seconds_of, core, other, 0.05)
                    await anyio.sleep(0.1)
                    tasks.start_soon(let_go, core, held, 1.0)
                    seconds = await seconds_of(core, want)
                    core.drop(want)
                return seconds, want, other

        seconds, want, other = run_virtual(run)
        assert seconds < 2.0
        assert (found, Reason.STORE_FULL) == (want.found, want.reason)
        assert (6, Reason.NONE) == (other.found, other.reason)


SPANS = [span for hit in range(1, 9) for span in ((hit, 0), (hit, hit + 3))]


def hits_of(keys) -> Hits:
    """Return eight hits of sixteen blocks, of which each needs the last four windows."""
    return Hits(*zip(*SPANS, strict=True), len(keys))


class TestHits:
    def test_two_that_try_shorter_hits_do_not_wait_for_each_other(
        self, tmp_path
    ) -> None:
        """R-53, R-63: who has slots of a longer hit takes for a shorter one what is left, or does without;
        both waited to their deadline, and had nothing."""
        tier = Unruly()

        async def run(slab):
            wants = []
            async with open_core(slab, tier) as core:
                async with anyio.create_task_group() as tasks:
                    for keys in (KEYS[:16], KEYS[16:]):
                        await lay(tier, keys)
                        tier.shelf.values[keys[9]] = tier.shelf.values[keys[1]]
                        wants.append(want_of(keys, hits=hits_of(keys)))
                        tasks.start_soon(core.fetch, wants[-1])
                    began = anyio.current_time()
                seconds = anyio.current_time() - began
                for want in wants:
                    core.drop(want)
                budget = core.fetcher._budget
                return seconds, wants, budget.total - budget.left

        with open_slab(tmp_path / "slab", 216) as slab:  # a fetch may have 27
            seconds, wants, num_taken = run_virtual(lambda: run(slab))
        assert seconds < 1.0
        assert [3, 0] == sorted((want.reach for want in wants), reverse=True)
        assert {Reason.CORRUPT} == {want.reason for want in wants}
        assert 0 == num_taken

    def test_shorter_hit_does_not_wait_for_who_waits_for_its_slots(
        self, tmp_path
    ) -> None:
        """R-53, R-63: a block that another has begun, whose slots are still to come, is none for who has
        slots of a longer hit: that one waits for those."""
        tier, keys = Unruly(), KEYS[:16]
        tier.does.delay = 0.1

        async def run(slab):
            await lay(tier, KEYS)
            tier.shelf.values[keys[9]] = tier.shelf.values[keys[1]]
            async with open_core(slab, tier) as core:
                other = want_of([keys[1], *KEYS[16:]], seconds=5.0)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(seconds_of, core, other, 0.3)
                    want = want_of(keys, hits=hits_of(keys))
                    seconds = await seconds_of(core, want)
                    core.drop(want)
                return seconds, want, other

        with open_slab(tmp_path / "slab", 216) as slab:  # a fetch may have 27
            seconds, want, other = run_virtual(lambda: run(slab))
        assert seconds < 2.0
        assert (0, Reason.CORRUPT) == (want.found, want.reason)
        assert (17, Reason.NONE) == (other.found, other.reason)


class TestKeptOut:
    def test_blocks_are_let_in_again_behind_an_error(self, slab) -> None:
        """Whatever forgetting meets: else they would land nowhere for as long as the agent lives."""

        async def run():
            async with open_core(slab, Unruly()) as core:
                with pytest.raises(LookupError):
                    async with core.fetcher.register.keep_out(KEYS):
                        raise LookupError
                return dict(core.fetcher.register.kept_out)

        assert {} == run_virtual(run)
