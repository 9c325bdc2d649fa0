# SPDX-License-Identifier: Apache-2.0
"""Which layer of a row runs last."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_layout import HYBRID, HYBRID_FINGERPRINT
from ucm.errors import LayoutError
from ucm.layout import KVLayout, RowLayout


class TestExecutionOrder:
    """Which layer runs when, and which of them completes a row."""

    NAMES = ("state.0", "full.0", "full.1", "state.1", "full.2", "state.2")

    def test_row_is_saved_after_its_last_layer(self) -> None:
        """S4-08: of all layers of a row, of whatever group, the last to run counts."""
        found = attrs.evolve(HYBRID, layer_order=self.NAMES).row_save_layer
        assert {0: "full.0", 1: "full.1", 2: "state.2"} == found

    @given(st.permutations(range(6)), st.permutations([0, 1]))
    def test_row_is_saved_after_its_last_layer_however_layers_are_listed(
        self, order: list[int], groups: list[int]
    ) -> None:
        """S4-08: it is the order of execution that decides, not that of groups or
        names."""
        names = [self.NAMES[at] for at in order]

        def listed(one: RowLayout) -> RowLayout:
            return attrs.evolve(
                one, layer_names=tuple(sorted(one.layer_names, key=names.index))
            )

        shuffled = KVLayout(
            groups=tuple(
                attrs.evolve(
                    HYBRID.groups[at], rows=tuple(map(listed, HYBRID.groups[at].rows))
                )
                for at in groups
            ),
            hash_block_tokens=16,
            engine_tag="vllm/cpu",
            layer_order=tuple(names),
        )
        expected: dict[int, str] = {}
        for name in names:
            expected[shuffled.row_of(name)] = name
        assert expected == shuffled.row_save_layer

    def test_without_an_order_layers_run_group_by_group(self) -> None:
        """An engine that says nothing has one group, whose rows are in order."""
        assert {0: "state.0", 1: "full.1", 2: "state.2"} == HYBRID.row_save_layer

    def test_order_does_not_change_the_fingerprint(self) -> None:
        """It moves no byte, so that what is stored stays found."""
        found = attrs.evolve(HYBRID, layer_order=self.NAMES).fingerprint()
        assert HYBRID_FINGERPRINT == found

    @pytest.mark.parametrize(
        "order",
        [NAMES[1:], (*NAMES, "full.9"), (*NAMES, "full.0")],
        ids=["one less", "unknown", "twice"],
    )
    def test_order_that_names_not_each_layer_once_is_refused(
        self, order: tuple[str, ...]
    ) -> None:
        """S4-08: a layer without a place in the order could complete no row."""
        with pytest.raises(LayoutError, match="does not name each layer once"):
            attrs.evolve(HYBRID, layer_order=order)

    def test_row_that_contradicts_the_order_is_refused(self) -> None:
        """S4-08: the layers of a row are listed as they run."""
        order = ("full.0", "full.1", "full.2", "state.0", "state.2", "state.1")
        with pytest.raises(LayoutError, match="not in the order of execution"):
            attrs.evolve(HYBRID, layer_order=order)
