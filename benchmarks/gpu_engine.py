# SPDX-License-Identifier: Apache-2.0
"""
The real engine on an NVIDIA GPU: what a first token takes, and a step full of decoding.

*First token*: one prompt at a time, on an engine with nothing else to do, in processes of its
own as a server's; computed, from the engine's own cache, and from the store with that cache
emptied. *Decoding*: see ``benchmarks.decode``, lives as traced; bfloat16 rounds by the shape of a batch, so that sides need not
give the same tokens here. Exactness is what ``tests/e2e`` are for, which run on a GPU as
well. Beside ours stands vLLM's own OffloadingConnector. ``BLNHC`` is a layout of the
KV cache in which all layers of a block lie side by side; the engine's own is ``LBNHC``.

Run ``python -m benchmarks.gpu_engine --json results.json`` on a machine with a GPU and
vLLM for CUDA.
"""

import functools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from benchmarks import gpu_engine_side
from benchmarks.compiled import compiled
from benchmarks.decode import AT_END, EACH_BLOCK, NEVER, p99
from benchmarks.decode_side import PHASES
from benchmarks.gpu_engine_side import MODELS
from benchmarks.harness import Figure, Scale, Told, main
from benchmarks.sides import PLAIN, Side, ours, plain
from benchmarks.stores import MEMORY
from tests import conftest as _engine_environment  # noqa: F401  children inherit it
from tests.e2e.engine import run_function

OFFLOADING = "vLLM offloading"
WHOLE = "BLNHC"
LENGTHS = (1024, 4096, 16384, 32768)
STEP, SCHEDULE = "<= 1.03", "<= 1.10"
_LIMIT_S = 300.0


@attrs.frozen
class _Kind:
    """One kind of engine: its connector, and the layout that it is told to take."""

    side: Side
    layout: str = ""


