# SPDX-License-Identifier: Apache-2.0
"""Mutants of what keeps a slow or hung store, or too much work, from holding all up."""

from tests.mutations.mutant import Mutant

__all__ = ["STUCK"]

_BYPASS = "ucm/stores/bypass.py"
_DOOR = "ucm/integration/vllm/scheduler.py"
_INTAKE = "ucm/intake.py"
_LANE = "ucm/pipeline/lane.py"
_PACE = "ucm/pipeline/pace.py"
_PIPELINE = "ucm/pipeline/pipeline.py"
_QUEUE = "ucm/pipeline/dump_queue.py"
_BYPASSES = "tests/stores/test_bypass.py::TestLoads"
_LANES = "tests/pipeline/test_lane.py"
_OVERDUE = "tests/pipeline/test_pace.py::TestOverdue::test_table"
_PACES = "tests/pipeline/test_pace.py::TestPace"
_QUEUES = "tests/pipeline/test_dump_queue.py::TestDumpQueue"
_RUNTIME = "tests/test_runtime_overload.py"
_SLOW = f"{_RUNTIME}::TestSlowStore"
_OVERLOAD = f"{_RUNTIME}::TestOverload"
_HUNG = f"{_RUNTIME}::TestHungRead"
_TOGETHER = (
    "tests/integration/vllm/test_hung_loads.py::TestTogether::"
    "test_store_whose_reads_hang_costs_one_deadline_and_is_tried_again"
)

