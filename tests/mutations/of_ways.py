# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is saved and loaded by role, setting and prediction."""

from tests.mutations.mutant import Mutant

__all__ = ["WAYS"]

_DECODED = "ucm/scheduler/decoded.py"
_BACK = "tests/scheduler/test_write_back.py::TestDecoded"
_KINDS = "tests/scheduler/test_write_back.py::TestKinds"
_TABLE = "tests/integration/vllm/test_modes.py::TestTable"
_ROLES = "tests/integration/vllm/test_roles.py::TestRoles"

WAYS = (
    Mutant(
        name="consumer_saves_prompts",
        why="A decode engine fills the slab with prompts that the producer has saved.",
        file=_DECODED,
        find="return 0 if self.prompts else prompt_tokens // group.block_tokens",
        replace="return 0",
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
        find="return 0 if self.prompts else prompt_tokens // group.block_tokens",
        replace="return 0 if self.prompts else -(-prompt_tokens // group.block_tokens)",
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
)
