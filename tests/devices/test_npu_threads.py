# SPDX-License-Identifier: Apache-2.0
"""An NPU's driver on a thread that has another device, or none."""

import pytest

from tests.devices.fake_torch_npu import INDEX, FakeNpu, install
from ucm.devices.npu import NpuDriver


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
