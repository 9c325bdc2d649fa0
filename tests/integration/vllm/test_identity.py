# SPDX-License-Identifier: Apache-2.0
"""What of the engine's settings is in a key, and every field that is not, with a reason."""

import dataclasses
import enum
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    KernelConfig,
    LoadConfig,
    MambaConfig,
    ModelConfig,
    MultiModalConfig,
    VllmConfig,
)

from tests.integration.vllm.kit import engine_config
from ucm.errors import ConfigError
from ucm.integration.vllm.fields import COUNTED, ELSEWHERE, UNCOUNTED
from ucm.integration.vllm.identity import check_reusable, settings_of

PARTS = {
    "": VllmConfig,
    "model_config": ModelConfig,
    "model_config.multimodal_config": MultiModalConfig,
    "cache_config": CacheConfig,
    "load_config": LoadConfig,
    "attention_config": AttentionConfig,
    "kernel_config": KernelConfig,
    "mamba_config": MambaConfig,
}


def an_engine(**parts):
    """Return an engine's configuration with fields of its parts changed or added."""
    config = engine_config("m")
    for part, fields in parts.items():
        holder = functools.reduce(getattr, filter(None, part.split("__")), config)
        for name, value in fields.items():
            setattr(holder, name, value)
    return config


def told(**parts):
    """Return what is told of an engine's settings."""
    return json.loads(settings_of(an_engine(**parts)))


def model(**fields):
    """Return what is told of an engine whose model's configuration has these fields."""
    return told(model_config=fields)


def rope(kind, **config):
    """Return a model's own configuration with a kind of rotary embedding."""
    rope_parameters = {"rope_type": kind, "factor": 4.0}
    fields = {"model_type": "llama", "rope_parameters": rope_parameters} | config
    return {"hf_text_config": SimpleNamespace(**fields)}


class TestFields:
    @pytest.mark.parametrize("part", PARTS)
    def test_every_field_of_the_engine_is_decided_once(self, part):
        """R-05: a field that decides bytes cannot be forgotten: each of the installed
        engine's is counted, or in the key already, or left out with a reason."""
        decided = [*COUNTED.get(part, ()), *ELSEWHERE[part]]
        decided += [name for names in UNCOUNTED[part].values() for name in names]
        found = {field.name for field in dataclasses.fields(PARTS[part])}
        assert len(decided) == len(set(decided))
        assert set() == found - set(decided)

    @pytest.mark.parametrize(
        ("part", "name"),
        [(part, name) for part, names in COUNTED.items() for name in names],
    )
    def test_counted_field_is_told_and_an_unset_one_is_not(self, part, name):
        """R-05: whatever is counted and set parts an engine from one that has it not."""
        key = f"{part}.{name}".lstrip(".")
        config = an_engine()
        holder = config
        for step in filter(None, part.split(".")):
            if not hasattr(holder, step):
                setattr(holder, step, SimpleNamespace())
            holder = getattr(holder, step)
        assert key not in json.loads(settings_of(config))
        setattr(holder, name, "set")
        assert "set" == json.loads(settings_of(config))[key]

    @pytest.mark.parametrize(
        "name", ["disable_flashinfer_q_quantization", "use_prefill_query_quantization"]
    )
    def test_bits_of_queries_count(self, name):
        """R-05: of queries of eight bits and of sixteen the engine computes other blocks."""
        found = told(**{"": {"attention_config": AttentionConfig(**{name: True})}})
        assert found[f"attention_config.{name}"] is True

    def test_nothing_set_is_nothing_told(self, monkeypatch):
        """An engine that only has defaults of its own is named by nothing."""
        # A hybrid model on a CPU sets it for its whole process.
        monkeypatch.setitem(vars(envs), "VLLM_SSM_CONV_STATE_LAYOUT", None)
        assert {} == told()


