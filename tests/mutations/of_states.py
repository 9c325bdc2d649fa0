# SPDX-License-Identifier: Apache-2.0
"""Mutants of states of recurrent layers, of execution order and of invalid blocks."""

from tests.mutations.mutant import Mutant

__all__ = ["STATES"]

_INVALID = "ucm/testing/host/invalid.py"
_LAYOUT = "ucm/layout.py"
_MATCHING = "ucm/scheduler/matching.py"
_LIVES = "ucm/scheduler/lives.py"
_SELECTOR = "ucm/scheduler/saves.py"
_DOOR = "ucm/integration/vllm/layout.py"
_MATCHER = "tests/scheduler/test_matching.py::TestPrefixMatcher"
_OFFERS = "tests/scheduler/test_states.py::TestOffers"
_LOADS = "tests/scheduler/test_states.py::TestLoads"
_FENCES = "tests/scheduler/test_states.py::TestFences"
_ONE = "tests/testing/test_host_invalid.py::TestOneRequest"
_SHARED = "tests/testing/test_host_invalid.py::TestSharedBlocks"
_PURE = "tests/testing/test_host_invalid.py::TestPureFunctions"
_STATES = "tests/integration/vllm/test_states.py"
_DOOR_TESTS = "tests/integration/vllm/test_layout.py"
_LAYOUT_TESTS = "tests/test_layout_order.py"

