# SPDX-License-Identifier: Apache-2.0
"""
The worker's half of the connector: carries out plans on one rank.

Threading: all of it runs on the engine's worker thread, which meets the loop only in
``Runtime``. Each plan is carried out once, however often a hook is called with it: the
step number decides. Results may be asked for before or after ``submit_saves``.
"""

from collections.abc import Callable, Mapping, Sequence

from ucm.devices.abc import Fence
from ucm.devices.events import FailedFence
from ucm.devices.selection import EventSelector
from ucm.errors import DeviceError
from ucm.integration.vllm.elsewhere import RankWants
from ucm.integration.vllm.messages import RankHandshake, ReportEnvelope, plan_in
from ucm.integration.vllm.modes import Loads, Saves
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.stats import UCMStats, stats_of
from ucm.integration.vllm.step import Step
from ucm.integration.vllm.weights import EngineParts, WeightsKeeper
from ucm.layerwise import RowLoads, RowSaves, SpanGroup, groups_of
from ucm.metrics import Counters
from ucm.progress import Progress
from ucm.reasons import Reason
from ucm.runtime import Runtime
from ucm.scheduler.messages import SpanOrder, StepPlan, encode
from ucm.tracing import MEMORY_UNMAPPED, SAVE_PASSED, close_log

__all__ = ["WorkerHalf"]

_IDLE_WAIT_S = 0.002


