# SPDX-License-Identifier: Apache-2.0
"""
Writes ``docs/benchmarks.md`` and its plots from ``benchmarks/results/*.json``.

Run ``python -m benchmarks.report``; nothing is measured. Targets that were missed come
first. A result that was made with ``--quick``, or of some cases only, is called so.
"""

import argparse
import html
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

__all__ = ["ROOT", "Benchmark", "Result", "pages", "read_results", "write"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@attrs.frozen
class Benchmark:
    """
    One benchmark and how to run it.

    Args:
        name: Of its module.
        title: Of its section.
        minutes: About how long it runs.
        needs: What has to be installed besides ucm.
    """

    name: str
    title: str
    minutes: int
    needs: str = ""

    @property
    def command(self) -> str:
        """How its results are made."""
        return f"python -m benchmarks.{self.name} --json benchmarks/results/{self.name}.json"


BENCHMARKS = (
    Benchmark("gather", "Device copies", 1),
    Benchmark("stores", "Slab store", 2),
    Benchmark("lookup", "Prefix match", 1),
    Benchmark("engine_thread", "Cost on the engine's threads", 5),
    Benchmark("lives", "What a request's life costs", 1, "vllm"),
    Benchmark("embed", "What a save costs a host's loop", 6),
    Benchmark("tiers", "Below the slab", 30),
    Benchmark("faults", "Faults below the slab", 10, "vllm"),
    Benchmark("pipeline", "Pipeline, end to end", 10),
    Benchmark("engine", "The real engine", 60, "vllm"),
    Benchmark("decode", "An engine full of decoding requests", 20, "vllm"),
    Benchmark(
        "abreast", "An engine full of decoding requests, sides in turn", 20, "vllm"
    ),
    Benchmark("loads", "Loads and saves of an accelerator, beside a busy engine", 1),
    Benchmark("load", "Requests per second without reuse", 5, "vllm"),
    Benchmark("trace_cost", "What tracing costs", 10, "vllm"),
)

Result = Mapping[str, Any]
"""What ``harness.main`` wrote."""
Figure = Mapping[str, Any]


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the committed results by benchmark, of those this report knows."""
    found = {}
    for benchmark in BENCHMARKS:
        path = folder / f"{benchmark.name}.json"
        if path.is_file():
            found[benchmark.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _cell(figure: Figure) -> str:
    unit = "" if figure["unit"] == "ratio" else f" {figure['unit']}"
    low, high = number(figure["low"]), number(figure["high"])
    return f"{number(figure['median'])}{unit} | {low} to {high}"


def _bound(figure: Figure) -> str:
    return str(figure["target"]).replace("<=", "≤").replace(">=", "≥")


def _verdict(figure: Figure) -> str:
    return {"met": "met", "missed": "**missed**", "": ""}[figure["verdict"]]


def _summary(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield all figures with a target, the missed ones first."""
    judged = [
        (benchmark, figure)
        for benchmark in BENCHMARKS
        for figure in results.get(benchmark.name, {}).get("figures", [])
        if figure["target"]
    ]
    if not judged:
        yield "Nothing was measured yet.\n"
        return
    for verdict, title in (("missed", "Targets missed"), ("met", "Targets met")):
        rows = [pair for pair in judged if pair[1]["verdict"] == verdict]
        yield f"## {title}: {len(rows)} of {len(judged)}\n"
        if not rows:
            continue
        yield "| benchmark | case | what | median | range | target |"
        yield "|---|---|---|---|---|---|"
        for benchmark, figure in rows:
            yield (
                f"| [{benchmark.name}](#{_anchor(benchmark.title)}) | {figure['case']} "
                f"| {figure['what']} | {_cell(figure)} | {_bound(figure)} |"
            )
        yield ""


def _anchor(title: str) -> str:
    kept = (c for c in title.lower() if c.isalnum() or c in " -")
    return "".join(kept).replace(" ", "-")


def _section(benchmark: Benchmark, result: Result | None) -> Iterator[str]:
    yield f"## {benchmark.title}\n"
    needs = f"; needs {benchmark.needs}" if benchmark.needs else ""
    yield f"About {benchmark.minutes} min{needs}:\n"
    yield f"```sh\n{benchmark.command}\n```\n"
    if result is None:
        yield "Not measured yet.\n"
        return
    yield from _environment(result)
    if any(figure["target"] for figure in result["figures"]):
        yield f"![Targets of {benchmark.name}](benchmarks/{benchmark.name}.svg)\n"
    yield "| case | what | median | range | target | verdict |"
    yield "|---|---|---|---|---|---|"
    for figure in result["figures"]:
        yield (
            f"| {figure['case']} | {figure['what']} | {_cell(figure)} "
            f"| {_bound(figure)} | {_verdict(figure)} |"
        )
    yield ""
    for note in result["notes"]:
        yield f"- {note['case']}: {note['text']}"
    if result["notes"]:
        yield ""


def _environment(result: Result) -> Iterator[str]:
    told = result["environment"]
    versions = ", ".join(
        f"{name} {version}" for name, version in told["versions"].items()
    )
    changed = ", ucm modified since" if told["modified"] else ""
    yield (
        f"{told['cpu']}, {told['cores']} cores, Linux {told['kernel']}, Python "
        f"{told['python']}, {versions}; commit {told['commit'][:12]}{changed}; load "
        f"before {told['load_before'][0]:.1f}; {_pages(told)}{result['samples']} samples of "
        f"{result['repeats']} in {result['seconds']:.0f} s.\n"
    )
    if result["is_quick"] or result["only"]:
        yield "**A quick or partial run: not to be relied upon.**\n"
    if left := result.get("left"):
        yield f"**Not measured: {', '.join(left)}.**\n"


def _pages(told: Mapping[str, Any]) -> str:
    """Say in which pages shared memory came; nothing where nobody wrote that down."""
    mounted = told.get("shared_memory")
    if mounted is None:
        return ""
    return f"shared memory in {'huge' if 'huge=' in mounted else 'small'} pages; "


def page(results: Mapping[str, Result]) -> str:
    """Return the text of ``docs/benchmarks.md``."""
    lines = [
        "<!-- Written by `python -m benchmarks.report`; do not edit. -->",
        "# Benchmarks\n",
        (
            "What counts is the ratio of two sides that were measured in turn, forwards and "
            "backwards, in one run; absolute numbers are for orientation. Each figure is a "
            "median with the lowest and the highest sample. `benchmarks/` says in each "
            "module what exactly is done.\n"
        ),
        *_summary(results),
    ]
    for benchmark in BENCHMARKS:
        lines += _section(benchmark, results.get(benchmark.name))
    return "\n".join(lines).rstrip() + "\n"


# -- plots -------------------------------------------------------------------------

_WIDTH, _LABELS, _BAR, _GAP = 860, 400, 14, 8
_MET, _MISSED, _INK = "#2a7f62", "#c0392b", "#333333"


def _shares(figures: Iterable[Figure]) -> Iterator[tuple[str, float, str, str]]:
    """Yield label, share of the target, numbers and verdict of each target."""
    for figure in figures:
        if figure["target"]:
            bound = float(figure["target"].split()[1])
            label = f"{figure['case']}: {figure['what']}"
            text = f"{number(figure['median'])} {figure['unit']} ({_bound(figure)})"
            share = figure["median"] / bound if bound else 2.0 * figure["median"]
            yield label, share, text, figure["verdict"]


def plot(result: Result) -> str:
    """Return an SVG with a bar for each target, as a share of the target."""
    bars = list(_shares(result["figures"]))
    room = _WIDTH - _LABELS - 190
    unit = room / 2.5  # pixels of a share of 1
    height = (len(bars) + 1) * (_BAR + _GAP) + 30
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">'
        ),
        (
            f"<title>{html.escape(result['benchmark'])}: medians as a share of the target"
            "</title>"
        ),
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for at, (label, share, text, verdict) in enumerate(bars):
        y = 24 + at * (_BAR + _GAP)
        length = unit * min(max(share, 0.0), 2.5)
        colour = _MET if verdict == "met" else _MISSED
        middle = y + _BAR - 3
        parts += [
            (
                f'<text x="{_LABELS - 6}" y="{middle}" fill="{_INK}" text-anchor="end">'
                f"{html.escape(label)}</text>"
            ),
            (
                f'<rect x="{_LABELS}" y="{y}" width="{length:.1f}" height="{_BAR}" '
                f'fill="{colour}"/>'
            ),
            (
                f'<text x="{_LABELS + length + 5:.1f}" y="{middle}" fill="{_INK}">'
                f"{html.escape(text)}</text>"
            ),
        ]
    line = _LABELS + unit
    parts += [
        (
            f'<line x1="{line:.1f}" y1="16" x2="{line:.1f}" y2="{height - 6}" '
            f'stroke="{_INK}" stroke-dasharray="3 3"/>'
        ),
        f'<text x="{line:.1f}" y="12" fill="{_INK}" text-anchor="middle">target</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def pages(results: Mapping[str, Result]) -> dict[str, str]:
    """Return every generated file: path below ``docs`` to text."""
    plots = {
        f"benchmarks/{name}.svg": plot(result)
        for name, result in results.items()
        if any(figure["target"] for figure in result["figures"])
    }
    return {"benchmarks.md": page(results), **plots}


def write(folder: Path = ROOT / "docs") -> None:
    """Write the generated files, and remove plots of results that are gone."""
    made = pages(read_results())
    for old in (folder / "benchmarks").glob("*.svg"):
        if f"benchmarks/{old.name}" not in made:
            old.unlink()
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write()