def offloading(_: Path) -> dict[str, object]:
    """Return what configures vLLM's own."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 32 << 30},
    }


def _run(kind: _Kind, function: Callable[..., object], **arguments: object) -> Any:  # noqa: ANN401
    with kind.side.ready() as config:
        return run_function(
            function,
            timeout=_LIMIT_S,
            kv_transfer_config=config,
            layout=kind.layout,
            **arguments,
        )


def first_tokens(model: str, scale: Scale) -> Told:
    """Measure first tokens of prompts of several lengths."""
    capacity = MODELS[model].capacity
    kinds = {
        "ucm": _Kind(Side(MEMORY, ours(capacity))),
        OFFLOADING: _Kind(Side(MEMORY, offloading)),
        f"ucm, {WHOLE}": _Kind(Side(MEMORY, ours(capacity)), WHOLE),
    }
    case = f"first token, {model}"
    lengths = LENGTHS[:3] if scale.is_quick else LENGTHS
    for name, kind in kinds.items():
        told = _run(
            kind,
            gpu_engine_side.first_tokens,
            model=model,
            lengths=lengths,
            rounds=2 if scale.is_quick else 5,
        )
        for length in lengths:
            yield from _first_token(f"{case}, {length}", name, told[str(length)])


def _first_token(case: str, name: str, rounds: list[Mapping[str, float]]) -> Told:
    for what in ("computed", "cached", "loaded"):
        values = [1e3 * one[what] for one in rounds]
        yield Figure.over(case, f"{name}, {what}", "ms", values)
    values = [one["loaded"] / one["cached"] for one in rounds]
    target = "<= 1.3" if name == "ucm" else ""
    yield Figure.over(case, f"{name}, loaded / cached", "ratio", values, target)
    found = [one["hits"] for one in rounds]
    yield Figure.over(case, f"{name}, found", "tokens", found)


def decoding(model: str, requests: int, scale: Scale) -> Told:
    """Measure steps of a full engine, sides forwards and backwards."""
    capacity = MODELS[model].capacity
    kinds = {PLAIN: _Kind(Side(MEMORY, plain))}
    for name, mode in (
        (AT_END, "at_end"),
        (EACH_BLOCK, "each_block"),
        (NEVER, "never"),
    ):
        kinds[name] = _Kind(Side(MEMORY, ours(capacity, save_decoded=mode)))
    kinds[OFFLOADING] = _Kind(Side(MEMORY, offloading))
    kinds[f"{PLAIN}, {WHOLE}"] = _Kind(kinds[PLAIN].side, WHOLE)
    kinds[f"{AT_END}, {WHOLE}"] = _Kind(kinds[AT_END].side, WHOLE)
    if scale.is_quick:
        kinds = {name: kinds[name] for name in (PLAIN, AT_END, EACH_BLOCK, OFFLOADING)}
    case, waits = f"{requests} decoding, {model}", compiled("gil_waits.c")
    runs: dict[str, list[Any]] = {name: [] for name in kinds}
    for name in [*kinds, PLAIN] if scale.is_quick else [*kinds, *reversed(kinds)]:
        told = _run(
            kinds[name],
            gpu_engine_side.decode,
            model=model,
            requests=requests,
            total=requests * 3 // 2,
            lives="as traced",
            waits=waits,
        )
        runs[name].append(told)
    for phase in PHASES:
        for name, side in runs.items():
            yield from _steps(f"{case}, {phase}", name, [run[phase] for run in side])
            if name != PLAIN:
                others = [run[phase] for run in runs[PLAIN]]
                yield from _ratios(
                    f"{case}, {phase}", name, [run[phase] for run in side], others
                )
    for name, side in runs.items():
        if name != PLAIN:
            found = [run["turns"]["hits"] / run["there"] for run in side]
            yield Figure.over(case, f"{name}, found", "ratio", found)


def _median_ms(run: Mapping[str, Any], part: str) -> float:
    return 1e3 * statistics.median(run["steps"].get(part) or [0.0])


def _steps(case: str, name: str, runs: list[Any]) -> Iterator[Figure]:
    for part in ("step", "schedule", "scheduler's hooks", "worker's hooks"):
        values = [_median_ms(run, part) for run in runs]
        if any(values):
            yield Figure.over(case, f"{name}, {part}", "ms", values)
    for part, what in (("step", "step, p99"), ("waited", "lock, p99")):
        values = [1e3 * p99(run["steps"].get(part) or [0.0]) for run in runs]
        if any(values):
            target = "<= 1" if part == "waited" and name.startswith("ucm") else ""
            yield Figure.over(case, f"{name}, {what}", "ms", values, target)
    values = [1e3 * run["cpu"] / run["num_steps"] for run in runs]
    if any(values):
        yield Figure.over(case, f"{name}, CPU per step", "ms", values)


def _ratios(case: str, name: str, runs: list[Any], others: list[Any]) -> Told:
    for part, bound in (("step", STEP), ("schedule", SCHEDULE)):
        plain = statistics.mean(_median_ms(other, part) for other in others)
        values = [_median_ms(one, part) / plain for one in runs]
        target = bound if name.startswith("ucm") else ""
        yield Figure.over(case, f"{name} / {PLAIN}, {part}", "ratio", values, target)


CASES: dict[str, Callable[[Scale], Told]] = {
    "first token, 8B": functools.partial(first_tokens, "8B"),
    "256 decoding, 8B": functools.partial(decoding, "8B", 256),
    "first token, 70B, a rank of 8": functools.partial(
        first_tokens, "70B, a rank of 8"
    ),
    "64 decoding, 8B": functools.partial(decoding, "8B", 64),
}


if __name__ == "__main__":
    if torch.cuda.is_available():
        os.environ["LD_PRELOAD"] = compiled(
            "gil_waits.c"
        )  # before an engine's process starts
        main("gpu_engine", CASES)
    else:
        print(
            "benchmarks.gpu_engine: torch finds no NVIDIA GPU here; nothing measured."
        )
