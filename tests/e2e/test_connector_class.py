# SPDX-License-Identifier: Apache-2.0
"""The connector's class against the engine's base class, without an engine."""

import inspect
import subprocess
import sys

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
)

from ucm.integration.vllm.ucm_connector import INHERITED_ON_PURPOSE, UCMConnector

FORWARDED = [
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "clear_connector_metadata",
    "bind_connector_metadata",
    "get_block_ids_with_load_errors",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "register_kv_caches",
    "get_finished",
    "handle_preemptions",
    "request_finished_all_groups",
    "shutdown",
    "has_connector_metadata",
    "set_host_xfer_buffer_ops",
    "build_connector_worker_meta",
    "update_connector_output",
    "take_events",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
    "get_finished_count",
    "reset_cache",
]


class TestClass:
    def test_every_base_hook_is_forwarded_or_listed(self) -> None:
        """A hook that a new engine adds breaks this test instead of a user."""
        public = {
            name
            for base in (KVConnectorBase_V1, SupportsHMA)
            for name in vars(base)
            if not name.startswith("_")
        }
        missing = public - set(vars(UCMConnector)) - set(INHERITED_ON_PURPOSE)
        assert set() == missing
        assert set() == set(INHERITED_ON_PURPOSE) & set(vars(UCMConnector))

    @pytest.mark.parametrize("name", FORWARDED)
    def test_hook_is_defined_on_the_class_itself(self, name: str) -> None:
        """S3-03: wrappers look into the class's own dictionary."""
        assert name in UCMConnector.__dict__

    @pytest.mark.parametrize("name", FORWARDED)
    def test_hook_takes_what_the_base_takes(self, name: str) -> None:
        """S3-02: a hook can be called as the base's signature says."""
        base = SupportsHMA if name == "request_finished_all_groups" else None
        ours = inspect.signature(getattr(UCMConnector, name))
        theirs = inspect.signature(getattr(base or KVConnectorBase_V1, name))
        assert list(theirs.parameters) == list(ours.parameters)

    def test_importing_ucm_brings_in_nothing_of_an_engine(self) -> None:
        """S3-11, S3-15, S2-17: without being asked for, no engine, device or thread comes."""
        code = (
            "import sys, threading, ucm; "
            "bad = {'torch', 'torch_npu', 'vllm', 'anyio', 'structlog'}; "
            "assert not bad & set(sys.modules), bad & set(sys.modules); "
            "assert threading.active_count() == 1"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestStats:
    def test_stats_start_empty_and_add_up(self) -> None:
        """S3-14: no data is an empty object; two workers' numbers add up."""
        empty = UCMConnector.build_kv_connector_stats(None)
        assert empty.is_empty()
        one = {
            "counters": {"ucm_saved_blocks_total": 3},
            "gauges": {"ucm_healthy": 1},
            "histograms": {"ucm_save_duration_seconds": [0.5]},
        }
        two = {
            "counters": {"ucm_saved_blocks_total": 4},
            "gauges": {"ucm_healthy": 0},
            "histograms": {"ucm_save_duration_seconds": [1.5]},
        }
        both = UCMConnector.build_kv_connector_stats(one).aggregate(
            UCMConnector.build_kv_connector_stats(two)
        )
        told = both.reduce()
        assert 7 == told["ucm_saved_blocks_total"]
        assert 1.0 == told["ucm_save_duration_seconds_mean"]
        assert {"ucm_healthy": 0} == both.data["gauges"]
