# SPDX-License-Identifier: Apache-2.0
"""
A torch_npu with the real one's signatures, as far as the NPU driver uses it.

The device's memory is memory of the host. Work is done when the device is synchronized,
in the order in which it was submitted.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from ucm.devices import npu
from ucm.devices.driver import Direction
from ucm.plan import CopyBatch

__all__ = [
    "INDEX",
    "SCHEMA",
    "VERSION",
    "CopyLog",
    "FakeNpu",
    "FakeStream",
    "Memory",
    "install",
    "registered",
]

VERSION = "2.13.0"
INDEX = 3
SCHEMA = "swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()"
"""As vllm-ascend registers it."""


class FakeEvent:
    """``torch_npu.npu.Event``: no native event before the first record."""

    runtime: ClassVar["FakeNpu"]

    def __init__(self, enable_timing=False, blocking=False, interprocess=False) -> None:
        self.options = (enable_timing, blocking, interprocess)
        self.npu_event = 0
        self.device: object = None
        self.records = self._passes = 0

    def record(self, stream: Any = None) -> None:
        """Pass when the device comes to it."""
        if self.runtime.error:
            raise RuntimeError(self.runtime.error)
        self.npu_event, self.device = id(self), stream.device
        self.records += 1
        self.runtime.work.append(self._pass)

    def wait(self, stream: Any = None) -> None:
        """Take a note."""
        self.runtime.waits.append((stream, self))

    def query(self) -> bool:
        """Return whether the last record has passed."""
        return self._passes == self.records

    def _pass(self) -> None:
        self._passes += 1


class FakeStream:
    """``torch_npu.npu.Stream``."""

    emptied = 0
    """How often the queue was emptied for the native stream, by a thread that waited."""

    def __init__(self, device=None, priority=0, **kwargs) -> None:
        self.device = SimpleNamespace(type="npu", index=device)
        self.options = (priority, kwargs)
        self.stream_id = id(self)

    @property
    def npu_stream(self) -> int:
        """Return the native stream, once the queue is empty."""
        FakeStream.emptied += 1
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same native stream."""
        return isinstance(other, FakeStream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        """Return a hash of the native stream, as the real one does."""
        return hash(self.npu_stream)

    def wait_event(self, event: FakeEvent) -> None:
        """Forward, as the real one does."""
        event.wait(self)


class FakeContext:
    """What ``torch_npu.npu.stream`` returns."""

    def __init__(self, runtime: "FakeNpu", stream: FakeStream) -> None:
        self._runtime, self._stream = runtime, stream

    def __enter__(self) -> None:
        self._before, self._runtime.stream_now = self._runtime.stream_now, self._stream

    def __exit__(self, *error: object) -> None:
        self._runtime.stream_now = self._before


class FakeVisit:
    """What ``torch_npu.npu.device`` returns; it opens no device behind itself."""

    def __init__(self, runtime: "FakeNpu", index: int) -> None:
        self._runtime, self._index, self.prev_idx = runtime, index, -1

    def __enter__(self) -> None:
        before = self._runtime.selected
        self.prev_idx = -1 if before is None else before
        self._runtime.set_device(self._index)

    def __exit__(self, *error: object) -> None:
        self._runtime.selected = max(0, self.prev_idx)


class FakeNpu:
    """``torch_npu.npu``, and the device behind it."""

    def __init__(self) -> None:
        self.Event = type("Event", (FakeEvent,), {"runtime": self})
        self.Stream = FakeStream
        self.utils = SimpleNamespace(get_cann_version=self._get_cann_version)
        self.cann = "8.5.0"
        self.num_devices = INDEX + 1
        self.selected: int | None = None
        self.opened: set[int] = set()
        self.stream_now = FakeStream(INDEX)
        self.is_capturing = False
        self.work: list[Callable[[], object]] = []
        self.waits: list[tuple[FakeStream, FakeEvent]] = []
        self.swaps: list[tuple[FakeStream, int, list[list[int]]]] = []
        self.pinned: dict[int, tuple[int, int]] = {}
        self.code = 0
        self.format = 2
        self.error = ""

    def is_available(self) -> bool:
        """Return whether there is a device; raise what CANN says."""
        if self.error:
            raise RuntimeError(self.error)
        return self.num_devices > 0

    def device_count(self) -> int:
        """Return how many devices there are."""
        return self.num_devices

    def set_device(self, device) -> None:
        """Select a device, and open it; threads are one here."""
        self.opened.add(device)
        self.selected = device

    def device(self, device) -> FakeVisit:
        """Make a device the selected one for a while."""
        return FakeVisit(self, device)

    def is_current_stream_capturing(self) -> bool:
        """Return what the test says."""
        return self.is_capturing

    def current_stream(self, device=None) -> FakeStream:
        """Return the stream that is current now."""
        assert self.selected == device
        return self.stream_now

    def stream(self, stream) -> FakeContext:
        """Make *stream* current for a while."""
        return FakeContext(self, stream)

    def synchronize(self, device=None) -> None:
        """Do all work."""
        assert self.selected == device
        while self.work:
            self.work.pop(0)()

    def get_device_name(self, device_name=None) -> str:
        """Return a model."""
        return f"Ascend910B{device_name}"

    def npurt(self) -> object:
        """Return the calls that register memory; raise what CANN says."""
        if self.error:
            raise RuntimeError(self.error)
        return SimpleNamespace(
            npuHostRegister=self._register, npuHostUnregister=self._unregister
        )

    def _get_cann_version(self, module="CANN") -> str:
        return self.cann

    def _register(self, ptr: int, size: int, flags: int) -> int:
        self.pinned[ptr] = size, flags
        return self.code

    def _unregister(self, ptr: int) -> int:
        del self.pinned[ptr]
        return self.code


def install(patch: pytest.MonkeyPatch) -> FakeNpu:
    """Make ``import torch_npu`` find a new fake; return its ``npu``."""
    module, runtime = ModuleType("torch_npu"), FakeNpu()
    module.__dict__.update(
        npu=runtime,
        __version__=VERSION,
        get_npu_format=lambda tensor: runtime.format,
    )
    patch.setitem(sys.modules, "torch_npu", module)
    return runtime


@contextlib.contextmanager
def registered(runtime: FakeNpu, schema: str) -> Iterator[None]:
    """Have an operator where vllm-ascend has its own; it copies when run."""
    library = torch.library.Library("_C_ascend", "DEF")
    library.define(schema)

    def swap(
        sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, code: int
    ) -> None:
        assert all(item.is_contiguous() for item in (sources, targets, sizes))
        copies = [sources.tolist(), targets.tolist(), sizes.tolist()]
        runtime.swaps.append((runtime.stream_now, code, copies))
        runtime.work.append(lambda: [move(*copy) for copy in zip(*copies, strict=True)])

    library.impl("swap_blocks_batch", swap, "CPU")
    yield
    library._destroy()


def move(source: int, target: int, nbytes: int) -> None:
    """Copy bytes from address to address."""
    npu._view_host(target, nbytes).copy_(npu._view_host(source, nbytes))


@attrs.define
class Memory:
    """Two storages of the engine and a pool of the store, with a copy of 3 pieces."""

    device: list[torch.Tensor]
    host: torch.Tensor
    batch: CopyBatch
    direction: Direction

    @classmethod
    def make(cls, direction: Direction) -> "Memory":
        """Fill all bytes with numbers of their own."""
        values = torch.arange(192, dtype=torch.uint8)
        first, host, second = (part.clone() for part in values.split(64))
        at_device = [second.data_ptr() + 60, first.data_ptr(), second.data_ptr() + 8]
        at_host = [host.data_ptr() + offset for offset in (0, 32, 4)]
        ends = (at_device, at_host)
        sources, targets = ends if direction is Direction.TO_HOST else ends[::-1]
        batch = CopyBatch(np.array(sources), np.array(targets), np.array([4, 16, 20]))
        return cls([second, first], host, batch, direction)

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the engine's storages."""
        return [tensor.untyped_storage() for tensor in self.device]

    def expected(self) -> list[list[int]]:
        """Return all bytes, the engine's first, as they should be after the copy."""
        second, first, host = (
            np.array(tensor.tolist()) for tensor in (*self.device, self.host)
        )
        for ours, theirs in [
            (host[0:4], second[60:64]),
            (host[32:48], first[0:16]),
            (host[4:24], second[8:28]),
        ]:
            if self.direction is Direction.TO_HOST:
                ours[:] = theirs
            else:
                theirs[:] = ours
        return [second.tolist(), first.tolist(), host.tolist()]

    def contents(self) -> list[list[int]]:
        """Return all bytes, the engine's first."""
        return [tensor.tolist() for tensor in (*self.device, self.host)]


class CopyLog(TorchFunctionMode):
    """Takes a note of each torch copy: its stream, and whether it may return early."""

    def __init__(self, runtime: FakeNpu) -> None:
        self._runtime = runtime
        self.copies: list[tuple[FakeStream, object]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None) -> object:
        """Note and go on."""
        if func is torch.Tensor.copy_:
            self.copies.append((self._runtime.stream_now, kwargs["non_blocking"]))
        return func(*args, **(kwargs or {}))