class WorkerHalf:
    """
    Loads and saves one rank's part of blocks.

    Args:
        setup: What both halves agree on.
        rank: This worker's rank.
        device_type: The engine's device, such as ``cpu``.

    Raises:
        ConfigError: The device is unknown, or the store cannot be opened.
    """

    def __init__(self, setup: Setup, rank: int, device_type: str) -> None:
        self._setup = setup
        self._rank = rank
        self._log = self.log = setup.open_log(f"worker-{rank}").bind(rank=rank)
        self._counters = self.counters = Counters()
        self._device = setup.make_device(device_type)
        config = setup.config
        self._selector = EventSelector(
            self._device,
            self._counters,
            enable_event_sync=config.enable_event_sync,
            enable_reshape_cache_event_sync=config.enable_reshape_cache_event_sync,
            log=self._log,
        )
        self._store = self.store = setup.open_store(index_only=False)
        self.runtime: Runtime | None = None
        self._runtime: Runtime | None = None
        self._step = Step(StepPlan(step=0))
        self._row_saves: RowSaves | None = None
        self._row_loads: RowLoads | None = None
        self._progress = Progress()
        self._wants = RankWants(setup, rank, self._store, self._log)
        self._untold: tuple[RankHandshake, ...] = (self.handshake(),)
        self._is_unregistered = False
        self._bad_blocks: set[int] = set()
        self._kv_caches: Mapping[str, object] = {}
        self._weights: WeightsKeeper | None = None

    def register(
        self, kv_caches: Mapping[str, object], parts: EngineParts | None = None
    ) -> None:
        """
        Take the engine's KV cache, read its weights and start the runtime.

        Args:
            kv_caches: By layer.
            parts: What of the engine has to do with its weights; if not given, nothing
                ever proves that they did not change.

        Raises:
            LayoutError: A tensor does not lie as the configuration says.
        """
        setup, layers = self._setup, set(self._setup.layout.layers)
        # Layers that borrow another layer's KV come without memory of their own.
        own = {name: cache for name, cache in kv_caches.items() if name in layers}
        self._device.register(setup.layout, own)
        self._kv_caches = own
        self._weights = WeightsKeeper(
            parts or EngineParts(),
            threads=setup.threads,
            log=self._log,
            on_sleep=self.unregister,
            on_wake=self.restore,
        )
        self._runtime = self.runtime = Runtime(
            self._store,
            self._device,
            layout=setup.layout,
            config=setup.config,
            counters=self._counters,
            log=self._log,
            shard=setup.topology.shard_of(self._rank),
            threads=setup.threads,
            affinity=setup.plan_affinity(self._device),
            confirms=setup.confirms,
        )
        if setup.mode.saves is Saves.LAYERWISE:
            self._row_saves = RowSaves(self._runtime, setup.layout)
        if setup.mode.loads is Loads.LAYERWISE:
            ahead = setup.config.load_ahead_rows
            self._row_loads = RowLoads(self._runtime, setup.layout, ahead)
        self._runtime.start()

    def unregister(self) -> None:
        """
        Let go of the KV cache, whose memory is about to go away. Idempotent.

        Blocks until no copy touches it, or one is stuck; what is asked meanwhile fails.
        """
        if self._runtime is None or self._is_unregistered:
            return
        self._is_unregistered = True
        quiet = self._runtime.quiesce()
        if self._weights is not None:
            quiet &= self._weights.pause(self._setup.config.timeout.stuck)
        self._device.unregister()
        (self._log.info if quiet else self._log.error)(MEMORY_UNMAPPED, quiet=quiet)

    def restore(self) -> None:
        """Take the KV cache again, whose memory is back. Idempotent."""
        if self._is_unregistered:
            self._is_unregistered = False
            self._device.register(self._setup.layout, self._kv_caches)

    def handshake(self) -> RankHandshake:
        """Return what the scheduler decides the key space from."""
        return RankHandshake.of(self._setup.facts(self._rank))

    def fence(self, metadata: object) -> None:
        """Before the forward pass: see that no save reads blocks it overwrites."""
        self._begin(metadata)

    def bind(self, metadata: object) -> None:
        """Take this step's plan; the step begins."""
        self._begin(metadata)
        self._step.is_bound = True
        if self._weights is not None:
            self._weights.begin_step(self._step.plan.epoch)

    def clear(self) -> None:
        """Forget this step's plan."""
        self._step.is_bound = False

    def start_loads(self) -> None:
        """
        Submit the plan's loads.

        Blocks only in layer-wise modes, for loads that a step which broke off has left.

        Raises:
            DeviceTimeoutError: See ``wait_for_layer``.
        """
        step = self._step
        if not step.is_bound or step.has_loaded:
            return
        step.has_loaded = True
        plan = step.plan
        self._progress.begin_loads(plan.loads, plan.unfinished)
        if self._row_loads is None:
            self._submit(plan.keyspace_digest, plan.loads, self._device.lease)
        elif plan.loads:
            groups = self._groups(plan, plan.loads)
            fence = self._fence_or_failure(self._device.lease)
            self._progress.came_late(self._row_loads.begin(groups, fence))

    def wait_for_layer(self, layer_name: str) -> None:
        """
        Within the forward pass: block until what a layer reads is loaded.

        Raises:
            DeviceTimeoutError: A copy goes on that was given up long ago; what the
                engine would compute might be overwritten.
        """
        if self._row_loads is not None:
            self._row_loads.wait_for(layer_name)

    def layer_saved(self, layer_name: str, attn_metadata: object) -> None:
        """Within the forward pass: save the row that a layer was the last to write."""
        step = self._step
        if self._row_saves is None or not step.is_bound or step.has_saved:
            return
        self._begin_row_saves(self._row_saves, step)

        def make_fence() -> Fence:
            return self._selector.for_layer(layer_name, attn_metadata)

        self._row_saves.layer_done(
            layer_name, lambda: self._fence_or_failure(make_fence)
        )

    def kv_written(self, layer_name: str) -> None:
        """Take note that the engine has submitted the write of a layer's KV."""
        self._selector.kv_written(layer_name)

    def submit_saves(self) -> None:
        """After the forward pass: submit the plan's saves. Blocks in a fallback only."""
        step = self._step
        if step.is_bound and not step.has_saved and not step.note_error():
            self._submit_saves(step)

    def finished(
        self, *, by_blocks: bool = False
    ) -> tuple[set[str], set[str], set[str]]:
        """
        Return the requests that are through: saves released, loads over, loads failed.

        A failed load is in both of the latter. Each is told once. In a step that
        computes nothing, waits up to 2 ms for what the engine waits for. In layer-wise
        modes, blocks until nothing writes the blocks of the step's loads any more.

        Raises:
            DeviceTimeoutError: See ``wait_for_layer``.
        """
        step = self._step
        step.is_over |= step.is_bound and not step.note_error()
        if step.plan.is_idle:
            self.submit_saves()  # older engines do not ask for it in such a step
            if self._progress.is_awaited and self._runtime is not None:
                self._runtime.wait_for_notice(_IDLE_WAIT_S)
            elif self._weights is not None:
                self._weights.wait(_IDLE_WAIT_S)
        if self._row_loads is not None:
            self._progress.came_late(self._row_loads.finish())
        self._poll()
        if not self._progress.is_awaited:
            return set(), set(), set()
        sent, loads = self._progress.take_freed(), self._progress.take_loaded()
        if by_blocks or self._row_loads is not None:
            self._bad_blocks.update(*(load.bad_blocks for load in loads.values()))
        if self._row_loads is not None:
            return sent, set(), set()  # their requests did not wait to be told
        return sent, set(loads), {name for name, load in loads.items() if load.failed}

    def bad_blocks(self) -> set[int]:
        """Return blocks that were not loaded, once, where failures are told so."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def report(self) -> ReportEnvelope | None:
        """Return what happened since the last report; None when nothing did."""
        self._poll()
        healthy = self._runtime is None or not self._runtime.failure
        outbox = self._progress.outbox
        if self._weights is not None:
            outbox.weights = self._weights.news()
        outbox.reached |= self._wants.take()
        report = outbox.take(self._rank, healthy=healthy)
        if cut := outbox.cut_reports:
            self._counters.reach("ucm_cut_messages_total", cut, message="report")
        handshakes, self._untold = self._untold, ()
        if report is None and not handshakes:
            return None
        payloads = () if report is None else (encode(report),)
        return ReportEnvelope(payloads, handshakes)

    def stats(self) -> UCMStats | None:
        """Return what is new since the last call."""
        return stats_of(self._counters)

    def counts(self) -> dict[str, int]:
        """Return the size of every per-request container; all zero when idle."""
        num_open = 0 if self._runtime is None else self._runtime.num_open
        counts = {"open": num_open, "wants": len(self._wants)}
        return self._progress.counts() | counts

    def close(self) -> None:
        """Drain, then end all threads. Idempotent."""
        self._wants.close()
        if self._weights is not None:
            self._weights.close(self._setup.config.timeout.shutdown)
        (self._runtime or self._store).close()
        close_log(self._log)

    def _begin(self, metadata: object) -> None:
        """Begin a step with the first of its hooks."""
        former = self._step
        if former.metadata is metadata:
            return
        plan = plan_in(metadata)
        if plan.step == former.plan.step:
            return
        self._settle(former)
        self._wants.begin(plan)
        saves = [order for order in plan.saves if self._is_our_turn(order)]
        self._step = Step(plan, metadata, saves)
        # First, and not when they are submitted: a request may be deferred with the plan
        # that saves its last blocks, and results may be asked for in between.
        self._progress.begin_saves(saves)
        self._progress.defer(plan.deferred)
        if self._runtime is None:
            return
        self._fence(self._runtime, plan)
        self._runtime.begin_step(plan.step, plan.traces)
        self._selector.begin_step(plan.step)

    def _fence(self, runtime: Runtime, plan: StepPlan) -> None:
        if self._setup.overwrites_first:
            runtime.fence(plan.fences, plan.overwritten, plan.lost)
        else:
            runtime.fence((*plan.fences, *plan.overwritten), (), plan.lost)

    def _settle(self, step: Step) -> None:
        """
        Bring what a step has ordered and nobody submitted to its end.

        A stage of a pipeline may be asked for results and never for its saves: it has
        written what they read, and they are submitted now if nothing was overwritten
        since. Whatever else is left was perhaps never written.
        """
        plan = step.plan
        if plan.loads and not step.has_loaded:
            self._progress.begin_loads(plan.loads, plan.unfinished)
            self._decline(plan, plan.loads)
        if not step.saves or step.has_saved:
            return
        if step.can_save and not self._setup.overwrites_first:
            self._submit_saves(step)
        elif self._row_saves is not None:
            self._begin_row_saves(self._row_saves, step)
            self._row_saves.drop()
        else:
            self._decline(plan, step.saves)

    def _decline(self, plan: StepPlan, orders: Sequence[SpanOrder]) -> None:
        self._running().decline(plan.keyspace_digest, orders, Reason.UNSUBMITTED)

    def _submit_saves(self, step: Step) -> None:
        for_step = self._selector.for_step
        if self._row_saves is not None:
            self._begin_row_saves(self._row_saves, step)
            self._row_saves.finish(lambda: self._fence_or_failure(for_step))
        else:
            self._submit(step.plan.keyspace_digest, step.saves, for_step)
        step.has_saved = True

    def _begin_row_saves(self, row_saves: RowSaves, step: Step) -> None:
        if step.has_begun_rows:
            return
        step.has_begun_rows = True
        if step.saves:
            self._running()
        row_saves.begin(self._groups(step.plan, step.saves))

    def _groups(self, plan: StepPlan, orders: Sequence[SpanOrder]) -> list[SpanGroup]:
        return groups_of(self._setup.layout, plan.keyspace_digest, orders)

    def _is_our_turn(self, order: SpanOrder) -> bool:
        """Return whether to save; what a replica saves is over for us at once."""
        if self._setup.topology.saves(self._rank, order.transfer_id):
            return True
        self._log.debug(SAVE_PASSED, transfer_id=order.transfer_id, direction="save")
        self._progress.saved_elsewhere(order)
        return False

    def _submit(
        self,
        digest: bytes,
        orders: Sequence[SpanOrder],
        make_fence: Callable[[], Fence],
    ) -> None:
        if orders:
            runtime = self._running()
            runtime.submit(digest, orders, self._fence_or_failure(make_fence))

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise DeviceError("orders came before register_kv_caches")
        return self._runtime

    def _poll(self) -> None:
        if self._runtime is not None and (notices := self._runtime.poll()):
            self._progress.note(notices)

    def _fence_or_failure(self, make_fence: Callable[[], Fence]) -> Fence:
        """Return a fence; one that fails its orders where nothing is to be moved."""
        if self._weights is not None and self._weights.is_written:
            return FailedFence(DeviceError("the weights were written"))
        try:
            return make_fence()
        except Exception as exc:  # noqa: BLE001 - a device of others, in the engine's hook
            return FailedFence.of(exc)
