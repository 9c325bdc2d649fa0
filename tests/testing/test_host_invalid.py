# SPDX-License-Identifier: Apache-2.0
"""What becomes of requests whose blocks were not loaded."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.model import STATE, make_layout
from ucm.layout import GroupLayout
from ucm.testing.host.invalid import (
    Affected,
    BlockUser,
    Cut,
    Recovery,
    affected_tokens,
    blocks_to_evict,
    first_invalid_index,
    recover,
)

ONE = make_layout((4, None)).groups
HYBRID = make_layout((4, None), (8, 10)).groups
TABLES = st.lists(st.integers(1, 30), unique=True, max_size=12)
SOME = st.frozensets(st.integers(1, 30))


def user(
    name: str, *tables: list[int], cached: int, computed: int | None = None
) -> BlockUser:
    """Return a request; by default the step has computed nothing yet."""
    return BlockUser(
        request_id=name,
        tables=tables,
        cached_tokens=cached,
        computed_tokens=cached if computed is None else computed,
    )


def first_group(*blocks: int) -> set[tuple[int, int]]:
    """Return names of blocks of the first group."""
    return {(0, block) for block in blocks}


class TestPureFunctions:
    @given(TABLES, SOME, st.randoms(use_true_random=False))
    def test_first_invalid_index_is_the_lowest_one(
        self, table: list[int], invalid: frozenset[int], dice: random.Random
    ) -> None:
        """S4-18, S4-22: every block before it is valid, in whatever order the invalid
        ones are told."""
        shuffled = dice.sample(sorted(invalid), len(invalid))
        index = first_invalid_index(table, shuffled)
        before = table if index is None else table[:index]
        assert not invalid.intersection(before)
        assert index is None or table[index] in invalid

    @given(st.integers(0, 100), st.integers(0, 100))
    def test_affected_tokens_are_never_negative(self, had: int, keeps: int) -> None:
        """S4-19, S4-22: what is lost and kept adds up, and a contradiction is told."""
        found = affected_tokens(had, keeps, is_strict=False)
        assert found.tokens >= 0
        assert found.excess >= 0
        assert had - keeps == found.tokens - found.excess
        assert 0 in (found.tokens, found.excess)

    def test_contradiction_is_an_error_where_it_may_be(self) -> None:
        """S4-19: in debug runs, the numbers that contradict each other are named."""
        with pytest.raises(AssertionError, match="had 8 tokens and keeps 12"):
            affected_tokens(8, 12, is_strict=True)
        assert Affected(tokens=8) == affected_tokens(12, 4, is_strict=True)

    @given(TABLES, st.integers(0, 12))
    def test_first_invalid_block_and_all_later_ones_are_evicted(
        self, table: list[int], first: int
    ) -> None:
        """S4-24, S4-22: nothing before it is, and the null block never."""
        evicted = blocks_to_evict([0, *table], first + 1)
        assert set(table[first:]) == evicted


class TestOneRequest:
    def test_request_goes_back_to_its_first_invalid_block(self) -> None:
        """S4-18: of several invalid blocks the lowest decides, also when another is
        named first; S4-24: it and all later ones are evicted."""
        found = recover(
            ONE, [user("r", [1, 2, 3, 4, 5], cached=16, computed=20)], first_group(4, 2)
        )
        assert found == Recovery(
            cuts=(
                Cut(
                    request_id="r",
                    computed_tokens=4,
                    affected=Affected(tokens=12),
                    recomputes=True,
                ),
            ),
            evict=frozenset(first_group(2, 3, 4, 5)),
        )
        assert 12 == found.affected_tokens

    def test_blocks_that_the_step_computes_are_no_loads(self) -> None:
        """A name that also stands behind the cached tokens is not the request's."""
        one = user("r", [1, 2, 3], cached=8, computed=12)
        assert Recovery() == recover(ONE, [one], first_group(3))

    def test_request_without_blocks_is_skipped(self) -> None:
        """S4-23: nothing is known of it, and nothing is said of it."""
        one = user("r", [], [], cached=0)
        assert Recovery() == recover(HYBRID, [one], first_group(1))

    def test_all_groups_go_back_to_one_length(self) -> None:
        """Groups of unlike blocks are cut where blocks of both end; the window's
        blocks must be there."""
        one = user("r", [1, 2, 3, 4, 5, 6], [7, 8, 9], cached=24)
        found = recover(HYBRID, [one], {(0, 4)})
        assert [8] == [cut.computed_tokens for cut in found.cuts]
        assert {(0, 3), (0, 4), (0, 5), (0, 6), (1, 8), (1, 9)} == found.evict
        found = recover(HYBRID, [one], {(0, 6), (1, 8)})
        assert [8] == [cut.computed_tokens for cut in found.cuts]
        found = recover(HYBRID, [one], {(1, 4)})
        assert Recovery() == found

    def test_window_that_has_moved_on_leaves_nothing_to_go_on_from(self) -> None:
        """Blocks that were given back cannot be read again."""
        groups = make_layout((4, None), (8, 9)).groups
        one = user("r", [1, 2, 3, 4, 5, 6], [0, 8, 9], cached=24)
        found = recover(groups, [one], {(0, 6)})
        assert [16] == [cut.computed_tokens for cut in found.cuts]
        found = recover(groups, [one], {(0, 4)})
        assert [0] == [cut.computed_tokens for cut in found.cuts]

    def test_state_leaves_nothing_to_go_on_from(self) -> None:
        """The states of earlier tokens were written over."""
        groups = make_layout((4, None), (4, STATE)).groups
        one = user("r", [1, 2, 3], [0, 8, 9], cached=12)
        found = recover(groups, [one], {(0, 3)})
        assert [0] == [cut.computed_tokens for cut in found.cuts]
        assert {(0, 1), (0, 2), (0, 3), (1, 8), (1, 9)} == found.evict


