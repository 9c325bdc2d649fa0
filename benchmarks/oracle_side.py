# SPDX-License-Identifier: Apache-2.0
"""One seed of ``benchmarks.oracle``: two or three engines over a slab, and one without connector."""

import contextlib
import json
import logging
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import attrs
import psutil
import pytest

from benchmarks.kills import listeners, problems_of
from benchmarks.oracle_load import Adapter, Asked, Fickle, Load
from benchmarks.oracle_seen import Eyes, Oracle
from benchmarks.oracle_settings import (
    RECIPES,
    Setting,
    choose,
    config_of,
    engine_arguments,
)
from benchmarks.oracle_truth import Truth
from tests.e2e.connector import halves, plant, quiesced
from tests.e2e.engine import drain, generate, in_process_engine
from tests.e2e.forked import Forked, end_group, forked
from tests.e2e.models import make_model
from tests.e2e.test_keys import write_adapter
from tests.kit.lockstep import TraceViolationError, check_trace, read_traces
from tests.traces import logs_closed, traces_of

__all__ = ["beside", "run"]

_PHASES: Final = 2
_NEIGHBOUR: Final = 2
_SERVES: Final = "serving"
_CLOSE_S: Final = 120.0
_NEIGHBOUR_S: Final = 240.0
"""In so long it starts, or drains and closes; a machine may be busy."""
_START_S: Final = 5.0
"""What an engine behind another one takes to start."""
_AGENT_ENDS_S: Final = 60.0
_MOST_TOLD: Final = 20


@attrs.define(eq=False)
class _Scene:
    """What the engines of a seed share."""

    setting: Setting
    """Of the first one."""
    place: Path
    chance: random.Random
    plan: Fickle
    roots: list[list[int]]
    eyes: Eyes | None = None
    """None: of a neighbour, which only asks."""
    neighbour: Forked | None = None
    dies_at: float = math.inf
    """When the neighbour is killed."""
    adapters: list[Adapter] = attrs.Factory(list)
    past: list[Asked] = attrs.Factory(list)
    told: Counter[str] = attrs.Factory(Counter)
    problems: list[str] = attrs.Factory(list)

    @property
    def slab(self) -> Path:
        """Where the slab is."""
        return self.place / "slab"


def run(seed: int, seconds: float, place: str) -> dict[str, Any]:
    """Ask for so long in all; return what was compared, and what is wrong."""
    scene = _scene(seed, 0, Path(place))
    setting = scene.setting
    oracle = Oracle(0.5 if setting.draft else 1.0, is_coarse=setting.is_coarse)
    eyes = scene.eyes = Eyes(oracle)
    with pytest.MonkeyPatch.context() as patch, logs_closed():
        eyes.open(patch, sees_commits=not setting.flips)
        _prepare(patch, scene)
        for phase in range(_PHASES):
            _write_adapters(scene, phase)
            with _neighbour(scene, seed, seconds / _PHASES if phase else 0):
                _serve(scene, choose(seed, phase), seconds / _PHASES)
    _end_agent(scene)
    right = Truth(setting, scene.past, scene.place / "contents")
    scene.problems += right.compare(None if setting.ranks > 1 else eyes)
    scene.told["answers"] += right.answers
    corrupt: list[str] = []
    if setting.ranks == 1:
        oracle.judge(may_be_unknown=setting.neighbour == "dies")
        corrupt = [*eyes.look_into(scene.slab)]
    scene.problems += [] if setting.flips else corrupt
    scene.problems += problems_of(scene.slab)
    _look_into_logs(scene)
    scene.told.update({f"failed {verb}": n for verb, n in scene.plan.fired.items()})
    return {
        "seed": seed,
        "setting": attrs.asdict(setting),
        "told": dict(sorted(scene.told.items())),
        "compared": dict(sorted(oracle.counts.items())),
        "worst": oracle.worst,
        "wrong": len(oracle.problems),
        "problems": [*oracle.problems[:_MOST_TOLD], *scene.problems[:_MOST_TOLD]],
    }


