# SPDX-License-Identifier: Apache-2.0
"""
What of SGLang is taken, what is refused, and what its pages are called.

A page of SGLang is a block of ours, and a recurrent state one for each layer. SGLang's hashes
carry tokens, cache salt and extra keys, and nothing else, so all that decides the bytes besides
is part of the key space.

Threading: the scheduler's thread; ``Doubt.is_set`` is read on any.
"""

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import attrs
import torch

from ucm.blocks import KeySpace
from ucm.config import environment_without
from ucm.errors import ConfigError
from ucm.integration.changes import engine_began_ns
from ucm.integration.weight_files import is_changed_since, weights_digest
from ucm.layout import KVLayout
from ucm.prefixes import keyspace_of, paged_layout

__all__ = [
    "Doubt",
    "Theirs",
    "are_replicas",
    "check",
    "device_rows",
    "host_rows",
    "named",
    "parts_of",
    "refuse",
    "setting",
]

_LOG: Final = logging.getLogger("sglang.ucm")
Theirs: TypeAlias = Any
"""An object of SGLang, which is not typed."""
_RELEASE: Final = "0.5.23"
"""The one that the doors were run with."""
_TAKEN: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "enable_lora": ((None, False), "an adapter's name may become another's"),
    "speculative_algorithm": ((None,), "the draft has blocks of its own"),
    "pp_size": ((1,), "a stage sees its own layers only"),
    "attn_dp_size": ((1,), "ranks of several groups have the same number"),
    "attn_cp_size": ((1,), "a page is spread over ranks"),
    "dcp_size": ((1,), "a page is spread over ranks"),
    "disaggregation_mode": (("null",), "pages come and go without a look-up"),
    "is_embedding": ((False,), "the result needs tokens that are not computed"),
    "dllm_algorithm": ((None,), "tokens look at later ones"),
    "quantization_param_path": ((None,), "scales of a file of their own are in no key"),
    "enable_return_routed_experts": (
        (None, False),
        "the experts of tokens that are loaded are not known",
    ),
    "enable_return_indexer_topk": (
        (None, False),
        "what the indexer chose for tokens that are loaded is not known",
    ),
    "enable_linear_replayssm": ((False,), "the last tokens of a state lie elsewhere"),
    "enable_unified_memory": (
        (False,),
        "the bytes of a layer's page do not lie together",
    ),
}
"""What a setting may be, and why nothing else."""
# fmt: off
_COUNTED: Final = (
    "attention_backend", "context_length", "decode_attention_backend", "dtype",
    "json_model_override_args", "kv_cache_dtype", "model_impl",
    "prefill_attention_backend", "quantization", "rl_on_policy_target",
    # Of the same files, computed in fewer bits.
    "deepep_dispatcher_output_dtype", "enable_mamba_cache_stochastic_rounding",
    "enable_quant_communications",
    "enable_w4a4_mxfp4_megamoe", "enforce_shared_experts_fusion",
    "flashinfer_a2a_dispatch_type", "flashinfer_mxfp4_moe_precision", "kt_method",
    "kt_num_gpu_experts", "linear_attn_backend", "linear_attn_decode_backend",
    "linear_attn_prefill_backend", "mamba_backend", "mamba_cache_philox_rounds",
    "modelopt_quant",
)
# fmt: on
"""Settings that decide the bytes of pages, beside what the pool shows."""
# fmt: off
_COUNTED_IF_SET: Final = (
    "bf16_gemm_backend", "enable_tf32_matmul", "forward_hooks", "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend", "kt_max_deferred_experts_per_token", "model_config_parser",
    "moe_a2a_backend", "moe_runner_backend",
)
# fmt: on
"""Likewise; engines where none of them is set have the keys that they had before these counted.
Of the same weights some kernels take activations of four or eight bits, and others of sixteen."""
_UNSET: Final = ("auto", "none")
# fmt: off
_VARIABLES: Final[Mapping[str, object]] = dict.fromkeys((
    "DEEP_NORMAL_MODE_USE_INT8_QUANT", "FLASHINFER_NVFP4_4OVER6",
    "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256", "SGLANG_CPU_QUANTIZATION",
    "SGLANG_DEEPEP_BF16_DISPATCH", "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", "SGLANG_FORCE_FP8_MARLIN",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE", "SGLANG_HUMMING_USE_F16_ACCUM", "SGLANG_INT4_WEIGHT",
    "SGLANG_MINICPM_DENSE_AS_SPARSE", "SGLANG_MINICPM_FORCE_DENSE", "SGLANG_MOE_NVFP4_DISPATCH",
    "SGLANG_NIXL_EP_BF16_DISPATCH", "SGLANG_NPU_ARCH35_REQUANT_BLOCK_FP8",
    "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN", "SGLANG_ROCM_DISABLE_LINEARQUANT",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "SGLANG_SIMULATE_UNIFORM_EXPERTS",
    "SGLANG_USE_AITER_FP8_PER_TOKEN",
), False) | {
    "SGLANG_AMD_FLYDSL_MEGA_QUANT": "", "SGLANG_EXTERNAL_MODEL_PACKAGE": "",
    "SGLANG_FLASHINFER_MEGAMOE_COMBINE_DTYPE": "bf16", "SGLANG_FP4_IGNORED_LAYERS": "",
    "SGLANG_FP8_IGNORED_LAYERS": "", "SGLANG_HUMMING_INPUT_QUANT_CONFIG": None,
    "SGLANG_HUMMING_ONLINE_QUANT_CONFIG": None, "SGLANG_MORI_COMBINE_DTYPE": "auto",
    "SGLANG_MORI_DISPATCH_DTYPE": "auto", "SGLANG_OPT_HOPPER_BLOCK_FP8_BF16": True,
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR": None,
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": None,
    "SGLANG_TRITON_FP8_PREFILL_ATTN": True,
}
# fmt: on
"""Variables that say which code computes, or in how many bits, and no setting does; with what they
are where nobody sets them. The next ones are not in SGLang's own list."""
# fmt: off
_UNLISTED: Final = frozenset((
    "AITER_FORCE_A8W4", "AITER_SITUV2_A4W4", "AITER_SITUV2_A8W4",
    "ROCM_QUICK_REDUCE_QUANTIZATION", "SGLANG_AITER_FP8_PREFILL_ATTN",
    "SGLANG_FORCE_MXFP8_BLOCK_CONVERT", "SGLANG_GFX1250_W4A8_MOE"))
