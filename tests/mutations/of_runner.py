# SPDX-License-Identifier: Apache-2.0
"""Mutants of what depends on the order in which an engine calls its hooks."""

from tests.mutations.mutant import Mutant

__all__ = ["RUNNER"]

_WORKER = "ucm/integration/vllm/worker.py"
_STEP = "ucm/integration/vllm/step.py"
_RUNNERS = "ucm/integration/vllm/runners.py"
_MODES = "ucm/integration/vllm/modes.py"
_SETUP = "ucm/integration/vllm/setup.py"
_ADAPTER = "ucm/scheduler/adapter.py"
_GUARD = "ucm/pipeline/guard.py"
_SAVE = "ucm/pipeline/save.py"
_RUNTIME = "ucm/runtime.py"
_LAYERWISE = "ucm/layerwise.py"
_STEPS = "tests/integration/vllm/test_worker_steps.py"
_FIRST = f"{_STEPS}::TestOverwrittenFirst"
_LEFT = f"{_STEPS}::TestUnsubmitted"
_DECLINED = "tests/test_runtime_declined.py"
_TABLE = "tests/integration/vllm/test_modes.py::TestTable"
_SETUPS = "tests/integration/vllm/test_modes.py::TestSetup"

RUNNER = (
    #
    Mutant(
        name="overwritten_is_waited_for",
        why="A fence comes after the overwrite: zeroes are stored under a true key.",
        file=_WORKER,
        find="runtime.fence(plan.fences, plan.overwritten, plan.lost)",
        replace="runtime.fence((*plan.fences, *plan.overwritten), (), plan.lost)",
        killers=(
            f"{_FIRST}::test_copy_that_ended_unseen_is_torn_by_what_was_overwritten_before",
        ),
    ),
    Mutant(
        name="released_copy_is_not_torn",
        why="A copy that ended after the overwrite was launched is committed.",
        file=_GUARD,
        find="            self.torn = self.torn or reason\n        self.revoke(reason)\n",
        replace="        self.revoke(reason)\n",
        killers=(
            f"{_FIRST}::test_copy_that_ended_unseen_is_torn_by_what_was_overwritten_before",
        ),
    ),
    Mutant(
        name="committed_before_the_engine_has_looked",
        why="What is stored cannot be torn when the engine names it.",
        file=_SAVE,
        find="        sealed = sealed.then(Confirm())\n",
        replace="        pass\n",
        killers=(f"{_FIRST}::test_nothing_is_stored_before_the_engine_has_looked",),
    ),
    Mutant(
        name="confirmed_copy_is_torn",
        why="Each save of a model with states is thrown away when its block goes.",
        file=_GUARD,
        find="            if self.is_confirmed:\n",
        replace="            if False:\n",
        killers=(f"{_STEPS}::TestGuard::test_confirmed_copy_cannot_be_torn",),
    ),
    Mutant(
        name="nobody_confirms",
        why="On the second runner nothing of a model with states is ever stored.",
        file=_RUNTIME,
        find="                ticket.guard.is_confirmed = True\n",
        replace="                pass\n",
        killers=(f"{_FIRST}::test_copy_that_was_seen_to_end_is_stored",),
    ),
    Mutant(
        name="close_waits_for_confirmations",
        why="An engine that closes waits for what can come no more.",
        file=_RUNTIME,
        find="            self.abandon(self._waits.unconfirmed(), Reason.UNCONFIRMED)\n",
        replace="            pass\n",
        killers=(
            f"{_FIRST}::test_unconfirmed_saves_are_dropped_when_the_engine_closes",
        ),
    ),
    Mutant(
        name="silent_engine_taken_for_the_first_runner",
        why="An engine that does not say which runner it has overwrites first.",
        file=_RUNNERS,
        find='"use_v2_model_runner", True',
        replace='"use_v2_model_runner", False',
        killers=(f"{_SETUPS}::test_order_of_the_engines_runner_is_found",),
    ),
    Mutant(
        name="no_model_confirms",
        why="A model whose blocks are cleared is saved as one whose blocks are not.",
        file=_SETUP,
        find="confirms=first and overwrites_blocks(kv_cache_config)",
        replace="confirms=False and overwrites_blocks(kv_cache_config)",
        killers=(f"{_SETUPS}::test_order_of_the_engines_runner_is_found",),
    ),
    #
    Mutant(
        name="every_step_is_idle",
        why="Each step of the second runner waits up to 2 ms for news.",
        file=_ADAPTER,
        find="is_idle=facts.is_idle",
        replace="is_idle=True",
        killers=(
            "tests/scheduler/test_adapter.py::TestPlans::test_step_knows_if_idle",
        ),
    ),
    Mutant(
        name="unsubmitted_plan_forgotten",
        why="The blocks of a plan that nobody submitted are held for good.",
        file=_WORKER,
        find="        self._settle(former)\n",
        replace="",
        killers=(
            f"{_LEFT}::test_plan_that_was_never_bound_is_settled_by_the_next",
            f"{_LEFT}::test_stage_that_is_asked_for_results_only_saves_with_the_next_step",
        ),
    ),
    Mutant(
        name="late_saves_after_the_overwrite",
        why="What is submitted now reads blocks that were cleared a moment ago.",
        file=_WORKER,
        find="if step.can_save and not self._setup.overwrites_first:",
        replace="if step.can_save:",
        killers=(
            f"{_LEFT}::test_late_saves_are_dropped_where_blocks_are_overwritten_first",
        ),
    ),
    Mutant(
        name="saves_of_a_pass_that_raised",
        why="Blocks that were written in part are stored as whole.",
        file=_STEP,
        find="self.has_raised |= error is not None and error is not self.handled",
        replace="self.has_raised |= False",
        killers=(f"{_LEFT}::test_forward_pass_that_raised_saves_nothing",),
    ),
    Mutant(
        name="rows_that_never_began_forgotten",
        why="Row by row, blocks of a plan that nobody submitted are held for good.",
        file=_LAYERWISE,
        find="                self._runtime.decline(group.digest, group.orders, Reason.UNSUBMITTED)\n",
        replace="                pass\n",
        killers=(f"{_LEFT}::test_plan_that_was_never_bound_is_settled_by_the_next",),
    ),
    Mutant(
        name="declined_orders_begin",
        why="What a step has not carried out is stored or fails, if the loop is quicker.",
        file=_RUNTIME,
        find="        self._intake.submit(digest, orders, DoneFence(), None, reason)\n        self._take_in()\n",
        replace="        self.submit(digest, orders, DoneFence())\n        self.abandon([order.transfer_id for order in orders], reason)\n",
        killers=(
            f"{_DECLINED}::test_orders_that_are_declined_end_for_that_reason_at_once",
        ),
    ),
    #
    Mutant(
        name="row_saved_behind_its_first_part",
        why="The second half of a batch is not written when its row is copied.",
        file=_MODES,
        find='{"use_layerwise": True, "micro_batches": True}',
        replace='{"use_layerwise": True, "is_mock": True}',
        killers=(
            f"{_TABLE}::test_every_combination_is_as_written_down",
            f"{_SETUPS}::test_engine_that_runs_layers_otherwise_falls_back_by_name",
        ),
    ),
    Mutant(
        name="drafter_loads_layerwise",
        why="Each layer-wise load of an engine that speculates fails, or comes too late.",
        file=_MODES,
        find='{"use_layerwise": True, "speculation": True}',
        replace='{"use_layerwise": True, "is_mock": True}',
        killers=(
            f"{_TABLE}::test_every_combination_is_as_written_down",
            f"{_SETUPS}::test_engine_that_runs_layers_otherwise_falls_back_by_name",
        ),
    ),
    Mutant(
        name="silent_engine_runs_in_one_part",
        why="An engine that does not say so may run layers in parts.",
        file=_RUNNERS,
        find='"use_ubatching", True',
        replace='"use_ubatching", False',
        killers=(
            f"{_SETUPS}::test_engine_that_runs_layers_otherwise_falls_back_by_name",
        ),
    ),
)
