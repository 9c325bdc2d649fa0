# SPDX-License-Identifier: Apache-2.0
"""
What each engine process of ``benchmarks.trace_cost`` does.

One engine, in which rounds of the same work are traced and not traced in turn: another
process would differ by more than what is asked. What is not traced takes no note of
stages, finds out no reason of a miss, and tells of no ticket and no request; metrics go
on, but for the times of stages. Where others compute on the machine as well, two rounds
differ by more than tracing costs; so a third kind of round adds up what is computed within
that which the second leaves out, the clock's own time included. Arguments and results travel as JSON; times are seconds.
"""

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks.decode_side import MODELS, _carry_out, _settle
from benchmarks.turns import new_turns
from tests.e2e.engine import generate, in_process_engine, reset_prefix_cache
from tests.e2e.models import make_model
from ucm.integration.vllm.lifelog import LifeLog
from ucm.pipeline import stage
from ucm.pipeline.recorder import Recorder
from ucm.scheduler.misses import Misses

__all__ = ["WORK", "traced"]

_MODEL = MODELS["64 KB blocks"]
_REQUESTS = 256
_PROMPTS, _PROMPT_TOKENS = 64, 384


def _prompts(llm: Any, seed: int) -> None:  # noqa: ANN401 - vLLM's
    """Compute prompts of which no two share a prefix, for one token each."""
    turns = new_turns(_PROMPTS * _PROMPT_TOKENS // 40, seed)
    tokens = list(itertools.chain.from_iterable(turn.prompt for turn in turns))
    cut = range(0, _PROMPTS * _PROMPT_TOKENS, _PROMPT_TOKENS)
    generate(llm, [tokens[at : at + _PROMPT_TOKENS] for at in cut], 1)


def _decodes(llm: Any, seed: int) -> None:  # noqa: ANN401 - vLLM's
    """Have the engine full of requests that decode."""
    _carry_out(llm, new_turns(_REQUESTS * 5 // 4, seed), _REQUESTS)


WORK: Mapping[str, Callable[[Any, int], None]] = {
    "prompts": _prompts,
    "256 decoding": _decodes,
}


_TRACING = (
    *((stage, "_begun", 0.0), (stage, "_ended", None), (Recorder, "_write_line", None)),
    *((Misses, "explain", None), (LifeLog, "missed", None)),
    *((LifeLog, "matched", None), (LifeLog, "_write", None)),
)
"""Where something is told or taken note of, and what stands in for its answer."""


@contextlib.contextmanager
def _traced() -> Iterator[list[float]]:
    yield []


@contextlib.contextmanager
def _untraced() -> Iterator[list[float]]:
    """Leave all tracing out meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, answer in _TRACING:
            patch.setattr(owner, name, lambda *_, answer=answer: answer)
        yield []


@contextlib.contextmanager
def _timed() -> Iterator[list[float]]:
    """Have the time told that each call of tracing takes of its thread."""
    taken: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, _ in _TRACING:
            patch.setattr(owner, name, _clocked(getattr(owner, name), taken))
        yield taken


def _clocked(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    def clocked(*arguments: object) -> object:
        began = time.thread_time()
        try:
            return call(*arguments)
        finally:
            taken.append(time.thread_time() - began)

    return clocked


_KINDS = {"traced": _traced, "not traced": _untraced, "timed": _timed}


@attrs.define
class Spent:
    """
    What some rounds took, in seconds.

    Args:
        time: By the clock.
        cpu: Of the engine's thread until the work was done, and of ours until all was
            saved.
        tracing: Of that, within tracing; where it was timed.
    """

    time: float = 0.0
    cpu: float = 0.0
    tracing: float = 0.0


def traced(
    kv_transfer_config: Mapping[str, object], work: str, samples: int
) -> dict[str, list[dict[str, float]]]:
    """
    Return what each sample took, by kind of round.

    Args:
        kv_transfer_config: Ours.
        work: One of ``WORK``.
        samples: Of two rounds of each kind.
    """
    told: dict[str, list[dict[str, float]]] = {kind: [] for kind in _KINDS}
    seeds = itertools.count()
    with in_process_engine(
        make_model(_MODEL.recipe),
        kv_transfer_config=kv_transfer_config,
        kv_cache_memory_bytes=_MODEL.pool_bytes,
        block_size=_MODEL.block_tokens,
        max_model_len=512,
        max_num_seqs=_REQUESTS,
    ) as llm:
        WORK[work](llm, next(seeds))  # warms the kernels up
        _settle(llm)
        for _ in range(samples):
            spent = {kind: Spent() for kind in _KINDS}
            for kind in (*_KINDS, *reversed(_KINDS)):
                reset_prefix_cache(llm)
                gc.collect()
                with _KINDS[kind]() as taken:
                    _round(llm, WORK[work], next(seeds), spent[kind])
                    spent[kind].tracing += sum(taken)
            for kind, sums in spent.items():
                told[kind].append(attrs.asdict(sums))
    return told


def _round(
    llm: Any,  # noqa: ANN401 - vLLM's
    work: Callable[[Any, int], None],
    seed: int,
    spent: Spent,
) -> None:
    """Do some work and add what it took."""
    ours, own, began = _threads_of_ours(), time.thread_time(), time.perf_counter()
    work(llm, seed)
    spent.time += time.perf_counter() - began
    spent.cpu += time.thread_time() - own
    _settle(llm)
    after = _threads_of_ours()
    spent.cpu += sum(
        seconds - ours.get(number, 0.0) for number, seconds in after.items()
    )


def _threads_of_ours() -> dict[int, float]:
    """Return what each thread of ucm has computed, by its number; some end meanwhile."""
    told = {}
    for thread in threading.enumerate():
        if thread.name.startswith("ucm-") and thread.native_id is not None:
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            told[thread.native_id] = int(stat.read_text().split()[0]) / 1e9
    return told
