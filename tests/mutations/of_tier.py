# SPDX-License-Identifier: Apache-2.0
"""Mutants of the tier below vLLM's own offloading, and of what is begun for it."""

from tests.mutations.mutant import Mutant

__all__ = ["TIER"]

_SYNC = "ucm/cache/sync.py"
_TIER = "ucm/integration/vllm/tier.py"
_LOOKUPS = "ucm/integration/vllm/tier_lookups.py"
_SETUP = "ucm/integration/vllm/tier_setup.py"
_TESTS = "tests/integration/vllm/test_tier"
_BEGUN = "tests/cache/test_begun.py"
_CANCELLED = "test_that_is_cancelled_is_told_of_when_its_blocks_are_free"

TIER = (
    Mutant(
        name="save_told_of_before_its_blocks_are_free",
        why="The host reuses memory that is still read: another block's bytes are stored.",
        file=_SYNC,
        find="        at_end(self._transfer.released, lambda: at_end(over, made))",
        replace="        at_end(over, made)",
        killers=(f"{_BEGUN}::TestSave::{_CANCELLED}",),
    ),
    Mutant(
        name="question_without_deadline",
        why="Requests wait for ever for a store whose index does not answer.",
        file=_SYNC,
        find="if not self._pending.is_done and self._core.now() >= self._until:",
        replace="if self._core.now() < 0:",
        killers=(f"{_BEGUN}::TestAnswer::test_that_is_late_is_over",),
    ),
    Mutant(
        name="question_late_at_once",
        why="A store that takes a moment has nothing.",
        file=_SYNC,
        find="if not self._pending.is_done and self._core.now() >= self._until:",
        replace="if not self._pending.is_done:",
        killers=(f"{_BEGUN}::TestAnswer::test_that_is_late_is_over",),
    ),
    Mutant(
        name="end_of_a_load_that_was_before_is_not_told",
        why="A host waits for ever for what was over at once.",
        file=_SYNC,
        find='as ``Save.when_over``."""\n        at_end(self._transfer.over, alone(call))',
        replace='as ``Save.when_over``."""\n        self._transfer.over.subscribe(alone(call))',
        killers=(
            f"{_BEGUN}::TestLoad::test_is_over_when_its_blocks_hold_what_was_saved",
        ),
    ),
    Mutant(
        name="failed_promotion_is_tried_for_ever",
        why="The engine promotes the same damaged chunk in each step, and serves nobody.",
        file=_LOOKUPS,
        find="for key in keys if key in self._found)",
        replace="for key in () if key in self._found)",
        killers=(
            f"{_TESTS}_lookups.py::TestRequests::test_missed_block_is_not_tried_again",
        ),
    ),
    Mutant(
        name="late_answer_revives_a_missed_block",
        why="A chunk that could not be had is promoted again, and fails again.",
        file=_LOOKUPS,
        find="            if self._found.get(key, False) is None:\n",
        replace="            if key in self._found:\n",
        killers=(
            (
                f"{_TESTS}_lookups.py::TestRequests::"
                "test_missed_block_stays_missed_when_its_answer_comes"
            ),
        ),
    ),
    Mutant(
        name="questions_pile_up_behind_one_that_hangs",
        why="Each step adds one, without bound, to a store that does not answer.",
        file=_LOOKUPS,
        find="        if self._asked is not None:\n            return\n        new = {",
        replace="        new = {",
        killers=(
            f"{_TESTS}_lookups.py::TestQuestions::test_one_question_is_open_at_a_time",
        ),
    ),
    Mutant(
        name="answer_comes_amid_look_ups",
        why="Chunks are fetched that lie behind one that turns out to be missing.",
        file=_LOOKUPS,
        find="            self._has_looked = True\n",
        replace="            self._has_looked = False\n",
        killers=(
            (
                f"{_TESTS}_lookups.py::TestQuestions::"
                "test_all_of_a_step_sees_the_same_answers"
            ),
        ),
    ),
    Mutant(
        name="ended_requests_leave_their_questions",
        why="The scheduler's memory grows with every prompt that was ever asked.",
        file=_TIER,
        find="        self._lookups.release(req_context.req_id)\n",
        replace="        del req_context\n",
        killers=(f"{_TESTS}.py::TestManager::test_ended_requests_leave_nothing",),
    ),
    Mutant(
        name="who_runs_keeps_its_answers",
        why="What was stored since is computed again by all until the last of those ends.",
        file=_TIER,
        find="                self._lookups.release(name)\n",
        replace="                del name\n",
        killers=(f"{_TESTS}.py::TestManager::test_who_runs_keeps_no_answers",),
    ),
    Mutant(
        name="heir_of_each_key_is_looked_for",
        why="A long prompt that ends beside a thousand requests stops the engine for a second.",
        file=_LOOKUPS,
        find="heir = self._new[key] = self._asker(key, heir)",
        replace="self._new[key] = self._asker(key, heir)",
        killers=(
            f"{_TESTS}_lookups_many.py::test_prompt_that_somebody_else_has_is_passed_on_at_once",
        ),
    ),
    Mutant(
        name="heir_of_each_answer_is_looked_for",
        why="An answer to who has ended, beside a thousand requests, stops the engine for a second.",
        file=_LOOKUPS,
        find="self._asker(key, heirs.get(name, name))",
        replace="self._asker(key, name)",
        killers=(
            f"{_TESTS}_lookups_many.py::test_answer_for_one_that_has_ended_is_passed_on_at_once",
        ),
    ),
    Mutant(
        name="store_that_hangs_is_asked_by_everybody",
        why="One request after the other waits for the deadline of its load.",
        file=_TIER,
        find="                    self._lookups.rest(self._timeout.load)\n",
        replace="                    pass\n",
        killers=(
            (
                f"{_TESTS}_trouble.py::TestHanging::"
                "test_load_that_hangs_is_given_up_and_the_store_left_alone"
            ),
        ),
    ),
    Mutant(
        name="chunk_reused_under_a_copy",
        why="A reset gives away chunks to which a copy may still write: wrong tokens.",
        file=_TIER,
        find="            self._jobs[number] = job\n            _LOG.error(",
        replace="            _LOG.error(",
        killers=(
            (
                f"{_TESTS}_trouble.py::TestHanging::"
                "test_copy_that_never_ends_keeps_its_chunks"
            ),
        ),
    ),
    Mutant(
        name="damaged_chunks_told_as_loaded",
        why="The engine reads chunks that never got their bytes: wrong tokens.",
        file=_TIER,
        find="successful_keys=tuple(job.keys[:leading]) or None",
        replace="successful_keys=tuple(job.keys)",
        killers=(
            f"{_TESTS}_trouble.py::TestDamage::test_damaged_chunks_are_not_promoted",
        ),
    ),
    Mutant(
        name="heads_of_prompts_are_evicted_first",
        why="What is left of a prompt is its end, which nobody can use.",
        file=_TIER,
        find="position(pair[0]) or 0)\n",
        replace="-(position(pair[0]) or 0))\n",
        killers=(
            f"{_TESTS}.py::TestRoundTrip::test_room_is_made_from_the_ends_of_prompts",
        ),
    ),
    Mutant(
        name="keys_stay_when_weights_may_have_changed",
        why="Blocks of former weights are loaded into the new ones: wrong tokens.",
        file=_TIER,
        find="        self._secret = secrets.token_bytes(16)\n",
        replace="        secrets.token_bytes(16)\n",
        killers=(
            (
                f"{_TESTS}_trouble.py::TestReset::"
                "test_waits_for_jobs_and_parts_with_what_was_stored"
            ),
        ),
    ),
    Mutant(
        name="answers_outlive_a_reset",
        why="Chunks of former keys are promoted under the new ones, and fail.",
        file=_TIER,
        find="former, self._lookups = self._lookups, self._new_lookups()",
        replace="former = self._new_lookups()",
        killers=(
            f"{_TESTS}_trouble.py::TestReset::test_questions_from_before_are_no_answers",
        ),
    ),
    Mutant(
        name="chunks_of_other_layers",
        why="A model with other pages finds these: wrong tokens.",
        file=_SETUP,
        find="                pages.fingerprint(),\n",
        replace="",
        killers=(f"{_TESTS}_setup.py::TestKeys::test_say_which_layers_there_are",),
    ),
    Mutant(
        name="configuration_of_another_connector",
        why="Chunks are stored under the name of a model that did not make them.",
        file=_SETUP,
        find="if given is spec.extra_config and",
        replace="if given == spec.extra_config and",
        killers=(
            f"{_TESTS}_setup.py::TestRefused::test_tier_that_is_made_by_somebody_else",
        ),
    ),
    Mutant(
        name="adapters_by_their_names",
        why="An adapter that was replaced finds blocks of the former one: wrong tokens.",
        file=_SETUP,
        find='    if getattr(vllm_config, "lora_config", None) is not None:\n',
        replace="    if False:\n",
        killers=(f"{_TESTS}_setup.py::TestRefused::test_refusal_leaves_nothing",),
    ),
    Mutant(
        name="any_release_of_tiers",
        why="An interface that its makers call experimental is trusted to be the same.",
        file=_SETUP,
        find="        if version() != _TRIED:\n",
        replace="        if version() < _TRIED:\n",
        killers=(
            f"{_TESTS}_setup.py::TestRefused::test_release_whose_tiers_nobody_tried",
        ),
    ),
    Mutant(
        name="mistake_of_a_store_ends_the_engine",
        why="What a store raises by mistake is raised in the scheduler's step.",
        file=_LOOKUPS,
        find="        if answer.error is not None:  # whatever",
        replace="        if not answer.is_over:  # whatever",
        killers=(
            f"{_TESTS}_trouble.py::TestFailing::test_chunks_that_cannot_be_had_are_misses",
        ),
    ),
    Mutant(
        name="refused_promotion_is_no_miss",
        why="A load that cannot be begun is promoted in each step, and its request never runs.",
        file=_TIER,
        find="            if job.is_promotion:\n                self._lookups.missed(keys)\n",
        replace="",
        killers=(
            "tests/integration/vllm/test_tier_trouble.py::TestDamage::test_chunk_that_cannot_be_begun_to_load_is_tried_once",
        ),
    ),
)
