# SPDX-License-Identifier: Apache-2.0
"""The shape of an engine's KV cache: groups, rows, windows and their fingerprint."""

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ucm.blocks import GroupId, RowId
from ucm.errors import LayoutError
from ucm.layout import GroupKind, GroupLayout, KVLayout, Region, RowLayout


def row(row_id: int, page_bytes: int = 64, *layer_names: str) -> RowLayout:
    """One row."""
    return RowLayout(
        row_id=RowId(row_id), page_bytes=page_bytes, layer_names=layer_names
    )


def full(group_id: int, block_tokens: int, *rows: RowLayout) -> GroupLayout:
    """A group whose hits need every block."""
    return GroupLayout(
        group_id=GroupId(group_id),
        kind=GroupKind.FULL,
        block_tokens=block_tokens,
        rows=rows,
    )


def window(
    group_id: int, block_tokens: int, window_tokens: int, *rows: RowLayout
) -> GroupLayout:
    """A group whose hits need the last window."""
    return GroupLayout(
        group_id=GroupId(group_id),
        kind=GroupKind.WINDOW,
        block_tokens=block_tokens,
        window_tokens=window_tokens,
        rows=rows,
    )


def state(group_id: int, block_tokens: int, *rows: RowLayout) -> GroupLayout:
    """A group whose hits need the last block."""
    return GroupLayout(
        group_id=GroupId(group_id),
        kind=GroupKind.STATE,
        block_tokens=block_tokens,
        rows=rows,
    )


def layout(*groups: GroupLayout, hash_block_tokens: int = 16) -> KVLayout:
    """A layout."""
    return KVLayout(
        groups=groups, hash_block_tokens=hash_block_tokens, engine_tag="vllm/cpu"
    )


HYBRID = layout(
    full(0, 48, row(0, 64, "full.0"), row(1, 64, "full.1"), row(2, 32, "full.2")),
    window(1, 32, 100, row(0, 48, "state.0"), row(2, 32, "state.1", "state.2")),
)

HYBRID_FINGERPRINT = "e9a21bac52ffb451be5d0db26b0ae3cd75464f4aecc243fcd2dea9f767f3b3ea"


