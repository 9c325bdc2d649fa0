# SPDX-License-Identifier: Apache-2.0
"""Hand-made configurations of an engine, for tests that start none."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

TENSORS = {"a": (0, 1 << 20), "b": (1 << 20, 3 << 20), "c": (3 << 20, (3 << 20) + 8)}
HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        **{
            name: {
                "dtype": "U8",
                "shape": [stop - start],
                "data_offsets": [start, stop],
            }
            for name, (start, stop) in TENSORS.items()
        },
    }
).encode()
DATA = 8 + len(HEADER)
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(TENSORS["c"][1])

NUM_BLOCKS = 10
SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}


def full(block_size: int = 16, **options) -> FullAttentionSpec:
    """Return a full-attention spec; 1024 bytes per page of 16 tokens."""
    return FullAttentionSpec(block_size, **(SHAPE | options))


def window(tokens: int = 24, block_size: int = 16) -> SlidingWindowSpec:
    """Return a sliding-window spec."""
    return SlidingWindowSpec(block_size, sliding_window=tokens, **SHAPE)


def state(block_size: int = 16, mode: str = "align", **options) -> MambaSpec:
    """Return the spec of a recurrent layer whose state has 48 bytes."""
    return MambaSpec(
        block_size,
        shapes=((4, 4), (2, 2)),
        dtypes=(torch.float16, torch.float32),
        mamba_cache_mode=mode,
        **options,
    )


def cache_config(
    *groups: tuple[list[str], KVCacheSpec],
    tensors: list[KVCacheTensor] | None = None,
    **options,
) -> KVCacheConfig:
    """
    Return a cache configuration, by default with all layers in one allocation.

    Args:
        groups: Layer names and spec of each group.
        tensors: Placement, where it is not layer behind layer.
        options: Other fields of vLLM's class.
    """
    layers = [name for names, _ in groups for name in names]
    page = groups[0][1].page_size_bytes
    behind = KVCacheTensor(
        size=len(layers) * NUM_BLOCKS * page,
        layers=layers,
        layer_stride=NUM_BLOCKS * page,
        block_stride=page,
    )
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=tensors or [behind],
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in groups],
        **options,
    )


def plain_cache() -> KVCacheConfig:
    """Return one group of two full-attention layers."""
    return cache_config((["a", "b"], full()))


def engine_config(model_dir: str, **extra: object) -> SimpleNamespace:
    """
    Return what the door reads of a ``VllmConfig``; *extra* is ours.

    No save waits for others, unless *extra* says so.
    """
    timeout = {"company": 0, **extra.get("timeout", {})}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model_dir,
            dtype=torch.float16,
            quantization=None,
            revision=None,
            hf_overrides={},
            hf_config_path=None,
            hf_text_config=SimpleNamespace(
                model_type="llama", rope_parameters={"rope_type": "default"}
            ),
            max_model_len=2048,
            model_weights="",
            override_generation_config={},
            seed=0,
            try_get_generation_config=dict,
            using_transformers_backend=lambda: False,
        ),
        load_config=SimpleNamespace(
            load_format="auto", download_dir=None, model_loader_extra_config={}
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=False,
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            distributed_executor_backend="mp",
            nnodes=1,
            nnodes_within_dp=1,
            world_size=1,
            rank=0,
            use_ubatching=False,
        ),
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={**extra, "timeout": timeout},
            kv_load_failure_policy="recompute",
            kv_role="kv_both",
            engine_id="engine",
        ),
        max_concurrent_batches=1,
    )


def model_files(path: Path) -> Path:
    """Make a model directory with two weight files and other files beside them."""
    path.mkdir()
    (path / "config.json").write_text('{"num_layers": 2}')
    (path / "README.md").write_text("about")
    (path / "one.safetensors").write_bytes(SAFETENSORS)
    (path / "two.bin").write_bytes(b"\1" * 100)
    (path / "odd.safetensors").write_bytes(b"\1" * 100)
    return path


def change_byte(path, at):
    """Change one byte of a file and leave its size."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
