# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused when the engine starts, with key, value and remedy."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm

from tests.e2e import models
from tests.e2e.connector import ucm_config
from tests.e2e.engine import in_process_engine
from ucm.errors import ConfigError, LayoutError
from ucm.stores.slab import SlabStore


def start(model: Path, config: dict[str, Any], **overrides: object) -> None:
    """Start an engine, which is expected to fail."""
    with in_process_engine(model, kv_transfer_config=config, **overrides):
        pytest.fail("the engine started")


def change(config: dict[str, Any], **extra: object) -> dict[str, Any]:
    """Return a configuration with other extra settings."""
    merged = config["kv_connector_extra_config"] | extra
    return config | {"kv_connector_extra_config": merged}


class TestSettings:
    @pytest.mark.parametrize(
        ("extra", "named"),
        [
            ({"stroe": {}}, r"stroe=.*unknown key.*Did you mean store"),
            ({"store": {"capacity": True}}, r"store\.capacity=True.*not a size"),
            ({"queue": {"window": "4"}}, r"queue\.window='4'.*str is not int"),
            ({"timeout": {"load": 0}}, r"timeout\.load=0.*at least"),
            ({"store": {"type": "redisk"}}, r"store\.type='redisk'.*Registered"),
            ({"store": {"type": "memory"}}, r"store\.type='memory'.*not shared"),
        ],
        ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
    )
    def test_wrong_setting_stops_the_start(
        self, llama: Path, tmp_path: Path, extra: dict[str, Any], named: str
    ) -> None:
        """X-09: an unknown, ill-typed or out of range key is named with its remedy."""
        with pytest.raises(ConfigError, match=named):
            start(llama, change(ucm_config(tmp_path / "slab"), **extra))

    def test_random_block_hashes_are_refused(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hashes that differ per process would never hit: the setting is named."""
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        config = ucm_config(tmp_path / "slab")
        with pytest.raises(ConfigError, match=r"prefix_caching_hash_algo.*PYTHONHASH"):
            start(llama, config, prefix_caching_hash_algo="xxhash")

    def test_engine_of_another_version_is_refused(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A release that is newer than all that are known, and differs from them, is named
        with each difference and the releases that are known."""
        monkeypatch.setattr(vllm, "__version__", "0.99.1")
        with pytest.raises(ConfigError, match=r"vllm='0\.99\.1'.*is gone.*0\.33"):
            start(llama, ucm_config(tmp_path / "slab"))


class TestStore:
    @pytest.mark.parametrize(
        ("spoil", "named"),
        [
            (lambda path: path.write_text(""), r"store\.path.*slab"),
            (
                lambda path: shutil.rmtree(path.parent),
                r"store\.path.*does not exist",
            ),
            (
                lambda path: (path.mkdir(), path.chmod(0o777)),
                r"store\.path.*everybody may write",
            ),
        ],
        ids=["a file", "no parent", "open to all"],
    )
    def test_unusable_path_is_refused(
        self,
        llama: Path,
        tmp_path: Path,
        spoil: Callable[[Path], object],
        named: str,
    ) -> None:
        """A path that is no directory of ours is named with what is wrong."""
        slab = tmp_path / "place" / "slab"
        slab.parent.mkdir()
        spoil(slab)
        with pytest.raises(ConfigError, match=named):
            start(llama, ucm_config(slab, log={"level": "off"}))

    def test_capacity_beyond_the_file_system_is_refused(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """X-12: the arithmetic is told before anything is allocated, and nothing is
        left behind."""
        slab = tmp_path / "s"
        with pytest.raises(ConfigError, match=r"store\.capacity.*needed.*free"):
            start(llama, ucm_config(slab, "40TiB", log={"level": "off"}))
        assert not slab.exists()

    def test_capacity_below_one_block_is_refused(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """A slab that holds no block is named with the size of one."""
        with pytest.raises(ConfigError, match=r"store\.capacity"):
            start(llama, ucm_config(tmp_path / "slab", capacity=1000))

    def test_slab_of_another_schema_is_refused(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """A slab that another release wrote is left alone, and named."""
        path = tmp_path / "slab"
        SlabStore(path=str(path), capacity_bytes=1 << 20, block_bytes=4096).close()
        manifest = path / "slab.json"
        text = re.sub(r'"schema":\d+', '"schema":99', manifest.read_text())
        manifest.write_text(text)
        with pytest.raises(ConfigError, match=r"store\.path.*(schema|version)"):
            start(llama, ucm_config(path, capacity="1MiB"))


class TestModels:
    def test_encoder_is_refused(self, tmp_path: Path) -> None:
        """R-21: a model without a KV cache is named as such, with the remedy."""
        with pytest.raises(LayoutError, match=r"no KV cache.*encoder-only.*Serve this"):
            start(
                models.make_model(models.BERT),
                ucm_config(tmp_path / "slab"),
                runner="pooling",
                max_model_len=512,
                load_format="dummy",
                hf_overrides={"architectures": ["BertModel"], "is_decoder": False},
            )

    def test_weights_that_cannot_be_seen_are_refused(
        self, llama: Path, tmp_path: Path
    ) -> None:
        """R-06: a loader that is not known to read the directory's files is named, with
        the setting that stands for the weights; with it, the engine starts."""
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        register_model_loader("from_elsewhere")(type("Any", (DummyModelLoader,), {}))
        config = ucm_config(tmp_path / "slab")
        with pytest.raises(ConfigError, match=r"weights_revision.*from_elsewhere"):
            start(llama, config, load_format="from_elsewhere")
        named = change(config, weights_revision="r1")
        with in_process_engine(
            llama, kv_transfer_config=named, load_format="from_elsewhere"
        ):
            pass

    @pytest.mark.parametrize(
        ("recipe", "options", "named"),
        [
            (models.MAMBA2, {"enable_prefix_caching": False}, r"MambaSpec.*align"),
            (
                models.LLAMA4,
                {},
                r"ChunkedLocalAttentionSpec.*--disable-hybrid-kv-cache-manager",
            ),
        ],
        ids=["states without a block's end", "attention within chunks"],
    )
    def test_model_that_cannot_be_restored_is_refused(
        self,
        tmp_path: Path,
        recipe: models.Recipe,
        options: dict[str, Any],
        named: str,
    ) -> None:
        """A KV cache that cannot be restored safely is named by group and kind, with
        the options under which it can."""
        with pytest.raises(LayoutError, match=named):
            start(models.make_model(recipe), ucm_config(tmp_path / "slab"), **options)
