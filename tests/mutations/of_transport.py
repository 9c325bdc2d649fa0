# SPDX-License-Identifier: Apache-2.0
"""Mutants of the pipeline and the runtime."""

from tests.mutations.mutant import Mutant

__all__ = ["TRANSPORT"]

_SAVE = "ucm/pipeline/save.py"
_LOAD = "ucm/pipeline/load.py"
_LANE = "ucm/pipeline/lane.py"
_TICKETS = "ucm/pipeline/tickets.py"
_GUARD = "ucm/pipeline/guard.py"
_QUEUE = "ucm/pipeline/dump_queue.py"
_PIPELINE = "ucm/pipeline/pipeline.py"
_WORDS = "ucm/pipeline/recorder.py"
_RUNTIME = "ucm/runtime.py"
_ROWS = "tests/pipeline/test_rows.py::TestRows"
_ORDER = "tests/pipeline/test_rows.py::TestOrder"
_ASYNC = "tests/pipeline/test_async_device.py"
_QUEUES = "tests/pipeline/test_dump_queue.py::TestDumpQueue"
_TICKET = "tests/pipeline/test_tickets.py::TestTicket"
_RECORDER = "tests/pipeline/test_recorder.py::TestRecorder"
_ENDS = "tests/test_runtime.py::TestSaveAndLoad"
_FAULTS = "tests/test_runtime.py::TestFaults"
_PIECES = "tests/pipeline/test_load.py::TestPieces"
_BOUNDS = "tests/test_runtime.py::TestBounds"
_DEADLINES = "tests/test_runtime_deadlines.py::TestDeadlines"
_FENCE = "tests/test_runtime_deadlines.py::TestFence"
_SUBMIT = "tests/test_runtime.py::TestSubmit"
_START = "tests/test_runtime_start.py::TestStart"
_GUARDS = "tests/pipeline/test_guard.py::TestBlockGuard"
_GAPS = "tests/mutations/test_gaps.py"