# fmt: on
_ELSEWHERE: Final[Mapping[str, tuple[object, ...]]] = {
    "decrypted_config_file": (None,),
    "kt_weight_path": (None,),
    "modelopt_checkpoint_restore_path": (None,),
    "weight_cache_mode": ("off", "daemon"),
}
"""With which values the model's directory has all that is loaded."""
_POOLS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
_HOST_POOLS: Final = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_STATES: Final = "MambaPoolHost"
_LISTENS: Final = "ucm_doubt"
"""Attribute of what stands in for SGLang's own, once in a process."""
_READS: Final = ("checksum", "compare", "snapshot")
"""What SGLang is asked for by who checks weights and changes none."""
_SAME_FILES: Final = ("auto", "safetensors", "fastsafetensors")
_FROM_DIRECTORY: Final = (*_SAME_FILES, "pt", "mistral")
"""Formats of a model's own directory; the first ones read the same files of it."""


def refuse(
    key: str, value: object, why: str, remedy: str = "Serve this without ucm."
) -> NoReturn:
    """Raise the ConfigError that says so; all that is refused here is one."""
    raise ConfigError(key, value, why, remedy)


def check(args: Theirs) -> None:
    """Refuse an engine that nobody tried, or that has blocks of another kind."""
    release = importlib.metadata.version("sglang")
    if release != _RELEASE:
        refuse("sglang", release, "nobody tried it", f"Install sglang=={_RELEASE}.")
    for name, (taken, why) in _TAKEN.items():
        if (value := setting(args, name)) not in taken:
            refuse(name, value, why)
    from sglang.srt.arg_groups.model_override_base import model_config_of

    if model_config_of(args).is_multimodal:
        refuse("model_path", args.model_path, "of an image a page's hash says a number")
    saves_memory = setting(args, "enable_memory_saver")
    if saves_memory and not setting(args, "enable_weights_cpu_backup"):
        refuse(
            "enable_memory_saver",
            True,
            "memory that is given back and taken again has other weights, and nothing tells",
            "Give --enable-weights-cpu-backup, which keeps them.",
        )


