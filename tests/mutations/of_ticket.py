# SPDX-License-Identifier: Apache-2.0
"""Mutants of how tickets end, and of who waits for that."""

from tests.mutations.mutant import Mutant

__all__ = ["TICKET"]

_RUNTIME = "ucm/runtime.py"
_WAITING = "ucm/pipeline/waiting.py"
_CLOSES = "tests/test_runtime_close.py::TestClose"
_WAITS = "tests/test_layerwise_gaps.py::TestWaits"
_CHANGES = "tests/pipeline/test_waiting.py::TestChanges"

TICKET = (
    # Who waits.
    Mutant(
        name="copy_forgotten_with_its_end",
        why="A step computes into blocks that a load of a broken-off step still writes.",
        file=_RUNTIME,
        find="if ticket.is_noticed and not ticket.guard.is_touched:",
        replace="if ticket.is_noticed:",
        killers=(
            f"{_WAITS}::test_load_that_was_broken_off_is_waited_for_also_behind_its_notice",
        ),
    ),
    Mutant(
        name="ended_ticket_kept",
        why="Each ticket stays in the list of open ones, until memory ends.",
        file=_RUNTIME,
        find="                self._open.pop(ticket.transfer_id, None)\n",
        replace="                pass\n",
        killers=(
            f"{_WAITS}::test_load_that_was_broken_off_is_waited_for_also_behind_its_notice",
        ),
    ),
    Mutant(
        name="woken_by_each_ticket",
        why="The engine's thread is woken twelve times for a batch of twelve.",
        file=_WAITING,
        find="            if is_so():\n                event.set()\n",
        replace="            event.set()\n",
        killers=(f"{_CHANGES}::test_thread_that_waits_for_many_is_woken_once",),
    ),
    Mutant(
        name="first_of_many_is_enough",
        why="The engine overwrites blocks that all saves but one still read.",
        file=_WAITING,
        find="            while pending and is_so(pending[0]):\n",
        replace="            if is_so(pending[0]):\n                pending.clear()\n            while False:\n",
        killers=(f"{_CHANGES}::test_thread_that_waits_for_many_is_woken_once",),
    ),
    Mutant(
        name="waiter_left_behind",
        why="Each wait of the engine makes every later ticket dearer, for good.",
        file=_WAITING,
        find="                self._awaited.remove(waiter)\n",
        replace="                pass\n",
        killers=(f"{_CHANGES}::test_wait_that_is_over_leaves_nothing_behind",),
    ),
    # Close.
    Mutant(
        name="interrupted_close_is_over",
        why="A close that was interrupted leaves the store open for good.",
        file=_RUNTIME,
        find="            if not self._is_over:\n",
        replace="            if not self._closed:\n",
        killers=(f"{_CLOSES}::test_close_that_broke_off_is_gone_on_with",),
    ),
    Mutant(
        name="close_beside_a_close",
        why="Whoever closes second unmaps memory under the copies of the first.",
        file=_RUNTIME,
        find="        with self._closing:  #",
        replace="        if not self._closed:  #",
        killers=(f"{_CLOSES}::test_second_close_comes_back_when_the_first_is_through",),
    ),
)
