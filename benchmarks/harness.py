# SPDX-License-Identifier: Apache-2.0
"""
What all benchmarks share: pairing, figures, the results file and the command line.

Sides are measured in turn, forwards and then backwards (A B B A), so that a machine
that slows down meanwhile slows all of them. What counts is the ratio of two sides
within one sample; a figure tells its median, lowest and highest.
"""

import argparse
import contextlib
import gc
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure, Note, Results, Told
from benchmarks.shared_memory import PAGES, enter
from ucm.blocks import GroupId, KeyPacker, PackedKey, ShardId

__all__ = [
    "Clock",
    "Figure",
    "Note",
    "Scale",
    "Side",
    "Times",
    "Told",
    "compare",
    "freeze_garbage",
    "latencies",
    "main",
    "make_keys",
    "ratio",
    "run_of",
    "speed",
]

Side = Callable[[int], Callable[[], object]]
"""Given a number that is new each time, prepares a call; only the call is timed."""
Times = Mapping[str, Sequence[float]]
"""Seconds of each side in each sample."""
_PACKER = KeyPacker(bytes(16), GroupId(0), ShardId(0))
_PACKAGES = ("numpy", "torch", "xxhash", "anyio", "msgspec", "attrs")


def make_keys(first: int, count: int) -> list[PackedKey]:
    """Return packed keys of 32-byte hashes that differ for each number."""
    numbers = range(first, first + count)
    return _PACKER.pack(number.to_bytes(32, "big") for number in numbers)


class Scale(NamedTuple):
    """How much to measure."""

    samples: int
    repeats: int
    is_quick: bool
    directory: Path
    rounds: int = 0
    """Rounds of engines, each side forwards and backwards; 0: the case's own number."""


Clock = Callable[[], float]
"""Tells seconds."""


def compare(
    sides: Mapping[str, Side], scale: Scale, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """
    Measure all sides in turn, forwards and backwards, in each sample.

    Args:
        sides: What to measure.
        scale: How often.
        clock: Of what waits for nothing, ``time.thread_time`` tells it beside others who
            compute.
    """
    numbers = itertools.count()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():  # warms up
        side(next(numbers))()
    for _ in range(scale.samples):
        sums = dict.fromkeys(sides, 0.0)
        for name in (*sides, *reversed(sides)):
            sums[name] += statistics.median(
                _timed(sides[name](next(numbers)), clock) for _ in range(scale.repeats)
            )
        for name, spent in sums.items():
            taken[name].append(spent / 2)
    return taken


def _timed(call: Callable[[], object], clock: Clock) -> float:
    start = clock()
    call()
    return clock() - start


def ratio(
    times: Times, ours: str, reference: str, case: str, target: str = ""
) -> Figure:
    """Return the speed of one side as a share of another's."""
    pairs = zip(times[ours], times[reference], strict=True)
    values = [theirs / mine for mine, theirs in pairs]
    return Figure.over(case, f"{ours} / {reference}", "ratio", values, target)


def speed(times: Times, side: str, case: str, nbytes: int) -> Figure:
    """Return the speed of one side, for orientation only."""
    values = [nbytes / spent / 1e9 for spent in times[side]]
    return Figure.over(case, side, "GB/s", values)


def freeze_garbage() -> None:
    """
    Let the collector pass over all that is there already, as engines do at start.

    A full collection over an imported engine takes a quarter of a second.
    """
    gc.collect()
    gc.freeze()


def latencies(
    case: str,
    what: str,
    rounds: Sequence[Sequence[float]],
    targets: tuple[str, str] = ("", ""),
) -> Iterator[Figure]:
    """
    Return the median (us) and the 99th percentile (ms) of a call.

    Args:
        case: What goes on meanwhile.
        what: Name of the call.
        rounds: Seconds of each call, in rounds; a figure is taken over the rounds.
        targets: Of the two.
    """
    medians = [statistics.median(taken) * 1e6 for taken in rounds]
    highest = [sorted(taken)[len(taken) * 99 // 100] * 1e3 for taken in rounds]
    yield Figure.over(case, f"{what}, median", "us", medians, targets[0])
    yield Figure.over(case, f"{what}, p99", "ms", highest, targets[1])


def run_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return what a result says of how it was made: by this command, of this commit."""
    return {
        "command": " ".join([parser.prog, *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD"),
        "python": platform.python_version(),
    }


def _environment(mounted: str) -> dict[str, object]:
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.split(":")[1].strip() for line in cpus if "model name" in line)
    return {
        "cpu": next(models, platform.machine()),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--", "ucm")),
        "load_before": os.getloadavg(),
        "shared_memory": mounted,
    }


def _versions() -> dict[str, str]:
    """Return what is installed of what figures depend on, peers among it."""
    found = {}
    for name in (*_PACKAGES, "lmcache"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def main(
    name: str,
    cases: Mapping[str, Callable[[Scale], Told]],
    arguments: Sequence[str] | None = None,
) -> None:
    """
    Run the cases of one benchmark, print a table and write the results.

    Args:
        name: Of the benchmark.
        cases: What to measure; each yields its figures.
        arguments: Of the command line; the process's own if not given.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--rounds", type=int, default=0, help="of engines, if any run")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--directory",
        type=Path,
        default="/var/tmp",
        help="on a disk, for what lies there",
    )
    parser.add_argument(
        "--go-on", action="store_true", help="with the cases that --json does not have"
    )
    parser.add_argument(
        "--pages", choices=PAGES, default=PAGES[0], help="of shared memory, if possible"
    )
    given = parser.parse_args(arguments)
    mounted = enter(given.pages if arguments is None else PAGES[1])
    chosen = {case: run for case, run in cases.items() if given.only in case}
    if not chosen:
        parser.error(f"--only {given.only}: the cases are {', '.join(cases)}")
    samples, repeats = (2, 2) if given.quick else (7, 5)
    scale = Scale(samples, repeats, given.quick, given.directory, given.rounds)
    results = Results(
        {
            "benchmark": name,
            "is_quick": given.quick,
            "only": given.only,
            "environment": _environment(mounted),
            "samples": samples,
            "repeats": repeats,
            "rounds": given.rounds,
        },
        given.json,
    )
    ended = results.go_on() if given.go_on else ()
    left = [case for case in chosen if case not in ended]
    print(
        f"{'case':34} {'what':38} {'unit':6}     median        low       high  target"
    )
    for at, case in enumerate(left, 1):
        results.add(case, chosen[case](scale), left[at:])
        gc.unfreeze()
