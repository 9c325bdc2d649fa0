# SPDX-License-Identifier: Apache-2.0
"""Spill: what a tier gives no answer for waits on, and keeps nothing else from it."""

import anyio
import pytest

from tests.agent.test_spill import ends
from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.backends.abc import Presence, Verdict
from ucm.backends.memory import MemoryBackend
from ucm.blocks import PackedKey
from ucm.reasons import Reason
from ucm.stores.abc import Change
from ucm.testing.store_blocks import make_keys, save

KEYS = make_keys(30)


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 32 blocks."""
    with open_slab(tmp_path / "slab", 32) as store:
        yield store


class Cluster(Unruly):
    """
    A tier that takes nothing at first; later some blocks are a server's that is away.

    Args:
        away: Those.
        in_flight: Calls at a time.
    """

    def __init__(self, away: set, in_flight: int) -> None:
        super().__init__(in_flight=in_flight)
        self.does.takes_nothing = True
        self._away = away
        self._now = self.most = 0
        """Puts that are under way, and how many at most."""

    async def put(self, blocks):
        """Put what is the other servers'."""
        self._now += 1
        self.most = max(self.most, self._now)
        told = await super().put(blocks)
        self._now -= 1
        return [
            Verdict.UNAVAILABLE if block.key in self._away else one
            for block, one in zip(blocks, told, strict=True)
        ]

    async def exists(self, keys):
        """Look; what was not taken is not there."""
        told = await super().exists(keys)
        return [
            Presence.ABSENT if key in self._away else one
            for key, one in zip(keys, told, strict=True)
        ]


class Mute(Unruly):
    """
    A tier that says nothing of one block.

    Args:
        mute: That one.
    """

    def __init__(self, mute: PackedKey) -> None:
        super().__init__(in_flight=1)
        self._mute = mute

    async def exists(self, keys):
        """Look for the others."""
        told = await super().exists(keys)
        return [
            Presence.UNKNOWN if key == self._mute else one
            for key, one in zip(keys, told, strict=True)
        ]


class Away(Unruly):
    """A tier of several servers: all are silent, then one is well, and blocks are others' that are away."""

    def __init__(self) -> None:
        super().__init__(in_flight=2)
        self.is_silent = True
        self.mine: list[PackedKey] = []
        """Blocks of the server that is well."""

    async def exists(self, keys):
        """Say at once what is known of whom."""
        self.asked.append("exists")
        assert len(self.asked) < 100  # nobody else has a turn, nor time to stop it
        if self.is_silent:
            return [Presence.UNKNOWN] * len(keys)
        told = await MemoryBackend.exists(self, keys)
        return [
            one if key in self.mine else Presence.AWAY
            for key, one in zip(keys, told, strict=True)
        ]


@pytest.mark.slow
def test_blocks_that_a_tier_never_takes_keep_no_other_from_it(slab) -> None:
    """R-63, X-14: where one of a cluster's servers is away, what comes for the others is taken; what
    waits for that one comes behind it, and gives way where there is no more room."""
    backend = Cluster(set(KEYS[8:20]), in_flight=1)
    save(slab, KEYS[:20])

    async def spill():
        async with open_core(slab, backend, most_waiting=20) as core:
            spiller = core.spillers[0]
            await anyio.sleep(10.0)
            backend.does.takes_nothing = False
            await anyio.sleep(200.0)
            before = spiller.counts.spilled, spiller.num_waiting
            save(slab, KEYS[20:])
            await anyio.sleep(60.0)
            assert spiller.counts.offered == ends(spiller)
            return before, spiller.counts

    before, counts = run_virtual(spill)
    assert ((0, 12), 10) == (before, counts.spilled)
    assert {Reason.UNAVAILABLE: 18} == counts.dropped


@pytest.mark.slow
def test_block_that_a_tier_says_nothing_of_keeps_nobody_from_reading_it(slab) -> None:
    """R-51, X-14: where it is tried whenever a tier is, that would never be seen to answer: who reads
    tries first, and once others are answered such a block is given up."""
    backend = Mute(KEYS[8])
    backend.does.is_down = True
    save(slab, KEYS[:9])

    async def spill():
        await lay(backend, KEYS[9:12])
        async with open_core(slab, backend) as core:
            await anyio.sleep(60.0)
            backend.does.is_down = False
            found = []
            for _ in range(60):
                want = want_of(KEYS[9:12], seconds=1.0, hold_s=0.0)
                await core.fetch(want)
                core.drop(want)
                found.append(want.found)
                await anyio.sleep(2.0)
            return found[-1], core.spillers[0].counts.dropped

    assert (3, {Reason.UNAVAILABLE: 9}) == run_virtual(spill)


