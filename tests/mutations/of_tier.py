# SPDX-License-Identifier: Apache-2.0
"""Mutants of the tier below vLLM's own offloading, and of what is begun for it."""

from tests.mutations.mutant import Mutant

__all__ = ["TIER"]

_SYNC = "ucm/cache/sync.py"
_BEGUN = "tests/cache/test_begun.py"
_CANCELLED = "test_that_is_cancelled_is_told_of_when_its_blocks_are_free"

TIER = (
    Mutant(
        name="save_told_of_before_its_blocks_are_free",
        why="The host reuses memory that is still read: another block's bytes are stored.",
        file=_SYNC,
        find="        if not self._transfer.released.subscribe(look):\n            look()",
        replace="        look()",
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
        find='as ``Save.when_over``."""\n        if not self._transfer.over.subscribe(call):\n            call()',
        replace='as ``Save.when_over``."""\n        self._transfer.over.subscribe(call)',
        killers=(
            f"{_BEGUN}::TestLoad::test_is_over_when_its_blocks_hold_what_was_saved",
        ),
    ),
)
