# SPDX-License-Identifier: Apache-2.0
"""Fetch: what a tier has comes into the slab once, verified, in time and pinned."""

import anyio
import pytest

from tests.agent.unruly import TIMEOUT_S, Unruly, lay, open_core, run_virtual, want_of
from tests.stores.slab_kit import open_slab
from ucm.agent import calls
from ucm.agent.register import Register
from ucm.errors import StoreFullError, StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.wrap import WrapperStore
from ucm.testing.store_blocks import BLOCK_BYTES, load, make_keys, payload, save

KEYS = make_keys(80)


@pytest.fixture
def slab(tmp_path):
    """Return a slab of 64 blocks, of which a fetch may have eight."""
    with open_slab(tmp_path / "slab", 64) as store:
        yield store


def fetch_all(slab, *backends, wants, laid=KEYS[:8]):
    """Have wants of a core's tiers fetched side by side; return them with the core."""

    async def fetch():
        await lay(backends[0], laid)
        async with open_core(slab, *backends) as core:
            made = [want_of(keys) for keys in wants]
            async with anyio.create_task_group() as tasks:
                for want in made:
                    tasks.start_soon(core.fetch, want)
            return made, core

    return run_virtual(fetch)


class TestFetch:
    def test_wanted_blocks_come_with_their_bytes(self, slab) -> None:
        """R-53: what the tier has is in the slab then, verified, and the want says so."""
        (want,), core = fetch_all(slab, Unruly(), wants=[KEYS[:6]])
        assert (6, Reason.NONE) == (want.found, want.reason)
        assert [payload(key) for key in KEYS[:6]] == load(slab, KEYS[:6])
        assert 6 * BLOCK_BYTES == core.fetcher.counts.nbytes

    def test_what_the_slab_has_is_not_fetched(self, slab) -> None:
        """R-53: only what is missing is asked for."""
        backend = Unruly()
        save(slab, KEYS[:3])
        (want,), _ = fetch_all(slab, backend, wants=[KEYS[:6]])
        assert (6, [0, 0, 0, 1, 1, 1]) == (want.found, want.media)
        assert KEYS[3:6] == backend.got

    def test_blocks_that_come_together_are_waited_for_once(
        self, slab, monkeypatch
    ) -> None:
        """R-53: what one call has brought costs one wait, however many blocks it is."""
        waited, end = [], Register.end

        def counted(register, flights, reason):
            waited.extend(flight.done is not None for flight in flights)
            end(register, flights, reason)

        monkeypatch.setattr(Register, "end", counted)
        (want,), _ = fetch_all(slab, Unruly(), wants=[KEYS[:6]])
        assert (6, 6, 1) == (want.found, len(waited), sum(waited))

    def test_block_that_several_want_is_fetched_once(self, slab) -> None:
        """R-53: wants that share keys share their flights."""
        backend = Unruly()
        backend.does.delay = 1.0
        wants, core = fetch_all(slab, backend, wants=[KEYS[:6], KEYS[:4], KEYS[:6]])
        assert [6, 4, 6] == [want.found for want in wants]
        assert KEYS[:6] == backend.got
        counts = core.fetcher.counts
        assert (6, 10, 6) == (counts.begun, counts.joined, counts.fetched)

    def test_a_call_is_of_so_many_bytes_only(self, slab, monkeypatch) -> None:
        """R-52: a slow drive is through with a call in its time, however large blocks are."""
        backend = Unruly()
        monkeypatch.setattr(calls, "CALL_BYTES", 2 * BLOCK_BYTES + 1)
        (want,), _ = fetch_all(slab, backend, wants=[KEYS[:6]])
        assert (6, 3) == (want.found, backend.asked.count("get"))

    def test_nothing_is_fetched_behind_a_hole(self, slab) -> None:
        """R-53: blocks behind one that no tier has are of no use, and stay where they are."""
        backend = Unruly()
        laid = [*KEYS[:3], *KEYS[4:8]]
        (want,), _ = fetch_all(slab, backend, wants=[KEYS[:8]], laid=laid)
        assert (3, Reason.ABSENT) == (want.found, want.reason)
        assert KEYS[:3] == backend.got

    def test_tiers_are_asked_in_order(self, slab) -> None:
        """R-53: what the first tier lacks the second is asked for."""
        first, second = Unruly(), Unruly()

        async def fetch():
            await lay(first, KEYS[:2])
            await lay(second, KEYS[:5])
            async with open_core(slab, first, second) as core:
                want = want_of(KEYS[:5])
                await core.fetch(want)
                return want

        want = run_virtual(fetch)
        assert (5, [1, 1, 2, 2, 2]) == (want.found, want.media)
        assert (KEYS[:2], KEYS[2:5]) == (first.got, second.got)


