# SPDX-License-Identifier: Apache-2.0
"""
What capacity and policy give, over traces that are read or made up: tables, plots, scenarios.

``ucm replay`` answers for one trace and for sizes in bytes; here are the capacities that it takes
by itself, a thousandth of the distinct blocks up to all of them, and what its models tell besides. Run::

    python -m benchmarks.replay TRACE.jsonl --scenarios
    python -m benchmarks.replay --generate mixed --policy ours --policy optimal --json results.json

A trace is a file as ``ucm.replay.traces`` says.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.curves import draw
from benchmarks.scenarios import scenarios
from benchmarks.workloads import WORKLOADS, generate, write
from ucm.replay.policies import POLICIES
from ucm.replay.replaying import replay, usual_capacities
from ucm.replay.traces import Trace, TraceError, read

__all__ = ["main", "plots", "table"]

_PLOTTED = ("lru", "ours", "newcomers", "second-use", "arc", "optimal")

Found = Mapping[str, Any]
"""What one trace came to: a row for each capacity and policy."""


def _by_capacity(found: Found) -> dict[int, dict[str, Any]]:
    capacities: dict[int, dict[str, Any]] = {}
    for row in found["rows"]:
        capacities.setdefault(row["capacity_blocks"], {})[row["policy"]] = row
    return capacities


def table(found: Found) -> str:
    """Return the ratios of a trace as a table, in Markdown."""
    capacities = _by_capacity(found)
    names = list(next(iter(capacities.values())))
    lines = [
        "| blocks | of all | " + " | ".join(names) + " |",
        "|--:|--:|" + "--:|" * len(names),
    ]
    for capacity, rows in capacities.items():
        share = next(iter(rows.values()))["share_percent"]
        cells = [f"{rows[name]['ratio']:.4f}" for name in names]
        lines.append(f"| {capacity} | {share:.3g} % | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plots(results: Sequence[Found]) -> dict[str, str]:
    """Return an SVG for each trace, by the name of its file."""
    made = {}
    for found in results:
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in found["rows"]:
            if row["policy"] in _PLOTTED:
                point = (row["share_percent"], row["ratio"])
                curves.setdefault(row["policy"], []).append(point)
        if curves:
            name = found["trace"].replace(" ", "_")
            title = f"{found['trace']}: tokens found of tokens asked for"
            made[f"{name}.svg"] = draw(title, curves)
    return made


# -- the command -------------------------------------------------------------------


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:  # nor is NaN
        raise ValueError
    return number


def _count(text: str) -> int:
    return int(_positive(text)) or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("traces", nargs="*", type=Path, metavar="TRACE", help="files of requests")
    add("--generate", choices=WORKLOADS, action="append", default=[], help="made up")
    add("--minutes", type=_positive, default=60.0, help="length of what is made up")
    add("--rate", type=_positive, default=1.0, help="its sessions per second")
    add("--seed", type=int, default=1, help="of its random numbers")
    add("--write", type=Path, help="file for the last trace, to be replayed again")
    add("--block-tokens", type=_count, default=512, help="tokens of one hash id")
    add("--policy", choices=POLICIES, action="append", help="all if left out")
    add("--scenarios", action="store_true", help="also engines, retention, parts")
    add("--json", type=Path, help="file for the results")
    add("--plots", type=Path, help="folder for one SVG per trace")
    return parser


def _traces(given: argparse.Namespace) -> Iterator[Trace]:
    for path in given.traces:
        yield read(path, given.block_tokens)
    for name in given.generate:
        yield generate(
            name,
            minutes=given.minutes,
            rate=given.rate,
            seed=given.seed,
            block_tokens=given.block_tokens,
        )


def _tell(found: Found) -> None:
    print(
        f"\n{found['trace']}: {found['requests']} requests in {found['seconds']} s, "
        f"{found['distinct_blocks']} blocks of {found['block_tokens']} tokens, "
        f"{found['used_once']:.0%} of them used once\n"
    )
    print("Tokens found, of those asked for:\n")
    print(table(found))
    print("\nWritten, in thousand blocks:\n")
    for capacity, rows in _by_capacity(found).items():
        cells = [
            f"{name} {row['written_blocks'] / 1e3:.1f}" for name, row in rows.items()
        ]
        print(f"  {capacity} blocks: " + ", ".join(cells))
    for finding in found.get("scenarios", []):
        print("  " + ", ".join(f"{name} {value}" for name, value in finding.items()))


def _run(given: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for trace in _traces(given):
        found = replay(
            trace,
            usual_capacities(trace),
            given.policy or [*POLICIES],
            lambda done: print(done, file=sys.stderr, flush=True),
        )
        if given.scenarios:
            middle = max(1, trace.distinct_blocks() // 20)
            found["scenario_capacity_blocks"] = middle
            found["scenarios"] = list(scenarios(trace, middle))
        results.append(found)
        _tell(found)
        if given.write:
            write(given.write, trace)
    return results


def _save(results: Sequence[Found], given: argparse.Namespace) -> None:
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if given.plots:
        given.plots.mkdir(parents=True, exist_ok=True)
        for name, drawn in plots(results).items():
            (given.plots / name).write_text(drawn, encoding="utf-8")


def main(words: Sequence[str] | None = None) -> None:
    """Replay what the command line says."""
    given = _parser().parse_args(words)
    if not (given.traces or given.generate):
        raise SystemExit("replay: no trace: name a file, or --generate one")
    try:
        _save(_run(given), given)
    except (TraceError, OSError) as error:
        raise SystemExit(f"replay: {error}") from None


if __name__ == "__main__":
    main()
