# SPDX-License-Identifier: Apache-2.0
"""Host slots and coalesced copy runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.plan import CopyRun, HostSlots, TransferPlan

# Small steps make neighbours, on one side or on both, likely.
steps = st.lists(st.tuples(st.sampled_from([1, 1, -1, 3]), st.sampled_from([1, 1, 2])))


def naive_runs(pairs: list[tuple[int, int]]) -> list[CopyRun]:
    """Merge neighbours one pair at a time."""
    runs: list[CopyRun] = []
    for block_id, slot in pairs:
        if runs:
            last = runs[-1]
            behind = (last.block_id + last.count, last.slot + last.count)
            if (block_id, slot) == behind:
                runs[-1] = CopyRun(last.block_id, last.slot, last.count + 1)
                continue
        runs.append(CopyRun(block_id, slot, 1))
    return runs


def coalesce(pairs: list[tuple[int, int]]) -> list[CopyRun]:
    """Coalesce (block, slot) pairs."""
    slots = np.array([slot for _, slot in pairs], dtype=np.int64)
    return list(TransferPlan.coalesce([block for block, _ in pairs], slots).runs)


class TestTransferPlan:
    """Runs of blocks that are neighbours on both sides."""

    @given(steps)
    def test_runs_are_those_of_a_naive_merge(
        self, moves: list[tuple[int, int]]
    ) -> None:
        """S2-03: exactly the neighbours of both sides are merged, in span order."""
        pairs = [(100, 50)]
        for block_step, slot_step in moves:
            pairs.append((pairs[-1][0] + block_step, pairs[-1][1] + slot_step))
        assert naive_runs(pairs) == coalesce(pairs)

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    def test_runs_cover_every_pair_once_in_order(
        self, pairs: list[tuple[int, int]]
    ) -> None:
        """Unrolling the runs gives back the span."""
        unrolled = [
            (run.block_id + at, run.slot + at)
            for run in coalesce(pairs)
            for at in range(run.count)
        ]
        assert pairs == unrolled

    def test_neighbours_on_both_sides_make_one_run(self) -> None:
        """S2-03: a span that is contiguous in source and target is one copy."""
        assert [CopyRun(7, 3, 4)] == coalesce([(7, 3), (8, 4), (9, 5), (10, 6)])

    def test_neighbours_on_one_side_stay_apart(self) -> None:
        """S2-03: blocks that are contiguous in the source only are not merged."""
        assert [CopyRun(7, 3, 1), CopyRun(8, 5, 1)] == coalesce([(7, 3), (8, 5)])

    def test_blocks_that_run_backwards_stay_apart(self) -> None:
        """A run goes upwards on both sides."""
        assert [CopyRun(8, 4, 1), CopyRun(7, 3, 1)] == coalesce([(8, 4), (7, 3)])

    def test_nothing_makes_no_run(self) -> None:
        """An empty span is an empty plan."""
        assert [] == coalesce([])

    def test_runs_hold_plain_integers(self) -> None:
        """Runs may be encoded and compared outside numpy."""
        (run,) = coalesce([(7, 3)])
        assert [int] * 3 == [type(run.block_id), type(run.slot), type(run.count)]

    def test_a_slot_too_few_is_a_bug_of_the_caller(self) -> None:
        """Blocks and slots of different number raise with both numbers."""
        with pytest.raises(ValueError, match="2 blocks for 1 slots"):
            TransferPlan.coalesce([1, 2], np.array([0]))


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