class TestSharedBlocks:
    def test_first_of_two_computes_what_both_share(self) -> None:
        """S4-21: the second goes back to what it had before the step and waits."""
        found = recover(
            ONE,
            [
                user("a", [1, 2, 3], cached=12),
                user("b", [1, 2, 4], cached=8, computed=12),
            ],
            first_group(2),
        )
        first, second = found.cuts
        assert (4, True) == (first.computed_tokens, first.recomputes)
        assert (8, False) == (second.computed_tokens, second.recomputes)
        assert Affected(tokens=4) == second.affected
        assert first_group(2, 3) == found.evict

    @pytest.mark.parametrize("table", [[1, 2, 5], [1, 5, 2]])
    def test_request_counts_as_marked_whichever_of_its_blocks_is(
        self, table: list[int]
    ) -> None:
        """S4-20: one block of its own is enough, before or behind the shared one."""
        found = recover(
            ONE,
            [user("a", [1, 2], cached=8), user("b", table, cached=12)],
            first_group(2, 5),
        )
        cut = found.cuts[1]
        assert (4 * table.index(5), True) == (cut.computed_tokens, cut.recomputes)

    def test_contradiction_is_told_per_request(self) -> None:
        """S4-19: a request that keeps more than it had is told, and ends no engine."""
        users = [user("a", [1], cached=4), user("b", [1, 2], cached=8, computed=4)]
        found = recover(ONE, users, first_group(1), is_strict=False)
        assert Affected(tokens=0, excess=4) == found.cuts[1].affected
        assert 4 == found.affected_tokens
        with pytest.raises(AssertionError, match="had 4 tokens and keeps 8"):
            recover(ONE, users, first_group(1), is_strict=True)


@st.composite
def many(draw: st.DrawFn) -> tuple[tuple[GroupLayout, ...], list[BlockUser], list]:
    """Draw requests over the same few blocks, and which are invalid."""
    groups = draw(st.sampled_from([ONE, HYBRID]))
    users = []
    for number in range(draw(st.integers(1, 4))):
        cached = draw(st.integers(0, 32))
        shared = draw(st.integers(0, 8))
        tables = [
            [
                100 * at + (i if i < shared else 10 * (number + 1) + i) + 1
                for i in range(-(-cached // group.block_tokens))
            ]
            for at, group in enumerate(groups)
        ]
        computed = cached + draw(st.integers(0, 9))
        users.append(user(f"r{number}", *tables, cached=cached, computed=computed))
    names = sorted(
        {(at, b) for one in users for at, table in enumerate(one.tables) for b in table}
    )
    invalid = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    return groups, users, invalid


class TestAnyRequests:
    @given(many())
    def test_nobody_keeps_a_token_that_nobody_computes(
        self, drawn: tuple[tuple[GroupLayout, ...], list[BlockUser], list]
    ) -> None:
        """S4-18, S4-20, S4-21: every invalid block is computed by exactly the first
        request that has it; what a request keeps is valid or another's to compute."""
        groups, users, invalid = drawn
        cuts = {cut.request_id: cut for cut in recover(groups, users, invalid).cuts}
        computed: set[tuple[int, int]] = set()
        for one in users:
            cut = cuts.get(one.request_id)
            mine = {(at, b) for at, table in enumerate(one.tables) for b in table}
            assert (cut is not None) is bool(mine.intersection(invalid))
            if cut is None:
                continue
            own = mine.intersection(invalid) - computed
            assert bool(own) is cut.recomputes
            computed |= own
            kept = {
                (at, b)
                for at, (group, table) in enumerate(
                    zip(groups, one.tables, strict=True)
                )
                for b in table[: -(-cut.computed_tokens // group.block_tokens)]
            }
            assert not kept & own
            assert cut.computed_tokens <= one.computed_tokens
        assert set(invalid) == computed

    @given(many())
    def test_order_of_the_invalid_blocks_does_not_matter(
        self, drawn: tuple[tuple[GroupLayout, ...], list[BlockUser], list]
    ) -> None:
        """S4-18: a set has no order that anything could depend on."""
        groups, users, invalid = drawn
        assert recover(groups, users, invalid) == recover(groups, users, invalid[::-1])
