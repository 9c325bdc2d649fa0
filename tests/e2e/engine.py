# SPDX-License-Identifier: Apache-2.0
"""
Drive the real engine: in this process or in a process of its own.

Every helper ends what it started, also when the test in it fails. vLLM is imported
by the first helper that needs it, after ``tests/conftest.py`` set its environment.
"""

import functools
import gc
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from tests.e2e.forked import end_group, forked

__all__ = [
    "Generation",
    "await_counter",
    "connector_config",
    "counter",
    "drain",
    "generate",
    "in_process_engine",
    "leave_the_heap_alone",
    "process_group",
    "reset_prefix_cache",
    "run_function",
]

ROOT = Path(__file__).resolve().parents[2]
LOCAL_HITS = "vllm:prefix_cache_hits"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
_ENDS_IN_S: Final = 300
"""For what hangs only: the engine's own is 5 s, and what it kills leaves half a trace."""


def connector_config(**store: object) -> dict[str, object]:
    """Return the ``kv_transfer_config`` that plugs in ucm with this store."""
    return {
        "kv_connector": "UCMConnector",
        "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A tiny model computes faster than anything is loaded.
        "kv_connector_extra_config": {"store": store, "predict_loads": False},
    }


# -- in this process ---------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Generation:
    """What one call of the engine gave, per prompt, and where its tokens came from."""

    token_ids: list[list[int]]
    cached_tokens: list[int]
    """Prompt tokens that were not computed, whatever their source."""
    local_tokens: int
    """Of these, hits in the engine's own cache, over all prompts."""
    external_tokens: int
    """Of these, hits that the connector promised, over all prompts."""
    elapsed_s: float


@contextmanager
def in_process_engine(
    model: Path,
    *,
    kv_transfer_config: Mapping[str, object] | None = None,
    kv_cache_memory_bytes: int = 64 << 20,
    num_blocks: int | None = None,
    block_size: int | None = None,
    max_model_len: int = 2048,
    max_num_seqs: int = 16,
    dtype: str = "float32",
    multiprocess: bool = False,
    **overrides: object,
) -> Iterator[Any]:
    """
    Run an engine for the length of the block; further ones may follow.

    With *multiprocess* scheduler and worker get processes of their own, as in
    production; use that inside of ``run_function``.

    Args:
        model: Directory made by ``tests.e2e.models.make_model``.
        kv_transfer_config: As for ``--kv-transfer-config``; none: no connector.
        kv_cache_memory_bytes: Size of the paged pool. Small values preempt.
        num_blocks: Exact size of the pool in blocks, instead.
        block_size: Tokens per block; if none 128, as the engine chooses on CPU.
        max_model_len: Longest request in tokens.
        max_num_seqs: Requests that may run at once.
        dtype: Of weights and KV cache; float32 leaves no room for near ties.
        multiprocess: Whether scheduler and worker run in processes of their own.
        overrides: Further arguments of ``vllm.LLM``.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(multiprocess))
    os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = str(_ENDS_IN_S)
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # It would look at each new model's class in a process of its own, so that nothing
    # touches an accelerator in this one; that costs the imports once more.
    registry._run_in_subprocess = _call
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if num_blocks is not None:
        arguments["num_gpu_blocks_override"] = num_blocks
    arguments |= _of_the_platform(Path(model))
    if block_size is not None:
        arguments["block_size"] = block_size
    if kv_transfer_config is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**kv_transfer_config)
    llm = None
    freezing = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = leave_the_heap_alone
    try:
        llm = LLM(**(arguments | overrides))
        yield llm
    finally:
        if llm is not None:
            core = llm.llm_engine.engine_core
            if multiprocess:
                core.shutdown(timeout=_ENDS_IN_S)
            else:
                # Once and now: the finalizer would shut down again when the object
                # is collected, and take a later engine's process groups with it.
                core._finalizer()
        ensure_kv_transfer_shutdown()  # an engine that failed to start leaves it
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        gc.freeze, gc.unfreeze = freezing
        _freeze_imports()


def _of_the_platform(model: Path) -> dict[str, Any]:
    """Return what makes an engine on a GPU, or on another CPU, much like one on most CPUs."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # Where the CPU has AMX the engine takes kernels for latents that take no float32.
        has_latents = "kv_lora_rank" in (model / "config.json").read_text()
        return {"attention_backend": "CPU_MLA"} if has_latents else {}
    return {
        "block_size": 128,
        # Engines of several tests share the GPU; each asks for what is free at its start.
        "gpu_memory_utilization": 0.05,
    }


