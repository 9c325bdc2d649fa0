# SPDX-License-Identifier: Apache-2.0
"""
What each engine process of ``benchmarks.decode`` does.

One process, so that each part can be timed where it runs. The engine is full all the
time: whoever ends is followed by the next request at once. First all requests are new;
then, behind a barrier at which the engine's own cache is emptied, every fourth goes on
with a conversation of before. Arguments and results travel as JSON; times are seconds.
"""

import ctypes
import functools
import gc
import hashlib
import itertools
import multiprocessing
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from gc import freeze  # an engine in process hides it
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks.baton import in_turn
from benchmarks.turns import Turn, found_at_best, new_turns, with_second_turns
from tests.e2e.connector import await_pinned
from tests.e2e.engine import (
    EXTERNAL_HITS,
    counter,
    drain,
    generate,
    in_process_engine,
    reset_prefix_cache,
)
from tests.e2e.models import LLAMA, Recipe, make_model

__all__ = [
    "MODELS",
    "PHASES",
    "Meter",
    "Model",
    "decode",
    "own_cpu_seconds",
    "watch",
]

SAVED, LOADED = "vllm:ucm_saved_blocks", "vllm:ucm_loaded_blocks"
PHASES = ("new", "turns")
WARM_STEPS = 24
"""Steps at the start of a phase that count for nothing."""
_SLICE_STEPS = 50
"""Of one side, where sides take turns."""
_SETTLED_S = 1.0


@attrs.frozen
class Model:
    """
    A model and how its blocks are cut.

    Args:
        recipe: Of its weights.
        block_tokens: Of one block.
        pool_bytes: Of the engine's KV cache, for 256 requests at once.
        capacity: Of our store, for all that is saved.
        make: Makes the model's directory.
        options: Of the engine, beyond the usual ones.
    """

    recipe: Recipe
    block_tokens: int
    pool_bytes: int
    capacity: str
    make: Callable[[Recipe], Path] = make_model
    options: Mapping[str, Any] = attrs.field(factory=dict)


MODELS = {
    "64 KB blocks": Model(LLAMA, 32, 256 << 20, "1GiB"),
    "1 MB blocks": Model(
        attrs.evolve(
            LLAMA,
            name="llama-wide-kv",
            config=LLAMA.config | {"num_key_value_heads": 4, "head_dim": 128},
        ),
        block_tokens=64,
        pool_bytes=2 << 30,
        capacity="2GiB",
    ),
}

_Config = Mapping[str, object] | None


# -- what is measured --------------------------------------------------------------


