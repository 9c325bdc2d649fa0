# SPDX-License-Identifier: Apache-2.0
"""
What befalls a tier or its agent, and what an engine notices of it.

A real engine with a tiny model is always busy, over a slab that is too small and a Valkey server
behind something that spoils its answers. One after the other the server is stopped, killed,
slow, talks garbage, damages blocks, refuses half a batch and is full, the clock on the wall of
server and agent jumps, and the agent is stopped and killed. Between two faults all is well.

*Our share of a step* is what our hooks take on the engine's thread and what our other threads in
its process compute, as CPU time, beside the CPU time of an engine's thread without us: two cores
that engine, agent and server share say nothing by the clock. What a fault adds to it is held
against the mean of the calm steps before and behind it. *longest wait* is of a request for its
blocks, as a share of its deadline; *calls end* how long calls of the tier went on once nothing
more was asked; *named* how long it took until metric and log had named it, from the last measured
step; *hits again* from the end of the fault to the first block from the tier. Tokens must be
those of the model alone.

Run ``python -m benchmarks.faults``.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import faults_side
from benchmarks.faults_side import FETCH_S, TIER_S
from benchmarks.harness import Figure, Note, Scale, Told, main
from benchmarks.sides import PLAIN
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import run_function
from tests.kit.wall_clock import COMPILER

__all__ = ["CASES"]

_TIMEOUT_S = 3600.0
_OURS, _TIERED = "ucm", "ucm over a tier"
_SAID: dict[str, Any] = {}
"""What a side told, for the next one."""


def sides(scale: Scale) -> Told:
    """Measure engines without us, and without a tier."""
    steps, rounds = _sizes(scale)
    for name in (PLAIN, _OURS):
        _SAID[name] = run_function(
            faults_side.answer_all,
            timeout=_TIMEOUT_S,
            has_store=name == _OURS,
            steps=steps,
            rounds=max(3, rounds),
        )
    if _SAID[PLAIN]["said"] != _SAID[_OURS]["said"]:
        raise AssertionError("the sides gave different tokens")
    medians = [calm["median"] for calm in _SAID[PLAIN]["calm"]]
    yield Figure.over("no fault", f"{PLAIN}, step", "ms", [1e3 * s for s in medians])
    yield from _costs("no fault", f"{_OURS}, no tier", _SAID[_OURS]["calm"])


def faults(scale: Scale, only: str = "") -> Told:
    """Measure an engine over a tier, in each fault and between them."""
    if not COMPILER:
        yield Note("faults", "absent, there is no C compiler; no figure.")
        return
    if PLAIN not in _SAID:
        yield from sides(scale)
    steps, rounds = _sizes(scale)
    told = run_function(
        faults_side.suffer,
        timeout=_TIMEOUT_S,
        expected=_SAID[PLAIN]["said"],
        steps=steps,
        rounds=rounds,
        only=only,
    )
    yield from _costs("no fault", _TIERED, told["calm"])
    of_fault = defaultdict(list)
    for at, each in enumerate(told["faults"]):
        around = told["calm"][at], told["calm"][at + 1]
        of_fault[each["fault"]].append(
            each
            | {"added": _share(each["cost"]) - statistics.mean(map(_share, around))}
        )
    for name, each in of_fault.items():
        yield from _figures(name, each)


def _figures(case: str, all_of: list[dict[str, Any]]) -> Iterator[Figure]:
    def of(name: str, by: float = 1.0) -> list[float]:
        return [each[name] / by for each in all_of]

    yield from _costs(case, _TIERED, [each["cost"] for each in all_of])
    what = "what it adds to our share of a step"
    yield Figure.over(case, what, "ratio", of("added"), "<= 0.05")
    what = f"longest wait / deadline of {FETCH_S} s"
    yield Figure.over(case, what, "ratio", of("longest wait", FETCH_S), "<= 1.1")
    if not case.startswith("agent"):
        what = f"calls end / deadline of {TIER_S} s"
        yield Figure.over(case, what, "ratio", of("calls", TIER_S), "<= 3")
    yield Figure.over(case, "named by metric and log after", "s", of("named"))
    yield Figure.over(case, "hits again after", "s", of("settled"))
    yield Figure.over(case, "wrong answers", "", of("wrong"), "<= 0")
    yield Figure.over(case, "answers", "", of("answers"))


def _costs(case: str, name: str, all_of: list[Mapping[str, float]]) -> Iterator[Figure]:
    for part in ("scheduler's hooks", "worker's hooks", "threads"):
        what = "our threads" if part == "threads" else part
        values = [1e6 * each[part] for each in all_of]
        yield Figure.over(case, f"{name}, {what} per step", "us", values)
    shares = [_share(each) for each in all_of]
    yield Figure.over(case, f"{name}, our share of a step", "ratio", shares)


def _share(cost: Mapping[str, float]) -> float:
    """Return what hooks and threads took in a step, as a share of one without us."""
    own = cost["scheduler's hooks"] + cost["worker's hooks"] + cost["threads"]
    return own / statistics.median(each["median"] for each in _SAID[PLAIN]["calm"])


def _sizes(scale: Scale) -> tuple[int, int]:
    """Return measured steps, and rounds of all faults."""
    return (96, 1) if scale.is_quick else (288, scale.rounds or 3)


CASES: dict[str, Callable[[Scale], Told]] = {"sides": sides, "faults": faults}


if __name__ == "__main__":
    main("faults", CASES)
