# SPDX-License-Identifier: Apache-2.0
"""
One slot, without numpy: a block that is saved or loaded alone.

What is written, and in which order, is the same as for many. Where there is more to
decide than which slot, these functions decline, and the way for many is taken.
"""

import struct
from typing import TYPE_CHECKING

import numpy as np

from ucm.stores.slab._chains import NO_SLOT, KeyBatch
from ucm.stores.slab._changes import REMOVED, STORED
from ucm.stores.slab._layout import (
    COMMITTED,
    FREE,
    GROUP,
    NEVER,
    RECORD,
    RESERVED,
    Grant,
    Sighting,
    Word,
)
from ucm.uses import Uses

if TYPE_CHECKING:
    from ucm.stores.slab._index import SlotIndex

__all__ = ["holds_one", "publish_one", "reserve_one"]

_RECORD = struct.Struct("=4xIQQQQ88s")
_OURS = struct.Struct("=4xIQ")
_WORD = struct.Struct("=Q")
_GENERATION_AT = struct.calcsize("=4xI")
_CHECKSUM_AT = struct.calcsize("=4xIQQ")
_GENERATION = int(Word.GENERATION)
_PUBLISHING = int(Word.PUBLISHING)
_NUM_EVICTED = int(Word.NUM_EVICTED)
_FIRST = np.zeros(1, dtype=np.int64)


def reserve_one(
    index: "SlotIndex", batch: KeyBatch, nbytes: int, owner: int, uses: Uses | None
) -> Grant | None:
    """
    Take a slot for the one key of *batch*; locked.

    Returns:
        What was granted; None if the key is in a slot, is to be retained or paid for, or
        if no slot is easily had.
    """
    moment = index.moment_of(uses)
    if moment is None:
        return None
    found, chains = int(batch.hashes[0]), index.chains
    if chains.find_field(batch.fields, found) != NO_SLOT:
        return None
    slot = index.tally.find_free_one()
    evicts = slot == NO_SLOT
    if evicts:
        slot = index.oldest.pick_one(moment)
        if slot == NO_SLOT or index.payers[slot]:
            return None
    index.words[_GENERATION] += 1
    generation = index.words[_GENERATION]
    index.begin_one(slot)
    if evicts:
        index.part_with_one(slot)
        index.changes.add_one(REMOVED, slot)
        index.states[slot] = FREE
        index.stamps[slot] = NEVER
        chains.unlink_one(slot)
        index.words[_NUM_EVICTED] += 1
    _RECORD.pack_into(
        *(index.record_bytes, slot * RECORD.itemsize),
        *(owner, generation, nbytes, 0, found, batch.fields),
    )
    index.payers[slot] = 0
    index.states[slot] = RESERVED
    chains.link_one(slot)
    index.end_one(slot)
    slots, moments = np.array([slot]), np.array([moment])
    return Grant(_FIRST, slots, generation, 0, moments)


def publish_one(index: "SlotIndex", grant: Grant, checksum: int, owner: int) -> bool:
    """Make the one slot of *grant* visible; return whether it was ours, locked."""
    slot, moment = int(grant.slots[0]), int(grant.moments[0])
    at = slot * RECORD.itemsize
    ours = _OURS.unpack_from(index.record_bytes, at) == (owner, grant.generation)
    if not ours or index.states[slot] != RESERVED:
        return False
    index.begin_one(slot)
    _WORD.pack_into(index.record_bytes, at + _CHECKSUM_AT, checksum)
    index.oldest.lower_one(slot // GROUP, moment)
    index.stamps[slot] = moment
    index.words[_PUBLISHING] = grant.generation
    index.states[slot] = COMMITTED
    index.words[_PUBLISHING] = 0
    index.own.outdate(grant.slots, grant.moments)
    index.changes.add_one(STORED, slot)
    index.end_one(slot)
    return True


def holds_one(index: "SlotIndex", seen: Sighting) -> bool:
    """Return whether a slot still holds what it held when it was seen."""
    slot = int(seen.slots[0])
    at = slot * RECORD.itemsize + _GENERATION_AT
    (generation,) = _WORD.unpack_from(index.record_bytes, at)
    return index.states[slot] == COMMITTED and generation == int(seen.generations[0])
