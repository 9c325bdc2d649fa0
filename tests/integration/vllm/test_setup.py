# SPDX-License-Identifier: Apache-2.0
"""What is found wrong before the engine serves its first request."""

import inspect
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import structlog
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine.utils import CoreEngineProcManager

from tests.integration.vllm.kit import cache_config, engine_config, full, plain_cache
from ucm.errors import ConfigError
from ucm.integration.vllm import compat
from ucm.integration.vllm.setup import Setup
from ucm.ranks import Topology
from ucm.stores.abc import Store
from ucm.tracing import SETTING_TRANSLATED, SETTING_UNSAFE


def setup(tmp_path, change=lambda config: None, **extra):
    """Derive a setup from a plain configuration, changed."""
    extra = {"weights_revision": "r1", **extra}
    config = engine_config(str(tmp_path), **extra)
    change(config)
    return Setup.of(config, plain_cache())


def logged_at_start(made, role):
    """Return what a process logs when it starts."""
    structlog.configure()
    try:
        with structlog.testing.capture_logs() as events:
            made.open_log(role)
    finally:
        structlog.reset_defaults()
    return events


class TestSetup:
    def test_engine_is_taken_as_it_is(self, tmp_path):
        """Both halves get layout, ranks and blocks from the engine."""
        made = setup(tmp_path)
        assert (1, 10, True) == (
            made.topology.num_ranks,
            made.num_blocks,
            made.recomputes,
        )
        assert made.keyspace.digest == setup(tmp_path).keyspace.digest

    @pytest.mark.parametrize(("release", "tokens"), [("older", 32), ("newer", 16)])
    def test_blocks_are_spread_over_prefill_ranks_where_the_engine_does_so(
        self, tmp_path, monkeypatch, release, tokens
    ):
        """S1-21: an entry of a block table stands for the tokens of all prefill context ranks
        before vLLM 0.26, and so does a hash: the start said that they do not fit each other."""
        feature = compat.FEATURES["whole_prefill"]
        if release == "older":
            feature = attrs.evolve(feature, since=(99, 0))
        monkeypatch.setitem(compat.FEATURES, "whole_prefill", feature)
        config = engine_config(str(tmp_path), weights_revision="r1")
        config.parallel_config.prefill_context_parallel_size = 2
        config.parallel_config.cp_kv_cache_interleave_size = 8
        made = Setup.of(
            config, cache_config((["a", "b"], full()), hash_block_size=tokens)
        )
        layout = made.layout
        assert (tokens, tokens) == (
            layout.groups[0].block_tokens,
            layout.hash_block_tokens,
        )
        assert (8 if release == "older" else 1) == made.topology.interleave

    def test_no_settings_at_all_are_the_defaults(self, tmp_path):
        """An engine without our settings passes none, not an empty mapping."""
        (tmp_path / "model.safetensors").write_bytes(b"")

        def unset(config):
            config.kv_transfer_config.kv_connector_extra_config = None

        assert "slab" == setup(tmp_path, unset).config.store.type

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            (
                lambda c: setattr(
                    c.parallel_config,
                    "distributed_executor_backend",
                    "external_launcher",
                ),
                "distributed_executor_backend",
            ),
            (
                lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"),
                "prefix_caching_hash_algo",
            ),
            (
                lambda c: c.kv_transfer_config.kv_connector_extra_config.update(stor=1),
                "stor",
            ),
        ],
    )
    def test_unusable_engine_is_refused_by_the_settings_name(
        self, tmp_path, monkeypatch, change, key
    ):
        """X-09: whatever cannot work stops the start with the name to change."""
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        with pytest.raises(ConfigError) as caught:
            setup(tmp_path, change)
        assert key == caught.value.key

    def test_unknown_engine_is_refused_first(self, tmp_path, monkeypatch):
        """Nothing of an engine is read whose release is not known."""
        monkeypatch.setattr(vllm, "__version__", "0.22.0")
        with pytest.raises(ConfigError, match="vllm"):
            Setup.of(None, None)

    def test_settings_come_from_file_and_variables_too(self, tmp_path, monkeypatch):
        """The engine's own dictionary is one of several places, and the nearest."""
        file = tmp_path / "ucm.toml"
        file.write_text("queue.window = 7\nqueue.tickets = 7\ntimeout.load = 7\n")
        monkeypatch.setenv("UCM_QUEUE__TICKETS", "8")
        monkeypatch.setenv("UCM_TIMEOUT__LOAD", "8")
        made = setup(tmp_path, config_file=str(file), timeout={"load": 9})
        queue = made.config.queue
        assert (7, 8, 9.0) == (queue.window, queue.tickets, made.config.timeout.load)

    def test_ranks_tell_their_variables_but_those_of_one_process(
        self, tmp_path, monkeypatch
    ):
        """X-09: what all must have read alike goes to the scheduler; where the log of a
        process lies, and on which CPUs it copies, is its own affair, and what the engine
        passes all of them have alike, but for a neighbour inside of MultiConnector."""
        monkeypatch.setenv("UCM_QUEUE__WINDOW", "7")
        monkeypatch.setenv("UCM_LOG__LEVEL", "error")
        monkeypatch.setenv("UCM_THREADS__AFFINITY", "off")
        told = setup(tmp_path, queue={"tickets": 9}).facts(0).settings
        assert {"UCM_QUEUE__WINDOW": "7"} == told

    @pytest.mark.parametrize(("backend", "tells"), [("mp", False), ("ray", True)])
    def test_place_is_told_where_ranks_may_be_on_other_machines(
        self, tmp_path, backend, tells
    ):
        """R-60: and nowhere else: of two entries inside of MultiConnector each hears of the
        other's ranks, whose store is another one on the same machine."""

        def change(config):
            config.parallel_config.distributed_executor_backend = backend

        made = setup(tmp_path, change)
        Path(made.config.store.path).mkdir(parents=True, exist_ok=True)
        assert tells == bool(made.facts(0).place)

    def test_span_holds_at_least_one_block(self, tmp_path):
        """Spans are as large as set, and never smaller than a block."""
        block = setup(tmp_path).layout.max_block_bytes
        for nbytes, blocks in ((1, 1), (3 * block, 3), (4 * block - 1, 3)):
            made = setup(tmp_path, queue={"span_bytes": nbytes})
            assert {0: blocks} == made.span_blocks([block])

    @pytest.mark.parametrize(
        ("device", "saved", "loaded"),
        [("cpu", 3, 12), ("cuda", 12, 24), ("npu", 12, 24)],
    )
    def test_tickets_of_an_accelerator_carry_four_spans_and_eight(
        self, tmp_path, device, saved, loaded
    ):
        """A copy of a millisecond costs our threads as much again on the way of its ticket,
        whatever it carries; on a CPU other saves would stand behind a long one."""

        def change(config):
            config.device_config.device_type = device

        block = setup(tmp_path).layout.max_block_bytes
        made = setup(tmp_path, change, queue={"span_bytes": 3 * block})
        assert {0: saved} == made.span_blocks([block])
        limits = made.save_limits()
        assert loaded == saved * limits.load_spans
        assert limits.company <= saved * block

    @pytest.mark.parametrize(
        ("policy", "is_ranked"), [("priority", True), ("fcfs", False)]
    )
    def test_priority_counts_where_the_engine_goes_by_it(
        self, tmp_path, policy, is_ranked
    ):
        """R-58: an engine that serves in order of arrival takes any priority from anybody."""

        def choose(config):
            config.scheduler_config = SimpleNamespace(policy=policy)

        assert is_ranked is setup(tmp_path, choose).is_ranked