def setting(args: Theirs, name: str) -> object:
    """Return what SGLang runs with: what it has chosen itself is not written to *args*."""
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(args, name)


def device_rows(pool: Theirs, page_tokens: int) -> dict[str, torch.Tensor]:
    """
    Return the memory of SGLang's pool, ``[pages, tokens, heads, head_dim]`` by row.

    In the order of layers: of each its keys and its values, or what both are made of.
    """
    kind = type(pool).__name__
    order = getattr(pool, "kv_cache_layout", "nhd" if _is_latent(pool) else None)
    scales = ("k_scale_buffer", "kv_scale_buffer")
    is_scaled = any(getattr(pool, name, None) is not None for name in scales)
    if (kind not in _POOLS, order, is_scaled) != (False, "nhd", False):
        told = f"{kind}, {order}{', scaled' * is_scaled}"
        refuse("kv cache", told, "only attention over all tokens is known")
    return {
        f"{part}.{pool.start_layer + at}": layer.view(-1, page_tokens, *layer.shape[1:])
        for at, parts in enumerate(zip(*_buffers(pool).values(), strict=True))
        for part, layer in zip(_buffers(pool), parts, strict=True)
    }


def _is_latent(pool: Theirs) -> bool:
    return type(pool).__name__.startswith("MLA")


def _buffers(pool: Theirs) -> dict[str, Theirs]:
    """Return the layers of a pool, of the device or the host, by part."""
    if _is_latent(pool):
        return {"latent": pool.kv_buffer}
    return {"k": pool.k_buffer, "v": pool.v_buffer}


def are_replicas(rows: Mapping[str, torch.Tensor]) -> bool:
    """Return whether each rank has all of a page, and not a part of its own."""
    return all("latent." in name for name in rows)


def host_rows(pool: Theirs, kind: str = "") -> dict[str, torch.Tensor]:
    """
    Return that of its host pool likewise: each finds what the other has saved.

    Args:
        pool: Of host pages, or of recurrent states.
        kind: Goes before the names of rows: pools of several kinds number their layers alike.
    """
    if (name := type(pool).__name__) == _STATES:
        return _state_rows(pool, kind)
    if name not in _HOST_POOLS:
        refuse("host pool", name, "only attention over all tokens is known")
    if pool.layout not in ("layer_first", "page_first_direct"):
        refuse(
            "hicache_mem_layout",
            pool.layout,
            "the bytes of a layer's page do not lie together",
            "Use layer_first, or page_first_direct, with --hicache-io-backend direct.",
        )
    rows: dict[str, torch.Tensor] = {}
    for at in range(pool.layer_num):
        for part, layers in _buffers(pool).items():
            rows[f"{kind}{part}.{pool.start_layer + at}"] = (
                layers[at].view(-1, pool.page_size, *layers.shape[2:])
                if pool.layout == "layer_first"
                else layers[:, at]
            )
    return rows


def _state_rows(pool: Theirs, kind: str) -> dict[str, torch.Tensor]:
    """Return recurrent states, ``[states * layers, 1, ...]`` by row; see ``parts_of``."""
    if pool.layout != "page_first_direct":
        refuse("hicache_mem_layout", pool.layout, "a state's bytes lie apart")
    if pool.slot_state_buffers:
        refuse("model", "slot states", "a part of its state is of no layer")
    kinds = {"temporal": [pool.temporal_buffer], "conv": pool.conv_buffer}
    return {
        f"{kind}{part}.{at}": states.view(-1, *states.shape[2:])
        for part, buffers in kinds.items()
        for at, states in enumerate(buffers)
        if states.numel()  # a model with convolutions alone has no others
    }


def parts_of(pool: Theirs) -> int:
    """
    Return as how many blocks a page of a host pool is stored.

    A state is one for each layer: of all layers it may have more bytes than a slab or a tier
    takes at once.
    """
    return int(pool.num_mamba_layers) if type(pool).__name__ == _STATES else 1


