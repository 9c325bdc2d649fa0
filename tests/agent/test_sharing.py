# SPDX-License-Identifier: Apache-2.0
"""Fetch: a want of very many blocks shares the agent's loop, and others come and go amid it."""

import asyncio
from typing import Self

import anyio
import anyio.lowlevel
import pytest

from tests.agent.test_searching import Constant, Counted, Watched
from tests.agent.unruly import Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent import calls
from ucm.agent.wants import Want
from ucm.backends.abc import Presence
from ucm.reasons import Reason
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys

IN_TURN = 8
MOST = 16 * IN_TURN
"""Blocks are looked up, counted and added up more than once."""
MANY = [Counted(key) for key in make_keys(400)]
TURNS = 40
"""More than any of what is raced takes."""


class Asking(Want):
    """A want that counts as a key does: once for each block that it joins, leaves, or stands in line with."""

    def __hash__(self) -> int:
        Counted.num += 1
        return id(self)

    @property
    def priority(self) -> int:
        """Return that of all."""
        Counted.num += 1
        return 0

    @priority.setter
    def priority(self, priority: int) -> None:
        pass


class Media(list):
    """Counts each block of which it is told."""

    def __iadd__(self, media: list[int]) -> Self:
        """Take note of some."""
        Counted.num += len(media)
        return super().__iadd__(media)


class Size(int):
    """A block's, which counts as it is added to others."""

    def __radd__(self, other: int) -> int:
        Counted.num += 1
        return int(self) + other


def asking(**terms) -> Want:
    """Return a want of many blocks."""
    sizes = [Size(BLOCK_BYTES)] * len(MANY)
    want = Asking(MANY, sizes, anyio.current_time() + 10.0, 0.0, **terms)
    want.media = Media()
    return want


async def uncounted(function):
    """Carry out what a thread does, which is not counted."""
    await anyio.lowlevel.checkpoint()
    num = Counted.num
    try:
        return function()
    finally:
        Counted.num = num


def most_in_a_turn(tmp_path, monkeypatch, tier, run) -> int:
    """Return how many blocks were gone through in one turn of the loop at most."""
    monkeypatch.setattr(calls, "_IN_TURN", IN_TURN)

    async def watch(slab):
        await lay(tier, MANY)
        async with open_core(slab, tier, call=uncounted) as core:
            await anyio.sleep(0.1)
            Counted.num = Counted.most = 0
            await run(core)
            most = Counted.most
            assert is_conserved(core)
            return most

    with (
        open_slab(tmp_path / "slab", 8 * len(MANY) + 8) as slab,
        asyncio.Runner(loop_factory=Watched) as runner,
    ):
        return runner.run(watch(slab))


def is_conserved(core) -> bool:
    """Return whether each flight that was begun has ended once, or is open."""
    counts = core.fetcher.counts
    ended = counts.fetched + counts.stored + sum(counts.failed.values())
    return counts.begun == ended + core.fetcher.num_open


@pytest.mark.slow
class TestTurns:
    @pytest.mark.parametrize("compute_s", [0.0, 1e-6])
    @pytest.mark.parametrize("presence", [Presence.ABSENT, Presence.PRESENT])
    def test_want_of_many_blocks_shares_the_loop(
        self, tmp_path, monkeypatch, presence: Presence, compute_s: float
    ) -> None:
        """R-63: while it begins flights, looks for them, has them end, counts, and leaves; of sixty thousand blocks
        nobody else was served for up to 200 ms."""

        async def run(core) -> None:
            for _ in range(2):  # the slab has them then
                want = asking(compute_s=compute_s)
                await core.fetch(want)
                core.drop(want)
                found = len(MANY) * (presence is Presence.PRESENT)
                assert (found, 0) == (want.found, core.fetcher.num_open)

        tier = Constant(presence, 0.01)
        assert 0 < most_in_a_turn(tmp_path, monkeypatch, tier, run) <= MOST

    def test_who_joins_many_blocks_and_leaves_them_shares_the_loop(
        self, tmp_path, monkeypatch
    ) -> None:
        """R-63: also where the tier has not answered, and where all give up."""

        async def run(core) -> None:
            async with anyio.create_task_group() as first:
                first.start_soon(core.fetch, asking())
                await anyio.sleep(0.1)
                with anyio.move_on_after(1.0):
                    await core.fetch(asking())
                assert len(MANY) == core.fetcher.counts.joined
                first.cancel_scope.cancel()
            await anyio.sleep(0.1)

        tier = Constant(Presence.PRESENT, 0.01)
        tier.does.delay = 1e3
        assert 0 < most_in_a_turn(tmp_path, monkeypatch, tier, run) <= MOST

    def test_many_blocks_whose_slots_do_not_come_share_the_loop(
        self, tmp_path, monkeypatch
    ) -> None:
        """R-63: the wait for slots is given up for all at once, and each has its end in its turn."""

        async def run(core) -> None:
            core.fetcher._budget.take(len(MANY), 0)
            with anyio.move_on_after(1.0):
                await core.fetch(asking())
            await anyio.sleep(0.1)
            assert 0 == core.fetcher.num_open

        tier = Constant(Presence.PRESENT, 0.01)
        assert 0 < most_in_a_turn(tmp_path, monkeypatch, tier, run) <= MOST

    def test_many_blocks_that_are_forgotten_share_the_loop(
        self, tmp_path, monkeypatch
    ) -> None:
        """R-63: of all that is on its way it is asked whether it is meant."""

        async def run(core) -> None:
            async with anyio.create_task_group() as first:
                first.start_soon(core.fetch, asking())
                await anyio.sleep(0.1)
                async with core.fetcher.register.keep_out(MANY):
                    flights = core.fetcher.register.by_key.values()
                    assert all(flight.is_kept_out for flight in flights)
                first.cancel_scope.cancel()
            await anyio.sleep(0.1)

        tier = Constant(Presence.PRESENT, 0.01)
        tier.does.delay = 1e3
        assert 0 < most_in_a_turn(tmp_path, monkeypatch, tier, run) <= MOST


