# SPDX-License-Identifier: Apache-2.0
"""Which bytes of an accelerator's copy go where."""

import numpy as np
import pytest

from tests.native_kit import way  # noqa: F401  a fixture
from ucm.blocks import RowId
from ucm.devices._paged import PagedCopy, Part
from ucm.devices._pages import Pages
from ucm.devices.driver import Direction
from ucm.plan import CopyBatch, HostSlots

ROWS = tuple(RowId(row) for row in range(32))


pytestmark = pytest.mark.usefixtures("way")
"""Compute addresses by native code, and by numpy."""


def listed(batch: CopyBatch) -> list[tuple[int, int, int]]:
    """Return the copies of a batch."""
    columns = (batch.sources, batch.targets, batch.nbytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("direction", Direction)
def test_span_of_many_pages_is_copied_whole(direction):
    """Addresses are computed for some hundred pages at a time, and none is left out."""
    pages = Pages.of([Part(row, 1_000_000 * row, 64, 16, 16 * row) for row in ROWS])
    slots = HostSlots(np.zeros((64, 512), np.uint8), np.arange(50)[::-1], 512)
    copy = PagedCopy(pages, ROWS, True, np.arange(50) * 2, slots)
    first = slots.pool.ctypes.data
    expected = {
        (first + (49 - at) * 512 + 16 * row, 1_000_000 * row + at * 128, 16)
        for at in range(50)
        for row in ROWS
    }
    if direction is Direction.TO_HOST:
        expected = {(page, slot, nbytes) for slot, page, nbytes in expected}
    found = listed(pages.batch(copy, direction))
    assert 50 * 32 == len(found)
    assert expected == set(found)


def test_rows_of_a_part_of_a_span_are_copied_and_no_others():
    """A layer's rows have an offset of their own in a slot, whichever are asked for."""
    pages = Pages.of([Part(row, 1_000 * row, 64, 16, 16 * row) for row in ROWS])
    slots = HostSlots(np.zeros((4, 640), np.uint8), np.array([3, 1]), 512)
    copy = PagedCopy(pages, ROWS[5:20:7], False, np.array([2, 0]), slots)
    first = slots.pool.ctypes.data
    expected = [
        (1_000 * row + block * 64, first + slot * 640 + 16 * row, 16)
        for block, slot in ((2, 3), (0, 1))
        for row in (5, 12, 19)
    ]
    assert expected == listed(pages.batch(copy, Direction.TO_HOST))


def test_neighbours_on_both_sides_are_one_copy():
    """Where all layers of a block lie side by side a block is one copy, and blocks that
    follow each other in pool and slots are one; on one side alone they are two."""
    pages = Pages.of([Part(row, 16 * row, 512, 16, 16 * row) for row in ROWS])
    slots = HostSlots(np.zeros((8, 512), np.uint8), np.array([4, 5, 6, 1]), 512)
    copy = PagedCopy(pages, ROWS, True, np.array([7, 8, 3, 4]), slots)
    first = slots.pool.ctypes.data
    places = [(7, 4, 2), (3, 6, 1), (4, 1, 1)]
    expected = [(512 * a, first + 512 * b, 512 * count) for a, b, count in places]
    assert expected == listed(pages.batch(copy, Direction.TO_HOST))
