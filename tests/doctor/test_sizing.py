# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of capacity, and what a model's file may hold."""

import json

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from ucm.doctor.findings import Severity
from ucm.doctor.sizing import Deployment, check_sizes, model_of, sizes_of
from ucm.errors import ConfigError, ConfigFileError

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    """Return a function that writes a model's file and reads it."""

    def read(told, kv_dtype="auto"):
        (tmp_path / "config.json").write_text(json.dumps(told))
        return model_of(tmp_path, kv_dtype)

    return read


class TestSizes:
    def test_arithmetic_is_the_engines(self, model):
        """C.5: a block has the bytes that the engine's own classes say, for heads and
        for latent vectors."""
        heads = sizes_of(model(LLAMA), Deployment(block_tokens=16))
        spec = FullAttentionSpec(
            16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        assert 32 * spec.page_size_bytes == heads.block_bytes
        assert 131072 == heads.token_bytes
        latent = sizes_of(model(DEEPSEEK), Deployment(block_tokens=64))
        spec = MLAAttentionSpec(64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        assert 61 * spec.page_size_bytes == latent.block_bytes

    @pytest.mark.parametrize(
        ("told", "how", "shards", "block_bytes"),
        [
            (LLAMA, {}, 1, 2 << 20),
            (LLAMA, {"tensor_parallel": 4}, 4, 1 << 19),
            (LLAMA, {"tensor_parallel": 16}, 8, 1 << 18),
            (LLAMA, {"pipeline_parallel": 2}, 2, 1 << 20),
            (LLAMA, {"pipeline_parallel": 3}, 3, (2 << 20) * 11 // 32),
            (LLAMA, {"block_tokens": 128}, 1, 16 << 20),
            (DEEPSEEK, {"tensor_parallel": 8}, 1, 61 * 576 * 2 * 16),
        ],
    )
    def test_ranks_share_a_block_and_store_each_part_once(
        self, model, told, how, shards, block_bytes
    ):
        """C.5: sizes are of the node; ranks that hold the same count once, and the
        largest stage decides the slots."""
        sizes = sizes_of(model(told), Deployment(**how))
        assert (shards, block_bytes) == (sizes.shards, sizes.block_bytes)

    def test_heads_that_cannot_be_cut_are_refused(self, model):
        """The engine would not start, either."""
        with pytest.raises(ConfigError, match="cut evenly"):
            sizes_of(model(LLAMA), Deployment(tensor_parallel=3))

    def test_type_of_the_cache_counts_before_the_models(self, model):
        """fp8 halves it; a type that is unknown is named."""
        half = sizes_of(model(LLAMA, "fp8"), Deployment())
        assert 1 << 20 == half.block_bytes
        with pytest.raises(ConfigError, match=r"kv-cache-dtype='int3'.*bfloat16"):
            model(LLAMA, "int3")
        with pytest.raises(ConfigFileError, match=r"MODEL=.*int4"):
            model({**LLAMA, "torch_dtype": "int4"})

    def test_model_that_says_it_has_no_latent_vectors_has_heads(self, model):
        """As the small ones of DeepSeek's do, and as the engine reads it: none of them could be read."""
        assert model(LLAMA) == model({**LLAMA, "kv_lora_rank": None})

    def test_text_of_a_multimodal_model_is_looked_into(self, model):
        """Its own part counts, and what it leaves out is the whole's."""
        inner = {k: LLAMA[k] for k in LLAMA if k != "torch_dtype"}
        assert model(LLAMA) == model({"text_config": inner, "torch_dtype": "bfloat16"})

    @pytest.mark.parametrize(
        ("more", "layers", "states", "windows"),
        [
            ({"layer_types": ["full_attention"] * 32}, 32, 0, 0),
            (
                {"layer_types": ["linear_attention", "full_attention"] * 16},
                16,
                16,
                0,
            ),
            (
                {"layer_types": ["sliding_attention", "full_attention"] * 16},
                32,
                0,
                16,
            ),
            ({"full_attention_interval": 4}, 8, 24, 0),
        ],
    )
    def test_layers_of_other_kinds_are_told_apart(
        self, model, more, layers, states, windows
    ):
        """A state is not keys and values of each token; a window is counted whole."""
        found = model({**LLAMA, "head_dim": 64, **more})
        assert (layers, states, windows, 256) == (
            found.layers,
            found.state_layers,
            found.window_layers,
            found.head_bytes,
        )


class TestFindings:
    def found(self, model, severity, **options):
        """Return what is found of this severity."""
        facts = model(LLAMA)
        sizes = sizes_of(
            facts, Deployment(block_tokens=options.pop("block_tokens", 16))
        )
        given = {"capacity": 4 << 30, "num_slots": 2048, **options}
        return [
            each.text
            for each in check_sizes(facts, sizes, **given)
            if each.severity is severity
        ]

    def test_tokens_that_fit_are_told_with_the_arithmetic(self, model):
        """4 GiB in slots of 2 MiB are 2048 blocks of 16 tokens."""
        (text,) = self.found(model, Severity.FINE)
        assert "128 KiB over all ranks" in text
        assert text.endswith("2048 slots of 2 MiB, that is 32768 tokens")

    def test_minutes_of_traffic_are_told_and_few_are_warned_of(self, model):
        """What is used again later than that is gone."""
        assert (
            "in 54.6 minutes"
            in self.found(model, Severity.FINE, tokens_per_second=10)[1]
        )
        (text,) = self.found(model, Severity.WARNING, tokens_per_second=1000)
        assert "in 0.5 minutes" in text

    def test_capacity_without_a_block_is_wrong(self, model):
        """Nothing would ever be stored."""
        assert self.found(model, Severity.WRONG, num_slots=0)

    def test_slots_that_are_mostly_empty_are_warned_of(self, model):
        """A part of a block takes whole pages."""
        facts = attrs.evolve(model(LLAMA), layers=1, heads=1, head_bytes=64)
        sizes = sizes_of(facts, Deployment())
        found = check_sizes(facts, sizes, capacity=1 << 20, num_slots=256)
        assert any("the rest is lost" in each.text for each in found)

    def test_what_is_not_in_the_numbers_is_named(self, model):
        """States and windows."""
        facts = attrs.evolve(model(LLAMA), state_layers=3, window_layers=5)
        sizes = sizes_of(facts, Deployment())
        found = check_sizes(facts, sizes, capacity=1 << 30, num_slots=512)
        texts = " ".join(x.text for x in found if x.severity is Severity.NOTE)
        assert "3 layers keep a state" in texts
        assert "5 layers look at a window" in texts


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "no JSON object"),
            ("[]", "no JSON object"),
            ("{}", "torch_dtype|num_hidden_layers"),
            ('{"num_hidden_layers": true}', "num_hidden_layers"),
            (json.dumps({**LLAMA, "num_hidden_layers": 1 << 40}), "num_hidden_layers"),
            (json.dumps({**LLAMA, "torch_dtype": "int4"}), "int4"),
            (json.dumps({**LLAMA, "layer_types": ["new"] * 32}), "unknown kinds"),
            (json.dumps({**LLAMA, "layer_types": ["attention"]}), "unknown kinds"),
            ("[" * 100000, "no JSON object"),
            ("x" * (5 << 20), "larger than"),
        ],
    )
    def test_file_that_says_nothing_usable_is_named(self, tmp_path, text, told):
        """Nothing is guessed."""
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigFileError, match=told):
            model_of(tmp_path)

    def test_model_that_is_not_here_is_named(self, tmp_path):
        """Nothing is downloaded."""
        with pytest.raises(ConfigFileError, match=r"No such file.*is downloaded\."):
            model_of(tmp_path / "org" / "name")

    @pytest.mark.slow
    @settings(deadline=None)
    @given(
        told=st.dictionaries(
            st.sampled_from(
                [*LLAMA, *DEEPSEEK, "layer_types", "text_config", "head_dim"]
            ),
            st.none()
            | st.booleans()
            | st.integers(-1, 200)
            | st.floats()
            | st.text(max_size=8)
            | st.lists(st.sampled_from(["full_attention", 1, None]), max_size=3)
            | st.just(LLAMA),
        ),
        base=st.sampled_from([{}, LLAMA, DEEPSEEK]),
    )
    def test_whatever_a_file_holds_there_are_facts_or_an_error(
        self, tmp_path_factory, told, base
    ):
        """A model's file is anybody's: there is no third way."""
        path = tmp_path_factory.getbasetemp() / "config.json"
        path.write_text(json.dumps({**base, **told}))
        try:
            facts = model_of(path)
        except ConfigFileError:
            return
        assert facts.layers >= 0
        assert facts.heads > 0