class TestLength:
    @pytest.mark.parametrize(
        "kind", ["default", "linear", "llama3", "yarn", "deepseek_yarn"]
    )
    def test_length_that_decides_nothing_parts_no_engines(self, kind):
        """R-05: where factors come from the model's files alone, engines of different
        max_model_len share."""
        assert "length" not in model(max_model_len=4096, **rope(kind))

    @pytest.mark.parametrize("kind", ["longrope", "dynamic", "ntk", "of tomorrow"])
    def test_length_counts_where_factors_may_depend_on_it(self, kind):
        """R-05: it chooses between factors, or nobody knows that it does not."""
        assert 4096 == model(max_model_len=4096, **rope(kind))["length"]

    @pytest.mark.parametrize(
        "fields",
        [
            rope("default", model_type="llama4_text"),
            rope("default", dual_chunk_attention_config={}),
            rope("default") | {"multimodal_config": SimpleNamespace()},
            rope("default") | {"using_transformers_backend": lambda: True},
            {"hf_text_config": SimpleNamespace(model_type="gpt2")},
            {"hf_text_config": None},
            rope("default", rope_parameters={}),
            rope(
                "",
                rope_parameters={
                    "full_attention": {"rope_type": "longrope"},
                    "sliding_attention": {"rope_type": "default"},
                },
            ),
        ],
        ids=[
            *("temperature", "dual-chunk", "images", "foreign-code", "no-rope"),
            *("no-config", "empty", "one-kind-of-layer"),
        ],
    )
    def test_length_counts_where_models_look_at_it(self, fields):
        """R-05: models that look at the length themselves, or may."""
        assert 4096 == model(max_model_len=4096, **fields)["length"]

    def test_length_that_the_engine_finds_is_the_same_after_a_restart(self):
        """R-05: what fits into memory differs from start to start; factors are decided
        before, by the model alone."""
        fitted = rope("longrope") | {"original_max_model_len": -1}
        assert "auto" == model(max_model_len=4096, **fitted)["length"]

    def test_generation_configuration_counts_where_attention_reads_it(self):
        """R-05: Llama 4 takes the temperature of attention from it; sampling is free."""
        given = {"attn_temperature_tuning": True, "temperature": 0.5}
        llama4 = rope("default", model_type="llama4_text")
        over = {"override_generation_config": given}
        tuned = {"attn_temperature_tuning": True}
        assert tuned == model(**llama4, **over)["attention"]
        from_file = {"try_get_generation_config": lambda: given}
        assert tuned == model(**llama4, **from_file)["attention"]
        assert "attention" not in model(**rope("default"), **over)


