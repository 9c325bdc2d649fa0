# SPDX-License-Identifier: Apache-2.0
"""Mutants of what people are told: of a miss in words, and of a stage in the legend."""

from tests.mutations.mutant import Mutant

__all__ = ["PROOFS"]

_MISSES = "ucm/story/misses.py"
_REASONS = "tests/story/test_told.py::TestReasons"
_BROWSER = "tests/story/test_page.py::TestBrowser"

PROOFS = (
    Mutant(
        name="remedy_of_the_reason_alone",
        why="R-71: who deleted a block himself is told to buy more memory.",
        file=_MISSES,
        find="known.remedy or general.remedy",
        replace="general.remedy",
        killers=(f"{_REASONS}::test_a_detail_is_told_in_words",),
    ),
    Mutant(
        name="code_without_words",
        why="R-71: an operator reads a word of the program and has to look it up in it.",
        file=_MISSES,
        find='    "store_full": Explained("The store had no slot.", "Raise store.capacity."),\n',
        replace="",
        killers=(f"{_REASONS}::test_each_code_of_a_detail_has_its_words",),
    ),
    Mutant(
        name="example_of_no_command",
        why="What a help text shows, and with it its page, is refused when it is tried.",
        file="ucm/cli/trace.py",
        find='examples("ucm trace stats --log /var/log/ucm --json")',
        replace='examples("ucm trace stats /var/log/ucm --json")',
        killers=("tests/test_docs_run.py::TestCommands::test_command_of_a_page_runs",),
    ),
    Mutant(
        name="edges_on_nobodys_demand",
        why="A save hangs, and nobody can see in which stage before it has failed.",
        file="ucm/integration/vllm/vitals.py",
        find='            told["edges"] = half.runtime.ring.last(_MOST_EDGES)\n',
        replace="            pass\n",
        killers=(
            "tests/integration/vllm/test_vitals.py::TestHalves::test_each_half_tells_who_asks_in_the_slab",
        ),
    ),
    Mutant(
        name="bar_without_an_end",
        why="Who waits for an hour of work sees nothing move.",
        file="ucm/cli/telling.py",
        find="shown.update(task, completed=so_far)",
        replace="shown.update(task)",
        killers=("tests/cli/test_telling.py::test_work_is_shown_on_a_terminal",),
    ),
    Mutant(
        name="legend_of_saves_alone",
        why="A colour that is drawn under loads is explained nowhere near them.",
        file="ucm/story/timeline.js",
        find='(kind) => kind === "load"]',
        replace='(kind) => kind === "save"]',
        killers=(f"{_BROWSER}::test_legend_names_a_stage_wherever_it_is_drawn",),
    ),
)