class TestTrouble:
    def test_could_not_ask_is_no_miss(self, slab) -> None:
        """R-51: a tier that could not be asked is told apart from one without the block,
        and nothing is fetched."""
        backend = Unruly()
        backend.does.is_down = True
        (want,), _ = fetch_all(slab, backend, wants=[KEYS[:4]])
        assert (0, Reason.UNAVAILABLE) == (want.found, want.reason)
        assert [] == backend.got

    def test_damaged_bytes_are_never_seen(self, slab) -> None:
        """R-53: what does not have the checksum that travelled with it is a miss, and is
        deleted where it came from."""
        backend = Unruly()
        backend.does.flips = True
        (want,), _ = fetch_all(slab, backend, wants=[KEYS[:4]])
        assert (0, Reason.CORRUPT) == (want.found, want.reason)
        assert [False] * 4 == slab.contains(KEYS[:4])
        assert set(KEYS[4:8]) == set(backend.shelf.values)
        assert 0 == slab.stats().reserved_blocks

    def test_block_under_another_key_is_never_seen(self, slab) -> None:
        """R-53: the right bytes of another block are the wrong ones."""
        backend = Unruly()

        async def fetch():
            await lay(backend, KEYS[:1])
            backend.shelf.values[KEYS[1]] = backend.shelf.values[KEYS[0]]
            async with open_core(slab, backend) as core:
                want = want_of(KEYS[1:2])
                await core.fetch(want)
                return want

        want = run_virtual(fetch)
        assert (0, Reason.CORRUPT) == (want.found, want.reason)
        assert [False] == slab.contains(KEYS[1:2])

    def test_tier_that_lies_about_what_it_has_is_a_miss(self, slab) -> None:
        """R-51: present, and then absent, ends the flight as absent."""
        backend = Unruly()
        backend.does.lies_present = True
        (want,), core = fetch_all(slab, backend, wants=[KEYS[:4]], laid=KEYS[:2])
        assert (2, Reason.ABSENT) == (want.found, want.reason)
        assert 0 == core.fetcher.num_open

    def test_want_ends_at_its_deadline_with_what_has_come(self, slab) -> None:
        """R-54: at the deadline the want says how much of it is there."""
        backend = Unruly(in_flight=1)
        backend.does.delay = 1.0

        async def fetch():
            await lay(backend, KEYS[:8])
            async with open_core(slab, backend) as core:
                want = want_of(KEYS[:8], seconds=2.5)
                await core.fetch(want)
                return want, anyio.current_time()

        want, now = run_virtual(fetch)
        assert (4, Reason.DEADLINE, 2.5) == (want.found, want.reason, now)

    def test_tier_that_hangs_costs_a_want_its_deadline_only(self, slab) -> None:
        """R-54: no want waits longer than it said, and no flight for ever."""
        backend = Unruly()
        backend.does.hangs = True

        async def fetch():
            async with open_core(slab, backend) as core:
                want = want_of(KEYS[:8], seconds=0.5)
                await core.fetch(want)
                now = anyio.current_time()
                await anyio.sleep(TIMEOUT_S)
                return want.reason, now, core.fetcher.num_open

        assert (Reason.DEADLINE, 0.5, 0) == run_virtual(fetch)

    def test_lost_slab_is_a_miss(self, tmp_path) -> None:
        """R-63: an agent whose slab was closed finds nothing, and says why."""
        slab = open_slab(tmp_path / "slab", 64)

        async def fetch():
            async with open_core(slab, Unruly()) as core:
                slab.close()
                want = want_of(KEYS[:2])
                await core.fetcher.fetch(want)
                return want

        assert (0, Reason.UNAVAILABLE) == (
            (want := run_virtual(fetch)).found,
            want.reason,
        )