class TestGroupLayout:
    """Layers with one block table."""

    def test_a_stored_block_is_its_pages_back_to_back(self) -> None:
        """Offsets follow row order, and the block ends with its last page."""
        group = full(0, 16, row(0, 64, "a"), row(3, 10, "b"), row(5, 6, "c"))
        assert (0, 64, 74) == group.row_offsets
        assert 80 == group.block_bytes

    @given(
        block_tokens=st.integers(1, 40),
        window_tokens=st.integers(1, 120),
        prefix_tokens=st.integers(0, 300),
    )
    @example(block_tokens=16, window_tokens=1, prefix_tokens=32)
    @example(block_tokens=16, window_tokens=17, prefix_tokens=32)
    @example(block_tokens=16, window_tokens=18, prefix_tokens=32)
    def test_window_blocks_hold_every_token_the_next_one_sees(
        self, block_tokens: int, window_tokens: int, prefix_tokens: int
    ) -> None:
        """The blocks are those whole ones that hold a token inside the window."""
        group = window(0, block_tokens, window_tokens, row(0, 64, "a"))
        # The token at `prefix_tokens` sees itself and those just before it.
        seen = range(prefix_tokens - window_tokens + 1, prefix_tokens)
        whole = range(prefix_tokens // block_tokens)
        expected = {token // block_tokens for token in seen if token >= 0}
        found = group.window_blocks(prefix_tokens)
        assert sorted(expected.intersection(whole)) == list(found)

    @given(block_tokens=st.integers(1, 40), prefix_tokens=st.integers(0, 300))
    def test_a_full_group_needs_every_whole_block(
        self, block_tokens: int, prefix_tokens: int
    ) -> None:
        """Without a window all blocks of the prefix are restored."""
        group = full(0, block_tokens, row(0, 64, "a"))
        blocks = group.window_blocks(prefix_tokens)
        assert range(prefix_tokens // block_tokens) == blocks

    @given(block_tokens=st.integers(1, 40), prefix_tokens=st.integers(0, 300))
    def test_a_state_group_needs_the_last_whole_block(
        self, block_tokens: int, prefix_tokens: int
    ) -> None:
        """The state at the end of a prefix is in one block; nothing needs none."""
        group = state(0, block_tokens, row(0, 64, "a"))
        whole = prefix_tokens // block_tokens
        assert ([whole - 1] if whole else []) == [*group.window_blocks(prefix_tokens)]

    @given(
        block_tokens=st.integers(1, 20),
        window_tokens=st.integers(1, 60),
        prefix_tokens=st.integers(0, 200),
        block=st.integers(0, 40),
    )
    def test_prefixes_with_a_block_are_those_whose_hits_restore_it(
        self, block_tokens: int, window_tokens: int, prefix_tokens: int, block: int
    ) -> None:
        """R-54: of each kind of group, a prefix and a block say the same of each other."""
        a = row(0, 64, "a")
        for group in (
            full(0, block_tokens, a),
            window(0, block_tokens, window_tokens, a),
            state(0, block_tokens, a),
        ):
            is_restored = block in group.window_blocks(prefix_tokens)
            assert is_restored is (prefix_tokens in group.prefixes_with(block))

    def test_a_group_without_rows_is_refused(self) -> None:
        """A group stores something."""
        with pytest.raises(LayoutError, match="group 0 has no rows"):
            full(0, 16)

    @pytest.mark.parametrize("ids", [(1, 0), (0, 0)])
    def test_rows_that_do_not_ascend_are_refused(self, ids: tuple[int, int]) -> None:
        """The order of pages in a stored block has one form only."""
        with pytest.raises(LayoutError, match="not ascending"):
            full(0, 16, *(row(one, 64, f"layer{at}") for at, one in enumerate(ids)))

    def test_a_window_belongs_to_window_groups_only(self) -> None:
        """A kind and a window that contradict each other are refused."""
        group = full(0, 16, row(0, 64, "a"))
        with pytest.raises(LayoutError, match="window_tokens=8"):
            attrs.evolve(group, window_tokens=8)
        with pytest.raises(LayoutError, match="window_tokens=None"):
            attrs.evolve(group, kind=GroupKind.WINDOW)
        with pytest.raises(LayoutError, match="window_tokens=8"):
            attrs.evolve(group, kind=GroupKind.STATE, window_tokens=8)

    @pytest.mark.parametrize("value", [0, -1])
    def test_sizes_below_one_are_refused(self, value: int) -> None:
        """Blocks, pages and hashes cover something."""
        with pytest.raises(ValueError, match="block_tokens"):
            full(0, value, row(0, 64, "a"))
        with pytest.raises(ValueError, match="page_bytes"):
            row(0, value, "a")
        with pytest.raises(ValueError, match="hash_block_tokens"):
            layout(full(0, 16, row(0, 64, "a")), hash_block_tokens=value)

    def test_block_of_more_tokens_than_moments_can_tell_is_refused(self) -> None:
        """The loop of whoever saves blocks of such a layout would not get on."""
        assert 1 << 28 == full(0, 1 << 28, row(0, 64, "a")).block_tokens
        with pytest.raises(ValueError, match="block_tokens"):
            full(0, (1 << 28) + 1, row(0, 64, "a"))


class TestKVLayout:
    """All groups together."""

    def test_each_layer_has_one_row(self) -> None:
        """S4-01: every layer of every group maps to the row it lives in."""
        expected = {
            "full.0": 0,
            "full.1": 1,
            "full.2": 2,
            "state.0": 0,
            "state.1": 2,
            "state.2": 2,
        }
        assert expected == {name: HYBRID.row_of(name) for name in expected}

    def test_an_unknown_layer_is_refused(self) -> None:
        """S4-01: a layer outside the layout has no row."""
        with pytest.raises(LayoutError, match=r"no layer 'full\.9'"):
            HYBRID.row_of("full.9")

    def test_shared_rows_are_counted_once(self) -> None:
        """S4-01: rows are counted over the whole layout, not per group."""
        assert 3 == HYBRID.num_rows

    def test_rows_with_a_gap_are_refused(self) -> None:
        """S4-01: row ids are dense from 0."""
        with pytest.raises(LayoutError, match=r"rows \[0, 2\] are not dense"):
            layout(full(0, 16, row(0, 64, "a"), row(2, 64, "b")))

    def test_rows_that_start_above_zero_are_refused(self) -> None:
        """S4-01: row ids are dense from 0."""
        with pytest.raises(LayoutError, match=r"rows \[1\] are not dense"):
            layout(full(0, 16, row(1, 64, "a")))

    def test_a_layer_in_two_rows_is_refused(self) -> None:
        """S4-01: a layer lives in one row, in one group as across groups."""
        with pytest.raises(LayoutError, match="layer a is in two rows"):
            layout(full(0, 16, row(0, 64, "a"), row(1, 64, "a")))
        with pytest.raises(LayoutError, match="layer a is in two rows"):
            layout(full(0, 16, row(0, 64, "a")), full(1, 16, row(0, 64, "a")))

    def test_a_layout_without_groups_is_refused(self) -> None:
        """There is at least one group."""
        with pytest.raises(LayoutError, match="at least one group"):
            layout()

    def test_a_block_that_no_hash_ends_with_is_refused(self) -> None:
        """Every block of every group ends where a hash of the engine ends."""
        with pytest.raises(
            LayoutError, match=r"block_tokens=24 .*hash_block_tokens=16"
        ):
            layout(full(0, 24, row(0, 64, "a")))

    def test_groups_are_found_by_id(self) -> None:
        """A group is asked for by its id, and an unknown id is refused."""
        assert HYBRID.groups[1] is HYBRID.group(GroupId(1))
        with pytest.raises(LayoutError, match="no group 2"):
            HYBRID.group(GroupId(2))

    def test_sizes_are_taken_over_all_groups(self) -> None:
        """The largest block sizes slots; the common multiple aligns prefixes."""
        assert 160 == HYBRID.max_block_bytes
        assert 96 == HYBRID.alignment_tokens

    @given(
        hash_block_tokens=st.integers(1, 32),
        hashes_per_block=st.integers(1, 8),
        block_index=st.integers(0, 100),
    )
    def test_a_block_is_named_by_the_hash_that_ends_with_it(
        self, hash_block_tokens: int, hashes_per_block: int, block_index: int
    ) -> None:
        """The hash covers the tokens up to exactly the end of the block."""
        block_tokens = hash_block_tokens * hashes_per_block
        group = full(0, block_tokens, row(0, 64, "a"))
        index = layout(group, hash_block_tokens=hash_block_tokens).hash_index(
            group, block_index
        )
        assert (block_index + 1) * block_tokens == (index + 1) * hash_block_tokens


def changed_layouts() -> dict[str, KVLayout]:
    """Return layouts that each differ from ``HYBRID`` in one field."""
    first, second = HYBRID.groups
    head, *tail = first.rows

    def with_row(**change: object) -> KVLayout:
        group = attrs.evolve(first, rows=(attrs.evolve(head, **change), *tail))
        return attrs.evolve(HYBRID, groups=(group, second))

    def with_second(**change: object) -> KVLayout:
        return attrs.evolve(HYBRID, groups=(first, attrs.evolve(second, **change)))

    return {
        "engine_tag": attrs.evolve(HYBRID, engine_tag="vllm/cpu/amx"),
        "hash_block_tokens": attrs.evolve(HYBRID, hash_block_tokens=8),
        "groups": attrs.evolve(HYBRID, groups=(first,)),
        "order of groups": attrs.evolve(HYBRID, groups=(second, first)),
        "group_id": with_second(group_id=GroupId(2)),
        "kind": with_second(kind=GroupKind.FULL, window_tokens=None),
        "another kind": with_second(kind=GroupKind.STATE, window_tokens=None),
        "block_tokens": with_second(block_tokens=64),
        "window_tokens": with_second(window_tokens=101),
        "rows": with_second(rows=second.rows[:1]),
        "row_id": with_second(
            rows=(attrs.evolve(second.rows[0], row_id=RowId(1)), second.rows[1])
        ),
        "page_bytes": with_row(page_bytes=65),
        "layer_names": with_row(layer_names=("full.9",)),
        "one layer more": with_row(layer_names=("full.0", "full.9")),
    }


class TestRefusals:
    def test_two_groups_with_one_id_are_refused(self) -> None:
        """A group is found by its id, so there is one of each."""
        one = GroupLayout(
            group_id=GroupId(0),
            kind=GroupKind.FULL,
            block_tokens=16,
            rows=(row(0, 64, "a"),),
        )
        two = attrs.evolve(one, rows=(row(1, 64, "b"),))
        with pytest.raises(LayoutError, match="not distinct"):
            KVLayout(groups=(one, two), hash_block_tokens=16, engine_tag="test")

    def test_a_row_without_layers_is_refused(self) -> None:
        """A row that no layer lives in cannot be found."""
        with pytest.raises(ValueError, match="layer_names"):
            row(0)

    def test_a_window_of_nothing_is_refused(self) -> None:
        """Attention sees at least one token."""
        with pytest.raises(ValueError, match="window_tokens"):
            GroupLayout(
                group_id=GroupId(0),
                kind=GroupKind.WINDOW,
                block_tokens=16,
                window_tokens=0,
                rows=(row(0, 64, "a"),),
            )


class TestFingerprint:
    """The digest over everything that decides the bytes of stored blocks."""

    @pytest.mark.parametrize("changed", changed_layouts().items(), ids=lambda c: c[0])
    def test_every_field_changes_it(self, changed: tuple[str, KVLayout]) -> None:
        """A layout that differs in one field has another fingerprint."""
        assert HYBRID.fingerprint() != changed[1].fingerprint()

    def test_every_pair_of_changes_differs(self) -> None:
        """No two changes lead to the same fingerprint."""
        prints = {value.fingerprint() for value in changed_layouts().values()}
        assert len(changed_layouts()) == len(prints)

    def test_equal_layouts_share_it(self) -> None:
        """A layout that was built again from the same values has the same one."""
        groups = tuple(
            attrs.evolve(
                group, rows=tuple(attrs.evolve(one) for one in list(group.rows))
            )
            for group in HYBRID.groups
        )
        again = attrs.evolve(HYBRID, groups=groups)
        assert HYBRID.groups[0].rows[0] is not again.groups[0].rows[0]
        assert HYBRID.fingerprint() == again.fingerprint()

    def test_it_is_the_one_of_earlier_processes(self) -> None:
        """The digest is part of stored keys, so it changes with its schema only."""
        assert HYBRID_FINGERPRINT == HYBRID.fingerprint()


class TestRegion:
    """Where the pages of one row lie."""

    REGION = Region(
        row_id=RowId(0),
        storage_id=0,
        offset=10,
        block_stride=64,
        page_bytes=48,
        num_blocks=4,
    )

    def test_it_ends_behind_the_last_page(self) -> None:
        """Padding behind the last page is not part of the region."""
        assert 10 + 3 * 64 + 48 == self.REGION.end

    @pytest.mark.parametrize("change", [{"offset": -1}, {"num_blocks": 0}])
    def test_a_region_that_is_nowhere_is_refused(self, change: dict[str, int]) -> None:
        """A region starts inside its storage and has a block."""
        with pytest.raises(LayoutError, match="is not a region"):
            attrs.evolve(self.REGION, **change)

    def test_pages_that_overlap_are_refused(self) -> None:
        """The next block starts behind the page."""
        with pytest.raises(LayoutError, match="block_stride=47"):
            attrs.evolve(self.REGION, block_stride=47)
