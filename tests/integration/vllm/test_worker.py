# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the vLLM connector, on real threads without an engine."""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import structlog
import torch
from msgspec.structs import replace

from tests.rig import BLOCK_BYTES, LAYERS, LAYOUT, NUM_BLOCKS, NUM_ROWS, PAGE_BYTES
from ucm.blocks import KeySpace, Owner
from ucm.config import UCMConfig
from ucm.integration.vllm.messages import PlanEnvelope
from ucm.integration.vllm.modes import DIRECT, Mode
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.worker import WorkerHalf
from ucm.scheduler.messages import (
    Deferral,
    SpanOrder,
    StepPlan,
    TransferKind,
    decode_report,
    encode,
)
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore, Gate
from ucm.tracing import SOURCE_RELEASED

KEYSPACE = KeySpace(
    model="m",
    weights="w",
    kv_dtype="auto",
    layout=LAYOUT.fingerprint(),
    block_tokens=16,
    parallel="tp=1",
    hash_algorithm="sha256",
    engine="test",
)


@attrs.frozen(kw_only=True)
class LocalSetup(Setup):
    """A set-up over a store of this process, whose log can be held at a gate."""

    plan: FaultPlan
    at_event: dict[str, Gate]

    def open_store(self, *, index_only: bool) -> FaultStore:
        """Return a store of this process."""
        assert not index_only
        return FaultStore(MemoryStore(64, BLOCK_BYTES), self.plan)

    def open_log(self, role: str) -> Any:
        """Return a log that stands at a gate at some events."""

        def stop(_: object, __: str, event: dict[str, Any]) -> str:
            if event["event"] in self.at_event:
                self.at_event[event["event"]]()
            return ""

        return structlog.wrap_logger(
            structlog.ReturnLogger(),
            processors=[stop],
            wrapper_class=structlog.make_filtering_bound_logger(0),
        ).bind(role=role)


