# SPDX-License-Identifier: Apache-2.0
"""Mutants of who is looked at, of shared tickets, and of when decoded blocks are saved."""

from tests.mutations.mutant import Mutant

__all__ = ["SCHED"]

_BUDGET = "ucm/scheduler/budget.py"
_DECODED = "ucm/scheduler/decoded.py"
_ENDINGS = "ucm/scheduler/endings.py"
_HOLDS = "ucm/scheduler/holds.py"
_LIVES = "ucm/scheduler/lives.py"
_REQUESTS = "ucm/scheduler/requests.py"
_RUNNING = "ucm/integration/vllm/running.py"
_SAVES = "ucm/scheduler/saves.py"
_TRANSFERS = "ucm/scheduler/transfers.py"
_AT_END = "tests/scheduler/test_decoded.py::TestAtEnd"
_TROUBLE = "tests/scheduler/test_decoded.py::TestTrouble"
_OTHERS = "tests/scheduler/test_decoded.py::TestOtherWays"
_SHARED = "tests/scheduler/test_saves.py::TestSaves"
_OFFERS = "tests/scheduler/test_states.py::TestOffers"
_SIZES = "tests/scheduler/test_budget.py::TestSizes"
_STEPS = "tests/integration/vllm/test_running.py"
_QUIET = "tests/scheduler/test_quiet.py::test_short_way_plans_what_the_long_one_does"