def named(
    args: Theirs,
    rows: Mapping[str, torch.Tensor],
    weights: str,
    num_ranks: int,
    parts: int = 1,
) -> tuple[KVLayout, KeySpace]:
    """Return layout and key space of pages that so many ranks compute together."""
    place = Path(args.model_path)
    if not weights:
        given = {"load_format": _FROM_DIRECTORY, **_ELSEWHERE}
        is_elsewhere = any(setting(args, each) not in given[each] for each in given)
        if is_elsewhere or not place.is_dir():
            refuse(
                "weights_revision",
                "",
                f"the weights of {place} cannot be told apart from other revisions",
                "Serve a local directory, or give this revision a name of its own.",
            )
        weights = weights_digest(place)
        began_ns = engine_began_ns()
        if began_ns is not None and is_changed_since(place, began_ns):
            refuse(
                "weights_revision",
                "",
                f"files of {place} were changed since the server began",
                "Start it again. Give each version a directory of its own, or a name.",
            )
        if (how := setting(args, "load_format")) not in _SAME_FILES:
            weights += f"/{how}"  # one directory may have both
    first = next(iter(rows.values()))
    layout = paged_layout(
        {name: row[0].nbytes for name, row in rows.items()},
        block_tokens=first.shape[1],
        engine="sglang/nhd",
    )
    keyspace = keyspace_of(
        layout,
        model=args.model_path,
        weights=weights,
        kv_dtype=str(first.dtype),
        engine=f"sglang {_RELEASE}",
        parallel=f"tp={num_ranks}",
        settings={name: str(setting(args, name)) for name in _COUNTED}
        | _chosen(args)
        | {
            "pages": [f"{row.dtype} {tuple(row.shape[1:])}" for row in rows.values()],
            "parts": parts,
        },
    )
    return layout, attrs.evolve(keyspace, hash_algorithm="sglang.sha256")


def _chosen(args: Theirs) -> dict[str, object]:
    """Return what counts where somebody has set it, and is set."""
    from sglang.srt.environ import envs

    found = {name: setting(args, name) for name in _COUNTED_IF_SET}
    chosen = {name: one for name, one in found.items() if one and one not in _UNSET}
    found = {name: getattr(envs, name).get() for name in _VARIABLES}
    chosen |= {name: one for name, one in found.items() if one != _VARIABLES[name]}
    given = environment_without(frozenset()).items()
    chosen |= {name: one for name, one in given if name in _UNLISTED}
    return {name: str(one) for name, one in chosen.items()}


class Doubt:
    """
    Whether the engine's weights may be others than those that keys name.

    All that writes weights in SGLang first asks which runners to write to, and that is
    listened to; so does what only reads them, which is told apart. Nothing tells when all is
    as before, so it stays, also for a cache that is attached later: what its keys name is
    what the engine began with.
    """

    def __init__(self) -> None:
        self.is_set = False

    def _asked(self) -> None:
        """Take note that somebody is about to write weights."""
        if not self.is_set:
            self.is_set = True
            _LOG.warning(
                "Weights are written: ucm finds and saves nothing from now on, until the "
                "server is started anew."
            )

    @classmethod
    def of_process(cls) -> "Doubt":
        """Return the one of this process; listens from the first call on."""
        from sglang.srt.managers.scheduler_components import weight_updater

        updater = weight_updater.SchedulerWeightUpdaterManager
        asked: Callable[..., Theirs] = updater._select_runners  # noqa: SLF001 - no hook
        doubt = vars(asked).get(_LISTENS)
        if isinstance(doubt, cls):
            return doubt
        found, checks = cls(), updater.check_weights.__code__

        def select_runners(*args: Theirs, **kwargs: Theirs) -> Theirs:
            # Known by its code: SGLang may have bound that method before anybody could listen.
            who = sys._getframe(1)  # noqa: SLF001
            is_check = who.f_code is checks
            if not (is_check and who.f_locals["recv_req"].action in _READS):
                found._asked()
            return asked(*args, **kwargs)

        vars(select_runners)[_LISTENS] = found
        updater._select_runners = select_runners  # noqa: SLF001 - likewise
        return found
