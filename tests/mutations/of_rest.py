# SPDX-License-Identifier: Apache-2.0
"""Mutants of blocks that come and go, and of loads that do not pay."""

from tests.mutations.mutant import Mutant

__all__ = ["REST"]

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
)
