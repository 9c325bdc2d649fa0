# SPDX-License-Identifier: Apache-2.0
"""One seed of ``benchmarks.oracle``: two engines over a slab, and one without connector."""

import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import psutil
import pytest

from benchmarks.kills import listeners, problems_of
from benchmarks.oracle_load import Asked, Fickle, Load, inputs
from benchmarks.oracle_seen import Eyes, Oracle
from benchmarks.oracle_settings import (
    RECIPES,
    Setting,
    choose,
    config_of,
    engine_arguments,
    model_arguments,
)
from tests.e2e.connector import halves, plant, quiesced
from tests.e2e.engine import generate, in_process_engine
from tests.e2e.models import make_model
from tests.kit.lockstep import TraceViolationError, check_trace, read_traces
from tests.traces import logs_closed, traces_of

__all__ = ["run"]

_PHASES: Final = 2
_CLOSE_S: Final = 25.0
_AGENT_ENDS_S: Final = 60.0
_MOST_TOLD: Final = 20


@attrs.define(eq=False)
class _Scene:
    """What the engines of a seed share."""

    setting: Setting
    """Of the first one."""
    place: Path
    oracle: Oracle
    eyes: Eyes
    chance: random.Random
    plan: Fickle
    past: list[Asked] = attrs.Factory(list)
    told: Counter[str] = attrs.Factory(Counter)
    problems: list[str] = attrs.Factory(list)

    @property
    def slab(self) -> Path:
        """Where the slab is."""
        return self.place / "slab"


def run(seed: int, seconds: float, place: str) -> dict[str, Any]:
    """Ask for so long in all; return what was compared, and what is wrong."""
    setting, oracle = choose(seed), Oracle(0.5 if choose(seed).draft else 1.0)
    plan = Fickle(random.Random(seed + 1), setting)
    eyes, chance = Eyes(oracle), random.Random(seed)
    scene = _Scene(setting, Path(place), oracle, eyes, chance, plan)
    with pytest.MonkeyPatch.context() as patch, logs_closed():
        eyes.open(patch, sees_commits=not setting.flips)
        _prepare(patch, scene)
        for phase in range(_PHASES):
            _serve(scene, choose(seed, phase), seconds / _PHASES)
    _end_agent(scene)
    _compute_again(scene)
    oracle.judge()
    corrupt = [*eyes.look_into(scene.slab)]
    scene.problems += [] if setting.flips else corrupt
    scene.problems += problems_of(scene.slab)
    _look_into_logs(scene)
    scene.told.update({f"failed {verb}": n for verb, n in plan.fired.items()})
    return {
        "seed": seed,
        "setting": attrs.asdict(setting),
        "told": dict(sorted(scene.told.items())),
        "compared": dict(sorted(oracle.counts.items())),
        "worst": oracle.worst,
        "wrong": len(oracle.problems),
        "problems": [*oracle.problems[:_MOST_TOLD], *scene.problems[:_MOST_TOLD]],
    }


def _prepare(patch: pytest.MonkeyPatch, scene: _Scene) -> None:
    """Let engines be asynchronous on a CPU, and store and device fail."""
    from tests.e2e.test_features import keep_asynchronous

    keep_asynchronous(patch)
    if scene.setting.fault_rate or scene.setting.slow_rate:
        plant(patch, scene.plan)


