# SPDX-License-Identifier: Apache-2.0
"""Look into, and stand between, the connector of an in-process engine."""

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.e2e.engine import connector_config, generate
from tests.traces import traces_of
from ucm.config import StoreConfig
from ucm.devices.abc import Fence
from ucm.devices.events import DoneFence
from ucm.integration.vllm import setup as door_setup
from ucm.stores import opening
from ucm.stores.abc import Store
from ucm.stores.slab import SlabStore
from ucm.testing.faults import FaultDevice, FaultPlan, FaultStore

SAVED = "vllm:ucm_saved_blocks"
LOADED = "vllm:ucm_loaded_blocks"
FAILURES = "vllm:ucm_load_failures"


def prompt(seed: int, length: int, vocabulary: int = 500) -> list[int]:
    """Return *length* token ids that no other seed shares."""
    rng = random.Random(seed)
    return [rng.randrange(5, vocabulary) for _ in range(length)]


def ucm_config(
    store: Path, capacity: str = "64MiB", **settings: object
) -> dict[str, Any]:
    """Return a connector configuration over a slab directory, with its trace beside."""
    config: dict[str, Any] = connector_config(
        type="slab", path=str(store), capacity=capacity
    )
    extra = config["kv_connector_extra_config"]
    extra["log"] = {"level": "debug", "directory": str(traces_of(store))}
    if "tiers" in settings:
        extra["timeout"] = {"fetch": 30.0, "tier": 30.0}  # of a busy machine
    extra.update(settings)
    return config


def halves(llm: Any) -> tuple[Any, Any]:
    """Return the scheduler's and the worker's connector of an in-process engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    core = llm.llm_engine.engine_core.engine_core
    return core.scheduler.connector, get_kv_transfer_group()


def quiesced(llm: Any) -> dict[str, int]:
    """Let all saves end and be reported; return what either half still keeps."""
    scheduler, worker = halves(llm)
    assert worker._worker._runtime.flush(120.0)
    generate(llm, [[3]], 1)  # a step, in which the worker reports
    counts = scheduler._scheduler.counts() | worker._worker.counts()
    counts.pop("denied_keys")
    return {name: count for name, count in counts.items() if count}


def await_pinned(llm: Any, timeout: float = 60.0) -> None:
    """Wait until copies go to the slots themselves; at once without any of ours."""
    if llm.llm_engine.engine_core.engine_core.scheduler.connector is None:
        return
    runtime = getattr(getattr(halves(llm)[1], "_worker", None), "_runtime", None)
    if runtime is None or runtime._device.is_synchronous:
        return
    limit = time.monotonic() + timeout
    nbytes = sum(memory.nbytes for memory in runtime._store.buffers)
    while runtime._pinning._nbytes < nbytes:
        if time.monotonic() > limit:
            raise TimeoutError(f"the slab is not pinned after {timeout} s")
        time.sleep(0.05)


def corrupt(store: Path) -> None:
    """Flip a bit in every byte of the slab's slots, behind the store's back."""
    data = store / "data"
    content = bytearray(data.read_bytes())
    with data.open("r+b") as file:
        for at in range(0, len(content), 512):
            content[at] ^= 0x40
        file.write(content)


def plant(monkeypatch: pytest.MonkeyPatch, plan: FaultPlan) -> None:
    """Let the worker's half of the next engine meet *plan* in store and device."""

    class Planted(SlabStore):
        @classmethod
        def open_configured(
            cls, config: StoreConfig, *, block_bytes: int, index_only: bool
        ) -> Store:
            inner = super().open_configured(
                config, block_bytes=block_bytes, index_only=index_only
            )
            return inner if index_only else FaultStore(inner, plan)

    monkeypatch.setattr(opening, "load_class", lambda *_: Planted)
    make = door_setup.Setup.make_device
    monkeypatch.setattr(
        door_setup.Setup,
        "make_device",
        lambda setup, kind: FaultDevice(make(setup, kind), plan),
    )


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads of the next engine end well without copying a byte."""

    class Blind(FaultDevice):
        def scatter(self, *_: object, **__: object) -> Fence:
            return DoneFence()

    make = door_setup.Setup.make_device
    monkeypatch.setattr(
        door_setup.Setup,
        "make_device",
        lambda setup, kind: Blind(make(setup, kind), FaultPlan()),
    )


@attrs.frozen
class Call:
    """One hook call as it came back."""

    half: str
    hook: str
    arguments: tuple[Any, ...]
    result: Any


@contextmanager
def traced(llm: Any) -> Iterator[list[Call]]:
    """Record every hook call on both halves, in order."""
    trace: list[Call] = []

    def wrap(half: str, target: Any, hook: str) -> Callable[..., Any]:
        inner = getattr(target, hook)

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            trace.append(Call(half, hook, args, result))
            return result

        return call

    names = {
        "scheduler": (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "request_finished_all_groups",
            "update_connector_output",
        ),
        "worker": (
            "handle_preemptions",
            "bind_connector_metadata",
            "start_load_kv",
            "wait_for_save",
            "get_transfer_results",
            "get_block_ids_with_load_errors",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ),
    }
    targets = dict(zip(names, halves(llm), strict=True))
    for half, hooks in names.items():
        for hook in hooks:
            setattr(targets[half], hook, wrap(half, targets[half], hook))
    try:
        yield trace
    finally:
        for half, hooks in names.items():
            for hook in hooks:
                delattr(targets[half], hook)
