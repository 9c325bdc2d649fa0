# SPDX-License-Identifier: Apache-2.0
"""
What of the engine's settings decides the bytes of a block, as text for the key space.

``ucm.integration.vllm.fields`` says for each field whether it counts. Here is what counts
under a condition, how values become text, and whose blocks nobody may use again.
"""

import dataclasses
import enum
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.platforms import current_platform

from ucm.errors import ConfigError
from ucm.integration.vllm.fields import COUNTED

__all__ = ["check_reusable", "settings_of"]

_LENGTH_FREE = frozenset(
    {
        "default",
        "linear",
        "llama3",
        "yarn",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "proportional",
    }
)
"""Kinds of rotary embedding whose factors come from the model's configuration alone."""

_WITHOUT_DRAFT = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})

_ENVIRONMENT: Mapping[str, object] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_DISABLED_KERNELS": [],
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": False,
    "VLLM_ROCM_USE_AITER": False,
    "VLLM_ROCM_USE_AITER_FP4BMM": True,
    "VLLM_ROCM_USE_AITER_FP8BMM": True,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "auto",
    "VLLM_USE_DEEP_GEMM_E8M0": True,
}
"""Variables by which weights or activations are quantised, or products computed in fewer bits, kernels
or experts chosen, or pages packed, and no field of the configuration; with what they are where nobody
sets them."""


def check_reusable(
    vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
    *,
    loads: bool = True,
) -> None:
    """
    Refuse engines whose blocks no other start of them may use, or not all requests.

    Args:
        vllm_config: Of the engine.
        loads: Whether it loads blocks, and does not only save them.

    Raises:
        ConfigError: Names setting and remedy.
    """
    model, remedy = vllm_config.model_config, "Serve without kv_connector=UCMConnector."
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales",
            True,
            "the scales come from the first batch, so that no other start of the engine "
            "can read its blocks",
            "Leave it out and take scales from the checkpoint, or serve without "
            "kv_connector=UCMConnector.",
        )
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise ConfigError(
            "diffusion_config",
            "set",
            "tokens look at later ones, so that a block is no function of its prefix",
            remedy,
        )
    if getattr(model, "pooler_config", None) is not None and not getattr(
        model, "is_prefix_caching_supported", True
    ):
        raise ConfigError(
            "pooler_config",
            getattr(model.pooler_config, "seq_pooling_type", None),
            "the result depends on the output of every token, or tokens on later ones, "
            "and those that are loaded have none",
            remedy,
        )
    if loads and _hashes_keys(getattr(vllm_config, "additional_config", None)):
        raise ConfigError(
            "additional_config.enable_hamming_sparse",
            True,
            "vllm-ascend keeps a hash of each key beside its KV cache to choose what a token "
            "looks at, and those that are loaded bring none",
            "Leave it out, or only save: kv_connector=UCMConnector with "
            "kv_role=kv_producer loads nothing.",
        )
    if loads and _tells_experts(vllm_config):
        raise ConfigError(
            "enable_return_routed_experts",
            True,
            "the engine knows the experts of tokens that it computes, and none of those "
            "that are loaded",
            "Leave it out, or only save: kv_connector=UCMConnector with "
            "kv_role=kv_producer loads nothing.",
        )
    if _numbers_media(model, vllm_config.cache_config):
        raise ConfigError(
            "mm_processor_cache_gb",
            0,
            "beside enable_prefix_caching=False the engine knows images by the number of "
            "their request, which another start of it gives to other images",
            "Leave one of the two as it is, or serve without kv_connector=UCMConnector.",
        )


def _hashes_keys(additional: object) -> bool:
    """Return whether vllm-ascend chooses blocks by hashes, in either way to ask for it."""
    given = additional if isinstance(additional, Mapping) else {}
    nested = given.get("hamming_sparse")
    asked = nested.get("enabled") if isinstance(nested, Mapping) else None
    return bool(asked or given.get("enable_hamming_sparse"))


