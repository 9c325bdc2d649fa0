# SPDX-License-Identifier: Apache-2.0
"""What a benchmark tells: figures and notes, and the file in which they are kept."""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Figure", "Note", "Results", "Told"]


class Figure(NamedTuple):
    """
    One number of a benchmark.

    ``target`` is empty, or a bound that ``median`` is held against, such as
    ``>= 0.65``.
    """

    case: str
    what: str
    unit: str
    median: float
    low: float
    high: float
    target: str = ""

    @property
    def verdict(self) -> str:
        """Say whether the target is met; empty without one."""
        if not self.target:
            return ""
        sign, bound = self.target.split()
        met = (
            self.median >= float(bound) if sign == ">=" else self.median <= float(bound)
        )
        return "met" if met else "missed"

    @classmethod
    def over(
        cls, case: str, what: str, unit: str, values: Sequence[float], target: str = ""
    ) -> "Figure":
        """Return the median, lowest and highest of *values*."""
        low, high = min(values), max(values)
        return cls(case, what, unit, statistics.median(values), low, high, target)


class Note(NamedTuple):
    """Something to know about a case that is no number, such as an absent side."""

    case: str
    text: str


Told = Iterator[Figure | Note]
"""What a case yields."""


class Results:
    """
    What a benchmark has told so far, in its file as soon as a case has ended.

    Args:
        told: All but figures, notes and seconds.
        path: The file; None keeps nothing.
    """

    def __init__(self, told: Mapping[str, object], path: Path | None) -> None:
        self._told = told
        self._path = path
        self._started = time.monotonic()
        self._seconds = 0.0
        self._cases: list[str] = []
        self._figures: list[Figure] = []
        self._notes: list[Note] = []

    def go_on(self) -> Sequence[str]:
        """
        Take over what the file has, and return the cases that had ended.

        Raises:
            SystemExit: It is of another commit or machine, or was measured otherwise.
        """
        if self._path is None or not self._path.is_file():
            return ()
        found = json.loads(self._path.read_text())
        here, there = _comparable(self._told), _comparable(found)
        if here != there:
            raise SystemExit(f"{self._path} is of {there}, and this is {here}")
        for each in found["figures"]:
            del each["verdict"]
            self._figures.append(Figure(**each))
        self._notes += [Note(**note) for note in found["notes"]]
        self._cases += found["cases"]
        self._seconds = found["seconds"]
        return tuple(self._cases)

    def add(self, case: str, told: Told, left: Sequence[str]) -> None:
        """
        Print what a case tells, and write it down once the case has ended.

        Args:
            case: Its name.
            told: Is raised from as well.
            left: Cases that are still to come.
        """
        figures, notes = [], []
        for each in told:
            if isinstance(each, Note):
                notes.append(each)
                print(f"{each.case:34} {each.text}", flush=True)
            else:
                figures.append(each)
                _print(each)
        self._figures += figures
        self._notes += notes
        self._cases.append(case)
        if self._path is not None:
            self._write(self._path, left)

    def _write(self, path: Path, left: Sequence[str]) -> None:
        seconds = self._seconds + time.monotonic() - self._started
        results = {
            **self._told,
            "seconds": round(seconds, 1),
            "cases": self._cases,
            "left": list(left),
            "figures": [
                {**figure._asdict(), "verdict": figure.verdict}
                for figure in self._figures
            ],
            "notes": [note._asdict() for note in self._notes],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(results, indent=1) + "\n")
        new.replace(path)


def _comparable(told: Any) -> dict[str, object]:  # noqa: ANN401 - as read
    """Return what has to be the same for figures to stand in one file."""
    names = ("commit", "modified", "cores", "shared_memory", "versions")
    environment = {name: told["environment"].get(name) for name in names}
    return environment | {name: told[name] for name in ("is_quick", "only", "rounds")}


def _print(figure: Figure) -> None:
    numbers = f"{figure.median:10.3f} {figure.low:10.3f} {figure.high:10.3f}"
    verdict = f"{figure.target} {figure.verdict}".strip()
    row = f"{figure.case:34} {figure.what:38} {figure.unit:6} {numbers}  {verdict}"
    print(row.rstrip(), flush=True)
