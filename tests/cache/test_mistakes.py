# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a host have names, and trouble with the store is no error of its own."""

from decimal import Decimal
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from tests.cache.kit import Host, both_loops, keys_of
from ucm.errors import (
    BlockInUseError,
    EventNotRecordedError,
    KeyFormatError,
    LayoutError,
    PipelineClosedError,
    StoreUnavailableError,
)
from ucm.pipeline.tickets import OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

pytestmark = pytest.mark.anyio


@both_loops
class TestMistakes:
    async def test_block_is_not_written_by_two_at_once(self) -> None:
        """A load refuses blocks that another one writes or a save reads, and a save
        those that a load writes."""
        gate = Gate()
        host = Host(FaultPlan(Fault("read", gate)))
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
        host.check_left()

    async def test_block_of_a_tensor_is_not_written_by_two_at_once(self) -> None:
        """Each element of a tensor is an object of its own, and the same block."""
        torch = pytest.importorskip("torch")
        gate = Gate()
        host = Host(FaultPlan(Fault("read", gate)))
        async with host.cache() as cache, anyio.create_task_group() as group:
            group.start_soon(cache.load, keys_of(2), torch.arange(2))
            await anyio.to_thread.run_sync(gate.wait_reached)
            try:
                for blocks in ([1], torch.tensor([1]), np.array([1])):
                    with pytest.raises(BlockInUseError, match="block 1 is in use"):
                        cache.save(keys_of(1), blocks)
                    with pytest.raises(BlockInUseError, match="block 1 is in use"):
                        await cache.load(keys_of(1), blocks)
            finally:
                gate.open()
        host.check_left()

    async def test_keys_and_blocks_may_be_arrays(self) -> None:
        """A host that has tables of both gives a part of each to any verb."""
        host, keys = Host(), np.array(keys_of(4), dtype=object)
        async with host.cache() as cache:
            assert (await cache.save(keys, np.arange(4)).committed).is_whole
            assert 4 == await cache.match(keys)
            assert (await cache.load(keys, np.arange(8, 12))).is_whole
        host.check_left()

    async def test_block_that_a_save_reads_is_not_written(self) -> None:
        """Bytes of one prompt would be stored under the key of another."""
        gate = Gate()
        host = Host(FaultPlan(Fault("gather", gate)))
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
        host.check_left()

    async def test_keys_that_are_none_are_refused_before_anything_is_done(self) -> None:
        """Each mistake has its name, and the store hears of none."""
        host = Host()
        one, two = keys_of(2)
        text: Any = "0" * 32
        async with host.cache() as cache:
            for keys, blocks in (
                ([one], [1, 2]),
                ([text], [1]),
                ([one, one], [1, 2]),
                ([one, two[:16]], [1, 2]),
                ([b"short"], [1]),
                ([bytes(65)], [1]),
                ([one], [1.5]),
                ([one, two], "12"),
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
            for ttl in (Decimal(2), np.float16(2)):  # numbers all the same
                await cache.retain([one], ttl=ttl)
            for seconds in (-1.0, float("nan")):
                with pytest.raises(ValueError, match="timeout"):
                    await cache.prefetch([one], timeout=seconds)
            with pytest.raises(EventNotRecordedError):
                cache.save([one], [1], after=object())
            assert 0 == (await cache.statistics()).open_transfers
        host.check_left()
        assert {"reserve", "read", "match"}.isdisjoint(host.plan.calls)

    async def test_block_out_of_range_is_a_failed_save(self) -> None:
        """Nothing is read from memory that is not the host's."""
        host = Host()
        async with host.cache() as cache:
            end = await cache.save(keys_of(1), [64]).committed
            assert (OutcomeKind.FAILED, Reason.DEVICE) == (end.kind, end.reason)
            assert "block 64 is not in 0..63" in end.error
        host.check_left()

    async def test_closed_cache_says_so(self) -> None:
        """Each verb, before anything else."""
        host = Host()
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
        host.check_left()


@both_loops
class TestTrouble:
    async def test_store_that_cannot_be_asked_has_nothing(self) -> None:
        """A look-up is a miss then, and no error in the host."""
        error = raising(StoreUnavailableError("gone"))
        host = Host(FaultPlan(Fault("match", error)))
        async with host.cache() as cache:
            assert 0 == await cache.match(keys_of(2))
            assert [False] * 2 == await cache.contains(keys_of(2))
        host.check_left()

    async def test_store_that_does_not_answer_is_not_waited_for(self) -> None:
        """At the deadline it is a miss, and what nobody waits for is not asked."""
        gate = Gate()
        config = {"timeout": {"load": 0.05}}
        host = Host(FaultPlan(Fault("match", gate)), config)
        async with host.cache() as cache:
            assert 0 == await cache.match(keys_of(2))
            with pytest.raises(StoreUnavailableError):
                await cache.touch(keys_of(2))
            gate.open()
        host.check_left()
        assert host.plan.calls["match"] <= 1  # none, where the deadline came first
