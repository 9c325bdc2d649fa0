# SPDX-License-Identifier: Apache-2.0
"""
Applies each mutant to a copy of the tree and sees that its killers fail.

Outcomes of a mutant::

    killed    every killer ran and failed
    hung      the killers did not end in time; counts as killed
    survived  a killer passed, or did not run: an import that breaks proves nothing
    stale     the text to replace is not in the file exactly once

Run ``python -m tests.mutations.run``, or ``make mutations``. The tree itself is never
changed. First of all the killers must pass on a copy without an edit. Most of the time goes
to killers that wait for what no longer comes, so that more run at a time than there are CPUs.
"""

import argparse
import contextlib
import enum
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Self

import attrs

from tests.mutations.mutants import MUTANTS, ROOT, Mutant, StaleError

__all__ = ["BaselineError", "Outcome", "Result", "Trees", "main", "try_out"]

_COPIED = (
    *("ucm", "tests", "benchmarks", "scripts", "examples", "docs", "constraints"),
    *("pyproject.toml", "README.md"),
)
_BASELINE_S = 300.0
_DEADLINE_S = 60.0
_FAILED = 1  # of pytest's exit statuses the one that says that tests ran and failed
_FOREIGN = 9

# `find_spec` does not run the package, so that a mutant cannot end it here.
_LAUNCH = f"""
import importlib.util, os, pytest, sys
spec = importlib.util.find_spec("ucm")
own = os.path.realpath("ucm/__init__.py")
is_own = spec is not None and os.path.realpath(spec.origin) == own
sys.exit(pytest.main(sys.argv[1:]) if is_own else {_FOREIGN})
"""
_OPTIONS = (
    *("-q", "-rfE", "--tb=no", "--color=no", "-p", "no:cacheprovider"),
    # Deadlines are ours: a test that hangs is told apart from one that fails.
    *("-o", "timeout=0", "--hypothesis-seed=0"),
)


class Outcome(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    HUNG = "hung"
    CRASHED = "crashed"
    SURVIVED = "survived"
    STALE = "stale"

    @property
    def is_noticed(self) -> bool:
        """Whether the tests do what they are for."""
        return self in (Outcome.KILLED, Outcome.HUNG, Outcome.CRASHED)


@attrs.frozen
class Result:
    """
    A mutant's fate.

    Args:
        mutant: Which.
        outcome: What became of it.
        seconds: How long that took.
        told: The end of pytest's output.
    """

    mutant: Mutant
    outcome: Outcome
    seconds: float
    told: str = ""


class BaselineError(Exception):
    """A killer does not pass on the tree as it is."""


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for name in _COPIED:
        if (source / name).is_dir():
            # Without compiled files: others may be writing them just now.
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source / name, target / name, ignore=ignored)
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


def _pytest(tree: Path, tests: Iterable[str], timeout: float) -> tuple[int | None, str]:
    """Run tests of a copy; return pytest's exit status, None if it hung, and output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "COV_", "PYTHONDONTWRITEBYTECODE"))
    }
    environment["PYTHONPATH"] = str(tree)
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, *_OPTIONS, *tests],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its children end with it
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
    return process.returncode, output


def _has_failed(killer: str, output: str) -> bool:
    """Return whether pytest's summary names a killer, or it with some parameters."""
    named = f"FAILED {killer}"
    return any(
        line.startswith(named) and line[len(named) : len(named) + 1] in ("", " ", "[")
        for line in output.splitlines()
    )


def _judge(mutant: Mutant, status: int | None, output: str) -> Outcome:
    if status is None:
        return Outcome.HUNG
    if status in {-signal.SIGSEGV, -signal.SIGBUS}:
        return Outcome.CRASHED
    noticed = all(_has_failed(killer, output) for killer in mutant.killers)
    return Outcome.KILLED if status == _FAILED and noticed else Outcome.SURVIVED


