# SPDX-License-Identifier: Apache-2.0
"""Which releases of the engine are taken, and what each looks like through ``compat``."""

from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from scripts.pages import read, rewrite
from tests.integration.vllm.engine_api import VERSIONS, api_of, made
from ucm.errors import LayoutError
from ucm.integration.vllm import compat
from ucm.integration.vllm.compat import engine_name

MEMBERS = {
    "packed_blocks": "KVCacheTensor.block_stride",
    "layer_strides": "KVCacheTensor.layer_stride",
    "fixed_hashes": "DEFAULT_NONE_HASH_SEED",
    "layout_name": "KVCacheConfig.kv_cache_layout",
    "transfer_flags": "KVCacheSpec.prefix_cacheable",
    "host_resident": "KVCacheTensor.host_resident",
    "block_state": "KVConnectorBlockState.get_block_ids",
    "failed_requests": "KVConnectorOutput.failed_recving",
    "dcp_sharded": "KVCacheSpec.dcp_sharded",
    "hash_block_size": "KVCacheConfig.hash_block_size",
    "hit_sources": "CacheHitSource",
    "tp_replicas": "KVCacheConfig.kv_tp_replicas",
    "sleep_hooks": "KVConnectorBase_V1.unregister_kv_caches",
}
"""A name of the engine's for each feature that has one."""


@pytest.fixture
def running(monkeypatch):
    """Return a function that makes another release the installed one."""
    return lambda version: monkeypatch.setattr(vllm, "__version__", version)


class TestEngineName:
    def test_name_on_a_gpu_is_release_and_device(self, running):
        """Patches of a minor release share; its device is part of it."""
        running("0.32.7")
        assert "vllm/0.32/cuda" == engine_name("cuda")

    @pytest.mark.parametrize("what", ["_is_amx_tile_supported", "_is_avx512_supported"])
    def test_instruction_set_is_part_of_a_cpu_engine(self, monkeypatch, what):
        """CPU kernels pack pages by instruction set; bytes of another do not fit."""
        names = []
        for answer in (False, True):
            monkeypatch.setattr(torch.cpu, what, lambda answer=answer: answer)
            names.append(engine_name("cpu"))
        assert 2 == len(set(names))


class TestFeatures:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize(("feature", "member"), MEMBERS.items())
    def test_release_has_what_the_table_says(self, running, version, feature, member):
        """Each line of the table agrees with the sources of each release."""
        running(version)
        assert (member in api_of(version)) == compat.has(feature)

    def test_every_feature_is_looked_at(self):
        """Features without a name are what an engine does, not what it has."""
        nameless = {"saves_when_idle", "late_loads", "late_saves", "whole_prefill"}
        assert nameless == compat.FEATURES.keys() - MEMBERS.keys()
        first, last = compat.SUPPORTED
        assert all(first < one.since <= last for one in compat.FEATURES.values())


def tensors(version, **values):
    """Return a configuration with one ``KVCacheTensor`` for each of two layers."""
    shared = [["a"], ["b"]]
    return made(
        version,
        "KVCacheConfig",
        kv_cache_layout="LBHNC",
        kv_cache_groups=[],
        hash_block_size=16,
        kv_cache_tensors=[
            made(
                version,
                "KVCacheTensor",
                size=1024,
                shared_by=names,
                layers=names,
                layer_stride=512,
                offset=512 * at,
                host_resident=False,
                block_stride=values.get("block_stride", 0),
            )
            for at, names in enumerate(shared)
        ],
    )


