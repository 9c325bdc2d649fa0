# SPDX-License-Identifier: Apache-2.0
"""
The worker's half of the connector: carries out plans on one rank.

Threading: all of it runs on the engine's worker thread, which meets the loop only in
``Runtime``. Each plan is carried out once, however often a hook is called with it: the
step number decides.
"""

import functools
from collections.abc import Callable, Mapping

import attrs

from ucm.affinity import OFF, AffinityPlan, plan_beside_engine
from ucm.blocks import (
    BlockHash,
    BlockId,
    BlockKey,
    BlockSpan,
    GroupId,
    KeyPacker,
    RequestId,
    ShardId,
    TransferId,
)
from ucm.devices.abc import Fence
from ucm.devices.events import FailedFence
from ucm.devices.selection import EventSelector
from ucm.errors import DeviceError
from ucm.integration.vllm.messages import RankHandshake, ReportEnvelope, plan_in
from ucm.integration.vllm.outbox import Outbox
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.stats import UCMStats, stats_of
from ucm.layout import KVLayout
from ucm.metrics import Counters
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind, Ticket
from ucm.runtime import Order, Runtime
from ucm.scheduler.messages import (
    Failure,
    SpanOrder,
    StepPlan,
    TransferKind,
    encode,
)

__all__ = ["WorkerHalf"]

_STORED = (OutcomeKind.COMMITTED, OutcomeKind.SKIPPED)
_IDLE_WAIT_S = 0.002
_DIRECTIONS = {TransferKind.SAVE: Direction.SAVE, TransferKind.LOAD: Direction.LOAD}


@attrs.define
class _Load:
    """
    A request that waits for its tickets.

    Args:
        waiting: Tickets whose end the engine has not been told.
        settled: Of these, tickets whose outcome was noticed.
        failed: One of the outcomes was no success.
    """

    waiting: set[TransferId] = attrs.Factory(set)
    settled: set[TransferId] = attrs.Factory(set)
    failed: bool = False


