# SPDX-License-Identifier: Apache-2.0
"""A small engine's memory, a store and a runtime around it, for tests."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import structlog

from tests.clocks import AdvancingThreads
from tests.kit.lockstep import QueueBounds, Tracer
from ucm.blocks import GroupId, KeyPacker, Owner, PackedKey, RowId, ShardId
from ucm.config import UCMConfig
from ucm.devices.abc import Device
from ucm.devices.cpu import CPUDevice
from ucm.layout import GroupKind, GroupLayout, KVLayout, RowLayout
from ucm.metrics import Counters
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.stores.abc import Store
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import FaultDevice, FaultPlan, FaultStore

NUM_BLOCKS = 64
NUM_ROWS = 3
PAGE_BYTES = 512
LAYERS = tuple(f"layer.{row}" for row in range(NUM_ROWS))


def layout_of(page_bytes: int) -> KVLayout:
    """Return one full-attention group of a row for each layer."""
    rows = (
        RowLayout(row_id=RowId(row), page_bytes=page_bytes, layer_names=(name,))
        for row, name in enumerate(LAYERS)
    )
    group = GroupLayout(
        group_id=GroupId(0), kind=GroupKind.FULL, block_tokens=16, rows=tuple(rows)
    )
    return KVLayout(groups=(group,), hash_block_tokens=16, engine_tag="test")


LAYOUT = layout_of(PAGE_BYTES)
BLOCK_BYTES = LAYOUT.max_block_bytes
KEYSPACE_DIGEST = bytes(range(16))
_PACKER = KeyPacker(KEYSPACE_DIGEST, GroupId(0), ShardId(0))


def keys_of(*numbers: int) -> tuple[PackedKey, ...]:
    """Return the packed keys of content numbers."""
    return tuple(_PACKER.pack(number.to_bytes(32, "big") for number in numbers))


def keys_in(order: SpanOrder) -> tuple[PackedKey, ...]:
    """Return the packed keys of an order's blocks."""
    return tuple(_PACKER.pack(order.split_hashes()))


_KINDS = {Direction.SAVE: TransferKind.SAVE, Direction.LOAD: TransferKind.LOAD}


def order(
    transfer_id: int,
    direction: Direction,
    contents: Sequence[int],
    blocks: Sequence[int],
    request: str = "r",
    generation: int = 1,
) -> SpanOrder:
    """Return an order for *contents* in engine blocks *blocks*."""
    return SpanOrder(
        transfer_id=transfer_id,
        kind=_KINDS[direction],
        owners=(Owner(request, generation, len(blocks)),),
        group_id=0,
        block_ids=tuple(blocks),
        hashes=b"".join(number.to_bytes(32, "big") for number in contents),
    )


def null_log() -> structlog.typing.FilteringBoundLogger:
    """Return a log that keeps nothing."""
    log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=[lambda _, __, event: str(event)],
        wrapper_class=structlog.make_filtering_bound_logger(0),
    )
    return log


