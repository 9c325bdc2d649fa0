# SPDX-License-Identifier: Apache-2.0
"""How memory is cut for several sizes of slots, and which class may have which extent."""

import numpy as np
import pytest

from ucm.errors import ConfigError
from ucm.stores.slab._extents import (
    NOBODY,
    UNUSED,
    WRITTEN,
    Geometry,
    Holding,
    choose_extent,
    place_extents,
)

MINUTE = 60 * 10**9
A, B, C = 4096, 8192, 12288


class TestGeometry:
    @pytest.mark.parametrize("capacity", [4096, 100_000, 64 << 20, 4 << 30, 1 << 40])
    @pytest.mark.parametrize("block", [1, 4096, 65_536, 100_000, 2 << 20, 7 << 20])
    def test_class_that_makes_a_slab_gets_all_that_the_capacity_holds(
        self, capacity, block
    ):
        """R-31: extents cost the first model no slot."""
        slot = -(-block // 4096) * 4096
        if capacity < slot:
            with pytest.raises(ConfigError, match="0 slots"):
                Geometry.fit(capacity, block)
            return
        geometry = Geometry.fit(capacity, block)
        assert slot == geometry.slot_bytes
        assert capacity // slot == geometry.num_slots
        assert geometry == geometry.of_class(block)
        assert 0 == geometry.extent_bytes % slot
        assert geometry.extent_bytes <= max(slot, min(64 << 20, capacity // 16))

    @pytest.mark.parametrize(
        "made_for", [16_384, 40_960, 1 << 20, 2 << 20, 28 * 65_536]
    )
    @pytest.mark.parametrize(
        "block", [5_000, 49_152, 131_072, 300_000, 1 << 20, 3 << 20]
    )
    def test_another_class_wastes_little(self, made_for, block):
        """R-31: slots divide the extent, hold a block, and are at most half as large
        again."""
        geometry = Geometry.fit(16 << 30, made_for)
        other = geometry.of_class(block)
        assert 0 == geometry.extent_bytes % other.slot_bytes
        assert 0 == other.slot_bytes % 4096
        assert block <= other.slot_bytes <= 1.5 * (block + 4096)
        assert geometry.num_extents == other.num_extents

    def test_slots_of_extents_are_all_slots_once(self):
        """R-31: also where the last extent is shorter, or too short for a slot."""
        for slot in (A, B, C):
            geometry = Geometry(5 * 24_576 + 8_192, 24_576, slot)
            slots = [geometry.slots_of(at) for at in range(6)]
            assert list(range(geometry.num_slots)) == np.concatenate(slots).tolist()
            assert (6 if slot < C else 5) == geometry.usable_extents
            assert 6 == geometry.num_extents

    def test_block_larger_than_an_extent_has_no_class(self):
        """R-31: such blocks need a slab that is cut for them."""
        assert Geometry(1 << 20, 65_536, 4096).of_class(65_537) is None

    @pytest.mark.parametrize("block", [0, -1, (1 << 33) + 1])
    def test_impossible_block_is_refused(self, block):
        """What is no size of a block is told."""
        with pytest.raises(ConfigError, match="at least one byte"):
            Geometry.fit(1 << 40, block)


def choose(owners, used, live, wanted=A, oldest=10 * MINUTE):
    """Ask for an extent; *used* in minutes, -1 where somebody writes."""
    named = {None: UNUSED, -1: WRITTEN}
    used_ns = [named[at] if at in named else int(at * MINUTE) for at in used]
    holding = Holding(np.array(owners), np.array(used_ns), frozenset(live))
    return choose_extent(wanted, oldest, holding)


class TestChoice:
    @pytest.mark.parametrize(
        ("owners", "used", "live", "chosen"),
        [
            # A class that nobody uses has no share: its oldest extent goes.
            ([B, B, A, A], [9, 8, 0, 0], [], 1),
            # One that is in use keeps its share, whatever its age ...
            ([B, B, A, A], [9, 9, 0, 0], [B], None),
            # ... unless all in an extent was idle for a minute longer than our oldest,
            ([B, B, A, A], [9, 8, 0, 0], [B], 1),
            ([B, B, A, A], [None, 9, 0, 0], [B], 0),
            # and gives of what it has beyond its share to who has less.
            ([B, B, B, A], [12, 11, 13, 0], [B], 1),
            ([B, B, B, B], [12, 13, 14, 11], [B], 3),
            # Three share in three.
            ([B, B, C, C, C, C], [20, 20, 15, 16, 17, 18], [B, C], 2),
            ([A, B, B, C, C, C], [0, 9.2, 9.2, 9.7, 9.8, 9.9], [B, C], 3),
            # Where somebody writes it is not for taking, whosever it is.
            ([B, B, A, A], [9, -1, 0, 0], [], 0),
            ([B, B, A, A], [-1, -1, 0, 0], [], None),
            # What nobody has is not for taking, nor is our own.
            ([NOBODY, A], [None, None], [], None),
        ],
    )
    def test_who_gives(self, owners, used, live, chosen):
        """R-31: classes in use share alike, those that are not give way, and beyond a
        share age decides."""
        assert chosen == choose(owners, used, live)

    def test_two_classes_with_too_little_room_do_not_take_turns(self):
        """R-31: at equal shares and ages nobody takes from the other."""
        owners = [A, A, B, B]
        assert choose(owners, [10] * 4, [A, B], A) is None
        assert choose(owners, [10] * 4, [A, B], B) is None


class TestPlaces:
    @pytest.mark.parametrize(
        ("used", "num_new", "places"),
        [
            ([1, 2, 3], 5, {0: 0, 1: 1, 2: 2}),
            ([1, UNUSED, 3], 3, {0: 0, 2: 2}),
            ([1, 2, 3], 2, {1: 1, 2: 0}),
            ([3, 2, 1], 2, {0: 0, 1: 1}),
            ([UNUSED, UNUSED, 1, 2], 2, {2: 0, 3: 1}),
            ([4, 1, 2, 3], 1, {0: 0}),
        ],
    )
    def test_what_was_used_last_stays(self, used, num_new, places):
        """R-31: and lies where it was, or where something goes or nothing is."""
        assert places == place_extents(np.array(used), num_new)
