# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and the committed page tells what the committed results say."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import (
    decode,
    engine,
    engine_thread,
    gather,
    harness,
    load,
    lookup,
    pipeline,
    report,
    stores,
)

CASES = {
    module.__name__.split(".")[1]: module.CASES
    for module in (
        decode,
        engine,
        engine_thread,
        gather,
        load,
        lookup,
        pipeline,
        stores,
    )
}
SMALLEST = {
    "gather": "alone 64 KB, padded",
    "stores": "memory 2 MB",
    "lookup": "small",
    "engine_thread": "submit idle",
    "pipeline": "memory",
}
"""One case of each benchmark that starts no engine."""


def figure(what: str, verdict: str) -> dict[str, object]:
    """Return a figure as a results file has it."""
    numbers = {"median": 0.5, "low": 0.4, "high": 0.6}
    target = ">= 0.6" if verdict == "missed" else ">= 0.4"
    named = {"case": "a case", "what": what, "unit": "ratio"}
    return {**named, **numbers, "target": target, "verdict": verdict}


def result(*figures: dict[str, object], is_quick: bool = False) -> dict[str, object]:
    """Return what a run of ``stores`` leaves behind."""
    return {
        "benchmark": "stores",
        "is_quick": is_quick,
        "only": "",
        "environment": {
            "cpu": "a processor",
            "cores": 2,
            "kernel": "6.1",
            "python": "3.11.7",
            "versions": {"numpy": "2.3"},
            "commit": "0123456789abcdef",
            "modified": False,
            "load_before": [0.1, 0.2, 0.3],
        },
        "samples": 7,
        "repeats": 5,
        "seconds": 60.0,
        "figures": list(figures),
        "notes": [{"case": "a case", "text": "a peer is absent"}],
    }


class TestReport:
    def test_committed_page_and_plots_are_those_of_the_committed_results(self) -> None:
        """Nobody edits the page by hand, and no new results lie about without it."""
        docs = report.ROOT / "docs"
        plots = (docs / "benchmarks").glob("*")
        committed = {
            path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8")
            for path in [docs / "benchmarks.md", *plots]
        }
        assert committed == report.pages(report.read_results())

    def test_missed_target_stands_before_met_ones_and_in_its_table(self) -> None:
        """A reader who stops early has seen what is not good enough."""
        made = report.pages(
            {"stores": result(figure("fine", "met"), figure("bad", "missed"))}
        )
        page = made["benchmarks.md"]
        assert 0 < page.index("Targets missed: 1 of 2") < page.index("| bad |")
        assert page.index("| bad |") < page.index("Targets met: 1 of 2")
        assert "| ≥ 0.6 | **missed** |" in page
        assert "a peer is absent" in page

    def test_quick_run_is_called_one(self) -> None:
        """Numbers that were made in a hurry do not pass for real ones."""
        quick = report.pages({"stores": result(is_quick=True)})["benchmarks.md"]
        whole = report.pages({"stores": result()})["benchmarks.md"]
        assert "A quick or partial run" in quick
        assert "A quick or partial run" not in whole

    def test_plot_has_a_bar_for_each_target_only(self) -> None:
        """Figures for orientation are not held against anything."""
        free = {**figure("free & easy", "met"), "target": "", "verdict": ""}
        made = report.pages({"stores": result(figure("a < b", "met"), free)})
        plot = made["benchmarks/stores.svg"]
        assert "a case: a &lt; b</text>" in plot
        assert "easy" not in plot


class TestCommandLine:
    @pytest.mark.parametrize("name", [each.name for each in report.BENCHMARKS])
    def test_help_is_told(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The command that the page names for a benchmark starts."""
        with pytest.raises(SystemExit, match="0"):
            harness.main(name, CASES[name], ["--help"])
        assert f"benchmarks.{name}" in capsys.readouterr().out

    def test_unknown_case_is_refused_with_the_known_ones(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A misspelt case measures nothing rather than everything."""
        with pytest.raises(SystemExit, match="2"):
            harness.main("stores", {"memory": lambda _: iter(())}, ["--only", "disc"])
        assert "the cases are memory" in capsys.readouterr().err

    @pytest.mark.slow
    @pytest.mark.parametrize("name", sorted(SMALLEST))
    def test_smallest_case_gives_finite_figures(
        self, name: str, tmp_path: Path
    ) -> None:
        """A benchmark that was not run for a while still measures something."""
        told = tmp_path / "told.json"
        options = ["--quick", "--only", SMALLEST[name]]
        options += ["--directory", str(tmp_path), "--json", str(told)]
        harness.main(name, CASES[name], options)
        numbers = [
            each[key]
            for each in json.loads(told.read_text(encoding="utf-8"))["figures"]
            for key in ("median", "low", "high")
        ]
        assert numbers
        assert all(0 < value and math.isfinite(value) for value in numbers)
