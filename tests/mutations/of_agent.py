# SPDX-License-Identifier: Apache-2.0
"""Mutants of what happens below the slab: its changes, and the node's agent."""

from tests.mutations.mutant import Mutant

__all__ = ["AGENT"]

_CHANGES = "ucm/stores/slab/_changes.py"
_TABLES = "ucm/stores/slab/_tables.py"
_MIRROR = "tests/stores/test_slab_changes.py::TestMirror"
_FOLLOWS = f"{_MIRROR}::test_reader_that_follows_has_what_is_stored"

AGENT = (
    # What a reader of a slab's changes is told.
    Mutant(
        name="change_ring_overflow_unseen",
        why="A follower that was too slow believes in blocks that are gone.",
        file=_CHANGES,
        find="        or not 0 <= newest - cursor.sequence <= len(index.changes)\n",
        replace="",
        killers=(f"{_MIRROR}::test_reader_that_was_left_behind_lists_again",),
    ),
    Mutant(
        name="change_epoch_ignored",
        why="What a killed process had published is never told of.",
        file=_CHANGES,
        find="        or cursor.epoch != epoch\n",
        replace="",
        killers=(f"{_MIRROR}::test_change_that_a_death_left_is_listed",),
    ),
    Mutant(
        name="removed_blocks_untold",
        why="A router is sent to blocks that were evicted long ago.",
        file=_TABLES,
        find="                self.changes.add(REMOVED, removed)\n",
        replace="                pass\n",
        killers=(_FOLLOWS,),
    ),
    Mutant(
        name="reservations_told_as_removed",
        why="A block that another one keeps is told to be gone.",
        file=_TABLES,
        find="            removed = slots[self.state[slots] == COMMITTED]\n",
        replace="            removed = slots\n",
        killers=(f"{_MIRROR}::test_reservation_that_was_given_up_is_not_told",),
    ),
    Mutant(
        name="single_blocks_untold",
        why="Blocks that are saved one by one never leave the slab.",
        file="ucm/stores/slab/_one.py",
        find="    index.changes.add_one(STORED, slot)\n",
        replace="",
        killers=(_FOLLOWS,),
    ),
)
