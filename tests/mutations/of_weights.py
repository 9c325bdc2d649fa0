# SPDX-License-Identifier: Apache-2.0
"""Mutants of weights that change in place, of resets and of sleep."""

from tests.mutations.mutant import Mutant

__all__ = ["WEIGHTS"]

_PURE = "ucm/scheduler/weights.py"
_DOUBTS = "ucm/integration/vllm/doubts.py"
_DIGEST = "ucm/integration/digest.py"
_KEEPER = "ucm/integration/vllm/weights.py"
_SCHEDULER = "ucm/integration/vllm/scheduler.py"
_WORKER = "ucm/integration/vllm/worker.py"
_LEDGER_TESTS = "tests/scheduler/test_weights.py"
_DOUBT_TESTS = "tests/integration/vllm/test_doubts.py"
_DIGEST_TESTS = "tests/integration/test_digest.py"
_KEEPER_TESTS = "tests/integration/vllm/test_weights.py"
_QUIET_TESTS = "tests/test_runtime_quiesce.py::TestQuiesce"

WEIGHTS = (
    # What is known.
    Mutant(
        name="weights_same_by_one_rank",
        why="One rank's weights changed; blocks of the old ones are served to all.",
        file=_PURE,
        find="if len(self._answers) < self._num_ranks:",
        replace="if not self._answers:",
        killers=(
            f"{_LEDGER_TESTS}::TestSame::test_nothing_is_proven_before_the_last_rank_has_answered",
        ),
    ),
    Mutant(
        name="weights_old_answer_counts",
        why="Weights that were read before they changed prove that they did not.",
        file=_PURE,
        find="if news.epoch != self.epoch or not self._is_sent:",
        replace="if not self._is_sent:",
        killers=(
            f"{_LEDGER_TESTS}::TestSame::test_answers_to_an_earlier_doubt_prove_nothing",
        ),
    ),
    Mutant(
        name="weights_mixed_go_on",
        why="Blocks of former weights in the engine's cache are saved as the new ones'.",
        file=_PURE,
        find="self._is_mixed |= name != self.name and not self._is_emptied",
        replace="pass",
        killers=(
            f"{_LEDGER_TESTS}::TestMixed::test_changed_weights_with_the_old_cache_stop_all",
            f"{_DOUBT_TESTS}::TestChanged::test_loaded_weights_without_a_reset_stop_all",
        ),
    ),
    Mutant(
        name="weights_mixed_for_good",
        why="After a load without a reset an engine never saves or finds anything.",
        file=_PURE,
        find="        self._is_mixed &= not self._is_clean\n",
        replace="",
        killers=(
            f"{_LEDGER_TESTS}::TestMixed::test_changed_weights_with_the_old_cache_stop_all",
        ),
    ),
    Mutant(
        name="second_reset_of_a_busy_engine",
        why="An operator who repeats a reset that fails turns reuse off.",
        file=_PURE,
        find="        if is_asked and not emptied:\n",
        replace="        if False:\n",
        killers=(
            f"{_LEDGER_TESTS}::TestMixed::test_resets_of_a_busy_engine_are_answered_one_after_the_other",
        ),
    ),
    Mutant(
        name="reset_while_ranks_read_forgotten",
        why="Weights that came with the second reset are taken for the former ones.",
        file=_PURE,
        find="        if self._asks_again:\n",
        replace="        if False:\n",
        killers=(
            f"{_LEDGER_TESTS}::TestMixed::test_reset_that_brought_other_weights_meanwhile_is_noticed",
        ),
    ),
    Mutant(
        name="weights_between_two_doubts",
        why="Weights that changed and changed back have left wrong blocks behind.",
        file=_PURE,
        find="            self._is_mixed |= self.state is WeightsState.ASKED\n",
        replace="",
        killers=(
            f"{_LEDGER_TESTS}::TestMixed::test_doubt_that_interrupts_another_counts_as_mixed",
        ),
    ),
    Mutant(
        name="weights_after_a_reset_are_known",
        why="What computed after a reset, unread, is stored under the former key.",
        file=_PURE,
        find="self._is_mixed |= self.state is WeightsState.ASKED\n",
        replace="self._is_mixed |= self.state is WeightsState.ASKED"
        " and not self._is_emptied\n",
        killers=(
            f"{_LEDGER_TESTS}::TestMixed::test_steps_after_the_cache_was_emptied_are_of_weights_that_nobody_read",
            f"{_DOUBT_TESTS}::TestChanged::test_blocks_of_weights_between_a_reset_and_a_load_are_not_stored",
        ),
    ),
    Mutant(
        name="clean_for_good",
        why="A cache that was emptied once counts as empty, and holds former blocks.",
        file=_PURE,
        find="        self._is_clean &= not in_use\n",
        replace="",
        killers=(
            f"{_LEDGER_TESTS}::TestMixed::test_steps_after_the_cache_was_emptied_are_of_weights_that_nobody_read",
        ),
    ),
    Mutant(
        name="clean_behind_an_idle_step",
        why="An engine that stood idle behind a reset stores blocks of several weights under one name.",
        file=_PURE,
        find="        return self._is_clean\n",
        replace="        return False\n",
        killers=(
            f"{_DOUBT_TESTS}::TestChanged::test_first_blocks_behind_a_reset_count_however_late_they_come",
        ),
    ),
    Mutant(
        name="weights_unread_are_equal",
        why="Ranks that cannot be read count as unchanged, and old blocks are served.",
        file=_PURE,
        find="self.is_unreadable = not all(digests)",
        replace="self.is_unreadable = False",
        killers=(
            f"{_LEDGER_TESTS}::TestChanged::test_rank_that_cannot_tell_makes_a_name_that_nobody_has",
        ),
    ),
    Mutant(
        name="weights_names_at_random",
        why="Engines that hold the same weights never meet again.",
        file=_PURE,
        find='return f"parameters-{whole.hexdigest()[:32]}"',
        replace='return f"parameters-{self._make_token()}"',
        killers=(
            f"{_LEDGER_TESTS}::TestChanged::test_other_digests_have_a_name_of_their_own",
        ),
    ),
    # The scheduler's half.
    Mutant(
        name="own_reset_unseen",
        why="After new weights and a reset of the engine's cache old blocks are served.",
        file=_DOUBTS,
        find="return self._seen is not before",
        replace="return False",
        killers=(
            f"{_DOUBT_TESTS}::TestChanged::test_old_blocks_are_not_served_after_new_weights",
            f"{_DOUBT_TESTS}::TestOwnCache::test_engines_pool_shows_it",
        ),
    ),
    Mutant(
        name="reset_clears_the_node",
        why="Sleep of one engine takes all others' blocks away, and may raise.",
        file=_SCHEDULER,
        find="        self._doubts.reset()\n",
        replace='        self._doubts.reset()\n        self._store.clear(b"")\n',
        killers=(
            f"{_DOUBT_TESTS}::TestSame::test_other_engine_of_the_node_does_not_notice",
            f"{_DOUBT_TESTS}::TestSame::test_reset_does_not_wait_for_the_lock_of_the_index",
        ),
    ),
    Mutant(
        name="weights_not_in_the_keys",
        why="New weights are stored and found under the keys of the former ones.",
        file=_SCHEDULER,
        find="        if weights:\n",
        replace="        if False:\n",
        killers=(
            f"{_DOUBT_TESTS}::TestChanged::test_old_blocks_are_not_served_after_new_weights",
        ),
    ),
    Mutant(
        name="requests_ask_for_ever",
        why="Requests wait as long as a rank takes to read its weights.",
        file=_DOUBTS,
        find="return asked_at is None or self._clock() - asked_at < _ASK_AGAIN_S",
        replace="return True",
        killers=(
            f"{_DOUBT_TESTS}::TestDoubts::test_requests_ask_again_for_a_moment_only",
        ),
    ),
    # The worker's half.
    Mutant(
        name="written_weights_save_on",
        why="Bytes of new weights are stored under the former key, for all engines.",
        file=_WORKER,
        find="if self._weights is not None and self._weights.is_written:",
        replace="if False:",
        killers=(
            f"{_DOUBT_TESTS}::TestInFlight::test_rank_that_saw_writing_saves_and_loads_nothing",
        ),
    ),
    Mutant(
        name="written_weights_forgotten",
        why="A rank goes on saving before the scheduler knows of its new weights.",
        file=_KEEPER,
        find="        if epoch != self._epoch:\n",
        replace="        self._is_written = False\n        if epoch != self._epoch:\n",
        killers=(f"{_KEEPER_TESTS}::TestWriting::test_whoever_writes_is_seen",),
    ),
    Mutant(
        name="torn_reading_counts",
        why="A digest of weights that were written meanwhile proves anything.",
        file=_KEEPER,
        find="        self._is_wanted, self._answer = False, None\n        self._give_up()\n",
        replace="        self._is_wanted, self._answer = False, None\n",
        killers=(
            f"{_KEEPER_TESTS}::TestReading::test_write_makes_a_reading_worthless",
        ),
    ),
    Mutant(
        name="steps_in_between_untold",
        why="Blocks of weights that nobody has read stay in the engine's cache unseen.",
        file=_KEEPER,
        find="self._is_torn |= self._has_stepped",
        replace="pass",
        killers=(
            f"{_KEEPER_TESTS}::TestWriting::test_weights_of_a_step_in_between_are_not_forgotten",
        ),
    ),
    Mutant(
        name="packed_weights_are_equal",
        why="On CPU other weights are taken for the same: linear layers hide theirs.",
        file=_KEEPER,
        find="if not reading.hides_as(self._last):",
        replace="if False:",
        killers=(
            f"{_KEEPER_TESTS}::TestAnswers::test_packed_weights_are_told_apart_by_packing",
        ),
    ),
    Mutant(
        name="sleep_comes_unseen",
        why="Copies go on in memory that the engine has given back.",
        file=_KEEPER,
        find='            self._watch(owner, "sleep", before=on_sleep)\n',
        replace="",
        killers=(
            f"{_KEEPER_TESTS}::TestWriting::test_sleep_and_waking_are_told_in_time",
            f"{_DOUBT_TESTS}::TestSleep::test_engine_without_hooks_is_seen_falling_asleep",
        ),
    ),
    Mutant(
        name="sleep_under_a_copy",
        why="The engine's memory goes away while a copy reads or writes it.",
        file="ucm/pipeline/engine_waits.py",
        find="        return self._changed.wait_for_all(\n"
        "            tickets, lambda each: each.guard.is_released, self._timeout.stuck\n"
        "        )\n",
        replace="        return True\n",
        killers=(
            f"{_QUIET_TESTS}::test_copy_under_way_is_waited_for_and_does_not_count",
            f"{_QUIET_TESTS}::test_copy_that_does_not_end_is_told",
        ),
    ),
    Mutant(
        name="asleep_and_registered",
        why="What comes while an engine sleeps touches memory that is not there.",
        file="ucm/devices/_paged.py",
        find='        """Let go of the engine\'s tensors; see ``Device.unregister``."""\n',
        replace='        """Let go of the engine\'s tensors; see ``Device.unregister``."""\n'
        "        return\n",
        killers=(
            "tests/devices/test_cpu.py::TestCPUDevice::test_memory_may_go_away_and_come_back",
        ),
    ),
    # The digest.
    Mutant(
        name="digest_of_a_sample",
        why="Weights that differ behind the first bytes are taken for the same.",
        file=_DIGEST,
        find="for start in range(0, len(whole), nbytes):",
        replace="for start in range(0, min(len(whole), 1), nbytes):",
        killers=(
            f"{_DIGEST_TESTS}::TestDigest::test_last_bytes_of_a_large_tensor_count",
        ),
    ),
    Mutant(
        name="digest_without_shapes",
        why="Weights that were cut or cast otherwise are taken for the same.",
        file=_DIGEST,
        find='digest.update(f"{what} {tensor.stride()}\\n".encode())',
        replace="pass",
        killers=(f"{_DIGEST_TESTS}::TestDigest::test_any_change_shows",),
    ),
)