STUCK = (
    # A slow store.
    Mutant(
        name="blocks_held_until_commit",
        why="The fifth save keeps the engine's blocks for as long as the store takes.",
        file="ucm/pipeline/stage.py",
        find="self.is_behind_copy = self.worker == STORE_WORKER",
        replace="self.is_behind_copy = False",
        killers=(
            f"{_SLOW}::test_blocks_are_held_for_the_copy_only",
            f"{_LANES}::TestOrder::test_item_needs_no_place_behind_its_copy",
        ),
    ),
    Mutant(
        name="place_freed_twice",
        why="The window grows with each save, until all that waits is under a copy.",
        file=_LANE,
        find="        if item.at < self._behind_copy:\n",
        replace="        if True:\n",
        killers=(f"{_LANES}::TestOrder::test_item_that_fails_frees_its_place_once",),
    ),
    Mutant(
        name="slots_unbounded",
        why="A slow store fills up with slots that nobody can find, and evicts the rest.",
        file=_QUEUE,
        find="if due >= self._max_tickets or due_nbytes >= self._max_nbytes:",
        replace="if False:",
        killers=(
            f"{_SLOW}::test_saves_beyond_the_bound_on_slots_are_refused_at_once",
            f"{_QUEUES}::test_saves_are_refused_while_the_store_is_behind",
        ),
    ),
    Mutant(
        name="stored_saves_still_count",
        why="After a thousand saves every further one is refused.",
        file=_QUEUE,
        find="            if ticket in self._due[ticket.direction]:\n",
        replace="            if False:\n",
        killers=(
            f"{_SLOW}::test_saves_beyond_the_bound_on_slots_are_refused_at_once",
            f"{_QUEUES}::test_saves_are_refused_while_the_store_is_behind",
        ),
    ),
    Mutant(
        name="ended_before_its_offer_counts",
        why="Tickets that failed while they were taken in use up the bounds for good.",
        file=_QUEUE,
        find="        if ticket.outcome is None:  # else",
        replace="        if True:  # else",
        killers=(f"{_QUEUES}::test_ticket_that_ended_before_its_offer_is_not_counted",),
    ),
    # Too many loads.
    Mutant(
        name="loads_take_turns",
        why="Six requests that exceed the deadline together all fail, none is loaded.",
        file=_QUEUE,
        find="            elif is_save:\n",
        replace="            else:\n",
        killers=(
            f"{_QUEUES}::test_loads_come_one_request_after_the_other",
            f"{_OVERLOAD}::test_first_requests_are_in_time_though_nothing_is_known_of_the_store",
        ),
    ),
    Mutant(
        name="late_loads_accepted",
        why="A request waits ten seconds to be told that it has to compute.",
        file=_INTAKE,
        find="if not refusal and ticket.lane_key in late:",
        replace="if False:",
        killers=(
            f"{_OVERLOAD}::test_loads_that_fit_succeed_and_others_are_refused_at_once",
        ),
    ),
    Mutant(
        name="request_judged_in_parts",
        why="A large request is taken by its first span and fails with its last one.",
        file=_INTAKE,
        find="cost = costs.get(ticket.lane_key, 0) + cost_of(1, ticket.nbytes)",
        replace="cost = cost_of(1, ticket.nbytes)",
        killers=(
            f"{_OVERLOAD}::test_loads_that_fit_succeed_and_others_are_refused_at_once",
        ),
    ),
    Mutant(
        name="loads_under_way_forgotten",
        why="Each request is judged as if nobody were before it.",
        file=_INTAKE,
        find="ahead=cost_of(*self._queue.due(Direction.LOAD)),",
        replace="ahead=0,",
        killers=(f"{_OVERLOAD}::test_loads_are_judged_by_those_of_former_steps_too",),
    ),
    Mutant(
        name="old_rate_refuses_for_ever",
        why="After a slow hour nothing large is loaded any more, though nobody loads.",
        file=_PACE,
        find="if ahead and (ahead",
        replace="if (ahead",
        killers=(_OVERDUE,),
    ),
    Mutant(
        name="late_requests_wait_in_line",
        why="A request that is refused still keeps those behind it from being loaded.",
        file=_PACE,
        find="            late.add(request)\n        else:\n            ahead += cost\n",
        replace="            late.add(request)\n        ahead += cost\n",
        killers=(_OVERDUE,),
    ),
    Mutant(
        name="planned_to_the_last_second",
        why="Under steady overload half of what is taken ends just behind its deadline.",
        file=_PACE,
        find="_USABLE: Final = 0.8",
        replace="_USABLE: Final = 1.0",
        killers=(_OVERDUE,),
    ),
    Mutant(
        name="idle_time_is_slow",
        why="A store that had nothing to do for a minute is taken for a slow one.",
        file=_PACE,
        find="busy = now - max(begun_at, self._counted_until)",
        replace="busy = now - self._counted_until",
        killers=(
            f"{_PACES}::test_rate_is_bytes_over_time_in_which_anything_was_loaded",
        ),
    ),
    Mutant(
        name="overlap_counts_twice",
        why="Copies side by side make the device look as slow as their sum.",
        file=_PACE,
        find="busy = now - max(begun_at, self._counted_until)",
        replace="busy = now - begun_at",
        killers=(
            f"{_PACES}::test_rate_is_bytes_over_time_in_which_anything_was_loaded",
        ),
    ),
    Mutant(
        name="small_tickets_are_slow",
        why="After some short prompts every long one is refused its load.",
        file=_PACE,
        find="    return nbytes + num_tickets * _FIXED_BYTES\n",
        replace="    return nbytes\n",
        killers=(f"{_PACES}::test_small_tickets_make_no_store_slow",),
    ),
    # Saves beside loads.
    Mutant(
        name="saves_starve",
        why="While users never stop asking, nothing new is stored.",
        file=_QUEUE,
        find="self._credit = self._credit + item.nbytes if saves_wait else 0",
        replace="self._credit = 0",
        killers=(
            f"{_QUEUES}::test_saves_have_a_share_beside_loads_that_never_end",
            f"{_OVERLOAD}::test_saves_get_on_beside_loads_that_never_end",
        ),
    ),
    Mutant(
        name="saves_take_all",
        why="One load lets all saves that wait go before the next one.",
        file=_QUEUE,
        find="            self._credit -= _LOADS_PER_SAVE * item.nbytes\n",
        replace="            pass\n",
        killers=(f"{_QUEUES}::test_saves_have_a_share_beside_loads_that_never_end",),
    ),
    Mutant(
        name="credit_hoarded",
        why="After an hour of loads alone a crowd of saves goes before every load.",
        file=_QUEUE,
        find="self._credit = self._credit + item.nbytes if saves_wait else 0",
        replace="self._credit += item.nbytes",
        killers=(
            f"{_QUEUES}::test_loads_of_a_quiet_time_let_no_crowd_of_saves_go_first",
        ),
    ),
    Mutant(
        name="saves_wait_for_hung_loads",
        why="Saves keep the engine's blocks until a read that hangs is given up.",
        file=_QUEUE,
        find="        if self._ticks_without_load > _STANDSTILL_TICKS:\n",
        replace="        if False:\n",
        killers=(f"{_QUEUES}::test_saves_get_on_though_the_loads_before_them_do_not",),
    ),
    # A store that hangs.
    Mutant(
        name="hung_thread_unnoticed",
        why="Each load behind a read that hangs costs its request a whole deadline.",
        file="ucm/pipeline/deadlines.py",
        find="        if is_late and ticket.is_worked_on and self._is_long(ticket, now):\n",
        replace="        if False:\n",
        killers=(f"{_HUNG}::test_hung_read_costs_one_deadline_and_heals_by_itself",),
    ),
    Mutant(
        name="hung_for_ever",
        why="After one read that took too long nothing is loaded until a restart.",
        file="ucm/pipeline/deadlines.py",
        find="self._queue.hold_off(direction, is_hung=bool(hung))",
        replace="pass",
        killers=(
            f"{_HUNG}::test_hung_read_costs_one_deadline_and_heals_by_itself",
            f"{_SLOW}::test_store_that_hangs_holds_no_blocks_and_is_asked_again",
        ),
    ),
    Mutant(
        name="lanes_wait_behind_a_hung_read",
        why="Loads that were let in before wait for a read that does not return.",
        file="ucm/pipeline/deadlines.py",
        find="        if ticket.is_worked_on:\n",
        replace="        if ticket.stages:\n",
        killers=(f"{_HUNG}::test_hung_read_costs_one_deadline_and_heals_by_itself",),
    ),
    Mutant(
        name="queue_waits_behind_a_hung_read",
        why="Loads that wait to begin wait for a read that does not return.",
        file="ucm/pipeline/deadlines.py",
        find="hung = Reason.STORE_HUNG if self._hung[ticket.direction] else Reason.NONE",
        replace="hung = Reason.NONE",
        killers=(f"{_HUNG}::test_hung_read_costs_one_deadline_and_heals_by_itself",),
    ),
    Mutant(
        name="copy_torn_by_a_hung_read",
        why="Loads whose copy is under way are thrown away with those that wait.",
        file="ucm/pipeline/deadlines.py",
        find="if ticket.outcome is None and not ticket.guard.is_copying:",
        replace="if ticket.outcome is None:",
        killers=(f"{_LANES}::TestHung::test_begun_copy_goes_on",),
    ),
    Mutant(
        name="hung_read_ends_saves",
        why="A read that never returns ends saves as well.",
        file=_QUEUE,
        find="        if ticket.direction in self._held_off:\n",
        replace="        if self._held_off:\n",
        killers=(
            f"{_HUNG}::test_read_that_never_returns_ends_loads_and_nothing_else",
            f"{_QUEUES}::test_direction_that_hangs_takes_nothing_in",
        ),
    ),
    # Look-ups of a store whose loads hang.
    Mutant(
        name="hung_loads_never_bypassed",
        why="Each hit of a store whose reads hang costs a request ten seconds.",
        file=_BYPASS,
        find="        elif self._loads.seconds or sum(bad) >= _MOST_BAD:\n",
        replace="        elif False:\n",
        killers=(
            f"{_BYPASSES}::test_store_whose_loads_hang_is_not_asked_for_a_while",
            _TOGETHER,
        ),
    ),
    Mutant(
        name="all_try_a_store_that_hung",
        why="When the time is up everybody who waits tries the store that hangs.",
        file=_BYPASS,
        find="            self._loads.until = now + _LONGEST_S  #",
        replace="            pass  #",
        killers=(
            f"{_BYPASSES}::test_store_whose_loads_hang_is_not_asked_for_a_while",
            _TOGETHER,
        ),
    ),
    Mutant(
        name="loads_from_before_double_the_pause",
        why="What was ordered before the pause makes it half a minute at once.",
        file=_BYPASS,
        find="        if now < self._loads.until and not self._is_tried:\n",
        replace="        if False:\n",
        killers=(f"{_BYPASSES}::test_pause_gets_longer_while_each_try_fails",),
    ),
    Mutant(
        name="one_good_rank_ends_the_pause",
        why="Of four ranks the one that hangs costs each hit its deadline.",
        file=_BYPASS,
        find="            if not self._troubled:\n",
        replace="            if True:\n",
        killers=(f"{_BYPASSES}::test_one_rank_of_four_is_enough",),
    ),
    Mutant(
        name="failed_load_ends_well_later",
        why="A load that failed and whose copy ended counts as a success too.",
        file=_BYPASS,
        find="            self._failed.add((rank, number))\n",
        replace="",
        killers=(f"{_BYPASSES}::test_load_that_failed_is_not_counted_as_done_later",),
    ),
    Mutant(
        name="try_without_an_answer_holds_all_up",
        why="A try that an abort ends leaves the store alone for half a minute.",
        file=_BYPASS,
        find="            self._loads.until = min(self._loads.until, now)",
        replace="            pass",
        killers=(f"{_BYPASSES}::test_try_that_says_nothing_lets_another_one_try",),
    ),
    Mutant(
        name="damaged_blocks_bypass_the_store",
        why="Three damaged blocks make all that is stored a miss.",
        file=_BYPASS,
        find="(Reason.DEADLINE, ",
        replace="(Reason.CORRUPT, Reason.DEADLINE, ",
        killers=(
            f"{_BYPASSES}::test_failures_that_are_none_of_the_stores_do_not_count",
        ),
    ),
    Mutant(
        name="loads_not_told",
        why="The scheduler never hears that loads hang.",
        file=_DOOR,
        find="        self._store.loads_ended(report.rank, failures, report.loads_done)\n",
        replace="",
        killers=(_TOGETHER,),
    ),
    Mutant(
        name="try_not_told",
        why="When the time is up everybody who waits tries the store that hangs.",
        file=_DOOR,
        find="        self._store.load_begun()\n",
        replace="",
        killers=(_TOGETHER,),
    ),
    Mutant(
        name="blameless_block_denied",
        why="A prefix whose load came too late once is a miss until it is saved again.",
        file="ucm/progress.py",
        find="""\
    if outcome.bad_key:
        bad_hash = BlockHash(BlockKey.unpack(outcome.bad_key).block_hash)
""",
        replace="""\
    bad_key = outcome.bad_key or ticket.span.keys[0]
    bad_hash = BlockHash(BlockKey.unpack(bad_key).block_hash)
""",
        killers=(_TOGETHER,),
    ),
)