class TestBudget:
    def test_wants_have_their_slots_whole_and_in_turn(self, slab) -> None:
        """R-53: of two wants that do not fit together one has all of its blocks, and the
        other its own once the first is dropped."""
        backend = Unruly()

        async def fetch():
            await lay(backend, KEYS[:12])
            async with open_core(slab, backend) as core:
                first, second = want_of(KEYS[:6]), want_of(KEYS[6:12])
                await core.fetch(first)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, second)
                    await anyio.sleep(1.0)
                    before = second.found, slab.contains(KEYS[6:12])
                    core.drop(first)
                return first.found, before, second.found

        assert (6, (0, [False] * 6), 6) == run_virtual(fetch)

    def test_want_beyond_the_budget_has_its_first_blocks(self, slab) -> None:
        """R-53: a want that is larger than all slots gets the part that is of use."""
        backend = Unruly()
        (want,), _ = fetch_all(slab, backend, wants=[KEYS[:12]], laid=KEYS[:12])
        assert (8, Reason.STORE_FULL) == (want.found, want.reason)

    def test_want_that_ended_while_it_waited_takes_no_slot(self, slab) -> None:
        """R-53: whose time was up before its turn lets the next one go on."""
        backend = Unruly()

        async def fetch():
            await lay(backend, KEYS[:20])
            async with open_core(slab, backend) as core:
                first, late = want_of(KEYS[:8]), want_of(KEYS[8:14], seconds=1.0)
                await core.fetch(first)
                await core.fetch(late)
                last = want_of(KEYS[14:20])
                core.drop(first)
                await core.fetch(last)
                return late.found, last.found, core.fetcher._budget.left

        assert (0, 6, 2) == run_virtual(fetch)
        assert not set(KEYS[8:14]) & set(backend.got)

    def test_flights_that_nobody_wants_any_more_give_up_their_turn(self, slab) -> None:
        """R-53, R-63: a want whose time is over stands before nobody, and nothing of it
        is left."""
        backend = Unruly()

        async def fetch():
            await lay(backend, KEYS[:24])
            async with open_core(slab, backend) as core:
                first, late = want_of(KEYS[:6]), want_of(KEYS[6:12], seconds=1.0)
                small = want_of(KEYS[12:14])
                await core.fetch(first)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, late)
                    await anyio.sleep(0.5)
                    tasks.start_soon(core.fetch, small)
                    await anyio.sleep(0.25)
                    before = small.found
                    await anyio.sleep(1.0)
                    after, num_open = small.found, core.fetcher.num_open
                return late.found, before, after, num_open, core.fetcher._budget.left

        assert (0, 0, 2, 0, 0) == run_virtual(fetch)

    def test_slots_granted_as_the_last_want_goes_are_given_back(self, slab) -> None:
        """R-53: whose turn came when nobody wanted it any more has nothing of it."""
        backend = Unruly()

        async def fetch():
            await lay(backend, KEYS[:12])
            async with open_core(slab, backend) as core:
                first, late = want_of(KEYS[:6]), want_of(KEYS[6:12])
                await core.fetch(first)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, late)
                    await anyio.sleep(1.0)
                    core.drop(first)
                    flights = list(core.fetcher.register.by_key.values())
                    groups = {each.group for each in flights}
                    await core.fetcher._flights.leave(late, groups, flights)
                return late.reason, core.fetcher._budget.left

        assert (Reason.DEADLINE, 8) == run_virtual(fetch)

    def test_want_that_comes_as_another_gives_up_has_flights_of_its_own(
        self, slab
    ) -> None:
        """R-53: what nobody waited for is not joined, but begun anew."""
        backend = Unruly()

        async def fetch():
            await lay(backend, KEYS[:12])
            async with open_core(slab, backend) as core:
                first, early = want_of(KEYS[:6]), want_of(KEYS[6:12], seconds=1.0)
                late = want_of(KEYS[6:12])
                await core.fetch(first)
                await core.fetch(early)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, late)
                    await anyio.sleep(1.0)
                    core.drop(first)
                return early.found, late.found, core.fetcher.counts.joined

        assert (0, 6, 0) == run_virtual(fetch)

    def test_calls_that_hang_keep_their_slots(self, slab) -> None:
        """R-53, R-63: a drive that hangs in the kernel holds no more of the slab than fetches
        may have, however many requests come and go meanwhile, and calls it takes."""
        backend = Unruly(in_flight=100)
        backend.does.is_stuck = True

        async def fetch():
            await lay(backend, KEYS)
            async with open_core(slab, backend) as core:
                for start in range(0, 80, 8):
                    want = want_of(KEYS[start : start + 8], seconds=1.0)
                    await core.fetch(want)
                    core.drop(want)
                left = len(KEYS) - len(backend.got)
                backend.free.set()
                await anyio.sleep(10.0)
                return left, core.fetcher.num_open, core.fetcher._budget.left

        assert (len(KEYS) - 8, 0, 8) == run_virtual(fetch)

    def test_flight_whose_first_want_was_late_lands_for_the_others(self, slab) -> None:
        """R-53: a flight is its wants' together: one that gave up takes nothing along."""
        backend = Unruly()

        async def fetch():
            await lay(backend, KEYS[:14])
            async with open_core(slab, backend) as core:
                first = want_of(KEYS[:8])
                await core.fetch(first)
                early, late = want_of(KEYS[8:14], seconds=1.0), want_of(KEYS[8:14])
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(core.fetch, early)
                    tasks.start_soon(core.fetch, late)
                    await anyio.sleep(2.0)
                    core.drop(early)
                    core.drop(first)
                await anyio.sleep(1.0)  # its flights' slots are told behind their end
                return early.found, late.found, late.num_slots

        assert (0, 6, 6) == run_virtual(fetch)


