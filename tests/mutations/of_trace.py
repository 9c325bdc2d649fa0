# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is told of tickets and requests, and of where it goes."""

from tests.mutations.mutant import Mutant

__all__ = ["TRACE"]

_EVENTS = "ucm/events.py"
_LIFELOG = "ucm/integration/vllm/lifelog.py"
_RECORDER = "ucm/pipeline/recorder.py"
_RECORDS = "ucm/scheduler/records.py"
_RING = "ucm/pipeline/ring.py"
_SAVES = "ucm/scheduler/saves.py"
_SPANS = "ucm/spans.py"
_STAGE = "ucm/pipeline/stage.py"
_TRACING = "ucm/tracing.py"
_LOG_FILE = "ucm/log_file.py"
_QUIET = "tests/test_tracing_quiet.py"
_FILES = "tests/test_log_file.py"
_LINES = "tests/test_runtime_trace.py"
_OVER = "tests/scheduler/test_records.py::TestOver"
_BLOCKS = "tests/scheduler/test_records.py::TestBlocks"
_REQUEST = "tests/integration/vllm/test_lifelog.py::TestRequest"
_HEADER = "tests/test_spans.py::TestHeader"
_JOINED = "tests/test_spans.py::TestSpans"

TRACE = (
    Mutant(
        name="key_that_nobody_knows",
        why="A line has a key of which no reader can know what it means.",
        file=_RECORDER,
        find="            group=ticket.span.group_id,\n",
        replace="            group_id=ticket.span.group_id,\n",
        killers=(
            "tests/test_events.py::TestCalls::test_call_says_what_the_table_says",
            f"{_LINES}::TestTicket::test_line_tells_the_whole_way",
        ),
    ),
    Mutant(
        name="unknown_keys_are_known",
        why="A simulated run is held against no table.",
        file=_EVENTS,
        find="    return unknown\n",
        replace="    return set()\n",
        killers=(
            "tests/test_events.py::TestTable::test_key_that_is_not_in_the_table_is_found",
        ),
    ),
    Mutant(
        name="edges_on_another_clock",
        why="Stages of two tickets cannot be compared.",
        file=_RECORDER,
        find="round(begin - zero, 6)",
        replace="round(begin, 6)",
        killers=(f"{_LINES}::TestTicket::test_line_tells_the_whole_way",),
    ),
    Mutant(
        name="failed_stage_has_no_end",
        why="The stage that failed ends before it began, long ago.",
        file=_RECORDER,
        find="end - zero if end else total",
        replace="end - zero",
        killers=(f"{_LINES}::TestTicket::test_stage_that_failed_ends_with_its_ticket",),
    ),
    Mutant(
        name="stage_begins_with_its_last_row",
        why="A stage of many rows looks as short as one of them.",
        file=_STAGE,
        find="    if stage not in ticket.stage_times:\n",
        replace="    if True:\n",
        killers=(
            "tests/pipeline/test_stage.py::TestRunCopy::test_stage_that_runs_again_adds_its_seconds",
        ),
    ),
    Mutant(
        name="ring_of_each_failure",
        why="R-72: a store that is gone writes a ring for each ticket.",
        file=_RING,
        find="now >= self._quiet_until",
        replace="True",
        killers=(
            "tests/pipeline/test_ring.py::TestDump::test_failures_write_it_once_in_ten_seconds",
            f"{_LINES}::TestRing::test_failed_ticket_leaves_what_stages_did_last",
        ),
    ),
    Mutant(
        name="ring_without_an_end",
        why="It grows as long as the process runs.",
        file=_RING,
        find="deque(maxlen=_SIZE)",
        replace="deque()",
        killers=("tests/pipeline/test_ring.py::TestDump::test_ring_has_a_fixed_size",),
    ),
    Mutant(
        name="failed_runtime_without_its_ring",
        why="What led to it is lost.",
        file=_RECORDER,
        find="        self.ring.failed(Reason.RUNTIME_FAILED)\n",
        replace="",
        killers=(
            f"{_LINES}::TestRing::test_failed_runtime_leaves_it_behind_its_own_line",
        ),
    ),
    # Requests.
    Mutant(
        name="request_told_before_its_saves",
        why="Its line calls blocks unsaved that are about to be.",
        file=_RECORDS,
        find="        is_open |= record.unsettled_blocks != record.num_unknown\n",
        replace="",
        killers=(f"{_OVER}::test_saves_and_kept_blocks_are_waited_for",),
    ),
    Mutant(
        name="last_request_waits_for_the_next",
        why="An engine that waits has not told of its last request.",
        file=_RECORDS,
        find="(at_end or (not self.present and self._is_last()))",
        replace="at_end",
        killers=(f"{_OVER}::test_nothing_is_waited_for_where_nobody_may_come_back",),
    ),
    Mutant(
        name="whose_blocks_is_guessed",
        why="One request is told to have what another one lost.",
        file=_RECORDS,
        find="                if not is_known:\n",
        replace="                if not owners:\n",
        killers=(
            f"{_BLOCKS}::test_of_a_shared_save_that_was_cut_nobody_knows_whose_blocks",
        ),
    ),
    Mutant(
        name="lives_of_told_requests_stay",
        why="Each request leaves something behind for ever.",
        file=_RECORDS,
        find="            del self._of_life[life]\n",
        replace="            pass\n",
        killers=(f"{_OVER}::test_late_report_of_what_was_told_changes_nothing",),
    ),
    Mutant(
        name="abort_told_as_an_end",
        why="Requests that were given up look as if they had been served.",
        file=_LIFELOG,
        find="            record.is_aborted = True\n",
        replace="            pass\n",
        killers=(f"{_REQUEST}::test_aborted_and_preempted_requests_are_told_apart",),
    ),
    Mutant(
        name="dropped_blocks_of_nobody",
        why="Why a prompt was not stored cannot be seen in its request's line.",
        file=_SAVES,
        find="        life.record.dropped_blocks += lost\n",
        replace="",
        killers=(
            "tests/scheduler/test_saves.py::TestRecords::test_dropped_blocks_are_told_of_their_request",
        ),
    ),
    # Where lines go.
    Mutant(
        name="ring_on_standard_error",
        why="R-72: a server's log gets a hundred thousand characters in one line.",
        file=_TRACING,
        find="        if name == TRACE_RING:",
        replace="        if False:",
        killers=(f"{_QUIET}::TestQuiet::test_ring_is_for_files_only",),
    ),
    Mutant(
        name="start_told_each_time",
        why="R-72: a runtime that comes and goes fills a server's log.",
        file=_TRACING,
        find="        told.add(name)\n",
        replace="",
        killers=(
            f"{_QUIET}::TestQuiet::test_standard_error_gets_a_process_s_start_and_end_once",
        ),
    ),
    Mutant(
        name="summary_of_all_there_was",
        why="R-72: what was counted in a minute cannot be seen.",
        file=_TRACING,
        find="            former.update(now)\n",
        replace="",
        killers=(f"{_QUIET}::TestSummary::test_each_says_what_is_new",),
    ),
    Mutant(
        name="summary_of_nothing",
        why="R-72: a server that waits writes a line a minute for ever.",
        file=_TRACING,
        find=" if more else",
        replace=" if True else",
        killers=(f"{_QUIET}::TestSummary::test_each_says_what_is_new",),
    ),
    Mutant(
        name="summary_waits_for_a_line",
        why="R-72: numbers of a process that logs nothing else are never told.",
        file="ucm/line_writer.py",
        find=" or self._regular is not regular",
        replace="",
        killers=(
            "tests/test_line_writer.py::TestLineWriter::test_line_is_made_at_intervals_although_nobody_logs",
        ),
    ),
    Mutant(
        name="full_disk_in_silence",
        why="R-73: lines that a disk did not take are missing, and nothing says so.",
        file="ucm/line_writer.py",
        find="                    self._drop(lost - bool(dropped))\n",
        replace="                    pass\n",
        killers=(
            "tests/test_line_writer.py::TestLineWriter::test_lines_that_a_disk_does_not_take_are_told",
        ),
    ),
    Mutant(
        name="log_without_an_end",
        why="A log fills the disk.",
        file=_LOG_FILE,
        find="                self._put_aside()  # while it is ours\n",
        replace="                pass\n",
        killers=(
            f"{_FILES}::TestRotation::test_lines_stay_whole_and_the_oldest_file_goes",
        ),
    ),
    Mutant(
        name="log_into_a_removed_file",
        why="Whoever cleans up has no log from then on.",
        file=_LOG_FILE,
        find="            if not self._is_there(ours):\n",
        replace="            if False:\n",
        killers=(
            f"{_FILES}::TestLoss::test_file_that_vanished_is_made_anew",
            f"{_FILES}::TestRotation::test_two_logs_of_a_process_share_their_files",
        ),
    ),
    Mutant(
        name="cut_line_spoils_the_next",
        why="R-73: two lines are lost for each that a full disk has cut, and one is told.",
        file=_LOG_FILE,
        find="                if self._is_torn:  # apart",
        replace="                if False:  # apart",
        killers=(
            f"{_FILES}::TestLoss::test_line_behind_one_that_was_cut_stands_alone",
        ),
    ),
    # Traces of others.
    Mutant(
        name="trace_as_it_came",
        why="What a client sends goes into messages and logs.",
        file=_SPANS,
        find="isinstance(given, str) and _FORM.fullmatch(given)",
        replace="isinstance(given, str)",
        killers=(f"{_HEADER}::test_anything_else_counts_as_none",),
    ),
    Mutant(
        name="stages_beside_their_ticket",
        why="A trace has stages of which nobody knows whose they are.",
        file=_SPANS,
        find="tracer.start_span(stage, context=inside,",
        replace="tracer.start_span(stage, context=context,",
        killers=(f"{_JOINED}::test_ticket_joins_the_requests_trace_with_its_stages",),
    ),
    Mutant(
        name="opentelemetry_for_everybody",
        why="Each process pays for a package that its host does not use.",
        file=_SPANS,
        find='sys.modules.get("opentelemetry.trace")',
        replace='__import__("opentelemetry.trace").trace',
        killers=(f"{_JOINED}::test_process_without_opentelemetry_pays_nothing",),
    ),
    Mutant(
        name="traces_without_a_bound",
        why="A plan with many traced requests is no message any more.",
        file=_LIFELOG,
        find="            if len(traces) == _MOST_TRACES:\n",
        replace="            if False:\n",
        killers=(
            "tests/integration/vllm/test_lifelog.py::TestTrace::test_traces_of_a_plan_are_bounded",
        ),
    ),
)
