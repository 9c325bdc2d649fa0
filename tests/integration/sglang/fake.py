# SPDX-License-Identifier: Apache-2.0
"""
As much of SGLang 0.5.23 as the doors touch, where SGLang is not installed.

Modules of its names, with the classes that the doors derive from, and an engine that uses
a linker and a storage as ``UnifiedCacheLinkerWrapper`` and ``HiCacheController`` do.
``tests/sglang`` holds the signatures against SGLang's own.
"""

import enum
import importlib
import sys
import types
from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from tests.integration.sglang.pools import (
    DIM,
    HEADS,
    LAYERS,
    TOKENS,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from ucm.integration.sglang.engine import _VARIABLES


class PoolName(enum.StrEnum):
    """SGLang's, in part."""

    INDEXER = "indexer"
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"


class PoolHitPolicy(enum.StrEnum):
    """SGLang's."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@attrs.frozen
class PoolTransferResult:
    """SGLang's."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls):
        """Return what says of no pool anything."""
        return cls(0, {})


LINKER = {
    "cancel_queued_load": ("rid",),
    "close": (),
    "finish_layer_wise_loading": ("counter_index",),
    "load": ("rid", "transfers"),
    "lookup": ("rid", "transfers"),
    "num_completed_offloads": (),
    "offload": ("transfers", "session_id"),
    "pop_completed_offload": (),
    "reset": (),
    "start_layer_wise_loading": (),
}
"""Abstract methods of SGLang's class, and their parameters."""
STORAGE = {
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "get": ("key", "target_location", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
}
"""Likewise."""
OPTIONAL = {
    "batch_exists": ("keys", "extra_info"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "register_mem_pool_host": ("mem_pool_host",),
}
"""Those of a storage that are not abstract, and that the door has."""


def _register_mem_pool_host(storage: Any, mem_pool_host: Any) -> None:
    storage.mem_pool_host = mem_pool_host


def _abstract(name: str, methods: Iterable[str], **more: Any) -> type:
    return ABCMeta(
        name, (), {each: abstractmethod(lambda self: None) for each in methods} | more
    )


UnifiedCacheLinker = _abstract("UnifiedCacheLinker", LINKER)
HiCacheStorage = _abstract(
    "HiCacheStorage", STORAGE, register_mem_pool_host=_register_mem_pool_host
)


class SchedulerWeightUpdaterManager:
    """What writes weights, after it has asked to which runners."""

    def _select_runners(self, selector="all"):
        return [("target", selector)]

    def check_weights(self, recv_req):
        """Read them, or write zeros."""
        return recv_req.action, self._select_runners()

    def update_weights_from_disk(self):
        """Write them."""
        return self._select_runners()


@attrs.define
class PoolTransfer:
    """SGLang's, in part."""

    keys: list[str] | None
    device_indices: torch.Tensor | None = None
    name: PoolName = PoolName.KV
    host_indices: torch.Tensor | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.TRAILING_PAGES


class Variables:
    """
    SGLang's, as far as a door asks for them.

    Args:
        given: Those that somebody has set.
    """

    def __init__(self, given: dict[str, object]) -> None:
        self._given = given

    def __getattr__(self, name: str) -> types.SimpleNamespace:
        value = self._given.get(name, _VARIABLES[name])
        return types.SimpleNamespace(get=lambda: value)


def server_args(model: Path, **changed: Any) -> types.SimpleNamespace:
    """Return settings as SGLang has them by default."""
    return types.SimpleNamespace(
        **{
            "attention_backend": "torch_native",
            "attn_cp_size": 1,
            "attn_dp_size": 1,
            "bf16_gemm_backend": "auto",
            "chosen": {},
            "context_length": None,
            "dcp_size": 1,
            "decode_attention_backend": None,
            "decrypted_config_file": None,
            "deepep_dispatcher_output_dtype": "auto",
            "disaggregation_mode": "null",
            "dllm_algorithm": None,
            "dtype": "float32",
            "enable_linear_replayssm": False,
            "enable_lora": None,
            "enable_mamba_cache_stochastic_rounding": False,
            "enable_memory_saver": False,
            "enable_quant_communications": False,
            "enable_return_indexer_topk": False,
            "enable_return_routed_experts": False,
            "enable_unified_memory": False,
            "enable_tf32_matmul": None,
            "enable_w4a4_mxfp4_megamoe": False,
            "enable_weights_cpu_backup": False,
            "enforce_shared_experts_fusion": False,
            "environment": {},
            "flashinfer_a2a_dispatch_type": None,
            "flashinfer_mxfp4_moe_precision": "default",
            "forward_hooks": None,
            "fp4_gemm_runner_backend": "auto",
            "fp8_gemm_runner_backend": "auto",
            "is_embedding": False,
            "is_multimodal": False,
            "json_model_override_args": "{}",
            "kt_max_deferred_experts_per_token": None,
            "kt_method": "AMXINT4",
            "kt_num_gpu_experts": None,
            "kt_weight_path": None,
            "kv_cache_dtype": "auto",
            "linear_attn_backend": "triton",
            "linear_attn_decode_backend": None,
            "linear_attn_prefill_backend": None,
            "load_format": "auto",
            "mamba_backend": "triton",
            "mamba_cache_philox_rounds": 0,
            "model_config_parser": "auto",
            "model_impl": "auto",
            "model_path": str(model),
            "modelopt_checkpoint_restore_path": None,
            "modelopt_quant": None,
            "moe_a2a_backend": "none",
            "moe_runner_backend": "auto",
            "pp_size": 1,
            "prefill_attention_backend": None,
            "quantization": None,
            "quantization_param_path": None,
            "rl_on_policy_target": None,
            "speculative_algorithm": None,
            "tp_size": 1,
            "weight_cache_mode": "off",
        }
        | changed
    )


def _modules(args: types.SimpleNamespace) -> dict[str, dict[str, Any]]:
    mem_cache = "sglang.srt.mem_cache"
    return {
        f"{mem_cache}.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolName": PoolName,
            "PoolTransferResult": PoolTransferResult,
        },
        f"{mem_cache}.unified_cache.unified_cache_linker": {
            "UnifiedCacheLinker": UnifiedCacheLinker
        },
        "sglang.srt.environ": {"envs": Variables(args.environment)},
        "sglang.srt.runtime_context": {"get_server_args": lambda: args},
        "sglang.srt.arg_groups.overrides": {
            "resolution_result": lambda args, name: args.chosen.get(
                name, getattr(args, name)
            )
        },
        "sglang.srt.arg_groups.model_override_base": {
            "model_config_of": lambda args: types.SimpleNamespace(
                is_multimodal=args.is_multimodal
            )
        },
        "sglang.srt.managers.scheduler_components": {
            "weight_updater": types.SimpleNamespace(
                SchedulerWeightUpdaterManager=SchedulerWeightUpdaterManager
            )
        },
    }


@contextmanager
def installed(
    args: types.SimpleNamespace, site: Path, release: str = "0.5.23"
) -> Iterator[types.SimpleNamespace]:
    """Let SGLang be installed; yield the modules of its doors."""
    info = site / f"sglang-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n"
    )
    updater = SchedulerWeightUpdaterManager
    select = updater._select_runners
    sys.path.insert(0, str(site))
    doors = "ucm.integration.sglang"
    fresh = ("sglang", f"{doors}.linker", f"{doors}.hicache")
    try:
        for name in [name for name in sys.modules if name.startswith(fresh)]:
            del sys.modules[name]
        for name, content in _modules(args).items():
            parts = name.split(".")
            for stop in range(1, len(parts) + 1):
                package = ".".join(parts[:stop])
                sys.modules.setdefault(package, types.ModuleType(package))
            vars(sys.modules[name]).update(content)
        yield types.SimpleNamespace(
            linker=importlib.import_module(f"{doors}.linker"),
            hicache=importlib.import_module(f"{doors}.hicache"),
        )
    finally:
        sys.path.remove(str(site))
        updater._select_runners = select
        for name in [name for name in sys.modules if name.startswith(fresh)]:
            del sys.modules[name]


class Engine:
    """
    One rank that computes pages, and asks a linker first.

    What it computes for a page depends on the page's hash, so that a page that is loaded
    wrongly is seen.
    """

    def __init__(self, linker: Any, pool: MHATokenToKVPool | MLATokenToKVPool) -> None:
        self.linker = linker
        self.pool = pool
        self._next = 1

    def tokens_of(self, pages: list[int]) -> torch.Tensor:
        """Return the slots of pages."""
        first = torch.tensor(pages).repeat_interleave(TOKENS) * TOKENS
        return first + torch.arange(TOKENS).repeat(len(pages))

    def take(self, count: int) -> list[int]:
        """Return pages that nobody has had."""
        pages = list(range(self._next, self._next + count))
        self._next += count
        return pages

    def compute(self, hashes: list[str], pages: list[int]) -> None:
        """Write what belongs to hashes."""
        for one, page in zip(hashes, pages, strict=True):
            part = slice(page * TOKENS, (page + 1) * TOKENS)
            for buffer, content in zip(self.buffers, content_of(one), strict=False):
                buffer[part] = content.view(buffer[part].shape)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Keys and values, layer by layer."""
        if isinstance(self.pool, MLATokenToKVPool):
            return self.pool.kv_buffer
        pairs = zip(self.pool.k_buffer, self.pool.v_buffer, strict=True)
        return [buffer for pair in pairs for buffer in pair]

    def offload(self, hashes: list[str], pages: list[int]) -> bool:
        """Compute and offload; return what the linker says in the end."""
        self.compute(hashes, pages)
        assert self.linker.offload([PoolTransfer(hashes, self.tokens_of(pages))])
        if (save := self.linker._saves[-1]) is not None:
            save.wait_committed()
        assert self.linker.num_completed_offloads() == len(self.linker._saves)
        return bool(self.linker.pop_completed_offload())

    def load(self, rid: str, hashes: list[str]) -> list[int]:
        """Look up and queue a load; return where it goes."""
        lengths = self.linker.lookup(rid, [PoolTransfer(hashes)])
        found = hashes[: max(lengths, default=0)]
        pages = self.take(len(found))
        if found:
            assert self.linker.load(rid, [PoolTransfer(found, self.tokens_of(pages))])
        return pages

    def forward(self) -> list[int]:
        """Run a pass over all layers; return by layer how many values are not zero."""
        index = self.linker.start_layer_wise_loading()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        seen = []
        for layer in range(LAYERS):
            counter.wait_until(layer)
            seen.append([int(each.count_nonzero()) for each in self.buffers])
        self.is_whole = self.linker.finish_layer_wise_loading(index)
        counter.set_consumer(-1)
        return seen


def content_of(one: str) -> torch.Tensor:
    """Return what a page of that hash holds, ``[rows, tokens, heads, dim]``."""
    made = torch.Generator().manual_seed(int(one[:12], 16))
    return torch.rand((2 * LAYERS, TOKENS, HEADS, DIM), generator=made) + 0.1


def hashes(count: int, seed: int = 0) -> list[str]:
    """Return hashes as SGLang has them."""
    return [f"{seed * 1000 + at + 1:012x}".ljust(64, "a") for at in range(count)]
