# SPDX-License-Identifier: Apache-2.0
"""The NPU driver on a torch_npu that is made here: what is called, and with what."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.devices.fake_torch_npu import (
    INDEX,
    SCHEMA,
    VERSION,
    CopyLog,
    FakeNpu,
    FakeStream,
    Memory,
    install,
    registered,
)
from ucm.devices.driver import Direction
from ucm.devices.npu import NpuDriver
from ucm.errors import ConfigError, DeviceError
from ucm.plan import CopyBatch


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    """Return what the torch_npu that can now be imported works on."""
    monkeypatch.setattr("platform.release", lambda: "5.15.0-1.el9.aarch64")
    return install(monkeypatch)


@pytest.fixture
def driver(runtime: FakeNpu) -> NpuDriver:
    """Return the driver of a device, bound to this thread."""
    made = NpuDriver(INDEX)
    made.bind_thread()
    return made


@pytest.fixture
def swap_blocks_batch(runtime: FakeNpu) -> Iterator[None]:
    """Register vllm-ascend's operator as it is."""
    with registered(runtime, SCHEMA):
        yield


def adopt_and_copy(
    driver: NpuDriver, memory: Memory, *, is_pinned: bool = False
) -> FakeStream:
    """Copy with the engine's storages adopted; return the stream."""
    driver.adopt(memory.storages())
    stream = driver.make_stream()
    driver.copy(memory.batch, memory.direction, stream, is_pinned=is_pinned)
    return stream


both_ways = pytest.mark.parametrize("direction", Direction)


