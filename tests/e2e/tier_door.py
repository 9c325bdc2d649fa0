# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering over a tier of ours, as the contract of doors drives it."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.cache.test_tiers import until
from tests.e2e.engine import generate, reset_prefix_cache
from tests.e2e.vllm_door import VLLMDoor
from tests.traces import traces_of
from ucm.testing.door import ROOM, Ability, Setting

__all__ = [
    "TierDoor",
    "forget",
    "loaded_blocks",
    "manager_of",
    "settle",
    "tiering_config",
]

LIMIT_S = 300.0


def tiering_config(
    slab: Path, capacity: str = "64MiB", cpu_bytes: int = 64 << 20, **ours: Any
) -> dict[str, Any]:
    """Return the engine's configuration with a tier of ours below its own."""
    entry = {
        "type": "UCMTier",
        "module_path": "ucm.integration.vllm.tier",
        "store": {"type": "slab", "path": str(slab), "capacity": capacity},
        "log": {"level": "debug", "directory": str(traces_of(slab))},
        "timeout": {"fetch": 60.0, "load": 60.0, "save": 60.0},  # of a busy machine
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.e2e.host_offloading",
            "cpu_bytes_to_use": cpu_bytes,
            "offload_prompt_only": False,
            "secondary_tiers": [entry | ours],
        },
    }


def manager_of(llm: Any) -> Any:
    """Return vLLM's tiering manager of an in-process engine."""
    core = llm.llm_engine.engine_core.engine_core
    return core.scheduler.connector.connector_scheduler.manager


def loaded_blocks(llm: Any) -> int:
    """Return how many chunks came from our store, verified."""
    counters = manager_of(llm).secondary_tiers[0]._cache._core._counters
    settled = "ucm_settled_parts_total"
    return int(counters.total(settled, outcome="committed", direction="load"))


def settle(llm: Any) -> None:
    """Step until neither tier has anything under way."""
    half = llm.llm_engine.engine_core.engine_core.scheduler.connector
    deadline = time.monotonic() + LIMIT_S
    while half.connector_scheduler.has_pending_push_work():
        assert time.monotonic() < deadline
        generate(llm, [[3]], 1)


def forget(llm: Any) -> None:
    """Empty the engine's blocks and its CPU tier, so that only our store has anything."""
    reset_prefix_cache(llm)
    settle(llm)
    manager_of(llm).primary_tier.reset_cache()


class TierDoor(VLLMDoor):
    """The engine in this process; what its CPU tier has is its own cache."""

    cannot = MappingProxyType(
        {Ability.KILL: "it runs in this process; test_tier.py kills one"}
    )

    def start(self, slab: Path, setting: Setting) -> None:
        """Start with a CPU tier that has room for all that a story asks."""
        capacity = "64MiB"
        if setting is Setting.SMALL:
            capacity = str(ROOM * self._block_bytes)
        config = tiering_config(slab, capacity, tiers=list(self.tiers))
        self._slab = slab
        self._llm = self._up.enter_context(self._engine(setting, config))
        tier = manager_of(self._llm).secondary_tiers[0]
        self._block_bytes, self._fetches = (
            tier.block_size_bytes,
            tier._cache._core.fetches,
        )
        until(lambda: not self.tiers or self._fetches.is_served)

    def loaded_blocks(self) -> int:
        """Return what our counters say; the store need not be there any more."""
        return loaded_blocks(self._llm)

    def fetched_blocks(self) -> int:
        """Return what our counters say."""
        return int(self._fetches._counters.total("ucm_fetched_parts_total"))

    def settle(self) -> None:
        """Step until neither tier has anything under way."""
        settle(self._llm)

    def forget(self) -> None:
        """Empty the engine's blocks and its CPU tier."""
        forget(self._llm)

    def left(self) -> Mapping[str, int]:
        """Return what our tier keeps."""
        self.settle()
        tier = manager_of(self._llm).secondary_tiers[0]
        counts = {
            "jobs": len(tier._jobs),
            "keys": len(tier._lookups),
            "transfers": len(tier._cache._core.open_transfers()),
        }
        return {name: count for name, count in counts.items() if count}
