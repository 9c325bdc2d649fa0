# SPDX-License-Identifier: Apache-2.0
"""Spill: what is committed reaches a tier, or is counted; never another block's bytes."""

import anyio
import pytest

from tests.agent.unruly import (
    Unruly,
    guarded,
    inline,
    lay,
    open_core,
    run_virtual,
    want_of,
)
from tests.stores.slab_kit import RawSlab, open_slab
from ucm.agent import calls
from ucm.agent.spill import Spiller
from ucm.backends.envelope import HEADER_BYTES
from ucm.backends.memory import Shelf
from ucm.errors import StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.abc import Change
from ucm.stores.wrap import WrapperStore
from ucm.testing.store_blocks import BLOCK_BYTES, make_keys, payload, save

KEYS, OTHERS = make_keys(30), make_keys(34)[30:]


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 32 blocks."""
    with open_slab(tmp_path / "slab", 32) as store:
        yield store


class Forgetful(WrapperStore):
    """A slab of which all has changed for who did not look for a second."""

    _looked_at = 0.0

    def changes(self, cursor):
        """Tell, or begin anew."""
        before, self._looked_at = self._looked_at, anyio.current_time()
        is_late = self._looked_at - before > 1.0
        return self.inner.changes(None if is_late else cursor)


def shown(backend: Unruly) -> dict:
    """Return what a tier has, without headers."""
    return {key: value[HEADER_BYTES:] for key, value in backend.shelf.values.items()}


def ends(spiller: Spiller) -> int:
    """Return how many blocks have come to an end, or are on their way."""
    counts = spiller.counts
    ended = counts.spilled + counts.skipped + sum(counts.dropped.values())
    return ended + spiller.num_waiting + spiller.num_moving


class TestSpill:
    def test_what_is_committed_reaches_every_tier(self, slab) -> None:
        """R-55: blocks that were there before and those that come later are spilled, each
        with its own bytes."""
        backends = Unruly(), Unruly()
        save(slab, KEYS[:5])

        async def spill():
            async with open_core(slab, *backends) as core:
                await core.drain()
                save(slab, KEYS[5:12])
                await core.drain()
                return [spiller.counts for spiller in core.spillers]

        for counts in run_virtual(spill):
            assert (12, 12, 12 * BLOCK_BYTES) == (
                *(counts.offered, counts.spilled),
                counts.nbytes,
            )
        expected = {key: payload(key) for key in KEYS[:12]}
        assert [expected] * 2 == [shown(backend) for backend in backends]

    def test_block_that_is_offered_costs_no_question(self, slab, monkeypatch) -> None:
        """R-55: what a tier can do is asked for once, not for each block."""
        asked, real = [], Unruly.capabilities

        def capabilities(backend):
            asked.append(backend)
            return real.fget(backend)

        monkeypatch.setattr(Unruly, "capabilities", property(capabilities))
        spiller = Spiller(slab, guarded(Unruly()), inline, 30)
        before = len(asked)
        for key in KEYS:
            spiller.offer([Change(key, BLOCK_BYTES)])
        assert (30, before) == (spiller.num_waiting, len(asked))

    def test_every_lease_is_ended(self, tmp_path) -> None:
        """R-55: what was read is given back, whether it was put, or did not verify."""
        leases = []

        class Watched(WrapperStore):
            def read(self, keys):
                leases.append(self.inner.read(keys))
                return leases[-1]

        async def spill():
            async with open_core(Watched(slab), Unruly()) as core:
                await core.drain()

        with open_slab(tmp_path / "slab", 8) as slab:
            save(slab, KEYS[:3])
            RawSlab(tmp_path / "slab").put(KEYS[0], b"x" * BLOCK_BYTES)
            run_virtual(spill)
            assert [True] * 3 == [lease._has_ended for lease in leases]

    def test_backlog_is_spilled_where_the_slab_tells_nothing_more(
        self, tmp_path
    ) -> None:
        """R-55: at the end of an agent another process may hold the slab's lock: what is known
        of is spilled."""

        class Silent(WrapperStore):
            is_silent = False

            def changes(self, cursor):
                if self.is_silent:
                    raise StoreUnavailableError("its lock is held")
                return self.inner.changes(cursor)

        async def spill():
            store = Silent(slab)
            async with open_core(store, Unruly()) as core:
                for key in KEYS[:3]:
                    core.spillers[0].offer([Change(key, BLOCK_BYTES)])
                store.is_silent = True
                await core.drain()
                return core.spillers[0].counts

        with open_slab(tmp_path / "slab", 8) as slab:
            save(slab, KEYS[:3])
            assert 3 == run_virtual(spill).spilled

    def test_a_call_is_of_so_many_bytes_only(self, slab, monkeypatch) -> None:
        """R-52: a block that is larger than a call may be goes alone, and the others as many
        as fit."""
        save(slab, KEYS[:6])

        async def spill():
            async with open_core(slab, *backends) as core:
                await core.drain()

        for most, puts in ((2 * BLOCK_BYTES + 1, 3), (1, 6)):
            monkeypatch.setattr(calls, "CALL_BYTES", most)
            backends = (Unruly(),)
            run_virtual(spill)
            assert puts == backends[0].asked.count("put")

    def test_what_a_tier_has_is_not_read(self, slab) -> None:
        """R-55: a restart lists the slab again, and what was spilled before is skipped."""
        backend = Unruly()
        save(slab, KEYS[:8])

        async def spill():
            await lay(backend, KEYS[:8])
            async with open_core(slab, backend) as core:
                await core.drain()
                return core.spillers[0].counts

        counts = run_virtual(spill)
        assert (8, 8, 0) == (counts.offered, counts.skipped, counts.spilled)
        assert {"exists"} == set(backend.asked)

    def test_fetched_block_is_not_offered_where_it_came_from(self, slab) -> None:
        """R-55: the tier that has brought a block is not asked whether it has it; the others
        get it."""
        first, second = Unruly(), Unruly()

        async def fetch():
            await lay(second, KEYS[:4])
            async with open_core(slab, first, second) as core:
                await core.fetch(want_of(KEYS[:4]))
                second.asked.clear()
                await core.drain()
                return [spiller.counts for spiller in core.spillers]

        one, other = run_virtual(fetch)
        assert (4, 4, 0) == (one.offered, one.spilled, one.skipped)
        assert (4, 0, 4) == (other.offered, other.spilled, other.skipped)
        assert [] == second.asked

    def test_block_is_offered_before_it_is_known_to_have_come(self, slab) -> None:
        """R-55: whichever is told first, the block has one end."""
        spiller = Spiller(slab, guarded(Unruly()), inline, 3)
        spiller.offer([Change(KEYS[0], BLOCK_BYTES)])
        spiller.brought([KEYS[0]])
        for key in KEYS[1:3]:
            spiller.brought([key])
            spiller.offer([Change(key, BLOCK_BYTES)])
        assert (3, 3) == (spiller.counts.offered, spiller.counts.skipped)
        assert (0, 3) == (spiller.num_waiting, ends(spiller))

    def test_what_came_and_has_gone_is_offered_again(self, slab) -> None:
        """R-55: a tier's block that was evicted and computed anew is put again; no more of
        them are remembered than the backlog may have."""
        spiller = Spiller(slab, guarded(Unruly()), inline, 3)
        spiller.brought([KEYS[0]])
        spiller.withdraw([KEYS[0]])
        spiller.offer([Change(KEYS[0], BLOCK_BYTES)])
        for key in KEYS[1:5]:
            spiller.brought([key])
        spiller.offer([Change(KEYS[1], BLOCK_BYTES)])
        assert (2, 0) == (spiller.num_waiting, spiller.counts.skipped)

    def test_backlog_is_bounded_and_conserved(self, slab) -> None:
        """R-55: what does not fit is dropped and counted; at no time is a block lost from
        the count."""
        backend = Unruly()
        backend.does.delay = 0.5
        save(slab, KEYS)

        async def spill():
            async with open_core(slab, backend, most_waiting=10) as core:
                spiller = core.spillers[0]
                await core._take_changes()
                assert spiller.counts.offered == ends(spiller)
                await core.drain()
                assert spiller.counts.offered == ends(spiller)
                return spiller.counts

        counts = run_virtual(spill)
        assert 30 == counts.offered
        assert 30 == counts.spilled + counts.dropped[Reason.QUEUE_BYTES]
        assert 10 <= counts.spilled < 30

    @pytest.mark.slow
    def test_slab_larger_than_the_backlog_is_spilled_whole_behind_a_restart(
        self, tmp_path
    ) -> None:
        """R-55, R-63: what the agent before has not spilled is offered as fast as the tier takes it,
        page by page of the listing, and nothing of it is dropped for want of room."""
        keys = make_keys(3300)
        backend = Unruly(Shelf(1 << 30))
        backend.does.delay = 0.01
        with open_slab(tmp_path / "large", 3300) as slab:
            for at in range(0, 3300, 300):
                save(slab, keys[at : at + 300])

            async def spill():
                async with open_core(slab, backend, most_waiting=2100) as core:
                    await anyio.sleep(60.0)
                    return core.spillers[0].counts

            counts = run_virtual(spill)
        assert (3300, {}) == (counts.spilled, counts.dropped)

    @pytest.mark.slow
    def test_slab_that_changes_faster_than_it_is_spilled_is_followed(
        self, tmp_path
    ) -> None:
        """R-55: where more changes than a slab remembers while a tier is waited for, its listing is not
        begun anew again and again: what is committed later comes to the tier."""
        keys = make_keys(1201)
        backend = Unruly()
        backend.does.delay = 0.1
        with open_slab(tmp_path / "large", 1300) as slab:
            for at in range(0, 1200, 300):
                save(slab, keys[at : at + 300])

            async def spill():
                async with open_core(Forgetful(slab), backend, most_waiting=200):
                    await anyio.sleep(30.0)
                    save(slab, keys[1200:])
                    await anyio.sleep(30.0)

            run_virtual(spill)
        assert payload(keys[-1]) == shown(backend)[keys[-1]]

    def test_backlog_waits_for_a_backend_that_is_down(self, slab) -> None:
        """R-55: a dead tier costs what was asked of it; the backlog waits, bounded, and is
        spilled when it is back. Meanwhile it is no reason for an agent to stay."""
        backend = Unruly(in_flight=1)
        backend.does.is_down = True
        save(slab, KEYS[:20])

        async def spill():
            async with open_core(slab, backend) as core:
                spiller = core.spillers[0]
                await core._take_changes()
                while not spiller._backend.is_open:
                    await inline(lambda: None)
                backend.does.is_down = False
                waiting = spiller.num_waiting, core.is_idle
                await core.drain()
                return waiting, spiller.counts

        waiting, counts = run_virtual(spill)
        assert ((12, True), 12) == (waiting, counts.spilled)
        assert 8 == counts.dropped[Reason.UNAVAILABLE]

    def test_tier_that_takes_nothing_is_read_and_tried_with_a_block(self, slab) -> None:
        """R-63, X-14: a full or read-only server has what it had; three batches are lost, the backlog
        waits, whoever tries waits on, and when it takes blocks again they all go."""
        backend = Unruly(in_flight=1)
        backend.does.takes_nothing = True
        save(slab, KEYS[:24])

        async def spill():
            await lay(backend, OTHERS)
            async with open_core(slab, backend) as core:
                spiller = core.spillers[0]
                await core._take_changes()
                await anyio.sleep(60.0)
                want = want_of(OTHERS)
                await core.fetch(want)
                before = spiller.num_waiting, core.is_idle, backend.asked.count("put")
                backend.does.takes_nothing = False
                await core.drain()
                return want.found, before, spiller.counts

        found, (waiting, is_idle, num_tries), counts = run_virtual(spill)
        assert (len(OTHERS), 16, True) == (found, waiting, is_idle)
        assert 3 + 6 >= num_tries
        assert (16, {Reason.UNAVAILABLE: 8}) == (counts.spilled, counts.dropped)

    def test_removed_block_leaves_the_backlog(self, slab) -> None:
        """R-55: what the slab has forgotten is dropped without a call."""
        backend = Unruly()
        backend.does.hangs = True
        spiller = Spiller(slab, guarded(backend), inline, 10)
        spiller.offer([Change(KEYS[0], BLOCK_BYTES)])
        spiller.offer([Change(KEYS[0], BLOCK_BYTES)])
        spiller.withdraw([KEYS[0]])
        spiller.withdraw([KEYS[1]])
        assert (1, {Reason.EVICTED: 1}) == (
            spiller.counts.offered,
            spiller.counts.dropped,
        )
        assert spiller.is_idle

    def test_stop_amid_a_call_is_counted(self, slab) -> None:
        """R-55: an agent that stops leaves misses, and each block has its end."""
        backend = Unruly()
        backend.does.hangs = True
        save(slab, KEYS[:3])

        async def spill():
            async with open_core(slab, backend) as core:
                await core._take_changes()
                await inline(lambda: None)
                await inline(lambda: None)
            return core.spillers[0]

        spiller = run_virtual(spill)
        assert 3 == ends(spiller)
        assert (0, 0) == (spiller.num_waiting, spiller.num_moving)
        assert {Reason.SHUTDOWN: 3} == spiller.counts.dropped

    def test_full_tier_is_a_drop(self, slab) -> None:
        """R-55: a tier that has no room for a block says so, and it is counted."""
        backend = Unruly(Shelf(10))
        save(slab, KEYS[:2])

        async def spill():
            async with open_core(slab, backend) as core:
                await core.drain()
                return core.spillers[0].counts

        assert {Reason.STORE_FULL: 2} == run_virtual(spill).dropped
