# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and the committed page tells what the committed results say."""

import gc
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tests.engine_imports  # noqa: F401 - its import is what counts
from benchmarks import (
    abreast,
    decode,
    decode_side,
    embed,
    engine,
    engine_thread,
    faults,
    gather,
    harness,
    lives,
    load,
    loads,
    lookup,
    peers,
    pipeline,
    report,
    slab_report,
    stores,
    tiers,
    trace_cost,
)
from benchmarks.baton import Baton, conduct, in_turn
from benchmarks.compiled import compiled
from benchmarks.turns import LIVES, Turn, found_at_best, new_turns, with_second_turns

CASES = {
    module.__name__.split(".")[1]: module.CASES
    for module in (
        abreast,
        decode,
        embed,
        engine,
        engine_thread,
        faults,
        gather,
        lives,
        loads,
        load,
        lookup,
        pipeline,
        stores,
        tiers,
        trace_cost,
    )
}
SMALLEST = {
    "embed": "few",
    "gather": "alone 64 KB, padded",
    "stores": "memory 2 MB",
    "lookup": "small",
    "engine_thread": "submit idle",
    "pipeline": "copy 2 KB block-contiguous",
    "tiers": "depth",
    "trace_cost": "span",
}
"""One case of each benchmark that starts no engine."""


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Take what is there out of collections again, which a benchmark's end puts back."""
    yield
    gc.collect()
    gc.freeze()


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

    def test_committed_page_of_the_slab_is_that_of_its_results(self) -> None:
        """The same for the slab's page, which says that nothing was ever wrong."""
        found = slab_report.read()
        assert slab_report.page(found) == slab_report.PAGE.read_text(encoding="utf-8")
        wrong = {row.get("wrong bytes", 0) for row in found["slab_crash"]}
        assert {0} == wrong | {found["slab_soak"]["wrong"]}

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

    def test_target_of_none_at_all_has_a_bar_too(self) -> None:
        """What must never happen is no share of anything, and is drawn all the same."""
        never = {**figure("wrong answers", "met"), "target": "<= 0", "median": 0.0}
        plot = report.pages({"stores": result(never)})["benchmarks/stores.svg"]
        assert "wrong answers</text>" in plot
        assert 'width="0.0"' in plot


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
        figures = json.loads(told.read_text(encoding="utf-8"))["figures"]
        assert figures
        for each in figures:
            for value in (each["median"], each["low"], each["high"]):
                assert math.isfinite(value)
                assert 0 < value or each["what"].startswith("added")


class TestBaton:
    def test_sides_compute_one_after_the_other(self, tmp_path: Path) -> None:
        """Two that pause go round by round, and one that dies holds nobody up."""
        acts: list[str] = []
        ends = [str(tmp_path / name) for name in "abc"]
        batons = [Baton(end, is_new=True) for end in ends]

        def side(end: str, rounds: int) -> None:
            with in_turn(end) as pause:
                assert pause is not None
                for _ in range(rounds):
                    acts.append(end[-1])
                    pause()

        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(side, end, 2) for end in ends[:2]]
            conduct({baton: lambda at=at: at < 2 for at, baton in enumerate(batons)})
            for other in others:
                other.result(60)
        assert [*"abab"] == acts
        for baton in batons:
            baton.close()

    def test_who_is_alone_has_nobody_to_wait_for(self) -> None:
        """Without a path an engine runs as it does elsewhere."""
        with in_turn("") as pause:
            assert pause is None


