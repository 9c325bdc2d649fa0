# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache configuration as a layout, and what is refused."""

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from tests.integration.vllm.kit import (
    NUM_BLOCKS,
    SHAPE,
    cache_config,
    full,
    plain_cache,
    window,
)
from ucm.errors import LayoutError
from ucm.integration.vllm.layout import layout_of
from ucm.layout import GroupKind

PAGE = 1024


def rows_of(layout):
    """Return row id and layers of each row, group by group."""
    return [
        [(row.row_id, row.layer_names) for row in group.rows] for group in layout.groups
    ]


def tensor(layers, offset=0, **options):
    """Return a placement of layers one behind the other."""
    stride = NUM_BLOCKS * PAGE
    return KVCacheTensor(
        size=8 * stride,
        layers=layers,
        layer_stride=stride,
        block_stride=PAGE,
        offset=offset,
        **options,
    )


class TestRows:
    def test_each_layer_has_one_row_in_memory_order(self):
        """S4-01: rows are dense from 0, in the order in which layers lie."""
        layout = layout_of(plain_cache())
        assert [[(0, ("a",)), (1, ("b",))]] == rows_of(layout)
        (group,) = layout.groups
        assert (GroupKind.FULL, 16, None) == (
            group.kind,
            group.block_tokens,
            group.window_tokens,
        )
        assert [PAGE, PAGE] == [row.page_bytes for row in group.rows]

    def test_groups_on_the_same_storage_share_its_row(self):
        """S4-02: layers of two groups at one place are one row."""
        config = cache_config(
            (["a", "b"], full()),
            (["c", "d"], window()),
            tensors=[tensor(["a", "b"]), tensor(["c", "d"])],
        )
        layout = layout_of(config)
        assert [[(0, ("a",)), (1, ("b",))], [(0, ("c",)), (1, ("d",))]] == rows_of(
            layout
        )
        assert 2 == layout.num_rows

    def test_layers_of_one_group_at_one_place_share_a_row(self):
        """S4-02: a layer that borrows another's storage adds no row."""
        config = cache_config(
            (["a", "b"], full()), tensors=[tensor(["a"]), tensor(["b"])]
        )
        assert [[(0, ("a", "b"))]] == rows_of(layout_of(config))

    def test_offset_decides_the_row_and_not_the_order_of_names(self):
        """Rows follow memory, however the configuration lists them."""
        config = cache_config(
            (["a", "b"], full()),
            tensors=[tensor(["a"], offset=5 * PAGE), tensor(["b"])],
        )
        assert [[(0, ("b",)), (1, ("a",))]] == rows_of(layout_of(config))

    def test_like_layers_under_one_heading_are_full_attention(self):
        """A group of single specs is what its layers are, with their pages."""
        specs = {"a": full(), "b": full()}
        config = cache_config((["a", "b"], UniformTypeKVCacheSpecs(16, specs)))
        (group,) = layout_of(config).groups
        assert GroupKind.FULL is group.kind
        assert [PAGE, PAGE] == [row.page_bytes for row in group.rows]


class TestGroups:
    def test_sliding_window_keeps_its_width(self):
        """A window group says how many tokens attention sees."""
        (group,) = layout_of(cache_config((["a"], window(24)))).groups
        assert (GroupKind.WINDOW, 24) == (group.kind, group.window_tokens)

    def test_widest_window_of_a_group_counts(self):
        """Layers of unlike windows in one group: none may miss a block."""
        specs = {"a": window(24), "b": window(40)}
        config = cache_config((["a", "b"], UniformTypeKVCacheSpecs(16, specs)))
        (group,) = layout_of(config).groups
        assert (GroupKind.WINDOW, 40) == (group.kind, group.window_tokens)

    def test_latent_attention_is_full_attention(self):
        """MLA needs every block of a prefix."""
        spec = MLAAttentionSpec(16, num_kv_heads=1, head_size=8, dtype=torch.float16)
        (group,) = layout_of(cache_config((["a"], spec))).groups
        assert GroupKind.FULL is group.kind

    @pytest.mark.parametrize(("given", "expected"), [(8, 8), (None, 16)])
    def test_tokens_of_a_hash_default_to_the_smallest_block(self, given, expected):
        """The engine says what its hashes cover, or they cover the smallest block."""
        config = cache_config(
            (["a"], full(32)), (["b"], full(16)), hash_block_size=given
        )
        assert expected == layout_of(config).hash_block_tokens

    @pytest.mark.parametrize(("given", "expected"), [("NHD", "NHD"), (None, "default")])
    def test_engines_layout_name_is_part_of_the_layout(self, given, expected):
        """The same shape under another order of axes is another layout."""
        config = cache_config((["a"], full()), kv_cache_layout=given)
        assert expected == layout_of(config).engine_tag

    def test_layout_is_the_same_for_both_halves(self):
        """Two derivations from equal configurations agree in every byte."""
        first, second = layout_of(plain_cache()), layout_of(plain_cache())
        assert first.fingerprint() == second.fingerprint()


class TestRefused:
    @pytest.mark.parametrize(
        "spec",
        [
            MambaSpec(16, shapes=((4, 4),), dtypes=(torch.float16,)),
            ChunkedLocalAttentionSpec(16, attention_chunk_size=32, **SHAPE),
            CrossAttentionSpec(16, **SHAPE),
            UniformTypeKVCacheSpecs(16, {"state": full(), "other": window()}),
        ],
        ids=["recurrent", "chunked", "cross", "mixed"],
    )
    def test_kind_that_cannot_be_restored_is_refused(self, spec):
        """A kind that is not known to restore is refused with its group, its layers,
        its name and what to do; the engine never loads wrong state."""
        layers = ["state", "other"]
        config = cache_config((["a"], full()), (layers, spec))
        kind = "FullAttentionSpec, SlidingWindowSpec"
        if not isinstance(spec, UniformTypeKVCacheSpecs):
            kind = type(spec).__name__
        with pytest.raises(LayoutError, match=rf"group 1 \(layers state.*{kind};"):
            layout_of(config)

    def test_pages_of_unlike_layers_are_refused(self):
        """Layers of one group with pages of two sizes are refused with both."""
        specs = {"a": full(), "b": full(num_kv_heads=4)}
        config = cache_config((["a", "b"], UniformTypeKVCacheSpecs(16, specs)))
        with pytest.raises(LayoutError, match=r"\[1024, 2048\] bytes"):
            layout_of(config)

    def test_layers_in_host_memory_are_refused(self):
        """Layers that the engine keeps outside its device are not mapped."""
        config = cache_config(
            (["a"], full()), tensors=[tensor(["a"], host_resident=True)]
        )
        with pytest.raises(LayoutError, match="host_resident"):
            layout_of(config)

    def test_layer_without_memory_is_refused(self):
        """A layer of a group that no tensor places is named."""
        config = cache_config((["a", "b"], full()), tensors=[tensor(["a"])])
        with pytest.raises(LayoutError, match="layer b of group 0"):
            layout_of(config)