class TestStart:
    """What is needed, and when it is looked for."""

    @pytest.mark.slow
    def test_import_touches_nothing(self) -> None:
        """Without a driver nobody imports torch_npu or changes the environment; S3-15."""
        script = (
            "import os, sys, torch\n"
            "before = dict(os.environ)\n"
            "import ucm, ucm.devices, ucm.devices.npu\n"
            "assert 'torch_npu' not in sys.modules\n"
            "assert before == dict(os.environ)\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)

    def test_missing_torch_npu_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where torch_npu cannot be imported, the error says what to install."""
        monkeypatch.setitem(sys.modules, "torch_npu", None)
        with pytest.raises(ConfigError, match=r"\.\[npu\].* CANN") as caught:
            NpuDriver(INDEX)
        assert ("device", f"npu:{INDEX}") == (caught.value.key, caught.value.value)

    def test_unusable_cann_is_named(self, runtime: FakeNpu) -> None:
        """What CANN says when it cannot start is part of the error."""
        runtime.error = "aclInit failed, error code is 507899"
        with pytest.raises(ConfigError, match="507899"):
            NpuDriver(INDEX)

    @pytest.mark.parametrize("num_devices", [0, INDEX])
    def test_missing_device_is_named(self, runtime: FakeNpu, num_devices: int) -> None:
        """A device that torch_npu does not see is a wrong setting."""
        runtime.num_devices = num_devices
        with pytest.raises(ConfigError, match=f"npu:3.*sees {num_devices} devices"):
            NpuDriver(INDEX)

    def test_thread_is_bound_to_the_device(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """The calling thread's device is the driver's, whose tensors are `npu`."""
        assert INDEX == runtime.selected
        assert "npu" == driver.device_type

    def test_facts_for_the_log_name_versions_and_kind_of_copy(
        self, driver: NpuDriver
    ) -> None:
        """Model, versions and how it copies are told; the NUMA node is not known."""
        assert {
            "model": "Ascend910B3",
            "copies": "one by one",
            "torch_npu": VERSION,
            "cann": "8.5.0",
        } == driver.describe()
        assert driver.numa_node() is None

    def test_registered_operator_is_seen_late(
        self, driver: NpuDriver, swap_blocks_batch: None
    ) -> None:
        """An operator that is registered behind the driver's start is used."""
        assert "batched" == driver.describe()["copies"]


class TestEventsAndStreams:
    """Order between streams, through torch_npu's own events only."""

    def test_streams_have_no_priorities(self, driver: NpuDriver) -> None:
        """A stream is made for the device and asks for nothing else."""
        stream = driver.make_stream()
        assert INDEX == stream.device.index
        assert (0, {}) == stream.options

    def test_current_stream_is_the_engines(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """The stream on which this thread submits is asked of torch_npu each time."""
        assert runtime.stream_now is driver.current_stream()
        runtime.stream_now = FakeStream(INDEX)
        assert runtime.stream_now is driver.current_stream()

    @pytest.mark.parametrize("capturing", [False, True])
    def test_capture_is_seen(
        self, driver: NpuDriver, runtime: FakeNpu, capturing: bool
    ) -> None:
        """Whether the current stream records a graph is torch_npu's word."""
        runtime.is_capturing = capturing
        assert capturing is driver.is_capturing()

    def test_event_passes_with_the_work_before_it(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """A recorded event has passed when the device has come to it, not before."""
        event = driver.make_event()
        driver.record(event, driver.make_stream())
        assert not driver.is_done(event)
        driver.synchronize()
        assert driver.is_done(event)
        assert (False, False, False) == event.options

    def test_wait_is_made_on_the_stream(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """The stream that waits is ours, the event stays the engine's; S0-25, S0-26."""
        stream, event = driver.make_stream(), runtime.Event()
        driver.wait(stream, event)
        assert [(stream, event)] == runtime.waits
        assert 0 == event.records

    def test_wait_is_not_taken_for_a_snapshot(self, driver: NpuDriver) -> None:
        """A borrowed event stays borrowed behind the wait: nobody promises less."""
        assert not driver.captures_waits

    def test_event_without_a_record_has_no_handle(self, driver: NpuDriver) -> None:
        """The handle is 0 and the device unknown until somebody records; S0-19."""
        event = driver.make_event()
        assert 0 == driver.handle(event)
        assert driver.device_index(event) is None

    def test_recorded_event_has_handle_and_device(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """The handle is the native one, the device that of the record; S0-18."""
        event = runtime.Event()
        event.record(FakeStream(1))
        assert id(event) == driver.handle(event)
        assert 1 == driver.device_index(event)

    def test_neutral_event_of_torch_is_an_event(self, driver: NpuDriver) -> None:
        """An engine may record `torch.Event`, which calls its handle otherwise."""
        event = SimpleNamespace(event_id=7, device=SimpleNamespace(type="npu", index=3))
        assert 7 == driver.handle(event)
        assert 3 == driver.device_index(event)

    def test_event_of_another_runtime_is_refused(self, driver: NpuDriver) -> None:
        """What has no handle, or another device's, raises by type of mistake; S0-20."""
        cuda = SimpleNamespace(event_id=7, device=torch.device("cuda", 3))
        with pytest.raises(TypeError, match="cuda:3"):
            driver.handle(cuda)
        with pytest.raises(AttributeError):
            driver.handle(object())

    def test_event_that_cannot_be_recorded_is_not_kept(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """After a failed record nobody but the caller holds the event; X-07."""
        event = driver.make_event()
        seen = weakref.ref(event)
        runtime.error = "device lost"
        with pytest.raises(RuntimeError, match="device lost"):
            driver.record(event, driver.make_stream())
        del event
        gc.collect()
        assert seen() is None


class TestCopy:
    """One call where there is an operator for it, else one copy each."""

    @both_ways
    @pytest.mark.parametrize("is_pinned", [False, True])
    def test_copies_are_one_call(
        self,
        driver: NpuDriver,
        runtime: FakeNpu,
        swap_blocks_batch: None,
        direction: Direction,
        is_pinned: bool,
    ) -> None:
        """All pieces go by one call on the given stream, in its order; S2-01, S2-02."""
        memory, event = Memory.make(direction), driver.make_event()
        before, expected = memory.contents(), memory.expected()
        engine_stream = runtime.stream_now
        stream = adopt_and_copy(driver, memory, is_pinned=is_pinned)
        driver.record(event, stream)
        batch = memory.batch
        pieces = [batch.sources, batch.targets, batch.nbytes]
        code = 1 if direction is Direction.TO_HOST else 0
        assert [(stream, code, [item.tolist() for item in pieces])] == runtime.swaps
        assert engine_stream is runtime.stream_now
        assert before == memory.contents()
        driver.synchronize()
        assert driver.is_done(event)
        assert expected == memory.contents()

    @both_ways
    @pytest.mark.parametrize("is_pinned", [False, True])
    def test_without_operator_torch_copies(
        self, driver: NpuDriver, direction: Direction, is_pinned: bool
    ) -> None:
        """Each piece is found in the storage that has it and copied by torch."""
        memory = Memory.make(direction)
        expected = memory.expected()
        adopt_and_copy(driver, memory, is_pinned=is_pinned)
        assert expected == memory.contents()

    @pytest.mark.parametrize("cann", ["8.0.RC3", "8.3.RC1", ""])
    def test_operator_is_left_alone_with_an_old_cann(
        self, runtime: FakeNpu, swap_blocks_batch: None, cann: str
    ) -> None:
        """Without CANN's promise for memory that is not locked, torch copies; S2-04."""
        runtime.cann = cann
        driver, memory = NpuDriver(INDEX), Memory.make(Direction.TO_HOST)
        expected = memory.expected()
        adopt_and_copy(driver, memory)
        assert "one by one" == driver.describe()["copies"]
        assert [] == runtime.swaps
        assert expected == memory.contents()

    @pytest.mark.parametrize("is_pinned", [False, True])
    def test_torch_copies_on_the_stream_and_blocks_where_it_must(
        self, driver: NpuDriver, runtime: FakeNpu, is_pinned: bool
    ) -> None:
        """Copies go on behind the call only with pinned memory, in the stream's order."""
        memory = Memory.make(Direction.TO_DEVICE)
        with CopyLog(runtime) as log:
            stream = adopt_and_copy(driver, memory, is_pinned=is_pinned)
        assert [(stream, is_pinned)] * 3 == log.copies

    def test_operator_with_other_arguments_is_left_alone(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """A direction is never handed to an operator that takes it for something else."""
        memory = Memory.make(Direction.TO_HOST)
        expected = memory.expected()
        with registered(runtime, SCHEMA.replace("int direction", "bool is_ordered")):
            adopt_and_copy(driver, memory, is_pinned=True)
        assert [] == runtime.swaps
        assert expected == memory.contents()

    def test_addresses_may_lie_apart(
        self, driver: NpuDriver, runtime: FakeNpu, swap_blocks_batch: None
    ) -> None:
        """The operator, which reads one piece of memory, gets one; so strides may vary."""
        addresses = np.arange(6, dtype=np.int64)
        batch = CopyBatch(addresses[::2], addresses[1::2], addresses[3:])
        stream = driver.make_stream()
        driver.copy(batch, Direction.TO_HOST, stream, is_pinned=True)
        assert [[0, 2, 4], [1, 3, 5], [3, 4, 5]] == runtime.swaps[0][2]

    def test_order_of_the_npus_own_is_not_copied_by_torch(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """Torch would reorder the bytes of a storage such as FRACTAL_NZ's."""
        runtime.format = 29
        memory = Memory.make(Direction.TO_HOST)
        before = memory.contents()
        with pytest.raises(DeviceError, match="an order of its own"):
            adopt_and_copy(driver, memory)
        assert before == memory.contents()

    @pytest.mark.parametrize("shift", [-64, 61])
    def test_memory_that_nobody_adopted_is_refused_before_any_byte_moves(
        self, driver: NpuDriver, shift: int
    ) -> None:
        """A piece outside of the storages, even by its end, stops the whole copy."""
        memory = Memory.make(Direction.TO_HOST)
        driver.adopt([memory.device[0].untyped_storage()])
        start = memory.device[0].data_ptr()
        batch = CopyBatch(
            np.array([start, start + shift]),
            memory.batch.targets[:2],
            np.array([4, 4]),
        )
        before = memory.contents()
        with pytest.raises(DeviceError, match="none of the 1 storages of npu:3"):
            driver.copy(batch, memory.direction, driver.make_stream(), is_pinned=False)
        assert before == memory.contents()

    def test_adopting_again_replaces_what_was_adopted(self, driver: NpuDriver) -> None:
        """Memory that was given back is not found any more."""
        memory = Memory.make(Direction.TO_HOST)
        stream = adopt_and_copy(driver, memory)
        driver.adopt([])
        with pytest.raises(DeviceError, match="none of the 0 storages"):
            driver.copy(memory.batch, memory.direction, stream, is_pinned=True)


class TestPin:
    """Host memory that others have made."""

    def test_memory_is_registered_as_locked_and_given_back(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """Pages are locked by torch_npu's public call, not mapped, and freed; S2-04."""
        driver.pin(4096, 8192)
        assert {4096: (8192, 0x10000000)} == runtime.pinned
        driver.unpin(4096)
        assert {} == runtime.pinned

    def test_refusal_is_an_error_of_the_system(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """A code that is not 0 leaves the memory as it is; the message has the code."""
        runtime.code = 107000
        with pytest.raises(OSError, match="8192 bytes failed with code 107000"):
            driver.pin(4096, 8192)

    @pytest.mark.parametrize("missing", ["function", "symbol"])
    def test_version_that_cannot_is_an_error_of_the_system(
        self,
        monkeypatch: pytest.MonkeyPatch,
        driver: NpuDriver,
        runtime: FakeNpu,
        missing: str,
    ) -> None:
        """An old torch_npu or CANN pins nothing, and the device has not failed."""
        if missing == "function":
            monkeypatch.delattr(FakeNpu, "npurt")
        runtime.error = "Failed to find function aclrtHostRegisterV2"
        with pytest.raises(
            OSError, match=r"torch_npu 2.13.0 with CANN 8.5.0 cannot lock"
        ):
            driver.pin(4096, 8192)

    @pytest.mark.parametrize("release", ["5.10.0-60.18.0.50.oe2203.aarch64", "4.19.90"])
    def test_old_kernel_is_not_asked(
        self,
        monkeypatch: pytest.MonkeyPatch,
        driver: NpuDriver,
        runtime: FakeNpu,
        release: str,
    ) -> None:
        """Where CANN warns of the kernel, memory is not registered at all."""
        monkeypatch.setattr("platform.release", lambda: release)
        with pytest.raises(OSError, match=release):
            driver.pin(4096, 8192)
        assert {} == runtime.pinned

    def test_failure_to_unlock_is_told(
        self, driver: NpuDriver, runtime: FakeNpu
    ) -> None:
        """Memory that stays locked is not passed over in silence."""
        driver.pin(4096, 8192)
        runtime.code = 507000
        with pytest.raises(RuntimeError, match="507000"):
            driver.unpin(4096)
