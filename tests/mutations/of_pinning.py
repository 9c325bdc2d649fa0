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
        find="                thread.start()\n",
        replace="                pass\n",
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
        name="pinned_amid_a_graph",
        why="A graph that the engine records while its store grows is lost, and its start fails.",
        file="ucm/devices/cuda.py",
        find="        with self._library.apart_from_graphs():\n            self._library.pin(",
        replace="        if True:\n            self._library.pin(",
        killers=(
            (
                "tests/devices/test_cuda_driver.py::TestTorch::"
                "test_memory_is_pinned_apart_from_graphs"
            ),
        ),
    ),
    Mutant(
        name="growth_counted_and_not_from_the_start",
        why="Behind a compaction a device faults memory in that a container has no room for.",
        file="ucm/stores/slab/_populate.py",
        find="first = len(populated) if populated.all() else int(populated.argmin())",
        replace="first = int(populated.sum())",
        killers=(f"{_POPULATED}::test_what_is_told_lies_at_the_start",),
    ),
    Mutant(
        name="followers_tell_nothing",
        why="All ranks but one copy by way of staging memory until the slab is full.",
        file="ucm/stores/slab/_populate.py",
        find="            if share > told and step is not steps[-1]:",
        replace="            if share > told and self._has_turn and step is not steps[-1]:",
        killers=(f"{_POPULATED}::test_who_follows_is_told_as_well",),
    ),
    Mutant(
        name="page_tables_of_followers_missing",
        why="Each copy of a rank that follows faults its pages in.",
        file="ucm/stores/slab/_populate.py",
        find="if not (self._has_turn and is_mine) and not self._try(self._populate, step):",
        replace="if False:",
        killers=(f"{_POPULATED}::test_who_follows_is_told_as_well",),
    ),
    Mutant(
        name="half_populated",
        why="A copy faults pages in that the slab counts as there, or is killed for them.",
        file="ucm/stores/slab/_memory.py",
        find="_populate_beside(parts, fill)",
        replace="_populate_beside(parts[:1], fill)",
        killers=(
            (
                "tests/stores/test_slab_memory.py::TestPopulate::"
                "test_all_pages_are_there_however_many_threads_do_it"
            ),
        ),
    ),
    Mutant(
        name="growth_ended_by_a_missing_thread",
        why="A slab stays at a tenth for ever, and says nothing.",
        file=_PINNING,
        find="except RuntimeError as exc:",
        replace="except KeyError as exc:",
        killers=(f"{_PINNED}::test_thread_that_cannot_start_is_tried_again",),
    ),
    Mutant(
        name="each_part_of_a_slab_logged",
        why="A terabyte fills the log with a hundred lines of each rank.",
        file="ucm/stores/opening.py",
        find="if now <= before and not growth.problem:",
        replace="if False:",
        killers=(f"{_PINNED}::test_log_has_by_tenths_how_a_store_grows",),
    ),
    Mutant(
        name="accelerators_of_hosts_have_small_tickets",
        why="A host's loads take half as long again as the link.",
        file="ucm/cache/core.py",
        find="is_synchronous=device.is_synchronous",
        replace="is_synchronous=True",
        killers=(
            (
                "tests/cache/test_blocking.py::TestVerbs::"
                "test_accelerator_has_larger_tickets"
            ),
        ),
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