def _tells_experts(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether answers say which experts computed each token."""
    # Of the model's configuration before vLLM 0.31.
    parts = vllm_config.model_config, getattr(vllm_config, "aux_output_config", None)
    return any(getattr(part, "enable_return_routed_experts", False) for part in parts)


def _numbers_media(model: Any, cache: Any) -> bool:  # noqa: ANN401 - vLLM's settings
    """
    Return whether hashes of blocks hold a count in place of what an image shows.

    It is the engine's ``BaseRenderer._process_mm_uuids`` that saves itself the hashing where
    neither of its caches looks anything up.
    """
    media = getattr(model, "multimodal_config", None)
    return (
        media is not None
        and not getattr(media, "mm_processor_cache_gb", 0)
        and not getattr(cache, "enable_prefix_caching", True)
    )


def settings_of(vllm_config: Any) -> str:  # noqa: ANN401 - vLLM's VllmConfig
    """
    Return what of the engine's settings decides the bytes of blocks, as JSON.

    What is not set is left out, so that the text is short and can be read.

    Raises:
        ConfigError: A value cannot be told apart from others.
    """
    model = vllm_config.model_config
    found: dict[str, object] = {}
    for part, names in COUNTED.items():
        holder: object = vllm_config
        for step in filter(None, part.split(".")):
            holder = getattr(holder, step, None)
        for name in names:
            found[f"{part}.{name}".lstrip(".")] = getattr(holder, name, None)
    found |= {
        "hf_overrides": model.hf_overrides,
        "length": _length(model),
        "attention": _generation(model),
        "draft": _draft(getattr(vllm_config, "speculative_config", None)),
        "kernels": _kernels(getattr(vllm_config, "kernel_config", None)),
        "platform": _platform(),
        "conv_state_layout": getattr(envs, "VLLM_SSM_CONV_STATE_LAYOUT", None),
        "environment": _environment(),
        "loader": _loader(vllm_config.load_config),
    }
    plain = {name: _plain(name, value) for name, value in found.items() if value}
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _length(model: Any) -> object:  # noqa: ANN401 - vLLM's ModelConfig
    """
    Return the longest request where positions depend on it, else nothing.

    Where the engine fits it into memory, it loads the model before it knows the result.
    """
    if _is_length_free(model):
        return None
    fitted = getattr(model, "original_max_model_len", None) == -1
    return "auto" if fitted else getattr(model, "max_model_len", None)


def _is_length_free(model: Any) -> bool:  # noqa: ANN401 - vLLM's ModelConfig
    config = getattr(model, "hf_text_config", None)
    rope = getattr(config, "rope_parameters", None)
    if (
        not isinstance(rope, Mapping)
        or getattr(model, "multimodal_config", None) is not None
        or getattr(config, "dual_chunk_attention_config", None) is not None
        or _is_llama4(config)
        or model.using_transformers_backend()
    ):
        return False
    # One for all layers, or one for each kind of layer.
    nested = [one for one in rope.values() if isinstance(one, Mapping)]
    return all(one.get("rope_type") in _LENGTH_FREE for one in nested or [rope])


def _is_llama4(config: object) -> bool:
    """Return whether temperatures of attention may depend on what is not in its files."""
    return "llama4" in str(getattr(config, "model_type", ""))


def _generation(model: Any) -> object:  # noqa: ANN401 - vLLM's ModelConfig
    """Return what a generation configuration says of attention, for who reads it."""
    if not _is_llama4(getattr(model, "hf_text_config", None)):
        return None
    said = {**model.try_get_generation_config(), **model.override_generation_config}
    return {name: said[name] for name in said if name.startswith("attn")}


def _draft(speculative: Any) -> object:  # noqa: ANN401 - vLLM's SpeculativeConfig
    """Return what decides the bytes of layers that draft; their weights count apart."""
    if speculative is None or speculative.method in _WITHOUT_DRAFT:
        return None
    names = (
        "method",
        "quantization",
        "kv_cache_dtype",
        "index_share_for_mtp_iteration",
        "parallel_drafting",
    )
    found = {name: getattr(speculative, name, None) for name in names}
    found |= _kernels(speculative)
    return {name: one for name, one in found.items() if one}


def _kernels(kernel: Any) -> dict[str, object]:  # noqa: ANN401 - vLLM's KernelConfig
    """
    Return the kernels of matrix products that somebody has chosen.

    Of the same weights some take activations of four or eight bits, and others of sixteen.
    """
    names = "linear_backend", "linear_backend_per_quant", "moe_backend"
    found = {name: getattr(kernel, name, None) for name in names}
    return {name: one for name, one in found.items() if one not in (None, "auto")}


def _environment() -> object:
    """Return the variables that are set to what the engine does not do by itself."""
    found = {name: getattr(envs, name, unset) for name, unset in _ENVIRONMENT.items()}
    return {name: one for name, one in found.items() if one != _ENVIRONMENT[name]}


def _platform() -> object:
    """Return what two device types of the same name differ in."""
    if current_platform.is_rocm():
        return {"rocm": True, "fp8_fnuz": current_platform.is_fp8_fnuz()}
    # Loaded with vllm-ascend's platform. Each type has its own back ends: that of 310P keeps
    # pages of the same size in another order.
    utils = sys.modules.get("vllm_ascend.utils")
    kind = getattr(utils, "get_ascend_device_type", None)
    return None if kind is None else {"ascend": kind().name}


def _loader(load: Any) -> object:  # noqa: ANN401 - vLLM's LoadConfig
    """Return a loader's own settings where they may name what is loaded."""
    tuned = ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer")
    return None if load.load_format in tuned else load.model_loader_extra_config


def _plain(key: str, value: object) -> object:
    """
    Return a value as JSON has it, the same in every process.

    Raises:
        ConfigError: Two different values could look alike.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path | torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(key, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(key, one)) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return {name: _plain(key, getattr(value, name)) for name in fields}
    module = getattr(value, "__module__", "") or ""
    if callable(value) and module.partition(".")[0] == "vllm":
        return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    raise ConfigError(
        key,
        type(value).__qualname__,
        "another one of this name may do something else, and keys could not tell",
        "Give plain values, as JSON has them.",
    )
