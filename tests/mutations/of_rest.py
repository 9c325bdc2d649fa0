# SPDX-License-Identifier: Apache-2.0
"""Mutants of blocks that come and go, and of loads that do not pay."""

from tests.mutations.mutant import Mutant

__all__ = ["REST"]

_ELSEWHERE = "ucm/scheduler/elsewhere.py"
_PLAN = "tests/scheduler/test_elsewhere.py::TestPlan"
_RANKS = "tests/integration/vllm/test_elsewhere.py"
_MACHINES = "tests/integration/vllm/test_machines.py"
_DISK = "ucm/backends/disk/_backend.py"
_CHANGING = "tests/backends/test_disk_changing.py::TestChanging"

REST = (
    Mutant(
        name="block_to_come_back_written_anew",
        why="A block is in two slots; one is never freed, and outlasts a removal on the drive.",
        file=_DISK,
        find="[key for key in (slot.key, slot.previous[0]) if key]",
        replace="[slot.key]",
        killers=(
            f"{_CHANGING}::test_block_is_not_written_anew_while_it_may_come_back",
            f"{_CHANGING}::test_block_that_may_come_back_is_deleted_all_the_same",
        ),
    ),
    Mutant(
        name="removal_of_what_may_come_back_not_done",
        why="Who deletes a block is told that it is not there, and then it is there again.",
        file=_DISK,
        find="while changing := [key for key in keys if key in self._changing]:",
        replace="while changing := []:",
        killers=(
            f"{_CHANGING}::test_block_that_may_come_back_is_deleted_all_the_same",
        ),
    ),
    Mutant(
        name="no_room_told_as_a_missing_part",
        why="An operator looks for a rank that lost blocks where plans were full.",
        file="ucm/integration/vllm/tiers.py",
        find="                reason=Reason.QUEUE_TICKETS,\n",
        replace="",
        killers=(
            "tests/integration/vllm/test_tiers.py::TestNoRoom::test_want_without_room_says_so_and_asks_again",
        ),
    ),
    Mutant(
        name="long_prompt_asked_for_in_part",
        why="R-60: of a prompt of a million tokens a fifth is found, wherever the rest is.",
        file=_ELSEWHERE,
        find="        self._later.extend(wants[1:])\n",
        replace="",
        killers=(f"{_PLAN}::test_prompt_beyond_a_plan_is_asked_for_in_parts",),
    ),
    Mutant(
        name="parts_behind_a_gap_count",
        why="R-60: a hit covers blocks that a rank does not have.",
        file=_ELSEWHERE,
        find="            if reach < part.want.stop:\n                break\n",
        replace="",
        killers=(f"{_PLAN}::test_parts_reach_as_far_as_the_first_that_falls_short",),
    ),
    Mutant(
        name="forgotten_here_only",
        why="Who asked for a prompt to be deleted has it kept on every other machine.",
        file="ucm/integration/vllm/elsewhere.py",
        find="            if self._rank in forgotten.ranks:\n",
        replace="            if False:\n",
        killers=(f"{_RANKS}::TestForget::test_rank_deletes_its_own_part",),
    ),
    Mutant(
        name="forgotten_nowhere_else",
        why="Who asked for a prompt to be deleted has it kept on every other machine.",
        file="ucm/integration/vllm/scheduler.py",
        find="            self._tiers.elsewhere.forget(matcher, end.hashes, end.prompt_tokens)\n",
        replace="",
        killers=(f"{_MACHINES}::test_forgotten_prompt_is_deleted_on_each_machine",),
    ),
    Mutant(
        name="older_index_believed",
        why="A drive of an older release loses what its index did not know.",
        file="ucm/backends/disk/_index.py",
        find="    if (magic, version) != (_HEAD_MAGIC, _VERSION):\n",
        replace="    if magic != _HEAD_MAGIC:\n",
        killers=(
            "tests/backends/test_disk_index.py::TestHarm::test_drive_of_an_older_release_is_served",
        ),
    ),
)