SCHED = (
    Mutant(
        name="quiet_plan_leaves_loads",
        why="What waits for a load that no plan brings waits for ever.",
        file="ucm/scheduler/adapter.py",
        find="(self._queued_loads or self._touches)",
        replace="self._touches",
        killers=(_QUIET,),
    ),
    Mutant(
        name="quiet_plan_leaves_touches",
        why="Prefixes in use count as unused while the engine decodes.",
        file="ucm/scheduler/adapter.py",
        find="(self._queued_loads or self._touches)",
        replace="self._queued_loads",
        killers=(_QUIET,),
    ),
    Mutant(
        name="quiet_plan_leaves_deferrals",
        why="The engine is never told of a request that it has to free.",
        file=_SAVES,
        find=" or self._deferrals.new)",
        replace=")",
        killers=(_QUIET,),
    ),
    Mutant(
        name="quiet_plan_leaves_company",
        why="What waits for company waits until somebody new comes.",
        file=_SAVES,
        find="not (goes or self._decoded",
        replace="not (self._decoded",
        killers=(_QUIET,),
    ),
    Mutant(
        name="quiet_plan_leaves_readers",
        why="A running request overwrites a block that a save still reads.",
        file="ucm/scheduler/adapter.py",
        find="not facts or not ledger.readers_in(facts, self._layout)",
        replace="True",
        killers=(_QUIET,),
    ),
    Mutant(
        name="failed_worker_leaves_endings",
        why="Blocks of requests that ended stay with the engine while others decode.",
        file="ucm/scheduler/adapter.py",
        find="            self.bypass = True\n            self._selector.drop_endings()\n",
        replace="            self.bypass = True\n",
        killers=(
            "tests/scheduler/test_quiet.py::test_requests_of_a_failed_worker_are_let_go_by_the_next_plan",
        ),
    ),
    Mutant(
        name="everybody_is_looked_at",
        why="R-18: each running request costs several objects in every step.",
        file=_RUNNING,
        find="list(map(self._due.get, ids, itertools.repeat(0)))",
        replace="[0] * len(ids)",
        killers=(f"{_STEPS}::test_step_that_completes_no_block_looks_at_no_request",),
    ),
    Mutant(
        name="looked_at_for_each_decoded_block",
        why="R-18: requests are looked at for blocks that wait for their end.",
        file=_DECODED,
        find="return stop, (stop + span) * group.block_tokens",
        replace="return stop, (complete + 1) * group.block_tokens",
        killers=(
            f"{_STEPS}::test_block_behind_the_prompt_is_looked_at_by_nobody",
            f"{_AT_END}::test_request_is_looked_at_when_a_span_is_full",
        ),
    ),
    Mutant(
        name="resumed_is_not_new",
        why="A save is torn by a resumed request, which is given the blocks that it still reads.",
        file=_RUNNING,
        find="is_new = bool(blocks) or request_id in resumed\n",
        replace="is_new = bool(blocks)\n",
        killers=(
            (
                f"{_STEPS}::"
                "test_resumed_request_waits_for_saves_of_blocks_that_it_computes_anew"
            ),
        ),
    ),
    Mutant(
        name="resumed_prefix_fenced",
        why="A step waits for saves of blocks that a resumed request only reads.",
        file=_RUNNING,
        find="    if resumed:\n",
        replace="    if False:\n",
        killers=(
            (
                f"{_STEPS}::"
                "test_resumed_request_waits_for_no_save_of_blocks_that_it_only_reads"
            ),
        ),
    ),
    Mutant(
        name="allocated_blocks_not_told",
        why="A running request overwrites a block that a save still reads.",
        file=_REQUESTS,
        find="written.update(self.allocated, self.overwritten)",
        replace="written.update(self.overwritten)",
        killers=(
            f"{_SHARED}::test_positions_are_told_only_of_blocks_that_others_can_keep",
        ),
    ),
    Mutant(
        name="no_word_of_what_is_lost",
        why="One request's overwritten block loses the saves of eleven others.",
        file=_HOLDS,
        find="                    lost[transfer_id] = positions\n",
        replace="                    pass\n",
        killers=(
            f"{_SHARED}::test_blocks_of_two_requests_travel_together_and_are_lost_apart",
        ),
    ),
    Mutant(
        name="lost_to_the_engine_forgotten",
        why="A block that the engine cleared is stored under the hash of what it held.",
        file=_REQUESTS,
        find="written.update(self.allocated, self.overwritten)",
        replace="written.update(self.allocated)",
        killers=(
            f"{_SHARED}::test_positions_are_told_only_of_blocks_that_others_can_keep",
            f"{_OFFERS}::test_state_whose_block_the_step_gives_away_is_lost[copy]",
        ),
    ),
    Mutant(
        name="only_the_first_owner_holds",
        why="The engine reuses blocks of a finished request that are still read.",
        file=_SAVES,
        find="[owner[:2] for owner in order.owners],",
        replace="[owner[:2] for owner in order.owners[:1]],",
        killers=(
            f"{_SHARED}::test_blocks_of_two_requests_travel_together_and_are_lost_apart",
        ),
    ),
    Mutant(
        name="nobody_travels_together",
        why="Each decoded block is a ticket of its own again.",
        file=_TRANSFERS,
        find="if is_more or size + rest > limit:",
        replace="if size:",
        killers=(
            f"{_SHARED}::test_full_spans_of_a_request_are_tickets_of_its_own",
            f"{_AT_END}::test_many_that_end_at_once_travel_together",
        ),
    ),
    Mutant(
        name="owners_cost_nothing",
        why="R-17: a plan of many owners raises into the engine's scheduler.",
        file=_BUDGET,
        find="    return _OWNER + _UTF8 * len(request_id)\n",
        replace="    return 0\n",
        killers=(f"{_SIZES}::test_sizes_are_upper_bounds",),
    ),
    Mutant(
        name="lost_without_a_bound",
        why="R-17: a step that overwrites much raises into the engine's scheduler.",
        file=_BUDGET,
        find="        if nbytes > _LOST_NBYTES:\n            break\n",
        replace="",
        killers=(f"{_SIZES}::test_fences_of_all_holds_fit_beside_everything_else",),
    ),
    Mutant(
        name="guesses_are_saved",
        why="A block with a rejected guess in it is stored as the answer's.",
        file=_REQUESTS,
        find="accepted = max(self.known_tokens - 1, self.prompt_tokens)",
        replace="accepted = max(self.known_tokens, self.prompt_tokens)",
        killers=(f"{_AT_END}::test_only_accepted_tokens_count",),
    ),
    Mutant(
        name="uncomputed_tokens_are_saved",
        why="What an aborted request had not computed yet is stored as computed.",
        file=_REQUESTS,
        find="return min(self.computed_tokens, accepted)",
        replace="return accepted",
        killers=(f"{_AT_END}::test_only_accepted_tokens_count",),
    ),
    Mutant(
        name="deferred_before_its_last_save",
        why="The engine reuses blocks of a request of which saves are still to come.",
        file=_ENDINGS,
        find="        ended = [each for each in ended if not each.left]\n",
        replace="",
        killers=(f"{_AT_END}::test_deferral_waits_for_the_last_block_of_its_request",),
    ),
    Mutant(
        name="all_that_end_at_once",
        why="Saves of requests that ended together are refused by the full queue.",
        file=_SAVES,
        find="return max(room, not (draft.ended_nbytes or ledger.num_holds))",
        replace="return 1 << 40",
        killers=(f"{_AT_END}::test_many_that_end_at_once_are_spread_over_plans",),
    ),
    Mutant(
        name="waits_for_ever",
        why="An engine whose saves hang never gets the blocks of ended requests back.",
        file=_SAVES,
        find="            self._drop(self._endings.drop_late(self._now))\n",
        replace="",
        killers=(f"{_AT_END}::test_what_waits_for_too_long_is_dropped_and_counted",),
    ),
    Mutant(
        name="saved_after_the_doubt",
        why="What requests left under weights that are gone is stored under new keys.",
        file="ucm/scheduler/adapter.py",
        find='        self._selector.drop_endings()\n        self._matcher.rekey(b"")\n',
        replace='        self._matcher.rekey(b"")\n',
        killers=(f"{_TROUBLE}::test_nothing_that_waits_is_saved_once_nothing_may_be",),
    ),
    Mutant(
        name="no_hurry",
        why="Under pressure each request loses its whole answer when it is preempted.",
        file=_SAVES,
        find="            lives.due.clear()\n",
        replace="            pass\n",
        killers=(
            f"{_TROUBLE}::test_after_a_preemption_all_that_waits_is_saved_for_a_while",
        ),
    ),
    Mutant(
        name="windows_wait_for_the_end",
        why="A window's blocks are the engine's again before they are saved.",
        file=_DECODED,
        find="self.when is SaveDecoded.AT_END and group.kind is GroupKind.FULL",
        replace="self.when is SaveDecoded.AT_END",
        killers=(f"{_OTHERS}::test_windows_and_states_do_not_wait",),
    ),
    Mutant(
        name="never_saves_states",
        why="With prompts only, the states of answers are saved all the same.",
        file=_SAVES,
        find="            and self._decoded.saves_up_to(",
        replace="            or self._decoded.saves_up_to(",
        killers=(f"{_OTHERS}::test_never_saves_prompts_only",),
    ),
)
