# SPDX-License-Identifier: Apache-2.0
"""What one GPU has taught."""

from tests.mutations.mutant import Mutant

__all__ = ["GPU"]

_HELPERS = "tests/stores/test_slab_digests.py::TestHelpers"
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
    Mutant(
        name="nobody_helps",
        why="A load waits for the checksums that one core computes.",
        file="ucm/native.c",
        find="while (num_helpers + 1 < wanted &&",
        replace="while (0 && num_helpers + 1 < wanted &&",
        killers=(f"{_HELPERS}::test_as_many_threads_compute_at_once_as_may",),
    ),
    Mutant(
        name="helpers_stay",
        why="Each that asks comes on top of all that others have: every core is taken.",
        file="ucm/native.c",
        find="is_one_too_many = change(-1, all->most);",
        replace="is_one_too_many = 0;",
        killers=(f"{_HELPERS}::test_helpers_give_way_and_come_again",),
    ),
    Mutant(
        name="child_counts_its_parents_helpers",
        why="A process that was forked amid a load computes checksums alone for ever.",
        file="ucm/native.c",
        find="{ atomic_store(&num_digesting, 0); }",
        replace="{}",
        killers=(f"{_HELPERS}::test_forked_child_has_helpers_of_its_own",),
    ),
    Mutant(
        name="slab_is_not_told_of_threads",
        why="Checksums have one core whatever is set, and loads wait for it.",
        file="ucm/stores/slab/_store.py",
        find="        self._slab.most_hashing = most_threads\n",
        replace="        return\n",
        killers=(
            (
                "tests/stores/test_slab_verify.py::"
                "test_checksums_have_the_threads_that_the_store_was_given"
            ),
        ),
    ),
    Mutant(
        name="helpers_beside_an_engine_on_the_cpu",
        why="Each core that computes checksums is taken from the forward pass.",
        file="ucm/pipeline/pipeline.py",
        find="            device.hash_on(num_hashing)\n        else:\n            store",
        replace="            device.hash_on(num_hashing)\n        if True:\n            store",
        killers=(
            (
                "tests/pipeline/test_load_verified.py::"
                "test_checksums_of_saves_take_further_threads_beside_a_device_only"
            ),
        ),
    ),
)