def zeroed_memory() -> torch.Tensor:
    """Return the memory of an engine."""
    return torch.zeros((NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)


@contextlib.contextmanager
def working(
    plan: FaultPlan | None = None,
    at_event: dict[str, Gate] | None = None,
    mode: Mode = DIRECT,
    config: dict[str, object] | None = None,
    memory: torch.Tensor | None = None,
    *,
    overwrites_first: bool = False,
    confirms: bool = False,
) -> Iterator[WorkerHalf]:
    """Run a worker's half, over zeroed memory if none is given."""
    setup = LocalSetup(
        config=UCMConfig.from_mapping(config or {}),
        mode=mode,
        layout=LAYOUT,
        keyspace=KEYSPACE,
        num_blocks=NUM_BLOCKS,
        recomputes=True,
        overwrites_first=overwrites_first,
        confirms=confirms,
        plan=plan or FaultPlan(),
        at_event=at_event or {},
    )
    half = WorkerHalf(setup, 0, "cpu")
    if memory is None:
        memory = zeroed_memory()
    half.register(dict(zip(LAYERS, memory, strict=True)))
    try:
        yield half
    finally:
        half.close()


def an_order(
    transfer_id: int, kind: TransferKind, blocks: range, request_id: str = "r"
) -> SpanOrder:
    """Return an order for blocks named after their position."""
    hashes = b"".join(at.to_bytes(32, "big") for at in range(len(blocks)))
    return SpanOrder(
        transfer_id=transfer_id,
        kind=kind,
        owners=(Owner(request_id, generation=1, num_blocks=len(blocks)),),
        group_id=0,
        block_ids=tuple(blocks),
        hashes=hashes,
    )


def step(half: WorkerHalf, plan: StepPlan) -> tuple[set[str], set[str], set[str]]:
    """Call the hooks of one engine step and return what the engine is told."""
    envelope = PlanEnvelope(encode(replace(plan, keyspace_digest=KEYSPACE.digest)))
    half.fence(envelope)
    half.bind(envelope)
    half.start_loads()
    half.submit_saves()
    told = half.finished()
    half.clear()
    return told


class TestLoads:
    def test_failed_load_is_never_told_as_loaded(self) -> None:
        """H-05: while a failure's notice is on its way, and its blocks are released
        already, the engine hears nothing; then it hears of both at once."""
        gate = Gate()
        load = an_order(1, TransferKind.LOAD, range(1, 5))
        with working(at_event={SOURCE_RELEASED: gate}) as half:
            step(half, StepPlan(step=1, loads=(load,)))
            gate.wait_reached()
            for number in range(2, 12):
                assert (set(), set(), set()) == step(half, StepPlan(step=number))
            gate.open()
            assert half._runtime.flush(60.0)
            assert (set(), {"r"}, {"r"}) == step(half, StepPlan(step=12))
            assert (set(), set(), set()) == step(half, StepPlan(step=13))

    def test_load_is_reported_with_its_failure_and_its_block(self) -> None:
        """The scheduler hears which block was missing, before or with the load's end."""
        load = an_order(1, TransferKind.LOAD, range(1, 5))
        with working() as half:
            step(half, StepPlan(step=1, loads=(load,)))
            assert half._runtime.flush(60.0)
            envelope = half.report()
            assert envelope is not None
            report = decode_report(envelope.payloads[0])
            assert (1,) == report.loads_done
            (failure,) = report.failures
            assert ("evicted", bytes(32)) == (failure.reason, failure.bad_hash)
            assert half.report() is None


class TestSaves:
    def test_deferred_request_is_told_when_its_saves_are_released(self) -> None:
        """S1-03, S1-05: not before the copy has ended, whatever the store does then."""
        reserve, seal = Gate(), Gate()
        plan = FaultPlan(Fault("reserve", reserve), Fault("seal", seal))
        save = an_order(1, TransferKind.SAVE, range(1, 5))
        deferral = Deferral(request_id="r", generation=1)
        with working(plan) as half:
            step(half, StepPlan(step=1, saves=(save,)))
            reserve.wait_reached()
            told = step(half, StepPlan(step=2, deferred=(deferral,)))
            assert (set(), set(), set()) == told
            reserve.open()
            seal.wait_reached()
            assert ({"r"}, set(), set()) == step(half, StepPlan(step=3))
            seal.open()

    def test_request_of_another_life_is_not_waited_for(self) -> None:
        """S1-16: saves of an earlier life do not keep the present one."""
        gate = Gate()
        save = an_order(1, TransferKind.SAVE, range(1, 5))
        deferral = Deferral(request_id="r", generation=2)
        with working(FaultPlan(Fault("reserve", gate))) as half:
            step(half, StepPlan(step=1, saves=(save,)))
            gate.wait_reached()
            told = step(half, StepPlan(step=2, deferred=(deferral,)))
            assert ({"r"}, set(), set()) == told
            gate.open()

    def test_saves_and_loads_of_one_key_space_find_each_other(self) -> None:
        """What a plan saves another plan of the same key space loads; one of another
        key space does not."""
        save = an_order(1, TransferKind.SAVE, range(1, 5))
        with working() as half:
            step(half, StepPlan(step=1, saves=(save,)))
            assert half._runtime.flush(60.0)
            load = an_order(2, TransferKind.LOAD, range(10, 14))
            step(half, StepPlan(step=2, loads=(load,)))
            assert half._runtime.flush(60.0)
            assert (set(), {"r"}, set()) == step(half, StepPlan(step=3))
            other = StepPlan(
                step=4,
                keyspace_digest=bytes(16),
                loads=(an_order(3, TransferKind.LOAD, range(20, 24)),),
            )
            half.bind(PlanEnvelope(encode(other)))
            half.start_loads()
            assert half._runtime.flush(60.0)
            assert {"r"} == half.finished()[2]
