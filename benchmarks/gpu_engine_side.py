# SPDX-License-Identifier: Apache-2.0
"""
What each engine process of ``benchmarks.gpu_engine`` does.

The models have the shape of real ones and weights that mean nothing: what is computed
and copied costs the same. Arguments and results travel as JSON; times are seconds.
"""

import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks import decode_side
from tests.e2e.engine import generate, in_process_engine, reset_prefix_cache
from tests.e2e.models import CACHE, LLAMA, Recipe

__all__ = ["LAYOUT", "MODELS", "decode", "first_tokens"]

LAYOUT = "VLLM_KV_CACHE_LAYOUT"
_PINNED_S = 12.0
"""One of 32 GiB is there and pinned by then; copies go by way of staging memory before."""
_OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": False,
    # Graphs as in production; nothing is compiled, which would take minutes.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 16, 64, 128, 256],
    },
}


def make_shape(recipe: Recipe) -> Path:
    """Return the directory of a model of which there is the configuration only."""
    import transformers

    target = CACHE / f"{recipe.name}-shape-{recipe.digest()}"
    config = getattr(transformers, recipe.config_class)(
        architectures=["LlamaForCausalLM"], **recipe.config
    )
    config.save_pretrained(target)
    return target


_LLAMA_8B = attrs.evolve(
    LLAMA,
    name="llama-8b",
    dtype="bfloat16",
    config={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
)
_ONE_OF_EIGHT = attrs.evolve(
    _LLAMA_8B,
    name="llama-70b-one-rank-of-eight",
    config=_LLAMA_8B.config
    | {
        "hidden_size": 8192,
        "intermediate_size": 3584,
        "num_hidden_layers": 80,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
)
MODELS = {
    "8B": decode_side.Model(_LLAMA_8B, 16, 20 << 30, "32GiB", make_shape, _OPTIONS),
    "70B, a rank of 8": decode_side.Model(
        _ONE_OF_EIGHT, 16, 20 << 30, "32GiB", make_shape, _OPTIONS
    ),
}
"""Pages of 64 KB and of 8 KB in the engine's usual layout; blocks of 2 MB and 640 KB."""

_Config = Mapping[str, object] | None


def decode(layout: str, model: str, **arguments: object) -> dict[str, Any]:
    """Return what ``decode_side.decode`` tells of an engine on a GPU."""
    os.environ[LAYOUT] = layout
    if not layout:
        del os.environ[LAYOUT]
    decode_side.MODELS[model] = MODELS[model]
    return decode_side.decode(model=model, **arguments)


def first_tokens(
    kv_transfer_config: _Config,
    layout: str,
    model: str,
    lengths: Sequence[int],
    rounds: int,
) -> dict[str, Any]:
    """
    Return what a first token takes: computed, from the engine's cache, from the store.

    Scheduler and worker have a process of their own, as in a server.

    Args:
        kv_transfer_config: Of the side.
        layout: Of the KV cache; empty: what engine and connector agree on.
        model: One of ``MODELS``.
        lengths: Of prompts, in tokens.
        rounds: Prompts of each length.
    """
    os.environ[LAYOUT] = layout
    if not layout:
        del os.environ[LAYOUT]
    shape = MODELS[model]
    with in_process_engine(
        shape.make(shape.recipe),
        kv_transfer_config=kv_transfer_config,
        kv_cache_memory_bytes=shape.pool_bytes,
        block_size=shape.block_tokens,
        max_model_len=max(lengths) + 64,
        max_num_batched_tokens=8192,
        multiprocess=True,
        **shape.options,
    ) as llm:
        time.sleep(_PINNED_S)
        return {
            str(length): [_one(llm, length, seed) for seed in range(rounds + 1)][1:]
            for length in lengths
        }


def _one(llm: Any, length: int, seed: int) -> dict[str, float]:  # noqa: ANN401
    """Ask one new prompt again and again."""
    drawn = random.Random(f"{length} {seed}")
    prompt = [drawn.randrange(5, 100_000) for _ in range(length)]
    told = {"computed": generate(llm, [prompt], 1).elapsed_s}
    told["cached"] = generate(llm, [prompt], 1).elapsed_s
    _run_idly(llm)  # until all is stored
    reset_prefix_cache(llm)
    _run_idly(llm)  # after a reset ours has the weights read again
    again = generate(llm, [prompt], 1)
    told |= {"loaded": again.elapsed_s, "hits": again.external_tokens}
    reset_prefix_cache(llm)
    _run_idly(llm)
    return told


def _run_idly(llm: Any) -> None:  # noqa: ANN401
    """Run small steps for a while; whoever stores something hears of its end in one."""
    for _ in range(8):
        generate(llm, [[3]], max_tokens=1)
        time.sleep(0.06)
