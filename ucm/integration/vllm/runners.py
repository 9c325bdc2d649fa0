# SPDX-License-Identifier: Apache-2.0
"""
What the engine's two model runners do differently, as far as it matters here.

The first (``vllm.v1.worker.gpu_model_runner``) calls ``handle_preemptions``, clears blocks
and copies onto them, binds, computes, and asks for results; a drafter runs after that,
and then ``wait_for_save``, which stages of a pipeline before the last never reach. The
second (``vllm.v1.worker.gpu.model_runner``) clears and copies *before* it calls
``handle_preemptions``, and moves running states onto new blocks of recurrent layers. What an
engine does not tell is taken to be as in the worse case.
"""

from typing import Any

__all__ = ["has_micro_batches", "overwrites_blocks", "overwrites_first", "speculates"]


def overwrites_first(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """
    Return whether blocks are cleared before ``handle_preemptions`` is called.

    The second model runner does so, and whatever does not say which runner it has.
    """
    return bool(getattr(vllm_config, "use_v2_model_runner", True))


def overwrites_blocks(config: Any) -> bool:  # noqa: ANN401 - vLLM's KVCacheConfig
    """
    Return whether the engine ever clears blocks of this model, or copies onto them.

    It copies for recurrent layers only, for which it also clears.
    """
    return bool(getattr(config, "needs_kv_cache_zeroing", True))


def has_micro_batches(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether a forward pass may run as parts, each with its own hooks."""
    return bool(getattr(vllm_config.parallel_config, "use_ubatching", True))


def speculates(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's VllmConfig
    """Return whether a drafter may run after the forward pass."""
    return getattr(vllm_config, "speculative_config", True) is not None
