# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache configuration as a layout, and what is refused."""

import random

import pytest
import torch
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.integration.vllm.kit import (
    NUM_BLOCKS,
    SHAPE,
    cache_config,
    full,
    plain_cache,
    state,
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


def latent_window(**options):
    """Return a sliding window over latent attention."""
    return SlidingWindowMLASpec(16, sliding_window=24, **(SHAPE | options))


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


class TestOrder:
    @pytest.mark.parametrize("seed", range(4))
    def test_layers_run_by_their_numbers_and_not_as_they_are_listed(self, seed):
        """S4-08: whatever the order of groups and names, a row is saved after the
        layer of the highest number that lives in it, a state after its attention."""
        dice = random.Random(seed)
        numbers = [0, 1, 2, 3, 10, 11]
        attention = [f"model.layers.{at}.self_attn.attn" for at in numbers[3::3]]
        states = [f"model.layers.{at}.linear_attn" for at in (*numbers[:3], 10, 11)]
        tensors = [tensor(attention), tensor(states[:3]), tensor(states[3:])]
        groups = [(attention, full()), (states[:3], state()), (states[3:], state())]
        for each in (tensors, groups):
            dice.shuffle(each)
        for names, _ in groups:
            dice.shuffle(names)
        layout = layout_of(cache_config(*groups, tensors=tensors))
        assert sorted(attention + states, key=number_of) == [*layout.layer_order]
        assert [10, 11, 2] == [
            number_of(name) for _, name in sorted(layout.row_save_layer.items())
        ]

    def test_state_beside_attention_is_the_later_one(self):
        """S4-08: within one number nobody tells which runs first, so the layer that
        no hook is called for decides when the row is complete."""
        names = ["layers.0.self_attn.attn", "layers.0.mamba"]
        config = cache_config(
            (names[:1], full()),
            (names[1:], state()),
            tensors=[tensor(names[:1]), tensor(names[1:])],
        )
        assert {0: "layers.0.mamba"} == layout_of(config).row_save_layer

    def test_states_of_drafted_tokens_are_complete_when_the_step_is_over(self):
        """S4-08: which of the drafted tokens count is known after the forward pass
        only, and the state is copied then; no layer's hook may complete its row."""
        names = ["layers.7.self_attn.attn", "layers.0.linear_attn"]
        config = cache_config(
            (names[:1], full()),
            (names[1:], state(num_speculative_blocks=2)),
            tensors=[tensor(names[:1]), tensor(names[1:])],
        )
        assert {0: "layers.0.linear_attn"} == layout_of(config).row_save_layer

    @pytest.mark.parametrize("drafter", ["draft_model.model", "mtp", "model.mtp"])
    @pytest.mark.parametrize("num_layers", [1, 4])
    def test_drafter_that_numbers_its_layers_anew_runs_last(self, drafter, num_layers):
        """S4-08: a row that a drafter's layer shares with one of the model is complete
        behind the drafter, whatever their numbers are and how many it has."""
        drafts = [f"{drafter}.layers.{at}.self_attn.attn" for at in range(num_layers)]
        wide, *narrow = (f"model.layers.{at}.self_attn.attn" for at in range(3))
        config = cache_config(
            ([wide, *drafts], full()),
            (narrow, window()),
            tensors=[tensor([wide, *drafts]), tensor(narrow)],
        )
        found = layout_of(config).row_save_layer
        assert {0: narrow[0], **dict(enumerate(drafts, 1))} == found

    def test_layers_of_a_row_are_in_order_of_execution(self):
        """S4-08: layers of one group at one place are listed as they run."""
        names = ["layers.10.attn", "layers.9.attn"]
        config = cache_config((names, full()), tensors=[tensor([one]) for one in names])
        assert [[(0, ("layers.9.attn", "layers.10.attn"))]] == rows_of(
            layout_of(config)
        )


def number_of(name):
    """Return the number in a layer's name."""
    return next(int(part) for part in name.split(".") if part.isdigit())


class TestGroups:
    def test_recurrent_group_keeps_one_state_per_block(self):
        """A state is one page, as long as its payload: what pads it is not stored."""
        config = cache_config(
            (["a"], full()),
            (["b"], state(page_size_padded=PAGE)),
            tensors=[tensor(["a"]), tensor(["b"])],
        )
        layout = layout_of(config)
        group = layout.groups[1]
        assert (GroupKind.STATE, 16, None) == (
            group.kind,
            group.block_tokens,
            group.window_tokens,
        )
        assert [(PAGE, 0), (48, 0)] == [
            (row.page_bytes, row.row_id) for each in layout.groups for row in each.rows
        ]

    def test_window_reaches_back_to_what_drafts_read_again(self):
        """Tokens that a draft model reads again belong to the window."""
        spec = SlidingWindowSpec(
            16, sliding_window=24, extra_retained_tokens=8, **SHAPE
        )
        (group,) = layout_of(cache_config((["a"], spec))).groups
        assert 32 == group.window_tokens

    def test_window_over_latent_attention_is_a_window(self):
        """Latent pages are opaque bytes like others."""
        (group,) = layout_of(cache_config((["a"], latent_window()))).groups
        assert (GroupKind.WINDOW, 24) == (group.kind, group.window_tokens)

    def test_tokens_of_an_attention_block_are_spread_and_states_are_not(self):
        """Ranks that share the tokens of a block make it longer; each rank has the
        whole of every state."""
        config = cache_config(
            (["a"], full()),
            (["b"], state(block_size=64)),
            tensors=[tensor(["a"]), tensor(["b"])],
        )
        layout = layout_of(config, decode_context=4)
        assert [64, 64] == [group.block_tokens for group in layout.groups]

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

    def test_keys_apart_from_values_are_another_layout(self):
        """R-05: of back ends that take axes in one order, with pages of one size, ROCm's keeps all
        keys of a page before all values, and Triton's those of a head."""

        def page(backend):
            group = ["a"], backend.customize_spec(full())
            return layout_of(cache_config(group, kv_cache_layout="LBHNC"))

        apart, together = map(page, (RocmAttentionBackend, TritonAttentionBackend))
        assert apart.max_block_bytes == together.max_block_bytes
        assert apart.fingerprint() != together.fingerprint()
        assert "LBHNC" == together.engine_tag

    def test_layout_is_the_same_for_both_halves(self):
        """Two derivations from equal configurations agree in every byte."""
        first, second = layout_of(plain_cache()), layout_of(plain_cache())
        assert first.fingerprint() == second.fingerprint()


class TestRefused:
    def test_model_without_a_cache_is_refused_by_name(self):
        """R-21: an encoder has nothing to reuse, and start-up says so with the remedy."""
        empty = plain_cache()
        empty.kv_cache_groups = []
        with pytest.raises(LayoutError, match=r"no KV cache.*encoder-only.*Serve this"):
            layout_of(empty)

    @pytest.mark.parametrize(
        ("spec", "remedy"),
        [
            (state(mode="none"), "mode=none;.*mamba_cache_mode=align"),
            (state(mode="all"), "mode=all;.*mamba_cache_mode=align"),
            (
                ChunkedLocalAttentionSpec(16, attention_chunk_size=32, **SHAPE),
                "--disable-hybrid-kv-cache-manager",
            ),
            (RSWASpec(16, rswa_window=32, **SHAPE), "Serve this model without"),
            (SinkFullAttentionSpec(16, sink_len=16, **SHAPE), "Serve this model"),
            (CrossAttentionSpec(16, **SHAPE), "Serve this model without"),
            (EncoderOnlyAttentionSpec(16, **SHAPE), "Serve this model without"),
            (HiddenStateCacheSpec(16, **SHAPE), "Serve this model without"),
            (CircularBufferSpec(16, **SHAPE), "Serve this model without"),
            (latent_window(bounded_replay=True), "Serve this model without"),
            (
                UniformTypeKVCacheSpecs(16, {"state": full(), "other": window()}),
                "Serve this model without",
            ),
        ],
        ids=lambda each: type(each).__name__.removesuffix("Spec"),
    )
    def test_kind_that_cannot_be_restored_is_refused(self, spec, remedy):
        """A kind that is not known to restore is refused with its group, its layers,
        its name and what to do; the engine never loads wrong state."""
        layers = ["state", "other"]
        config = cache_config((["a"], full()), (layers, spec))
        kind = "FullAttentionSpec, SlidingWindowSpec"
        if not isinstance(spec, UniformTypeKVCacheSpecs):
            kind = type(spec).__name__
        where = rf"group 1 \(layers state, other\) holds {kind}"
        with pytest.raises(LayoutError, match=f"{where}.*{remedy}"):
            layout_of(config)

    def test_replica_that_the_engine_rebuilds_is_refused(self):
        """A group that is no part of what is transferred is not restored either."""
        config = cache_config((["a"], full()), (["b"], full()))
        config.kv_cache_groups[1].enable_kv_transfer = False
        with pytest.raises(LayoutError, match=r"group 1 \(layers b\)"):
            layout_of(config)

    def test_pages_of_unlike_layers_keep_their_sizes(self):
        """Layers of one group with pages of two sizes are rows of two sizes."""
        specs = {"a": full(), "b": full(num_kv_heads=4)}
        config = cache_config((["a", "b"], UniformTypeKVCacheSpecs(16, specs)))
        (group,) = layout_of(config).groups
        assert [1024, 2048] == [row.page_bytes for row in group.rows]

    def test_stage_without_a_layer_of_a_group_is_refused(self):
        """A rank that would store nothing of a group says so, and what to do."""
        config = cache_config((["a"], full()), ([], full()))
        with pytest.raises(LayoutError, match="group 1 is on this pipeline stage"):
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
