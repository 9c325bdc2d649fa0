# SPDX-License-Identifier: Apache-2.0
"""
Whether a block of KV is ever wrong: random engines, each block compared with the truth.

Each seed is a real vLLM engine on a CPU with a tiny model (full attention, windows, latents,
recurrent states), its settings and requests drawn at random: small pools that preempt, a slab
smaller than a prompt, aborts in each state, LoRA adapters that come and go, pauses and sleep,
store and device that fail and dawdle, bytes of slab and disk flipped, the agent of a disk killed.
Behind it comes a second engine with other settings over the same slab, and beside that maybe a
third one, which maybe is killed. Blocks that are committed, that a load publishes, that running
requests have, and that lie in the slab in the end are compared as bytes with what an engine
without connector computes for the same tokens, and so are the answers. Of several ranks only
answers are.

Where numbers are coarse, blocks may be rounded, and where there are states, answers are not compared.

What must hold as well: each request ends, no hold and no slot is left, all of the engine's blocks
are free, it closes in time, and nothing is logged as an error.

Run ``python -m benchmarks.oracle --seeds 1:8``; exits with 1 if anything of that did not.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import oracle_side
from benchmarks.harness import run_of
from benchmarks.kills import searching, users
from benchmarks.oracle_settings import choose
from tests.conftest import OF_TESTS
from tests.e2e.engine import run_function

__all__ = ["run"]

_REST_S: Final = 420.0
"""Engines start, drain and close, and all is computed again; a machine may be busy."""
_SAID: Final = 1500
_WIDTH: Final = 170
_COLUMNS: Final = ("commit", "publish", "running", "slab", "verified", "unknown")
_EVENTS: Final = ("requests", "preempted", "aborted", "failed", "killed", "flipped")


def run(
    seeds: Sequence[int], seconds: float, console: Console
) -> Iterator[dict[str, Any]]:
    """Yield what came of each seed, each in a process of its own."""
    with searching():
        for seed in track(seeds, "seeds", console=console):
            began = time.monotonic()
            told = _run(seed, seconds)
            told["seconds"] = round(time.monotonic() - began, 1)
            for problem in told["problems"]:
                console.print(f"seed {seed}: {problem}", style="red", markup=False)
            yield told


def _run(seed: int, seconds: float) -> dict[str, Any]:
    # A socket's path may not be long.
    with tempfile.TemporaryDirectory(prefix="ucm-oracle-", dir="/dev/shm") as place:
        try:
            told: dict[str, Any] = run_function(
                oracle_side.run,
                timeout=seconds + _REST_S,
                seed=seed,
                seconds=seconds,
                place=place,
            )
        except (AssertionError, TimeoutError) as exc:
            told = {"seed": seed, "setting": attrs.asdict(choose(seed))}
            told |= {"told": {}, "compared": {}, "wrong": 0, "worst": 0.0}
            told["problems"] = [f"{type(exc).__name__}: {str(exc)[-_SAID:]}"]
        for pid in [*users(Path(place))]:
            told["problems"].append(f"process {pid} still uses the slab")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return told


def _table(results: Sequence[Mapping[str, Any]]) -> Table:
    names = ("seed", "model", *_EVENTS, *_COLUMNS, "wrong", "problems")
    table = Table(*names, box=SIMPLE)
    for each in results:
        events = [
            sum(n for name, n in each["told"].items() if name.startswith(event))
            for event in _EVENTS
        ]
        compared = [each["compared"].get(name, 0) for name in _COLUMNS]
        counts = (*events, *compared, each["wrong"], len(each["problems"]))
        table.add_row(str(each["seed"]), each["setting"]["model"], *map(str, counts))
    return table


def _seeds(text: str) -> range:
    first, _, count = text.partition(":")
    return range(int(first), int(first) + int(count or 1))


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle")
    parser.add_argument("--seeds", type=_seeds, default="1:8", metavar="FIRST:COUNT")
    parser.add_argument("--seconds", type=float, default=40.0, help="of load, per seed")
    parser.add_argument("--json", type=Path, help="file for the result")
    given, made = parser.parse_args(), run_of(parser)
    os.environ.update(OF_TESTS)  # children inherit it
    console, began = Console(stderr=True), time.monotonic()
    results: list[dict[str, Any]] = []
    for told in run(given.seeds, given.seconds, console):
        results.append(told)
        result = {
            **made,
            "seconds": round(time.monotonic() - began, 1),
            "seeds": results,
        }
        if given.json:  # after each: who stops it keeps what was found
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    Console(stderr=True, width=_WIDTH).print(_table(results))
    return 1 if any(each["problems"] for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
