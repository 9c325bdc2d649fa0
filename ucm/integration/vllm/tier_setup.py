# SPDX-License-Identifier: Apache-2.0
"""
What our tier below vLLM's own offloading derives from the engine's configuration.

Blocks are *chunks* of vLLM's CPU tier: the pages of all ranks, in their order, of one or
more of the engine's blocks. vLLM gives a tier neither its own configuration nor the
model's, and names files by model, type and shape. Here keys say what ``UCMConnector``'s
say; engines of which that cannot be told are refused.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import attrs

from ucm.blocks import KeySpace
from ucm.config import UCMConfig
from ucm.configuration.sources import load
from ucm.errors import ConfigError
from ucm.integration.vllm.compat import as_text, hash_block_tokens, version
from ucm.integration.vllm.identity import check_reusable
from ucm.integration.vllm.keyspace import check_hash_algorithm, keyspace_of
from ucm.integration.vllm.layout import layout_of
from ucm.integration.vllm.topology import is_spread, topology_of
from ucm.layout import KVLayout
from ucm.prefixes import paged_layout

__all__ = ["CHUNKS", "TierSetup"]

CHUNKS = "chunks"
"""Name of the one buffer: vLLM's CPU tier, whatever layers lie in it."""
_TRIED = (0, 32)
"""The release whose tiers were tried; vLLM calls their interface experimental."""
_MAX_FRAMES = 20
"""Between a tier and the connector's half that has it made; four."""
_CONNECTOR = "Use kv_connector=UCMConnector, whose workers notice."


@attrs.frozen(kw_only=True)
class TierSetup:
    """
    Settings, layout and key space of one engine's chunks.

    Args:
        config: The operator's settings.
        layout: One row: a chunk with its padding.
        keyspace: Under which chunks are stored.
    """

    config: UCMConfig
    layout: KVLayout
    keyspace: KeySpace

    @classmethod
    def of(
        cls,
        spec: Any,  # noqa: ANN401 - vLLM's OffloadingSpec
        chunk_bytes: int,
        settings: Mapping[str, object],
    ) -> "TierSetup":
        """
        Derive everything; called while vLLM makes the tier.

        Args:
            spec: As vLLM gives it to tiers.
            chunk_bytes: From one chunk to the next.
            settings: Ours, of the tier's entry in ``secondary_tiers``.

        Raises:
            ConfigError: A setting cannot be used; names key, value and remedy.
            LayoutError: The model's KV cache cannot be mapped.
        """
        if version() != _TRIED:
            raise ConfigError(
                "vllm",
                as_text(version()),
                f"its tiers were not tried; those of {as_text(_TRIED)} were",
                "Use that release, or kv_connector=UCMConnector.",
            )
        config = load(settings, name="secondary_tiers").config
        vllm_config, kv_cache_config = _configurations(spec)
        _check(vllm_config)
        check_hash_algorithm(vllm_config.cache_config.prefix_caching_hash_algo)
        check_reusable(vllm_config)
        topology = topology_of(vllm_config.parallel_config, kv_cache_config)
        pages = layout_of(
            kv_cache_config,
            topology.decode_context,
            hash_block_tokens(kv_cache_config, vllm_config),
        )
        layout = paged_layout(
            {CHUNKS: chunk_bytes},
            block_tokens=min(spec.tokens_per_block) * spec.blocks_per_chunk,
            engine=_chunk_format(spec, pages),
        )
        return cls(
            config=config,
            layout=layout,
            keyspace=keyspace_of(
                vllm_config, layout, topology.parallel, config.weights_revision
            ),
        )


def _chunk_format(spec: Any, pages: KVLayout) -> str:  # noqa: ANN401 - vLLM's
    """Return what decides which byte of a chunk is which."""
    config = spec.config
    return "/".join(
        map(
            str,
            (
                "vllm-chunk",
                pages.fingerprint(),
                [(group.group_id, group.tokens_per_block) for group in config.groups],
                spec.tokens_per_hash,
                spec.blocks_per_chunk,
                config.worker_kv_bytes_per_block,
                config.parallel.world_size,
                spec.replicated_layout,
                config.canonical_layout,
                config.kv_cache_layout,
            ),
        )
    )


def _configurations(spec: Any) -> tuple[Any, Any]:  # noqa: ANN401 - vLLM's
    """
    Return the engine's configurations, which vLLM does not give to a tier.

    Who has the tier made has both: the connector's scheduler half. They are the right
    ones if the spec's own settings are theirs, and not only equal.

    Raises:
        ConfigError: The tier is made by somebody else.
    """
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        near = frame.f_locals
        vllm_config = near.get("vllm_config")
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        given = getattr(transfer, "kv_connector_extra_config", None)
        if given is spec.extra_config and "kv_cache_config" in near:
            return vllm_config, near["kv_cache_config"]
        frame = frame.f_back
    raise ConfigError(
        "secondary_tiers",
        type(spec).__name__,
        "not made by vLLM's OffloadingConnector, so that nobody says which model's "
        "blocks these are",
        "Set kv_connector=OffloadingConnector.",
    )


def _check(vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Refuse engines whose keys would be the same for other bytes."""
    if getattr(vllm_config, "lora_config", None) is not None:
        raise ConfigError(
            "lora_config",
            "set",
            "vLLM's keys name an adapter by name and path, not by what it holds",
            _CONNECTOR,
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "weight_transfer_config",
            "set",
            "a tier is not told when the engine's weights change",
            _CONNECTOR,
        )
    parallel = vllm_config.parallel_config
    if is_spread(parallel):
        raise ConfigError(
            "nnodes"
            if parallel.nnodes_within_dp > 1
            else "distributed_executor_backend",
            f"{parallel.nnodes}, {parallel.distributed_executor_backend}",
            "the tier sees what ranks of its own machine store",
            _CONNECTOR,
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ConfigError(
            "pipeline_parallel_size",
            stages,
            "a tier is not told which layers each stage has",
            _CONNECTOR,
        )
