# SPDX-License-Identifier: Apache-2.0
"""
What each engine process of the demo does.

Run as ``python -m examples.demo.phases PHASE STORE LOGS``. Stdout carries one line per
event: JSON with a ``say`` for people, or with a ``row`` for the table.
"""

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from tests import conftest as _engine_environment  # noqa: F401  before vLLM's import
from tests.e2e.engine import (
    await_counter,
    connector_config,
    counter,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.models import LLAMA_DEMO, make_model

BLOCK_TOKENS = 128
PREFIX_BLOCKS = 32
CONTINUATION = 16
PROCESSES = ("cold", "restarted", "corrupted")
TIMEOUT = 300.0
SAVED = "vllm:ucm_saved_blocks_total"
LOADED = "vllm:ucm_loaded_blocks_total"
FAILED = "vllm:ucm_load_failures_total"
PREFIX = [
    3 + (7919 * i + i * i // 7) % 8000 for i in range(PREFIX_BLOCKS * BLOCK_TOKENS)
]
PROMPT = [*PREFIX, *range(100, 109)]
"""A prefix of 4096 tokens and a short question."""


def say(text: str) -> None:
    """Report progress."""
    print(json.dumps({"say": text}), flush=True)


def report(phase: str, **values: object) -> None:
    """Hand one row of the table to the parent."""
    print(json.dumps({"row": phase, **values}), flush=True)


def measure(llm: Any, phase: str) -> None:
    """Time the first token, then decode on to show that the KV cache is right."""
    names = {"saved": SAVED, "loaded": LOADED, "load_failures": FAILED}
    before = {key: counter(llm, name) for key, name in names.items()}
    first = generate(llm, [PROMPT], max_tokens=1)
    say(f"{phase}: first token after {first.elapsed_s:.2f} s")
    more = generate(llm, [PROMPT], max_tokens=CONTINUATION)
    if phase == "cold":
        say("cold: waiting for the saves to be committed")
        await_counter(llm, SAVED, before["saved"] + PREFIX_BLOCKS)
    report(
        phase,
        ttft_s=first.elapsed_s,
        token_ids=first.token_ids[0] + more.token_ids[0],
        **{key: counter(llm, name) - before[key] for key, name in names.items()},
    )


def main(phases: list[str], store: Path, logs: Path) -> None:
    """Start one engine, warm its kernels up, and measure each phase."""
    say("making a model of 116 million random weights, unless it is there")
    model = make_model(LLAMA_DEMO)
    say(f"starting the engine for {' and '.join(phases)}")
    connector = connector_config(type="slab", path=str(store), capacity="1GiB")
    connector["kv_connector_extra_config"]["log"] = {"directory": str(logs)}
    with in_process_engine(
        model,
        kv_transfer_config=connector,
        kv_cache_memory_bytes=512 << 20,
        block_size=BLOCK_TOKENS,
        max_model_len=len(PROMPT) + 2 * CONTINUATION,
        max_num_seqs=2,
        use_tqdm_on_load=False,
    ) as llm:
        # A prompt of its own per process, as long as the real one: the first pass
        # of each shape pays for kernels that are built on demand.
        other = [10 + PROCESSES.index(phases[0]), *PROMPT[1:]]
        say("warming the kernels up with another prompt of the same length")
        generate(llm, [other], max_tokens=2)
        for phase in phases:
            reset_prefix_cache(llm)
            say(f"{phase}: asking for the first token of {len(PROMPT)} tokens")
            measure(llm, phase)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    main(sys.argv[1].split(","), Path(sys.argv[2]), Path(sys.argv[3]))