class WorkerHalf:
    """
    Loads and saves one rank's shard.

    Args:
        setup: What both halves agree on.
        rank: This worker's rank; also its shard.
        device_type: The engine's device, such as ``cpu``.

    Raises:
        ConfigError: The device is unknown, or the store cannot be opened.
    """

    def __init__(self, setup: Setup, rank: int, device_type: str) -> None:
        self._setup = setup
        self._rank = rank
        self._log = setup.open_log(f"worker-{rank}").bind(rank=rank)
        self._counters = Counters()
        self._counters.set("ucm_healthy", 1)
        self._keyspace_digest = b""
        self._packers: dict[GroupId, KeyPacker] = {}
        self._device = setup.make_device(device_type)
        config = setup.config
        self._selector = EventSelector(
            self._device,
            self._counters,
            enable_event_sync=config.enable_event_sync,
            enable_reshape_cache_event_sync=config.enable_reshape_cache_event_sync,
            log=self._log,
        )
        self._store = setup.open_store(index_only=False)
        self._runtime: Runtime | None = None
        self._plan: StepPlan | None = None
        self._last: tuple[object, StepPlan] | None = None
        self._fenced_step = self._loaded_step = self._saved_step = 0
        self._reading: dict[tuple[str, int], set[TransferId]] = {}
        self._loads: dict[str, _Load] = {}
        self._deferred: dict[str, int] = {}
        self._outbox = Outbox()
        self._is_idle = False

    def register(self, kv_caches: Mapping[str, object]) -> None:
        """
        Take the engine's KV cache and start the runtime.

        Raises:
            LayoutError: A tensor does not lie as the configuration says.
        """
        layers = {
            layer
            for group in self._setup.layout.groups
            for row in group.rows
            for layer in row.layer_names
        }
        # Layers that borrow another layer's KV come without memory of their own.
        own = {name: cache for name, cache in kv_caches.items() if name in layers}
        self._device.register(self._setup.layout, own)
        self._runtime = Runtime(
            self._store,
            self._device,
            config=self._setup.config,
            counters=self._counters,
            log=self._log,
            threads=self._setup.threads,
            affinity=self._plan_affinity(),
        )
        self._runtime.start()

    def handshake(self) -> RankHandshake:
        """Return what the scheduler compares with its own."""
        return RankHandshake(self._setup.keyspace.digest)

    def fence(self, metadata: object) -> None:
        """Before the forward pass: see that no save reads blocks it overwrites."""
        plan = self._decoded(metadata)
        if plan.step == self._fenced_step:
            return
        self._fenced_step = plan.step
        if self._runtime is not None and plan.fences:
            self._runtime.fence(plan.fences)

    def bind(self, metadata: object) -> None:
        """Take this step's plan; the step begins."""
        self._plan = self._decoded(metadata)
        if self._runtime is not None:
            self._selector.begin_step(self._plan.step)

    def clear(self) -> None:
        """Forget this step's plan."""
        self._plan = None

    def start_loads(self, *, is_idle: bool) -> None:
        """
        Submit the plan's loads. Never blocks.

        Args:
            is_idle: This step computes nothing; ``finished`` may then wait a moment.
        """
        plan = self._plan
        if plan is None or plan.step == self._loaded_step:
            return
        self._loaded_step = plan.step
        self._is_idle = is_idle
        for order in plan.loads:
            load = self._loads.setdefault(order.request_id, _Load())
            load.waiting.add(TransferId(order.transfer_id))
        self._submit(plan, plan.loads, self._device.lease)

    def kv_written(self, layer_name: str) -> None:
        """Take note that the engine has submitted the write of a layer's KV."""
        self._selector.kv_written(layer_name)

    def submit_saves(self) -> None:
        """After the forward pass: submit the plan's saves. Blocks in a fallback only."""
        plan = self._plan
        if plan is None or plan.step == self._saved_step:
            return
        self._saved_step = plan.step
        for order in plan.saves:
            key = (order.request_id, order.generation)
            self._reading.setdefault(key, set()).add(TransferId(order.transfer_id))
        self._submit(plan, plan.saves, self._selector.for_step)
        for deferral in plan.deferred:
            self._deferred[deferral.request_id] = deferral.generation

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """
        Return the requests that are through: saves released, loads over, loads failed.

        A failed load is in both of the latter. Each is told once. In a step that
        computes nothing, waits up to 2 ms for what the engine waits for.
        """
        waits = self._is_idle and (self._loads or self._deferred)
        if waits and self._runtime is not None:
            self._runtime.wait_for_notice(_IDLE_WAIT_S)
        self._poll()
        sent = {
            request_id
            for request_id, generation in self._deferred.items()
            if (request_id, generation) not in self._reading
        }
        for request_id in sent:
            del self._deferred[request_id]
        received = {name for name, load in self._loads.items() if not load.waiting}
        failed = {name for name in received if self._loads.pop(name).failed}
        return sent, received, failed

    def report(self) -> ReportEnvelope | None:
        """Return what happened since the last report; None when nothing did."""
        self._poll()
        healthy = self._runtime is None or not self._runtime.failure
        report = self._outbox.take(self._rank, healthy=healthy)
        return None if report is None else ReportEnvelope((encode(report),))

    def stats(self) -> UCMStats | None:
        """Return what is new since the last call."""
        return stats_of(self._counters)

    def counts(self) -> dict[str, int]:
        """Return the size of every per-request container; all zero when idle."""
        return {
            "reading": len(self._reading),
            "loads": len(self._loads),
            "deferred": len(self._deferred),
            "open": 0 if self._runtime is None else self._runtime.num_open,
        }

    def close(self) -> None:
        """Drain, then end all threads. Idempotent."""
        if self._runtime is None:
            self._store.close()
        else:
            self._runtime.close()

    def _plan_affinity(self) -> AffinityPlan | None:
        setting = self._setup.config.threads.affinity
        if setting == OFF:
            return None
        return plan_beside_engine(setting, self._device.numa_node())

    def _decoded(self, metadata: object) -> StepPlan:
        """Return the plan of a step, decoded once for all hooks that are given it."""
        if self._last is None or self._last[0] is not metadata:
            self._last = (metadata, plan_in(metadata))
        return self._last[1]

    def _submit(
        self,
        plan: StepPlan,
        orders: tuple[SpanOrder, ...],
        make_fence: Callable[[], Fence],
    ) -> None:
        if not orders:
            return
        if self._runtime is None:
            raise DeviceError("orders came before register_kv_caches")
        try:
            fence = make_fence()
        except DeviceError as exc:
            fence = FailedFence(
                exc
            )  # the orders fail, each with its reason, and are told
        self._rekey(plan.keyspace_digest)
        make = functools.partial(_order, self._setup.layout, self._packers)
        self._runtime.submit(map(make, orders), fence)

    def _rekey(self, keyspace_digest: bytes) -> None:
        if keyspace_digest == self._keyspace_digest:
            return
        self._keyspace_digest = keyspace_digest
        self._packers = {
            group.group_id: KeyPacker(
                keyspace_digest, group.group_id, ShardId(self._rank)
            )
            for group in self._setup.layout.groups
        }

    def _poll(self) -> None:
        if self._runtime is None:
            return
        for notice in self._runtime.poll():
            if notice.ticket.direction is Direction.SAVE:
                self._save_noticed(notice)
            else:
                self._load_noticed(notice)

    def _save_noticed(self, notice: Notice) -> None:
        ticket = notice.ticket
        if notice.outcome is not None:
            is_stored = notice.outcome.kind in _STORED
            outbox = self._outbox
            ids = outbox.settled_saves if is_stored else outbox.unstored_saves
            ids.append(ticket.transfer_id)
            return
        if notice.kind is NoticeKind.QUARANTINED:
            self._outbox.quarantined.append(ticket.transfer_id)
            return
        self._outbox.released.append(ticket.transfer_id)
        key = (ticket.request_id, ticket.generation)
        reading = self._reading.get(key, set())
        reading.discard(ticket.transfer_id)
        if not reading:
            self._reading.pop(key, None)

    def _load_noticed(self, notice: Notice) -> None:
        """
        Take note of a load, which is over when nothing writes its blocks any more.

        Only notices count. A ticket's own outcome may be set already while its notice
        is still on the way; whoever trusted that would take a failure for a success.
        """
        ticket, outcome = notice.ticket, notice.outcome
        load = self._loads.get(ticket.request_id)
        if load is not None and outcome is not None:
            load.settled.add(ticket.transfer_id)
        if outcome is not None and outcome.kind is not OutcomeKind.COMMITTED:
            self._outbox.failures.append(
                _failure(ticket, outcome.bad_key, outcome.reason)
            )
            if load is not None:
                load.failed = True
        if load is None or not ticket.guard.is_released:
            return
        if ticket.transfer_id in load.settled & load.waiting:
            load.waiting.discard(ticket.transfer_id)
            self._outbox.loads_done.append(ticket.transfer_id)


def _order(
    layout: KVLayout, packers: Mapping[GroupId, KeyPacker], order: SpanOrder
) -> Order:
    """Turn the scheduler's order into the runtime's; runs on the loop."""
    group = layout.group(GroupId(order.group_id))
    keys = packers[group.group_id].pack(order.split_hashes())
    return Order(
        transfer_id=TransferId(order.transfer_id),
        direction=_DIRECTIONS[order.kind],
        request_id=RequestId(order.request_id),
        generation=order.generation,
        span=BlockSpan(
            group.group_id,
            tuple(BlockId(block_id) for block_id in order.block_ids),
            tuple(keys),
        ),
        row_ids=tuple(row.row_id for row in group.rows),
        block_bytes=group.block_bytes,
    )


def _failure(ticket: Ticket, bad_key: bytes, reason: str) -> Failure:
    """Blame the block that failed, or the span's first when none is known."""
    key = BlockKey.unpack(bad_key or ticket.span.keys[0])
    return Failure(
        transfer_id=ticket.transfer_id,
        request_id=ticket.request_id,
        generation=ticket.generation,
        group_id=ticket.span.group_id,
        bad_hash=BlockHash(key.block_hash),
        reason=reason,
    )
