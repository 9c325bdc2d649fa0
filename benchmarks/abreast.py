# SPDX-License-Identifier: Apache-2.0
"""
The real engine full of decoding requests, with and without a connector, abreast.

What ``benchmarks.decode`` does, but all sides are there at once and take turns every
fifty steps, so that ratios of a few hundredths can be told on a machine that is shared:
see ``baton``. *no connector, again* is a second engine without one: what it differs by
from the first is what these figures are worth. The forward pass computes on one core of
two, as an accelerator's host has cores to spare: where it has both, whatever else computes
is taken from it, and ``benchmarks.decode`` says how much that is. Run ``python -m benchmarks.abreast``.
"""

import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from benchmarks import decode_side
from benchmarks.baton import Baton, conduct
from benchmarks.compiled import compiled
from benchmarks.decode import (
    AT_END,
    EACH_BLOCK,
    Case,
    p99,
    sides,
)
from benchmarks.decode_side import MODELS, PHASES
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.sides import EMPTY, PLAIN
from tests.e2e.engine import run_function

_AGAIN = "no connector, again"
_PARTS = 8
"""Of a phase; each has a ratio of its own."""

_Run = Mapping[str, Any]


def measure(case: Case, scale: Scale) -> Told:
    """Measure all sides of a case side by side."""
    there = sides(MODELS[case.model], with_peers=False)
    there = {name: there[name] for name in (PLAIN, EMPTY, AT_END, EACH_BLOCK)}
    there[_AGAIN] = there[PLAIN]
    total = case.requests * 3 // 2 if scale.is_quick else case.total
    waits = compiled("gil_waits.c")
    if waits:
        os.environ["LD_PRELOAD"] = waits  # before the first engine is started
    batons: dict[Baton, Callable[[], bool]] = {}
    futures: dict[str, Future[_Run]] = {}
    with ExitStack() as ending:
        home = ending.enter_context(tempfile.TemporaryDirectory(prefix="ucm-baton-"))
        pool = ending.enter_context(ThreadPoolExecutor(len(there)))
        for at, (name, side) in enumerate(there.items()):
            path = f"{home}/{at}"
            baton = Baton(path, is_new=True)
            ending.callback(baton.close)
            futures[name] = future = pool.submit(
                run_function,
                decode_side.decode,
                timeout=3600.0,
                kv_transfer_config=ending.enter_context(side.ready()),
                model=case.model,
                requests=case.requests,
                total=total,
                lives=case.lives,
                waits=waits,
                threads=case.threads,
                baton=path,
            )
            batons[baton] = functools.partial(_is_alive, future)
        conduct(batons)
        runs = {name: future.result() for name, future in futures.items()}
    if len({run["digest"] for run in runs.values()}) != 1:
        raise AssertionError("the sides gave different tokens")
    for phase in PHASES:
        steps = {name: run[phase]["steps"] for name, run in runs.items()}
        yield from _figures(f"{case.name}, {phase}", steps)
    for name in (AT_END, EACH_BLOCK):
        run = runs[name]
        found = [run["turns"]["hits"] / run["there"]]
        yield Figure.over(case.name, f"{name}, found", "ratio", found, ">= 0.99")


def _is_alive(future: Future[_Run]) -> bool:
    return not future.done()


def _figures(
    case: str, steps: Mapping[str, Mapping[str, list[float]]]
) -> Iterator[Figure]:
    for name, parts in steps.items():
        for part in ("step", "schedule", "scheduler's hooks", "worker's hooks"):
            if any(parts.get(part, ())):
                values = [1e3 * value for value in _by_part(parts[part])]
                yield Figure.over(case, f"{name}, {part}", "ms", values)
        if "waited" in parts and name in (AT_END, EACH_BLOCK):
            waited = [1e3 * p99(parts["waited"])]
            yield Figure.over(case, f"{name}, lock, p99", "ms", waited, "<= 1")
    for name, parts in steps.items():
        is_ours = name in (AT_END, EACH_BLOCK)
        most = "<= 1.10" if name == EACH_BLOCK else "<= 1.03"
        bounds = {"step": most, "schedule": "<= 1.10"}
        for base in (PLAIN, EMPTY) if is_ours else (PLAIN,):
            if name == base:
                continue
            for part, bound in bounds.items():
                pairs = zip(
                    _by_part(parts[part]), _by_part(steps[base][part]), strict=True
                )
                values = [one / other for one, other in pairs]
                target = bound if is_ours else ""
                what = f"{name} / {base}, {part}"
                yield Figure.over(case, what, "ratio", values, target)


def _by_part(steps: list[float]) -> list[float]:
    """Return the median of each part of a phase; sides were in it at the same time."""
    size = len(steps) // _PARTS
    return [
        statistics.median(steps[at * size : (at + 1) * size]) for at in range(_PARTS)
    ]


ALL = (
    Case("64 KB blocks", 256, 512, lives="as traced", threads=1),
    Case("64 KB blocks", 256, 800, threads=1),
    Case("1 MB blocks", 64, 256, lives="as traced", threads=1),
)
CASES = {case.name: functools.partial(measure, case) for case in ALL}


if __name__ == "__main__":
    main("abreast", CASES)
