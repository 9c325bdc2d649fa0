# SPDX-License-Identifier: Apache-2.0
"""
Replay traces of requests against a cache, in virtual time: what capacity and policy give.

The hit ratio is of tokens: those of the blocks found from the start of a prompt on, by
those of all prompts. All blocks of a prompt are stored at once when it has arrived. Run::

    python -m benchmarks.replay TRACE.jsonl --capacity 100GiB --block-bytes 64MiB
    python -m benchmarks.replay --generate mixed --policy ours,lru,optimal --json

A trace is a file as ``ucm.replay.traces`` says. Without capacities there are ten, from a
thousandth of the distinct blocks up to all of them.
"""

import argparse
import json
import re
import sys
import time
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

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_PLOTTED = ("lru", "ours", "newcomers", "second-use", "arc", "optimal")

Found = Mapping[str, Any]
"""What one trace came to: a row for each capacity and policy."""


class _Progress:
    """Tells on standard error how far a long replay is, once a second."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._told = time.monotonic()

    def step(self, what: str) -> None:
        """Count one more."""
        self._done += 1
        if time.monotonic() - self._told >= 1.0:
            self._told = time.monotonic()
            print(f"{self._done} of {self._total}: {what}", file=sys.stderr, flush=True)


# -- replaying ---------------------------------------------------------------------


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


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 64KiB or 100GiB")
    number, unit = found.groups()
    return int(float(number) * 1024 ** " KMGT".index(unit.upper() or " "))


def _sizes(text: str) -> list[int]:
    return [_size(each) for each in text.split(",")]


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise argparse.ArgumentTypeError(
                f"no policy is {name!r}; there are {known}"
            )
    return names


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
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
    add("--capacity", type=_sizes, default=[], help="bytes; several with commas")
    add("--block-bytes", type=_size, default=0, help="bytes of one block on all ranks")
    add("--policy", type=_policies, default=[*POLICIES], help="names with commas")
    add("--scenarios", action="store_true", help="also engines, retention, parts")
    add("--json", nargs="?", const="-", help="results, to a file or standard output")
    add("--plots", type=Path, help="folder for one SVG per trace")
    return parser


def _traces(arguments: argparse.Namespace) -> Iterator[Trace]:
    for path in arguments.traces:
        yield read(path, arguments.block_tokens)
    for name in arguments.generate:
        yield generate(
            name,
            minutes=arguments.minutes,
            rate=arguments.rate,
            seed=arguments.seed,
            block_tokens=arguments.block_tokens,
        )


def _capacities(arguments: argparse.Namespace, trace: Trace) -> list[int]:
    if arguments.capacity:
        return [size // arguments.block_bytes for size in arguments.capacity]
    return usual_capacities(trace)


def _tell(found: Found, *, block_bytes: int) -> None:
    print(
        f"\n{found['trace']}: {found['requests']} requests in {found['seconds']} s, "
        f"{found['distinct_blocks']} blocks of {found['block_tokens']} tokens, "
        f"{found['used_once']:.0%} of them used once\n"
    )
    print("Tokens found, of those asked for:\n")
    print(table(found))
    unit = f"GiB of {block_bytes} bytes a block" if block_bytes else "thousand blocks"
    factor = block_bytes / 2**30 if block_bytes else 1e-3
    print(f"\nWritten, in {unit}:\n")
    for capacity, rows in _by_capacity(found).items():
        cells = [
            f"{name} {row['written_blocks'] * factor:.1f}" for name, row in rows.items()
        ]
        print(f"  {capacity} blocks: " + ", ".join(cells))
    for finding in found.get("scenarios", []):
        print("  " + ", ".join(f"{name} {value}" for name, value in finding.items()))


def _run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for trace in _traces(arguments):
        capacities = _capacities(arguments, trace)
        progress = _Progress(len(capacities) * len(arguments.policy))
        found = replay(trace, capacities, arguments.policy, progress.step)
        if arguments.scenarios:
            middle = max(1, trace.distinct_blocks() // 20)
            found["scenario_capacity_blocks"] = middle
            found["scenarios"] = list(scenarios(trace, middle))
        results.append(found)
        if arguments.json != "-":
            _tell(found, block_bytes=arguments.block_bytes)
        if arguments.write:
            write(arguments.write, trace)
    return results


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.traces and not arguments.generate:
        raise TraceError("no trace: name a file, or --generate one")
    if arguments.capacity and not arguments.block_bytes:
        raise TraceError("--capacity needs --block-bytes, the bytes of one block")
    if any(size < max(1, arguments.block_bytes) for size in arguments.capacity):
        raise TraceError("--capacity holds no block of --block-bytes")


def _save(results: Sequence[Found], arguments: argparse.Namespace) -> None:
    text = json.dumps(results, indent=1)
    if arguments.json == "-":
        print(text)
    elif arguments.json:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        for name, drawn in plots(results).items():
            (arguments.plots / name).write_text(drawn, encoding="utf-8")


def main(words: Sequence[str] | None = None) -> None:
    """Replay what the command line says; exit with 2 and one line if that is wrong."""
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        _check(arguments)
        _save(_run(arguments), arguments)
    except TraceError as error:
        print(f"replay: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"replay: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
