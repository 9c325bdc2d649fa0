# SPDX-License-Identifier: Apache-2.0
"""
What both halves of the connector derive from the engine's configuration, alike.

Everything that can be wrong with a configuration is found here, before the engine
serves its first request.
"""

from collections.abc import Callable
from typing import Any

import attrs

from ucm.blocks import GroupId, KeySpace
from ucm.config import UCMConfig
from ucm.devices.abc import Device
from ucm.errors import ConfigError, LayoutError
from ucm.integration.vllm.compat import check_version
from ucm.integration.vllm.keyspace import check_hash_algorithm, keyspace_of
from ucm.integration.vllm.layout import layout_of
from ucm.layout import KVLayout
from ucm.registry import load_class
from ucm.stores.abc import Store
from ucm.threads import SYSTEM, Threads
from ucm.tracing import SETTING_UNSAFE, Log, open_log

__all__ = ["Setup"]


def _check_ranks(parallel: Any) -> None:  # noqa: ANN401 - vLLM's ParallelConfig
    """
    Refuse shapes in which a block is cut in ways that are not mapped.

    Raises:
        ConfigError: Names the setting.
    """
    for key in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, key, 1)
        if size > 1:
            raise ConfigError(
                key,
                size,
                "blocks that are cut over such ranks cannot be stored yet",
                "Use tensor parallelism, or serve without kv_connector=UCMConnector.",
            )
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend",
            "external_launcher",
            "its schedulers hear of one rank only",
            "Use another back end, or serve without kv_connector=UCMConnector.",
        )


@attrs.frozen(kw_only=True)
class Setup:
    """
    Settings, layout and key space of one engine.

    Args:
        config: The operator's settings.
        layout: The engine's groups and rows.
        keyspace: What all keys of this engine stand under.
        num_ranks: Workers that each hold a shard of every block.
        num_blocks: Blocks in the engine's pool.
        recomputes: Whether the engine recomputes after a failed load.
        threads: Where clocks, threads and locks come from.
    """

    config: UCMConfig
    layout: KVLayout
    keyspace: KeySpace
    num_ranks: int
    num_blocks: int
    recomputes: bool
    threads: Threads = SYSTEM

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> "Setup":  # noqa: ANN401 - vLLM's
        """
        Derive everything from vLLM's configuration.

        Raises:
            ConfigError: A setting cannot be used; names key, value and remedy.
            LayoutError: The model's KV cache cannot be mapped.
        """
        check_version()
        transfer = vllm_config.kv_transfer_config
        config = UCMConfig.from_mapping(transfer.kv_connector_extra_config or {})
        check_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
        parallel = vllm_config.parallel_config
        _check_ranks(parallel)
        layout = layout_of(kv_cache_config)
        return cls(
            config=config,
            layout=layout,
            keyspace=keyspace_of(vllm_config, layout, config.weights_revision),
            num_ranks=parallel.tensor_parallel_size,
            num_blocks=kv_cache_config.num_blocks,
            recomputes=transfer.kv_load_failure_policy == "recompute",
        )

    @property
    def span_blocks(self) -> dict[GroupId, int]:
        """Blocks of one ticket, by group."""
        return {
            group.group_id: max(1, self.config.queue.span_bytes // group.block_bytes)
            for group in self.layout.groups
        }

    def open_log(self, role: str) -> Log:
        """Return the log of one process, and warn once of settings that cost output."""
        log = open_log(self.config.log, role)
        if not self.recomputes and role == "scheduler":
            log.warning(
                SETTING_UNSAFE,
                key="kv_load_failure_policy",
                value="fail",
                remedy="Set kv_load_failure_policy to recompute; a failed load ends "
                "its request with an error otherwise.",
            )
        return log

    def open_store(self, *, index_only: bool) -> Store:
        """
        Open the configured store.

        Args:
            index_only: For the scheduler, which moves no bytes.

        Raises:
            ConfigError: It cannot be opened, or the engine's processes would not share
                it.
        """
        store_class = load_class("ucm.stores", self.config.store.type, "store.type")
        opener = getattr(store_class, "open_configured", None)
        if opener is None:
            raise ConfigError(
                "store.type",
                self.config.store.type,
                "is not shared between the engine's processes",
                "Use slab.",
            )
        store = opener(
            self.config.store,
            block_bytes=self.layout.max_block_bytes,
            index_only=index_only,
        )
        if not isinstance(store, Store):
            raise ConfigError(
                "store.type", self.config.store.type, "is no store", "Use slab."
            )
        return store

    def make_device(self, device_type: str) -> Device:
        """
        Return the device layer for the engine's device.

        Raises:
            ConfigError: There is none.
        """
        make: Callable[[int], Device] = load_class("ucm.devices", device_type, "device")
        return make(self.num_blocks)

    def check_digest(self, digest: bytes) -> None:
        """
        Compare another process's key space with ours.

        Raises:
            LayoutError: They differ.
        """
        if digest != self.keyspace.digest:
            raise LayoutError(
                f"a rank stores under key space {digest.hex()}, the scheduler looks up "
                f"{self.keyspace.digest.hex()}: both must see the same model files, "
                "settings and machine type"
            )
