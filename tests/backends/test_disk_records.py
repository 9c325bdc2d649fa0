# SPDX-License-Identifier: Apache-2.0
"""What is written down of one extent, and when it counts."""

import itertools
import os

import pytest

from tests.backends.disk_kit import reserve
from ucm.backends.disk._index import Record
from ucm.backends.disk._slots import Slots
from ucm.backends.disk._stamp import PAGE, Geometry, Mark
from ucm.testing.store_blocks import make_keys

KEYS = make_keys(4)
GEOMETRY = Geometry.fit(4 * 7 * PAGE, 7 * PAGE)


class TestRecord:
    def test_extent_that_is_written_to_is_not_written_down(self):
        """Nor is one of which the drive has no mark yet: what is there is not what is known."""
        slots = Slots(GEOMETRY, 1, itertools.count(1).__next__)
        slot = reserve(slots, KEYS[0], PAGE)
        assert slots.next_changed(0) is None
        slots.commit(slot)
        assert slots.next_changed(1) is None
        assert slots.next_changed(0) is slot.extent
        assert slots.entries(slot.extent) is None
        slot.extent.is_marked = True
        assert [(slot.used, 0, PAGE, KEYS[0])] == slots.entries(slot.extent)
        slots.use(slot)
        assert slots.next_changed(0) is None

    @pytest.mark.parametrize(
        "entries",
        [
            [(1, 6, PAGE, KEYS[0])],
            [(1, 0, 2 * PAGE, KEYS[0])],
            [(1, 0, PAGE, KEYS[0]), (2, 0, PAGE, KEYS[1])],
        ],
        ids=["no such slot", "too long", "twice"],
    )
    def test_record_that_does_not_fit_its_extent_is_none(self, entries):
        """A start never fails because of what is written down: the extent is looked through."""
        mark = Mark(7, 1)
        assert Record(mark, 3, [(1, 0, PAGE, KEYS[0])]).is_of(mark, GEOMETRY)
        assert not Record(mark, 3, [(1, 0, PAGE, KEYS[0])]).is_of(Mark(8, 1), GEOMETRY)
        assert not Record(mark, 3, entries).is_of(mark, GEOMETRY)

    def test_record_comes_back(self, tmp_path):
        """Entries of keys of any length, and none at all."""
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        mark = Mark((1 << 64) - 1, 3)
        for entries in ([], [(9, 0, 5, b"k"), ((1 << 63) + 1, 7, 1 << 33, b"x" * 96)]):
            os.pwrite(fd, Record(mark, 77, entries).encode(4), 100)
            assert Record(mark, 77, entries) == Record.read(fd, 100, 4, 77)
            assert Record.read(fd, 100, 4, 78) is None
            assert Record.read(fd, 100, 5, 77) is None
        os.close(fd)
