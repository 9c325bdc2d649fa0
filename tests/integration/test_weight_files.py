# SPDX-License-Identifier: Apache-2.0
"""What weights are called: equal where the engine reads the same, or refused."""

import shutil
from types import SimpleNamespace

import pytest

from tests.integration.vllm.kit import DATA, change_byte, engine_config, model_files
from ucm.errors import ConfigError
from ucm.integration.changes import last_change_ns
from ucm.integration.weight_files import (
    config_digest,
    is_changed_since,
    weights_digest,
    weights_name,
)


@pytest.fixture
def model(tmp_path):
    """Return a model directory with two weight files and other files beside them."""
    return model_files(tmp_path / "model")


class TestWeightsDigest:
    def test_copy_in_another_directory_is_equal(self, model, tmp_path):
        """The same files elsewhere, with other times, have the same digest."""
        copy = tmp_path / "elsewhere" / "copy"
        shutil.copytree(model, copy, copy_function=shutil.copyfile)
        assert weights_digest(model) == weights_digest(copy)

    @pytest.mark.parametrize(
        "header",
        [
            b'{"\xff": 0}',
            b'{"a": {"data_offsets": 5}}',
            b'{"a": {"data_offsets": [-99999, -99999]}}',
            b'{"a": {"data_offsets": [0, 99999999999999999999]}}',
            b'{"a": {"x": %b}}' % (b"[" * 9999 + b"]" * 9999),
        ],
        ids=["text", "number", "before", "far", "deep"],
    )
    def test_header_of_something_else_is_none(self, model, header):
        """The file counts as others that are no safetensors do; the engine's start failed."""
        text = len(header).to_bytes(8, "little") + header
        before = weights_digest(model)
        (model / "odd.safetensors").write_bytes(text)
        assert before != weights_digest(model)

    def test_files_beside_the_weights_do_not_count(self, model):
        """What decides no byte of the cache may change freely."""
        before = weights_digest(model)
        for name in ("README.md", "tokenizer_config.json", "chat_template.json"):
            (model / name).write_text("changed")
        (model / "generation_config.json").write_text("{}")
        assert before == weights_digest(model)

    @pytest.mark.parametrize(
        "name", ["preprocessor_config.json", "params.json", "modeling_own.py"]
    )
    def test_files_that_say_what_is_computed_count(self, model, name):
        """R-05: how an image is cut, another format's configuration, or the model's own
        code make another digest, of the configuration alone as well."""
        before = weights_digest(model), config_digest(model)
        (model / name).write_text("{}")
        after = weights_digest(model), config_digest(model)
        assert [True, True] == [a != b for a, b in zip(before, after, strict=True)]

    @pytest.mark.parametrize(
        "change",
        [
            lambda path: change_byte(path / "one.safetensors", DATA),
            lambda path: change_byte(path / "one.safetensors", DATA + (1 << 20) - 1),
            lambda path: change_byte(path / "one.safetensors", DATA + (2 << 20)),
            lambda path: change_byte(path / "one.safetensors", DATA + (3 << 20) + 3),
            lambda path: change_byte(path / "one.safetensors", DATA - 3),
            lambda path: change_byte(path / "odd.safetensors", 50),
            lambda path: change_byte(path / "two.bin", 50),
            lambda path: (path / "two.bin").write_bytes(b"\1" * 101),
            lambda path: (path / "two.bin").rename(path / "zwei.bin"),
            lambda path: (path / "two.bin").unlink(),
            lambda path: (path / "three.bin").write_bytes(b""),
            lambda path: (path / "config.json").write_text('{"num_layers": 3}'),
            lambda path: (path / "config.json").unlink(),
        ],
        ids=[
            *("begin-a", "end-a", "middle-b", "small-c", "header", "no-header"),
            *("other-format", "size", "renamed", "gone", "added"),
            *("config", "no-config"),
        ],
    )
    def test_changed_weights_are_others(self, model, change):
        """X-08: a byte at a tensor's beginning, middle or end, a header, a name, a
        size, a byte of another format or the configuration makes another digest."""
        before = weights_digest(model)
        change(model)
        assert before != weights_digest(model)

    @pytest.mark.parametrize("below", ["audio_tokenizer", "whisper-large-v3"])
    def test_weights_in_a_directory_below_are_others(self, model, below):
        """R-05: MiMo-Audio and Kimi-Audio read weights from a directory within the model's, and
        no engine from other ones."""
        bare = weights_digest(model)
        model_files(model / "checkpoint-500")
        assert bare == weights_digest(model)
        model_files(model / below)
        first = weights_digest(model)
        change_byte(model / below / "one.safetensors", DATA)
        assert 3 == len({bare, first, weights_digest(model)})
        began = last_change_ns(model / below, (model / below).iterdir())
        assert is_changed_since(model, began)


def named(path, revision="", *, load_format="auto", extra=(), began_ns=None, **changes):
    """Return what the weights of an engine with these settings are called."""
    config = engine_config(str(path))
    config.model_config.hf_config = None
    for name, value in changes.items():
        assert hasattr(config.model_config, name)
        setattr(config.model_config, name, value)
    config.load_config.load_format = load_format
    for name, value in extra:
        setattr(config.load_config, name, value)
    return weights_name(config.model_config, config.load_config, revision, began_ns)


