# SPDX-License-Identifier: Apache-2.0
"""Mutants of what native code does to a slab's index."""

from tests.mutations.mutant import Mutant

__all__ = ["QUICK"]

_NATIVE = "ucm/native_slab.c"
_RESERVING = "ucm/stores/slab/_reserving.py"
_TESTS = "tests/stores/test_slab_quick.py"
_SAME = f"{_TESTS}::test_what_native_code_leaves_is_what_python_leaves"
_TOUCHED = f"{_TESTS}::test_slot_that_was_touched_while_it_went_is_not_taken"
_FAR = f"{_TESTS}::test_oldest_that_are_all_over_the_slab_are_left_to_python"
_COMMON = f"{_TESTS}::test_native_code_does_what_is_common_itself"
_OLDER = f"{_TESTS}::test_no_block_goes_for_one_that_was_used_before_it"
_SOON = f"{_TESTS}::test_block_that_another_process_used_a_moment_later_gives_way"
_LOST = f"{_TESTS}::test_lease_whose_slots_are_another_ones_publishes_nothing"
_KNOWN = f"{_TESTS}::test_what_native_code_evicts_is_remembered"
_HASHES = f"{_TESTS}::TestHashes"
_BOUNDS = f"{_TESTS}::TestGarbage"
_DEATH = (
    "tests/stores/test_slab_quick_crash.py::test_death_at_any_store_leaves_a_whole_slab"
)

