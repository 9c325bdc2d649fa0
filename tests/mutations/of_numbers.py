# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is counted, of messages' bounds, and of what nobody waits for."""

from tests.mutations.mutant import Mutant

__all__ = ["NUMBERS"]

_BUDGET = "ucm/scheduler/budget.py"
_LINES = "ucm/line_writer.py"
_HOLDS = "ucm/scheduler/holds.py"
_PROGRESS = "ucm/progress.py"
_REQUESTS = "ucm/scheduler/requests.py"
_SAVES = "ucm/scheduler/saves.py"
_SCHEDULER = "ucm/integration/vllm/scheduler.py"
_STATS = "ucm/integration/vllm/stats.py"
_TICKETS = "ucm/pipeline/tickets.py"
_TRANSFERS = "ucm/scheduler/transfers.py"
_WORKER = "ucm/integration/vllm/worker.py"
_DENIED = "ucm/scheduler/denials.py"
_DENIALS = "tests/scheduler/test_transfers.py::TestDenials"
_HALVES = "tests/integration/vllm/test_halves.py"
_HEALTH = "tests/integration/vllm/test_health.py"
_ORDERS = "tests/integration/vllm/test_worker_orders.py"
_REPORTS = "tests/test_progress.py::TestOutbox"
_LEDGER = "tests/scheduler/test_holds.py::TestHoldLedger"
_LOADS = "tests/scheduler/test_loads.py"
_WRITER = "tests/test_line_writer.py::TestLineWriter"
_SIZES = "tests/scheduler/test_budget.py"