class TestWrittenMeanwhile:
    def test_files_of_before_are_named(self, model):
        """R-05: an engine names the files that lay there as it began."""
        later = last_change_ns(model, model.iterdir()) + 1
        assert named(model) == named(model, began_ns=later)
        assert not is_changed_since(model, later)

    def test_files_that_were_written_since_are_refused(self, model):
        """R-05: a checkpoint that was written over the one that an engine may have loaded would
        give its name to the blocks of the other."""
        began = last_change_ns(model, model.iterdir())
        with pytest.raises(ConfigError, match="were changed while the engine was"):
            named(model, began_ns=began)
        assert "r1" == named(model, "r1", began_ns=began)

    def test_files_that_decide_nothing_may_be_written(self, model):
        """R-05: what is written beside the weights keeps no engine from starting."""
        began = last_change_ns(model, model.iterdir()) + 1
        readme = model / "README.md"
        while readme.stat().st_ctime_ns < began:  # the file system's clock has ticks
            readme.write_text("news")
        assert named(model) == named(model, began_ns=began)


class TestName:
    def test_same_files_read_in_another_way_are_equal(self, model):
        """R-05: a loader that reads the same tensors parts no engines."""
        formats = ("auto", "safetensors", "runai_streamer", "fastsafetensors")
        assert 1 == len({named(model, load_format=one) for one in formats})
        assert named(model) != named(model, load_format="pt")

    def test_dummy_weights_are_others_by_seed_and_configuration(self, model):
        """R-05: random weights are neither the real ones nor those of another seed; two
        engines that draw the same share, and files of weights do not count."""
        dummy = named(model, load_format="dummy")
        assert dummy not in (named(model), named(model, load_format="dummy", seed=1))
        change_byte(model / "one.safetensors", DATA)
        assert dummy == named(model, load_format="dummy")
        (model / "config.json").write_text("{}")
        assert dummy != named(model, load_format="dummy")
        assert named(model, "r1") != named(model, "r1", load_format="dummy")

    def test_dummy_weights_need_no_files(self, model):
        """R-06: of weights that are drawn there is nothing to see."""
        for path in (*model.glob("*.safetensors"), *model.glob("*.bin")):
            path.unlink()
        assert named(model, load_format="dummy").startswith("dummy/0/")

    def test_configuration_from_elsewhere_counts(self, model, tmp_path):
        """R-05: hf_config_path decides what is done with the weights."""
        other = model_files(tmp_path / "other")
        first = named(model, hf_config_path=str(other))
        assert first != named(model)
        (other / "config.json").write_text("{}")
        assert first != named(model, hf_config_path=str(other))

    @pytest.mark.parametrize("part", ["text_model_id", "audio_model_id"])
    def test_weights_of_parts_that_lie_apart_count(self, model, tmp_path, part):
        """R-05: Ultravox reads text and sound from directories that its configuration names."""
        other = model_files(tmp_path / "other")
        config = SimpleNamespace(**{part: str(other)})
        first = named(model, hf_config=config)
        assert first != named(model)
        change_byte(other / "one.safetensors", DATA)
        assert first != named(model, hf_config=config)
        began = last_change_ns(other, other.iterdir())
        with pytest.raises(ConfigError, match=f"{other} were changed"):
            named(model, hf_config=config, began_ns=began)
        with pytest.raises(ConfigError, match="no directory holds s3://bucket/part"):
            named(model, hf_config=SimpleNamespace(**{part: "s3://bucket/part"}))

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"model_weights": "s3://bucket/model"}, "they lie in s3://bucket/model"),
            ({"load_format": "tensorizer"}, "load_format=tensorizer"),
            ({"load_format": "ipc_cache"}, "load_format=ipc_cache"),
            ({"load_format": "of_a_plugin"}, "load_format=of_a_plugin"),
            ({"hf_config_path": "/not/there"}, "no directory holds /not/there"),
        ],
        ids=["object-storage", "tensorizer", "daemon", "plugin", "configuration"],
    )
    def test_hidden_weights_need_a_name(self, model, change, problem):
        """R-06: where weights cannot be seen, the setting that names them is required,
        and said; with it, it is the name."""
        with pytest.raises(ConfigError, match=problem) as caught:
            named(model, **change)
        assert "weights_revision" == caught.value.key
        assert "weights_revision" in caught.value.remedy
        assert "r1" == named(model, "r1", **change)

    def test_directory_without_weights_needs_a_name(self, model):
        """R-06: a directory of which only the JSON is there tells nothing."""
        for path in (*model.glob("*.safetensors"), *model.glob("*.bin")):
            path.unlink()
        with pytest.raises(ConfigError, match=f"{model} holds none") as caught:
            named(model)
        assert "weights_revision" == caught.value.key

    @pytest.mark.parametrize("name", ["owner/repo:Q4_K_M", "s3://bucket/model", "file"])
    def test_what_is_no_directory_needs_a_name(self, model, name):
        """R-06, R-21: GGUF by repository or by file, and an address, are named with the
        remedy."""
        path = model / "model.gguf" if name == "file" else name
        (model / "model.gguf").write_bytes(b"GGUF")
        with pytest.raises(ConfigError, match="no directory holds them") as caught:
            named(path)
        assert "weights_revision" == caught.value.key

    def test_model_of_the_hub_is_found_where_the_engine_put_it(
        self, model, tmp_path, monkeypatch
    ):
        """R-05: download_dir is asked before the cache of the hub, and a configuration
        there without weights does not stand for them. What an engine may have downloaded
        itself since it began is well."""
        asked = []
        shutil.copytree(model, tmp_path / "bare")
        for path in (tmp_path / "bare").glob("*.*"):
            if path.suffix in (".safetensors", ".bin"):
                path.unlink()

        def look(name, file, cache_dir, revision):
            asked.append(cache_dir)
            found = model if cache_dir == "/down" else tmp_path / "bare"
            return str(found / file) if file == "config.json" else None

        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", look)
        extra = [("download_dir", "/down")]
        assert named(model) == named("somebody/model", extra=extra, began_ns=0)
        assert ["/down"] == asked
        with pytest.raises(ConfigError, match="holds none"):
            named("somebody/model")
