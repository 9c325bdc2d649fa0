# SPDX-License-Identifier: Apache-2.0
"""Forgetting: what somebody wants gone goes from tiers, and nothing that is under way brings it back."""

import itertools

import anyio
import anyio.lowlevel
import pytest

from tests.agent.unruly import (
    TIMEOUT_S,
    Unruly,
    inline,
    lay,
    open_core,
    run_virtual,
    want_of,
)
from tests.stores.slab_kit import open_slab
from ucm.agent import calls
from ucm.agent import core as agent_core
from ucm.agent.landing import land
from ucm.agent.protocol import LONGEST_S
from ucm.backends.abc import Fetched, Verdict, block_checksum
from ucm.reasons import Reason
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, payload, save

KEYS = make_keys(12)


class Slow(Unruly):
    """Deletes, and hands out what it has got, when it is let."""

    def __init__(self, **can: object) -> None:
        super().__init__(**can)
        self.deletes, self.answers = anyio.Event(), anyio.Event()
        self.num_deleting = self.most_deleting = 0
        self.has_got = anyio.Event()
        self.is_deaf = False

    async def delete(self, keys):
        """Wait, then delete; or have no answer."""
        self.asked.append("delete")
        self.num_deleting += 1
        self.most_deleting = max(self.most_deleting, self.num_deleting)
        try:
            await self.deletes.wait()
        finally:
            self.num_deleting -= 1
        if self.is_deaf:
            return [Verdict.UNAVAILABLE] * len(keys)
        return await super().delete(keys)

    async def get(self, keys, targets):
        """Get, then wait."""
        told = await super().get(keys, targets)
        self.has_got.set()
        await self.answers.wait()
        return told


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 400 blocks, of which a fetch may have fifty."""
    with open_slab(tmp_path / "slab", 400) as store:
        yield store


class TestTiers:
    def test_forgotten_blocks_leave_each_tier(self, slab) -> None:
        """R-53, R-55: what was spilled is in no tier any more, is found by nobody, and is told
        of once, however many tiers had it; what nobody wants gone stays."""
        first, second = Unruly(), Unruly()
        save(slab, KEYS)

        async def run():
            async with open_core(slab, first, second) as core:
                await core.drain()
                slab.forget(KEYS[:8])
                forgetting = core.forget([*KEYS[:8], KEYS[0]])
                await forgetting.over.wait()
                want = want_of(KEYS[:8])
                await core.fetch(want)
                return forgetting, want, [each.counts for each in core.spillers]

        forgetting, want, counts = run_virtual(run)
        assert (set(KEYS[:8]), set()) == (forgetting.taken, forgetting.left)
        assert (0, Reason.ABSENT) == (want.found, want.reason)
        assert [(8, 0), (8, 0)] == [
            (each.forgotten, each.unforgotten) for each in counts
        ]
        for tier in (first, second):
            assert set(KEYS[8:]) == set(tier.shelf.values)

    def test_backlog_and_puts_under_way_bring_nothing_back(self, slab) -> None:
        """R-55: what waits is not put, and what is being put is in no tier behind that."""
        backend = Unruly()
        backend.does.delay = 0.5
        save(slab, KEYS)

        async def run():
            async with open_core(slab, backend) as core:
                await anyio.sleep(0.75)  # two batches are being put, one waits
                assert (8, 4) == (
                    core.spillers[0].num_moving,
                    core.spillers[0].num_waiting,
                )
                slab.forget(KEYS)
                forgetting = core.forget(KEYS)
                await forgetting.over.wait()
                await core.drain()
                return forgetting

        assert set() == run_virtual(run).left
        assert {} == backend.shelf.values

    def test_tier_is_asked_behind_the_puts_that_are_under_way(self, slab) -> None:
        """R-55, R-63: what a put took back in vain, as its slot was given away, is deleted all
        the same, and counted; else nobody would know of it."""

        class Deaf(Unruly):
            async def delete(self, keys):
                self.asked.append("delete")
                if self.asked.count("delete") == 1:
                    return [Verdict.UNAVAILABLE] * len(keys)
                return await super().delete(keys)

        backend = Deaf()
        backend.does.delay = 0.5
        save(slab, KEYS[:4])

        async def run():
            async with open_core(slab, backend) as core:
                await anyio.sleep(0.75)
                slab.forget(KEYS[:4])
                forgetting = core.forget(KEYS[:4])
                await forgetting.over.wait()
                return forgetting

        forgetting = run_virtual(run)
        assert (set(KEYS[:4]), set()) == (forgetting.taken, forgetting.left)
        assert {} == backend.shelf.values

    def test_put_without_an_answer_is_not_tried_again(self, slab) -> None:
        """R-55: a block that waits on, as its tier takes nothing, waits no more once it is
        forgotten, though it was being put then."""
        backend = Unruly(in_flight=1)
        backend.does.delay, backend.does.takes_nothing = 0.5, True
        save(slab, KEYS)

        async def run():
            async with open_core(slab, backend) as core:
                await anyio.sleep(4.0)  # its circuit is open, and a block tries
                slab.forget(KEYS)
                await core.forget(KEYS).over.wait()
                backend.does.takes_nothing = False
                await core.drain()

        run_virtual(run)
        assert {} == backend.shelf.values

    def test_tier_has_one_such_call_at_a_time(self, slab) -> None:
        """R-55: however many have blocks forgotten, in batches of the tier's size."""
        backend = Slow()

        async def run():
            async with open_core(slab, backend) as core:
                await lay(backend, KEYS)
                halves = [core.forget(KEYS[:6]), core.forget(KEYS[6:])]
                backend.deletes.set()
                for each in halves:
                    await each.over.wait()
                return sum(len(each.taken) for each in halves)

        assert 12 == run_virtual(run)
        assert (1, 4) == (backend.most_deleting, backend.asked.count("delete"))

    def test_others_have_turns_amid_many_blocks(self, slab, monkeypatch) -> None:
        """R-63: the loop goes through a few blocks at a time, also of a tier that waits for
        nothing; else all that is wanted meanwhile waits for the last of sixty thousand."""
        monkeypatch.setattr(calls, "_IN_TURN", 2)
        turns = []

        async def count() -> None:
            while True:
                turns.append(len(turns))
                await anyio.lowlevel.checkpoint()

        async def run():
            async with (
                open_core(slab, Unruly()) as core,
                anyio.create_task_group() as t,
            ):
                t.start_soon(count)
                await anyio.lowlevel.checkpoint()
                seen = [len(turns)]
                async with core.fetcher.register.keep_out(KEYS):
                    seen.append(len(turns))
                seen.append(len(turns))
                await core.spillers[0].forget(KEYS, set(), 1.0)
                seen.append(len(turns))
                t.cancel_scope.cancel()
            return [after - before for before, after in itertools.pairwise(seen)]

        entered, left, forgotten = run_virtual(run)
        assert 6 <= entered
        assert 6 <= left
        assert 6 + 3 <= forgotten


