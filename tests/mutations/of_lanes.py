# SPDX-License-Identifier: Apache-2.0
"""Mutants of the lanes, what runs their segments, and the task that serves them all."""

from tests.mutations.mutant import Mutant

__all__ = ["LANES"]

_LANE = "ucm/pipeline/lane.py"
_RUNNER = "ucm/pipeline/runner.py"
_PIPELINE = "ucm/pipeline/pipeline.py"
_TICKETS = "ucm/pipeline/tickets.py"
_WORKERS = "ucm/pipeline/workers.py"
_LANES = "tests/pipeline/test_lane.py"
_RUNS = "tests/pipeline/test_runner.py::TestRunner"
_ASYNC = "tests/pipeline/test_async_device.py"
_LATE = f"{_ASYNC}::TestDeadlines"
_STUCK = f"{_LATE}::test_save_whose_fence_never_opens_is_quarantined"
_GAPS = "tests/mutations/test_gaps.py"
_DEATH = "tests/pipeline/test_workers.py::TestDeath"
_WORLD = "tests/simulation/test_pipeline_world.py::TestPipelineWorld"
_TOO_LATE = """\
if ticket.clock() > ticket.deadline and ticket.guard.revoke(
                Reason.DEADLINE
            ):"""

LANES = (
    # Lanes.
    Mutant(
        name="lane_never_empty",
        why="Each request leaves its lane behind, until memory ends.",
        file=_LANE,
        find="        del self._items[item]\n",
        replace="",
        killers=(f"{_LANES}::TestDeadline::test_item_given_up_lets_the_next_one_in",),
    ),
    Mutant(
        name="lane_forgets_who_waits",
        why="The second span of a request stands before a segment that is free.",
        file=_LANE,
        find=("        self._go_on(item)\n        self._let_in(at)\n"),
        replace="        self._go_on(item)\n",
        killers=(f"{_LANES}::TestOrder::test_items_pass_in_order",),
    ),
    Mutant(
        name="copy_thread_waits_for_the_loop",
        why="Between two spans of a request its copy thread stands still.",
        file=_LANE,
        find="        if not segment.is_copy:\n            if at in",
        replace="        if True:\n            if at in",
        killers=(
            f"{_LANES}::TestOrder::test_copy_thread_has_the_next_items_before_it_is_through",
        ),
    ),
    Mutant(
        name="lane_waits_for_several_at_once",
        why="A later item whose event passes first overtakes the one before it.",
        file=_LANE,
        find="            if at in self._waited_for:\n",
        replace="            if False:\n",
        killers=(f"{_LANES}::TestOrder::test_items_pass_in_order",),
    ),
    Mutant(
        name="given_up_item_blocks_its_lane",
        why="One span that was given up holds up all that the request saves later.",
        file=_LANE,
        find=("        self._leave(item)\n        self._let_in(at)\n"),
        replace="        self._leave(item)\n",
        killers=(f"{_LANES}::TestDeadline::test_item_given_up_lets_the_next_one_in",),
    ),
    Mutant(
        name="begun_after_the_deadline",
        why="A copy begins that nobody will wait for, on blocks that are to be free.",
        file="ucm/pipeline/lane.py",
        find="            ticket.cancel(Reason.DEADLINE)\n        return",
        replace="            pass\n        return",
        killers=(
            f"{_LANES}::TestDeadline::test_item_that_comes_too_late_is_not_begun",
        ),
    ),
    Mutant(
        name="late_item_left_under_its_copy",
        why="A copy that ends behind its deadline never gives its blocks back.",
        file="ucm/pipeline/lane.py",
        find="            ticket.cancel(Reason.DEADLINE)\n        return",
        replace=(
            "            ticket.cancel(Reason.DEADLINE)\n"
            "            return True\n"
            "        return"
        ),
        killers=(
            f"{_LATE}::test_copy_past_its_deadline_is_waited_for_and_does_not_count",
        ),
    ),
    Mutant(
        name="begun_copy_given_up",
        why="Blocks under a copy are given back at the deadline.",
        file="ucm/pipeline/deadlines.py",
        find="            guard.revoke(Reason.DEADLINE)\n",
        replace=(
            "            guard.revoke(Reason.DEADLINE)\n            guard.end()\n"
        ),
        killers=(
            f"{_LANES}::TestDeadline::test_begun_copy_is_waited_for_beyond_the_deadline",
        ),
    ),
    Mutant(
        name="late_copy_given_up_at_once",
        why="One slow copy ends the service, though it would have ended in time.",
        file="ucm/pipeline/deadlines.py",
        find="if was_late and now > ticket.deadline + self._stuck_after:",
        replace="if True:",
        killers=(
            f"{_LANES}::TestDeadline::test_begun_copy_is_waited_for_beyond_the_deadline",
        ),
    ),
    Mutant(
        name="copy_given_up_unseen",
        why="A loop that was held up ends the service over a copy that is long over.",
        file="ucm/pipeline/deadlines.py",
        find="if was_late and now >",
        replace="if now >",
        killers=(
            f"{_LANES}::TestDeadline::test_copy_is_looked_at_before_it_is_given_up",
        ),
    ),
    Mutant(
        name="stuck_copy_waited_for_ever",
        why="Requests behind a copy that never ends wait without being told.",
        file="ucm/pipeline/deadlines.py",
        find="if was_late and now > ticket.deadline + self._stuck_after:",
        replace="if False:",
        killers=(_STUCK,),
    ),
    Mutant(
        name="settled_item_runs_on",
        why="Dropped work is waited for, and what was accepted stands behind it.",
        file=_LANE,
        find="        return ticket.outcome is not None and not self._is_awaited(item, item.at)\n",
        replace="        return False\n",
        killers=(f"{_LANES}::TestErrors::test_settled_item_is_not_even_waited_for",),
    ),
    Mutant(
        name="begun_copy_of_a_settled_item_left",
        why="Slots are given to others while a copy still writes into them.",
        file=_LANE,
        find="        return ticket.outcome is not None and not self._is_awaited(item, item.at)\n",
        replace="        return ticket.outcome is not None\n",
        killers=(
            f"{_LANES}::TestErrors::test_begun_copy_of_a_settled_item_is_waited_for",
        ),
    ),
    Mutant(
        name="lost_copy_not_quarantined",
        why="When nobody knows whether a copy is over, its blocks are given back.",
        file="ucm/pipeline/stage.py",
        find="        ticket.give_up()  #",
        replace="        ticket.guard.end()  #",
        killers=(
            f"{_LANES}::TestDeadline::test_copy_whose_fence_fails_is_quarantined",
        ),
    ),
    # What runs their segments.
    Mutant(
        name="given_up_run_not_marked",
        why="A run that was given up comes back and ends another item of its lane.",
        file="ucm/pipeline/items.py",
        find="        self.is_given_up = True\n",
        replace="",
        killers=(f"{_RUNS}::test_run_that_was_given_up_is_not_heard_of",),
    ),
    Mutant(
        name="given_up_run_handed_back",
        why="A run that was given up comes back and ends another item of its lane.",
        file=_RUNNER,
        find="            if item.is_given_up:\n",
        replace="            if False:\n",
        killers=(f"{_RUNS}::test_run_that_was_given_up_is_not_heard_of",),
    ),
    Mutant(
        name="wait_outlives_its_run",
        why="The service cannot end while any event that was given up never passes.",
        file="ucm/pipeline/items.py",
        find="            self.task.cancel()\n",
        replace="            pass\n",
        killers=(f"{_RUNS}::test_wait_that_was_given_up_ends",),
    ),
    Mutant(
        name="handed_back_twice",
        why="A span is copied twice, and its lane counts one item too few.",
        file=_RUNNER,
        find="        if _is_over(item):\n            return True\n",
        replace="        if _is_over(item):\n            self._end(item)\n            return True\n",
        killers=(f"{_RUNS}::test_run_that_is_over_at_once_is_not_handed_back",),
    ),
    Mutant(
        name="wake_forgotten",
        why="What is over waits for the next look at deadlines: 50 ms for each step.",
        file=_RUNNER,
        find="            self._is_woken = True\n            self._wake()\n",
        replace="            self._is_woken = True\n",
        killers=(f"{_RUNS}::test_run_that_is_over_wakes_and_is_handed_back_once",),
    ),
    Mutant(
        name="error_of_a_wait_lost",
        why="Nobody reads why a save failed, and a device that is gone is not named.",
        file=_RUNNER,
        find=("not the lane\n            fail(item, exc)\n"),
        replace=("not the lane\n            str(exc)\n"),
        killers=(
            f"{_LANES}::TestDeadline::test_copy_whose_fence_fails_is_quarantined",
        ),
    ),
    Mutant(
        name="error_of_a_copy_lost",
        why="A damaged block is not blamed, and fails every load that follows.",
        file="ucm/pipeline/runner.py",
        find=("not the thread\n            fail(item, exc)\n"),
        replace=("not the thread\n            str(exc)\n"),
        killers=(f"{_LANES}::TestErrors::test_error_ends_one_ticket_with_its_reason",),
    ),
    # The call that serves them.
    Mutant(
        name="lanes_not_swept",
        why="A save whose event never passes keeps its blocks for ever.",
        file=_PIPELINE,
        find="        self._deadlines.look_through(self._threads.slowly(tickets), now)\n",
        replace="",
        killers=(f"{_LATE}::test_engine_work_that_never_ends_costs_the_save_only",),
    ),
    Mutant(
        name="deadlines_wait_for_news",
        why="While nothing else happens no deadline passes.",
        file=_PIPELINE,
        find="call_later(_SWEEP_S, self._ring)",
        replace="call_later(3600.0, self._ring)",
        killers=(f"{_LATE}::test_engine_work_that_never_ends_costs_the_save_only",),
    ),
    Mutant(
        name="swept_at_each_wake_up",
        why="The loop looks through a full queue at each copy that ends.",
        file=_PIPELINE,
        find="if now >= self._next_sweep:",
        replace="if True:",
        killers=(f"{_WORLD}::test_what_waits_is_looked_through_at_intervals_only",),
    ),
    Mutant(
        name="window_leaks",
        why="After as many spans as the window has places nothing is saved any more.",
        file=_PIPELINE,
        find="        self._holding[direction] -= 1\n",
        replace="",
        killers=("tests/test_runtime.py::TestBounds::test_requests_take_turns",),
    ),
    Mutant(
        name="window_unbounded",
        why="All that waits is under a copy at once, and loads stand behind it.",
        file=_PIPELINE,
        find="while self._holding[direction] < self._window:",
        replace="while True:",
        killers=(
            "tests/pipeline/test_accelerator_pipeline.py::TestWindow::test_no_more_copies_are_under_way_than_the_window",
        ),
    ),
    Mutant(
        name="slots_of_a_settled_ticket_kept",
        why="Each save that ends while it is copied costs its slots for good.",
        file="ucm/pipeline/lane.py",
        find="        item.ticket.give_back()  #",
        replace="        pass  #",
        killers=(
            f"{_ASYNC}::TestFailure::test_ticket_failed_from_outside_gives_its_slots_back_after_the_copy",
        ),
    ),
    Mutant(
        name="slots_freed_under_a_lost_copy",
        why="A copy that was given up writes over another request's stored blocks.",
        file=_TICKETS,
        find="guard.is_copying or guard.is_quarantined",
        replace="guard.is_copying",
        killers=(_STUCK,),
    ),
    Mutant(
        name="lost_copy_released_in_the_end",
        why="Blocks that were told as lost are told as free as well.",
        file="ucm/pipeline/tickets.py",
        find="guard.quarantine() if is_save",
        replace="guard.is_copying if is_save",
        killers=(
            "tests/test_runtime_deadlines.py::TestDeadlines::test_copy_that_never_ends_is_quarantined_and_never_released",
        ),
    ),
    Mutant(
        name="store_closed_under_a_lost_copy",
        why="The store's memory is unmapped while the device may write into it.",
        file=_PIPELINE,
        find="        self.has_quarantined = True\n",
        replace="",
        killers=(_STUCK,),
    ),
    # Copy threads.
    Mutant(
        name="death_unnoticed",
        why="The engine goes on handing saves to a thread that is gone.",
        file=_WORKERS,
        find="                self._on_death(self._over)",
        replace="                str(self._over)",
        killers=(
            f"{_DEATH}::test_death_fails_running_and_queued_jobs_and_is_told_once",
        ),
    ),
    Mutant(
        name="job_for_a_dead_thread",
        why="A save that came as its thread died is never told of.",
        file=_WORKERS,
        find="        if self._over:",
        replace="        if False:",
        killers=(
            f"{_DEATH}::test_job_after_death_fails",
            f"{_DEATH}::test_job_queued_while_the_thread_dies_fails",
        ),
    ),
    Mutant(
        name="thread_not_prepared",
        why="Copies run on the engine's CPU although the operator asked for others.",
        file=_WORKERS,
        find="            self._on_start()\n",
        replace="",
        killers=(
            "tests/test_affinity.py::TestBinding::test_copy_thread_binds_itself_alone",
        ),
    ),
)
