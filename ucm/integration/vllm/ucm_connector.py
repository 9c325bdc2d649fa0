# SPDX-License-Identifier: Apache-2.0
"""
``UCMConnector``: the class that vLLM, and the wrapper of vllm-ascend, are given.

Module path and class name are a public contract. The class forwards each hook to the
scheduler's or the worker's half and decides nothing.

vLLM calls, per step: on the scheduler ``build_connector_meta``; on the worker
``handle_preemptions``, ``bind_connector_metadata``, the forward pass,
``start_load_kv``, ``wait_for_save``, ``get_transfer_results``,
``build_connector_worker_meta``; on the scheduler ``request_finished*`` and then
``update_connector_output``. Nothing here depends on that order within a step.
"""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger

from ucm.configuration.sources import load
from ucm.integration.vllm.compat import transfer_results
from ucm.integration.vllm.last_steps import LastSteps
from ucm.integration.vllm.messages import PlanEnvelope, RankHandshake, may_greet
from ucm.integration.vllm.mock import MockSchedulerHalf, MockWorkerHalf
from ucm.integration.vllm.plugin import register
from ucm.integration.vllm.scheduler import SchedulerHalf
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.stats import UCMPromMetrics, UCMStats
from ucm.integration.vllm.vitals import begin_vitals
from ucm.integration.vllm.weights import calling_parts
from ucm.integration.vllm.worker import WorkerHalf
from ucm.status import StatusServer

__all__ = ["INHERITED_ON_PURPOSE", "UCMConnector"]

logger = init_logger("vllm.ucm")

INHERITED_ON_PURPOSE = {
    "role": "the base keeps it",
    "get_loaded_kv_cache_group_ids": "the default names the groups found by hash: ours",
    "supports_divergent_local_hybrid_hits": "hits begin where the engine has all groups",
    "bind_kv_cache_manager": "the base binds it; we ask the step's own block state",
    "get_mem_pool_context": "the engine's own allocation is mapped as it is",
    "finish_forward": "saves are ordered by the fence of wait_for_save",
    "reset_capture_state": "nothing of ours is captured in a graph",
    "get_required_kvcache_layout": "every layout that can be mapped is taken",
    "register_finished_partial_tail": "whole blocks only",
    "has_pending_block_frees": "delayed frees are as short as a copy",
    "supports_sleep_mode": "the base says yes",
}
"""Hooks of the base that are left as they are, each with the reason."""


def _patch_vllm_ascend() -> None:
    from ucm.integration.vllm_ascend.patches import apply

    for outcome in apply():
        if outcome.reason:
            text = "UCMConnector leaves the patch %r of vllm-ascend out: %s"
            logger.warning(text, outcome.name, outcome.reason)


