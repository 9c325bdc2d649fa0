# SPDX-License-Identifier: Apache-2.0
"""
The real engine full of decoding requests, without a connector and with several.

Blocks become whole and requests end all the time, and the next one follows at once.
``new``: nothing is ever found, what a connector costs when there is nothing to win.
``turns``: every fourth request goes on with a conversation of before, which must be
found; whoever does not find it has more to compute, so that here we may be faster.
Each side is an engine in a process of its own, over an empty store; sides take turns,
forwards and backwards. All sides give the same tokens, or there is no figure.

*lock* is the longest time in a step that the engine's thread waited for the interpreter
lock (``gil_waits.c``, which needs a C compiler); without a connector nobody else wants it.
CPU per step and per block is that of all threads of ucm, from the first request of
``new`` until all is saved.

The forward pass has all cores of the machine: what anybody else computes is taken from it, which
is not so beside an accelerator, and engines that run one after the other differ by more than what
is asked of us. So ratios have no target here; ``benchmarks.abreast`` holds them against theirs.
Run ``python -m benchmarks.decode``.
"""

import functools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from benchmarks import decode_side
from benchmarks.compiled import compiled
from benchmarks.decode_side import MODELS, PHASES, Model
from benchmarks.harness import Figure, Note, Scale, Told, main
from benchmarks.sides import (
    EMPTY,
    EXAMPLE,
    LMCACHE,
    PLAIN,
    ServedSide,
    Side,
    absent,
    empty,
    example,
    has_server,
    ours,
    plain,
)
from benchmarks.stores import MEMORY
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import run_function

AT_END, EACH_BLOCK, NEVER = "ucm", "ucm, each_block", "ucm, never"
CONSUMER = "ucm, kv_consumer"
AT_ONCE = "ucm, company 0"
PEERS = (EXAMPLE, LMCACHE)
_Run = Mapping[str, Any]
"""What ``decode_side.decode`` told."""


def sides(model: Model, *, with_peers: bool) -> dict[str, Side]:
    """Return the sides that can take part here."""
    model.make(model.recipe)  # what is written while an engine starts is refused
    capacity = model.capacity
    there = {PLAIN: Side(MEMORY, plain), EMPTY: Side(MEMORY, empty)}
    there[AT_END] = Side(MEMORY, ours(capacity))
    for name, mode in ((EACH_BLOCK, "each_block"), (NEVER, "never")):
        there[name] = Side(MEMORY, ours(capacity, save_decoded=mode))
    there[AT_ONCE] = Side(MEMORY, ours(capacity, timeout={"company": 0}))
    there[CONSUMER] = Side(MEMORY, ours(capacity, kv_role="kv_consumer"))
    if with_peers:
        there[EXAMPLE] = Side(MEMORY, example)
        if has_server():
            there[LMCACHE] = ServedSide(chunk_tokens=model.block_tokens)
    return there


def _run(side: Side, waits: str, **arguments: object) -> _Run:
    """Return what one engine's process tells."""
    with side.ready() as config:
        told: _Run = run_function(
            decode_side.decode,
            timeout=600.0,
            kv_transfer_config=config,
            waits=waits,
            **arguments,
        )
    return told


@attrs.frozen
class Case:
    """
    What is measured together.

    Args:
        model: One of ``MODELS``.
        requests: At once.
        total: In each phase.
        lives: One of ``turns.LIVES``: how long the answers are.
        threads: That the forward pass computes on; 0: on all cores, as the engine does.
        is_whole: Whether all modes and all peers take part.
    """

    model: str
    requests: int
    total: int
    lives: str = "brief"
    threads: int = 0
    is_whole: bool = False

    @property
    def name(self) -> str:
        """As it stands in tables."""
        lives = "" if self.lives == "brief" else f", lives {self.lives}"
        cores = f", forward on {self.threads}" if self.threads else ""
        return f"{self.requests} decoding, {self.model}{lives}{cores}"


def measure(case: Case, scale: Scale) -> Told:
    """Measure all sides of a case in turn."""
    there = sides(MODELS[case.model], with_peers=case.is_whole)
    if not case.is_whole:
        chosen = (PLAIN, EMPTY, AT_END, EACH_BLOCK, AT_ONCE)
        there = {name: side for name, side in there.items() if name in chosen}
    waits = compiled("gil_waits.c")
    if waits:
        os.environ["LD_PRELOAD"] = waits  # before the first engine is started
    runs, problems = _in_turn(there, case, scale, waits)
    for name, problem in problems.items():
        yield Note(case.name, f"{name}: its engine ended ({problem}); no figure.")
    if len({run["digest"] for side in runs.values() for run in side}) != 1:
        raise AssertionError("the sides gave different tokens")
    for phase in PHASES:
        for name, side in runs.items():
            yield from _steps(f"{case.name}, {phase}", name, phase, side)
        yield from _ratios(f"{case.name}, {phase}", phase, runs)
    for name, side in runs.items():
        if name.startswith("ucm"):
            yield from _amounts(case, name, side)
        if name not in (PLAIN, EMPTY, CONSUMER, NEVER):
            values = [run["turns"]["hits"] / run["there"] for run in side]
            target = ">= 0.99" if name in (AT_END, EACH_BLOCK, AT_ONCE) else ""
            yield Figure.over(case.name, f"{name}, found", "ratio", values, target)
    yield from _notes(case, waits)


