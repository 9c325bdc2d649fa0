# SPDX-License-Identifier: Apache-2.0
"""Mutants of what makes a burst of look-ups and loads cheap."""

from tests.mutations.mutant import Mutant

__all__ = ["MATCH"]

_MATCHING = "ucm/scheduler/matching.py"
_LOADS = "ucm/scheduler/loads.py"
_CHAINS = "ucm/stores/slab/_chains.py"
_MATCHER = "tests/scheduler/test_matching.py::TestPrefixMatcher"
_LOADED = "tests/scheduler/test_load_orders.py::TestLoadOrders"
_NOTICE = "tests/stores/test_slab_lost.py::TestNotice"
_ROOM = "tests/scheduler/test_budget.py::TestLoads::test_request_that_does_not_wait"
_SHARING = "tests/stores/test_slab.py::TestSharing"

MATCH = (
    Mutant(
        name="whole_prompt_asked_at_once",
        why="Each step packs and hashes all keys of each long prompt that is new.",
        file=_MATCHING,
        find="_FIRST_LOOK: Final = 32",
        replace="_FIRST_LOOK: Final = 1 << 20",
        killers=(f"{_MATCHER}::test_new_prompt_is_told_by_its_first_blocks",),
    ),
    Mutant(
        name="one_look_per_shard",
        why="A look-up costs the engine's thread eight times as much on eight ranks.",
        file=_MATCHING,
        find="end = min(start + max(1, num_keys // num_shards), stop)",
        replace="end = start + 1",
        killers=(f"{_MATCHER}::test_shards_are_asked_together",),
    ),
    Mutant(
        name="some_shard_will_do",
        why="A hit is promised although a rank has lost its part of a window.",
        file=_MATCHING,
        find="map(all, zip(",
        replace="map(any, zip(",
        killers=(f"{_MATCHER}::test_block_counts_only_with_all_shards",),
    ),
    Mutant(
        name="denied_window_found",
        why="A window's block that failed is matched and fails again, for ever.",
        file=_MATCHING,
        find="present[at] &= (group.group_id, block_hash) not in denied",
        replace="pass",
        killers=(f"{_MATCHER}::test_denied_block_is_missing",),
    ),
    Mutant(
        name="last_part_evicted_first",
        why="A full store throws one rank's part of all blocks away, and no hit is left.",
        file=_MATCHING,
        find="for each in hashes for prefix in prefixes]",
        replace="for prefix in prefixes for each in hashes]",
        killers=(f"{_MATCHER}::test_block_counts_only_with_all_shards",),
    ),
    Mutant(
        name="short_table_loaded",
        why="Fewer blocks are loaded than the engine was promised, and it reads garbage.",
        file=_LOADS,
        find="if not len(ids) == len(wanted) == blocks.stop - first:",
        replace="if False:",
        killers=(f"{_LOADED}::test_hit_beyond_the_table_is_refused",),
    ),
    Mutant(
        name="loaded_into_the_null_block",
        why="The engine's null block, which all requests share, gets one's content.",
        file=_LOADS,
        find="if NULL_BLOCK not in block_ids:",
        replace="if True:",
        killers=(f"{_LOADED}::test_each_block_of_a_hit_is_ordered_once",),
    ),
    Mutant(
        name="room_never_comes_back",
        why="Where requests do not wait for loads, nothing is loaded after a while.",
        file="ucm/scheduler/budget.py",
        find="        self._blocks = self._nbytes = 0\n        return loads, cut\n",
        replace="        return loads, cut\n",
        killers=(f"{_ROOM}_hits_as_far_as_the_step_has_room",),
    ),
    Mutant(
        name="room_without_end",
        why="A step is promised more loads than its message holds, and it is never sent.",
        file="ucm/scheduler/budget.py",
        find="for order in () if self._parks else orders:",
        replace="for order in ():",
        killers=(
            f"{_ROOM}_is_promised_what_one_plan_holds",
            f"{_ROOM}_hits_as_far_as_the_step_has_room",
        ),
    ),
    Mutant(
        name="equal_hash_believed",
        why="A block is found under a key that only hashes to the same number.",
        file=_CHAINS,
        find='if records["key"].tobytes() != batch.fields:',
        replace="if False:",
        killers=(f"{_SHARING}::test_keys_of_equal_hash_are_told_apart",),
    ),
    Mutant(
        name="chain_ends_at_an_equal_hash",
        why="A block that is stored behind one of the same hash is a miss for ever.",
        file=_CHAINS,
        find="            slot = self.nexts[slot]\n",
        replace="            return NO_SLOT\n",
        killers=(f"{_SHARING}::test_keys_of_equal_hash_are_told_apart",),
    ),
    Mutant(
        name="late_part_touched_last",
        why="The end of a long prompt outlives its beginning, without which it is no use.",
        file="ucm/stores/slab/_store.py",
        find="            start = stop\n",
        replace="",
        killers=(f"{_SHARING}::test_touch_of_many_keys_keeps_the_first_longest",),
    ),
    Mutant(
        name="few_keys_all_taken_for_stored",
        why="Blocks that the engine has and the store lost are never saved again.",
        file="ucm/stores/slab/_store.py",
        find="[slot != NO_SLOT for slot in map(self._slab.index.slot_of, keys)]",
        replace="[True] * len(keys)",
        killers=(f"{_SHARING}::test_keys_of_equal_hash_are_told_apart",),
    ),
    Mutant(
        name="index_looked_at_by_the_clock",
        why="A look into an index that was shortened just now ends the engine's scheduler.",
        file="ucm/stores/slab/_opened.py",
        find="            or seek(fd, 0, os.SEEK_END) < nbytes\n",
        replace="",
        killers=(f"{_NOTICE}::test_look_up_looks_at_the_index_each_time",),
    ),
)
