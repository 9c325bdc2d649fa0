# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is saved and loaded by role, setting and prediction."""

from tests.mutations.mutant import Mutant

__all__ = ["WAYS"]

_DECODED = "ucm/scheduler/decoded.py"
_BACK = "tests/scheduler/test_write_back.py::TestDecoded"
_SHORTEST = "tests/scheduler/test_shortest.py::TestShortest"
_UNSAVED = "tests/scheduler/test_unsaved.py::TestUnsaved"
_KINDS = "tests/scheduler/test_write_back.py::TestKinds"
_TABLE = "tests/integration/vllm/test_modes.py::TestTable"
_ROLES = "tests/integration/vllm/test_roles.py::TestRoles"

WAYS = (
    Mutant(
        name="consumer_saves_prompts",
        why="A decode engine fills the slab with prompts that the producer has saved.",
        file=_DECODED,
        find="[began // group.block_tokens for group in groups]",
        replace="[0] * len(groups)",
        killers=(
            f"{_BACK}::test_only_blocks_behind_the_prompt_are_saved",
            f"{_BACK}::test_prompt_in_pieces_is_passed_over",
            f"{_ROLES}::test_consumer_saves_what_it_decodes_if_it_may[True-2]",
        ),
    ),
    Mutant(
        name="consumer_forgets_where_the_prompt_ends",
        why="The block in which the prompt ends is never saved, and nothing behind it hit.",
        file=_DECODED,
        find="[began // group.block_tokens for group in groups]",
        replace="[-(-began // group.block_tokens) for group in groups]",
        killers=(
            f"{_BACK}::test_only_blocks_behind_the_prompt_are_saved",
            f"{_ROLES}::test_consumer_saves_what_it_decodes_if_it_may[True-2]",
        ),
    ),
    Mutant(
        name="consumer_saves_states_of_prompts",
        why="A decode engine stores large states that nobody asked it for.",
        file=_DECODED,
        find="return self.prompts if is_within else self.when",
        replace="return True if is_within else self.when",
        killers=(
            f"{_KINDS}::test_windows_and_states_within_the_prompt_are_left_alone[12-states1]",
        ),
    ),
    Mutant(
        name="write_back_asks_no_leave",
        why="A consumer writes although nobody allowed it to.",
        file="ucm/integration/vllm/modes.py",
        find="if saves or facts.writes_back else Saves.NOTHING",
        replace="if True else Saves.NOTHING",
        killers=(
            f"{_TABLE}::test_every_combination_is_as_written_down",
            f"{_ROLES}::test_consumer_saves_what_it_decodes_if_it_may[False-0]",
        ),
    ),
    Mutant(
        name="role_says_nothing_of_prompts",
        why="The setting makes a consumer an engine that saves all.",
        file="ucm/integration/vllm/setup.py",
        find="            prompts=self.mode.saves_prompts,\n",
        replace="",
        killers=(f"{_ROLES}::test_consumer_saves_what_it_decodes_if_it_may[True-2]",),
    ),
    Mutant(
        name="contradiction_is_taken",
        why="An operator waits for decoded blocks that another setting forbids.",
        file="ucm/config.py",
        find="if self.consumer_saves_decoded and self.save_decoded is SaveDecoded.NEVER:",
        replace="if False:",
        killers=(f"{_ROLES}::test_write_back_of_what_is_never_saved_is_refused",),
    ),
    Mutant(
        name="short_requests_saved",
        why="R-56: what the operator keeps from the slab pushes out what is of use.",
        file=_DECODED,
        find="return max(tokens, prompt_tokens) < self.shortest",
        replace="return False",
        killers=(
            f"{_SHORTEST}::test_short_request_is_not_saved_and_nobody_looks",
            f"{_SHORTEST}::test_states_of_short_requests_are_not_saved",
            f"{_UNSAVED}::test_request_that_was_too_short_is_put_down_whole",
        ),
    ),
    Mutant(
        name="long_prompt_waits_for_its_end",
        why="R-56: all of a long prompt is saved in one step, when it may be gone already.",
        file=_DECODED,
        find="return max(tokens, prompt_tokens) < self.shortest",
        replace="return tokens < self.shortest",
        killers=(f"{_SHORTEST}::test_long_prompt_is_saved_piece_by_piece",),
    ),
    Mutant(
        name="short_request_forgotten",
        why="R-56: a conversation that begins short is never saved.",
        file="ucm/scheduler/saves.py",
        find="            life.due = self._decoded.shortest\n",
        replace="            life.due = NEVER_DUE\n",
        killers=(
            f"{_SHORTEST}::test_request_that_grows_is_saved_from_its_first_block_on",
        ),
    ),
    Mutant(
        name="failed_load_of_a_short_request",
        why="A block whose load failed stays missing for good, and nothing counts it.",
        file="ucm/scheduler/saves.py",
        find="        is_new = not life.starts_at_computed\n",
        replace="        is_new = True\n",
        killers=(f"{_SHORTEST}::test_what_a_failed_load_did_not_bring_is_saved_again",),
    ),
    Mutant(
        name="setting_does_not_reach_the_scheduler",
        why="R-56: the setting is taken and nothing comes of it.",
        file="ucm/integration/vllm/setup.py",
        find="            shortest=config.shortest_saved_tokens,\n",
        replace="",
        killers=(f"{_ROLES}::test_request_below_the_shortest_is_not_saved",),
    ),
)
