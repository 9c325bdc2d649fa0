# SPDX-License-Identifier: Apache-2.0
"""Host slots and coalesced copies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.plan import CopyBatch, HostSlots

_Copy = tuple[int, int, int]
"""Source address, target address, bytes."""

# Small steps make neighbours, on one side or on both, likely.
copies = st.lists(
    st.tuples(st.sampled_from([0, 0, 8]), st.sampled_from([0, 0, 8]), st.integers(1, 4))
)


def follow(gaps: list[_Copy]) -> list[_Copy]:
    """Turn gaps behind the copy before, on both sides, into addresses."""
    placed: list[_Copy] = []
    source = target = 100
    for source_gap, target_gap, nbytes in gaps:
        placed.append((source + source_gap, target + target_gap, nbytes))
        source, target = source + source_gap + nbytes, target + target_gap + nbytes
    return placed


def naive_merge(copies: list[_Copy]) -> list[_Copy]:
    """Merge neighbours one pair at a time."""
    merged: list[_Copy] = []
    for source, target, nbytes in copies:
        if merged:
            before, at, size = merged[-1]
            if (source, target) == (before + size, at + size):
                merged[-1] = (before, at, size + nbytes)
                continue
        merged.append((source, target, nbytes))
    return merged


def coalesce(copies: list[_Copy]) -> list[_Copy]:
    """Coalesce copies."""
    columns = np.array(copies, dtype=np.int64).reshape(-1, 3).T
    batch = CopyBatch.coalesce(*columns)
    assert len(batch) == len(batch.sources) == len(batch.targets)
    return list(
        zip(
            batch.sources.tolist(),
            batch.targets.tolist(),
            batch.nbytes.tolist(),
            strict=True,
        )
    )


class TestCopyBatch:
    """Copies that continue each other on both sides."""

    @given(copies)
    def test_copies_are_those_of_a_naive_merge(self, gaps: list[_Copy]) -> None:
        """S2-03: exactly the neighbours of both sides are merged, in order."""
        placed = follow(gaps)
        assert naive_merge(placed) == coalesce(placed)

    def test_neighbours_on_both_sides_make_one_copy(self) -> None:
        """S2-03: what is contiguous in source and target is one copy, of any sizes."""
        assert [(70, 30, 9)] == coalesce([(70, 30, 2), (72, 32, 3), (75, 35, 4)])

    def test_neighbours_on_one_side_stay_apart(self) -> None:
        """S2-03: copies that are contiguous in the source only are not merged."""
        apart = [(70, 30, 2), (72, 40, 2)]
        assert apart == coalesce(apart)

    def test_copies_that_run_backwards_stay_apart(self) -> None:
        """A merged copy goes upwards on both sides."""
        backwards = [(72, 32, 2), (70, 30, 2)]
        assert backwards == coalesce(backwards)

    def test_nothing_makes_no_copy(self) -> None:
        """An empty span is an empty batch."""
        assert [] == coalesce([])

    def test_columns_of_different_length_are_a_bug_of_the_caller(self) -> None:
        """A target too few raises with all three numbers."""
        two, one = np.array([1, 2]), np.array([1])
        with pytest.raises(ValueError, match="2 sources, 1 targets, 2 sizes"):
            CopyBatch.coalesce(two, one, two)


class TestHostSlots:
    """The host memory of a span."""

    def test_a_block_is_the_payload_of_its_slot(self) -> None:
        """Position *i* is the start of row ``slots[i]``, as a view that can be written."""
        pool = np.arange(40, dtype=np.uint8).reshape(4, 10)
        slots = HostSlots(pool, np.array([3, 1]), 8)
        assert 2 == len(slots)
        assert list(range(30, 38)) == slots.block(0).tolist()
        slots.block(1)[:] = 0
        assert [0] * 8 + [18, 19] == pool[1].tolist()
