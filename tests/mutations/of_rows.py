# SPDX-License-Identifier: Apache-2.0
"""Mutants of layer-wise transfer: rows that come one by one, and layers that wait."""

from tests.mutations.mutant import Mutant

__all__ = ["ROWS"]

_QUEUE = "ucm/pipeline/dump_queue.py"
_PIPELINE = "ucm/pipeline/pipeline.py"
_TICKETS = "ucm/pipeline/tickets.py"
_SAVE = "ucm/pipeline/save.py"
_INTAKE = "ucm/intake.py"
_RUNTIME = "ucm/runtime.py"
_LAYERWISE = "ucm/layerwise.py"
_PROGRESS = "ucm/progress.py"
_SAVES = "tests/test_layerwise.py::TestRowSaves"
_LOADS = "tests/test_layerwise.py::TestRowLoads"
_TO_COME = "tests/test_layerwise.py::TestQueue"
_GAPS = "tests/test_layerwise_gaps.py"
_SLOTS = f"{_GAPS}::TestSlots"
_UNASKED = "tests/test_layerwise_late.py::TestUnasked"
_WAITS = f"{_GAPS}::TestWaits"
_STAGES = "tests/pipeline/test_rows.py::TestRows"

ROWS = (
    # Rows in the queue.
    Mutant(
        name="later_rows_refused",
        why="Under load every layer-wise save is cut off in its middle.",
        file=_QUEUE,
        find="self.refusal_of(ticket) if item.is_first else self._closed",
        replace="self.refusal_of(ticket)",
        killers=(f"{_TO_COME}::test_later_rows_of_an_accepted_save_are_not_refused",),
    ),
    Mutant(
        name="later_rows_counted",
        why="A save with many rows fills the queue alone, and others are refused.",
        file=_QUEUE,
        find="        if not item.is_first:\n            return\n",
        replace="",
        killers=(f"{_GAPS}::TestQueue::test_rows_of_one_save_are_one_ticket",),
    ),
    Mutant(
        name="dropped_row_forgotten",
        why="A close gives up, once more, each save that lacked rows when it ended.",
        file=_QUEUE,
        find="if each.rows_to_come and not each.outcome]",
        replace="if each.rows_to_come]",
        killers=(f"{_SLOTS}::test_rows_of_an_ended_ticket_are_not_to_come",),
    ),
    Mutant(
        name="unfinished_never_ends",
        why="Blocks of a save whose rows never come are held until the engine ends.",
        file=_PIPELINE,
        find="dict.fromkeys([*self.queue.open.values(), *self._worked_on()])",
        replace=(
            "[\n"
            "                item.ticket for lane in self._lanes.values() for item in lane._items\n"
            "            ]"
        ),
        killers=(f"{_TO_COME}::test_save_whose_rows_never_come_ends_at_its_deadline",),
    ),
    Mutant(
        name="unfinished_not_looked_at",
        why="An idle loop sleeps through the deadline of a save that waits for rows.",
        file=_PIPELINE,
        find=" or self._deadlines.num_watched",
        replace="",
        killers=(
            "tests/pipeline/test_serving.py::TestServing::test_deadlines_are_looked_at_while_anything_is_open",
        ),
    ),
    Mutant(
        name="dropped_row_keeps_slots",
        why="A save that ends with a row in the queue keeps its keys unsavable.",
        file="ucm/pipeline/tickets.py",
        find=("            self.give_back()\n        return True\n"),
        replace="        return True\n",
        killers=(
            f"{_SLOTS}::test_slots_of_a_row_are_given_back_when_the_next_one_still_waits",
        ),
    ),
    Mutant(
        name="torn_row_without_reason",
        why="Counters and log say nothing of why saves are dropped.",
        file="ucm/pipeline/guard.py",
        find="return self.torn or self.revoked",
        replace="return self.revoked",
        killers=(f"{_GAPS}::TestReasons::test_save_torn_under_a_row_says_why",),
    ),
    # Tickets of several rows.
    Mutant(
        name="whole_with_the_last_row_asked_for",
        why="A block is stored though rows that came in another order are missing.",
        file=_TICKETS,
        find="            whole = not self._rows_left\n",
        replace="            whole = self.row_ids[-1] in row_ids\n",
        killers=(f"{_STAGES}::test_rows_that_come_one_by_one_load_as_one_block",),
    ),
    Mutant(
        name="slots_freed_under_another_row",
        why="A row that fails lets the copy of another write into somebody's slots.",
        file=_TICKETS,
        find="guard.is_copying or guard.is_quarantined",
        replace="guard.is_quarantined",
        killers=(
            f"{_SLOTS}::test_failed_row_keeps_the_slots_that_another_one_is_copied_into",
            f"{_SLOTS}::test_slots_stay_while_the_device_copies_another_row",
        ),
    ),
    Mutant(
        name="waits_for_all_rows",
        why="The first layer waits for the last one's row: no overlap is left.",
        file=_TICKETS,
        find="frozenset(self._rows_left).isdisjoint(row_ids)",
        replace="not self._rows_left",
        killers=(f"{_WAITS}::test_layer_does_not_wait_for_rows_of_others",),
    ),
    Mutant(
        name="copied_row_tells_nobody",
        why="A layer waits for its row until the load's deadline.",
        file=_TICKETS,
        find="            whole = not self._rows_left\n            self._changed.notify()\n",
        replace="            whole = not self._rows_left\n",
        killers=(f"{_WAITS}::test_layer_goes_on_when_its_row_is_copied",),
    ),
    Mutant(
        name="failed_row_releases_at_once",
        why="A sweep ends the ticket before its failure does, and blames nothing.",
        file=_SAVE,
        find="ticket.guard.end(last=False)",
        replace="ticket.guard.end()",
        killers=(
            f"{_GAPS}::TestReasons::test_failed_copy_releases_nothing_before_the_last_word",
        ),
    ),
    # From the engine's thread.
    Mutant(
        name="rows_of_an_ended_ticket_offered",
        why="Each save that ended early makes the loop carry its other rows around.",
        file=_INTAKE,
        find="if ticket is not None and ticket.outcome is None:",
        replace="if ticket is not None:",
        killers=(
            f"{_GAPS}::TestIntake::test_rows_of_a_ticket_that_is_over_go_nowhere",
        ),
    ),
    Mutant(
        name="abandoned_before_it_is_known",
        why="A save that is given up at once is held until its deadline.",
        file=_RUNTIME,
        find='rows will not come."""\n        self._take_in()\n',
        replace='rows will not come."""\n',
        killers=(f"{_GAPS}::TestIntake::test_save_is_given_up_before_the_loop_saw_it",),
    ),
    Mutant(
        name="abandon_wakes_nobody",
        why="An idle loop leaves the slots of a save that was given up taken.",
        file=_RUNTIME,
        find="OutcomeKind.CANCELLED, reason))\n        self._loop.wake()\n",
        replace="OutcomeKind.CANCELLED, reason))\n",
        killers=(f"{_GAPS}::TestIntake::test_giving_up_wakes_the_loop",),
    ),
    Mutant(
        name="unknown_load_trusted",
        why="A layer computes with the blocks of a load that was refused.",
        file="ucm/pipeline/engine_waits.py",
        find="                failed.append(transfer_id)\n                continue\n",
        replace="                continue\n",
        killers=(f"{_WAITS}::test_load_that_is_not_open_counts_as_failed",),
    ),
    Mutant(
        name="ended_while_it_is_copied",
        why="The engine overwrites blocks that a copy of a failed load still writes.",
        file="ucm/pipeline/engine_waits.py",
        find="ticket.wait_told(left) and ticket.guard.wait_released(left)",
        replace="ticket.wait_told(left)",
        killers=(f"{_LOADS}::test_copy_that_never_ends_stops_the_engine_by_name",),
    ),
    Mutant(
        name="close_overlooks_new_rows",
        why="An engine that stops waits for rows of a save that was just submitted.",
        file=_RUNTIME,
        find="        self._take_in()\n        rowwise",
        replace="        rowwise",
        killers=(
            f"{_GAPS}::TestIntake::test_close_gives_up_rows_that_the_loop_has_not_seen",
        ),
    ),
    # Passes.
    Mutant(
        name="row_submitted_twice",
        why="A hook that is called twice makes two copies of each row.",
        file=_LAYERWISE,
        find="return row_id in self.row_ids and row_id not in self.submitted",
        replace="return row_id in self.row_ids",
        killers=(f"{_SAVES}::test_row_goes_after_its_last_layer_and_only_once",),
    ),
    Mutant(
        name="rows_without_hooks_left",
        why="A model one of whose layers has no hook saves nothing at all.",
        file=_LAYERWISE,
        find="                group.submit(self._runtime, self._all_rows, fence)\n",
        replace="                pass\n",
        killers=(f"{_SAVES}::test_rows_without_a_hook_go_when_the_step_ends",),
    ),
    Mutant(
        name="unfinished_saves_forgotten",
        why="Saves of a step that failed hold their blocks until their deadline.",
        file=_LAYERWISE,
        find="            elif not group.is_whole:\n",
        replace="            elif False:\n",
        killers=(f"{_SAVES}::test_save_whose_forward_pass_failed_is_dropped",),
    ),
    Mutant(
        name="look_ahead_off_by_one",
        why="Each layer waits for a row that was submitted a moment ago.",
        file=_LAYERWISE,
        find="rows = self._order[self._num_submitted : place + 1]",
        replace="rows = self._order[self._num_submitted : max(1, place)]",
        killers=(f"{_LOADS}::test_rows_are_submitted_so_far_ahead_of_the_layer",),
    ),
    Mutant(
        name="all_rows_looked_at_in_each_layer",
        why="R-18: many layers and requests cost the engine's thread a quarter of a second in a step.",
        file=_LAYERWISE,
        find="        self._num_submitted += len(rows)\n",
        replace="",
        killers=(
            "tests/test_layerwise_many.py::test_each_row_of_each_request_is_looked_at_once_in_a_step",
        ),
    ),
    Mutant(
        name="rows_of_the_step_before_submitted",
        why="The second step that loads gets none of its first rows, and waits for them in vain.",
        file=_LAYERWISE,
        find="        self._num_submitted = 0\n        self._fence = fence\n",
        replace="        self._fence = fence\n",
        killers=(f"{_LOADS}::test_loads_of_the_former_step_are_ended_first",),
    ),
    Mutant(
        name="rows_of_a_group_searched",
        why="R-18: of eighty layers each row of each request is compared with forty others, on the engine's thread.",
        file=_LAYERWISE,
        find="rows[group.group_id], at_end",
        replace="[*rows[group.group_id]], at_end",
        killers=(
            "tests/test_layerwise_many.py::test_no_row_is_searched_for_among_the_others",
        ),
    ),
    Mutant(
        name="failed_group_not_waited_for",
        why="The engine reuses blocks of a failed load while its copy goes on.",
        file=_LAYERWISE,
        find="                self._failed.append(group)\n",
        replace="",
        killers=(
            f"{_LOADS}::test_failed_request_gets_no_further_rows_and_others_go_on",
        ),
    ),
    Mutant(
        name="failed_request_served_on",
        why="A request that is recomputed anyway loads all its rows.",
        file=_LAYERWISE,
        find="                self._groups.remove(group)\n",
        replace="",
        killers=(
            f"{_LOADS}::test_failed_request_gets_no_further_rows_and_others_go_on",
        ),
    ),
    Mutant(
        name="unasked_load_is_well",
        why="What a layer computed before its row came is kept as right.",
        file=_LAYERWISE,
        find="                unasked.update(group.transfer_ids)\n",
        replace="",
        killers=(
            f"{_UNASKED}::test_load_is_late_also_when_all_of_it_has_landed",
            f"{_UNASKED}::test_load_of_a_single_row_that_no_layer_asked_for_is_late",
        ),
    ),
    Mutant(
        name="failed_group_never_late",
        why="A load beside one that failed is kept, though a layer ran before it.",
        file=_LAYERWISE,
        find="        for group in over:\n            if not",
        replace="        for group in over[:0]:\n            if not",
        killers=(
            f"{_UNASKED}::test_load_beside_a_failed_one_is_late_if_a_layer_did_not_wait",
        ),
    ),
    Mutant(
        name="late_loads_passed_over",
        why="Only the log knows that a layer ran before its row came.",
        file="ucm/integration/vllm/worker.py",
        find="self._progress.came_late(self._row_loads.finish())",
        replace="self._row_loads.finish()",
        killers=(
            "tests/integration/vllm/test_host_layerwise.py::TestLateLoads::test_load_that_landed_behind_its_layer_is_told_by_its_blocks",
        ),
    ),
    Mutant(
        name="row_behind_a_failed_one_is_copied",
        why="A row is written into slots that are another ticket's by now.",
        file=_TICKETS,
        find=(
            "            if self.outcome is not None:\n"
            "                raise TicketOverError(Reason.OVER)\n"
        ),
        replace="",
        killers=(
            "tests/pipeline/test_tickets.py::TestTicket::test_job_on_an_ended_ticket_does_not_start",
        ),
    ),
    Mutant(
        name="failed_row_goes_on",
        why="A row whose copy never began is waited for, and the loop dies of it.",
        file="ucm/pipeline/stage.py",
        find="    item.has_failed = True\n",
        replace="",
        killers=(
            "tests/pipeline/test_stage.py::TestFail::test_error_ends_the_ticket_and_its_item",
        ),
    ),
    Mutant(
        name="late_loads_of_a_broken_pass_passed_over",
        why="The engine keeps what a pass that broke off computed from stale blocks.",
        file="ucm/integration/vllm/worker.py",
        find="self._progress.came_late(self._row_loads.begin(groups, fence))",
        replace="self._row_loads.begin(groups, fence)",
        killers=(
            "tests/integration/vllm/test_host_layerwise.py::TestLateLoads::test_late_load_of_a_pass_that_broke_off_is_told_by_the_next",
        ),
    ),
    Mutant(
        name="late_load_told_as_loaded",
        why="The engine keeps what it computed from blocks that were not there.",
        file=_PROGRESS,
        find="            outcome = Outcome(OutcomeKind.FAILED, Reason.UNASKED)\n",
        replace="            pass\n",
        killers=(f"{_UNASKED}::test_late_load_is_told_as_failed_with_its_blocks",),
    ),
)
