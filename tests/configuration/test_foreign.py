# SPDX-License-Identifier: Apache-2.0
"""The keys of unified-cache-manager: translated, named, or refused."""

import pytest

from ucm.config import UCMConfig
from ucm.configuration.foreign import Equivalent, translate
from ucm.configuration.sources import load
from ucm.errors import ConfigError

EXAMPLE = """
ucm_connectors:
  - ucm_connector_name: "UcmPipelineStore"
    ucm_connector_config:
      store_pipeline: "Cache|Posix"
      storage_backends: "/mnt/test"
      io_direct: false
      cache_buffer_capacity_gb: 256
      timeout_ms: 30000
enable_event_sync: true
metrics_config_path: "/workspace/metrics_configs.yaml"
ucm_sparse_config:
  GSAOnDevice: {}
use_layerwise: true
hit_ratio: 0.9
"""
PREFIX = "ucm_connectors[0].ucm_connector_config."


def connector(name="UcmPipelineStore", **settings):
    """Return the peer's configuration with one store."""
    one = {"ucm_connector_name": name, "ucm_connector_config": settings}
    return {"ucm_connectors": [one]}


class TestTranslation:
    def test_the_peers_own_example_starts_and_says_its_equivalent(self, tmp_path):
        """S4-33: the file that its documentation ships is taken as it is; what is alike
        passes, what has an equivalent gets it, and what has none is named."""
        path = tmp_path / "ucm_config_example.yaml"
        path.write_text(EXAMPLE)
        read = load({"UCM_CONFIG_FILE": str(path)}, environment={})
        config = read.config
        assert (256 << 30, 30.0, True, 0.9) == (
            config.store.capacity,
            config.timeout.load,
            config.use_layerwise,
            config.hit_ratio,
        )
        assert {
            "store": {"type": "slab", "capacity": "256GiB"},
            "timeout": {"save": 30.0, "load": 30.0},
            "tiers": [{"type": "files", "path": "/mnt/test/ucm"}],
        } == read.translation.settings()
        assert {
            f"{PREFIX}io_direct",
            "metrics_config_path",
            "ucm_sparse_config",
        } == {each.theirs for each in read.translation.left_out}
        assert str(path) == read.origin("store.capacity")

    def test_the_equivalent_means_the_same(self, tmp_path):
        """Who writes what is printed gets what the foreign keys gave."""
        given = connector(cache_buffer_capacity_gb=1.5, waiting_queue_depth=7)
        read = load(given, environment={})
        again = load(read.translation.settings(), environment={})
        assert read.config == again.config
        assert not again.translation
        assert {"equivalent", "untranslated"} == read.translation.told().keys()

    def test_our_own_key_counts_beside_a_foreign_one(self):
        """Who gives both meant ours; the rest of the section stays."""
        given = {
            **connector(cache_buffer_capacity_gb=1, timeout_ms=2000),
            "store": {"capacity": "2GiB"},
        }
        config = load(given, environment={}).config
        assert (2 << 30, 2.0) == (config.store.capacity, config.timeout.save)

    @pytest.mark.parametrize(
        ("pipeline", "kind"),
        [
            ("Cache|Posix", "slab"),
            ("Cache|Ds3fs", "slab"),
            ("Posix", "slab"),
            ("Cache|Empty", "slab"),
            ("Empty", "null"),
            ("Fake", "null"),
        ],
    )
    def test_a_pipeline_that_keeps_nothing_keeps_nothing(self, pipeline, kind):
        """Its sizing stores stand for ours."""
        _, told = translate(connector(store_pipeline=pipeline))
        key = f"{PREFIX}store_pipeline"
        assert (Equivalent(key, "store.type", kind),) == told.equivalents

    def test_directory_of_the_peer_becomes_a_tier_of_files(self):
        """Blocks go where they went, into a directory of ours below; a second mount is
        named, and a store that keeps nothing has no tier."""
        given = connector(storage_backends="/mnt/a/:/mnt/b", posix_capacity_gb=10)
        values, told = translate(given)
        assert [{"type": "files", "path": "/mnt/a/ucm", "capacity": "10GiB"}] == values[
            "tiers"
        ]
        assert [f"{PREFIX}storage_backends (/mnt/b)"] == [
            each.theirs for each in told.left_out
        ]
        values, told = translate(
            connector(store_pipeline="Fake", storage_backends="/mnt/a")
        )
        assert "tiers" not in values
        assert f"{PREFIX}storage_backends" == told.left_out[0].theirs

    def test_an_old_file_has_the_connector_on_top(self):
        """What its first releases read is read, too."""
        values, told = translate(
            {
                "ucm_connector_name": "UcmNfsStore",
                "ucm_connector_config": {"timeout_ms": 1000},
            }
        )
        assert 1.0 == UCMConfig.from_mapping(values).timeout.load
        assert "ucm_connector_config.timeout_ms" == told.equivalents[1].theirs

    def test_settings_of_ours_alone_are_left_as_they_are(self):
        """Nothing is said of a translation where there was none."""
        given = {"store": {"capacity": 1}, "hit_ratio": 0.5}
        values, told = translate(given)
        assert given == values
        assert not told


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "key"),
        [
            (connector(cache_bufer_capacity_gb=1), f"{PREFIX}cache_bufer_capacity_gb"),
            (connector("UcmStore"), "ucm_connectors[0].ucm_connector_name"),
            (connector(None), "ucm_connectors[0].ucm_connector_name"),
            (connector(timeout_ms="long"), f"{PREFIX}timeout_ms"),
            (connector(timeout_ms=True), f"{PREFIX}timeout_ms"),
            (connector(timeout_ms=0), f"{PREFIX}timeout_ms"),
            (connector(timeout_ms=float("nan")), f"{PREFIX}timeout_ms"),
            (connector(timeout_ms=1e-9), "timeout.save"),
            (
                connector(waiting_queue_depth=float("inf")),
                f"{PREFIX}waiting_queue_depth",
            ),
            (connector(store_pipeline=["Cache"]), f"{PREFIX}store_pipeline"),
            (connector(storage_backends=""), f"{PREFIX}storage_backends"),
            (connector(storage_backends=["/a"]), f"{PREFIX}storage_backends"),
            (
                connector(storage_backends="/a", posix_capacity_gb="x"),
                f"{PREFIX}posix_capacity_gb",
            ),
            ({"ucm_connectors": []}, "ucm_connectors"),
            ({"ucm_connectors": "x"}, "ucm_connectors"),
            ({"ucm_connectors": [1]}, "ucm_connectors[0]"),
            (
                {"ucm_connectors": [*connector()["ucm_connectors"] * 2]},
                "ucm_connectors",
            ),
            (
                {"ucm_connectors": [{"ucm_connector_name": "UcmNfsStore", "other": 1}]},
                "ucm_connectors[0].other",
            ),
            (
                {
                    "ucm_connectors": [
                        {
                            "ucm_connector_name": "UcmNfsStore",
                            "ucm_connector_config": [1],
                        }
                    ]
                },
                "ucm_connectors[0].ucm_connector_config",
            ),
        ],
    )
    def test_what_the_peer_would_not_understand_either_is_refused(self, given, key):
        """X-09: a key that neither knows, or a value of the wrong kind, is an error with
        the name that stands in the file."""
        with pytest.raises(ConfigError) as caught:
            load(given, environment={})
        assert key == caught.value.key
