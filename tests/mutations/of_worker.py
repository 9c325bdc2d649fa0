# SPDX-License-Identifier: Apache-2.0
"""What a rank does with tickets of several requests, and on which loop it does it."""

from tests.mutations.mutant import Mutant

__all__ = ["WORKER"]

_WORKER = "ucm/integration/vllm/worker.py"
_PROGRESS = "ucm/progress.py"
_INTAKE = "ucm/intake.py"
_STEPS = "tests/integration/vllm/test_worker_steps.py::TestUnsubmitted"
_KEYS = "tests/test_intake.py::TestKeys"
_SHARED = "tests/test_progress.py::TestSharedSaves"

WORKER = (
    Mutant(
        name="deferred_before_its_save",
        why="An engine that asks for results first gets blocks back that a save is to read.",
        file=_WORKER,
        find="""\
        self._progress.begin_saves(saves)
        self._progress.defer(plan.deferred)
        if self._runtime is None:
            return
""",
        replace="""\
        self._progress.defer(plan.deferred)
        if self._runtime is None:
            return
""",
        killers=(
            f"{_STEPS}::test_request_deferred_with_its_last_save_is_kept_until_that_is_read",
        ),
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
)