QUICK = (
    # What is found.
    Mutant(
        name="equal_hash_taken_for_the_key",
        why="A block of another prompt is loaded.",
        file=_NATIVE,
        find="if (record->hash == hash && !memcmp(record->key, key, KEY_BYTES)) return slot;",
        replace="if (record->hash == hash && key) return slot;",
        killers=(_SAME,),
    ),
    Mutant(
        name="lone_block_read_unwritten",
        why="A block is loaded that nobody has written yet.",
        file=_NATIVE,
        find="committed[at] = slots[at] != NO_SLOT && index->states[slots[at]] == COMMITTED;",
        replace="committed[at] = slots[at] != NO_SLOT;",
        killers=(_SAME,),
    ),
    Mutant(
        name="chain_of_one",
        why="A block that shares a bucket with another is computed again.",
        file=_NATIVE,
        find="        slot = __atomic_load_n(index->nexts + slot, __ATOMIC_ACQUIRE);",
        replace="        slot = NO_SLOT;",
        killers=(_SAME,),
    ),
    Mutant(
        name="number_in_memory_believed",
        why="What somebody wrote to an index ends an engine.",
        file=_NATIVE,
        find="    return slot >= 0 && slot < index->num_slots;",
        replace="    return slot != NO_SLOT && index;",
        killers=(f"{_BOUNDS}::test_slots_that_are_none_are_not_published",),
    ),
    Mutant(
        name="another_hash_believed",
        why="Processes of one node do not find each other's blocks.",
        file="ucm/stores/slab/_quick.py",
        find="    return digest if found.tolist() == expected.hashes.tolist() else None\n",
        replace="    return digest if len(found) else None\n",
        killers=(f"{_HASHES}::test_another_build_of_xxhash_is_not_asked[None]",),
    ),
    Mutant(
        name="padding_hashed_by_native_code",
        why="Processes of one node do not find each other's blocks.",
        file=_NATIVE,
        find="digest(key, key[KEY_BYTES - 1], seed)",
        replace="digest(key, KEY_BYTES, seed)",
        killers=(f"{_HASHES}::test_keys_of_any_length_have_the_hash_of_xxhash",),
    ),
    # Who gets a slot, and whose.
    Mutant(
        name="writers_of_the_dead_believed",
        why="What a dead process had begun to save is never saved.",
        file=_NATIVE,
        find="            return DECLINED;  // whoever writes it may be gone",
        replace="            continue;",
        killers=(_SAME,),
    ),
    Mutant(
        name="any_order_taken",
        why="Of a prefix its end is kept, and its beginning goes.",
        file=_NATIVE,
        find="        if (at && moment_of(wishes, at) > moment_of(wishes, at - 1)) return DECLINED;\n",
        replace="",
        killers=(_OLDER,),
    ),
    Mutant(
        name="held_evicted",
        why="A save evicts blocks of its own prompt.",
        file=_NATIVE,
        find="        else if (!is_among(held, num_held, slot))",
        replace="        else if (is_among(held, num_held, slot) < 2)",
        killers=(_SAME,),
    ),
    Mutant(
        name="paid_for_evicted",
        why="A tenant's block goes, and its share does not grow again.",
        file=_NATIVE,
        find="        else if (index->payers[slot])\n            return found;\n",
        replace="",
        killers=(_SAME,),
    ),
    Mutant(
        name="younger_evicted",
        why="A block that is to be kept goes for one that is older.",
        file=_NATIVE,
        find="        if (oldest->low >= times[found]) return found;\n",
        replace="",
        killers=(_OLDER,),
    ),
    Mutant(
        name="oldest_of_some_group",
        why="Blocks that were just used go, because their group was looked at.",
        file=_NATIVE,
        find="if (!num_near || oldest->low > limit) {",
        replace="if (!num_near || oldest->low == NEVER) {",
        killers=(_SAME,),
    ),
    Mutant(
        name="touched_one_taken",
        why="A slot is taken from whoever is writing it, because it was touched.",
        file=_NATIVE,
        find="if (index->states[slot] != COMMITTED)",
        replace="if (index->states[slot] == FREE)",
        killers=(_TOUCHED,),
    ),
    Mutant(
        name="comes_near_all_groups",
        why="A stack is written over where the oldest lie in many places.",
        file=_NATIVE,
        find="|| num_near == MOST_NEAR) return found;",
        replace=") return found;",
        killers=(_FAR,),
    ),
    Mutant(
        name="given_up_too_soon",
        why="Each save of a full slab takes the long way.",
        file=_NATIVE,
        find="MOST_NEAR = 32",
        replace="MOST_NEAR = 2",
        killers=(_COMMON,),
    ),
    Mutant(
        name="tenants_ignored",
        why="A tenant takes more than its share.",
        file=_RESERVING,
        find="            or self._places is not None\n",
        replace="",
        killers=(_SAME,),
    ),
    Mutant(
        name="no_slack",
        why="A save finds no room, because another process is a moment ahead.",
        file=_RESERVING,
        find="None, latest, _RACE_NS)",
        replace="None, latest, 0)",
        killers=(_SOON,),
    ),
    # What is written, and in which order.
    Mutant(
        name="key_before_chain",
        why="A block stays in the chain of a key that it no longer has, and hides others.",
        file=_NATIVE,
        find="    for (size_t at = 0; at < count; at++) unlink_slot(index, slots[at]);",
        replace="    for (size_t at = 0; at < count; at++) {\n        index->records[slots[at]].hash = 0;\n        unlink_slot(index, slots[at]);\n    }",
        killers=(_DEATH,),
    ),
    Mutant(
        name="natively_unjournaled",
        why="Nobody knows what a dead process had begun.",
        file=_NATIVE,
        find="    PUT(index->words[JOURNAL], (int64_t)count);",
        replace="    PUT(index->words[JOURNAL], 0);",
        killers=(_DEATH,),
    ),
    Mutant(
        name="natively_half_shown",
        why="Half of a lease is visible after a death.",
        file=_NATIVE,
        find="    PUT(index->words[PUBLISHING], (int64_t)generation);\n",
        replace="",
        killers=(_DEATH,),
    ),
    Mutant(
        name="natively_untold_of_the_change",
        why="A reader believes what it saw amid a change.",
        file=_NATIVE,
        find="    PUT(index->words[VERSION], index->words[VERSION] | 1);\n    atomic",
        replace="    atomic",
        killers=(_DEATH,),
    ),
    Mutant(
        name="single_blocks_untold",
        why="Blocks that are saved never leave the slab.",
        file=_NATIVE,
        find="    tell(index, STORED, slots, count);\n",
        replace="",
        killers=(_SAME,),
    ),
    Mutant(
        name="evicted_alone_not_remembered",
        why="R-71: each miss of what was evicted was never offered.",
        file=_NATIVE,
        find="        PUT(fates->checks[hash & fates->mask], hash ^ fates->value);\n",
        replace="",
        killers=(_KNOWN,),
    ),
    Mutant(
        name="bound_not_lowered",
        why="A block that is the oldest is not found, and never goes.",
        file=_NATIVE,
        find="        lower(index, slots[at] / GROUP, moments[at]);\n",
        replace="        lower(index, slots[at] / GROUP, NEVER);\n",
        killers=(_SAME,),
    ),
    Mutant(
        name="given_away_and_shown",
        why="S4-31: a lease shows what another one is writing.",
        file=_NATIVE,
        find="record->generation != generation || ",
        replace="",
        killers=(_LOST,),
    ),
    Mutant(
        name="another_ones_shown",
        why="S4-31: a process shows what another one is writing.",
        file=_NATIVE,
        find="record->generation != generation || record->owner != owner",
        replace="record->generation != generation || (record->owner != owner && !count)",
        killers=(_LOST,),
    ),
)
