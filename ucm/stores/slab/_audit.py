# SPDX-License-Identifier: Apache-2.0
"""Whether an index agrees with itself. For tests and for people; changes nothing."""

import numpy as np

from ucm.stores.slab._chains import KeyBatch, unpack_key
from ucm.stores.slab._index import SlotIndex
from ucm.stores.slab._layout import GROUP, NUM_TENANTS, SlotState, Word, is_used

__all__ = ["audit"]

_COUNTED = (SlotState.FREE, SlotState.RESERVED, SlotState.COMMITTED)


def audit(index: SlotIndex) -> list[str]:
    """Return what is wrong with *index*, one sentence each."""
    with index.locked():
        return [
            problem
            for problem in (
                *_check_counts(index),
                *_check_groups(index),
                *_check_shares(index),
                *_check_keys(index),
            )
            if problem
        ]


def _check_counts(index: SlotIndex) -> list[str]:
    counted = np.bincount(index.state, minlength=len(SlotState))
    words = (Word.NUM_FREE, Word.NUM_RESERVED, Word.NUM_COMMITTED)
    return [
        f"{word.name} is {index.header[word]}, counted are {counted[state]}"
        for state, word in zip(_COUNTED, words, strict=True)
        if index.header[word] != counted[state]
    ]


def _check_groups(index: SlotIndex) -> list[str]:
    num_slots = index.layout.num_slots
    found = []
    for group, start in enumerate(range(0, num_slots, GROUP)):
        counted = np.bincount(index.state[start : start + GROUP], minlength=4)
        if index.tally.counts[:, group].tolist() != counted[list(_COUNTED)].tolist():
            found.append(f"of group {group} are counted {index.tally.counts[:, group]}")
        if index.oldest.bound_of(group) > index.stamps[start : start + GROUP].min():
            found.append(f"group {group} has a stamp below its bound")
    return found


def _check_shares(index: SlotIndex) -> list[str]:
    used = np.flatnonzero(is_used(index.state))
    counted = np.bincount(index.payers[used], minlength=NUM_TENANTS)
    counted[0] = 0
    wrong = np.flatnonzero(counted != index.shares)
    return [
        f"tenant {place} has {counted[place]} slots, counted are {index.shares[place]}"
        for place in wrong[:3].tolist()
    ]


def _check_keys(index: SlotIndex) -> list[str]:
    used = np.flatnonzero(is_used(index.state))
    keys = [unpack_key(index.chains.words[slot]) for slot in used]
    problems = [] if len(set(keys)) == len(keys) else ["a key has two slots"]
    batch = KeyBatch.of(keys, index.seed)
    if not np.array_equal(batch.hashes, index.chains.hashes[used]):
        problems.append("a record's hash is not the hash of its key")
    if not np.array_equal(index.chains.find(batch), used):
        problems.append("a key is not found in its slot")
    linked = len(used)
    slot = index.chains.heads[index.chains.heads >= 0]
    length = 0
    while len(slot) and length <= linked:
        length += len(slot)
        slot = index.chains.nexts[slot]
        slot = slot[slot >= 0]
    if length != linked:
        problems.append(f"{length} slots are linked, {linked} are used")
    return problems
