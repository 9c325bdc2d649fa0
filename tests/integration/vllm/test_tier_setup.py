# SPDX-License-Identifier: Apache-2.0
"""Which engines a tier of ours is taken by, and what its keys say of them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from scripts.pages import ROOT
from tests.integration.vllm.kit import (
    cache_config,
    engine_config,
    full,
    plain_cache,
    state,
)
from tests.integration.vllm.tier_kit import (
    CHUNK,
    extra_of,
    make_manager,
    offloading_config,
    slab,
)
from ucm.configuration.sources import load
from ucm.errors import ConfigError, LayoutError
from ucm.integration.vllm.setup import Setup
from ucm.integration.vllm.tier import UCMTier
from ucm.integration.vllm.tier_setup import TierSetup


@pytest.fixture
def vllm_config(tmp_path: Path) -> SimpleNamespace:
    """An engine's configuration with a tier of ours."""
    return engine_config("m", **extra_of(slab(tmp_path / "slab"), 4))


def setup_of(
    vllm_config: SimpleNamespace,
    kv_cache_config: Any = None,
    changes: dict[str, Any] | None = None,
    **ours: object,
) -> TierSetup:
    """Derive as a tier does that vLLM's connector has made."""
    kv_cache_config = kv_cache_config or plain_cache()
    spec = TieringOffloadingSpec(offloading_config(vllm_config, **(changes or {})))
    return TierSetup.of(spec, CHUNK, {"weights_revision": "r1", **ours})


class TestRefused:
    @pytest.mark.parametrize(
        ("part", "value"),
        [
            ("lora_config", SimpleNamespace()),
            ("weight_transfer_config", SimpleNamespace()),
            ("diffusion_config", SimpleNamespace()),
        ],
    )
    def test_engine_whose_keys_do_not_say_enough(
        self, vllm_config: SimpleNamespace, part: str, value: object
    ) -> None:
        """S3: it is refused by the setting's name, not served at a risk."""
        setattr(vllm_config, part, value)
        with pytest.raises(ConfigError) as caught:
            setup_of(vllm_config)
        assert part == caught.value.key
        assert "UCMConnector" in caught.value.remedy

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("pipeline_parallel_size", 2),
            ("nnodes_within_dp", 2),
            ("distributed_executor_backend", "ray"),
        ],
    )
    def test_ranks_that_the_tier_is_not_told_of(
        self, vllm_config: SimpleNamespace, name: str, value: object
    ) -> None:
        """Their parts of a chunk could be others than they were."""
        setattr(vllm_config.parallel_config, name, value)
        with pytest.raises(ConfigError) as caught:
            setup_of(vllm_config)
        assert name.startswith(caught.value.key)

    def test_hashes_that_differ_by_process(self, vllm_config: SimpleNamespace) -> None:
        """As with the connector."""
        vllm_config.cache_config.prefix_caching_hash_algo = "xxhash"
        with pytest.raises(ConfigError, match="xxhash"):
            setup_of(vllm_config)

    def test_layers_that_cannot_be_mapped(self, vllm_config: SimpleNamespace) -> None:
        """As with the connector."""
        with pytest.raises(LayoutError):
            setup_of(vllm_config, cache_config((["a"], state(mode="none"))))

    @pytest.mark.parametrize("release", ["0.31.0", "0.33.0"])
    def test_release_whose_tiers_nobody_tried(
        self,
        vllm_config: SimpleNamespace,
        monkeypatch: pytest.MonkeyPatch,
        release: str,
    ) -> None:
        """The engine calls this interface experimental."""
        monkeypatch.setattr(vllm, "__version__", release)
        with pytest.raises(ConfigError, match="not tried"):
            setup_of(vllm_config)

    def test_tier_that_is_made_by_somebody_else(self) -> None:
        """Nobody says then whose blocks these are; equal settings are no proof."""
        extra = extra_of({}, 4)
        spec = TieringOffloadingSpec(offloading_config(engine_config("m", **extra)))
        vllm_config = engine_config("m", **extra)
        kv_cache_config = plain_cache()
        with pytest.raises(ConfigError, match="OffloadingConnector"):
            TierSetup.of(spec, CHUNK, {})
        del vllm_config, kv_cache_config

    def test_unknown_setting(self, vllm_config: SimpleNamespace) -> None:
        """What is spelt wrong is named, with its place."""
        with pytest.raises(ConfigError, match="secondary_tiers"):
            setup_of(vllm_config, stroe={"path": "x"})

    def test_refusal_leaves_nothing(self, tmp_path: Path) -> None:
        """The engine's start fails, and no store was made."""
        vllm_config = engine_config("m", **extra_of(slab(tmp_path / "slab"), 4))
        vllm_config.lora_config = SimpleNamespace()
        spec = TieringOffloadingSpec(offloading_config(vllm_config))
        with pytest.raises(ConfigError):
            make_manager(vllm_config, plain_cache(), spec)
        assert not (tmp_path / "slab").exists()


class TestKeys:
    def test_are_equal_for_an_engine_that_starts_again(
        self, vllm_config: SimpleNamespace
    ) -> None:
        """Whatever differs from start to start is not in them."""
        assert setup_of(vllm_config).keyspace == setup_of(vllm_config).keyspace

    def test_are_never_those_of_the_connector(
        self, vllm_config: SimpleNamespace
    ) -> None:
        """A chunk has other bytes than a block, also where it is of one block."""
        ours = setup_of(vllm_config).keyspace
        vllm_config.kv_transfer_config.kv_connector_extra_config = {
            "weights_revision": "r1"
        }
        theirs = Setup.of(vllm_config, plain_cache()).keyspace
        assert {"layout"} == set(ours.diff(theirs))

    @pytest.mark.parametrize(
        "change",
        [
            {"worker_kv_bytes_per_block": 4096},
            {"canonical_layout": True},
            {"kv_cache_layout": "HND"},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_say_where_in_a_chunk_each_byte_is(
        self, vllm_config: SimpleNamespace, change: dict[str, Any]
    ) -> None:
        """How vLLM lays out its CPU tier."""
        ours = setup_of(vllm_config).keyspace
        assert ours.digest != setup_of(vllm_config, changes=change).keyspace.digest

    def test_say_which_layers_there_are(self, vllm_config: SimpleNamespace) -> None:
        """Names, kinds and sizes of the engine's pages, as in the connector's."""
        ours = setup_of(vllm_config).keyspace
        other = cache_config((["a", "b", "c"], full()))
        assert ours.digest != setup_of(vllm_config, other).keyspace.digest


def test_page_has_settings_that_are_taken() -> None:
    """What a reader copies names our class, and vLLM and we know all of it."""
    page = (ROOT / "docs" / "tiering.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    given = json.loads(text)
    assert "OffloadingConnector" == given["kv_connector"]
    extra = given["kv_connector_extra_config"]
    assert TieringOffloadingSpec is OffloadingSpecFactory.get_spec_cls(extra)
    (entry,) = extra["secondary_tiers"]
    assert UCMTier is SecondaryTierFactory.get_tier_class(entry)
    ours = {name: entry[name] for name in entry.keys() - {"type", "module_path"}}
    config = load(ours).config
    assert 8 << 30 == config.store.capacity
    assert ["512GiB"] == [tier["capacity"] for tier in config.tiers]