def _call(function: Callable[[], object]) -> object:
    """Stand in for a call in a process of its own."""
    return function()


def leave_the_heap_alone() -> None:
    """Stand in for what an engine does to the collector when it starts and ends."""


@functools.cache
def _freeze_imports() -> None:
    """
    Take what was imported out of every later collection, once.

    An engine runs the collector nine times, and a million objects of modules cost a
    third of a second each time: more than all else of a small engine.
    """
    gc.freeze()


def generate(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> Generation:
    """Decode greedily to exactly *max_tokens* per prompt, and drain."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    local, external = counter(llm, LOCAL_HITS), counter(llm, EXTERNAL_HITS)
    started = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        sampling,
        use_tqdm=False,
    )
    elapsed_s = time.perf_counter() - started
    drain(llm)
    return Generation(
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        cached_tokens=[output.num_cached_tokens or 0 for output in outputs],
        local_tokens=counter(llm, LOCAL_HITS) - local,
        external_tokens=counter(llm, EXTERNAL_HITS) - external,
        elapsed_s=elapsed_s,
    )


def drain(llm: Any, timeout: float = 300.0) -> None:
    """
    Step an in-process engine until it freed what finished requests left behind.

    ``LLM.generate`` stops stepping with the last token, so blocks that a connector
    asked to keep would stay held. An engine in other processes drains by itself.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return
    deadline = time.monotonic() + timeout
    while core.scheduler.has_requests():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine still holds requests after {timeout} s")
        llm.llm_engine.step()


def reset_prefix_cache(
    llm: Any, *, reset_external: bool = False, timeout: float = 300.0
) -> None:
    """Empty the engine's own cache, and with *reset_external* the connector's."""
    drain(llm)
    deadline = time.monotonic() + timeout
    while not llm.reset_prefix_cache(reset_connector=reset_external):
        if time.monotonic() > deadline:
            raise TimeoutError(f"blocks are still in use after {timeout} s")
        _step_once(llm)


def counter(llm: Any, name: str) -> int:
    """Return a Prometheus counter of the engine, summed over its labels."""
    name = name.removesuffix("_total")
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def await_counter(llm: Any, name: str, at_least: int, timeout: float = 300.0) -> int:
    """
    Run small steps until a counter is large enough, and return it.

    A save is over some time after its request, and the engine hears of it in its
    next step only.
    """
    deadline = time.monotonic() + timeout
    while (value := counter(llm, name)) < at_least:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is {value}, not {at_least}, after {timeout} s")
        _step_once(llm)
    return value


def _step_once(llm: Any) -> None:
    """Let the engine run: one token for a prompt too short to be cached."""
    generate(llm, [[3]], max_tokens=1)


# -- in a process of its own -------------------------------------------------------


def run_function(
    function: Callable[..., object],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    **arguments: object,
) -> Any:
    """
    Call a function of a module in a fresh process and return its result.

    The result travels as JSON. This is how a test restarts an engine, or runs one whose
    scheduler and worker are processes.

    Args:
        function: Defined at module level.
        env: Added to the environment of the process.
        timeout: After so many seconds the process and its children are killed.
        arguments: Passed to the function.

    Raises:
        AssertionError: The process failed; carries the end of its output.
        TimeoutError: It did not end in time.
    """
    with forked(_answer, env=env, call=function, arguments=arguments) as process:
        status = process.wait(timeout)
        stdout = process.stdout.read_text(errors="replace")
        stderr = process.stderr.read_text(errors="replace")
    assert 0 == status, f"{function} {status}\n{stdout[-2000:]}\n{stderr[-6000:]}"
    return json.loads(stdout.splitlines()[-1])


def _answer(call: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Print what a call returns; the last line of stdout is its result."""
    result = call(**arguments)
    print(f"\n{json.dumps(result)}", flush=True)  # noqa: T201  the protocol


@contextmanager
def process_group(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a command as the leader of a group of which nothing outlives the block."""
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": search} | dict(env or {}),
        cwd=ROOT,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        end_group(process.pid)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
