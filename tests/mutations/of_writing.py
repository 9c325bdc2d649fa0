# SPDX-License-Identifier: Apache-2.0
"""Mutants of how blocks become files, and of what is taken back from a tier."""

from typing import Final

from tests.mutations.mutant import Mutant

__all__ = ["WRITING"]

_NATIVE = "ucm/native.c"
_TESTS = "tests/backends/test_files_writing.py"

WRITING: Final = (
    Mutant(
        name="full_tier_is_asked_to_delete",
        why="A right block that another machine has put there is deleted by one that has stored nothing.",
        file="ucm/agent/spill.py",
        find="                if verdict not in _WHY:  #",
        replace="                if verdict is not Verdict.GARBAGE:  #",
        killers=(
            "tests/agent/test_spill_recycled.py::TestRecycled::test_block_that_another_machine_has_put_stays_where_nothing_was_stored",
        ),
    ),
    Mutant(
        name="sandbox_without_such_renames",
        why="R-51: no block is ever put where a filter forbids the call.",
        file=_NATIVE,
        find=" && error != EPERM) return error;\n",
        replace=") return error;\n",
        killers=(
            f"{_TESTS}::TestWriting::test_file_system_without_links_takes_renames",
        ),
    ),
    Mutant(
        name="rest_of_a_block_is_written_for_nobody",
        why="A thread that was left behind reads memory that is somebody else's, for up to a gigabyte.",
        file=_NATIVE,
        find="        if (atomic_load(&gate->is_left)) return LEFT;  // nobody wants the rest\n",
        replace="        (void)gate;\n",
        killers=(
            f"{_TESTS}::TestGate::test_who_leaves_amid_a_block_has_no_more_of_it_written",
        ),
    ),
    Mutant(
        name="folder_of_folders_is_everybody_s",
        why="R-24: where there is no native code others may put blocks that no model has computed.",
        file="ucm/backends/files/_writing.py",
        find="    for each in (os.path.dirname(folder), folder):\n        with contextlib.suppress(FileExistsError):\n            os.mkdir(each, mode=0o700)\n",
        replace="    os.makedirs(folder, mode=0o700, exist_ok=True)\n",
        killers=(
            f"{_TESTS}::TestWriting::test_folders_are_nobody_else_s_whatever_others_may",
        ),
    ),
    Mutant(
        name="path_that_no_file_can_have",
        why="An agent fails with a traceback where a setting should be named.",
        file="ucm/backends/files/_backend.py",
        find="suppress(UnicodeEncodeError):  # no file",
        replace="suppress(ZeroDivisionError):  # no file",
        killers=(
            "tests/backends/test_files_settings.py::TestRefusals::test_wrong_setting_is_named",
        ),
    ),
    Mutant(
        name="native_link_leaves_its_first_name",
        why="A mount without renames of its own keeps each block under two names.",
        file=_NATIVE,
        find="        unlink(temporary);\n",
        replace="",
        killers=(
            f"{_TESTS}::TestWriting::test_mount_without_such_renames_takes_links",
        ),
    ),
    Mutant(
        name="path_that_no_block_fits_behind",
        why="A tier opens that takes nothing, and nobody is told why.",
        file="ucm/backends/files/_backend.py",
        find="if len(os.fsencode(path)) <= _LONGEST_PATH:",
        replace="if os.fsencode(path):",
        killers=(
            "tests/backends/test_files_settings.py::TestRefusals::test_path_is_short_enough_for_the_names_behind_it",
        ),
    ),
    Mutant(
        name="silence_turns_the_line_over",
        why="Who waits longest is tried last, and no run of a simulation is like the one before.",
        file="ucm/agent/spill.py",
        find="for key in silent}",
        replace="for key in reversed(silent)}",
        killers=(
            "tests/agent/test_spill_again.py::test_blocks_without_an_answer_wait_on_in_the_order_in_which_they_came",
        ),
    ),
    Mutant(
        name="drafts_taken_for_known_tokens",
        why="With speculation most states of decoded tokens are never saved.",
        file="ucm/scheduler/lives.py",
        find="begun < end < reached\n",
        replace="begun < end < request.end_tokens\n",
        killers=(
            "tests/scheduler/test_states.py::TestOffers::test_state_that_a_step_went_past_is_not_that_of_the_blocks_end",
        ),
    ),
    Mutant(
        name="passed_state_taken_for_the_end_s",
        why="A later prompt goes on from the state of a shorter prefix, and its answer is wrong.",
        file="ucm/scheduler/lives.py",
        find="end - size < begun < end < reached\n",
        replace="False\n",
        killers=(
            "tests/scheduler/test_states.py::TestOffers::test_state_that_a_step_went_past_is_not_that_of_the_blocks_end",
        ),
    ),
)