class TestKept:
    def test_tier_that_does_not_answer_is_named_and_costs_no_other(self, slab) -> None:
        """R-52, R-63: what it may still have is counted, as trouble too; the others part with
        theirs."""
        deaf, well = Slow(), Unruly()
        deaf.is_deaf = True
        deaf.deletes.set()

        async def run():
            async with open_core(slab, deaf, well) as core:
                await lay(deaf, KEYS)
                await lay(well, KEYS)
                forgetting = core.forget(KEYS)
                await forgetting.over.wait()
                return forgetting, +core.troubles(), core.totals()["spilled"]

        forgetting, troubles, told = run_virtual(run)
        assert ({0}, set(KEYS)) == (forgetting.left, forgetting.taken)
        assert {(0, Reason.KEPT): 12} == troubles
        assert [(0, 12), (12, 0)] == [
            (each["forgotten"], each["unforgotten"]) for each in told
        ]
        assert (12, 0) == (len(deaf.shelf.values), len(well.shelf.values))

    def test_tier_that_hangs_is_given_up(self, slab) -> None:
        """R-63: its calls end with their deadline, its circuit opens, and what is left is kept."""
        backend = Slow()

        async def run():
            async with open_core(slab, backend) as core:
                forgetting, began = core.forget(KEYS), anyio.current_time()
                await forgetting.over.wait()
                return forgetting, anyio.current_time() - began, core.spillers[0]

        forgetting, seconds, spiller = run_virtual(run)
        assert pytest.approx(3 * TIMEOUT_S) == seconds
        assert ({0}, 12) == (forgetting.left, spiller.counts.unforgotten)

    def test_put_that_nobody_can_end_is_not_waited_for_without_end(self, slab) -> None:
        """R-63: a native call that hangs holds nobody for more than a minute."""
        free = anyio.Event()

        class Endless(Unruly):
            async def put(self, blocks):
                with anyio.CancelScope(shield=True):
                    await free.wait()
                return await super().put(blocks)

        save(slab, KEYS[:4])

        async def run():
            async with open_core(slab, Endless()) as core:
                await anyio.sleep(1.0)
                forgetting, began = core.forget(KEYS[:4]), anyio.current_time()
                await forgetting.over.wait()
                seconds = anyio.current_time() - began
                free.set()
                return forgetting.left, seconds

        left, seconds = run_virtual(run)
        assert ({0}, pytest.approx(LONGEST_S)) == (left, seconds)

    def test_more_than_may_be_forgotten_at_a_time_is_kept(
        self, slab, monkeypatch
    ) -> None:
        """R-63: beyond a bound tiers keep theirs, at once and counted; a question counts as some
        blocks, however few it has."""
        monkeypatch.setattr(agent_core, "_LEAST_FORGOTTEN", 4)
        monkeypatch.setattr(agent_core, "_MOST_FORGOTTEN", 8)
        backend = Slow()

        async def run():
            async with open_core(slab, backend) as core:
                begun = [core.forget(KEYS[at : at + 1]) for at in range(3)]
                told = [each.over.is_set() for each in begun]
                backend.deletes.set()
                await begun[1].over.wait()
                await begun[0].over.wait()
                assert core.forget(KEYS[3:]).over.is_set()
                return told, begun[2].left, core.spillers[0].counts.unforgotten

        assert ([False, False, True], {0}, 1 + 9) == run_virtual(run)

    def test_agent_that_ends_is_through_before(self, slab) -> None:
        """R-63: what is being forgotten is no less to be done than what waits to be spilled."""
        backend = Slow()

        async def run():
            async with open_core(slab, backend) as core, anyio.create_task_group() as t:
                await lay(backend, KEYS)
                core.forget(KEYS)
                told = [core.is_idle]
                t.start_soon(core.drain)
                await anyio.sleep(1.0)
                backend.deletes.set()
            return [*told, core.is_idle]

        assert [False, True] == run_virtual(run)
        assert {} == backend.shelf.values


