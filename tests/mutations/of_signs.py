# SPDX-License-Identifier: Apache-2.0
"""Mutants of what shows how an engine is, and what became of its requests."""

from tests.mutations.mutant import Mutant

__all__ = ["SIGNS"]

_STATS = "ucm/integration/vllm/stats.py"
_HALVES = "tests/integration/vllm/test_vitals.py::TestHalves"
_FRONT = "tests/integration/vllm/test_vitals.py::TestFront"
_ERRORS = "tests/test_errors.py::test_a_setting_that_is_secret_is_not_told"
_LOOKS = "tests/stores/test_slab_look.py::TestProblems"
_READ = "tests/story/test_files.py::TestRead"
_IDS = "tests/integration/vllm/test_lifelog.py::TestRequest"

SIGNS = (
    Mutant(
        name="own_look_left_out",
        why="X-11: where the front end is elsewhere, gauges are as old as the start.",
        file="ucm/status.py",
        find="                self._look()\n",
        replace="                pass\n",
        killers=(
            "tests/test_status.py::TestLooks::test_it_looks_by_itself_where_nobody_asks",
        ),
    ),
    Mutant(
        name="gauges_as_old_as_the_last_look",
        why="X-11: who asks is told how things were when somebody looked.",
        file="ucm/integration/vllm/vitals.py",
        find="            half.refresh()\n",
        replace="            pass\n",
        killers=(f"{_HALVES}::test_each_half_tells_who_asks_in_the_slab",),
    ),
    Mutant(
        name="rank_that_is_gone_forgotten",
        why="X-11: a rank hangs, the others are well, and nobody hears of it.",
        file=_STATS,
        find="asked_at - min(answered.values()) > _LATE_S",
        replace="asked_at - max(answered.values()) > _LATE_S",
        killers=(f"{_FRONT}::test_rank_that_is_gone_is_missed",),
    ),
    Mutant(
        name="neighbour_is_the_engine",
        why="X-11: two engines share a slab, and each is as ill as the other.",
        file=_STATS,
        find="if answer.engine == engine_id]",
        replace="if answer.engine]",
        killers=(f"{_FRONT}::test_gauges_of_an_idle_engine_are_as_fresh",),
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
        find="if not (ended.preemptions or ended.never_ran):",
        replace="if not ended.never_ran:",
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
    Mutant(
        name="names_of_engines_cut",
        why="R-71: the engines of one vLLM differ in the number at the end, and nobody sees which is bypassed.",
        file="ucm/cli/top_view.py",
        find='"engine": engine.name,',
        replace='"engine": engine.name[:18],',
        killers=(
            "tests/cli/test_top.py::TestScreen::test_engines_whose_names_differ_at_the_end_are_told_apart",
        ),
    ),
    Mutant(
        name="number_that_is_none_slept_for",
        why="R-71: a live view ends with a traceback.",
        file="ucm/cli/telling.py",
        find="if not math.isfinite(number):",
        replace="if math.isinf(number):",
        killers=("tests/cli/test_main.py::test_number_that_is_none_is_refused",),
    ),
    Mutant(
        name="answer_read_in_part_is_not_well",
        why="Behind ``| head`` a command says that what it looked at is not well.",
        file="ucm/cli/main.py",
        find="        return _UNREAD  #",
        replace="        return NOT_WELL  #",
        killers=(
            "tests/cli/test_main.py::test_answer_that_is_read_in_part_is_nothing_that_is_not_well",
        ),
    ),
    Mutant(
        name="killed_command_ends_at_once",
        why="R-71: what it measured in memory stays there for good.",
        file="ucm/cli/tidying.py",
        find="Final = signal.SIGTERM, signal.SIGHUP",
        replace="Final[tuple[int, ...]] = ()",
        killers=("tests/cli/test_main.py::test_killed_command_leaves_nothing",),
    ),
    Mutant(
        name="second_kill_breaks_tidying_off",
        why="R-71: a shell passes SIGHUP on and the kernel sends another, amid the removal.",
        file="ucm/cli/tidying.py",
        find="            signal.signal(each, signal.SIG_IGN)\n",
        replace="            pass\n",
        killers=("tests/cli/test_main.py::test_killed_command_leaves_nothing",),
    ),
    Mutant(
        name="killed_command_ends_by_itself",
        why="R-71: a script takes a killed export for one that left a damaged block out.",
        file="ucm/cli/tidying.py",
        find="            os.kill(os.getpid(), number)\n",
        replace="            pass\n",
        killers=("tests/cli/test_main.py::test_killed_command_leaves_nothing",),
    ),
    Mutant(
        name="all_terminals_have_all_signs",
        why="R-71: a bar, or a name with an accent, is a traceback where the locale is of Latin 1.",
        file="ucm/cli/main.py",
        find='reconfigure(errors="replace")',
        replace='reconfigure(errors="strict")',
        killers=(
            "tests/cli/test_main.py::test_terminal_without_a_sign_for_all_that_is_told_is_no_error",
        ),
    ),
    Mutant(
        name="id_of_a_client_is_ambiguous",
        why="R-71: a client asks why r1 was computed, and hears that r10 begins so, too.",
        file="ucm/cli/trace.py",
        find="lives = exact or whole or lives",
        replace="lives = exact or lives",
        killers=(
            "tests/cli/test_trace.py::TestShow::test_the_id_that_a_client_knows_is_itself",
        ),
    ),
    Mutant(
        name="log_that_nobody_could_read_is_none",
        why="R-71: who looks at another user's log, or another release's, hears that there is none.",
        file="ucm/cli/trace.py",
        find='"; ".join((problem, *reading.notes()))',
        replace="problem",
        killers=(
            "tests/cli/test_trace.py::test_what_could_not_be_read_is_said_where_nothing_was_found",
        ),
    ),
    Mutant(
        name="empty_key_space_is_all",
        why="A script whose variable is not set deletes the blocks of all models.",
        file="ucm/cli/store/choose.py",
        find="if self.keyspace is not None:",
        replace="if self.keyspace:",
        killers=(
            "tests/cli/test_store_change.py::TestRm::test_unclear_call_changes_nothing",
        ),
    ),
    Mutant(
        name="cpus_of_first_cgroups_unlimited",
        why="R-18: a container stands still where helpers have used up its time.",
        file="ucm/affinity.py",
        find='        if "cpu" in controllers.split(","):\n',
        replace="        if False:\n",
        killers=(
            "tests/test_affinity.py::TestHashing::test_cgroups_of_the_first_version_limit_it_too",
        ),
    ),
    Mutant(
        name="log_of_another_container_shared",
        why="R-73: of two processes that put the same files aside, one removes the other's lines.",
        file="ucm/log_file.py",
        find="        return exc.errno not in _TAKEN\n",
        replace="        return True\n",
        killers=(
            "tests/test_log_file.py::TestRotation::test_process_of_the_same_number_in_another_container_has_files_of_its_own",
        ),
    ),
    Mutant(
        name="first_line_behind_a_killed_one_spoiled",
        why="R-73: a container's process begins behind a line that was cut, and its start is not in the log.",
        file="ucm/log_file.py",
        find="self._is_torn = not self._ends_well()",
        replace="self._is_torn = False",
        killers=(
            "tests/test_log_file.py::TestLoss::test_line_at_which_a_former_process_was_killed_spoils_no_other_one",
        ),
    ),
    Mutant(
        name="miss_of_another_engine",
        why="R-71: a request that one engine computed and another loaded is said to have missed in the second.",
        file="ucm/story/lives.py",
        find="candidates = known[request_id, by]",
        replace='candidates = known[request_id, ""]',
        killers=(
            "tests/story/test_lives.py::TestJoin::test_a_miss_is_of_the_engine_that_told_of_it",
        ),
    ),
    Mutant(
        name="export_written_to_a_terminal",
        why="R-71: a terminal obeys what stands in the bytes of a block.",
        file="ucm/cli/store/move.py",
        find="if sys.stdout.isatty():",
        replace="if sys.stdout.closed:",
        killers=(
            "tests/cli/test_store_hostile.py::test_export_is_not_written_to_a_terminal",
        ),
    ),
    Mutant(
        name="only_the_last_hit_told",
        why="R-71: the load that a preempted request had before is not in its story.",
        file="ucm/story/told.py",
        find="for matched in life.matched:",
        replace="for matched in life.matched[-1:]:",
        killers=(
            "tests/story/test_told.py::TestSummary::test_each_time_in_memory_has_its_hit",
        ),
    ),
)