class TestOthers:
    def test_draft_with_layers_counts_and_one_without_does_not(self):
        """R-05: a head that drafts has blocks in the same groups; n-grams have none."""

        def draft(method):
            speculative = SimpleNamespace(method=method, kv_cache_dtype="fp8")
            return told(**{"": {"speculative_config": speculative}})

        assert {"method": "mtp", "kv_cache_dtype": "fp8"} == draft("mtp")["draft"]
        assert "draft" not in draft("ngram")

    @pytest.mark.parametrize(
        ("given", "told_as"), [("auto", None), ("marlin", "marlin")]
    )
    def test_kernels_of_a_draft_count_where_they_were_chosen(self, given, told_as):
        """R-05: they replace the engine's in layers that draft."""
        speculative = SimpleNamespace(method="mtp", moe_backend=given)
        found = told(**{"": {"speculative_config": speculative}})["draft"]
        assert told_as == found.get("moe_backend")

    def test_loader_of_its_own_kind_tells_its_settings(self):
        """R-05: what they say may be which weights; how many threads read is no matter."""
        extra = {"model_loader_extra_config": {"pattern": "rank-{rank}"}}
        assert "loader" not in told(load_config=extra)
        other = told(load_config=extra | {"load_format": "sharded_state"})
        assert {"pattern": "rank-{rank}"} == other["loader"]

    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("VLLM_CPU_INT4_W4A8", "0", False),
            ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"bits": 4}', {"bits": 4}),
            ("VLLM_HUMMING_INPUT_QUANT_CONFIG", '{"dtype": "int8"}', {"dtype": "int8"}),
            ("VLLM_MARLIN_INPUT_DTYPE", "int8", "int8"),
            ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1", True),
            ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "Uniform", "uniform"),
            ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4", "INT4"),
            ("VLLM_DEEPEPLL_NVFP4_DISPATCH", "1", True),
            ("VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "1", True),
            ("VLLM_B12X_MOE_FP4_FORCE_A16", "1", True),
            (
                "VLLM_DISABLED_KERNELS",
                "CutlassNvFp4LinearKernel",
                ["CutlassNvFp4LinearKernel"],
            ),
            ("VLLM_FLOAT32_MATMUL_PRECISION", "medium", "medium"),
            ("VLLM_HUMMING_USE_F16_ACCUM", "1", True),
            ("VLLM_ROCM_FP8_MFMA_PAGE_ATTN", "1", True),
            ("VLLM_ROCM_USE_AITER", "1", True),
            ("VLLM_ROCM_USE_AITER_FP4BMM", "0", False),
            ("VLLM_ROCM_USE_AITER_FP8BMM", "0", False),
            ("VLLM_USE_DEEP_GEMM_E8M0", "0", False),
        ],
    )
    def test_what_variables_quantise_or_pack_counts(
        self, monkeypatch, name, text, value
    ):
        """R-05: the engine has no field for it: weights of four bits and of eight had equal keys."""
        monkeypatch.setitem(vars(envs), "VLLM_SSM_CONV_STATE_LAYOUT", None)
        monkeypatch.setenv(name, text)
        assert {"environment": {name: value}} == told()
        monkeypatch.delitem(envs.environment_variables, name)  # as a release without it
        assert {} == told()

    def test_kernels_that_somebody_has_chosen_count(self, monkeypatch):
        """R-05: of NVFP4 weights Marlin takes activations of sixteen bits, and CUTLASS of four."""
        monkeypatch.setitem(vars(envs), "VLLM_SSM_CONV_STATE_LAYOUT", None)

        def of(**chosen):
            return told(**{"": {"kernel_config": KernelConfig(**chosen)}})

        assert {} == of() == of(moe_backend="auto", sparse_indexer_topk_backend="torch")
        chosen = {
            "linear_backend": "cutlass",
            "linear_backend_per_quant": {"nvfp4_w4a16": "humming"},
            "moe_backend": "marlin",
        }
        assert {"kernels": chosen} == of(**chosen)
        assert {"kernels": {"moe_backend": "marlin"}} == of(moe_backend="marlin")

    def test_device_types_of_one_name_are_told_apart(self, monkeypatch):
        """R-05: AMD's device type is called cuda as well, and packs pages otherwise."""
        platform = SimpleNamespace(is_rocm=lambda: True, is_fp8_fnuz=lambda: True)
        monkeypatch.setattr("ucm.integration.vllm.identity.current_platform", platform)
        assert {"rocm": True, "fp8_fnuz": True} == told()["platform"]

    def test_types_of_npus_are_told_apart(self, monkeypatch):
        """R-05: of vllm-ascend's types some keep pages of the same size in another order, and
        a tier may be shared by machines with either."""
        kinds = enum.Enum("AscendDeviceType", ["A2", "_310P"])
        found = []
        for kind in kinds:
            utils = SimpleNamespace(get_ascend_device_type=lambda kind=kind: kind)
            monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
            found.append(told()["platform"])
        assert [{"ascend": "A2"}, {"ascend": "_310P"}] == found


class Color(enum.Enum):
    """Any enumeration."""

    RED = object()


@dataclasses.dataclass
class Part:
    """Any part of a configuration."""

    dtype: torch.dtype
    where: Path


class Opaque:
    """A value whose text is its address."""


class TestText:
    def test_values_are_the_same_in_every_process(self):
        """R-05: an order of words, an address or a number of an enumeration never is."""
        value = {
            "b": {"x", "y", "z"},
            "a": (Color.RED, Part(torch.float16, Path("/p"))),
            "c": json.loads("[1, 2.5, null, true]"),
            "d": LoadConfig.compute_hash,
        }
        expected = {
            "a": ["RED", {"dtype": "torch.float16", "where": "/p"}],
            "b": ["x", "y", "z"],
            "c": [1, 2.5, None, True],
            "d": "vllm.config.load.LoadConfig.compute_hash",
        }
        assert expected == model(hf_overrides=value)["hf_overrides"]

    @pytest.mark.parametrize("value", [lambda config: config, Opaque(), Opaque, len])
    def test_value_that_may_hide_another_is_refused(self, value):
        """R-05: two functions of one name may do different things, so that a name is no
        proof; the setting is named with the remedy."""
        with pytest.raises(ConfigError, match="may do something else") as caught:
            model(hf_overrides=value)
        assert "hf_overrides" == caught.value.key