class TestFlights:
    def test_block_that_was_got_before_lands_nowhere(self, slab) -> None:
        """R-53: what a tier has handed out already is not made visible; what is beside it is."""
        backend = Slow()
        backend.deletes.set()

        async def run():
            async with open_core(slab, backend) as core, anyio.create_task_group() as t:
                await lay(backend, KEYS[:4])
                want = want_of(KEYS[:4])
                t.start_soon(core.fetch, want)
                await backend.has_got.wait()
                await core.forget(KEYS[1:2]).over.wait()
                backend.answers.set()
            return want

        want = run_virtual(run)
        assert (1, Reason.ABSENT) == (want.found, want.reason)
        assert [True, False, True, True] == slab.contains(KEYS[:4])

    def test_block_that_is_asked_for_meanwhile_lands_nowhere(self, slab) -> None:
        """R-53: also if a tier brings it before it is asked to delete it; two who have it
        forgotten at once do not undo each other."""
        backend = Slow()
        backend.answers.set()

        async def run():
            async with open_core(slab, backend) as core:
                await lay(backend, KEYS[:4])
                begun = [core.forget(KEYS[:4]) for _ in range(2)]
                want = want_of(KEYS[:4])
                await core.fetch(want)
                backend.deletes.set()
                for each in begun:
                    await each.over.wait()
                assert {} == core.fetcher.register.kept_out
                await lay(backend, KEYS[:4])
                again = want_of(KEYS[:4])
                await core.fetch(again)
                return want.found, again.found

        assert (0, 4) == run_virtual(run)
        assert "get" in backend.asked

    def test_block_that_landed_just_before_goes_again(self, slab) -> None:
        """R-53: between the slab's forgetting and the agent's a fetch may have brought it."""
        backend = Unruly()

        async def run():
            async with open_core(slab, backend) as core:
                await lay(backend, KEYS)
                await core.fetch(want_of(KEYS))
                assert all(slab.contains(KEYS))
                await core.forget(KEYS).over.wait()
                await core.drain()
                return core.spillers[0].counts.spilled

        assert 0 == run_virtual(run)
        assert not any(slab.contains(KEYS))
        assert {} == backend.shelf.values

    def test_block_is_kept_out_amid_its_landing(self, slab) -> None:
        """R-53: where it is forgotten while it becomes visible it is taken back."""
        lease = slab.reserve(KEYS[:3], BLOCK_BYTES)
        for at, key in enumerate(lease.keys):
            lease.slots.block(at).data[:] = payload(key)
        answers = [
            Fetched(Verdict.DONE, block_checksum(key, payload(key)))
            for key in lease.keys
        ]
        told = iter([[0], [0, 1]])
        reasons = land(lease, answers, lambda _: None, lambda: next(told), slab.forget)
        assert [Reason.ABSENT, Reason.ABSENT, Reason.NONE] == reasons
        assert [False, False, True] == slab.contains(KEYS[:3])

    def test_slab_that_is_lost_keeps_no_tier_from_being_asked(self, slab) -> None:
        """R-63: what it has, nobody finds any more."""
        backend = Unruly()

        async def run():
            async with open_core(slab, backend) as core:
                await lay(backend, KEYS)
                await inline(slab.close)
                forgetting = core.forget(KEYS)
                await forgetting.over.wait()
                return forgetting.taken

        assert set(KEYS) == run_virtual(run)