STATES = (
    # What a hit needs.
    Mutant(
        name="state_needs_all_blocks",
        why="No hit is found: the states before the last are stored by nobody.",
        file=_LAYOUT,
        find="return range(max(0, stop - 1), stop)",
        replace="return range(stop)",
        killers=(
            f"{_MATCHER}::test_state_group_needs_the_block_that_ends_with_the_hit",
        ),
    ),
    Mutant(
        name="state_never_asked_for",
        why="A request goes on from a state that nobody stored.",
        file=_MATCHING,
        find="each for each in layout.groups if each not in self._full]",
        replace="each for each in layout.groups if each.kind is GroupKind.WINDOW]",
        killers=(f"{_MATCHER}::test_computed_state_is_no_substitute_for_a_stored_one",),
    ),
    Mutant(
        name="last_token_applied_twice",
        why="The engine applies the last token to a state that has seen it.",
        file=_MATCHING,
        find="            group.kind is not GroupKind.STATE\n            and (",
        replace="            (",
        killers=(f"{_MATCHER}::test_whole_prompt_never_hits_with_a_state",),
    ),
    # Offers.
    Mutant(
        name="states_queued",
        why="States that nobody offers pile up, and count as dropped in the end.",
        file=_LIVES,
        find="                continue\n            start = self.cursors[at]\n",
        replace="                pass\n            start = self.cursors[at]\n",
        killers=(f"{_OFFERS}::test_state_that_is_not_offered_is_not_saved",),
    ),
    Mutant(
        name="tail_saved_as_a_block",
        why="A state within a block is stored under the hash of a shorter prefix.",
        file=_LIVES,
        find="in range(whole) and not end % size and",
        replace="in range(whole) and",
        killers=(f"{_OFFERS}::test_offer_that_no_hit_can_use_is_passed_over",),
    ),
    Mutant(
        name="loaded_state_saved_again",
        why="Every load is followed by a save of the same bytes.",
        file=_LIVES,
        find="!= group.group_id or index in loaded or is_passed:",
        replace="!= group.group_id or is_passed:",
        killers=(f"{_LOADS}::test_loaded_state_is_not_saved_again",),
    ),
    Mutant(
        name="lost_state_not_counted",
        why="Nobody sees that a busy engine stores no states.",
        file=_SELECTOR,
        find="self._not_taken(group_id, [run.hashes[0] for run in wanted if run not in mine])",
        replace="pass",
        killers=(f"{_OFFERS}::test_offer_is_taken_now_or_never",),
    ),
    Mutant(
        name="state_given_away_is_saved",
        why="What another request computes is stored as the state of a prefix.",
        file=_SELECTOR,
        find="if self._is_there(request, at, run)]",
        replace="]",
        killers=(
            f"{_OFFERS}::test_state_whose_block_the_step_gives_away_is_lost[another]",
            f"{_STATES}::test_state_whose_block_goes_to_who_runs_is_lost",
        ),
    ),
    Mutant(
        name="state_on_an_open_load_saved",
        why="A state that was computed on a prefix that fails is stored as good.",
        file="ucm/scheduler/saves.py",
        find="if life.loads or not life.may_save:",
        replace="if not life.may_save:",
        killers=(f"{_LOADS}::test_state_on_top_of_an_open_load_is_lost",),
    ),
    Mutant(
        name="copy_not_fenced",
        why="The engine copies onto a block that a save still reads.",
        file="ucm/scheduler/holds.py",
        find="torn = self.readers_of(facts.overwritten)",
        replace="torn = self.readers_of(())",
        killers=(f"{_FENCES}::test_block_that_a_step_overwrites_is_fenced",),
    ),
    Mutant(
        name="states_of_stages_taken_too_early",
        why="Stages before the last store the state before the last token as that of the block's end.",
        file=_LIVES,
        find="request.end_tokens if is_late else known",
        replace="known",
        killers=(
            f"{_OFFERS}::test_state_that_drafts_went_past_is_not_there_yet_on_all_stages[several]",
        ),
    ),
    Mutant(
        name="states_move_unseen",
        why="R-01: the second runner moves a state onto a block that a save still reads, and"
        " only then asks for the save to be waited for.",
        file="ucm/integration/vllm/running.py",
        find="overwritten_blocks(output).union(self._moved_onto(output))",
        replace="overwritten_blocks(output)",
        killers=(
            f"{_STATES}::test_block_onto_which_a_state_is_moved_is_overwritten[goes on]",
            f"{_STATES}::test_block_onto_which_a_state_is_moved_is_overwritten[begins]",
        ),
    ),
    # The order of layers.
    Mutant(
        name="row_saved_after_its_first_layer",
        why="A row leaves the engine before its later layers are written.",
        file=_LAYOUT,
        find="return {row_of[name]: name for name in self.layers}",
        replace="return {row_of[name]: name for name in reversed(self.layers)}",
        killers=(
            f"{_LAYOUT_TESTS}::TestExecutionOrder::test_row_is_saved_after_its_last_layer",
        ),
    ),
    Mutant(
        name="layers_ordered_as_text",
        why="Layer 10 counts as earlier than layer 2, and its row is saved too early.",
        file=_DOOR,
        find="int(part) for part in",
        replace="part for part in",
        killers=(
            f"{_DOOR_TESTS}::TestOrder::test_layers_of_a_row_are_in_order_of_execution",
        ),
    ),
    Mutant(
        name="drafter_runs_by_its_numbers",
        why="A drafter's layer 0 counts as the first, and what its row had before is stored.",
        file=_DOOR,
        find="is_draft = not _DRAFTERS.isdisjoint(parts)",
        replace="is_draft = False",
        killers=(
            f"{_DOOR_TESTS}::TestOrder::test_drafter_that_numbers_its_layers_anew_runs_last",
        ),
    ),
    Mutant(
        name="other_modes_of_states_taken",
        why="States that are not kept at block ends are stored as if they were.",
        file=_DOOR,
        find='if kinds == {MambaSpec} and _modes(specs) == ["align"]:',
        replace="if kinds == {MambaSpec}:",
        killers=(
            f"{_DOOR_TESTS}::TestRefused::test_kind_that_cannot_be_restored_is_refused",
        ),
    ),
    # Invalid blocks.
    Mutant(
        name="last_invalid_block_decides",
        why="A request keeps tokens that were computed on garbage.",
        file=_INVALID,
        find="tokens = min(starts) // align * align",
        replace="tokens = max(starts) // align * align",
        killers=(f"{_ONE}::test_all_groups_go_back_to_one_length",),
    ),
    Mutant(
        name="shared_block_computed_twice",
        why="Requests that share a block all compute it, one after the other.",
        file=_INVALID,
        find="        marked |= own\n",
        replace="",
        killers=(f"{_SHARED}::test_first_of_two_computes_what_both_share",),
    ),
    Mutant(
        name="negative_tokens_affected",
        why="A counter goes down.",
        file=_INVALID,
        find="Affected(tokens=max(0, had - keeps), ",
        replace="Affected(tokens=had - keeps, ",
        killers=(f"{_PURE}::test_affected_tokens_are_never_negative",),
    ),
    Mutant(
        name="state_gone_on_from",
        why="A request goes on from a state that was written over.",
        file=_INVALID,
        find="if group.kind is GroupKind.STATE or NULL_BLOCK in (",
        replace="if NULL_BLOCK in (",
        killers=(f"{_ONE}::test_state_leaves_nothing_to_go_on_from",),
    ),
    Mutant(
        name="state_saved_by_a_hook",
        why="A state that the engine moves behind the forward pass is stored before.",
        file="ucm/layerwise.py",
        find="if each.lacks(row) and not each.at_end]",
        replace="if each.lacks(row)]",
        killers=(
            "tests/test_layerwise.py::TestRowSaves::test_states_go_when_the_step_ends_whatever_a_layer_says",
        ),
    ),
)