def _scene(seed: int, phase: int, place: Path) -> _Scene:
    setting, words = choose(seed, phase), random.Random(f"{seed} roots")
    longest = range(8, setting.max_len // 2)
    roots = [
        [words.randrange(5, 500) for _ in range(words.choice(longest))]
        for _ in range(setting.roots)
    ]
    chance = random.Random(f"{seed} {phase} load")
    plan = Fickle(random.Random(f"{seed} {phase} faults"), setting)
    return _Scene(setting, place, chance, plan, roots)


# -- an engine beside ---------------------------------------------------------------


def beside(seed: int, seconds: float, place: str, adapters: list[Any]) -> None:
    """Ask another engine over the slab for so long, and print what became of it."""
    scene = _scene(seed, _NEIGHBOUR, Path(place))
    scene.adapters = [Adapter(at, Path(path), held) for at, path, held in adapters]
    with pytest.MonkeyPatch.context() as patch, logs_closed():
        _prepare(patch, scene)
        _serve(scene, scene.setting, seconds)
    past = [
        (
            *(each.prompt, each.salt, each.most, each.stops, each.content),
            *(each.said, [*each.request.all_token_ids]),
            [bytes(one).hex() for one in each.hashes],
        )
        for each in scene.past
    ]
    told = {"told": scene.told, "problems": scene.problems, "past": past}
    print(f"\n{json.dumps(told)}", flush=True)


@contextlib.contextmanager
def _neighbour(scene: _Scene, seed: int, seconds: float) -> Iterator[None]:
    """Let another engine use the slab as well, and take what it was asked."""
    if not scene.setting.neighbour or not seconds:
        yield
        return
    with forked(
        beside,
        seed=seed,
        seconds=seconds + 2 * _START_S,
        place=str(scene.place),
        adapters=[
            (each.number, str(each.path), each.content) for each in scene.adapters
        ],
    ) as process:
        process.first_line(_SERVES, _NEIGHBOUR_S)
        if scene.setting.neighbour == "dies":
            wait = _START_S + scene.chance.uniform(0, seconds)
            scene.dies_at = time.monotonic() + wait
        scene.neighbour = process
        yield
        scene.neighbour, scene.dies_at = None, math.inf
        if process.wait(_NEIGHBOUR_S):
            if not scene.told["killed neighbours"]:
                scene.problems.append(
                    f"neighbour: {process.stderr.read_text()[-2000:]}"
                )
            return
        told = json.loads(process.stdout.read_text().splitlines()[-1])
    scene.told.update(told["told"])
    scene.problems += [f"neighbour: {each}" for each in told["problems"]]
    for at, (*given, content, said, tokens, hashes) in enumerate(told["past"]):
        request = SimpleNamespace(
            all_token_ids=tokens, block_hashes=[bytes.fromhex(one) for one in hashes]
        )
        scene.past.append(Asked(f"n{at}", request, *given, content, said=said))


def _write_adapters(scene: _Scene, phase: int) -> None:
    """Write adapters, in place of those of the engine before: some hold the same as they did."""
    scene.adapters = [
        Adapter(number, scene.place / f"adapter{number}", content)
        for number in range(1, scene.setting.adapters + 1)
        for content in [number + 10 * phase * scene.chance.choice([0, 1])]
    ]
    for each in scene.adapters:
        if not phase or each.content > each.number:
            write_adapter(each.path, each.content)


# -- what is done to an engine --------------------------------------------------------


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
        if scene.eyes and setting.ranks == 1:
            scene.eyes.begin(llm)
        print(f"\n{_SERVES}", flush=True)
        asks = Load(llm, setting, scene.chance, scene.past, scene.roots, scene.adapters)
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
    if step % 4 == 0 and scene.eyes and setting.ranks == 1:
        for asked in asks.live.values():
            if asked.is_running and chance.random() < 0.3:
                spare, known = 8 if setting.draft else 0, (asked.request, asked.hashes)
                scene.eyes.look(asks.scheduler, *known, spare=spare)
    if scene.neighbour and time.monotonic() > scene.dies_at:
        end_group(scene.neighbour.pid)
        scene.dies_at = math.inf
        scene.told["killed neighbours"] += 1
    if step % 40:
        return
    if setting.kills and chance.random() < 0.1:
        for agent in [*listeners(scene.slab)]:
            os.kill(agent, signal.SIGKILL)
            scene.told["killed"] += 1
    if setting.flips and chance.random() < 0.3:
        tier = [each for each in (scene.place / "disk").rglob("*") if each.is_file()]
        is_tier = tier and chance.random() < 0.5
        _flip(chance.choice(tier) if is_tier else scene.slab / "data", chance)
        scene.told["flipped"] += 1


def _flip(data: Path, chance: random.Random) -> None:
    with data.open("r+b") as file:
        at = chance.randrange(max(1, file.seek(0, os.SEEK_END) // 512)) * 512
        file.seek(at)
        if not file.read(1):
            return
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def _look_into_engine(scene: _Scene, asks: Load, llm: Any) -> None:  # noqa: ANN401 - vLLM's LLM
    """See that nothing is left of requests that have ended."""
    generate(llm, [[3]], 1)  # a step, in which both halves report
    if scene.setting.ranks > 1:
        drain(llm)
    elif left := quiesced(llm):
        scene.problems.append(f"left: {left}")
    if scene.setting.ranks == 1:
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


def _look_into_logs(scene: _Scene) -> None:
    """See that the log tells of no error, and of no order that may not be."""
    is_cut = scene.setting.neighbour == "dies"
    lines = [*read_traces(traces_of(scene.slab))]
    bad = [line for line in lines if line.get("level") in {"error", "critical"}]
    scene.problems += [f"log: {str(line)[:300]}" for line in bad]
    try:
        check_trace(lines, is_whole=not scene.setting.kills and not is_cut)
    except TraceViolationError as exc:
        scene.problems.append(f"trace: {exc.why}")
