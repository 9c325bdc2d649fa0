# SPDX-License-Identifier: Apache-2.0
"""
Record what the real engine asks of the connector, for the fake host to be held against.

Run ``python -m tests.e2e.hook_trace > tests/golden/hooks_llama.json`` with another
release of the engine; ``tests/testing/test_host_trace.py`` replays the file.
"""

import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import models
from tests.e2e.connector import SAVED, halves, prompt, ucm_config
from tests.e2e.engine import (
    await_counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from ucm.integration.vllm.last_steps import LastSteps
from ucm.integration.vllm.setup import Setup
from ucm.stores.abc import Store
from ucm.testing.faults import Fault, FaultPlan, FaultStore
from ucm.testing.host.replay import replay
from ucm.testing.host.trace import SCHEDULER, HookCall, HookTrace

__all__ = ["BLOCK_TOKENS", "record"]

BLOCK_TOKENS = 32


def record(model: Path, store: Path) -> HookTrace:
    """Return a trace with saves, loads, preemptions and aborts in all states."""
    trace = HookTrace()
    never = threading.Event()
    slow = FaultPlan(
        Fault("read", lambda: never.wait(0.02), nth=0),
        Fault("reserve", lambda: never.wait(0.05), nth=0),
    )
    inner = Setup.open_store

    def open_store(self: Setup, *, index_only: bool) -> Store:
        opened = inner(self, index_only=index_only)
        return opened if index_only else FaultStore(opened, slow)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Setup, "open_store", open_store)
        # What the engine asks is held against the host, and not what we do in its place.
        monkeypatch.setattr(LastSteps, "take", lambda *_: None)
        with in_process_engine(
            model,
            kv_transfer_config=ucm_config(store),
            block_size=BLOCK_TOKENS,
            num_blocks=24,
            max_num_seqs=6,
            max_model_len=256,
        ) as llm:
            _use(llm, trace)
    replay(trace, alignment_tokens=BLOCK_TOKENS)  # all of it, before any is left out
    return _renamed(trace)


def _use(llm: Any, trace: HookTrace) -> None:
    scheduler, worker = halves(llm)
    trace.watch(scheduler, SCHEDULER)
    trace.watch(worker, "worker-0")
    prompts = [prompt(200 + number, 150) for number in range(6)]
    generate(llm, prompts, 80)
    await_counter(llm, SAVED, 8)
    reset_prefix_cache(llm)
    generate(llm, prompts[:3], 8)
    for steps in range(4):
        _abort_after(llm, steps, prompts[0])
    reset_prefix_cache(llm)


def _abort_after(llm: Any, steps: int, tokens: list[int]) -> None:
    from vllm import SamplingParams

    reset_prefix_cache(llm)
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    name = f"abort-{steps}"
    llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    for _ in range(steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([name])
    drain(llm)


def _renamed(trace: HookTrace) -> HookTrace:
    """Give requests short names in the order in which they came."""
    text = trace.to_json()
    names = [
        call.told["request"] for call in trace.calls if call.hook == "on_new_request"
    ]
    for number, name in enumerate(dict.fromkeys(names)):
        text = re.sub(rf'"{re.escape(name)}"', f'"q{number}"', text)
    return _without_repeats(HookTrace.from_json(text))


def _without_repeats(trace: HookTrace) -> HookTrace:
    """Leave out idle steps that are like the step before."""
    steps: list[list[HookCall]] = [[]]
    for call in trace.calls:
        if call.hook == "build_connector_meta":
            steps.append([])
        steps[-1].append(call)
    kept = [step for at, step in enumerate(steps) if at == 0 or step != steps[at - 1]]
    return HookTrace(call for step in kept for call in step)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        recorded = record(models.make_model(models.LLAMA), Path(folder) / "slab")
    sys.stdout.write(recorded.to_json())