NUMBERS = (
    # Denials.
    Mutant(
        name="denied_for_good",
        why="R-15: a block that failed once is never found again where nobody saves.",
        file=_DENIED,
        find="denial is not None and self.now < denial.until",
        replace="denial is not None",
        killers=(
            f"{_DENIALS}::test_block_is_found_again_after_a_time_that_doubles",
            f"{_LOADS}::TestFailures::test_failed_block_is_found_again_though_nobody_saves_it",
        ),
    ),
    Mutant(
        name="denied_for_a_second_each_time",
        why="R-15: a block that stays damaged costs a failed load every second.",
        file=_DENIED,
        find="min(2 * former.seconds, LONGEST_DENIAL_S)",
        replace="min(former.seconds, LONGEST_DENIAL_S)",
        killers=(f"{_DENIALS}::test_block_is_found_again_after_a_time_that_doubles",),
    ),
    Mutant(
        name="four_ranks_deny_four_times",
        why="R-15: a block is missing for longer the more ranks there are.",
        file=_DENIED,
        find="if former is not None and self.now < former.until:",
        replace="if False:",
        killers=(f"{_DENIALS}::test_failures_at_the_same_time_count_once",),
    ),
    Mutant(
        name="door_tells_no_time",
        why="R-15: the scheduler never hears that a denial is over.",
        file=_SCHEDULER,
        find="""\
        self._adapter.tick(now := self._clock())
        if (match :=""",
        replace="        now = self._clock()\n        if (match :=",
        killers=(f"{_HALVES}::TestTogether::test_failed_block_is_found_again",),
    ),
    # Quarantine.
    Mutant(
        name="given_up_hold_stays",
        why="R-16: a request is deferred, and the engine spins, for good.",
        file=_HOLDS,
        find="        self.release(transfer_id, rank)\n",
        replace="",
        killers=(
            f"{_LEDGER}::test_hold_that_every_rank_gave_up_has_ended",
            "tests/scheduler/test_adapter.py::TestReports::test_quarantined_hold_defers_no_request",
        ),
    ),
    Mutant(
        name="given_up_save_is_still_read",
        why="R-16: the rank never tells the engine that it may free the blocks.",
        file=_PROGRESS,
        find="        ids.append(ticket.transfer_id)\n        for owner",
        replace="""\
        ids.append(ticket.transfer_id)
        if is_given_up:
            return
        for owner""",
        killers=(
            f"{_ORDERS}::TestBlocks::test_request_whose_save_is_stuck_is_told_as_sent",
        ),
    ),
    Mutant(
        name="copies_of_a_dead_loop_held",
        why="R-16: nobody sees a copy end any more, and its request waits for ever.",
        file="ucm/runtime.py",
        find="                ticket.give_up()\n",
        replace="                pass\n",
        killers=(
            "tests/pipeline/test_async_device.py::TestDeadlines::test_copies_under_a_dead_loop_are_given_up",
        ),
    ),
    # Messages.
    Mutant(
        name="plan_over_the_bound",
        why="R-17: a huge request raises into the engine's scheduler.",
        file=_BUDGET,
        find="if at and nbytes > _LOAD_NBYTES and self._parks:",
        replace="if False:",
        killers=(
            f"{_SIZES}::TestLoads::test_request_of_a_million_blocks_comes_in_several_plans",
        ),
    ),
    Mutant(
        name="more_promised_than_a_plan_holds",
        why="R-17: a step that computes on its loads gets only a part of them.",
        file=_BUDGET,
        find="self._parks, self.is_bounded = parks, not parks",
        replace="self._parks, self.is_bounded = parks, False",
        killers=(
            f"{_SIZES}::TestLoads::test_request_that_does_not_wait_is_promised_what_one_plan_holds",
        ),
    ),
    Mutant(
        name="half_a_request_told",
        why="R-17: a request runs on blocks whose loads the next plan brings.",
        file=_PROGRESS,
        find="if not load.waiting and name != self._unfinished",
        replace="if not load.waiting",
        killers=(
            f"{_ORDERS}::TestUnfinished::test_load_is_told_when_its_last_plan_has_come",
        ),
    ),
    Mutant(
        name="saves_over_the_bound",
        why="R-17: many saves with long ids raise into the engine's scheduler.",
        file=_BUDGET,
        find="return max(0, min(self._room, nbytes))",
        replace="return max(0, self._room)",
        killers=(
            f"{_SIZES}::TestSaves::test_saves_that_do_not_fit_wait_for_the_next_step",
        ),
    ),
    Mutant(
        name="holds_without_a_bound",
        why="R-17: a step overwrites more saves' blocks than its plan can name.",
        file=_SAVES,
        find="min(self._max_blocks, MAX_HOLDS - self._ledger.num_holds)",
        replace="self._max_blocks",
        killers=(f"{_SIZES}::TestSaves::test_holds_are_bounded",),
    ),
    Mutant(
        name="report_over_the_bound",
        why="R-17: a worker that has much to tell raises into the engine.",
        file=_PROGRESS,
        find="MAX_IDS: Final = 65536",
        replace="MAX_IDS: Final = 1 << 30",
        killers=(
            f"{_REPORTS}::test_reports_of_a_million_tickets_are_cut_and_lose_nothing",
        ),
    ),
    Mutant(
        name="load_over_before_its_failure",
        why="R-17: garbage counts as loaded, and what is computed on it is stored.",
        file=_PROGRESS,
        find="() if self.failures else _take(self.loads_done, MAX_IDS)",
        replace="_take(self.loads_done, MAX_IDS)",
        killers=(f"{_REPORTS}::test_load_is_not_told_as_over_before_its_failure",),
    ),
    # Health.
    Mutant(
        name="always_healthy",
        why="R-19: an engine that is served nothing looks well.",
        file=_STATS,
        find="""\
            self._told_serving = serves
            self._counters.set("ucm_healthy", int(serves))
""",
        replace="""\
            self._told_serving = serves
            self._counters.set("ucm_healthy", 1)
""",
        killers=(
            f"{_HEALTH}::TestHealth::test_failed_rank_is_not_outvoted",
            f"{_HEALTH}::TestHealth::test_store_that_does_not_answer_is_told",
            f"{_HEALTH}::TestHealth::test_closed_store_is_told",
        ),
    ),
    Mutant(
        name="rank_outvotes_the_scheduler",
        why="R-19: the next busy step of a rank that is well hides that others are not.",
        file=_WORKER,
        find="        self._counters = self.counters = Counters()\n",
        replace="""\
        self._counters = self.counters = Counters()
        self._counters.set("ucm_healthy", 1)
""",
        killers=(f"{_HEALTH}::TestHealth::test_failed_rank_is_not_outvoted",),
    ),
    # Counts.
    Mutant(
        name="saved_before_all_parts_are",
        why="R-20: blocks count as saved that no look-up will find.",
        file=_TRANSFERS,
        find="min(entry.least_visible, entry.most_new)",
        replace="entry.most_new",
        killers=(
            "tests/scheduler/test_transfers.py::TestOpenTransfers::test_saved_block_counts_once_when_every_rank_has_its_part",
        ),
    ),
    Mutant(
        name="failed_load_counts_as_loaded",
        why="R-20: tokens that were computed after all count as loaded.",
        file="ucm/scheduler/lives.py",
        find="        self.loading = 0, 0\n        self.external = ()\n",
        replace="        self.external = ()\n",
        killers=(
            f"{_LOADS}::TestTotals::test_failed_load_counts_once_and_nothing_of_it_is_loaded",
        ),
    ),
    Mutant(
        name="reason_with_a_number",
        why="R-20: each ticket is a series of its own in everybody's dashboards.",
        file=_TICKETS,
        find="raise TicketOverError(Reason.OVER)",
        replace='raise TicketOverError(f"transfer {self.transfer_id} is over")',
        killers=(
            "tests/pipeline/test_tickets.py::TestTicket::test_job_on_an_ended_ticket_does_not_start",
        ),
    ),
    # The log.
    Mutant(
        name="log_written_by_who_logs",
        why="R-22: the engine stands still while nobody reads its standard error.",
        file=_LINES,
        find="            self._lines.append(line)\n",
        replace="            self._sink.write(line)\n",
        killers=(
            f"{_HEALTH}::TestLog::test_no_hook_waits_for_a_standard_error_that_nobody_reads",
        ),
    ),
    Mutant(
        name="lines_without_a_bound",
        why="R-22: a log that nobody reads takes the engine's memory.",
        file=_LINES,
        find="if self._num_chars + len(line) > MAX_CHARS:",
        replace="if False:",
        killers=(
            f"{_WRITER}::test_nobody_waits_and_dropped_lines_are_counted_where_they_were",
        ),
    ),
    Mutant(
        name="dropped_in_silence",
        why="R-22: a log with gaps looks whole.",
        file=_LINES,
        find="            if dropped:\n",
        replace="            if False:\n",
        killers=(
            "tests/test_tracing.py::TestFullPipe::test_who_logs_never_waits_and_what_is_dropped_is_told",
        ),
    ),
    Mutant(
        name="child_waits_for_its_parents_thread",
        why="R-22: a forked process hangs at its first line.",
        file=_LINES,
        find="os.register_at_fork(after_in_child=_start_all_afresh)\n",
        replace="",
        killers=(f"{_WRITER}::test_forked_child_writes_its_own_lines_only",),
    ),
    Mutant(
        name="log_file_left_open",
        why="R-22: each engine of a process leaves a file and a thread.",
        file=_LINES,
        find="                self._sink.close()\n                return\n",
        replace="                return\n",
        killers=(
            "tests/test_tracing.py::TestFile::test_closed_log_gives_its_file_back",
        ),
    ),
    Mutant(
        name="line_per_request",
        why="R-22: a busy server's standard error is flooded.",
        file="ucm/tracing.py",
        find='if level == "info" and (name not in _PER_PROCESS or name in told):',
        replace="if False:",
        killers=(
            "tests/test_tracing.py::TestStandardError::test_standard_error_gets_no_line_for_each_request",
        ),
    ),
    Mutant(
        name="scheduler_leaves_its_log_open",
        why="R-22: its last lines are lost with the process, and its file stays open.",
        file=_SCHEDULER,
        find="        close_log(self._log)\n",
        replace="",
        killers=(f"{_HEALTH}::TestLog::test_both_halves_close_their_logs",),
    ),
    Mutant(
        name="worker_leaves_its_log_open",
        why="R-22: its last lines are lost with the process, and its file stays open.",
        file=_WORKER,
        find="        close_log(self._log)\n",
        replace="",
        killers=(f"{_HEALTH}::TestLog::test_both_halves_close_their_logs",),
    ),
)
