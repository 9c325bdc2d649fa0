# SPDX-License-Identifier: Apache-2.0
"""What a rank does with tickets of several requests, and on which loop it does it."""

from tests.mutations.mutant import Mutant

__all__ = ["WORKER"]

_WORKER = "ucm/integration/vllm/worker.py"
_PROGRESS = "ucm/progress.py"
_INTAKE = "ucm/intake.py"
_STEPS = "tests/integration/vllm/test_worker_steps.py::TestUnsubmitted"
_CACHE = "tests/cache/test_close.py"
_KEYS = "tests/test_intake.py::TestKeys"
_SHARED_STEPS = "tests/integration/vllm/test_worker_steps.py::TestShared"
_SHARED = "tests/test_progress.py::TestSharedSaves"
_LAST = "tests/integration/vllm/test_last_steps.py::TestLastSteps"
_TAKEN = f"{_LAST}::test_where_nobody_else_takes_them_nothing_is_kept_when_nobody_runs"
_OTHERS = f"{_LAST}::test_where_others_take_them_the_last_answer_waits_for_nothing"

WORKER = (
    Mutant(
        name="last_steps_untold",
        why="Blocks that are saved behind the last answer stay the engine's for ever.",
        file="ucm/integration/vllm/last_steps.py",
        find="            sent |= told.finished_sending\n",
        replace="",
        killers=(f"{_TAKEN}[1]",),
    ),
    Mutant(
        name="last_steps_before_others",
        why="Who waits to run waits for copies that would go on beside it.",
        file="ucm/integration/vllm/last_steps.py",
        find="if half.running:",
        replace="if half.running.have_blocks:",
        killers=(f"{_LAST}::test_while_somebody_waits_they_are_steps_of_the_engine",),
    ),
    Mutant(
        name="last_steps_of_one_rank",
        why="Of several ranks one saves behind the last answer; the others' plans are lost.",
        file="ucm/integration/vllm/last_steps.py",
        find="            and vllm_config.parallel_config.world_size == 1\n",
        replace="",
        killers=(f"{_OTHERS}[two ranks]",),
    ),
    Mutant(
        name="last_steps_of_any_engine",
        why="An engine's last blocks are saved from the memory of another engine.",
        file="ucm/integration/vllm/last_steps.py",
        find='        is_ours = getattr(group, "engine_id", None) == self._engine_id\n',
        replace="        is_ours = True\n",
        killers=(f"{_OTHERS}[another engine]",),
    ),
    Mutant(
        name="deferred_before_its_save",
        why="An engine that asks for results first gets blocks back that a save is to read.",
        file=_WORKER,
        find="""\
        self._progress.begin_saves(saves)
""",
        replace="",
        killers=(
            f"{_STEPS}::test_request_deferred_with_its_last_save_is_kept_until_that_is_read",
        ),
    ),
    Mutant(
        name="all_lose_with_one",
        why="A request that is preempted costs all others of its ticket their blocks.",
        file="ucm/runtime.py",
        find="            self._waits.for_saves(transfer_ids, lambda: self._failure, lost)\n",
        replace="            self._waits.for_saves(transfer_ids, lambda: self._failure)\n",
        killers=(f"{_SHARED_STEPS}::test_request_loses_its_blocks_of_a_save_alone",),
    ),
    Mutant(
        name="all_torn_with_one",
        why="The same where the engine overwrites blocks before it says so.",
        file="ucm/runtime.py",
        find="            self._waits.tear(overwritten, lost)\n",
        replace="            self._waits.tear(overwritten)\n",
        killers=(f"{_SHARED_STEPS}::test_request_loses_its_blocks_of_a_save_alone",),
    ),
    Mutant(
        name="lost_by_nobody",
        why="The same, because the worker does not say which blocks they are.",
        file=_WORKER,
        find="runtime.fence(plan.fences, plan.overwritten, plan.lost)",
        replace="runtime.fence(plan.fences, plan.overwritten)",
        killers=(f"{_SHARED_STEPS}::test_request_loses_its_blocks_of_a_save_alone",),
    ),
    Mutant(
        name="first_owner_reads_alone",
        why="The engine frees blocks that a ticket reads for another request.",
        file=_PROGRESS,
        find="            for owner in order.owners:\n",
        replace="            for owner in order.owners[:1]:\n",
        killers=(
            f"{_SHARED}::test_blocks_of_each_request_are_read_until_the_save_is_released",
        ),
    ),
    Mutant(
        name="first_owner_freed_alone",
        why="All but one request of a ticket keep their blocks for ever.",
        file=_PROGRESS,
        find="        for owner in ticket.owners:\n",
        replace="        for owner in ticket.owners[:1]:\n",
        killers=(
            f"{_SHARED}::test_blocks_of_each_request_are_read_until_the_save_is_released",
        ),
    ),
    Mutant(
        name="former_key_space",
        why="Blocks are stored under the key space of other weights.",
        file=_INTAKE,
        find="        if batch.digest != self._digest:\n",
        replace="        if not self._digest:\n",
        killers=(
            f"{_KEYS}::test_keys_are_those_of_the_space_and_the_part_they_were_submitted_with",
        ),
    ),
    Mutant(
        name="served_after_the_end",
        why="A host that starts and stops at once runs a pipeline for ever.",
        file="ucm/runtime.py",
        find='            raise PipelineClosedError("the runtime is closed")\n',
        replace="            pass\n",
        killers=(f"{_CACHE}::TestWrongPlace::test_closed_runtime_serves_no_more",),
    ),
    Mutant(
        name="nobody_is_told",
        why="What an embedding host asked for ends, and it never hears of it.",
        file="ucm/mailbox.py",
        find="            self.on_put()\n",
        replace="            pass\n",
        killers=(f"{_CACHE}::TestTold::test_end_is_told",),
    ),
)
