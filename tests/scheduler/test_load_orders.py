# SPDX-License-Identifier: Apache-2.0
"""Which blocks a hit loads, and by which tickets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.model import (
    DIGEST,
    HASHES,
    STATE,
    SetIndex,
    make_adapter,
    make_layout,
)
from ucm.blocks import KeyPacker, ShardId
from ucm.errors import LayoutError
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.requests import StepFacts


class TestLoadOrders:
    @pytest.mark.parametrize(
        ("tables", "hashes"), [(2, 4), (4, 2), (2, 2)], ids=["table", "hashes", "both"]
    )
    def test_hit_beyond_the_table_is_refused(
        self, adapter: SchedulerAdapter, tables: int, hashes: int
    ) -> None:
        """A hit that is longer than what is known of its blocks would be loaded in part."""
        with pytest.raises(LayoutError, match="a hit over 3 blocks of group 0"):
            adapter.blocks_allocated(
                "r",
                [range(1, tables + 1)],
                HASHES[:hashes],
                computed_tokens=0,
                external_tokens=12,
            )

    @settings(deadline=None)
    @given(data=st.data())
    def test_each_block_of_a_hit_is_ordered_once(self, data: st.DataObject) -> None:
        """A hit's tickets name what it needs of each group, in order, and not the null
        block; none is longer than four spans, and each is of neighbours."""
        layout = make_layout(
            (4, None), (8, data.draw(st.sampled_from([10, 40, STATE])))
        )
        computed = 8 * data.draw(st.integers(0, 5))
        total = computed + 8 * data.draw(st.integers(1, 10))
        holes = st.sampled_from([0, 1, 1, 1])
        tables = [
            [data.draw(holes) * (1000 * at + block) for block in range(1, 40)]
            for at in range(2)
        ]
        tables[0][total // 4 - 1] = 7  # a load into nothing is refused
        index = SetIndex()
        adapter = make_adapter(layout, index, span_blocks=3)
        adapter.blocks_allocated(
            "r",
            tables,
            HASHES,
            computed_tokens=computed,
            external_tokens=total - computed,
        )
        plan = adapter.plan_step(StepFacts())
        for at, group in enumerate(layout.groups):
            needed = [
                (tables[at][i], HASHES[layout.hash_index(group, i)])
                for i in group.window_blocks(total)
                if i >= computed // group.block_tokens and tables[at][i]
            ]
            orders = [each for each in plan.loads if each.group_id == at]
            ordered = [
                list(zip(o.block_ids, o.split_hashes(), strict=True)) for o in orders
            ]
            assert needed == [block for blocks in ordered for block in blocks]
            for blocks in ordered:
                assert len(blocks) <= 12
                first = tables[at].index(blocks[0][0])
                named = [block_id for block_id, _ in blocks]
                assert tables[at][first : first + len(blocks)] == named
            packer = KeyPacker(DIGEST, group.group_id, ShardId(0))
            assert set(packer.pack([each for _, each in needed])) <= set(index.touched)
        assert 1 == index.calls

    def test_loads_are_cut_as_the_limits_say(self):
        """A device that copies by itself has tickets of one size in either direction."""
        layout = make_layout((4, None))
        adapter = make_adapter(layout, SetIndex(), span_blocks=3, load_spans=1)
        adapter.blocks_allocated(
            "r", [range(1, 11)], HASHES, computed_tokens=0, external_tokens=40
        )
        plan = adapter.plan_step(StepFacts())
        assert [3, 3, 3, 1] == [len(order.block_ids) for order in plan.loads]