class TestSaveLimits:
    @pytest.mark.parametrize("stages", [1, 2])
    def test_states_behind_drafts_are_late_on_pipeline_stages(self, tmp_path, stages):
        """Of one stage alone all ranks know at the end of a step which drafts were accepted."""
        made = attrs.evolve(setup(tmp_path), topology=Topology(stages=stages))
        assert (stages > 1) is made.save_limits().late_states

    @pytest.mark.parametrize(
        ("role", "process", "has_cache", "blocks"),
        [
            ("kv_both", "EngineCore", True, 3),
            ("kv_both", "EngineCore_DP1", True, 3),
            ("kv_producer", "EngineCore", True, 0),
            ("kv_both", "MainProcess", True, 0),
            ("kv_both", "EngineCore", False, 0),
        ],
    )
    def test_small_saves_wait_unless_others_do_for_them(
        self, tmp_path, monkeypatch, role, process, has_cache, blocks
    ):
        """An engine that only saves does so for others, which ask as soon as it has
        answered; one that its host steps makes no step once all have their answers; and
        one without a cache finds nothing but what is stored. Any other keeps a small part
        of its blocks at most, and a ticket's."""
        monkeypatch.setattr(multiprocessing.current_process(), "name", process)

        def change(config):
            config.kv_transfer_config.kv_role = role
            config.cache_config.enable_prefix_caching = has_cache

        made = attrs.evolve(setup(tmp_path, change), num_blocks=48)
        size = made.layout.max_block_bytes
        assert blocks * size == made.save_limits().company
        large = attrs.evolve(made, num_blocks=1 << 40).save_limits()
        assert (16 << 20 if blocks else 0) == large.company

    def test_nothing_waits_in_an_engine_that_asks_no_connector(
        self, tmp_path, monkeypatch
    ):
        """R-18: vLLM 0.23 sleeps on what waits, until its client speaks again."""
        monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore")

        def change(config):
            config.cache_config.enable_prefix_caching = True

        assert setup(tmp_path, change).may_wait
        monkeypatch.delattr(KVConnectorBase_V1, "has_pending_push_work")
        assert not setup(tmp_path, change).may_wait

    def test_engines_in_processes_of_their_own_are_named_so(self):
        """R-18: an engine that calls them otherwise is taken for one that its host steps."""
        assert 'else "EngineCore"' in inspect.getsource(CoreEngineProcManager)