TRANSPORT = (
    # Saves.
    Mutant(
        name="released_before_the_copy",
        why="The engine overwrites blocks that the save is about to read.",
        file=_SAVE,
        find="        whole = False\n",
        replace="        ticket.guard.end()\n        whole = False\n",
        killers=(
            f"{_DEADLINES}::test_save_that_is_still_copying_at_its_deadline_is_never_stored",
        ),
    ),
    Mutant(
        name="released_before_the_fence",
        why="The call has returned, the device still reads, the engine overwrites.",
        file=_SAVE,
        find='behind the copy."""\n',
        replace='behind the copy."""\n        given.ticket.guard.end()\n',
        killers=(
            f"{_ASYNC}::TestClose::test_close_under_a_copy_leaves_store_and_device_open",
        ),
    ),
    Mutant(
        name="released_with_the_first_row",
        why="The engine overwrites rows that were not copied yet.",
        file=_TICKETS,
        find="self.guard.end(last=whole)",
        replace="self.guard.end()",
        killers=(f"{_ROWS}::test_block_is_stored_with_its_last_row_only",),
    ),
    Mutant(
        name="held_for_the_store",
        why="The engine's blocks are held for as long as a disk or a network takes.",
        file=_TICKETS,
        find="        self.guard.end(last=whole)\n",
        replace="",
        killers=(f"{_ENDS}::test_source_is_released_before_the_store_is_done",),
    ),
    Mutant(
        name="released_under_another_row",
        why="The copy of one row ends, that of another still reads the blocks.",
        file=_GUARD,
        find="            if self._copies:\n                return\n",
        replace="",
        killers=(
            f"{_ROWS}::test_rows_under_way_together_are_whole_with_the_last_copy",
        ),
    ),
    Mutant(
        name="whole_while_a_row_is_copied",
        why="A block is sealed and stored while one of its rows is on its way.",
        file=_SAVE,
        find="and item.ticket.copied(item.row_ids)",
        replace="and (item.ticket.copied(item.row_ids) or True)",
        killers=(
            f"{_ROWS}::test_rows_under_way_together_are_whole_with_the_last_copy",
        ),
    ),
    Mutant(
        name="row_begun_after_the_blocks_were_asked_for",
        why="The engine waits for one row after the other of a save that is lost.",
        file=_GUARD,
        find="if self.torn or self._state",
        replace="if self._state",
        killers=(f"{_GUARDS}::test_no_copy_begins_once_the_blocks_were_asked_for",),
    ),
    Mutant(
        name="torn_committed",
        why="Bytes that the engine overwrote under the copy are stored as good.",
        file="ucm/pipeline/tickets.py",
        find="        if self.guard.torn:\n            raise",
        replace="        if False:\n            raise",
        killers=(f"{_FENCE}::test_torn_copy_is_never_stored",),
    ),
    Mutant(
        name="committed_without_all_rows",
        why="A block is found although the bytes of some layers never came.",
        file=_SAVE,
        find="        if given.is_whole:\n            lost =",
        replace=(
            "        _lease(ticket).seal(0, 1)\n        if True:\n            lost ="
        ),
        killers=(f"{_ROWS}::test_block_is_stored_with_its_last_row_only",),
    ),
    Mutant(
        name="sealed_before_the_copy",
        why="The checksum of half a block makes it a valid one.",
        file=_SAVE,
        find="if not fence.is_done():",
        replace="if False:",
        killers=(f"{_ORDER}::test_slots_are_not_sealed_before_their_copy",),
    ),
    Mutant(
        name="committed_too_late",
        why="A save that was told as dropped becomes visible after all.",
        file="ucm/pipeline/tickets.py",
        find="if self.clock() > self.deadline:",
        replace="if False:",
        killers=(f"{_ORDER}::test_late_ticket_is_not_committed",),
    ),
    # Loads.
    Mutant(
        name="loaded_unverified",
        why="Damaged bytes become the model's context, and its output is wrong.",
        file=_LOAD,
        find="        lease.verify(start, stop)\n",
        replace="        pass\n",
        killers=(
            f"{_PIECES}::test_corrupt_block_anywhere_fails_the_load_and_leaves_zeros",
        ),
    ),
    Mutant(
        name="loaded_unrechecked",
        why="A slot that was recycled under the copy is told as loaded.",
        file=_LOAD,
        find="    lease.recheck()\n    if not",
        replace="    if not",
        killers=(
            f"{_ROWS}::test_recycled_slot_fails_the_load",
            (
                "tests/pipeline/test_load_verified.py::TestPublishVerified::"
                "test_recycled_slot_is_not_published_by_who_verified"
            ),
        ),
    ),
    Mutant(
        name="recycled_taken_for_corrupt",
        why="A block that was just stored anew is forgotten as damaged.",
        file=_LOAD,
        find="    lease.recheck()  # bytes",
        replace="    # bytes",
        killers=(
            f"{_FAULTS}::test_slot_recycled_while_it_is_verified_is_no_corruption",
        ),
    ),
    Mutant(
        name="revoked_load_begun",
        why="A load writes into blocks that serve another request by now.",
        file=_LOAD,
        find="if not guard.begin():",
        replace="if False:",
        killers=(f"{_ROWS}::test_revoked_ticket_is_not_begun",),
    ),
    Mutant(
        name="failed_load_told_as_loaded",
        why="A store's error is swallowed, and the engine computes on garbage.",
        file="ucm/pipeline/outcomes.py",
        find="return Outcome(OutcomeKind.FAILED, reason, bad_key=bad_key, error=text_of(error))",
        replace="return Outcome(OutcomeKind.COMMITTED, committed=1)",
        killers=(f"{_FAULTS}::test_failed_load_is_told_and_others_go_on",),
    ),
    # Tickets.
    Mutant(
        name="settled_twice",
        why="A ticket that failed is told as stored by whoever comes later.",
        file=_TICKETS,
        find="            if self.outcome is not None:\n                return False\n",
        replace="",
        killers=(f"{_TICKET}::test_last_word_is_given_once",),
    ),
    Mutant(
        name="told_twice",
        why="The engine hears of one end twice, and its own count ends it.",
        file="ucm/pipeline/tickets.py",
        find=(
            "            if self.outcome is not None:\n                return False\n"
        ),
        replace="",
        killers=(f"{_RECORDER}::test_last_word_is_given_once",),
    ),
    Mutant(
        name="not_torn",
        why="An engine that could not wait any longer gets its old bytes stored.",
        file=_GUARD,
        find="                self.torn = self.torn or reason\n",
        replace="",
        killers=(f"{_FENCE}::test_torn_copy_is_never_stored",),
    ),
    Mutant(
        name="quarantine_ends",
        why="A copy that was given up, and goes on, gives its blocks back.",
        file=_GUARD,
        find="            if self._state not in (_Guarded.FREE, _Guarded.COPYING):\n                return\n",
        replace="            if self._state is _Guarded.RELEASED:\n                return\n",
        killers=(
            f"{_DEADLINES}::test_copy_that_never_ends_is_quarantined_and_never_released",
        ),
    ),
    Mutant(
        name="slots_freed_under_a_job",
        why="A slot goes to another save while a copy still writes into it.",
        file=_TICKETS,
        find="self._num_jobs > 0 or guard.is_copying",
        replace="guard.is_copying",
        killers=(f"{_TICKET}::test_resources_outlive_a_job_whose_ticket_has_ended",),
    ),
    # The queue.
    Mutant(
        name="tickets_unbounded",
        why="A slow store fills the worker's memory with waiting saves.",
        file=_QUEUE,
        find="if waiting >= self._max_tickets:",
        replace="if False:",
        killers=(f"{_QUEUES}::test_full_queue_refuses_no_load",),
    ),
    Mutant(
        name="bytes_unbounded",
        why="A slow store holds all of the engine's blocks.",
        file=_QUEUE,
        find="if waiting and nbytes + ticket.nbytes > self._max_nbytes:",
        replace="if False:",
        killers=(f"{_QUEUES}::test_item_larger_than_the_queue_passes_alone",),
    ),
    Mutant(
        name="large_ticket_never_fits",
        why="A span larger than the queue is refused for ever.",
        file=_QUEUE,
        find="if waiting and nbytes + ticket.nbytes > self._max_nbytes:",
        replace="if nbytes + ticket.nbytes > self._max_nbytes:",
        killers=(f"{_QUEUES}::test_item_larger_than_the_queue_passes_alone",),
    ),
    Mutant(
        name="loads_refused",
        why="A request whose blocks are allocated already is refused its load.",
        file=_QUEUE,
        find="        if ticket.direction is Direction.SAVE:\n            return",
        replace="        if True:\n            return",
        killers=(f"{_QUEUES}::test_full_queue_refuses_no_load",),
    ),
    Mutant(
        name="saves_before_loads",
        why="Requests that users wait for stand behind saves that nobody waits for.",
        file=_QUEUE,
        find="is_beside = is_save and bool(self._lanes[Direction.LOAD])",
        replace="is_beside = False",
        killers=(f"{_QUEUES}::test_save_is_held_back_while_a_load_waits",),
    ),
    Mutant(
        name="unfair_pick",
        why="One huge request starves all others.",
        file=_QUEUE,
        find="lanes.move_to_end(key)  # the others' turn",
        replace="lanes.move_to_end(key, last=False)",
        killers=(f"{_QUEUES}::test_lane_with_one_item_is_served_in_its_round",),
    ),
    Mutant(
        name="promoted_for_ever",
        why="A lane that was waited for once goes before loads until the process ends.",
        file=_QUEUE,
        find="                self._promoted.discard(key)\n            elif",
        replace="                pass\n            elif",
        killers=(f"{_QUEUES}::test_promotion_ends_with_what_waited",),
    ),
    Mutant(
        name="never_swept",
        why="What waits behind a store that hangs keeps its blocks for ever.",
        file="ucm/pipeline/deadlines.py",
        find=(
            "        if now > ticket.deadline:\n            return Reason.DEADLINE\n"
        ),
        replace="",
        killers=(
            f"{_GAPS}::test_save_that_waits_in_the_queue_is_dropped_at_its_deadline",
        ),
    ),
    # What is told.
    Mutant(
        name="blocks_not_conserved",
        why="Blocks vanish from the sums that operators look at.",
        file=_WORDS,
        find="                totals[parts] = totals.get(parts, 0) + blocks\n",
        replace="",
        killers=(f"{_ENDS}::test_every_block_offered_ends_in_exactly_one_way",),
    ),
    Mutant(
        name="settled_but_held",
        why="A save that was dropped keeps the engine's blocks.",
        file="ucm/pipeline/tickets.py",
        find="        self.guard.revoke(outcome.reason or Reason.OVER)\n",
        replace="",
        killers=(f"{_RECORDER}::test_engine_hears_of_the_end_although_the_log_breaks",),
    ),
    Mutant(
        name="news_passed_over",
        why="An engine that waits for a load sleeps although its news are there.",
        file="ucm/mailbox.py",
        find="""\
        self._filled.clear()
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
""",
        replace="""\
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        self._filled.clear()
""",
        killers=(f"{_GAPS}::test_message_that_comes_amid_a_drain_is_taken_or_news",),
    ),
    # The runtime.
    Mutant(
        name="fence_gives_up",
        why="A save that did not end in time is stored with the engine's new bytes.",
        file="ucm/pipeline/engine_waits.py",
        find="                ticket.guard.revoke(Reason.RECYCLED, positions)\n",
        replace="                pass\n",
        killers=(f"{_FENCE}::test_torn_copy_is_never_stored",),
    ),
    Mutant(
        name="fence_misses_the_newest",
        why="A fence passes over saves of which the loop has not heard yet.",
        file=_RUNTIME,
        find="        if transfer_ids or overwritten:\n            self._take_in()\n",
        replace="        if transfer_ids or overwritten:\n",
        killers=(f"{_SUBMIT}::test_fence_reaches_what_was_just_submitted",),
    ),
    Mutant(
        name="closed_under_a_copy",
        why="The store's memory is unmapped while the device writes into it.",
        file=_RUNTIME,
        find="        quiet = quiet and not self._pipeline.has_quarantined  #",
        replace="        #",
        killers=(
            (
                f"{_ASYNC}::TestDeadlines::"
                "test_load_that_ends_behind_the_close_was_not_called_quiet"
            ),
        ),
    ),
    Mutant(
        name="closed_beside_a_thread",
        why="The store's memory is unmapped while a thread of ours still uses it.",
        file=_RUNTIME,
        find="        if quiet:\n            with contextlib.closing(self._store):",
        replace="        if True:\n            with contextlib.closing(self._store):",
        killers=(
            f"{_ASYNC}::TestClose::test_close_under_a_copy_leaves_store_and_device_open",
        ),
    ),
    Mutant(
        name="bad_batch_dropped",
        why="Requests of a plan that could not be read wait for ever.",
        file="ucm/intake.py",
        find='self._on_failure("a batch of orders could not be taken in")',
        replace="pass",
        killers=(f"{_SUBMIT}::test_batch_that_cannot_be_made_fails_the_runtime",),
    ),
    Mutant(
        name="copy_threads_anywhere",
        why="Copies run on the engine's CPU although the operator asked for others.",
        file=_RUNTIME,
        find="        if self._affinity is not None:\n",
        replace="        if False:\n",
        killers=(f"{_START}::test_copy_threads_bind_themselves_and_say_so",),
    ),
)
