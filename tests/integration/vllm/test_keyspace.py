# SPDX-License-Identifier: Apache-2.0
"""What an engine stores under: equal where bytes may be shared, different elsewhere."""

import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import vllm

from tests.integration.vllm.kit import (
    DATA,
    cache_config,
    change_byte,
    engine_config,
    full,
    model_files,
    plain_cache,
)
from ucm.errors import ConfigError
from ucm.integration.vllm import keyspace
from ucm.integration.vllm.keyspace import check_hash_algorithm, keyspace_of
from ucm.integration.vllm.layout import layout_of
from ucm.integration.vllm.topology import topology_of


@pytest.fixture
def model(tmp_path):
    """Return a model directory with two weight files and other files beside them."""
    return model_files(tmp_path / "model")


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


class TestHashAlgorithm:
    @pytest.mark.parametrize("name", ["sha256", "sha256_cbor"])
    def test_portable_algorithm_is_taken(self, name):
        """Hashes of these are the same in every process."""
        check_hash_algorithm(name)

    def test_random_hashes_are_refused_with_the_setting_to_change(self):
        """Hits across processes work or fail loudly at start-up, with the remedy."""
        with pytest.raises(ConfigError) as caught:
            check_hash_algorithm("xxhash")
        assert "prefix_caching_hash_algo" == caught.value.key
        assert "--prefix-caching-hash-algo sha256" in caught.value.remedy
        assert "PYTHONHASHSEED" in caught.value.remedy

    def test_engine_whose_hashes_are_random_is_refused(self, monkeypatch):
        """Before vLLM 0.29 no algorithm is portable by itself; a seed helps there too."""
        monkeypatch.setattr(vllm, "__version__", "0.28.0")
        with pytest.raises(ConfigError, match="a random number") as caught:
            check_hash_algorithm("sha256")
        assert "PYTHONHASHSEED" == caught.value.key
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        check_hash_algorithm("sha256")

    def test_hash_seed_makes_any_algorithm_portable(self, monkeypatch):
        """A seed that is fixed for all processes is enough."""
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        check_hash_algorithm("xxhash")


def derive(config, cache=None, revision=""):
    """Return an engine's key space."""
    cache = cache or plain_cache()
    topology = topology_of(config.parallel_config, cache)
    return keyspace_of(config, layout_of(cache), topology.parallel, revision)


def settings(part, **changes):
    """Return a change of some fields of one part of an engine's configuration."""

    def change(config):
        for name, value in changes.items():
            assert hasattr(getattr(config, part), name)
            setattr(getattr(config, part), name, value)

    return change


CHANGES = {
    "dtype": (settings("model_config", dtype=torch.bfloat16), "kv_dtype"),
    "quantization": (settings("model_config", quantization="fp8"), "kv_dtype"),
    "overrides": (
        settings("model_config", hf_overrides={"rope_theta": 1}),
        "settings",
    ),
    "dummy": (settings("load_config", load_format="dummy"), "weights"),
    "cache_dtype": (settings("cache_config", cache_dtype="fp8"), "kv_dtype"),
    "hash": (
        settings("cache_config", prefix_caching_hash_algo="sha256_cbor"),
        "hash_algorithm",
    ),
    "tp": (settings("parallel_config", tensor_parallel_size=2), "parallel"),
    "pp": (settings("parallel_config", pipeline_parallel_size=2), "parallel"),
    "dcp": (settings("parallel_config", decode_context_parallel_size=2), "parallel"),
    "pcp": (settings("parallel_config", prefill_context_parallel_size=2), "parallel"),
    "device": (settings("device_config", device_type="cuda"), "engine"),
}


