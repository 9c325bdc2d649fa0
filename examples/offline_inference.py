# SPDX-License-Identifier: Apache-2.0
"""
Ask one long prompt twice, with the engine's own cache emptied in between.

The second answer starts from blocks that ucm has saved for the first. The exit status
is 0 only if both answers are equal and the engine was given the prompt's blocks instead
of computing them.

Run as ``python -m examples.offline_inference``, or with ``--model`` and the directory
of a model of yours; without one, a small model of random weights is made.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# One process is enough here, and starts faster.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

BLOCK_TOKENS = 128
PROMPT = [3 + (7919 * i + i * i // 7) % 500 for i in range(8 * BLOCK_TOKENS + 9)]
SAVED = "vllm:ucm_saved_blocks"
LOADED = "vllm:ucm_loaded_blocks"
PATIENCE_S = 60.0


def main() -> int:
    """Ask twice, print both, and compare."""
    parser = argparse.ArgumentParser(prog="python -m examples.offline_inference")
    parser.add_argument("--model", help="a directory or a name that vLLM knows")
    options = parser.parse_args()
    store = Path(tempfile.mkdtemp(prefix="ucm-offline-", dir="/dev/shm"))
    try:
        llm = _engine(options.model or _small_model(), store / "slab")
        first, first_s = _ask(llm)
        # A save is over some time after its request; in a hurry, hits are shorter.
        _run_until(llm, lambda: _counter(llm, SAVED) >= len(PROMPT) // BLOCK_TOKENS)
        _run_until(llm, llm.reset_prefix_cache)
        second, second_s = _ask(llm)
        loaded = _counter(llm, LOADED)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    print(f"first:  {first_s:.2f} s, {first}")
    print(f"second: {second_s:.2f} s, {second}")
    print(f"loaded: {loaded} blocks of {BLOCK_TOKENS} tokens")
    return 0 if first == second and loaded >= len(PROMPT) // BLOCK_TOKENS else 1


def _engine(model: str, slab: Path) -> Any:
    """Return an engine with the connector, as in any program of vLLM's."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model=model,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=2 * len(PROMPT),
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="UCMConnector",
            kv_connector_module_path="ucm.integration.vllm.ucm_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "store": {"type": "slab", "path": str(slab), "capacity": "256MiB"}
            },
        ),
    )


def _small_model() -> str:
    from tests.e2e.models import LLAMA, make_model

    return str(make_model(LLAMA))


def _ask(llm: Any) -> tuple[list[int], float]:
    """Return the greedy answer to the prompt, and how long it took."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    started = time.perf_counter()
    prompt = {"prompt_token_ids": PROMPT}
    [output] = llm.generate([prompt], greedy, use_tqdm=False)
    return list(output.outputs[0].token_ids), time.perf_counter() - started


def _run_until(llm: Any, is_reached: Any) -> None:
    """Let the engine take small steps until something holds, or patience ends."""
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1)
    deadline = time.monotonic() + PATIENCE_S
    while not is_reached() and time.monotonic() < deadline:
        llm.generate([{"prompt_token_ids": [3]}], one, use_tqdm=False)


def _counter(llm: Any, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


if __name__ == "__main__":
    sys.exit(main())
