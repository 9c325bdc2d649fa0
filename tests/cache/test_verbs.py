# SPDX-License-Identifier: Apache-2.0
"""R-41: every verb, on asyncio and on trio."""

import anyio
import anyio.to_thread
import pytest

from tests.cache.kit import (
    LAYOUT,
    Host,
    both_loops,
    keys_of,
    span_of,
)
from tests.clocks import AdvancingThreads
from ucm.errors import (
    StoreUnavailableError,
)
from ucm.pipeline.tickets import OutcomeKind
from ucm.prefixes import Place
from ucm.reasons import Reason
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

pytestmark = pytest.mark.anyio

ONE_TICKET = {"queue": {"tickets": 1}}


@both_loops
class TestMoving:
    async def test_saved_blocks_are_found_and_loaded(self) -> None:
        """What was saved from some blocks is in others afterwards, byte for byte."""
        host = Host(config=span_of())
        async with host.cache() as cache:
            keys = keys_of(5)
            assert 0 == await cache.match(keys)
            save = cache.save(keys, range(5))
            await save.source_released
            saved = await save.committed
            assert (OutcomeKind.COMMITTED, 5, 5) == (
                saved.kind,
                saved.leading,
                saved.committed,
            )
            assert save.is_over
            assert 5 == await cache.match(keys)
            some = [keys_of(6)[5], *keys[3:]]
            assert [False, True, True] == await cache.contains(some)
            loaded = await cache.load(keys, range(20, 25))
            assert loaded.is_whole
            assert host.content(range(5)) == host.content(range(20, 25))
            told = await cache.statistics()
            assert (5, 5, 0) == (
                told.saved_blocks,
                told.loaded_blocks,
                told.open_transfers,
            )
        host.check_left()

    async def test_what_is_stored_is_skipped(self) -> None:
        """A second save of the same blocks says so, and they are found all the same."""
        host = Host()
        async with host.cache() as cache:
            await cache.save(keys_of(3), range(3)).committed
            again = await cache.save(keys_of(3), range(10, 13)).committed
            assert (OutcomeKind.SKIPPED, 3, 0) == (
                again.kind,
                again.leading,
                again.committed,
            )
        host.check_left()

    async def test_load_says_how_many_leading_blocks_are_there(self) -> None:
        """A block that is gone ends the prefix; the parts before it are loaded."""
        host = Host(config=span_of())
        async with host.cache() as cache:
            keys = keys_of(6)
            await cache.save(keys, range(6)).committed
            assert 1 == (await cache.forget(keys[3:4])).in_store
            loaded = await cache.load(keys, range(20, 26))
            assert (OutcomeKind.FAILED, Reason.EVICTED, 2, 4) == (
                loaded.kind,
                loaded.reason,
                loaded.leading,
                loaded.committed,
            )
            assert host.content(range(2)) == host.content(range(20, 22))
        host.check_left()

    async def test_source_is_released_long_before_the_commit(self) -> None:
        """A host may overwrite blocks while the store is slow, and stores the old."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)))
        async with host.cache() as cache:
            before = host.content(range(2))
            save = cache.save(keys_of(2), range(2))
            await save.source_released
            assert not save.is_over
            for array in host.pool.values():
                array[:2] = 0
            gate.open()
            await save.committed
            await cache.load(keys_of(2), range(8, 10))
            assert before == host.content(range(8, 10))
        host.check_left()

    async def test_nothing_to_move_is_over_at_once(self) -> None:
        """A prompt without a whole block needs no special case in the host."""
        host = Host()
        async with host.cache() as cache:
            save = cache.save([], [])
            await save.source_released
            assert (await save.committed).is_whole
            assert (await cache.load([], [])).is_whole
            assert 0 == await cache.match([])
        host.check_left()

    async def test_failed_store_is_a_value_and_no_error(self) -> None:
        """A save that cannot be stored says why; the next one goes on."""
        error = raising(StoreUnavailableError("gone"))
        host = Host(FaultPlan(Fault("reserve", error)))
        async with host.cache() as cache:
            failed = await cache.save(keys_of(2), range(2)).committed
            assert (OutcomeKind.FAILED, Reason.UNAVAILABLE, 0) == (
                failed.kind,
                failed.reason,
                failed.leading,
            )
            assert (await cache.save(keys_of(2), range(2)).committed).is_whole
        host.check_left()


@both_loops
class TestFullQueue:
    async def test_save_is_refused_as_a_rule(self) -> None:
        """A host that computes must not wait for a store that is slow."""
        gate = Gate()
        host = Host(FaultPlan(Fault("gather", gate)), ONE_TICKET)
        async with host.cache() as cache:
            saves = [cache.save(keys_of(1, at), [at]) for at in range(12)]
            assert OutcomeKind.REFUSED is (await saves[-1].committed).kind
            gate.open()
            ends = [await save.committed for save in saves]
            refused = [end for end in ends if end.kind is OutcomeKind.REFUSED]
            assert {Reason.QUEUE_TICKETS} == {end.reason for end in refused}
            assert ends[0].is_whole
        host.check_left()

    async def test_save_that_waits_is_stored_in_its_turn(self) -> None:
        """Where the host prefers to wait, nothing is refused, in the order of calls."""
        host = Host(config=ONE_TICKET)
        async with host.cache() as cache:
            saves = [
                cache.save(keys_of(2, at), [0, 1], wait_for_room=True)
                for at in range(20)
            ]
            ends = [await save.committed for save in saves]
            assert {OutcomeKind.COMMITTED} == {end.kind for end in ends}
            assert 40 == (await cache.statistics()).saved_blocks
        host.check_left()

    async def test_save_that_waits_can_be_cancelled(self) -> None:
        """It never reaches the queue, and its blocks are free at once."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)), ONE_TICKET)
        async with host.cache() as cache:
            first = cache.save(keys_of(1), [0], wait_for_room=True)
            await anyio.to_thread.run_sync(gate.wait_reached)
            second = cache.save(keys_of(1, 1), [1], wait_for_room=True)
            assert 1 == (await cache.statistics()).waiting_parts
            second.cancel()
            await second.source_released
            end = await second.committed
            assert (OutcomeKind.CANCELLED, Reason.WITHDRAWN) == (
                end.kind,
                end.reason,
            )
            assert 0 == (await cache.statistics()).waiting_parts
            gate.open()
            assert (await first.committed).is_whole
        host.check_left()


