# SPDX-License-Identifier: Apache-2.0
"""What one GPU has taught."""

from tests.mutations.mutant import Mutant

__all__ = ["GPU"]

_EVENTS = "ucm/devices/events.py"
_DIGEST = "ucm/integration/digest.py"
_BORROW = "tests/devices/test_event_book.py::TestBorrow"
_HALVES = "tests/integration/vllm/test_halves.py"
_SUMS = "tests/integration/test_digest.py::TestSums"

GPU = (
    Mutant(
        name="engines_event_held_weakly",
        why="A fresh event at a dead one's address is refused, and memory corrupted.",
        file=_EVENTS,
        find='if hasattr(event, "__dict__"):',
        replace="if False:",
        killers=(f"{_BORROW}::test_engines_event_is_not_referred_to_weakly",),
    ),
    Mutant(
        name="one_book_reads_anothers_steps",
        why="With two connectors each event is stale for the second.",
        file=_EVENTS,
        find="books.setdefault(self, self._step)",
        replace="books.setdefault(type(self), self._step)",
        killers=(f"{_BORROW}::test_engines_event_is_not_referred_to_weakly",),
    ),
    Mutant(
        name="sums_of_all_words_alike",
        why="Weights that changed places are taken for the same.",
        file=_DIGEST,
        find="(self._factors[:, : len(words)] * words)",
        replace="(self._factors[:, :1] * words)",
        killers=(f"{_SUMS}::test_order_counts_within_a_piece_and_among_pieces",),
    ),
    Mutant(
        name="sums_of_whole_words_only",
        why="The last bytes of a weight may change unseen.",
        file=_DIGEST,
        find="torch.nn.functional.pad(piece, (0, missing)).clone()",
        replace="piece[: len(piece) // 4 * 4].clone()",
        killers=(f"{_SUMS}::test_any_bit_changes_both_sums",),
    ),
    Mutant(
        name="step_without_work_keeps_the_lock",
        why="In process loads take milliseconds for each hop.",
        file="ucm/integration/vllm/scheduler.py",
        find="self._setup.threads.give_way()",
        replace="pass",
        killers=(f"{_HALVES}::test_step_that_computes_nothing_gives_way",),
    ),
)
