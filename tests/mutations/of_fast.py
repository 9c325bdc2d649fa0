# SPDX-License-Identifier: Apache-2.0
"""Mutants of the short ways that a slab takes where one block or a few are asked for."""

from tests.mutations.mutant import Mutant

__all__ = ["FAST"]

_DIRECTORY = "ucm/stores/slab"
_CHAINS = f"{_DIRECTORY}/_chains.py"
_OLDEST = f"{_DIRECTORY}/_oldest.py"
_RESERVING = f"{_DIRECTORY}/_reserving.py"
_SORTED = "tests/stores/test_slab_index.py::test_oldest_are_what_sorting_all_finds"
_EQUAL = (
    "tests/stores/test_slab.py::TestSharing::test_keys_of_equal_hash_are_told_apart"
)
_LONE = "tests/stores/test_slab_look_up.py::TestLoneBlock"
_PIECES = "tests/stores/test_slab_reserving.py::TestPieces"

FAST = (
    # One block that is loaded.
    Mutant(
        name="generation_of_one_not_rechecked",
        why="A slot that was evicted and filled anew under the copy is believed.",
        file=f"{_DIRECTORY}/_index.py",
        find="        other = self.generation[seen.slots] != seen.generations\n",
        replace="        other = self.generation[seen.slots] == 0\n",
        killers=(f"{_LONE}::test_slot_that_was_given_away_meanwhile_is_noticed[1]",),
    ),
    Mutant(
        name="forgotten_one_rechecked",
        why="A block that was found damaged by another process is believed.",
        file=f"{_DIRECTORY}/_index.py",
        find="(other | (self.state[seen.slots] != COMMITTED)).tolist()",
        replace="other.tolist()",
        killers=(f"{_LONE}::test_block_that_was_forgotten_meanwhile_is_noticed",),
    ),
    Mutant(
        name="lost_slab_populated",
        why="Memory of files that nobody will ever read is taken from the machine.",
        file=f"{_DIRECTORY}/_opened.py",
        find="geometry, self.arena, memory, check),\n",
        replace="geometry, self.arena, memory, self.check),\n",
        killers=(
            "tests/stores/test_slab_populate.py::TestEnds::test_lost_slab_gets_no_more",
        ),
    ),
    # Who goes.
    Mutant(
        name="group_believed_the_oldest",
        why="Blocks that were just used go, because a group has one that is old.",
        file=_OLDEST,
        find="stamps[-1] <= limit and stamps[-1] < before",
        replace="stamps[-1] < before",
        killers=(_SORTED,),
    ),
    Mutant(
        name="bound_of_a_group_too_high",
        why="A block that is the oldest is not found, and never goes.",
        file=_OLDEST,
        find="        self._bounds[group] = bounds[at] = stamps[0]\n",
        replace="        self._bounds[group] = bounds[at] = stamps[-1]\n",
        killers=(_SORTED,),
    ),
    Mutant(
        name="untold_group_not_looked_over",
        why="A slot is taken from whoever is writing it, because it was touched.",
        file=_OLDEST,
        find="        if is_sure and (self._states[slots] == COMMITTED).all():\n",
        replace="        if is_sure:\n",
        killers=(_SORTED,),
    ),
    # Reservations that are granted piece by piece.
    Mutant(
        name="equal_hash_taken_for_stored",
        why="A block is never saved, because another one has its hash.",
        file=_CHAINS,
        find="            for at in linked[~same.all(axis=1)].tolist():\n",
        replace="            for at in ():\n",
        killers=(_EQUAL,),
    ),
    Mutant(
        name="all_looked_up_for_each_piece",
        why="A large save looks each of its keys up four times under the lock.",
        file=_RESERVING,
        find="            batch = batch.at(ahead[:_PIECE])\n",
        replace="            self._ahead = ahead = None\n",
        killers=(f"{_PIECES}::test_keys_are_looked_up_once_and_again_in_their_piece",),
    ),
    Mutant(
        name="key_granted_twice",
        why="A block that another process saves meanwhile gets two slots.",
        file=_RESERVING,
        find="ahead[:_PIECE][found < 0], ahead[_PIECE:]",
        replace="ahead[:_PIECE], ahead[_PIECE:]",
        killers=(f"{_PIECES}::test_key_that_another_saves_meanwhile_is_left_to_it",),
    ),
    Mutant(
        name="found_late_and_evicted",
        why="A save evicts what another process has just saved of the same prompt.",
        file=_RESERVING,
        find="            self._held = np.concatenate((self._held, held))\n",
        replace="",
        killers=(f"{_PIECES}::test_key_that_another_saves_meanwhile_is_left_to_it",),
    ),
)