class TestPlaces:
    @pytest.mark.parametrize("version", VERSIONS)
    def test_layers_apart_have_places_of_their_own(self, running, version):
        """Every release says somehow where a layer is; two layers lie apart."""
        running(version)
        found = dict(compat.places(tensors(version)))
        assert ["a", "b"] == list(found)
        assert found["a"] < found["b"]

    @pytest.mark.parametrize("version", ["0.24.0", "0.28.0"])
    def test_packed_tensors_are_one_allocation(self, running, version):
        """Tensors with a block stride lie in one allocation, apart by their offset."""
        running(version)
        found = dict(compat.places(tensors(version, block_stride=1024)))
        assert found["a"].allocation == found["b"].allocation
        assert 512 == found["b"].offset - found["a"].offset

    def test_layers_of_one_old_tensor_share_it(self, running):
        """Before strides, the layers of one tensor lie on the same bytes."""
        running("0.23.0")
        tensor = made("0.23.0", "KVCacheTensor", size=1024, shared_by=["a", "b"])
        config = SimpleNamespace(kv_cache_tensors=[tensor])
        assert 1 == len(set(dict(compat.places(config)).values()))

    def test_memory_of_the_host_is_refused(self, running):
        """A layer in host memory is named."""
        running("0.30.0")
        config = tensors("0.30.0")
        config.kv_cache_tensors[1].host_resident = True
        with pytest.raises(LayoutError, match=r"\['b'\] live in host memory"):
            dict(compat.places(config))


class TestNames:
    def test_layout_is_named_or_the_setting(self, running):
        """Where the engine does not say its layout, what was asked of it counts."""
        running("0.32.0")
        assert "LBHNC" == compat.layout_name(tensors("0.32.0"))
        running("0.28.0")
        assert "setting=None" == compat.layout_name(tensors("0.28.0"))

    def test_layout_that_a_back_end_asks_for_is_named(self, running, monkeypatch):
        """R-05: on Blackwell FlashInfer has heads before tokens, whatever is set; keys were those
        of the same engine on Hopper."""
        running("0.28.0")
        name = "vllm.v1.attention.backends.utils._KV_CACHE_LAYOUT_OVERRIDE"
        monkeypatch.setattr(name, "HND", raising=False)
        assert "setting=HND" == compat.layout_name(tensors("0.28.0"))

    def test_tokens_of_a_hash_are_asked_of_the_engine(self, running, monkeypatch):
        """A release that does not tell them computes them, and we ask how."""
        running("0.32.0")
        assert 16 == compat.hash_block_tokens(tensors("0.32.0"))
        running("0.31.0")
        config, engine = tensors("0.31.0"), SimpleNamespace()
        asked = []

        def resolve(*given):
            asked.append(given)
            return 64, 32

        path = "vllm.v1.core.kv_cache_utils.resolve_kv_cache_block_sizes"
        monkeypatch.setattr(path, resolve)
        assert 32 == compat.hash_block_tokens(config, engine)
        assert [(config, engine)] == asked
        assert compat.hash_block_tokens(config) is None

    def test_hits_have_a_source_where_there_is_a_word(self, running):
        """Only the newest releases tell hits apart."""
        running("0.32.0")
        names = ("host", "disk", "external_unspecified")
        assert names == tuple(compat.hit_source(name).value for name in names)
        running("0.31.0")
        assert compat.hit_source("host") is None

    def test_flags_of_older_groups_are_the_safe_ones(self, running):
        """Groups without flags are saved, and spread wherever ranks share blocks."""
        running("0.28.0")
        assert compat.is_transferable(SimpleNamespace(), [])
        assert compat.is_dcp_sharded(SimpleNamespace())
        running("0.32.0")
        group = SimpleNamespace(enable_kv_transfer=True)
        spec = SimpleNamespace(prefix_cacheable=False, dcp_sharded=False)
        assert not compat.is_transferable(group, [spec])
        assert not compat.is_dcp_sharded(spec)

    def test_a_plugin_s_spec_counts_as_what_it_derives_from(self):
        """vllm-ascend's own spec of latent attention is one of latent attention."""
        derived = type("AscendSpec", (FullAttentionSpec,), {})
        assert FullAttentionSpec is compat.kind_of(object.__new__(derived))
        assert int is compat.kind_of(7)


def groups(*specs):
    """Return groups of these specs."""
    return [SimpleNamespace(kv_cache_spec=spec) for spec in specs]


