# SPDX-License-Identifier: Apache-2.0
"""Mutants of when blocks count as used, from the scheduler to the store."""

from tests.mutations.mutant import Mutant

__all__ = ["USES"]

_ADAPTER = "ucm/scheduler/adapter.py"
_FORGETTER = "ucm/stores/forgetter.py"
_INTAKE = "ucm/intake.py"
_LIVES = "ucm/scheduler/lives.py"
_SAVE = "ucm/pipeline/save.py"
_SHARES = "ucm/scheduler/shares.py"
_TOUCHES = "ucm/scheduler/touches.py"
_TRANSFERS = "ucm/scheduler/transfers.py"
_MARKED = "tests/scheduler/test_touches.py::TestTouches"
_OPENED = "tests/scheduler/test_transfers.py::TestOpenTransfers"
_OWNERS = "tests/test_intake.py::TestOwners"
_HALVES = "tests/integration/vllm/test_wishes.py::TestHalves"
_READER = "tests/integration/vllm/test_wishes.py::TestReader"
_FORGETS = "tests/stores/test_forgetter.py::TestForgetter"
_WISHES = "ucm/integration/vllm/wishes.py"
_ROOM = "tests/test_uses.py::TestRoom"
_STAGES = "tests/pipeline/test_rows.py::TestRows"

USES = (
    Mutant(
        name="all_blocks_of_a_life_alike",
        why="R-29: a prompt's head is evicted as early as its tail.",
        file=_TRANSFERS,
        find="moment - (run.start + num_blocks - 1) * size",
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
        find="if runs and runs[-1].stop == each.start:",
        replace="if runs:",
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
        find="if request.is_new and computed and not life.external:",
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
        find="if request.is_new and computed and not life.external:",
        replace="if request.is_new and computed:",
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
        why="A step in a doubt raises into the engine's scheduler.",
        file="ucm/scheduler/matching.py",
        find="else self._prefixes).get(group.group_id, ())",
        replace="else self._prefixes)[group.group_id]",
        killers=(f"{_MARKED}::test_nothing_is_marked_in_a_doubt",),
    ),
    Mutant(
        name="parts_at_other_moments",
        why="R-29: the parts of a block are evicted apart, and one lost wastes them all.",
        file=_TOUCHES,
        find="np.concatenate(moments).repeat(self._matcher.num_shards)",
        replace="np.tile(np.concatenate(moments), self._matcher.num_shards)",
        killers=(
            f"{_MARKED}::test_prefix_of_the_engines_own_cache_counts_as_used[2-one]",
        ),
    ),
    Mutant(
        name="nothing_retained",
        why="A request that asks for retention has it no longer than any other.",
        file=_LIVES,
        find="self._clock.now + wishes.retain_seconds",
        replace="self._clock.now",
        killers=(f"{_MARKED}::test_retained_prefix_counts_as_used_later",),
    ),
    Mutant(
        name="used_before_the_clock_began",
        why="A request that gives way on a machine just started has a stamp below 0.",
        file=_LIVES,
        find="max(_EARLIEST_NS, int(",
        replace="max(-(1 << 62), int(",
        killers=(f"{_MARKED}::test_prefix_that_gives_way_has_a_stamp",),
    ),
    Mutant(
        name="retained_for_ever",
        why="One request fills the store with what nothing evicts.",
        file=_WISHES,
        find="float(max(-most, min(cast(float, value), most)))",
        replace="float(max(-most, min(value, _LONGEST_S)))",
        killers=(f"{_READER}::test_wish_is_read",),
    ),
    Mutant(
        name="warned_of_each_request",
        why="A client that asks for nonsense fills the log.",
        file=_WISHES,
        find="            self._told.add(key)\n",
        replace="",
        killers=(f"{_READER}::test_wish_that_makes_no_sense_is_as_if_not_given",),
    ),
    Mutant(
        name="wishes_of_others_read",
        why="What another connector is told is warned of as if it was ours.",
        file=_WISHES,
        find="        ours = given.get(_OURS, {})\n",
        replace="        ours = given\n",
        killers=(f"{_READER}::test_request_that_says_nothing_to_us_wishes_nothing",),
    ),
    Mutant(
        name="forgotten_and_saved",
        why="A prompt that is to be deleted is stored first, and behind the deletion.",
        file=_WISHES,
        find=" and not forgets",
        replace="",
        killers=(f"{_READER}::test_wish_is_read",),
    ),
    Mutant(
        name="saved_against_its_wish",
        why="What a request computes is stored though it asks for the contrary.",
        file=_LIVES,
        find="            most_saved=wishes.most_saved,\n",
        replace="",
        killers=(f"{_HALVES}::test_request_that_is_not_to_be_stored_leaves_nothing",),
    ),
    Mutant(
        name="wishes_lost",
        why="A request that hits nothing has no tenant and no retention.",
        file="ucm/integration/vllm/running.py",
        find="                wishes=NO_WISHES if known is None else known.wishes,\n",
        replace="",
        killers=(f"{_HALVES}::test_moment_and_tenant_go_with_what_is_saved",),
    ),
    Mutant(
        name="nothing_forgotten",
        why="A prompt that was to be deleted stays.",
        file="ucm/integration/vllm/scheduler.py",
        find="if end is not None and end.wishes.forgets:",
        replace="if False:",
        killers=(f"{_HALVES}::test_forgotten_prompt_is_deleted_when_its_request_ends",),
    ),
    Mutant(
        name="deleted_at_once",
        why="R-28: the deletion of a long prompt holds the index's lock for long.",
        file=_FORGETTER,
        find="range(0, len(keys), _KEYS_AT_ONCE)",
        replace="range(1)",
        killers=(f"{_FORGETS}::test_many_keys_are_deleted_a_few_at_a_time",),
    ),
    Mutant(
        name="deletions_without_end",
        why="While a store hangs, keys that are to be deleted take any memory.",
        file=_FORGETTER,
        find="has_room = self._num_waiting + len(keys) <= MAX_WAITING_KEYS",
        replace="has_room = True",
        killers=(
            f"{_FORGETS}::test_nobody_waits_for_the_store_and_what_waits_has_a_bound",
        ),
    ),
    Mutant(
        name="closed_under_a_deletion",
        why="A store is unmapped under a thread that is in it, and the process dies.",
        file="ucm/threads.py",
        find="return not thread.is_alive()",
        replace="return True",
        killers=(f"{_FORGETS}::test_thread_that_hangs_is_told_of",),
    ),
)