class _Errors(logging.Handler):
    """Keeps what the engine logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.found.append(record.getMessage()[:300])


def _serve(scene: _Scene, setting: Setting, seconds: float) -> None:
    """Run an engine under load, and see what it leaves behind."""
    errors, logger = _Errors(), logging.getLogger("vllm")
    logger.addHandler(errors)
    config = config_of(setting, scene.place)
    scene.plan.go_on()
    with in_process_engine(
        make_model(RECIPES[setting.model]),
        kv_transfer_config=config,
        **engine_arguments(setting),
    ) as llm:
        asks = Load(llm, setting, scene.chance, scene.past)
        asks.run(seconds, lambda step: _between(scene, asks, step))
        scene.plan.stop()
        _look_into_engine(scene, asks, llm)
        began = time.monotonic()
    if (took := time.monotonic() - began) > _CLOSE_S:
        scene.problems.append(f"the engine closes in {took:.0f} s")
    logger.removeHandler(errors)
    scene.told.update(asks.told)
    scene.problems += asks.problems
    scene.problems += [f"the engine says: {each}" for each in errors.found[:3]]


def _between(scene: _Scene, asks: Load, step: int) -> None:
    """Look at pages behind each fourth step, and do harm now and then."""
    chance, setting = scene.chance, scene.setting
    if step % 4 == 0:
        for request in asks.scheduler.running:
            if chance.random() < 0.3:
                spare = 8 if setting.draft else 0
                scene.eyes.look(asks.scheduler, request, spare=spare)
    if step % 40:
        return
    if setting.kills and chance.random() < 0.1:
        for agent in [*listeners(scene.slab)]:
            os.kill(agent, signal.SIGKILL)
            scene.told["killed"] += 1
    if setting.flips and chance.random() < 0.3:
        _flip(scene.slab / "data", chance)
        scene.told["flipped"] += 1


def _flip(data: Path, chance: random.Random) -> None:
    with data.open("r+b") as file:
        at = chance.randrange(file.seek(0, os.SEEK_END) // 512) * 512
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def _look_into_engine(scene: _Scene, asks: Load, llm: Any) -> None:  # noqa: ANN401 - vLLM's LLM
    """See that nothing is left of requests that have ended."""
    generate(llm, [[3]], 1)  # a step, in which both halves report
    if left := quiesced(llm):
        scene.problems.append(f"left: {left}")
    runtime = halves(llm)[1]._worker.runtime  # noqa: SLF001 - shown to nobody
    if runtime.failure:
        scene.problems.append(f"the runtime failed: {runtime.failure}")
    pool = asks.scheduler.kv_cache_manager.block_pool
    was_reset = llm.reset_prefix_cache()
    free, blocks = pool.get_num_free_blocks(), len(pool.blocks) - 1
    if not was_reset or free != blocks:
        scene.problems.append(f"{free} of {blocks} blocks are free, reset: {was_reset}")


def _end_agent(scene: _Scene) -> None:
    for agent in [*listeners(scene.slab)]:
        try:
            process = psutil.Process(agent)
            process.terminate()
            process.wait(_AGENT_ENDS_S)
        except psutil.NoSuchProcess:
            pass
        except psutil.TimeoutExpired:
            scene.problems.append("the agent does not end")


def _compute_again(scene: _Scene) -> None:
    """Learn from an engine without connector what is right, and compare what was said."""
    setting = scene.setting
    with in_process_engine(
        make_model(RECIPES[setting.model]),
        max_model_len=setting.max_len + 8,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=512 << 20,
        async_scheduling=False,
        **model_arguments(setting),
    ) as llm:
        hashes = {
            (tuple(each.request.all_token_ids), each.salt): each.request.block_hashes
            for each in scene.past
        }
        with scene.eyes.learning(llm, hashes):
            _say(llm, [([*tokens], salt, 1) for tokens, salt in hashes])
        asked = [each for each in scene.past if each.said]
        said = _say(llm, [(each.prompt, each.salt, len(each.said)) for each in asked])
    scene.told["answers"] += len(asked)
    for each, right in zip(asked, said, strict=True):
        if each.said != right:
            scene.problems.append(f"{each.name} of {len(each.prompt)} says otherwise")


def _say(
    llm: Any,  # noqa: ANN401 - vLLM's LLM
    asked: Sequence[tuple[list[int], str, int]],
) -> list[list[int]]:
    """Return what the engine answers to tokens with a salt, so many tokens each."""
    from vllm import SamplingParams

    prompts = [inputs(tokens, salt) for tokens, salt, _ in asked]
    sampling = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for *_, n in asked
    ]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _look_into_logs(scene: _Scene) -> None:
    """See that the log tells of no error, and of no order that may not be."""
    lines = [*read_traces(traces_of(scene.slab))]
    bad = [line for line in lines if line.get("level") in {"error", "critical"}]
    scene.problems += [f"log: {str(line)[:300]}" for line in bad]
    try:
        check_trace(lines, is_whole=not scene.setting.kills)
    except TraceViolationError as exc:
        scene.problems.append(f"trace: {exc.why}")
