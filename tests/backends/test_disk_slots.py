# SPDX-License-Identifier: Apache-2.0
"""The index of a disk: conserved whatever is done, and fair between sizes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.backends.disk._slots import Slots
from ucm.backends.disk._stamp import PAGE, Geometry
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(40)
GEOMETRY = Geometry.fit(6 * 7 * PAGE, 7 * PAGE)
"""Six extents: three slots of a page each, two of two, or one of three."""


def make_slots():
    """Return an index of six extents."""
    return Slots(GEOMETRY, 1, itertools.count(1).__next__)


def put(slots, key, pages=1):
    """Write a block; return its slot."""
    slot = slots.reserve(key, pages * PAGE)
    slots.commit(slot)
    return slot


def give_up_deleting(slots, slot):
    """Remove a block and restore it."""
    slots.hold(slot)
    slots.remove(slot)
    slots.restore(slot)
    slots.let_go(slot)


def check(slots, held):
    """Make sure that every slot has one owner, and that no two overlap."""
    blocks = list(slots._blocks.values())
    free = [slot for one in slots._classes.values() for slot in one.free]
    listed = [slot for one in slots._classes.values() for slot in one.blocks.values()]
    assert {id(slot) for slot in blocks} == {id(slot) for slot in listed}
    owned = [*blocks, *free, *(slot for slot in held if slot not in blocks)]
    assert len(owned) == len({id(slot) for slot in owned})
    everything = [slot for one in slots._extents.values() for slot in one.slots]
    assert {id(slot) for slot in owned} == {id(slot) for slot in everything}
    for extent in slots._extents.values():
        assert extent.num_held == sum(slot.num_holders > 0 for slot in extent.slots)
    for slot in blocks:
        assert slots.find(slot.key) is slot
        assert not slot.is_gone


class TestAnything:
    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(
                    [
                        "reserve",
                        "commit",
                        "abort",
                        "wiped",
                        "hold",
                        "let_go",
                        "delete",
                        "restore",
                    ]
                ),
                st.integers(0, 39),
                st.integers(1, 3),
            ),
            max_size=80,
        )
    )
    def test_slots_are_conserved(self, steps):
        """In any order of calls each slot is free, held or has a block, never two."""
        slots, writing, reading = make_slots(), [], []
        for word, number, pages in steps:
            key = KEYS[number]
            slot = slots.find(key)
            busy = {k for one in writing for k in (one.key, one.previous[0])}
            is_free = slot is None and key not in busy
            if word == "reserve" and is_free:
                new = slots.reserve(key, pages * PAGE)
                writing += [new] if new else []
            elif word == "hold" and slot is not None:
                slots.use(slot)
                slots.hold(slot)
                reading.append(slot)
            elif word == "delete" and slot is not None:
                slots.hold(slot)
                slots.remove(slot)
                slots.let_go(slot)
            elif word == "restore" and slot is not None:
                give_up_deleting(slots, slot)
            elif word == "let_go" and reading:
                slots.let_go(reading.pop(0))
            elif writing and word == "commit":
                slots.commit(writing.pop(0))
            elif writing and word in ("abort", "wiped"):
                slots.abort(writing.pop(0), is_wiped=word == "wiped")
            check(slots, [*writing, *{id(one): one for one in reading}.values()])


class TestRoom:
    def test_oldest_use_goes_first(self):
        """Of full slots the one is taken that was not used for longest."""
        slots = make_slots()
        for key in KEYS[:18]:
            put(slots, key)
        slots.use(slots.find(KEYS[0]))
        put(slots, KEYS[20])
        assert slots.find(KEYS[0])
        assert None is slots.find(KEYS[1])
        assert 1 == slots.num_evicted

    def test_held_block_stays(self):
        """What somebody reads is not written over, and the next one goes instead."""
        slots = make_slots()
        for key in KEYS[:18]:
            put(slots, key)
        slots.hold(slots.find(KEYS[0]))
        put(slots, KEYS[20])
        assert slots.find(KEYS[0])
        assert None is slots.find(KEYS[1])

    def test_nothing_is_taken_where_all_is_held(self):
        """There is no room then, and nothing is harmed."""
        slots = make_slots()
        for key in KEYS[:18]:
            slots.hold(put(slots, key))
        assert None is slots.reserve(KEYS[20], PAGE)
        assert None is slots.reserve(KEYS[20], 2 * PAGE)
        assert 18 == len(slots)

    def test_idle_extent_changes_its_size(self):
        """Another size takes the extent that was not used for longest, whole."""
        slots = make_slots()
        for key in KEYS[:18]:
            put(slots, key)
        serial = slots.find(KEYS[0]).extent.mark.serial
        slot = put(slots, KEYS[20], pages=2)
        assert [None] * 3 == [slots.find(key) for key in KEYS[:3]]
        assert all(slots.find(key) for key in KEYS[3:18])
        assert serial != slot.extent.mark.serial
        assert not slot.extent.is_marked

    def test_size_in_use_keeps_its_extents(self):
        """Blocks of one's own that are older go first."""
        slots = make_slots()
        put(slots, KEYS[20], pages=3)
        for key in KEYS[:15]:
            put(slots, key)
        put(slots, KEYS[21], pages=3)  # its extent is older than all others
        assert None is slots.find(KEYS[20])
        assert all(slots.find(key) for key in KEYS[:15])

    def test_write_that_was_not_begun_brings_the_old_block_back(self):
        """Its bytes are still there, and so is it."""
        slots = make_slots()
        for key in KEYS[:18]:
            put(slots, key)
        slot = slots.reserve(KEYS[20], PAGE)
        assert None is slots.find(KEYS[0])
        slots.abort(slot, is_wiped=False)
        assert slot is slots.find(KEYS[0])
        assert 0 == slots.num_evicted
        slot = slots.reserve(KEYS[20], PAGE)
        slots.abort(slot, is_wiped=True)
        assert 17 == len(slots)
