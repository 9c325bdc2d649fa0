# SPDX-License-Identifier: Apache-2.0
"""
What both halves of the connector derive from the engine's configuration, alike.

Everything that can be wrong with a configuration is found here, before the engine
serves its first request.
"""

import multiprocessing
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from ucm.affinity import AffinityPlan, plan_beside_engine
from ucm.agent.joining import check_machines, check_tiers
from ucm.blocks import GroupId, KeySpace
from ucm.config import UCMConfig, settings_in_environment
from ucm.configuration.foreign import Translation
from ucm.configuration.sources import load
from ucm.devices.abc import Device
from ucm.errors import masked
from ucm.integration.vllm.adapters import adapter_settings
from ucm.integration.vllm.compat import hash_block_tokens, token_ranks
from ucm.integration.vllm.identity import check_reusable
from ucm.integration.vllm.keyspace import check_hash_algorithm, keyspace_of
from ucm.integration.vllm.kv_words import GroupWords, check_events, group_words
from ucm.integration.vllm.layout import layout_of
from ucm.integration.vllm.modes import (
    DIRECT,
    ROLES,
    Facts,
    Loads,
    Mode,
    Saves,
    choose_mode,
    contradicts,
    shape_of,
)
from ucm.integration.vllm.release import check_version
from ucm.integration.vllm.runners import (
    has_micro_batches,
    overwrites_blocks,
    overwrites_first,
    speculates,
)
from ucm.integration.vllm.topology import is_spread, largest_stage, topology_of
from ucm.layout import KVLayout
from ucm.ranks import RankFacts, Topology, facts_of
from ucm.registry import load_class
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.company import most_waiting
from ucm.scheduler.decoded import SaveLimits
from ucm.scheduler.spans import TicketBytes
from ucm.stores.abc import Store
from ucm.stores.opening import open_store, place_of
from ucm.threads import SYSTEM, Threads
from ucm.tracing import (
    ENGINE_UNTRIED,
    SETTING_TRANSLATED,
    SETTING_UNSAFE,
    Log,
    open_log,
)

__all__ = ["Setup"]

_OF_ONE_PROCESS = ("UCM_LOG__", "UCM_THREADS__")
"""Settings in which processes of one engine may differ."""
_KEEPS_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
_MAX_STEP_BLOCKS = 16384
_SLOT_STEP = 4096  # of a store; smaller differences between stages are none