class TestStore:
    def test_store_is_opened_for_the_layouts_blocks(self, tmp_path):
        """The configured store takes blocks of this engine's size."""
        made = setup(tmp_path, store={"path": str(tmp_path / "s"), "capacity": "4MiB"})
        with made.open_store(index_only=False) as store:
            assert isinstance(store, Store)
            assert store.capabilities.max_block_bytes >= made.layout.max_block_bytes

    @pytest.mark.parametrize(
        ("name", "told"), [("memory", "not shared"), ("x", "slab")]
    )
    def test_store_that_cannot_serve_is_refused(self, tmp_path, name, told):
        """X-09: a store that the engine's processes would not share is refused, and so
        is one that nobody registered."""
        with pytest.raises(ConfigError, match=told) as caught:
            setup(tmp_path, store={"type": name}).open_store(index_only=True)
        assert "store.type" == caught.value.key


class TestLog:
    @pytest.mark.parametrize(
        ("policy", "role", "warned"),
        [
            ("fail", "scheduler", 1),
            ("fail", "worker-0", 0),
            ("recompute", "scheduler", 0),
        ],
    )
    def test_policy_that_costs_output_is_warned_of_once(
        self, tmp_path, policy, role, warned
    ):
        """H-13: an engine that fails requests on a failed load says so once, in its
        log, when it starts."""

        def choose(config):
            config.kv_transfer_config.kv_load_failure_policy = policy

        events = logged_at_start(setup(tmp_path, choose), role)
        assert warned == len(events)
        assert all("kv_load_failure_policy" == event["key"] for event in events)

    @pytest.mark.parametrize(
        ("value", "kv_role", "process", "warned"),
        [
            ("1", "kv_both", "scheduler", 1),
            ("1", "kv_producer", "scheduler", 1),
            ("1", "kv_consumer", "scheduler", 0),
            ("1", "kv_both", "worker-0", 0),
            ("0", "kv_both", "scheduler", 0),
        ],
    )
    def test_ids_that_clients_may_repeat_are_warned_of_once(
        self, tmp_path, monkeypatch, value, kv_role, process, warned
    ):
        """An engine that takes a client's ids as they are ends where one comes again while its
        former request is saved; nothing is to be saved where blocks are only loaded."""
        name = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
        monkeypatch.setenv(name, value)

        def choose(config):
            config.kv_transfer_config.kv_role = kv_role

        made = setup(tmp_path, choose)
        events = logged_at_start(made, process)
        assert warned * [(SETTING_UNSAFE, name)] == [
            (event["event"], event["key"]) for event in events
        ]
        assert all("Unset it" in event["remedy"] for event in events)
        monkeypatch.delitem(envs.environment_variables, name)  # as a release without it
        assert [] == logged_at_start(made, process)

    def test_keys_of_the_peer_are_told_once_with_their_equivalent(self, tmp_path):
        """Who comes with the other's file reads at the start what it means here, and
        what of it nothing here does."""
        connector = {
            "ucm_connector_name": "UcmPipelineStore",
            "ucm_connector_config": {"cache_buffer_capacity_gb": 1, "io_direct": True},
        }
        made = setup(tmp_path, ucm_connectors=[connector])
        (line,) = logged_at_start(made, "scheduler")
        assert SETTING_TRANSLATED == line["event"]
        assert {"store": {"type": "slab", "capacity": "1GiB"}} == line["equivalent"]
        assert ["ucm_connectors[0].ucm_connector_config.io_direct"] == [
            *line["untranslated"]
        ]
        assert [] == logged_at_start(made, "worker-0")
