# SPDX-License-Identifier: Apache-2.0
"""
NVIDIA GPUs: torch's streams and events, and libcuda where torch has no word.

Importing this module touches no device; only ``CudaDriver`` does.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ucm.devices._cuda_digester import CudaDigester
from ucm.devices._libcuda import CudaLibrary
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.driver import Digester, Direction, Driver, Event, News, Stream
from ucm.errors import ConfigError
from ucm.plan import CopyBatch

__all__ = ["CudaDevice", "CudaDriver", "read_numa_node"]

_cuda: Any = torch.cuda  # noqa: TID251 - the rule sends everybody else here
"""Any: half of it has no types."""


class CudaDriver(Driver):
    """
    One NVIDIA GPU.

    Streams come from torch's pool of 32 for each priority: whoever makes more of the
    lowest priority shares ours, which costs time only.

    Args:
        index: Of the device, as torch counts.
        library: libcuda; the system's if not given.
        is_batched: False to make each copy by a call of its own, as on old drivers.

    Raises:
        ConfigError: torch has no CUDA here, or no such device.
    """

    device_type = "cuda"
    captures_waits = True

    def __init__(
        self,
        index: int,
        library: CudaLibrary | None = None,
        *,
        is_batched: bool = True,
    ) -> None:
        super().__init__(index)
        if library is None:
            _check_torch(index)
            libcuda = ctypes.CDLL("libcuda.so.1")
            library = CudaLibrary(libcuda, is_batched=is_batched)
        self._library = library

    def bind_thread(self) -> None:
        """Make the device the calling thread's current one."""
        _cuda.init()
        _cuda.set_device(self.index)
        self._library.bind_thread(self.index)

    def current_index(self) -> int:
        """Return torch's current device."""
        index: int = _cuda.current_device()
        return index

    def make_current(self, index: int | None) -> None:
        """Have torch's current device be another one again, without a context for that one."""
        _cuda._maybe_exchange_device(index)  # noqa: SLF001 - ends torch's own ``device``

    def is_capturing(self) -> bool:
        """Return whether the thread's current stream is recording a graph."""
        return bool(_cuda.is_current_stream_capturing())

    def current_stream(self) -> Stream:
        """Return torch's current stream."""
        return _cuda.current_stream(self.index)

    def make_stream(self) -> Stream:
        """Return a stream of the lowest priority."""
        lowest, _ = _cuda.Stream.priority_range()
        return _cuda.Stream(self.index, priority=lowest)

    def make_event(self) -> Event:
        """Return an event; CUDA makes its own with the first record."""
        return _cuda.Event(blocking=True)

    def record(self, event: Event, stream: Stream) -> None:
        """Record one of our events."""
        with self._library.apart_from_graphs():
            event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Hold *stream* back until what is recorded in *event* now has passed."""
        stream.wait_event(event)

    def is_done(self, event: Event) -> bool:
        """Return whether *event* has passed."""
        with self._library.apart_from_graphs():
            return bool(event.query())

    def await_any(self, events: Sequence[Event], news: News) -> bool:
        """Wait in native code where there is any."""
        return self._library.await_any([each.cuda_event for each in events], news)

    def make_digester(self) -> Digester:
        """Return the kernel's; see ``Driver.make_digester``."""
        self._library.bind_thread(self.index)  # another device's may be current
        with self._library.apart_from_graphs():
            return CudaDigester(self.index, self._library)

    def synchronize(self) -> None:
        """Block the thread until all work submitted to the device is done."""
        _cuda.synchronize(self.index)

    def handle(self, event: Event) -> int | None:
        """
        Return the ``cudaEvent_t``; 0 before the first record.

        Engines also record torch's device-neutral events, whose name for it differs.

        Raises:
            AttributeError: It is no event of torch.
            TypeError: It is an event of another runtime.
        """
        handle: int | None = (
            event.cuda_event if hasattr(event, "cuda_event") else event.event_id
        )
        device = getattr(event, "device", None)
        if device is not None and device.type != "cuda":
            raise TypeError(f"it is an event of {device}")
        return handle

    def device_index(self, event: Event) -> int | None:
        """Return the device of a recorded event."""
        device = getattr(event, "device", None)
        index: int | None = None if device is None else device.index
        return index

    def copy(
        self,
        batch: CopyBatch,
        direction: Direction,
        stream: Stream,
        *,
        is_pinned: bool,
    ) -> None:
        """
        Submit copies; see ``Driver.copy``.

        Raises:
            ValueError: *stream* is the default stream, which takes no batch; a bug of
                the caller.
            RuntimeError: CUDA refused; names the error.
        """
        if not stream.cuda_stream:
            raise ValueError("copies need a stream of their own")
        is_batched = is_pinned and self._library.is_batched
        copy = self._library.copy_batch if is_batched else self._library.copy_each
        with self._library.apart_from_graphs():
            copy(batch, direction, stream.cuda_stream)

    def pin(self, address: int, nbytes: int) -> None:
        """Lock the pages that the memory touches; see ``CudaLibrary.pin``."""
        with self._library.apart_from_graphs():
            self._library.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        """Undo ``pin``; no copy may be under way."""
        with self._library.apart_from_graphs():
            self._library.unpin(address)

    def numa_node(self) -> int | None:
        """Return the node that the kernel names for the device's place on the bus."""
        return read_numa_node(
            Path("/sys/bus/pci/devices"), self._library.bus_id(self.index)
        )

    def describe(self) -> dict[str, str]:
        """Return model, versions and how it copies."""
        return {
            "model": _cuda.get_device_name(self.index),
            "driver_cuda": self._library.version(),
            "torch_cuda": str(torch.version.cuda),
            "copies": "batched" if self._library.is_batched else "one by one",
        }


class CudaDevice(AcceleratorDevice):
    """
    The calling thread's current NVIDIA GPU.

    Args:
        num_blocks: See ``AcceleratorDevice``.

    Raises:
        ConfigError: torch has no CUDA here.
    """

    def __init__(self, num_blocks: int | None = None) -> None:
        _check_torch(0)  # asking for the current one fails in obscure ways
        super().__init__(CudaDriver(_cuda.current_device()), num_blocks)


def read_numa_node(devices: Path, bus_id: str) -> int | None:
    """
    Return the NUMA node of a PCI device; None when the kernel knows none.

    Args:
        devices: Where the kernel lists them.
        bus_id: Such as ``0000:3b:00.0``.
    """
    try:
        node = int((devices / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _check_torch(index: int) -> None:
    name = f"cuda:{index}"
    if torch.version.cuda is None:
        raise ConfigError(
            "device",
            name,
            f"torch {torch.__version__} is built without CUDA",
            "Install a torch for CUDA, or let the engine run on the CPU.",
        )
    if not _cuda.is_available():
        raise ConfigError(
            "device",
            name,
            "torch finds no usable GPU",
            "See whether nvidia-smi lists it and CUDA_VISIBLE_DEVICES lets it through.",
        )
    count = _cuda.device_count()
    if index not in range(count):
        raise ConfigError(
            "device", name, f"torch counts {count}", f"Use 0 to {count - 1}."
        )
