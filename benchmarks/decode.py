# SPDX-License-Identifier: Apache-2.0
"""
The real engine full of decoding requests, without a connector and with several.

Blocks become whole all the time and nothing is ever found: what a connector costs when
there is nothing to win. Each side is an engine in a process of its own, over an empty
store; sides take turns, forwards and backwards. All sides give the same tokens, or there
is no figure. Run ``python -m benchmarks.decode``.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import engine_side
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.stores import MEMORY
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import connector_config, run_function

PLAIN = "no connector"
_Config = Callable[[Path], dict[str, object] | None]


def _ours(role: str) -> _Config:
    def config(home: Path) -> dict[str, object]:
        made = connector_config(type="slab", path=str(home / "slab"), capacity="1GiB")
        return made | {"kv_role": role}

    return config


def _example(home: Path) -> dict[str, object]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(home)},
    }


SIDES: Mapping[str, _Config] = {
    PLAIN: lambda _: None,
    "ucm": _ours("kv_both"),
    "ucm, kv_consumer": _ours("kv_consumer"),
    "ExampleConnector": _example,
}


def _run(config: _Config, requests: int, repeats: int) -> dict[str, float]:
    """Return the medians of one engine's process, in seconds."""
    with tempfile.TemporaryDirectory(prefix="ucm-decode-", dir=MEMORY) as home:
        told = run_function(
            engine_side.decode,
            timeout=600.0,
            kv_transfer_config=config(Path(home)),
            requests=requests,
            repeats=repeats,
        )
    return {name: statistics.median(taken) for name, taken in told.items()}


def measure(requests: int, scale: Scale) -> Told:
    """Measure with so many requests at once."""
    rounds = scale.rounds or (1 if scale.is_quick else 3)
    repeats = 1 if scale.is_quick else 3
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name in (*SIDES, *reversed(SIDES)):
            runs[name].append(_run(SIDES[name], requests, repeats))
    if len({run["digest"] for side in runs.values() for run in side}) != 1:
        raise AssertionError("the sides gave different tokens")
    case = f"{requests} decoding"
    for name, side in runs.items():
        for what in ("step", "schedule", "plan", "cpu"):
            values = [1e3 * run[what] for run in side]
            if any(values):
                yield Figure.over(case, f"{name}, {what}", "ms", values)
    for name, side in runs.items():
        for what, bound in (("step", "<= 1.10"), ("schedule", "<= 1.10")):
            if name != PLAIN:
                pairs = zip(side, runs[PLAIN], strict=True)
                values = [ours[what] / theirs[what] for ours, theirs in pairs]
                target = bound if name.startswith("ucm") else ""
                yield Figure.over(
                    case, f"{name} / {PLAIN}, {what}", "ratio", values, target
                )


CASES: dict[str, Callable[[Scale], Told]] = {
    "256 decoding": lambda scale: measure(256, scale),
    "64 decoding": lambda scale: measure(64, scale),
}


if __name__ == "__main__":
    main("decode", CASES)