def _is_ranked(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether requests run by priority; who comes first runs first otherwise."""
    scheduling = getattr(vllm_config, "scheduler_config", None)
    return getattr(scheduling, "policy", "") == "priority"


def _steps_by_itself() -> bool:
    """
    Return whether the engine has a process of its own, and steps there for a connector.

    Elsewhere its host steps it, for as long as somebody waits for an answer; vLLM before 0.24
    asks no connector, and sleeps.
    """
    asks = hasattr(KVConnectorBase_V1, "has_pending_push_work")
    return asks and multiprocessing.current_process().name.startswith("EngineCore")


def _facts(
    vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
    config: UCMConfig,
    layout: KVLayout,
    topology: Topology,
) -> Facts:
    """Gather what the mode depends on."""
    return Facts(
        is_mock=config.hit_ratio is not None,
        context_parallel=topology.is_context_parallel,
        use_layerwise=config.use_layerwise,
        shape=shape_of(layout),
        # An engine that does not say so is taken for one whose batches overlap.
        overlapping_batches=getattr(vllm_config, "max_concurrent_batches", 2) > 1,
        local_cache=bool(vllm_config.cache_config.enable_prefix_caching),
        micro_batches=has_micro_batches(vllm_config),
        speculation=speculates(vllm_config),
        kv_role=vllm_config.kv_transfer_config.kv_role,
        writes_back=config.consumer_saves_decoded,
    )


@attrs.frozen(kw_only=True)
class Setup:
    """
    Settings, layout and key space of one engine.

    Args:
        config: The operator's settings.
        layout: The engine's groups and rows.
        keyspace: What this process would store under if its layers were all; the key
            space of all ranks is decided by the scheduler (``ucm.ranks.Agreement``).
        topology: The engine's ranks, and which part of a block each holds.
        num_blocks: Blocks in the engine's pool.
        slot_bytes: Of the largest part of a block that any rank stores.
        recomputes: Whether the engine recomputes after a failed load.
        mode: How blocks are saved and loaded.
        untried: What to warn of, where nobody has tried this release of the engine.
        adapters: How the engine applies LoRA adapters, as far as it decides the bytes;
            None: it has none.
        overwrites_first: The engine clears blocks and copies onto them before it calls
            the hooks of a step.
        confirms: It does so, and this model's blocks are of that kind.
        threads: Where clocks, threads and locks come from.
        translation: What was set under the keys of unified-cache-manager.
        group_words: What KV events say of each group.
        is_ranked: The engine runs requests by their priority; otherwise what they say of it
            is nobody's business.
        is_spread: Ranks are on several machines, or may be.
        may_wait: Saves may wait for others: the engine steps on by itself until they have
            gone, and finds their blocks in its own cache meanwhile.
        has_accelerator: Blocks are copied by a device, and not by our threads.
    """

    config: UCMConfig
    layout: KVLayout
    keyspace: KeySpace
    num_blocks: int
    recomputes: bool
    topology: Topology = attrs.Factory(Topology)
    slot_bytes: int = attrs.field()
    mode: Mode = DIRECT
    untried: str = ""
    adapters: str | None = ""
    overwrites_first: bool = False
    confirms: bool = False
    threads: Threads = SYSTEM
    translation: Translation = attrs.Factory(Translation)
    group_words: tuple[GroupWords, ...] = ()
    is_ranked: bool = False
    is_spread: bool = False
    may_wait: bool = True
    has_accelerator: bool = False

    @slot_bytes.default
    def _own_slot_bytes(self) -> int:
        return self.layout.max_block_bytes

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> "Setup":  # noqa: ANN401 - vLLM's
        """
        Derive everything from vLLM's configuration.

        Raises:
            ConfigError: A setting cannot be used; names key, value and remedy.
            LayoutError: The model's KV cache cannot be mapped.
        """
        untried = check_version()
        transfer = vllm_config.kv_transfer_config
        read = load(transfer.kv_connector_extra_config)
        config = read.config
        check_tiers(config)
        check_events(config, vllm_config)
        check_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
        parallel = vllm_config.parallel_config
        if parallel.nnodes_within_dp > 1:
            check_machines(config)
        first = overwrites_first(vllm_config)
        topology = topology_of(parallel, kv_cache_config)
        layout = layout_of(
            kv_cache_config,
            token_ranks(parallel),
            hash_block_tokens(kv_cache_config, vllm_config),
        )
        config.queue.check_holds(layout.max_block_bytes)
        check_reusable(
            vllm_config, loads=ROLES[vllm_config.kv_transfer_config.kv_role][1]
        )
        return cls(
            config=config,
            layout=layout,
            keyspace=keyspace_of(
                vllm_config, layout, topology.parallel, config.weights_revision
            ),
            topology=topology,
            slot_bytes=largest_stage(
                layout.max_block_bytes, vllm_config.model_config, parallel
            ),
            num_blocks=kv_cache_config.num_blocks,
            recomputes=transfer.kv_load_failure_policy == "recompute",
            mode=choose_mode(_facts(vllm_config, config, layout, topology)),
            untried=untried,
            adapters=adapter_settings(getattr(vllm_config, "lora_config", None)),
            overwrites_first=first,
            confirms=first and overwrites_blocks(kv_cache_config),
            translation=read.translation,
            group_words=group_words(kv_cache_config, layout),
            is_ranked=_is_ranked(vllm_config),
            is_spread=is_spread(parallel),
            may_wait=_steps_by_itself()
            and bool(vllm_config.cache_config.enable_prefix_caching),
            has_accelerator=vllm_config.device_config.device_type != "cpu",
        )

    @property
    def _tickets(self) -> TicketBytes:
        span_bytes = self.config.queue.span_bytes
        return TicketBytes.of(span_bytes, is_synchronous=not self.has_accelerator)

    def span_blocks(self, block_bytes: Iterable[int]) -> dict[GroupId, int]:
        """Return the most blocks of a save's ticket; see ``KVLayout.span_blocks``."""
        return self.layout.span_blocks(self._tickets.save, block_bytes)

    def save_limits(self) -> SaveLimits:
        """Return what is saved, how much of it at a time, and when."""
        config = self.config
        return SaveLimits(
            decoded=config.save_decoded,
            prompts=self.mode.saves_prompts,
            shortest=config.shortest_saved_tokens,
            tickets=config.queue.tickets,
            nbytes=config.queue.nbytes,
            seconds=config.timeout.save,
            company=self._company_nbytes(),
            company_seconds=config.timeout.company,
            load_spans=self._tickets.load // self._tickets.save,
            late_states=self.topology.stages > 1,  # those before the last hear late
        )

    def _company_nbytes(self) -> int:
        """Return how many bytes may wait for others before they are saved."""
        # An engine that only saves does so for others, which ask as soon as it has answered.
        if not self.may_wait or self.mode.loads is Loads.NOTHING:
            return 0
        pool = self.num_blocks * self.layout.max_block_bytes
        return most_waiting(self._tickets.save, pool)

    def facts(self, rank: int) -> RankFacts:
        """Return what a rank tells the scheduler, or the scheduler holds against it."""
        slot_bytes = -(-self.slot_bytes // _SLOT_STEP) * _SLOT_STEP
        # What the engine passes itself is the same for all. Of two entries inside of
        # MultiConnector each hears of the other's ranks, which were passed something else.
        settings = {
            name: str(masked(value))
            for name, value in settings_in_environment().items()
            if not name.startswith(_OF_ONE_PROCESS)
        }
        # Nor is where the other entry's store is said to be any news on one machine.
        place = place_of(self.config.store) if self.is_spread else ""
        return facts_of(rank, self.keyspace, self.layout, slot_bytes, settings, place)

    def open_log(self, role: str) -> Log:
        """Return the log of one process; the scheduler's warns of what may cost output."""
        log = open_log(self.config.log, role)
        if role == "scheduler":
            self._warn(log)
        return log

    def _warn(self, log: Log) -> None:
        if self.translation:
            log.warning(SETTING_TRANSLATED, **self.translation.told())
        if self.untried:
            log.warning(ENGINE_UNTRIED, reason=self.untried)
        if not self.recomputes:
            log.warning(
                SETTING_UNSAFE,
                key="kv_load_failure_policy",
                value="fail",
                remedy="Set kv_load_failure_policy to recompute; a failed load ends "
                "its request with an error otherwise.",
            )
        # Such a request is still the engine's, which has no hook before it looks for its id.
        if getattr(envs, _KEEPS_IDS, False) and self.mode.saves is not Saves.NOTHING:
            log.warning(
                SETTING_UNSAFE,
                key=_KEEPS_IDS,
                value=True,
                remedy="Unset it, or never give an id twice; one that comes again while "
                "blocks of its former request are saved ends the engine.",
            )
        claim, shape = self.config.use_hybrid_linear_attention, shape_of(self.layout)
        if contradicts(claim, shape):
            log.warning(
                SETTING_UNSAFE,
                key="use_hybrid_linear_attention",
                value=claim.value,
                remedy=f"Leave it out; the model was found to have {shape.value}.",
            )

    def open_store(self, *, index_only: bool) -> Store:
        """
        Open the configured store.

        Args:
            index_only: For the scheduler, which moves no bytes.

        Raises:
            ConfigError: It cannot be opened, or the engine's processes would not share
                it.
        """
        return open_store(
            self.config.store, block_bytes=self.slot_bytes, index_only=index_only
        )

    def make_decider(self, store: Store) -> SchedulerAdapter:
        """Return what decides; it finds and saves nothing before the ranks have agreed."""
        parks = self.mode.loads is not Loads.LAYERWISE
        groups = self.layout.groups
        return SchedulerAdapter(
            self.layout,
            store,
            keyspace_digest=b"",
            num_ranks=self.topology.num_ranks,
            shards=self.topology.shards,
            span_blocks=self.span_blocks(group.block_bytes for group in groups),
            max_step_blocks=_MAX_STEP_BLOCKS,
            full_hits=parks,
            saves=self.mode.saves is not Saves.NOTHING,
            parks=parks,
            batches=1 + self.topology.stages,
            limits=self.save_limits(),
        )

    def plan_affinity(self, device: Device) -> AffinityPlan | None:
        """Return where copy threads run; None where the system decides."""
        return plan_beside_engine(self.config.threads.affinity, device.numa_node)

    def make_device(self, device_type: str) -> Device:
        """
        Return the device layer for the engine's device.

        Raises:
            ConfigError: There is none.
        """
        make: Callable[[int], Device] = load_class("ucm.devices", device_type, "device")
        return make(self.num_blocks)
