# SPDX-License-Identifier: Apache-2.0
"""Mutants of how a device comes to reach a store's memory."""

from tests.mutations.mutant import Mutant

__all__ = ["PINNING"]

_PINNING = "ucm/pinning.py"
_PINNED = "tests/test_pinning.py"
_POPULATED = "tests/stores/test_slab_populate.py::TestShortage"

PINNING = (
    Mutant(
        name="store_memory_not_pinned",
        why="Each copy to the store's memory goes by way of staging memory for ever.",
        file=_PINNING,
        find="            self._thread.start()\n",
        replace="",
        killers=(f"{_PINNED}::test_memory_is_pinned_as_it_comes",),
    ),
    Mutant(
        name="pinned_before_it_is_there",
        why="An engine's start faults a terabyte in, on the thread of whoever populates.",
        file=_PINNING,
        find="stop = min(num_slots, max(0, self._there - start) // slot_bytes)",
        replace="stop = num_slots",
        killers=(f"{_PINNED}::test_memory_is_pinned_as_it_comes",),
    ),
    Mutant(
        name="pinned_where_there_is_no_room",
        why="A container is killed for memory that its slab knew it had not.",
        file=_PINNING,
        find="growth.nbytes if growth.total else sys.maxsize",
        replace="sys.maxsize if growth.problem else growth.nbytes",
        killers=(f"{_PINNED}::test_memory_that_never_comes_is_not_touched",),
    ),
    Mutant(
        name="last_word_missed",
        why="A rank that watches a moment late never pins.",
        file="ucm/stores/slab/_populate.py",
        find="        if last_word is not None:\n            self._tell(last_word)\n",
        replace="",
        killers=(f"{_POPULATED}::test_last_word_is_told_to_who_watches_late",),
    ),
    Mutant(
        name="nothing_staged",
        why="Where memory is not pinned yet each copy blocks its thread.",
        file=_PINNING,
        find="if not self._device.is_synchronous:",
        replace="if False:",
        killers=(f"{_PINNED}::test_memory_of_the_store_is_pinned_behind_the_start",),
    ),
)