class TestPeers:
    """The environment in which the peers are installed."""

    @pytest.fixture(autouse=True)
    def home(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Let nothing be installed, and let it be made elsewhere."""
        monkeypatch.setattr(peers, "_HOME", tmp_path)
        monkeypatch.setattr(peers, "has_lmcache", lambda: False)

    def test_peers_that_cannot_be_had_are_told_and_cost_no_other_figure(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A machine that reaches no packages measures what it can."""

        def run(*command: str) -> None:
            raise subprocess.CalledProcessError(
                1, command, stderr="so far\nno network\n"
            )

        monkeypatch.setattr(peers, "_run", run)
        peers.enter("benchmarks.stores")
        assert "no peers: no network\n" == capsys.readouterr().err

    def test_environment_is_made_once_and_anew_if_it_was_left_half_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second run finds it; one that was stopped amid is not believed."""
        commands = []

        def run(*command: str) -> None:
            commands.append(command)
            if "venv" in command:
                Path(command[-1], "lib", "python", "site-packages").mkdir(parents=True)

        monkeypatch.setattr(peers, "_run", run)
        python = peers.interpreter()
        made = len(commands)
        assert python == peers.interpreter()
        assert made == len(commands)
        (python.parents[1] / "ready").unlink()
        assert python == peers.interpreter()
        assert 2 * made == len(commands)


WAIT = """
import ctypes, sys, threading
longest = ctypes.PyDLL(sys.argv[1]).ucm_longest_wait_ns
longest.restype = ctypes.c_longlong
holder, begun = ctypes.PyDLL(None), threading.Event()
alone = longest()
def hold():
    begun.set()
    holder.usleep(20_000)
thread = threading.Thread(target=hold)
thread.start()
begun.wait()
thread.join()
print(alone, longest(), longest())
"""
"""Holds the interpreter lock for 20 ms on another thread, once."""


class Core:
    """What a ``Meter`` needs of an engine."""

    def __init__(self) -> None:
        self.running = 0

    def step_fn(self) -> str:
        """Run a step of one part that is called twice."""
        self.part()
        self.part()
        return "outputs"

    def part(self) -> None:
        """Be a part of a step."""


class TestDecode:
    def test_steps_of_a_full_engine_are_taken_with_their_parts(self) -> None:
        """A step that begins with few requests counts for nothing; a part adds up all
        its calls, under each of its names, and what calls it sees no difference. Where
        nothing tells waits for the lock, there are no figures that are none."""
        core, meter = Core(), decode_side.Meter("")
        meter.part(core, "part", "one", "both")
        meter.part(core, "no such hook", "one")
        meter.step(core, lambda: core.running == 2)
        for core.running in (1, 2, 2):
            assert "outputs" == core.step_fn()
        told = meter.take()
        assert 3 == meter.num_steps
        assert {"step", "one", "both"} == set(told)
        assert [2, 2, 2] == [len(values) for values in told.values()]
        assert told["one"] == told["both"]
        assert all(
            0 < one < step for one, step in zip(told["one"], told["step"], strict=True)
        )
        assert {} == meter.take()

    def test_every_fourth_request_goes_on_with_what_was_computed_before(self) -> None:
        """The last token of an answer was never computed, so that it cannot complete
        a block that is to be found."""
        prompts = [[1] * 30, [2] * 30]
        before = [Turn(prompt, 3) for prompt in prompts]
        later = [Turn([9] * 12, 3) for _ in range(2)]
        turns = list(with_second_turns(later, before, [[5, 6, 7], [5, 6, 7]]))
        assert [[1] * 30 + [5, 6, 7] + [9] * 9, [9] * 12] == [
            turn.prompt for turn in turns
        ]
        assert [32, 32, 30, 0] == [
            found_at_best(turns, size) for size in (16, 32, 6, 33)
        ]

    def test_answers_are_as_long_as_they_were_traced(self) -> None:
        """Between each two quantiles lie as many of them as between any others."""
        bounds = LIVES["as traced"]
        lengths = [turn.max_tokens for turn in new_turns(2000, 1, "as traced")]
        assert bounds[0] <= min(lengths) <= max(lengths) <= bounds[-1]
        shares = [
            sum(low <= each < high for each in lengths) / len(lengths)
            for low, high in itertools.pairwise(bounds)
        ]
        assert all(0.07 < share < 0.13 for share in shares)

    def test_longest_wait_for_the_lock_is_told_once_and_none_where_nobody_holds_it(
        self,
    ) -> None:
        """What is preloaded sees waits for the interpreter lock and no others, and
        begins anew with each answer."""
        path = compiled("gil_waits.c")
        if not path:
            pytest.skip("there is no C compiler")
        done = subprocess.run(
            [sys.executable, "-c", WAIT, path],
            env=os.environ | {"LD_PRELOAD": path},
            capture_output=True,
            text=True,
            check=True,
        )
        alone, held, again = map(int, done.stdout.split())
        assert 0 == alone
        assert 0 < held
        assert 0 == again
