# SPDX-License-Identifier: Apache-2.0
"""Mutants of when blocks count as used, from the scheduler to the store."""

from tests.mutations.mutant import Mutant

__all__ = ["USES"]

_ADAPTER = "ucm/scheduler/adapter.py"
_INTAKE = "ucm/intake.py"
_LIVES = "ucm/scheduler/lives.py"
_SAVE = "ucm/pipeline/save.py"
_SHARES = "ucm/scheduler/shares.py"
_TOUCHES = "ucm/scheduler/touches.py"
_TRANSFERS = "ucm/scheduler/transfers.py"
_MARKED = "tests/scheduler/test_touches.py::TestTouches"
_OPENED = "tests/scheduler/test_transfers.py::TestOpenTransfers"
_OWNERS = "tests/test_intake.py::TestOwners"
_ROOM = "tests/test_uses.py::TestRoom"
_STAGES = "tests/pipeline/test_rows.py::TestRows"

USES = (
    Mutant(
        name="all_blocks_of_a_life_alike",
        why="R-29: a prompt's head is evicted as early as its tail.",
        file=_TRANSFERS,
        find="moment - each[-1].at * size",
        replace="moment",
        killers=(
            f"{_OPENED}::test_owner_tells_when_its_last_block_counts_as_used",
            f"{_ROOM}::test_end_of_a_prefix_goes_first_whoever_saved_it[memory]",
        ),
    ),
    Mutant(
        name="gap_within_an_owner",
        why="R-29: blocks before a gap count as used later or earlier than they were.",
        file=_SHARES,
        find="if after.at > block.at + 1:",
        replace="if False:",
        killers=(f"{_OPENED}::test_blocks_behind_a_gap_are_a_ticket_of_their_own",),
    ),
    Mutant(
        name="life_twice_in_a_ticket",
        why="A hold is taken twice for one life, and ends with an error.",
        file=_TRANSFERS,
        find="if is_more or size + rest > limit:",
        replace="if size + rest > limit:",
        killers=(f"{_OPENED}::test_blocks_behind_a_gap_are_a_ticket_of_their_own",),
    ),
    Mutant(
        name="ticket_evicted_from_its_head",
        why="R-29: of one ticket the first block goes first.",
        file=_INTAKE,
        find="- np.arange(ends[-1]) * block_tokens",
        replace="+ np.arange(ends[-1]) * block_tokens",
        killers=(f"{_OWNERS}::test_blocks_of_each_owner_count_as_used_by_their_depth",),
    ),
    Mutant(
        name="tenants_not_told",
        why="A tenant takes as much of the store as it likes.",
        file=_INTAKE,
        find="np.array([owner.tenant for owner in owners], dtype=np.uint32)",
        replace="np.zeros(len(owners), dtype=np.uint32)",
        killers=(f"{_OWNERS}::test_blocks_of_each_owner_count_as_used_by_their_depth",),
    ),
    Mutant(
        name="saved_at_any_moment",
        why="R-29: what is saved counts as used when it is saved, its end last.",
        file=_SAVE,
        find="reserve(keys, ticket.block_bytes, uses)",
        replace="reserve(keys, ticket.block_bytes)",
        killers=(f"{_STAGES}::test_block_that_is_stored_already_counts_as_used",),
    ),
    Mutant(
        name="stored_block_not_used",
        why="What is computed again and again behind a hole is evicted all the same.",
        file=_SAVE,
        find="            if lease.num_stored:\n",
        replace="            if False:\n",
        killers=(f"{_STAGES}::test_block_that_is_stored_already_counts_as_used",),
    ),
    Mutant(
        name="own_cache_is_no_use",
        why="R-30: a prefix that the engine has itself is evicted from the store.",
        file=_ADAPTER,
        find="if request.is_new and not life.external:",
        replace="if False:",
        killers=(
            f"{_MARKED}::test_prefix_of_the_engines_own_cache_counts_as_used",
            f"{_ROOM}::test_prefix_of_the_engines_own_cache_outlives_others[memory]",
        ),
    ),
    Mutant(
        name="hit_marked_twice",
        why="R-28: a hit costs two look-ups of each key on the engine's thread.",
        file=_ADAPTER,
        find="if request.is_new and not life.external:",
        replace="if request.is_new:",
        killers=(f"{_MARKED}::test_life_uses_its_prefix_once",),
    ),
    Mutant(
        name="all_marked_at_once",
        why="R-28: a burst of long prompts holds the engine's thread for long.",
        file=_TOUCHES,
        find="room = self._layout.groups, MAX_TOUCHED_KEYS",
        replace="room = self._layout.groups, 1 << 40",
        killers=(f"{_MARKED}::test_long_prefix_is_marked_over_several_plans",),
    ),
    Mutant(
        name="prefixes_without_end",
        why="A burst is marked minutes later, and takes any memory meanwhile.",
        file=_TOUCHES,
        find="deque(maxlen=MAX_WAITING_PREFIXES)",
        replace="deque()",
        killers=(f"{_MARKED}::test_oldest_prefix_is_dropped_when_too_many_wait",),
    ),
    Mutant(
        name="used_at_any_depth",
        why="R-29: a prefix that was used has its head evicted first.",
        file=_TOUCHES,
        find="prefix.moment - depths",
        replace="prefix.moment + 0 * depths",
        killers=(f"{_MARKED}::test_prefix_of_the_engines_own_cache_counts_as_used",),
    ),
    Mutant(
        name="doubted_prefix_marked",
        why="A prefix is marked under a key space that it has nothing to do with.",
        file="ucm/scheduler/matching.py",
        find="if not (blocks and self.keyspace_digest):",
        replace="if not blocks:",
        killers=(f"{_MARKED}::test_nothing_is_marked_in_a_doubt",),
    ),
    Mutant(
        name="parts_at_other_moments",
        why="R-29: the parts of a block are evicted apart, and one lost wastes them all.",
        file="ucm/scheduler/matching.py",
        find="moments.repeat(self.num_shards)",
        replace="np.tile(moments, self.num_shards)",
        killers=(
            f"{_MARKED}::test_prefix_of_the_engines_own_cache_counts_as_used[2-one]",
        ),
    ),
    Mutant(
        name="nothing_retained",
        why="A request that asks for retention has it no longer than any other.",
        file=_LIVES,
        find="self.now + wishes.retain_seconds",
        replace="self.now",
        killers=(f"{_MARKED}::test_retained_prefix_counts_as_used_later",),
    ),
)
