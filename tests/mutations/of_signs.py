# SPDX-License-Identifier: Apache-2.0
"""Mutants of what shows how an engine is, and what became of its requests."""

from tests.mutations.mutant import Mutant

__all__ = ["SIGNS"]

_SIGNS = "ucm/integration/vllm/signs.py"
_VITALS = "ucm/integration/vllm/vitals.py"
_TESTS = "tests/integration/vllm/test_vitals.py::TestSigns"
_AGAIN = (
    f"{_TESTS}::test_engine_that_is_started_again_under_its_id_is_not_its_former_self"
)
_ERRORS = "tests/test_errors.py::test_a_setting_that_is_secret_is_not_told"
_LOOKS = "tests/stores/test_slab_look.py::TestProblems"
_READ = "tests/story/test_files.py::TestRead"
_IDS = "tests/integration/vllm/test_lifelog.py::TestRequest"

SIGNS = (
    Mutant(
        name="strangers_sign_swept",
        why="A file that somebody has put there is deleted.",
        file="ucm/integration/vllm/signs.py",
        find="is_ours = _NAME.fullmatch(entry.name) is not None",
        replace="is_ours = True",
        killers=(
            "tests/integration/vllm/test_vitals.py::TestSigns::test_what_the_killed_have_left_is_swept_away",
        ),
    ),
    Mutant(
        name="former_life_is_ill_for_ever",
        why="An engine that was killed and started again is told as not healthy.",
        file=_VITALS,
        find="        sweep_former(self._path, self._began, sign.at)\n",
        replace="",
        killers=(_AGAIN,),
    ),
    Mutant(
        name="hanging_rank_swept_away",
        why="A rank that hangs is forgotten by the others, and nobody hears of it.",
        file=_SIGNS,
        find="sign.at < min(began, now - _FORMER_S)",
        replace="sign.at < now - _FORMER_S",
        killers=(_AGAIN,),
    ),
    Mutant(
        name="sign_left_behind_the_end",
        why="A process that ended while its store hung is looked for ever after.",
        file=_VITALS,
        find="        self._take_away()  # a look",
        replace="        # a look",
        killers=(f"{_TESTS}::test_look_that_outlasts_its_end_leaves_nothing",),
    ),
    Mutant(
        name="password_in_the_parameters_told",
        why="What `ucm config show` prints for a colleague has the password in it.",
        file="ucm/errors.py",
        find="_PARAMETER.sub(_parameter, _CREDENTIALS",
        replace="_PARAMETER.sub(r'\\g<0>', _CREDENTIALS",
        killers=(_ERRORS,),
    ),
    Mutant(
        name="client_writes_the_log",
        why="A client whose ids are long makes its lines unreadable, and pushes out others.",
        file="ucm/blocks.py",
        find="    if len(request_id) <= _MOST_TOLD:",
        replace="    if request_id:",
        killers=(f"{_IDS}::test_id_of_many_kilobytes_is_cut_alike_in_all_lines",),
    ),
    Mutant(
        name="preempted_counted_as_hits",
        why="The hit ratio is above one while the engine computes the same twice.",
        file="ucm/story/totals.py",
        find="            if not ended.preemptions:\n",
        replace="            if True:\n",
        killers=(
            "tests/story/test_totals.py::TestTotals::test_what_was_preempted_is_no_hit",
        ),
    ),
    Mutant(
        name="rotated_file_missing_in_silence",
        why="A part of what happened is not in the answer, and nobody says so.",
        file="ucm/story/files.py",
        find="        reading.unread_files += info.st_ino != file.inode",
        replace="        reading.unread_files += 0",
        killers=(f"{_READ}::test_a_file_that_is_rotated_away_meanwhile_is_counted",),
    ),
    Mutant(
        name="told_to_close_tmp",
        why="Who follows the remedy takes /tmp away from everybody else.",
        file="ucm/stores/slab/_files.py",
        find="    if mode & stat.S_ISVTX:",
        replace="    if not mode:",
        killers=(
            f"{_LOOKS}::test_directory_that_is_meant_for_all_is_not_to_be_closed",
        ),
    ),
)
