# SPDX-License-Identifier: Apache-2.0
"""R-41: every verb, on asyncio and on trio."""

import anyio
import anyio.to_thread
import pytest

from tests.cache.kit import Host, both_loops, keys_of, leaving_nothing, run, span_of
from ucm.errors import (
    BlockInUseError,
    EventNotRecordedError,
    KeyFormatError,
    LayoutError,
    PipelineClosedError,
    StoreUnavailableError,
)
from ucm.pipeline.tickets import OutcomeKind
from ucm.prefixes import Place
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

ONE_TICKET = {"queue": {"tickets": 1}}


@both_loops
class TestMoving:
    def test_saved_blocks_are_found_and_loaded(self, loop: str) -> None:
        """What was saved from some blocks is in others afterwards, byte for byte."""
        host = Host(config=span_of())

        async def main() -> None:
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
                loaded = await cache.load(keys, range(20, 25))
                assert loaded.is_whole
                assert host.content(range(5)) == host.content(range(20, 25))
                told = await cache.statistics()
                assert (5, 5, 0) == (
                    told.saved_blocks,
                    told.loaded_blocks,
                    told.open_transfers,
                )

        with leaving_nothing(host):
            run(loop, main)

    def test_what_is_stored_is_skipped(self, loop: str) -> None:
        """A second save of the same blocks says so, and they are found all the same."""
        host = Host()

        async def main() -> None:
            async with host.cache() as cache:
                await cache.save(keys_of(3), range(3)).committed
                again = await cache.save(keys_of(3), range(10, 13)).committed
                assert (OutcomeKind.SKIPPED, 3, 0) == (
                    again.kind,
                    again.leading,
                    again.committed,
                )

        with leaving_nothing(host):
            run(loop, main)

    def test_load_says_how_many_leading_blocks_are_there(self, loop: str) -> None:
        """A block that is gone ends the prefix; the parts before it are loaded."""
        host = Host(config=span_of())

        async def main() -> None:
            async with host.cache() as cache:
                keys = keys_of(6)
                await cache.save(keys, range(6)).committed
                assert 1 == await cache.forget(keys[3:4])
                loaded = await cache.load(keys, range(20, 26))
                assert (OutcomeKind.FAILED, Reason.EVICTED, 2, 4) == (
                    loaded.kind,
                    loaded.reason,
                    loaded.leading,
                    loaded.committed,
                )
                assert host.content(range(2)) == host.content(range(20, 22))

        with leaving_nothing(host):
            run(loop, main)

    def test_source_is_released_long_before_the_commit(self, loop: str) -> None:
        """A host may overwrite blocks while the store is slow, and stores the old."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)))

        async def main() -> None:
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

        with leaving_nothing(host):
            run(loop, main)

    def test_nothing_to_move_is_over_at_once(self, loop: str) -> None:
        """A prompt without a whole block needs no special case in the host."""
        host = Host()

        async def main() -> None:
            async with host.cache() as cache:
                save = cache.save([], [])
                await save.source_released
                assert (await save.committed).is_whole
                assert (await cache.load([], [])).is_whole
                assert 0 == await cache.match([])

        with leaving_nothing(host):
            run(loop, main)

    def test_failed_store_is_a_value_and_no_error(self, loop: str) -> None:
        """A save that cannot be stored says why; the next one goes on."""
        error = raising(StoreUnavailableError("gone"))
        host = Host(FaultPlan(Fault("reserve", error)))

        async def main() -> None:
            async with host.cache() as cache:
                failed = await cache.save(keys_of(2), range(2)).committed
                assert (OutcomeKind.FAILED, Reason.UNAVAILABLE, 0) == (
                    failed.kind,
                    failed.reason,
                    failed.leading,
                )
                assert (await cache.save(keys_of(2), range(2)).committed).is_whole

        with leaving_nothing(host):
            run(loop, main)


@both_loops
class TestFullQueue:
    def test_save_is_refused_as_a_rule(self, loop: str) -> None:
        """A host that computes must not wait for a store that is slow."""
        gate = Gate()
        host = Host(FaultPlan(Fault("gather", gate)), ONE_TICKET)

        async def main() -> None:
            async with host.cache() as cache:
                saves = [cache.save(keys_of(1, at), [at]) for at in range(12)]
                assert OutcomeKind.REFUSED is (await saves[-1].committed).kind
                gate.open()
                ends = [await save.committed for save in saves]
                refused = [end for end in ends if end.kind is OutcomeKind.REFUSED]
                assert {Reason.QUEUE_TICKETS} == {end.reason for end in refused}
                assert ends[0].is_whole

        with leaving_nothing(host):
            run(loop, main)

    def test_save_that_waits_is_stored_in_its_turn(self, loop: str) -> None:
        """Where the host prefers to wait, nothing is refused, in the order of calls."""
        host = Host(config=ONE_TICKET)

        async def main() -> None:
            async with host.cache() as cache:
                saves = [
                    cache.save(keys_of(2, at), [0, 1], wait_for_room=True)
                    for at in range(20)
                ]
                ends = [await save.committed for save in saves]
                assert {OutcomeKind.COMMITTED} == {end.kind for end in ends}
                assert 40 == (await cache.statistics()).saved_blocks

        with leaving_nothing(host):
            run(loop, main)

    def test_save_that_waits_can_be_cancelled(self, loop: str) -> None:
        """It never reaches the queue, and its blocks are free at once."""
        gate = Gate()
        host = Host(FaultPlan(Fault("commit", gate)), ONE_TICKET)

        async def main() -> None:
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

        with leaving_nothing(host):
            run(loop, main)


@both_loops
class TestRoom:
    def test_room_is_made_from_the_end_of_a_prefix(self, loop: str) -> None:
        """A prompt that is longer than the store keeps its head, however it is saved."""
        host = Host(config=span_of(), capacity=8)

        async def main() -> None:
            async with host.cache() as cache:
                keys = keys_of(12)
                for first in (8, 4, 0):
                    place = Place(first=first, began_ns=10**9)
                    part = slice(first, first + 4)
                    await cache.save(keys[part], range(4), place=place).committed
                assert 8 == await cache.match(keys)

        with leaving_nothing(host):
            run(loop, main)

    def test_retained_blocks_stay_where_used_ones_go(self, loop: str) -> None:
        """What the host wants to keep outlives what was used after it."""
        host = Host(capacity=4)

        async def main() -> None:
            async with host.cache() as cache:
                await cache.save(keys_of(2), range(2)).committed
                await cache.retain(keys_of(2), ttl=600)
                for seed in range(1, 5):
                    await cache.save(keys_of(2, seed), range(2)).committed
                assert 2 == await cache.match(keys_of(2))
                assert 0 == await cache.match(keys_of(2, 1))

        with leaving_nothing(host):
            run(loop, main)

    def test_loaded_and_touched_blocks_count_as_used(self, loop: str) -> None:
        """Who is in use stays; who is not goes, whatever was stored first."""
        host = Host(capacity=6)

        async def main() -> None:
            async with host.cache() as cache:
                for seed in range(3):
                    await cache.save(keys_of(2, seed), range(2)).committed
                await cache.load(keys_of(2, 0), range(2, 4))
                await cache.touch(keys_of(2, 1))
                await cache.save(keys_of(2, 3), range(2)).committed
                found = [await cache.match(keys_of(2, seed)) for seed in range(4)]
                assert [2, 2, 0, 2] == found

        with leaving_nothing(host):
            run(loop, main)


@both_loops
class TestMistakes:
    def test_block_is_not_written_by_two_at_once(self, loop: str) -> None:
        """A load refuses blocks that another one writes or a save reads, and a save
        those that a load writes."""
        gate = Gate()
        host = Host(FaultPlan(Fault("read", gate)))

        async def main() -> None:
            async with host.cache() as cache:
                async with anyio.create_task_group() as group:
                    group.start_soon(cache.load, keys_of(2), range(2))
                    await anyio.to_thread.run_sync(gate.wait_reached)
                    with pytest.raises(BlockInUseError, match="block 1 is in use"):
                        await cache.load(keys_of(1), [1])
                    with pytest.raises(BlockInUseError):
                        cache.save(keys_of(2), [5, 0])
                    gate.open()
                with pytest.raises(BlockInUseError):
                    await cache.load(keys_of(2), [7, 7])
                await cache.load(keys_of(2), [0, 5])  # all free again

        with leaving_nothing(host):
            run(loop, main)

    def test_block_that_a_save_reads_is_not_written(self, loop: str) -> None:
        """Bytes of one prompt would be stored under the key of another."""
        gate = Gate()
        host = Host(FaultPlan(Fault("gather", gate)))

        async def main() -> None:
            async with host.cache() as cache:
                save = cache.save(keys_of(1), [3])
                other = cache.save(keys_of(1, 1), [3])  # two may read
                await anyio.to_thread.run_sync(gate.wait_reached)
                with pytest.raises(BlockInUseError):
                    await cache.load(keys_of(1), [3])
                gate.open()
                await save.source_released
                await other.source_released
                await cache.load(keys_of(1), [3])

        with leaving_nothing(host):
            run(loop, main)

    def test_keys_that_are_none_are_refused_before_anything_is_done(
        self, loop: str
    ) -> None:
        """Each mistake has its name, and the store hears of none."""
        host = Host()
        one, two = keys_of(2)

        async def main() -> None:
            async with host.cache() as cache:
                for keys, blocks in (
                    ([one], [1, 2]),
                    ([one, one], [1, 2]),
                    ([one, two[:16]], [1, 2]),
                    ([b"short"], [1]),
                    ([bytes(65)], [1]),
                ):
                    with pytest.raises(KeyFormatError):
                        cache.save(keys, blocks)
                    with pytest.raises(KeyFormatError):
                        await cache.load(keys, blocks)
                with pytest.raises(KeyFormatError):
                    await cache.match([one, one])
                with pytest.raises(LayoutError):
                    await cache.match([one], group=1)
                with pytest.raises(ValueError, match="ttl"):
                    await cache.retain([one], ttl=0)
                with pytest.raises(EventNotRecordedError):
                    cache.save([one], [1], after=object())
                assert 0 == (await cache.statistics()).open_transfers

        with leaving_nothing(host):
            run(loop, main)
        assert {"reserve", "read", "match"}.isdisjoint(host.plan.calls)

    def test_block_out_of_range_is_a_failed_save(self, loop: str) -> None:
        """Nothing is read from memory that is not the host's."""
        host = Host()

        async def main() -> None:
            async with host.cache() as cache:
                end = await cache.save(keys_of(1), [64]).committed
                assert (OutcomeKind.FAILED, Reason.DEVICE) == (end.kind, end.reason)
                assert "block 64 is not in 0..63" in end.error

        with leaving_nothing(host):
            run(loop, main)

    def test_closed_cache_says_so(self, loop: str) -> None:
        """Each verb, before anything else."""
        host = Host()

        async def main() -> None:
            async with host.cache() as cache:
                pass
            one = keys_of(1)
            for verb in (
                lambda: cache.match(one),
                lambda: cache.load(one, [1]),
                lambda: cache.touch(one),
                lambda: cache.retain(one, ttl=1),
                lambda: cache.forget(one),
                lambda: cache.statistics(),
            ):
                with pytest.raises(PipelineClosedError):
                    await verb()
            with pytest.raises(PipelineClosedError):
                cache.save(one, [1])
            await cache.flush()

        with leaving_nothing(host):
            run(loop, main)


@both_loops
class TestTrouble:
    def test_store_that_cannot_be_asked_has_nothing(self, loop: str) -> None:
        """A look-up is a miss then, and no error in the host."""
        error = raising(StoreUnavailableError("gone"))
        host = Host(FaultPlan(Fault("match", error)))

        async def main() -> None:
            async with host.cache() as cache:
                assert 0 == await cache.match(keys_of(2))

        with leaving_nothing(host):
            run(loop, main)

    def test_store_that_does_not_answer_is_not_waited_for(self, loop: str) -> None:
        """At the deadline it is a miss, and what nobody waits for is not asked."""
        gate = Gate()
        config = {"timeout": {"load": 0.05}}
        host = Host(FaultPlan(Fault("match", gate)), config)

        async def main() -> None:
            async with host.cache() as cache:
                assert 0 == await cache.match(keys_of(2))
                with pytest.raises(StoreUnavailableError):
                    await cache.touch(keys_of(2))
                gate.open()

        with leaving_nothing(host):
            run(loop, main)
        assert 1 == host.plan.calls["match"]
