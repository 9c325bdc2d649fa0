# SPDX-License-Identifier: Apache-2.0
"""
What each engine process of ``benchmarks.engine`` does.

Arguments and results travel as JSON; times are seconds. Scheduler and worker have a
process of their own, as in production. All CPUs compute, on every side: left to itself
vLLM keeps one out of it, or two, depending on whether there is a connector, and on small
machines none. Before each prompt comes a short one that hits nothing, on every side: with a
connector the engine's own cache is emptied before that, behind which weights may have
changed, and whoever comes first waits until they are looked at. Every hit is checked against what the engine
counts, so that no figure is that of a recomputation, or of a hit that should be none.
"""

import os
import random
from collections.abc import Mapping
from typing import Any

from tests.e2e.engine import (
    await_counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.models import LLAMA, LLAMA_DEMO, make_model

__all__ = ["BLOCK_TOKENS", "all_cpus", "throughput", "ttft"]

BLOCK_TOKENS = 128
QUESTION = 9
"""Tokens behind the prefix. One alone ExampleConnector stores but never finds."""
SAVED = "vllm:ucm_saved_blocks"
_RECIPES = {recipe.name: recipe for recipe in (LLAMA, LLAMA_DEMO)}

_Config = Mapping[str, object] | None


def _prompt(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(5, 500) for _ in range(length)]


def all_cpus() -> dict[str, str]:
    """Return the environment of an engine that computes on all CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))}


def _engine(recipe: str, config: _Config, max_model_len: int) -> Any:  # noqa: ANN401
    os.environ |= all_cpus()
    return in_process_engine(
        make_model(_RECIPES[recipe]),
        kv_transfer_config=config,
        kv_cache_memory_bytes=1 << 30,
        block_size=BLOCK_TOKENS,
        max_model_len=max_model_len,
        multiprocess=True,
    )


class _Asker:
    """
    Asks one engine for first tokens.

    Args:
        llm: The engine.
        config: Of its connector; none: hits are those of its own cache.
    """

    def __init__(self, llm: Any, config: _Config) -> None:  # noqa: ANN401
        self._llm = llm
        connector = "" if config is None else str(config["kv_connector"])
        self._connects = config is not None
        self.finds_prefixes = connector != "ExampleConnector"
        """Whether a prompt hits that is only in part what was seen before."""
        self._counts_saves = connector == "UCMConnector"

    def ask(self, prompt: list[int], hit: int) -> float:
        """Return the time to the first token, of a prompt that hits so many tokens."""
        if self._connects:
            reset_prefix_cache(self._llm)
        generate(self._llm, [_prompt(2, QUESTION)], 1)
        told = generate(self._llm, [prompt], 1)
        where = told.external_tokens if self._connects else told.local_tokens
        if not hit - BLOCK_TOKENS <= where <= hit:
            raise AssertionError(f"{where} tokens were hits, not {hit}")
        return told.elapsed_s

    def await_saves(self, tokens: int) -> None:
        """Wait until so many tokens are stored, where that takes a while."""
        if self._counts_saves:
            await_counter(self._llm, SAVED, tokens // BLOCK_TOKENS)


def ttft(
    recipe: str, kv_transfer_config: _Config, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """
    Return times to the first token by share of reuse, for prompts of *tokens*.

    Behind these stands a short question, which is left to compute in a full hit.
    """
    with _engine(recipe, kv_transfer_config, tokens + 2 * BLOCK_TOKENS) as llm:
        asker = _Asker(llm, kv_transfer_config)
        asker.ask(_prompt(0, BLOCK_TOKENS // 2), 0)  # warms the kernels up
        base = _prompt(1, tokens + QUESTION)
        none = [asker.ask(base, 0)]
        none += [
            asker.ask(_prompt(100 + at, tokens + QUESTION), 0)
            for at in range(repeats - 1)
        ]
        asker.await_saves(repeats * tokens)
        half = tokens // 2
        mixed = [
            base[:half] + _prompt(200 + at, tokens + QUESTION - half)
            for at in range(repeats)
        ]
        return {
            "0 %": none,
            "50 %": [
                asker.ask(prompt, half if asker.finds_prefixes else 0)
                for prompt in mixed
            ],
            "100 %": [asker.ask(base, tokens) for _ in range(3 * repeats)],
        }


def throughput(
    recipe: str,
    kv_transfer_config: _Config,
    requests: int,
    tokens: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Return the times of batches of requests of which no two share a prefix."""
    with _engine(recipe, kv_transfer_config, 4 * tokens) as llm:
        taken = []
        for at in range(repeats + 1):
            prompts = [_prompt(1000 * at + each, tokens) for each in range(requests)]
            told = generate(llm, prompts, tokens // 8)
            if told.external_tokens or told.local_tokens:
                raise AssertionError("prompts share a prefix")
            taken.append(told.elapsed_s)
        return {"batch": taken[1:]}  # the first has warmed the kernels up