FULL = FullAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32
)
WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
)
STATE = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))


class TestGroups:
    @pytest.mark.parametrize(
        "specs", [(FULL, FULL), (WINDOW,), (STATE,), (FULL, STATE)]
    )
    def test_what_an_old_release_cannot_tell_is_refused(self, running, specs):
        """Blocks that go while a request runs need a release that says so."""
        running("0.29.0")
        with pytest.raises(LayoutError, match=r"vLLM 0\.29\.0 .* Use vLLM 0\.30"):
            compat.check_groups(groups(*specs))
        running("0.30.0")
        compat.check_groups(groups(*specs))

    def test_one_group_of_full_attention_is_taken(self, running):
        """The oldest release restores models with one group."""
        running("0.23.0")
        compat.check_groups(groups(FULL))
        layers = SimpleNamespace(kv_cache_specs={"a": FULL, "b": FULL})
        compat.check_groups(groups(layers))


def step(version, new=(), cached=(), resumed=(), state=None):
    """Return a step's output as a release gives it."""
    return made(
        version,
        "SchedulerOutput",
        kv_connector_block_state=state,
        scheduled_new_reqs=[
            made(version, "NewRequestData", req_id=name, block_ids=tables)
            for name, tables in new
        ],
        scheduled_cached_reqs=made(
            version,
            "CachedRequestData",
            req_ids=[name for name, _ in cached],
            new_block_ids=[tables for _, tables in cached],
            resumed_req_ids=set(resumed),
        ),
    )


class TestBlockTables:
    @pytest.mark.parametrize("version", ["0.23.0", "0.28.0", "0.29.0"])
    def test_tables_are_kept_where_the_engine_does_not_give_them(
        self, running, version
    ):
        """New blocks are put behind those known; a resumed request starts afresh."""
        running(version)
        tables = compat.BlockTables()
        resolve, _ = tables.begin_step(step(version, new=[("r", ([1, 2],))]))
        assert [[1, 2]] == resolve("r")
        tables.begin_step(step(version, cached=[("r", ([3],)), ("s", ([9],))]))
        resolve, _ = tables.begin_step(step(version, cached=[("r", None)]))
        assert [[1, 2, 3]] == resolve("r")
        assert [[9]] == resolve("s")
        again = step(version, cached=[("r", ([7, 8],))], resumed=["r"])
        assert [[7, 8]] == tables.begin_step(again)[0]("r")

    def test_tables_of_the_engine_are_not_kept(self, running):
        """A release that gives full tables is asked, and nothing grows here."""
        running("0.30.0")
        tables = compat.BlockTables()
        state = SimpleNamespace(
            get_block_ids=lambda name: [[len(name)]],
            boundary_state_offloads={"r": [(0, 1, 2)]},
        )
        resolve, offers = tables.begin_step(
            step("0.30.0", state=state, new=[("r", ([1],))])
        )
        assert [[3]] == resolve("abc")
        assert {"r": [(0, 1, 2)]} == offers
        assert 0 == len(tables)

    def test_finished_request_leaves_nothing(self, running):
        """S1-15: a request that is over has no table any more."""
        running("0.23.0")
        tables = compat.BlockTables()
        tables.begin_step(step("0.23.0", new=[("r", ([1],))]))
        assert 1 == len(tables)
        del tables.kept["r"]
        assert 0 == len(tables)

    def test_what_is_handed_out_does_not_reach_the_engine_s_lists(self, running):
        """S3-06: the engine's own lists stay as they are when tables grow."""
        running("0.23.0")
        theirs = [1]
        tables = compat.BlockTables()
        tables.begin_step(step("0.23.0", new=[("r", (theirs,))]))
        tables.begin_step(step("0.23.0", cached=[("r", ([2],))]))
        assert [1] == theirs


def test_page_of_engine_versions_is_up_to_date():
    """What the documentation says of releases is what the code knows."""
    text = read("engines.md")
    assert rewrite("engines.md", text) == text, "Run: python -m scripts.pages"
