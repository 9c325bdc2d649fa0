# SPDX-License-Identifier: Apache-2.0
"""Mutants of how tickets end, and of who waits for that."""

from tests.mutations.mutant import Mutant

__all__ = ["TICKET"]

_DEADLINES = "ucm/pipeline/deadlines.py"
_GUARD = "ucm/pipeline/guard.py"
_GUARDS = "tests/pipeline/test_guard.py::TestBlockGuard"
_LANE = "ucm/pipeline/lane.py"
_RUNTIME = "ucm/runtime.py"
_STAGE = "ucm/pipeline/stage.py"
_TICKETS = "ucm/pipeline/tickets.py"
_WAITING = "ucm/pipeline/waiting.py"
_CLOSES = "tests/test_runtime_close.py::TestClose"
_WAITS = "tests/test_layerwise_gaps.py::TestWaits"
_RUN_COPY = "tests/pipeline/test_stage.py::TestRunCopy"
_LANES = "tests/pipeline/test_lane.py::TestErrors"
_LOOKS = "tests/pipeline/test_deadlines.py"
_ENDS = "tests/pipeline/test_tickets.py::TestTicket"
_CHANGES = "tests/pipeline/test_waiting.py::TestChanges"

TICKET = (
    # The end.
    Mutant(
        name="ended_by_the_loop_only",
        why="Each save costs a wake-up of a copy thread more, to give its slots back.",
        file=_STAGE,
        find="            if item.outcome is not None:\n                ticket.end(",
        replace="            if False:\n                ticket.end(",
        killers=(
            f"{_RUN_COPY}::test_last_word_of_the_last_stage_is_given_where_it_was_said",
        ),
    ),
    Mutant(
        name="waiters_hang_on_a_broken_log",
        why="A disk that is full keeps the engine's thread waiting for a load that ended.",
        file=_TICKETS,
        find="        try:\n            self._listener.ended(self, outcome)\n        finally:\n",
        replace="        self._listener.ended(self, outcome)\n        if True:\n",
        killers=(f"{_ENDS}::test_waiters_go_on_although_the_end_cannot_be_told",),
    ),
    Mutant(
        name="first_reason_forgotten",
        why="A save that the engine took back is counted as one that was too slow.",
        file=_TICKETS,
        find="self.guard.taken_back or reason",
        replace="reason",
        killers=(
            f"{_ENDS}::test_cancelled_ticket_says_why_its_blocks_were_taken_back",
        ),
    ),
    Mutant(
        name="ended_under_a_copy",
        why="A late save ends while it is copied, and its end says nothing of that.",
        file=_TICKETS,
        find="        if not self.guard.revoke(reason):\n            return False\n",
        replace="        self.guard.revoke(reason)\n",
        killers=(f"{_ENDS}::test_ticket_under_a_copy_is_torn_and_not_over",),
    ),
    Mutant(
        name="given_up_without_a_copy",
        why="A device that fails ends the service for a load that it never began.",
        file=_TICKETS,
        find="guard.quarantine() if is_save else guard.is_copying",
        replace="guard.quarantine() if is_save else True",
        killers=(f"{_ENDS}::test_only_a_copy_can_be_given_up",),
    ),
    Mutant(
        name="stuck_without_a_reason",
        why="A save of several rows ends as over, and nobody reads that its copy is stuck.",
        file=_GUARD,
        find="            self.torn = self.torn or Reason.STUCK  # for rows that come too late\n",
        replace="",
        killers=(
            f"{_GUARDS}::test_row_behind_a_copy_that_was_given_up_knows_why_it_is_not_copied",
        ),
    ),
    Mutant(
        name="cycle_of_ticket_and_guard",
        why="27 objects of each ticket wait for the collector, which stops the engine.",
        file=_GUARD,
        find="        self._on_unclean = _nobody\n",
        replace="",
        killers=(f"{_ENDS}::test_nothing_is_left_to_the_collector",),
    ),
    # Time.
    Mutant(
        name="late_once_late_for_ever",
        why="Rows that were late once are given up at the next delay of the loop.",
        file=_DEADLINES,
        find="ticket.is_late, is_late and guard.is_copying\n",
        replace="ticket.is_late, ticket.is_late or is_late\n",
        killers=(f"{_LOOKS}::TestLook::test_more_time_is_counted_from_its_end",),
    ),
    Mutant(
        name="copy_of_an_ended_ticket_unwatched",
        why="A stuck copy of a ticket that ended before is never noticed.",
        file=_DEADLINES,
        find="            self.num_watched += is_open or is_touched\n",
        replace="            self.num_watched += ticket.outcome is None\n",
        killers=(
            f"{_LOOKS}::TestWatched::test_idle_loop_looks_again_while_something_may_come_to_an_end",
        ),
    ),
    Mutant(
        name="stuck_copy_watched_for_ever",
        why="A service that has ended wakes twenty times a second for good.",
        file=_DEADLINES,
        find="            is_touched = guard.is_touched and not ticket.is_given_up\n",
        replace="            is_touched = guard.is_touched\n",
        killers=(
            f"{_LOOKS}::TestWatched::test_idle_loop_looks_again_while_something_may_come_to_an_end",
        ),
    ),
    Mutant(
        name="job_interrupted_by_its_sweep",
        why="A job that finds its blocks taken back is called cancelled amid its work.",
        file=_DEADLINES,
        find="        if ticket.is_worked_on:\n            return Reason.NONE\n",
        replace="",
        killers=(
            f"{_LOOKS}::TestLook::test_blocks_that_were_taken_back_end_a_ticket_that_waits",
        ),
    ),
    # Items of tickets that have ended.
    Mutant(
        name="ended_item_waits_on",
        why="An event that never passes keeps a place in the window, and the lane.",
        file=_LANE,
        find="            if ticket.is_given_up or not ticket.guard.is_copying:\n",
        replace="            if ticket.is_given_up:\n",
        killers=(
            f"{_LANES}::test_item_whose_ticket_ends_meanwhile_leaves_at_the_next_look",
        ),
    ),
    Mutant(
        name="ended_item_leaves_its_copy",
        why="Nobody sees the end of a copy, whose blocks are never given back.",
        file=_LANE,
        find="            if ticket.is_given_up or not ticket.guard.is_copying:\n",
        replace="            if True:\n",
        killers=(f"{_LANES}::test_begun_copy_of_a_settled_item_is_waited_for",),
    ),
    Mutant(
        name="ended_item_leaves_twice",
        why="Two spans of a request that end together end the loop.",
        file=_LANE,
        find="if item not in self._items or item.is_over or",
        replace="if item.is_over or",
        killers=(f"{_LANES}::test_items_of_ended_tickets_leave_once",),
    ),
    # Who waits.
    Mutant(
        name="copy_forgotten_with_its_end",
        why="A step computes into blocks that a load of a broken-off step still writes.",
        file=_RUNTIME,
        find="if ticket.is_noticed and not ticket.guard.is_touched:",
        replace="if ticket.is_noticed:",
        killers=(
            f"{_WAITS}::test_load_that_was_broken_off_is_waited_for_also_behind_its_notice",
        ),
    ),
    Mutant(
        name="ended_ticket_kept",
        why="Each ticket stays in the list of open ones, until memory ends.",
        file=_RUNTIME,
        find="                self._open.pop(ticket.transfer_id, None)\n",
        replace="                pass\n",
        killers=(
            f"{_WAITS}::test_load_that_was_broken_off_is_waited_for_also_behind_its_notice",
        ),
    ),
    Mutant(
        name="woken_by_each_ticket",
        why="The engine's thread is woken twelve times for a batch of twelve.",
        file=_WAITING,
        find="            if is_so():\n                event.set()\n",
        replace="            event.set()\n",
        killers=(f"{_CHANGES}::test_thread_that_waits_for_many_is_woken_once",),
    ),
    Mutant(
        name="first_of_many_is_enough",
        why="The engine overwrites blocks that all saves but one still read.",
        file=_WAITING,
        find="            while pending and is_so(pending[0]):\n",
        replace="            if is_so(pending[0]):\n                pending.clear()\n            while False:\n",
        killers=(f"{_CHANGES}::test_thread_that_waits_for_many_is_woken_once",),
    ),
    Mutant(
        name="waiter_left_behind",
        why="Each wait of the engine makes every later ticket dearer, for good.",
        file=_WAITING,
        find="                self._awaited.remove(waiter)\n",
        replace="                pass\n",
        killers=(f"{_CHANGES}::test_wait_that_is_over_leaves_nothing_behind",),
    ),
    # Close.
    Mutant(
        name="interrupted_close_is_over",
        why="A close that was interrupted leaves the store open for good.",
        file=_RUNTIME,
        find="            if not self._is_over:\n",
        replace="            if not self._closed:\n",
        killers=(f"{_CLOSES}::test_close_that_broke_off_is_gone_on_with",),
    ),
    Mutant(
        name="close_beside_a_close",
        why="Whoever closes second unmaps memory under the copies of the first.",
        file=_RUNTIME,
        find="        with self._closing:  #",
        replace="        if not self._closed:  #",
        killers=(f"{_CLOSES}::test_second_close_comes_back_when_the_first_is_through",),
    ),
)