class TestKeyspace:
    def test_files_written_since_an_engine_began_are_refused(self, model, monkeypatch):
        """R-05: an engine in a process of its own has no name for weights that were written
        while it started, as it may have loaded those of before."""
        monkeypatch.setattr(keyspace, "engine_began_ns", {"EngineCore": 0}.get)
        with pytest.raises(ConfigError, match="were changed while the engine was"):
            derive(engine_config(str(model)))

    def test_model_in_another_place_is_equal(self, model, tmp_path):
        """Where a model lies is not what it is: a copy under the same name shares."""
        copy = tmp_path / "elsewhere" / "model"
        shutil.copytree(model, copy)
        first, second = map(derive, map(engine_config, (str(model), str(copy))))
        assert {} == first.diff(second)
        assert first.digest == second.digest

    @pytest.mark.parametrize("name", CHANGES)
    def test_each_setting_moves_its_field_and_the_digest(self, model, name):
        """X-08: whatever decides the bytes makes another key space, in its field."""
        change, field = CHANGES[name]
        plain, changed = (engine_config(str(model)) for _ in range(2))
        change(changed)
        first, second = derive(plain), derive(changed)
        assert {field} == set(first.diff(second))
        assert first.digest != second.digest

    def test_cache_shape_moves_the_layout(self, model):
        """X-08: another block size is another layout and another hash length."""
        plain = derive(engine_config(str(model)))
        other = derive(engine_config(str(model)), cache_config((["a", "b"], full(32))))
        assert {"layout", "block_tokens"} == set(plain.diff(other))

    def test_hash_seed_moves_the_hash_algorithm(self, model, monkeypatch):
        """X-08: block hashes under another seed are others."""
        plain = derive(engine_config(str(model)))
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        assert {"hash_algorithm"} == set(plain.diff(derive(engine_config(str(model)))))

    def test_engine_release_moves_the_engine(self, model, monkeypatch):
        """X-08: another minor release may lay out pages in another way."""
        plain = derive(engine_config(str(model)))
        monkeypatch.setattr(vllm, "__version__", "0.33.1")
        assert {"engine"} == set(plain.diff(derive(engine_config(str(model)))))

    def test_changed_weights_move_the_weights(self, model):
        """X-08: the same name over other weights shares nothing."""
        plain = derive(engine_config(str(model)))
        change_byte(model / "one.safetensors", DATA)
        assert {"weights"} == set(plain.diff(derive(engine_config(str(model)))))

    def test_weights_of_a_draft_count(self, model, tmp_path):
        """R-05: a head that drafts keeps blocks beside the model's, of weights of its
        own; one that uses the model's files adds nothing."""
        draft = model_files(tmp_path / "draft")

        def drafting(path):
            config = engine_config(str(model))
            config.speculative_config = SimpleNamespace(
                method="eagle",
                draft_model_config=engine_config(str(path)).model_config,
            )
            return derive(config)

        plain, first = drafting(model), drafting(draft)
        assert {"weights"} == set(plain.diff(first))
        change_byte(draft / "one.safetensors", DATA)
        assert {"weights"} == set(first.diff(drafting(draft)))

    def test_model_of_object_storage_is_called_by_its_address(self, model):
        """R-06: the engine puts its JSON into a directory of another name."""
        config = engine_config("/tmp/streamed/1a2b")
        config.model_config.model_weights = "s3://bucket/llama"
        assert "llama" == derive(config, revision="r1").model

    def test_operators_name_stands_for_the_weights(self, model):
        """A named revision is not derived from files, but still covers overrides."""
        named = partial(derive, revision="r1")
        plain = named(engine_config(str(model)))
        change_byte(model / "one.safetensors", DATA)
        assert {} == plain.diff(named(engine_config(str(model))))
        changed = engine_config(str(model))
        changed.model_config.hf_overrides = {"rope_theta": 1}
        assert {"settings"} == set(plain.diff(named(changed)))
        other = derive(engine_config(str(model)), revision="r2")
        assert {"weights"} == set(plain.diff(other))

    def test_weights_that_cannot_be_told_apart_are_refused(self, monkeypatch, tmp_path):
        """A model without files here is refused with the setting that names it."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ConfigError) as caught:
            derive(engine_config("nobody/has-this-model"))
        assert "weights_revision" == caught.value.key

    def test_model_of_the_hub_is_found_in_its_cache(self, model, monkeypatch):
        """A model that is given by name is told apart by the files of its snapshot."""
        monkeypatch.setattr(
            "huggingface_hub.try_to_load_from_cache",
            lambda *_, **__: str(model / "config.json"),
        )
        by_name = derive(engine_config("somebody/model"))
        by_path = derive(engine_config(str(model)))
        assert {} == by_name.diff(by_path)
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")  # weights are not that cache's
        with pytest.raises(ConfigError, match="has somebody/model read from") as caught:
            derive(engine_config("somebody/model"))
        assert "weights_revision" == caught.value.key
        assert "r1" == derive(engine_config("somebody/model"), revision="r1").weights
        assert {} == by_path.diff(derive(engine_config(str(model))))