class TestReusable:
    @pytest.mark.parametrize(
        ("parts", "key"),
        [
            ({"cache_config": {"calculate_kv_scales": True}}, "calculate_kv_scales"),
            ({"": {"diffusion_config": SimpleNamespace()}}, "diffusion_config"),
            (
                {
                    "model_config": {
                        "pooler_config": SimpleNamespace(seq_pooling_type="MEAN"),
                        "is_prefix_caching_supported": False,
                    }
                },
                "pooler_config",
            ),
        ],
        ids=["scales", "diffusion", "pooling"],
    )
    def test_blocks_that_nobody_may_use_are_refused(self, parts, key):
        """R-21: scales of one start, blocks that look ahead and pooling over all tokens
        are named with the remedy."""
        with pytest.raises(ConfigError, match="kv_connector=UCMConnector") as caught:
            check_reusable(an_engine(**parts))
        assert key == caught.value.key

    @pytest.mark.parametrize("part", ["aux_output_config", "model_config"])
    def test_experts_of_tokens_are_refused_where_tokens_are_loaded(self, part):
        """The engine raises at the first hit, which ends it, or tells experts of other tokens;
        one that only saves computes all of them."""

        def engine(is_on):
            config = an_engine()
            holder = vars(config).setdefault(part, SimpleNamespace())
            holder.enable_return_routed_experts = is_on
            return config

        check_reusable(engine(False))
        check_reusable(engine(True), loads=False)
        with pytest.raises(ConfigError, match="kv_role=kv_producer") as caught:
            check_reusable(engine(True))
        assert "enable_return_routed_experts" == caught.value.key

    @pytest.mark.parametrize(
        "more", [{"enable_hamming_sparse": True}, {"hamming_sparse": {"enabled": True}}]
    )
    def test_hashes_of_keys_are_refused_where_tokens_are_loaded(self, more):
        """vllm-ascend looks at the blocks whose hashes are near, and of those that are loaded
        it has other tokens' hashes; one that only saves has all."""
        off = {"hamming_sparse": {"enabled": False, "sparse_json_location": ""}}
        for plain in ({}, None, off):
            check_reusable(an_engine(**{"": {"additional_config": plain}}))
        engine = an_engine(**{"": {"additional_config": more}})
        check_reusable(engine, loads=False)
        with pytest.raises(ConfigError, match="kv_role=kv_producer") as caught:
            check_reusable(engine)
        assert "additional_config.enable_hamming_sparse" == caught.value.key

    def test_pooling_of_the_last_token_is_taken(self):
        """A model whose result is of its last token loses nothing by a hit."""
        pooler = SimpleNamespace(seq_pooling_type="LAST")
        check_reusable(an_engine(model_config={"pooler_config": pooler}))

    @pytest.mark.parametrize(
        ("cache_gb", "caches_prefixes", "media"),
        [(4, False, True), (0, True, True), (0, False, False)],
        ids=["processor", "prefixes", "text"],
    )
    def test_images_are_refused_where_no_cache_has_the_engine_hash_them(
        self, cache_gb, caches_prefixes, media
    ):
        """With neither of its caches the engine calls an image by its request's number,
        under which another start has another image; with one of them by its content."""
        found = SimpleNamespace(mm_processor_cache_gb=cache_gb) if media else None
        parts = {
            "model_config": {"multimodal_config": found},
            "cache_config": {"enable_prefix_caching": caches_prefixes},
        }
        check_reusable(an_engine(**parts))
        parts["model_config"]["multimodal_config"] = SimpleNamespace(
            mm_processor_cache_gb=0
        )
        parts["cache_config"]["enable_prefix_caching"] = False
        with pytest.raises(ConfigError, match="enable_prefix_caching") as caught:
            check_reusable(an_engine(**parts))
        assert "mm_processor_cache_gb" == caught.value.key
