# SPDX-License-Identifier: Apache-2.0
"""
The key space of a vLLM engine: what its block hashes do not say.

vLLM's hashes cover tokens, images, cache salt, and LoRA by name and path, and neither
model nor weights nor layout. Each process derives its own view from its configuration;
the scheduler makes one key space of those of all ranks
(``ucm.ranks``). What an adapter holds is part of its requests' hashes
(``ucm.integration.vllm.adapters``). The rule: what is not known to be equal is unequal,
and a restart with nothing changed is equal.
"""

from pathlib import Path
from typing import Any

from vllm import envs

from ucm.blocks import KeySpace
from ucm.config import python_hash_seed
from ucm.errors import ConfigError
from ucm.integration.changes import engine_began_ns
from ucm.integration.vllm.compat import engine_name, has
from ucm.integration.vllm.identity import settings_of
from ucm.integration.vllm.preflight import check_hashes
from ucm.integration.weight_files import weights_name
from ucm.layout import KVLayout

__all__ = ["check_hash_algorithm", "keyspace_of"]


def check_hash_algorithm(algorithm: str) -> None:
    """
    Refuse block hashes that differ from process to process.

    Raises:
        ConfigError: Names the setting to change.
    """
    check_hashes(algorithm, python_hash_seed(), are_fixed=has("fixed_hashes"))


def keyspace_of(
    vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
    layout: KVLayout,
    parallel: str,
    weights_revision: str,
) -> KeySpace:
    """
    Return the key space that a process would store under if its layers were all.

    Args:
        vllm_config: As both halves of a connector are given it.
        layout: From the same engine.
        parallel: What of its ranks decides the bytes (``Topology.parallel``).
        weights_revision: The operator's name for the weights; empty to derive it.

    Raises:
        ConfigError: Weights or settings cannot be told apart from others.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return KeySpace(
        model=Path(model.model_weights or model.model).name,
        weights=_weights(vllm_config, weights_revision),
        kv_dtype=f"{cache.cache_dtype}/{model.dtype}/{model.quantization}",
        layout=layout.fingerprint(),
        block_tokens=layout.hash_block_tokens,
        parallel=parallel,
        hash_algorithm=f"{cache.prefix_caching_hash_algo}/{python_hash_seed()}",
        engine=engine_name(vllm_config.device_config.device_type),
        settings=settings_of(vllm_config),
    )


def _weights(vllm_config: Any, revision: str) -> str:  # noqa: ANN401 - vLLM's VllmConfig
    """Name the weights of all layers that may have blocks: the model's and a draft's."""
    model, load = vllm_config.model_config, vllm_config.load_config
    name = _weights_of(model, load, revision)
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft.model == model.model:
        return name
    draft_load = getattr(speculative, "draft_load_config", None) or load
    return f"{name}+{_weights_of(draft, draft_load, revision)}"


def _weights_of(model: Any, load: Any, revision: str) -> str:  # noqa: ANN401 - vLLM's
    """Name the weights of one model; what the other hub's cache has are others."""
    if not revision and envs.VLLM_USE_MODELSCOPE and not Path(model.model).exists():
        raise ConfigError(
            "weights_revision",
            "",
            f"VLLM_USE_MODELSCOPE has {model.model} read from a directory that is not known",
            "Set kv_connector_extra_config.weights_revision to a name of this revision, "
            "and to another one whenever weights or configuration change, or give the "
            "model's directory.",
        )
    return weights_name(model, load, revision, engine_began_ns("EngineCore"))