@both_loops
class TestRoom:
    async def test_room_is_made_from_the_end_of_a_prefix(self) -> None:
        """A prompt that is longer than the store keeps its head, however it is saved."""
        host = Host(config=span_of(), capacity=8)
        async with host.cache() as cache:
            keys = keys_of(12)
            for first in (8, 4, 0):
                place = Place(first=first, began_ns=10**9)
                part = slice(first, first + 4)
                await cache.save(keys[part], range(4), place=place).committed
            assert 8 == await cache.match(keys)
        host.check_left()

    async def test_retained_blocks_stay_where_used_ones_go(self) -> None:
        """What the host wants to keep outlives what was used after it."""
        host = Host(capacity=8)
        async with host.cache() as cache:
            await cache.save(keys_of(2), range(2)).committed
            await cache.retain(keys_of(2), ttl=600)
            for seed in range(1, 6):
                await cache.save(keys_of(2, seed), range(2)).committed
            assert 2 == await cache.match(keys_of(2))
            assert 0 == await cache.match(keys_of(2, 1))
        host.check_left()

    async def test_priority_is_a_time_that_wears_off(self) -> None:
        """Who is kept for longer goes later, less takes nothing back, and who began long ago is first."""
        threads = AdvancingThreads()
        host = Host(capacity=4, threads=threads)

        def now_ns() -> int:
            return int(threads.monotonic() * 1e9)

        host.store = MemoryStore(4, LAYOUT.max_block_bytes, now_ns, retain_share=0.5)
        async with host.cache() as cache:
            later = now_ns() + 600 * 10**9
            parts = [keys_of(1, seed) for seed in range(4)]
            for part, began_ns in zip(parts, (later, 0, 0, 1), strict=True):
                place = Place(began_ns=began_ns)
                await cache.save(part, range(1), place=place).committed
            await cache.retain(parts[0], ttl=1)
            await cache.retain(parts[1], ttl=60)
            found = []
            for seed in range(4, 8):
                threads.advance(30)
                await cache.save(keys_of(1, seed), range(1)).committed
                found.append([await cache.match(part) for part in parts])
            assert [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]] == found
        host.check_left()

    async def test_loaded_and_touched_blocks_count_as_used(self) -> None:
        """Who is in use stays; who is not goes, whatever was stored first."""
        host = Host(capacity=6)
        async with host.cache() as cache:
            for seed in range(3):
                await cache.save(keys_of(2, seed), range(2)).committed
            await cache.load(keys_of(2, 0), range(2, 4))
            await cache.touch(keys_of(2, 1))
            await cache.save(keys_of(2, 3), range(2)).committed
            found = [await cache.match(keys_of(2, seed)) for seed in range(4)]
            assert [2, 2, 0, 2] == found
        host.check_left()
