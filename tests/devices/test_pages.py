# SPDX-License-Identifier: Apache-2.0
"""Which bytes of an accelerator's copy go where."""

import numpy as np

from ucm.blocks import RowId
from ucm.devices._paged import PagedCopy, Part
from ucm.devices._pages import Pages
from ucm.devices.driver import Direction
from ucm.plan import HostSlots


def test_span_of_many_pages_is_copied_whole():
    """Addresses are computed for some hundred pages at a time, and none is left out."""
    rows = tuple(RowId(row) for row in range(32))
    pages = Pages.of([Part(row, 1_000_000 * row, 64, 16, 16 * row) for row in rows])
    slots = HostSlots(np.zeros((64, 512), np.uint8), np.arange(50)[::-1], 512)
    copy = PagedCopy(pages, rows, True, np.arange(50) * 2, slots)
    batch = pages.batch(copy, Direction.TO_DEVICE)
    first = slots.pool.ctypes.data
    expected = {
        (first + (49 - at) * 512 + 16 * row, 1_000_000 * row + at * 128, 16)
        for at in range(50)
        for row in rows
    }
    columns = (batch.sources, batch.targets, batch.nbytes)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert 50 * 32 == len(found)
    assert expected == set(found)