def _in_turn(
    there: Mapping[str, Side], case: Case, scale: Scale, waits: str
) -> tuple[dict[str, list[_Run]], dict[str, str]]:
    """Return the runs of each side; and of peers whose engine ended, the error instead."""
    runs: dict[str, list[_Run]] = {name: [] for name in there}
    problems: dict[str, str] = {}
    order = list(there) if scale.is_quick else [*there, *reversed(there)]
    total = case.requests * 3 // 2 if scale.is_quick else case.total
    for name in filter(runs.__contains__, order * (scale.rounds or 1)):
        try:
            told = _run(
                there[name],
                waits,
                model=case.model,
                requests=case.requests,
                total=total,
                lives=case.lives,
                threads=case.threads,
            )
        except AssertionError as exc:
            if name not in PEERS:
                raise
            problems[name] = str(exc).strip().rpartition("\n")[2][:200]
            del runs[name]
        else:
            runs[name].append(told)
    return runs, problems


def _steps(case: str, name: str, phase: str, side: list[_Run]) -> Iterator[Figure]:
    """Tell what a step takes on one side, and its parts, one value for each run."""
    parts = (
        "step",
        "schedule",
        "build_connector_meta",
        "update_connector_output",
        "scheduler's hooks",
        "worker's hooks",
    )
    runs = [run[phase]["steps"] for run in side]
    for part in parts:
        values = [1e3 * statistics.median(run.get(part, [0.0])) for run in runs]
        if any(values):
            yield Figure.over(case, f"{name}, {part}", "ms", values)
    values = [1e3 * p99(run["step"]) for run in runs]
    yield Figure.over(case, f"{name}, step, p99", "ms", values)
    if all("waited" in run for run in runs):
        values = [1e3 * p99(run["waited"]) for run in runs]
        target = "<= 1" if name.startswith("ucm") else ""
        yield Figure.over(case, f"{name}, lock, p99", "ms", values, target)


def p99(values: list[float]) -> float:
    """Return what 99 of 100 do not exceed."""
    return sorted(values)[len(values) * 99 // 100]


def _ratios(case: str, phase: str, runs: Mapping[str, list[_Run]]) -> Iterator[Figure]:
    """Hold each side against no connector, and ours against an empty one, run by run."""
    for name, side in runs.items():
        is_ours = name.startswith("ucm")
        for base in (PLAIN, EMPTY) if is_ours else (PLAIN,):
            if name == base:
                continue
            for part in ("step", "schedule"):
                values = [
                    statistics.median(one[phase]["steps"][part])
                    / statistics.median(other[phase]["steps"][part])
                    for one, other in zip(side, runs[base], strict=True)
                ]
                yield Figure.over(case, f"{name} / {base}, {part}", "ratio", values)


def _amounts(case: Case, name: str, side: list[_Run]) -> Iterator[Figure]:
    """Tell what our threads computed, and how many blocks went which way."""
    new, turns = ([run[phase] for run in side] for phase in PHASES)
    values = [1e3 * run["cpu"] / run["num_steps"] for run in new]
    yield Figure.over(case.name, f"{name}, CPU per step", "ms", values)
    if all(run["saved"] for run in new):
        values = [1e3 * run["cpu"] / run["saved"] for run in new]
        # Larger blocks take what their bytes take.
        target = "<= 0.15" if case.requests == 256 and "KB" in case.model else ""
        yield Figure.over(case.name, f"{name}, CPU per block", "ms", values, target)
    for verb, phase in (("saved", new), ("loaded", turns)):
        values = [run[verb] for run in phase]
        yield Figure.over(case.name, f"{name}, {verb}", "blocks", values)


def _notes(case: Case, waits: str) -> Iterator[Note]:
    if not waits:
        yield Note(case.name, "waits for the lock: no C compiler; no figure.")
    if case.is_whole:
        yield from absent(case.name)


ALL = (  # 190, 60, 130 and 80 s on two idle cores
    Case("64 KB blocks", 256, 800, is_whole=True),
    Case("64 KB blocks", 256, 512, lives="as traced"),
    Case("64 KB blocks", 64, 256),
    Case("1 MB blocks", 256, 480),
    Case("1 MB blocks", 64, 192),
)
CASES: dict[str, Callable[[Scale], Told]] = {
    case.name: functools.partial(measure, case) for case in ALL
}


if __name__ == "__main__":
    main("decode", CASES)