class Meter:
    """
    Times the parts of a step, and says how long the engine's thread waited in it.

    Args:
        waits: Path of ``gil_waits.c`` as it was preloaded; empty: waits are not told.
        clock: Of a step and its parts.
    """

    def __init__(
        self, waits: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self.steps: list[dict[str, float]] = []
        """The parts of each step that counts, in seconds."""
        self.num_steps = 0
        """All steps, also those that do not count."""
        self._spent: dict[str, float] = defaultdict(float)
        self._waited: Callable[[], int] | None = None
        if waits:
            longest = ctypes.PyDLL(waits).ucm_longest_wait_ns
            longest.restype = ctypes.c_longlong
            self._waited = longest if longest() >= 0 else None

    def part(self, owner: object, name: str, *parts: str) -> None:
        """Add the time of a method's calls to some parts of the step."""
        call = getattr(owner, name, None)
        if call is None:
            return
        spent, clock = self._spent, self._clock

        @functools.wraps(call)
        def timed(*arguments: object, **named: object) -> object:
            begun = clock()
            try:
                return call(*arguments, **named)
            finally:
                taken = clock() - begun
                for part in parts:
                    spent[part] += taken

        setattr(owner, name, timed)

    def step(self, core: Any, counts: Callable[[], bool]) -> None:  # noqa: ANN401
        """Take each of the core's steps that counts as one."""
        call = core.step_fn

        def timed() -> object:
            is_one = counts()
            self.num_steps += 1
            self._spent.clear()
            if self._waited:
                self._waited()  # what was before is no part of the step
            begun = self._clock()
            result = call()
            step = self._clock() - begun
            if is_one:
                self.steps.append({"step": step, **self._spent})
                if self._waited:
                    self.steps[-1]["waited"] = self._waited() / 1e9
            return result

        core.step_fn = timed

    def take(self) -> dict[str, list[float]]:
        """Return the steps so far by part, and forget them."""
        names = {name for step in self.steps for name in step}
        told = {name: [step.get(name, 0.0) for step in self.steps] for name in names}
        self.steps.clear()
        return told


_SCHEDULER_HOOKS = {
    "get_num_new_matched_tokens": ("scheduler's hooks",),
    "update_state_after_alloc": ("scheduler's hooks",),
    "build_connector_meta": ("scheduler's hooks", "build_connector_meta"),
    "update_connector_output": ("scheduler's hooks", "update_connector_output"),
    "request_finished": ("scheduler's hooks",),
    "request_finished_all_groups": ("scheduler's hooks",),
    "take_events": ("scheduler's hooks",),
}
_WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


def watch(core: Any, meter: Meter, full: int) -> None:  # noqa: ANN401
    """Time an engine's steps in which about so many requests run, and their parts."""
    from vllm.distributed.kv_transfer import (
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    scheduler = core.scheduler
    if scheduler.connector is not None:
        for name, parts in _SCHEDULER_HOOKS.items():
            meter.part(scheduler.connector, name, *parts)
    if has_kv_transfer_group():
        for name in _WORKER_HOOKS:
            meter.part(get_kv_transfer_group(), name, "worker's hooks")
    meter.part(scheduler, "schedule", "schedule")
    meter.step(core, lambda: len(scheduler.running) >= 0.9 * full)


_computed_ns: dict[int | None, int] = {}
"""By thread of ucm, when it was looked at last: some end between two looks."""


def own_cpu_seconds() -> float:
    """Return the time that the threads of ucm have computed so far; never less than before."""
    for thread in threading.enumerate():
        if thread.name.startswith("ucm-"):
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            _computed_ns[thread.native_id] = int(stat.split()[0])
    return sum(_computed_ns.values()) / 1e9


# -- how it is asked ------------------------------------------------------


def _carry_out(
    llm: Any,  # noqa: ANN401
    turns: Sequence[Turn],
    at_once: int,
    pause: Callable[[], None] | None = None,
) -> list[list[int]]:
    """Return the tokens of all requests; as many as asked are under way at any time."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    waiting = iter(enumerate(turns))
    answers: list[list[int]] = [[] for _ in turns]

    def ask_next() -> None:
        for at, turn in waiting:
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=turn.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(at), {"prompt_token_ids": turn.prompt}, sampling)
            return

    for _ in range(at_once):
        ask_next()
    for step in itertools.count(1):
        if not engine.has_unfinished_requests():
            break
        if pause and not step % _SLICE_STEPS:
            pause()
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
                ask_next()
    return answers


def _settle(llm: Any) -> None:  # noqa: ANN401
    """Let the engine run idly until nothing more is saved."""
    drain(llm)
    saved, since = -1, time.monotonic()
    while time.monotonic() < since + _SETTLED_S:
        generate(llm, [[3]], max_tokens=1)
        if (now := counter(llm, SAVED)) != saved:
            saved, since = now, time.monotonic()
        time.sleep(0.05)


def _bear_with_llvmlite() -> None:
    """
    Let an engine start in a process that has imported numba, as LMCache does.

    Its worker asks every object of every module for a dictionary, and llvmlite's makes
    up whatever it is asked for.
    """
    from llvmlite.binding import ffi

    kind = type(ffi.lib)
    make_up = kind.__getattr__

    def refuse(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_up(self, name)

    kind.__getattr__ = refuse


def decode(
    kv_transfer_config: _Config,
    model: str,
    requests: int,
    total: int,
    lives: str = "brief",
    waits: str = "",
    threads: int = 0,
    baton: str = "",
) -> dict[str, Any]:
    """
    Return the parts of each step in which about so many requests decode, by phase.

    Args:
        kv_transfer_config: Of the side.
        model: One of ``MODELS``.
        requests: At once.
        total: In each phase.
        lives: One of ``turns.LIVES``.
        waits: See ``Meter``.
        threads: That the forward pass computes on; 0: on all cores.
        baton: Path of the ``Baton`` with which sides take turns; empty: alone.
    """
    shape = MODELS[model]
    # The loop below is the engine's own: as there, a step follows when all have ended.
    multiprocessing.current_process().name = "EngineCore"
    connector = str((kv_transfer_config or {}).get("kv_connector"))
    if connector.startswith("LMCache"):
        _bear_with_llvmlite()
    with (
        in_turn(baton) as pause,
        in_process_engine(
            shape.make(shape.recipe),
            kv_transfer_config=kv_transfer_config,
            kv_cache_memory_bytes=shape.pool_bytes,
            block_size=shape.block_tokens,
            max_model_len=2048,
            max_num_seqs=requests,
            **shape.options,
        ) as llm,
    ):
        await_pinned(llm)
        if threads:
            torch.set_num_threads(threads)
        meter = Meter(waits)
        watch(llm.llm_engine.engine_core.engine_core, meter, requests)
        _carry_out(llm, new_turns(32, seed=0), 16)  # warms the kernels up
        turns, answers = new_turns(total, 1, lives), []
        told: dict[str, Any] = {}
        digest = hashlib.sha256()
        for phase in PHASES:
            if answers:
                later = new_turns(total, 2, lives)
                turns = list(with_second_turns(later, turns, answers))
            reset_prefix_cache(llm)
            if connector == "UCMConnector":
                _settle(llm)  # nothing is found before the weights are read anew
            gc.collect()
            freeze()
            meter.take()
            before, num_steps = _counts(llm), meter.num_steps
            answers = _carry_out(llm, turns, requests, pause)
            num_steps = meter.num_steps - num_steps
            if connector == "UCMConnector":
                _settle(llm)
            after = _counts(llm)
            digest.update(repr(answers).encode())
            steps = meter.take()
            told[phase] = {
                "num_steps": num_steps,
                "steps": {name: all_[WARM_STEPS:] for name, all_ in steps.items()},
                **{name: after[name] - before[name] for name in after},
            }
        told["digest"] = digest.hexdigest()
        told["there"] = found_at_best(turns, shape.block_tokens)
        return told


def _counts(llm: Any) -> dict[str, float]:  # noqa: ANN401
    """Return what grows from phase to phase."""
    return {
        "cpu": own_cpu_seconds(),
        "saved": counter(llm, SAVED),
        "loaded": counter(llm, LOADED),
        "hits": counter(llm, EXTERNAL_HITS),
        "preempted": counter(llm, "vllm:num_preemptions"),
    }
