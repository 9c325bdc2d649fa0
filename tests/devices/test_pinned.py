# SPDX-License-Identifier: Apache-2.0
"""Which memory is pinned, in which pieces."""

import numpy as np
import pytest

from ucm.devices._pinned import PinnedMemory
from ucm.devices.driver import Direction
from ucm.plan import CopyBatch, HostSlots

POOL = np.zeros((12, 64), np.uint8)
START = POOL.ctypes.data
PIECES = PinnedMemory({START: 4 * 64, START + 4 * 64: 64, START + 8 * 64: 2 * 64})


def slots_of(*slots: int, block_bytes: int = 64) -> HostSlots:
    """Return slots of the pool."""
    return HostSlots(POOL, np.array(slots), block_bytes)


def cut(
    direction: Direction, host: list[int], nbytes: list[int], slots: HostSlots
) -> list[tuple[int, int]]:
    """Cut copies between the pool and pages that lie a gigabyte behind; tell them."""
    inside = np.array(host) * 64 + START
    pages, sizes = inside + (1 << 30), np.array(nbytes) * 64
    to_host = direction is Direction.TO_HOST
    sides = (pages, inside) if to_host else (inside, pages)
    made = PIECES.cut(CopyBatch(*sides, sizes), slots, direction)
    ours, theirs = (made.targets, made.sources)[:: 1 if to_host else -1]
    assert (theirs - ours == 1 << 30).all()
    return [
        (int(at), int(size))
        for at, size in zip((ours - START) // 64, made.nbytes // 64, strict=True)
    ]


@pytest.mark.parametrize(
    ("slots", "is_pinned"),
    [((0,), True), ((3, 4), True), ((5,), False), ((4, 8), False), ((9, 8), True)],
)
def test_slots_are_pinned_where_pieces_meet(
    slots: tuple[int, ...], is_pinned: bool
) -> None:
    """S2-04: pieces that touch are one memory; a gap between two is nobody's."""
    assert is_pinned is PIECES.holds(slots_of(*slots))


def test_end_of_the_last_slot_counts() -> None:
    """A block that is shorter than its slot ends before it."""
    memory = PinnedMemory({START: 3 * 64 + 40})
    assert memory.holds(slots_of(3, block_bytes=40))
    assert not memory.holds(slots_of(3, block_bytes=41))


@pytest.mark.parametrize("direction", Direction)
def test_no_copy_is_of_two_pieces(direction: Direction) -> None:
    """S2-04: neighbours that were merged across a seam are parted there, and no others."""
    copies = [2, 8], [3, 2]
    assert [(2, 2), (4, 1), (8, 2)] == cut(direction, *copies, slots_of(2, 3, 4, 8, 9))
    parts = [(0, 1), (3, 1), (4, 1), (5, 3), (8, 2), (10, 2)]
    assert parts == cut(direction, [0, 3], [1, 9], slots_of(0, *range(3, 12)))


def test_copies_within_a_piece_stay_as_they_are() -> None:
    """Where no slot ends at a seam nothing is looked at."""
    assert [(0, 2)] == cut(Direction.TO_HOST, [0], [2], slots_of(0, 1))
    batch = CopyBatch(np.array([1]), np.array([2]), np.array([3]))
    assert batch is PinnedMemory({}).cut(batch, slots_of(3), Direction.TO_HOST)
    assert batch is PIECES.cut(batch, slots_of(0, 9), Direction.TO_HOST)
