# SPDX-License-Identifier: Apache-2.0
"""The index of a disk: conserved whatever is done, and fair between sizes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.disk_kit import reserve
from ucm.backends.disk._slots import Slots
from ucm.backends.disk._stamp import PAGE, Geometry
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(40)
GEOMETRY = Geometry.fit(6 * 7 * PAGE, 7 * PAGE)
"""Six extents: three slots of a page each, two of two, or one of three."""
ENDS = "commit", "abort", "refused", "wiped", "unclear"
"""Of a write."""


def make_slots():
    """Return an index of six extents."""
    return Slots(GEOMETRY, 1, itertools.count(1).__next__)


def put(slots, key, pages=1):
    """Write a block; return its slot."""
    slot = reserve(slots, key, pages * PAGE)
    slots.commit(slot)
    return slot


def drive_of(slot):
    """Return the drive that a slot is on."""
    return slot.extent.drive


def remove(slots, slot, how):
    """Remove a block, or restore it, or have its drive refuse that."""
    slots.hold(slot)
    slots.remove(slot)
    if how == "restore":
        slots.restore(slot)
        slots.let_go(slot)
    else:
        slots.clear(slot, is_wiped=how == "delete")


def end_writing(slots, slot, how):
    """Have a write end in one of five ways."""
    if how == "commit":
        slots.commit(slot)
    elif how in ("wiped", "unclear"):
        slots.clear(slot, is_wiped=how == "wiped")
    else:
        slots.abort(slot, is_refused=how == "refused")


def unclear_of(slots):
    """Return what holds who knows what."""
    return [slot for extent in slots.extents for slot in extent.unclear]


def admit(slots, number):
    """Have a drive write again, which wipes each second slot."""
    for at, slot in enumerate(unclear_of(slots)):
        slots.hold(slot)
        slots.clear(slot, is_wiped=(at + number) % 2 > 0)
    slots.refusing.clear()


def check(slots, held):
    """Make sure that every slot has one owner, and that no two overlap."""
    blocks = list(slots._blocks.values())
    free = [slot for one in slots._classes.values() for slot in one.free]
    listed = [slot for one in slots._classes.values() for slot in one.blocks.values()]
    assert {id(slot) for slot in blocks} == {id(slot) for slot in listed}
    extents = [extent for each in slots._extents for extent in each.values()]
    unclear = unclear_of(slots)
    by_key = slots.unclear._of_key
    assert {key for slot in unclear for key in slot.keys} == by_key.keys()
    for key, some in by_key.items():
        assert {id(slot) for slot in unclear if key in slot.keys} == set(map(id, some))
    known = {id(slot) for slot in (*blocks, *unclear)}
    owned = [*blocks, *free, *unclear, *(one for one in held if id(one) not in known)]
    assert len(owned) == len({id(slot) for slot in owned})
    everything = [slot for one in extents for slot in one.slots]
    assert {id(slot) for slot in owned} == {id(slot) for slot in everything}
    for extent in extents:
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
                        *ENDS,
                        "admit",
                        "hold",
                        "let_go",
                        "delete",
                        "restore",
                        "keep",
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
                new = reserve(slots, key, pages * PAGE)
                writing += [new] if new else []
            elif word == "hold" and slot is not None:
                slots.use(slot)
                slots.hold(slot)
                reading.append(slot)
            elif word in ("delete", "restore", "keep") and slot is not None:
                remove(slots, slot, word)
            elif word == "let_go" and reading:
                slots.let_go(reading.pop(0))
            elif word == "admit":
                admit(slots, number)
            elif writing and word in ENDS:
                end_writing(slots, writing.pop(0), word)
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
        assert None is reserve(slots, KEYS[20], PAGE)
        assert None is reserve(slots, KEYS[20], 2 * PAGE)
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

    def test_drive_that_refuses_gives_no_room_of_any_size(self):
        """Neither free slots of it, nor its blocks or extents go; those of other drives do."""
        slots = Slots(GEOMETRY, 2, itertools.count(1).__next__)
        for key in KEYS[:35]:
            put(slots, key)
        slots.refusing.add(0)
        kept = {
            key: slot
            for key in KEYS
            if (slot := slots.find(key)) and not drive_of(slot)
        }
        new = make_keys(60, first=50)
        taken = [put(slots, key, pages=1 + at % 3) for at, key in enumerate(new)]
        assert {1} == {drive_of(slot) for slot in taken}
        assert kept == {key: slots.find(key) for key in kept}
        slots.refusing.add(1)
        assert None is reserve(slots, KEYS[39], PAGE)
        slots.refusing.discard(0)
        assert 0 == drive_of(put(slots, KEYS[39]))

    def test_write_that_was_not_begun_brings_the_old_block_back(self):
        """Its bytes are still there, and so is it."""
        slots = make_slots()
        for key in KEYS[:18]:
            put(slots, key)
        slot = reserve(slots, KEYS[20], PAGE)
        assert None is slots.find(KEYS[0])
        slots.abort(slot, is_refused=False)
        assert slot is slots.find(KEYS[0])
        assert 0 == slots.num_evicted
        slot = reserve(slots, KEYS[20], PAGE)
        slots.clear(slot, is_wiped=True)
        assert 17 == len(slots)