async def turns(num: int) -> None:
    """Let so many turns of the loop pass."""
    for _ in range(num):
        await anyio.lowlevel.checkpoint()


@pytest.fixture
def race(tmp_path, monkeypatch):
    """Return what runs a race anew for each turn of the loop in which the other one may come."""
    monkeypatch.setattr(calls, "_IN_TURN", 2)
    keys = make_keys(8 * TURNS)

    def run(of_turn, tier) -> None:
        async def watch(core) -> None:
            for _ in range(4 * TURNS):  # and on, no clock would be put forward
                assert is_conserved(core)
                await anyio.lowlevel.checkpoint()

        async def all_of(slab) -> None:
            await lay(tier, keys)
            async with open_core(slab, tier) as core:
                await anyio.sleep(0.01)
                for num in range(TURNS):
                    async with anyio.create_task_group() as watching:
                        watching.start_soon(watch, core)
                        await of_turn(core, keys[8 * num : 8 * num + 8], num)
                        watching.cancel_scope.cancel()
                    await anyio.sleep(20.0)
                    budget = core.fetcher._budget
                    assert (0, budget.total) == (core.fetcher.num_open, budget.left)

        with open_slab(tmp_path / "slab", 8 * TURNS * 2) as slab:
            run_virtual(lambda: all_of(slab))

    return run


async def bring(core, want, num: int = 0) -> None:
    """Fetch after so many turns, and have what it has be the next one's."""
    await turns(num)
    await core.fetch(want)
    core.drop(want)


@pytest.mark.slow
class TestRaces:
    @pytest.mark.parametrize("later", range(6))
    def test_want_that_is_dropped_leaves_nothing_behind(self, race, later) -> None:
        """R-53: in whatever turn it goes, amid joining too; who wants the same then, or while it leaves and
        its flights end, has it all."""

        async def of_turn(core, keys, num) -> None:
            want = want_of(keys[::-1])  # the last one ends last
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as own:
                        own.start_soon(bring, core, want_of(keys))
                        await turns(num)
                        tasks.start_soon(bring, core, want, later)
                        scope.cancel()
            assert (8, Reason.NONE) == (want.found, want.reason)

        race(of_turn, Unruly())

    def test_two_that_want_the_same_have_one_flight_of_each(self, race) -> None:
        """R-53: in whatever turn the second one comes, while the first joins, or as flights end."""
        tier = Unruly()

        async def of_turn(core, keys, num) -> None:
            first, second = want_of(keys), want_of(keys)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bring, core, first)
                tasks.start_soon(bring, core, second, num)
            assert [(8, Reason.NONE)] * 2 == [
                (want.found, want.reason) for want in (first, second)
            ]
            assert sorted(keys) == sorted(tier.got)
            tier.got.clear()

        race(of_turn, tier)

    def test_two_that_join_each_other_do_not_wait_for_each_other(self, race) -> None:
        """R-53, R-63: one joins at a time; each would have begun what the other one waits for."""

        async def of_turn(core, keys, num) -> None:
            began, other = anyio.current_time(), want_of(keys[::-1])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(bring, core, want := want_of(keys))
                tasks.start_soon(bring, core, other, num)
            assert (8, 8) == (want.found, other.found)
            assert anyio.current_time() - began < 1.0

        race(of_turn, Unruly())

    @pytest.mark.parametrize("is_first", [True, False])
    def test_what_is_given_up_is_not_joined(self, race, is_first: bool) -> None:
        """R-53: one waits for slots and goes, and another wants the same in whatever turn: it has all of it
        once there are slots."""

        async def of_turn(core, keys, num) -> None:
            budget = core.fetcher._budget
            budget.take(budget.total, 0)
            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as own:
                        own.start_soon(bring, core, want_of(keys))
                        await anyio.sleep(0.1)
                        want = want_of(keys)
                        tasks.start_soon(bring, core, want, 0 if is_first else num)
                        await turns(num if is_first else 0)
                        scope.cancel()
                await anyio.sleep(1.0)
                budget.release(budget.total, 0)
            assert (8, Reason.NONE) == (want.found, want.reason)

        race(of_turn, Unruly())

    def test_what_came_in_time_is_told_of(self, race) -> None:
        """R-53: also where time is over while it is gone through."""

        async def of_turn(core, keys, num) -> None:
            await bring(core, want_of(keys))
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(bring, core, want := want_of(keys))
                    await turns(num)
                    scope.cancel()
            if num > 4:  # behind the look at the slab, in which all is there
                assert 8 == want.found

        race(of_turn, Unruly())

    @pytest.mark.parametrize("turns", range(12))
    def test_agent_that_ends_amid_joining_says_nothing_else(
        self, tmp_path, monkeypatch, turns
    ):
        """R-53: whatever the turn in which it ends, nothing is raised beside the cancellation."""
        monkeypatch.setattr(calls, "_IN_TURN", 2)
        keys, tier = make_keys(40), Unruly()

        async def run(slab):
            await lay(tier, keys)
            async with anyio.create_task_group() as tasks:
                core = open_core(slab, tier)
                ready = anyio.Event()
                tasks.start_soon(core.core.run, ready.set)
                await ready.wait()
                tasks.start_soon(core.core.fetch, want_of(keys))
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()

        with open_slab(tmp_path / "slab", 64) as slab:
            run_virtual(lambda: run(slab))
