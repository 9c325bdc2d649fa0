# SPDX-License-Identifier: Apache-2.0
"""A runtime on a loop that somebody else owns."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import attrs
import pytest
import torch

from tests.kit.lockstep import Tracer
from tests.rig import (
    BLOCK_BYTES,
    KEYSPACE_DIGEST,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    NUM_ROWS,
    PAGE_BYTES,
    check_run,
    order,
)
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.embedded import EmbeddedRuntime
from ucm.errors import PipelineClosedError
from ucm.metrics import Counters
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore, Gate

SAVE, LOAD = Direction.SAVE, Direction.LOAD
LIMIT_S = 30.0


@attrs.define
class Host:
    """
    A host that runs on asyncio.

    Args:
        embedded: What it has embedded.
        runtime: Inside of it.
        device: Over its memory.
        memory: ``[row, block, byte]``.
        notices: What it was told.
        serving: The task that serves.
    """

    embedded: EmbeddedRuntime
    runtime: Runtime
    device: CPUDevice
    memory: torch.Tensor
    notices: list[Notice]
    serving: asyncio.Task[None] | None = None

    async def carry_out(self, *orders) -> list[Outcome]:
        """Carry out orders; not for ever."""
        async with asyncio.timeout(LIMIT_S):
            return await self.embedded.carry_out(
                KEYSPACE_DIGEST, orders, self.device.lease(None)
            )

    def serve(self) -> None:
        """Begin to serve."""
        self.serving = asyncio.create_task(self.embedded.serve())


@contextlib.asynccontextmanager
async def hosting(
    plan: FaultPlan | None = None, config: dict[str, object] | None = None
) -> AsyncIterator[Host]:
    """Yield a host that does not serve yet; closes it and checks its trace."""
    device = CPUDevice(NUM_BLOCKS)
    memory = torch.zeros((NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
    device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
    parsed, counters, tracer = (
        UCMConfig.from_mapping(config or {}),
        Counters(),
        Tracer(),
    )
    runtime = Runtime(
        FaultStore(MemoryStore(256, BLOCK_BYTES), plan or FaultPlan()),
        device,
        layout=LAYOUT,
        config=parsed,
        counters=counters,
        log=tracer.log,
    )
    notices: list[Notice] = []
    embedded = EmbeddedRuntime(runtime, notices.append)
    host = Host(embedded, runtime, device, memory, notices)
    try:
        yield host
    finally:
        await embedded.close()
        if host.serving is not None:
            await asyncio.wait([host.serving], timeout=LIMIT_S)
    check_run(tracer, parsed, counters)


class TestCarryOut:
    def test_blocks_are_saved_and_loaded_on_the_hosts_own_loop(self) -> None:
        """Both ways end in what they came to, and no thread has a loop of ours."""

        async def run() -> None:
            async with hosting() as host:
                host.serve()
                host.memory[:, 1:5] = 7
                (saved,) = await host.carry_out(order(1, SAVE, range(4), range(1, 5)))
                assert (OutcomeKind.COMMITTED, 4) == (saved.kind, saved.committed)
                loads = [
                    order(2, LOAD, range(2), range(10, 12), "a"),
                    order(3, LOAD, range(90, 92), range(20, 22), "b"),
                ]
                loaded, missed = await host.carry_out(*loads)
                assert OutcomeKind.COMMITTED is loaded.kind
                assert (OutcomeKind.FAILED, "evicted") == (missed.kind, missed.reason)
                assert {7} == set(host.memory[:, 10:12].flatten().tolist())
                assert "ucm-loop" not in {each.name for each in threading.enumerate()}
                assert 0 == host.runtime.num_open

        asyncio.run(run())

    def test_release_is_told_before_the_outcome(self) -> None:
        """A host that waits for outcomes only would hold blocks for too long."""

        async def run() -> None:
            async with hosting() as host:
                host.serve()
                await host.carry_out(order(1, SAVE, range(4), range(1, 5)))
                kinds = [notice.kind for notice in host.notices]
                assert [NoticeKind.RELEASED, NoticeKind.SETTLED] == kinds

        asyncio.run(run())

    def test_orders_wait_for_who_serves_them(self) -> None:
        """What is asked for before anybody serves is carried out once somebody does."""

        async def run() -> None:
            async with hosting() as host:
                one = order(1, SAVE, range(4), range(1, 5))
                early = asyncio.create_task(host.carry_out(one))
                await asyncio.sleep(0)
                host.serve()
                (outcome,) = await early
                assert OutcomeKind.COMMITTED is outcome.kind

        asyncio.run(run())

    def test_cancelled_call_leaves_its_ticket_and_the_others_alone(self) -> None:
        """Who does not want to wait any more hears nothing; the save is stored."""

        async def run() -> None:
            gate = Gate()
            async with hosting(FaultPlan(Fault("commit", gate))) as host:
                host.serve()
                one = order(1, SAVE, range(4), range(1, 5))
                call = asyncio.create_task(host.carry_out(one))
                await asyncio.to_thread(gate.wait_reached)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                gate.open()
                (after,) = await host.carry_out(order(2, SAVE, range(9), range(10, 19)))
                assert OutcomeKind.COMMITTED is after.kind
                ends = [each.outcome.kind for each in host.notices if each.outcome]
                assert [OutcomeKind.COMMITTED] * 2 == ends

        asyncio.run(run())


class TestEnd:
    def test_call_comes_back_when_the_pipeline_has_died(self) -> None:
        """Neither what is under way nor what comes later waits for who is not there."""

        async def run() -> None:
            gate = Gate()
            async with hosting(FaultPlan(Fault("reserve", gate))) as host:
                host.serve()
                one = order(1, SAVE, range(4), range(1, 5))
                call = asyncio.create_task(host.carry_out(one))
                await asyncio.to_thread(gate.wait_reached)
                host.serving.cancel()
                await asyncio.sleep(0)
                gate.open()
                (outcome,) = await call
                assert OutcomeKind.FAILED is outcome.kind
                (later,) = await host.carry_out(order(2, SAVE, range(4), range(1, 5)))
                assert (OutcomeKind.REFUSED, "failed") == (later.kind, later.reason)

        asyncio.run(run())

    def test_call_comes_back_when_the_runtime_is_closed_under_it(self) -> None:
        """What shutdown has no time for ends as cancelled, and the loop goes on
        meanwhile."""

        async def run() -> None:
            gate = Gate()
            config = {"timeout": {"shutdown": 0.2}}
            async with hosting(FaultPlan(Fault("reserve", gate)), config) as host:
                host.serve()
                one = order(1, SAVE, range(4), range(1, 5))
                call = asyncio.create_task(host.carry_out(one))
                await asyncio.to_thread(gate.wait_reached)
                closing = asyncio.create_task(host.embedded.close())
                await asyncio.sleep(0)
                await closing
                (outcome,) = await call
                assert OutcomeKind.CANCELLED is outcome.kind
                (later,) = await host.carry_out(order(2, SAVE, range(4), range(1, 5)))
                assert OutcomeKind.REFUSED is later.kind
                gate.open()

        asyncio.run(run())

    def test_closed_runtime_serves_no_more(self) -> None:
        """A host that begins to serve after the end is told so."""

        async def run() -> None:
            async with hosting() as host:
                await host.embedded.close()
                with pytest.raises(PipelineClosedError):
                    await asyncio.wait_for(host.embedded.serve(), LIMIT_S)

        asyncio.run(run())
