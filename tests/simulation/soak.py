# SPDX-License-Identifier: Apache-2.0
"""
Simulated runs over random seeds, for as long as one likes.

Each failing seed is printed with the command that repeats it. Run
``python -m tests.simulation.soak --seconds 60``, or ``make soak SECONDS=60``.
"""

import argparse
import functools
import gc
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

from tests.simulation.worlds import WORLDS, make_world, modules_of

Job = tuple[str, int, int]
"""World, seed and number of acts."""

_HASH_SEED = "0"
_FAILURES = 5


def run_one(job: Job) -> tuple[str, int, int, dict[str, int], str]:
    """Run one seed of a world; return what was seen, and why it failed if it did."""
    world_name, seed, steps = job
    world = make_world(world_name, seed, steps)
    _freeze_imports()
    why = ""
    try:
        world.run()
    except Exception as exc:  # noqa: BLE001 - told together with the seed
        why = "".join(traceback.format_exception(exc))
    return world_name, seed, steps, dict(world.seen), why


@functools.cache
def _freeze_imports() -> None:
    """Take them out of collections of garbage, of which a world has one in each run."""
    gc.freeze()


def jobs(
    names: list[str], first: int, steps: int, seconds: float, most_steps: int
) -> Iterator[Job]:
    """Yield worlds and seeds in turn until the time is up, or the steps are given out."""
    limit = time.monotonic() + seconds
    runs = 0
    while time.monotonic() < limit and (not most_steps or runs * steps < most_steps):
        yield names[runs % len(names)], first + runs // len(names), steps
        runs += 1


def run_all(
    pool: futures.Executor, todo: Iterator[Job], most: int
) -> Iterator[tuple[str, int, int, dict[str, int], str]]:
    """Run jobs with at most *most* on their way, and yield what comes of them."""
    running = {pool.submit(run_one, job) for job in itertools.islice(todo, most)}
    while running:
        done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
        for each in done:
            yield each.result()
            running |= {pool.submit(run_one, job) for job in itertools.islice(todo, 1)}


def main(arguments: list[str] | None = None) -> int:
    """Run seeds; return 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.soak")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=200, help="acts of one run")
    parser.add_argument("--most-steps", type=int, default=0, help="stop behind so many")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--world", choices=sorted(WORLDS), help="instead of all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file for the result")
    given = parser.parse_args(arguments)
    names = [given.world] if given.world else sorted(WORLDS)
    if given.seed is not None:
        todo = iter([(name, given.seed, given.steps) for name in names])
    else:
        most = given.most_steps
        todo = jobs(names, given.first, given.steps, given.seconds, most)
    started = time.monotonic()
    seen: Counter[str] = Counter()
    steps = runs = 0
    failures: list[dict[str, object]] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules_of(names))  # once, and not in each process
    with futures.ProcessPoolExecutor(given.jobs, mp_context=context) as pool:
        for name, seed, count, what, why in run_all(pool, todo, 2 * given.jobs):
            runs, steps = runs + 1, steps + count
            seen.update({f"{name}: {key}": value for key, value in what.items()})
            if why:
                command = (
                    f"PYTHONHASHSEED={_HASH_SEED} python -m tests.simulation.soak "
                    f"--world {name} --seed {seed} --steps {count}"
                )
                failures.append({"command": command, "error": why})
                print(f"{why}\nrepeat: {command}", flush=True)
            if runs % 100 == 0:
                spent = time.monotonic() - started
                print(f"{spent:6.0f} s  {runs} runs  {steps} steps", flush=True)
            if len(failures) >= _FAILURES:
                break
    spent = time.monotonic() - started
    result = {
        "command": f"python -m tests.simulation.soak {' '.join(sys.argv[1:])}",
        "commit": _commit(),
        "python": platform.python_version(),
        "seconds": round(spent, 1),
        "worlds": names,
        "first_seed": given.first,
        "runs": runs,
        "steps": steps,
        "failures": failures,
        "seen": dict(sorted(seen.items())),
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result["seen"].items():
        print(f"{value:10}  {key}")
    print(f"{runs} runs, {steps} steps, {spent:.0f} s: {len(failures)} failed")
    return 1 if failures else 0


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        # Sets of strings are iterated in an order that a seed must fix as well.
        os.environ["PYTHONHASHSEED"] = _HASH_SEED
        os.execv(sys.executable, sys.orig_argv)
    sys.exit(main())