@attrs.define
class Rig:
    """Everything a pipeline test needs to look at."""

    runtime: Runtime
    store: Store
    device: Device
    memory: npt.NDArray[np.uint8]
    counters: Counters
    plan: FaultPlan
    tracer: Tracer
    threads: AdvancingThreads = attrs.Factory(AdvancingThreads)
    notices: list[Notice] = attrs.Factory(list)

    def submit(self, *orders: SpanOrder) -> list[str]:
        """Submit and return the admissions' words."""
        self.runtime.submit(KEYSPACE_DIGEST, orders, self.device.lease(None))
        self.runtime._take_in()  # on this thread, if the loop is not quicker
        outcomes = self.outcomes()
        words = []
        for one in orders:
            outcome = outcomes.get(one.transfer_id)
            refused = outcome and outcome.kind is OutcomeKind.REFUSED
            words.append(outcome.reason if refused else "accepted")
        return words

    def settle(self, timeout: float = 60.0) -> dict[int, Outcome]:
        """Wait until all is settled and return the outcomes by transfer id."""
        assert self.runtime.flush(timeout)
        return self.outcomes()

    def failure(self, timeout: float = 60.0) -> str:
        """Return why the runtime serves nothing more, told behind a ticket's end perhaps."""
        limit = time.monotonic() + timeout
        while not self.runtime.failure and time.monotonic() < limit:
            self.runtime.wait_for_notice(0.01)
        return self.runtime.failure

    def advance(self, seconds: float) -> None:
        """Let so much time pass at once."""
        self.threads.advance(seconds)

    def poll(self) -> list[Notice]:
        """Take new notices and remember them."""
        new = self.runtime.poll()
        self.notices.extend(new)
        return new

    def outcomes(self) -> dict[int, Outcome]:
        """Return all outcomes told so far."""
        self.poll()
        return {
            notice.ticket.transfer_id: notice.outcome
            for notice in self.notices
            if notice.outcome is not None
        }

    def told(self, kind: NoticeKind) -> list[int]:
        """Return the transfer ids of all notices of a kind so far."""
        self.poll()
        return [n.ticket.transfer_id for n in self.notices if n.kind is kind]

    def content(self, blocks: range) -> bytes:
        """Return the bytes of engine blocks, row by row."""
        return self.memory[:, blocks.start : blocks.stop].tobytes()

    def fill(self, blocks: range, seed: int) -> bytes:
        """Write random bytes into engine blocks and return them."""
        rng = np.random.default_rng(seed)
        shape = (NUM_ROWS, len(blocks), PAGE_BYTES)
        data = rng.integers(0, 256, shape, dtype=np.uint8)
        self.memory[:, blocks.start : blocks.stop] = data
        return self.content(blocks)


@contextlib.contextmanager
def running(
    config: dict[str, object] | None = None,
    plan: FaultPlan | None = None,
    capacity_blocks: int = 256,
) -> Iterator[Rig]:
    """Run a rig; closes it at the end and checks its trace."""
    plan = plan or FaultPlan()
    inner = MemoryStore(capacity_blocks=capacity_blocks, block_bytes=BLOCK_BYTES)
    cpu = CPUDevice(NUM_BLOCKS)
    store, device = FaultStore(inner, plan), FaultDevice(cpu, plan)
    with running_on(store, device, config) as rig:
        yield attrs.evolve(rig, store=inner, plan=plan)


@contextlib.contextmanager
def running_on(
    store: Store,
    device: Device,
    config: dict[str, object] | None = None,
    as_layer: Callable[[npt.NDArray[np.uint8]], object] = np.asarray,
) -> Iterator[Rig]:
    """Run a rig over a store and a device, which may want its layers as something else."""
    memory = np.zeros((NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), np.uint8)
    device.register(LAYOUT, dict(zip(LAYERS, map(as_layer, memory), strict=True)))
    parsed = UCMConfig.from_mapping(config or {})
    counters, tracer = Counters(), Tracer()
    threads = AdvancingThreads()
    runtime = Runtime(
        store,
        device,
        layout=LAYOUT,
        config=parsed,
        counters=counters,
        log=tracer.log,
        threads=threads,
    )
    runtime.start()
    try:
        yield Rig(
            runtime, store, device, memory, counters, FaultPlan(), tracer, threads
        )
    finally:
        runtime.close()
    check_run(tracer, parsed, counters)


def check_run(tracer: Tracer, config: UCMConfig, counters: Counters) -> None:
    """Check the trace of a closed runtime, and that its counters tell the same."""
    queue = config.queue
    summary = tracer.check(bounds=QueueBounds(queue.tickets, queue.nbytes))
    for direction in ("save", "load"):
        told = {
            word: counters.total(
                "ucm_settled_parts_total", direction=direction, outcome=word
            )
            for word in ("committed", "skipped", "refused", "failed", "cancelled")
        }
        told["offered"] = counters.total("ucm_offered_parts_total", direction=direction)
        for word, blocks in told.items():
            assert blocks == summary.blocks.get((direction, word), 0)