def test_blocks_without_an_answer_wait_on_in_the_order_in_which_they_came(slab) -> None:
    """R-63: who waits longest is tried first, and each run of a simulation is like the last one."""
    backend = Unruly(in_flight=1)
    backend.does.is_down = True
    save(slab, KEYS[:20])

    async def spill():
        async with open_core(slab, backend) as core:
            await anyio.sleep(60.0)
            told = list(core.spillers[0]._again)
            backend.does.is_down = False
            await core.drain()
            return told

    places = list(map(KEYS.index, run_virtual(spill)))
    first = places.index(min(places))  # those before it were tried last
    assert 8 <= len(places)
    assert sorted(places) == places[first:] + places[:first]


def test_block_whose_server_is_away_has_no_turn_of_all_others(slab) -> None:
    """R-63, X-14: where a tier is not served, and who would have a block is away, which is told at once,
    it is tried now and then; it was tried for ever, with the agent at a standstill."""
    backend = Away()

    async def spill():
        async with open_core(slab, backend) as core:
            spiller = core.spillers[0]
            for key in KEYS[:5]:
                save(slab, [key])
                await core._take_changes()
                await anyio.sleep(0.1)
            backend.is_silent = False
            before = len(backend.asked)
            await anyio.sleep(60.0)
            tried, waits = len(backend.asked) - before, spiller.num_waiting
            backend.mine = KEYS[5:6]
            save(slab, backend.mine)
            await core.drain()
            assert spiller.counts.offered == ends(spiller)
            return tried, waits, spiller.counts

    tried, waits, counts = run_virtual(spill)
    assert 3 == waits
    assert 5 <= tried <= 12
    assert (1, {Reason.UNAVAILABLE: 5}) == (counts.spilled, counts.dropped)


def test_tier_that_takes_blocks_again_is_given_several_batches_at_a_time(slab) -> None:
    """R-55, R-63: what is offered while others wait on wakes whoever may spill, and not only who tries."""
    backend = Cluster(set(), in_flight=4)

    async def spill():
        async with open_core(slab, backend) as core:
            for key in KEYS[:3]:  # each is one worker's, and the others sleep
                save(slab, [key])
                await core._take_changes()
                await anyio.sleep(0.1)
            save(slab, KEYS[3:])
            await core._take_changes()
            backend.does.takes_nothing, backend.does.delay = False, 0.5
            await core.drain()
            return core.spillers[0].counts

    counts = run_virtual(spill)
    assert (28, {Reason.UNAVAILABLE: 2}) == (counts.spilled, counts.dropped)
    assert backend.most > 1


@pytest.mark.slow
def test_block_that_waits_on_leaves_with_the_slab_or_comes_from_the_tier(slab) -> None:
    """R-55: what the slab has forgotten meanwhile is not tried again, and what is offered once more
    waits once."""
    backend = Cluster(set(), in_flight=1)

    async def spill():
        async with open_core(slab, backend) as core:
            spiller = core.spillers[0]
            for key in KEYS[:6]:
                save(slab, [key])
                await core._take_changes()
                await anyio.sleep(20.0)
            spiller.offer([Change(KEYS[2], 1)])
            waiting = spiller.counts.offered, spiller.num_waiting
            slab.forget([KEYS[2]])
            await core._take_changes()
            spiller.brought([KEYS[3]])
            backend.does.takes_nothing = False
            await core.drain()
            return waiting, spiller.counts

    waiting, counts = run_virtual(spill)
    assert (6, 4) == waiting
    assert (2, 1) == (counts.spilled, counts.skipped)
    assert {Reason.UNAVAILABLE: 2, Reason.EVICTED: 1} == counts.dropped


def test_block_of_two_calls_without_an_answer_has_an_end_for_each(slab) -> None:
    """R-63: what was saved anew amid a call was offered twice; it waits on once, and the other time is
    counted as dropped."""
    backend = Unruly()
    backend.does.delay, backend.does.is_down = 0.5, True

    async def spill():
        async with open_core(slab, backend) as core:
            spiller = core.spillers[0]
            for key in KEYS[:2]:  # with one more its circuit is open
                save(slab, [key])
                await anyio.sleep(1.0)
            save(slab, KEYS[2:3])
            await anyio.sleep(0.2)
            slab.forget(KEYS[2:3])
            save(slab, KEYS[2:3])
            await anyio.sleep(0.2)
            assert 2 == spiller.num_moving
            await anyio.sleep(0.4)
            assert spiller.counts.offered == ends(spiller)
            return spiller.counts.offered, spiller.num_waiting, spiller.counts.dropped

    assert (4, 1, {Reason.UNAVAILABLE: 3}) == run_virtual(spill)