def _write(file: Path, text: str) -> None:
    """Change a source file; its size and second alone would not tell of that."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def try_out(mutant: Mutant, tree: Path, deadline: float = _DEADLINE_S) -> Result:
    """Apply a mutant to a copy, run its killers there, and put the copy right again."""
    started = time.monotonic()
    file = tree / mutant.file
    try:
        edited = mutant.apply(tree)
    except StaleError as exc:
        return Result(mutant, Outcome.STALE, 0.0, str(exc))
    whole = file.read_text()
    try:
        _write(file, edited)
        status, output = _pytest(tree, mutant.killers, deadline)
    finally:
        _write(file, whole)
    outcome = _judge(mutant, status, output)
    return Result(mutant, outcome, time.monotonic() - started, output[-2000:])


class Trees:
    """
    Copies of the tree, each used by one mutant at a time.

    Args:
        root: The tree.
        count: How many copies.
    """

    def __init__(self, root: Path, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ucm-mutations-")
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self.paths = [Path(self._folder.name) / str(at) for at in range(count)]
        for path in self.paths:
            _copy(root, path)
            self._free.put(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @contextlib.contextmanager
    def one(self) -> Iterator[Path]:
        """Lend a copy."""
        path = self._free.get()
        try:
            yield path
        finally:
            self._free.put(path)

    def check_baseline(self, mutants: Iterable[Mutant]) -> None:
        """
        See that all killers pass without an edit.

        Raises:
            BaselineError: They do not; says which.
        """
        killers = list(dict.fromkeys(name for each in mutants for name in each.killers))
        step = -(-len(killers) // len(self.paths))
        parts = [killers[at : at + step] for at in range(0, len(killers), step)]
        limit = _BASELINE_S + step  # a second is what few take
        with futures.ThreadPoolExecutor(len(parts)) as pool:
            told = pool.map(_pytest, self.paths, parts, [limit] * len(parts))
            for status, output in told:
                if status != 0:
                    why = f"pytest ended with {status}\n{output[-4000:]}"
                    raise BaselineError(why)

    def run(self, mutant: Mutant) -> Result:
        """Try a mutant out on whichever copy is free."""
        with self.one() as tree:
            return try_out(mutant, tree)


def _run_all(trees: Trees, mutants: Sequence[Mutant], jobs: int) -> list[Result]:
    """Try all out, and tell of each when it is through."""
    results = []
    pool = futures.ThreadPoolExecutor(jobs)
    try:
        waiting = [pool.submit(trees.run, mutant) for mutant in mutants]
        for at, future in enumerate(futures.as_completed(waiting), start=1):
            result = future.result()
            results.append(result)
            print(
                f"{at:3}/{len(mutants)}  {result.outcome.value:8} "
                f"{result.seconds:5.1f} s  {result.mutant.name:28} "
                f"{result.mutant.file}",
                flush=True,
            )
            if not result.outcome.is_noticed:
                print(f"{result.mutant.why}\n{result.told}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # whoever interrupts waits for no more
    return sorted(results, key=lambda result: mutants.index(result.mutant))


def _as_json(results: Iterable[Result], seconds: float) -> str:
    told = {
        "seconds": round(seconds, 1),
        "mutants": [
            {
                **attrs.asdict(result.mutant),
                "outcome": result.outcome.value,
                "seconds": round(result.seconds, 2),
            }
            for result in results
        ],
    }
    return json.dumps(told, indent=1) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Try mutants out; return 1 unless every one is noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run")
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=3 * (os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="file for the result")
    given = parser.parse_args(arguments)
    mutants = [each for each in MUTANTS if not given.only or each.name in given.only]
    started = time.monotonic()
    with Trees(ROOT, max(1, given.jobs)) as trees:
        try:
            trees.check_baseline(mutants)
        except BaselineError as exc:
            print(f"the killers do not pass on the tree as it is: {exc}")
            return 1
        results = _run_all(trees, mutants, max(1, given.jobs))
    spent = time.monotonic() - started
    if given.json:
        given.json.write_text(_as_json(results, spent))
    counts = Counter(result.outcome.value for result in results)
    words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    print(f"{len(results)} mutants in {spent:.0f} s: {words}")
    return 0 if all(result.outcome.is_noticed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