class UCMConnector(KVConnectorBase_V1, SupportsHMA):
    """
    Saves and loads vLLM's KV cache through ``ucm``.

    Args:
        vllm_config: The engine's configuration, with ``kv_transfer_config``.
        role: Which half is wanted.
        kv_cache_config: The engine's KV cache. Wrappers of older engines pass none;
            the connector then does nothing and says so.

    Raises:
        ConfigError: A setting cannot be used; names key, value and remedy.
        LayoutError: The model's KV cache cannot be mapped.
        ValueError: There is no ``kv_transfer_config``.
    """

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
        role: KVConnectorRole,
        kv_cache_config: Any = None,  # noqa: ANN401 - vLLM's KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | MockSchedulerHalf | None = None
        self._worker: WorkerHalf | MockWorkerHalf | None = None
        self._vitals: StatusServer | None = None
        if kv_cache_config is None:
            logger.warning(
                "UCMConnector was built without kv_cache_config, by a wrapper for an "
                "older engine: it saves and loads nothing. Pass kv_cache_config."
            )
            return
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        setup = self._make_setup(vllm_config, kv_cache_config)
        is_mock = setup.mode.is_mock
        if role is KVConnectorRole.SCHEDULER:
            half = (MockSchedulerHalf if is_mock else SchedulerHalf)(setup)
            self._scheduler, self._last_steps = half, LastSteps(half, vllm_config)
        else:
            make = MockWorkerHalf if is_mock else WorkerHalf
            rank, device = vllm_config.parallel_config.rank, vllm_config.device_config
            self._worker = self.worker = make(setup, rank, device.device_type)
            if setup.config.patch_vllm_ascend:
                _patch_vllm_ascend()
        self._vitals = begin_vitals(vllm_config, self._scheduler or self._worker)

    def _make_setup(self, vllm_config: Any, kv_cache_config: Any) -> Setup:  # noqa: ANN401 - vLLM's
        """Derive what both halves agree on; tests put another store in."""
        return Setup.of(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped save is a later miss, never a request to be repeated."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """
        Return whether layers call hooks within the forward pass: layer-wise modes.

        A graph of the whole pass would replay without them. A mock has no such mode.

        Raises:
            ConfigError: A setting cannot be used.
        """
        config = load(extra_config).config
        return config.use_layerwise and config.hit_ratio is None

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take the engine's KV cache, look at its weights and start the runtime."""
        if self._worker is not None:
            self._worker.register(kv_caches, calling_parts())

    def unregister_kv_caches(self) -> None:
        """Let go of the KV cache before the engine sleeps; blocks until nobody copies."""
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """Take the KV cache again after the engine slept."""
        if self._worker is not None:
            self._worker.restore()

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:  # noqa: ANN401
        """Ignore the engine's copy routine; the device layer has its own."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass: fence the blocks that it overwrites."""
        if self._worker is not None:
            self._worker.fence(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take this step's plan."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Forget this step's plan."""
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.clear()

    def has_connector_metadata(self) -> bool:
        """Return whether a plan is bound."""
        return super().has_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Submit this step's loads; returns at once."""
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """
        Block until a layer's KV is loaded; at once unless loads are layer-wise.

        Otherwise the engine parks requests until their loads are over.
        """
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Any,  # noqa: ANN401 - the layer's tensor
        attn_metadata: Any,  # noqa: ANN401 - the back end's metadata
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Save the row that this layer was the last to write, if saves are layer-wise."""
        if self._worker is not None:
            self._worker.layer_saved(layer_name, attn_metadata)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """Take note that a layer's KV is written; vllm-ascend alone calls this."""
        if self._worker is not None:
            self._worker.kv_written(layer_name)

    def wait_for_save(self) -> None:
        """Submit this step's saves; returns at once."""
        if self._worker is not None:
            self._worker.submit_saves()

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """
        Return requests whose saves are released, and those whose loads are over.

        Engines and wrappers that ask so hear of failed loads by their blocks.
        """
        if self._worker is None:
            return None, None
        sent, received, _ = self._worker.finished(by_blocks=True)
        return sent or None, received or None

    def get_transfer_results(
        self,
        finished_req_ids: set[str],
    ) -> Any:  # noqa: ANN401 - vLLM's KVConnectorTransferResults
        """Return the same together with failed loads, each request once."""
        nothing: tuple[set[str], set[str], set[str]] = (set(), set(), set())
        told = nothing if self._worker is None else self._worker.finished()
        return transfer_results(*told)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that were not loaded, once, where requests cannot tell it."""
        return set() if self._worker is None else self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's report."""
        return None if self._worker is None else self._worker.report()

    def get_kv_connector_kv_cache_events(self) -> None:
        """Return no events: the scheduler's half has those of all ranks."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what this rank stores under, unless another child has to be heard."""
        half = self._worker if may_greet(self, self._vllm_config) else None
        return None if half is None else half.handshake()

    # Scheduler.

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - vLLM's Request
        """Have its blocks fetched from tiers while it waits."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond those computed."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        num_external_tokens: int,
    ) -> dict[Any, int]:
        """Return how many tokens of a hit were in which tier."""
        half, tokens = self._scheduler, num_external_tokens
        told = {} if half is None else half.hit_sources(request.request_id, tokens)
        return told or super().get_external_cache_hit_sources(request, tokens)

    def update_state_after_alloc(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        blocks: Any,  # noqa: ANN401 - vLLM's KVCacheBlocks
        num_external_tokens: int,
    ) -> None:
        """Order the load that the engine has decided on."""
        if self._scheduler is not None:
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self._scheduler.allocated(request, tables, num_external_tokens, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """Return this step's plan; does not touch *scheduler_output*."""
        if self._scheduler is None:
            return PlanEnvelope(b"")
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Take note of what the workers report."""
        if self._scheduler is not None:
            self._scheduler.apply(connector_output)
            self._last_steps.take(connector_output)

    def request_finished(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the engine must keep the request's blocks for us."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401 - vLLM's Request
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the engine must keep the request's blocks for us."""
        if self._scheduler is None:
            return False, None
        status = getattr(getattr(request, "status", None), "_name_", "")
        is_aborted, half = status == "FINISHED_ABORTED", self._scheduler
        return half.finished(request.request_id, block_ids, is_aborted=is_aborted), None

    def take_events(self) -> Iterable[Any]:
        """Return events of blocks below the engine; its own cover its cache."""
        return () if self._scheduler is None else self._scheduler.events.take()

    def has_pending_push_work(self) -> bool:
        """Return whether to step though there is no request: to save, or to have events told."""
        return self._scheduler is not None and self._scheduler.awaits_step()

    def get_finished_count(self) -> int | None:
        """Return None: every rank reports every request."""
        return None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take note of what the ranks store, one per tensor rank."""
        self._agree(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take note of what the ranks store, one per pipeline stage and tensor rank."""
        self._agree(metadata.values())

    def _agree(self, metadata: Iterable[KVConnectorHandshakeMetadata]) -> None:
        # Inside of another connector, these may be those of its first child.
        if self._scheduler is not None:
            self._scheduler.agree(
                one for one in metadata if isinstance(one, RankHandshake)
            )

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:  # noqa: ANN401
        """Take the engine's block pool, which shows when its cache is emptied."""
        if self._scheduler is not None:
            self._scheduler.watch_cache(gpu_block_pool)

    def reset_cache(self) -> bool | None:
        """See whether the weights changed; nothing that is stored is touched."""
        return None if self._scheduler is None else self._scheduler.reset_cache()

    # Both.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what is new since the last call."""
        half = self._worker or self._scheduler
        return None if half is None else half.stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return a stats object around *data*; an empty one for None."""
        return UCMStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> UCMPromMetrics:
        """Register the connector's metrics once."""
        return UCMPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    def shutdown(self) -> None:
        """Drain, then end all threads and let go of the store. Idempotent."""
        for part in (self._vitals, self._worker, self._scheduler):
            if part is not None:
                part.close()


# MultiConnector looks its children up by name where it takes their statistics over
# from another process, and ends the server where a name is not known.
register()
