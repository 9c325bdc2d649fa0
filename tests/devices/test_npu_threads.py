# SPDX-License-Identifier: Apache-2.0
"""An NPU's driver on a thread that has another device, or none, or work in a queue."""

import pytest
import torch

from tests.devices.accelerator_kit import ARRANGEMENT, NUM_BLOCKS, TIMEOUT
from tests.devices.fake_torch_npu import INDEX, FakeNpu, FakeStream, install
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.npu import NpuDriver
from ucm.testing.device_memory import Engine


class OnHost(NpuDriver):
    """Of an engine whose tensors are the host's, as all are here."""

    device_type = "cpu"


def zeros(nbytes: int) -> torch.Tensor:
    """Return memory."""
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("before", [None, 0, 1])
def test_thread_has_its_own_device_again_and_none_is_opened(
    monkeypatch: pytest.MonkeyPatch, before: int | None
) -> None:
    """To ask or to go back opens no device: one that is opened has memory of every rank."""
    runtime: FakeNpu = install(monkeypatch)
    driver = NpuDriver(INDEX)
    runtime.selected = before
    index = driver.current_index()
    assert (before if before is not None else -1) == index
    driver.bind_thread()
    assert INDEX == driver.current_index()
    driver.make_current(index)
    assert (before or 0) == runtime.selected
    assert {INDEX} == runtime.opened


def test_fence_waits_for_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the engine's thread nor the poller's has torch_npu's queue emptied."""
    runtime: FakeNpu = install(monkeypatch)
    device = AcceleratorDevice(OnHost(INDEX), NUM_BLOCKS)
    engine = Engine(ARRANGEMENT, zeros)
    device.register(engine.layout, engine.kv_caches)
    monkeypatch.setattr(FakeStream, "emptied", 0)
    fences = [device.lease(), device.lease()]
    runtime.set_device(INDEX)
    runtime.synchronize(INDEX)
    assert all(fence.wait(TIMEOUT) for fence in fences)
    device.close()
    assert 0 == FakeStream.emptied
