# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is in doubt while another connector loads."""

from tests.mutations.mutant import Mutant

__all__ = ["FOREIGN"]

_FOREIGN = "ucm/scheduler/foreign.py"
_ADAPTER = "ucm/scheduler/adapter.py"
_DOOR = "ucm/integration/vllm/scheduler.py"
_STEPS = "ucm/integration/vllm/running.py"
_TESTS = "tests/scheduler/test_foreign.py"
_DOUBT = f"{_TESTS}::TestDoubt"
_SHARED = f"{_TESTS}::TestShared"
_SHARERS = "tests/scheduler/test_foreign_sharers.py"
_ON_BAD = f"{_SHARERS}::test_what_was_computed_on_bad_blocks_is_bad_for_a_third"
_RUNNING = "tests/integration/vllm/test_running.py"
_UNTIL = f"{_DOUBT}::test_nothing_is_saved_until_the_output_of_the_step_has_come"
_BEHIND = (
    f"{_RUNNING}::test_blocks_that_another_connector_loads_in_the_step"
    "_are_saved_behind_its_output"
)
_INTO = f"{_RUNNING}::test_save_of_blocks_into_which_another_connector_loads_is_fenced"

FOREIGN = (
    Mutant(
        name="blocks_of_others_saved_at_once",
        why="What another connector fails to load is stored as garbage under good keys.",
        file=_ADAPTER,
        find="        if is_foreign:\n",
        replace="        if False:\n",
        killers=(_UNTIL, _BEHIND),
    ),
    Mutant(
        name="doubt_ends_before_the_output",
        why="With async scheduling garbage is saved one plan before the engine hears of it.",
        file=_FOREIGN,
        find="step + self._batches,",
        replace="step + self._batches - 1,",
        killers=(_UNTIL, _BEHIND),
    ),
    Mutant(
        name="sharer_waits_for_nobody",
        why="One that goes on from blocks that did not come counts as gone back behind them.",
        file=_FOREIGN,
        find="self._lives.waits(life, on)",
        replace="pass",
        killers=(
            f"{_SHARERS}::test_sharer_that_goes_on_before_they_are_computed_anew_is_not_saved",
        ),
    ),
    Mutant(
        name="sharer_is_saved_from_where_it_is",
        why="It went on from blocks that nobody had computed again, and is stored.",
        file=_FOREIGN,
        find="request.computed_tokens > life.good_tokens\n",
        replace="False\n",
        killers=(
            (
                f"{_SHARED}::test_one_that_goes_on_from_what_others_compute_anew"
                "_is_not_saved"
            ),
        ),
    ),
    Mutant(
        name="bad_blocks_are_shared_and_saved",
        why="A request that comes while the engine's cache has garbage stores it.",
        file=_FOREIGN,
        find="is_bad |= not self.bad.isdisjoint(prefix)",
        replace="pass",
        killers=(
            (
                f"{_SHARED}::test_one_that_comes_before_they_are_computed_anew"
                "_is_not_saved[4]"
            ),
        ),
    ),
    Mutant(
        name="failed_request_is_saved_with_its_garbage",
        why="An engine that fails such requests ends them first, and they are stored.",
        file=_FOREIGN,
        find="life.may_save &= not life.is_over  # nobody computes it again",
        replace="pass",
        killers=(
            f"{_DOUBT}::test_one_that_ends_with_blocks_that_did_not_come_is_dropped",
        ),
    ),
    Mutant(
        name="lost_blocks_are_not_heard_of",
        why="What the output says of blocks that did not come is passed over.",
        file=_DOOR,
        find="self._adapter.foreign.lost(lost)",
        replace="pass",
        killers=(f"{_RUNNING}::test_one_that_is_failed_with_its_blocks_is_not_saved",),
    ),
    Mutant(
        name="aborted_one_is_saved_unseen",
        why="Its last step runs on, and in the host's process nobody waits for its output.",
        file=_DOOR,
        find="if is_aborted and self._adapter.foreign.doubts:",
        replace="if False:",
        killers=(
            (
                f"{_RUNNING}::test_aborted_one_is_not_saved_while_the_step_that_loads"
                "_may_run[True]"
            ),
        ),
    ),
    Mutant(
        name="loads_of_others_are_not_fenced",
        why="Another connector loads onto a block that a save still reads: garbage is stored.",
        file=_STEPS,
        find="blocks += table[known.computed_tokens // group.block_tokens :]",
        replace="pass",
        killers=(f"{_INTO}[0]",),
    ),
    Mutant(
        name="prefix_of_who_waits_is_fenced",
        why="Saves are waited for that read what the engine had itself.",
        file=_STEPS,
        find="blocks += table[known.computed_tokens // group.block_tokens :]",
        replace="blocks += table",
        killers=(f"{_INTO}[4]",),
    ),
    Mutant(
        name="nobody_is_served_by_others",
        why="The door forgets what the engine had itself, and doubts nothing.",
        file=_DOOR,
        find="known.own_tokens = known.computed_tokens = computed_tokens",
        replace="known.computed_tokens = computed_tokens",
        killers=(_BEHIND,),
    ),
    Mutant(
        name="own_load_is_taken_for_anothers",
        why="R-18: each hit of ours is looked at in every step until nobody doubts it.",
        file=_DOOR,
        find="known.own_tokens = computed + external_tokens",
        replace="pass",
        killers=(f"{_RUNNING}::test_load_of_ours_is_nobody_elses",),
    ),
    Mutant(
        name="computed_on_top_of_a_doubt_is_in_none",
        why="A third request stores what another one had computed on top of garbage.",
        file=_FOREIGN,
        find="                self._open(step, request, life, on)\n",
        replace="",
        killers=(_ON_BAD,),
    ),
    Mutant(
        name="doubts_stand_alone",
        why="What was computed on top of blocks that did not come counts as good.",
        file=_FOREIGN,
        find="if number not in first and not first.keys().isdisjoint(doubt.on):",
        replace="if False:",
        killers=(_ON_BAD,),
    ),
    Mutant(
        name="computed_on_bad_blocks_is_good",
        why="Who comes after the output leaves garbage to a third one.",
        file=_FOREIGN,
        find="self.bad.update(request.tables[0][request.computed_tokens // size :])",
        replace="pass",
        killers=(
            f"{_SHARERS}::test_what_is_computed_on_blocks_that_are_bad_already_is_bad_for_a_third",
        ),
    ),
    Mutant(
        name="computed_on_bad_blocks_makes_good",
        why="Bad blocks are let go as they are computed on top of others.",
        file=_FOREIGN,
        find="                if life.may_save:  # else",
        replace="                if True:  # else",
        killers=(
            f"{_SHARERS}::test_what_is_computed_on_blocks_that_are_bad_already_is_bad_for_a_third[3]",
        ),
    ),
    Mutant(
        name="nobody_is_asked_once_all_is_good",
        why="One that has computed on top, and runs behind all others, stores it.",
        file=_ADAPTER,
        find="min(request.own_tokens, life.good_tokens)",
        replace="request.own_tokens",
        killers=(
            f"{_SHARERS}::test_one_that_does_not_run_until_all_is_computed_anew_is_not_saved",
        ),
    ),
    Mutant(
        name="last_output_counts_alone",
        why="What the one before it said of earlier blocks is forgotten.",
        file=_FOREIGN,
        find="min(life.good_tokens, good)",
        replace="good",
        killers=(
            f"{_SHARERS}::test_second_output_does_not_hide_what_the_first_one_said",
        ),
    ),
    Mutant(
        name="one_that_ends_on_bad_blocks_is_saved",
        why="An output that was under way ends it, and garbage is stored.",
        file="ucm/scheduler/lives.py",
        find="not (life.loads and waits) and life.good_tokens == NO_LIMIT",
        replace="not (life.loads and waits)",
        killers=(f"{_SHARERS}::test_one_that_ends_before_it_runs_again_is_not_saved",),
    ),
    Mutant(
        name="bad_for_ever",
        why="R-18: a prefix of which nothing is saved yet stays bad, and each step looks at it.",
        file=_FOREIGN,
        find="                life.due = 0\n",
        replace="                pass\n",
        killers=(
            f"{_SHARERS}::test_blocks_computed_anew_are_good_again_whatever_is_saved_of_them",
        ),
    ),
    Mutant(
        name="first_output_speaks_for_all",
        why="One that was given the blocks of another in doubt is saved before its own output.",
        file=_FOREIGN,
        find="if not self.doubts[at].is_unsure]",
        replace="]",
        killers=(
            f"{_SHARERS}::test_output_of_one_that_ended_does_not_speak_for_whoever_has_its_blocks",
        ),
    ),
)
