# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiering over our tier, without an engine: what its scheduler does, by hand."""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.integration.vllm.kit import engine_config, plain_cache
from ucm.integration.vllm import tier as tier_module
from ucm.integration.vllm.tier import UCMTier
from ucm.testing.faults import FaultPlan, FaultStore

CHUNK = 4096
TOKENS = 16
LIMIT_S = 120.0


def keys_of(count: int, prompt: str = "a", group: int = 0) -> list[bytes]:
    """Return the keys of a prompt's chunks."""
    return [
        make_offload_key(f"{prompt}/{at}".encode().ljust(32, b"."), group)
        for at in range(count)
    ]


def offloading_config(vllm_config: Any, **changes: Any) -> OffloadingConfig:
    """Return what vLLM hands to its own offloading, of two ranks' worth of pages."""
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("a", "b"), 0),),
        worker_kv_bytes_per_block=2048,
        enable_kv_cache_events=False,
        extra_config=vllm_config.kv_transfer_config.kv_connector_extra_config,
        engine_id=f"ucm-test-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        model=OffloadingModelConfig("m", "float16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=parallel,
        kv_cache_layout="NHD",
    )
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    return config


@attrs.define
class Engine:
    """
    The scheduler's half of an engine, as far as a tier sees it.

    Args:
        manager: vLLM's.
    """

    manager: TieringOffloadingManager
    requests: dict[str, ReqContext] = attrs.Factory(dict)

    @property
    def tier(self) -> UCMTier:
        """Ours."""
        return self.manager.secondary_tiers[0]

    @property
    def primary(self) -> Any:
        """The CPU tier."""
        return self.manager.primary_tier

    def request(self, name: str, keys: Sequence[bytes] = (), **given: Any) -> str:
        """Begin a request whose chunks have these keys, in order."""
        context = self.requests[name] = ReqContext(name, **given)
        self.manager.on_new_request(context)
        for at, key in enumerate(keys, 1):
            context.set_offload_key_position(key, at * TOKENS)
        return name

    def compute(self, name: str, keys: Sequence[bytes]) -> bool:
        """Write chunks of a request as its device would, and hand them down."""
        context = self.requests[name]
        given = self.manager.prepare_store(keys, context)
        if given is None:
            return False
        pairs = zip(given.keys_to_store, given.store_spec.chunk_ids, strict=True)
        for key, chunk in pairs:
            self.chunk(chunk)[:] = content_of(key)
        if given.keys_to_store:
            self.manager.complete_store(set(given.keys_to_store), context)
        return True

    def chunk(self, chunk: int) -> memoryview:
        """Return the bytes of a chunk of the CPU tier."""
        view = self.primary.get_kv_memoryview().cast("B")
        return view[int(chunk) * CHUNK : (int(chunk) + 1) * CHUNK]

    def step(self, new: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
        """End a step of the scheduler, of requests that begin to run and that no longer do."""
        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))

    def find(self, name: str, keys: Sequence[bytes]) -> int | None:
        """Look up as vLLM does: leading chunks; None while that is not known."""
        hits, is_deferred = 0, False
        for key in keys:
            found = self.manager.lookup(key, self.requests[name])
            if found is LookupResult.MISS:
                break
            is_deferred |= found is not LookupResult.HIT
            hits += found is not LookupResult.RETRY
        return None if is_deferred else hits

    def found(self, name: str, keys: Sequence[bytes]) -> int:
        """Step until it is known how many leading chunks there are, and return that."""
        deadline = time.monotonic() + LIMIT_S
        while (hits := self.find(name, keys)) is None:
            assert time.monotonic() < deadline
            self.step()
            self.wait_a_moment()
        return hits

    def content(self, name: str, keys: Sequence[bytes]) -> list[bytes]:
        """Load chunks as vLLM does for its device, and return their bytes."""
        context = self.requests[name]
        spec = self.manager.prepare_load(keys, context)
        content = [bytes(self.chunk(chunk)) for chunk in spec.chunk_ids]
        self.manager.complete_load(keys, context)
        return content

    def finish(self, name: str) -> None:
        """End a request."""
        self.manager.on_request_finished(self.requests.pop(name))

    def until(self, is_so: Callable[[], bool]) -> None:
        """Step until something is so."""
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline
            self.step()
            self.wait_a_moment()

    def settle(self) -> None:
        """Step until no job is left."""
        self.until(lambda: not self.manager.has_pending_work())

    def forget(self) -> None:
        """Empty the CPU tier, so that only the store has anything."""
        self.settle()
        self.primary.reset_cache()

    def store(self, keys: Sequence[bytes], name: str = "writer") -> None:
        """Have a request's chunks computed and stored, and forgotten above."""
        self.request(name, keys)
        assert self.compute(name, keys)
        self.finish(name)
        self.forget()

    @staticmethod
    def wait_a_moment() -> None:
        """Give way to the tier's threads."""
        threading.Event().wait(0.001)


def content_of(key: bytes) -> bytes:
    """Return the bytes of the chunk with a key."""
    return key.ljust(64, b"-") * (CHUNK // 64)


def extra_of(
    store: dict[str, object],
    chunks: int,
    beside: Sequence[dict[str, Any]] = (),
    **ours: Any,
) -> dict[str, Any]:
    """Return vLLM's settings for its tiering with a tier of ours, and more *beside* it."""
    entry = {
        "type": "UCMTier",
        "module_path": "ucm.integration.vllm.tier",
        "store": store,
        "weights_revision": "r1",
        "timeout": {"fetch": 60.0},  # of a busy machine
    }
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": chunks * CHUNK,
        "secondary_tiers": [entry | each for each in (ours, *beside)],
    }


def slab(path: Path, capacity: str = "1MiB") -> dict[str, object]:
    """Return the settings of a slab."""
    return {"type": "slab", "path": str(path), "capacity": capacity}


def make_manager(
    vllm_config: SimpleNamespace, kv_cache_config: Any, spec: TieringOffloadingSpec
) -> TieringOffloadingManager:
    """Have the manager made as the connector's half does, which has both in hand."""
    return spec.get_manager()


@contextlib.contextmanager
def engine(
    store: dict[str, object],
    *,
    chunks: int = 32,
    changes: dict[str, Any] | None = None,
    model: str = "m",
    **ours: Any,
) -> Iterator[Engine]:
    """Run the scheduler's half of an engine for the length of the block."""
    vllm_config = engine_config(model, **extra_of(store, chunks, **ours))
    spec = TieringOffloadingSpec(offloading_config(vllm_config, **(changes or {})))
    manager = make_manager(vllm_config, plain_cache(), spec)
    try:
        yield Engine(manager)
    finally:
        manager.shutdown()


def plant(monkeypatch: pytest.MonkeyPatch, plan: FaultPlan) -> None:
    """Let the next tier's store meet *plan*."""
    inner = tier_module.open_store
    monkeypatch.setattr(
        tier_module, "open_store", lambda *a, **k: FaultStore(inner(*a, **k), plan)
    )
