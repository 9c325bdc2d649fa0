# SPDX-License-Identifier: Apache-2.0
"""What the vLLM door asks the device for, and when."""

import contextlib
from collections.abc import Iterator

import attrs
import pytest
import torch

from tests.devices.selection_kit import OURS, StreamDevice, Untouchable
from tests.integration.vllm.test_worker import (
    KEYSPACE,
    LocalSetup,
    an_order,
    step,
)
from tests.rig import LAYERS, LAYOUT, NUM_BLOCKS, NUM_ROWS, PAGE_BYTES
from ucm.config import UCMConfig
from ucm.integration.vllm.messages import PlanEnvelope
from ucm.integration.vllm.ucm_connector import UCMConnector
from ucm.integration.vllm.worker import WorkerHalf
from ucm.scheduler.messages import StepPlan, TransferKind, encode
from ucm.testing.faults import FaultPlan

SAVE = an_order(1, TransferKind.SAVE, range(1, 5))
LOAD = an_order(2, TransferKind.LOAD, range(10, 14))
PLAN = StepPlan(step=1, saves=(SAVE,), loads=(LOAD,))


@attrs.frozen(kw_only=True)
class StreamSetup(LocalSetup):
    """A set-up whose device is given."""

    device: StreamDevice

    def make_device(self, device_type: str) -> StreamDevice:
        """Return the device."""
        return self.device


def make_half(device: StreamDevice, **config: bool) -> WorkerHalf:
    """Return a worker's half over *device*; nothing is registered yet."""
    setup = StreamSetup(
        config=UCMConfig.from_mapping(config),
        layout=LAYOUT,
        keyspace=KEYSPACE,
        num_blocks=NUM_BLOCKS,
        recomputes=True,
        plan=FaultPlan(),
        at_event={},
        device=device,
    )
    return WorkerHalf(setup, 0, "cpu")


def register(half: WorkerHalf) -> None:
    """Give the half its memory."""
    memory = torch.zeros((NUM_ROWS, NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8)
    half.register(dict(zip(LAYERS, memory, strict=True)))


@contextlib.contextmanager
def working(**config: bool) -> Iterator[tuple[WorkerHalf, StreamDevice]]:
    """Run a worker's half over zeroed memory."""
    device = StreamDevice(NUM_BLOCKS)
    half = make_half(device, **config)
    register(half)
    with contextlib.closing(half):
        yield half, device


def used(half: WorkerHalf, proof: str) -> float:
    """Return how often a proof was used."""
    return half._counters.total(f"ucm_dump_event_{proof}_used_total")


def connector_of(half: WorkerHalf | None) -> UCMConnector:
    """Return a connector around a worker's half."""
    connector = object.__new__(UCMConnector)
    connector._worker = half
    return connector


class TestDirectPath:
    @pytest.mark.parametrize("reshape", [False, True])
    def test_saves_select_an_event_and_loads_do_not(self, reshape: bool) -> None:
        """S0-03, S0-36, S2-06: a step begins, its load waits for what is submitted, and
        only its save counts as a dump, behind the current stream."""
        with working(enable_reshape_cache_event_sync=reshape) as (half, device):
            step(half, PLAN)
            assert [("begin_step", 1), OURS, OURS] == device.calls
            assert 1 == used(half, "current_stream")
            step(half, StepPlan(step=2))
            assert [("begin_step", 2)] == device.calls[3:]

    def test_without_events_a_save_synchronizes(self) -> None:
        """S0-04: the operator's choice reaches the save, and no other hook."""
        with working(enable_event_sync=False) as (half, device):
            step(half, PLAN)
            assert [("begin_step", 1), OURS, "synchronize"] == device.calls
            assert 1 == used(half, "sync_fallback")

    def test_step_without_saves_selects_nothing(self) -> None:
        """S0-42: a step in which nothing is dumped counts no dump."""
        with working(enable_event_sync=False) as (half, device):
            step(half, StepPlan(step=1))
            assert [("begin_step", 1)] == device.calls
            assert 0 == used(half, "sync_fallback")

    def test_plan_that_is_bound_again_is_the_same_step(self) -> None:
        """S2-08: events recorded between two calls with one plan are not stale."""
        with working() as (half, device):
            envelope = PlanEnvelope(encode(StepPlan(step=3)))
            for _ in range(3):
                half.bind(envelope)
            assert [("begin_step", 3)] == device.calls


class TestHook:
    def test_hook_reaches_the_selection(self) -> None:
        """S0-16: what vllm-ascend tells the connector is fenced at once, and is what
        the layer's save would wait for."""
        with working(enable_reshape_cache_event_sync=True) as (half, device):
            half.bind(PlanEnvelope(encode(StepPlan(step=1))))
            connector_of(half).on_kv_cache_written(LAYERS[0])
            assert [("begin_step", 1), OURS] == device.calls
            assert half._selector.for_layer(LAYERS[0], Untouchable()).is_done()
            assert 1 == used(half, "written_hook")

    def test_hook_is_ignored_unless_asked_for(self) -> None:
        """S0-01: by default a hook costs nothing and changes nothing."""
        with working() as (half, device):
            connector_of(half).on_kv_cache_written(LAYERS[0])
            assert [] == device.calls

    def test_connector_without_a_worker_takes_the_hook(self) -> None:
        """A connector that saves nothing has nothing to take note of."""
        connector_of(None).on_kv_cache_written(LAYERS[0])

    def test_nothing_is_asked_of_a_device_without_memory(self) -> None:
        """A plan that comes before the KV cache begins no step of the device."""
        device = StreamDevice(NUM_BLOCKS)
        with contextlib.closing(make_half(device)) as half:
            half.bind(PlanEnvelope(encode(StepPlan(step=1))))
            assert [] == device.calls
            register(half)
            half.bind(PlanEnvelope(encode(StepPlan(step=2))))
            assert [("begin_step", 2)] == device.calls