class TestPin:
    def test_fetched_blocks_outlive_newer_saves(self, slab) -> None:
        """R-53: what was fetched is pinned: saves that fill the slab evict others."""
        _, _ = fetch_all(slab, Unruly(), wants=[KEYS[:6]])
        others = make_keys(64, first=1000)
        for start in range(0, 64, 8):
            save(slab, others[start : start + 8])
        assert [True] * 6 == slab.contains(KEYS[:6])

    def test_blocks_that_were_there_are_pinned_as_well(self, slab) -> None:
        """R-53: the part of a want that the slab had does not go while the rest comes."""
        save(slab, KEYS[:3])
        _, _ = fetch_all(slab, Unruly(), wants=[KEYS[:6]])
        others = make_keys(64, first=1000)
        for start in range(0, 64, 8):
            save(slab, others[start : start + 8])
        assert [True] * 6 == slab.contains(KEYS[:6])


class Refusing(WrapperStore):
    """A slab that gives no slots."""

    def __init__(self, inner, error) -> None:
        super().__init__(inner)
        self._error = error

    def reserve(self, keys, block_bytes, uses=None):
        """Refuse."""
        raise self._error


class TestNoRoom:
    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (StoreFullError("full"), Reason.STORE_FULL),
            (StoreUnavailableError("locked"), Reason.UNAVAILABLE),
        ],
    )
    def test_slab_without_a_slot_is_a_miss(self, slab, error, reason) -> None:
        """R-53: where no slot can be had the want says why, and the agent goes on."""
        (want,), core = fetch_all(Refusing(slab, error), Unruly(), wants=[KEYS[:4]])
        assert (0, reason) == (want.found, want.reason)
        assert 0 == core.fetcher.num_open
        assert {reason: 4} == core.fetcher.counts.failed
