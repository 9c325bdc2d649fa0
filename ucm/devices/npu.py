# SPDX-License-Identifier: Apache-2.0
"""
Ascend NPUs through torch_npu; the only module that may import it.

Never run on hardware: ``docs/npu.md`` says what is known, and from where. torch_npu is
imported by ``NpuDriver(index)`` and not before.

Everything goes through torch_npu's own events and streams. It does not hand work to the
device but to a queue of its own, which another thread empties; a raw ``aclrt`` call
would overtake what is still in there.

Threading: as in ``driver``. ``adopt`` runs alone.
"""

import bisect
import ctypes
import platform
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from ucm.devices._regions import Storage
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.driver import Direction, Driver, Event, Stream
from ucm.errors import ConfigError, DeviceError
from ucm.plan import CopyBatch
from ucm.registry import how_to_install

__all__ = ["NpuDevice", "NpuDriver"]

_DIRECTION_CODES = {Direction.TO_DEVICE: 0, Direction.TO_HOST: 1}
"""What vllm-ascend's ``swap_blocks_batch`` calls them."""
_SWAP_BLOCKS_BATCH_TYPES = ["Tensor", "Tensor", "Tensor", "int"]
"""Sources, targets, sizes, direction; with any others it is another operator."""
_FIRST_CANN_TO_BATCH = (8, 5)
"""Before, CANN says of asynchronous copies of memory that is not locked: no error, and
anything may happen. torch_npu makes synchronous ones."""
_PLAIN_FORMATS = frozenset({0, 2, 30})
"""``ACL_FORMAT_NCHW``, ``_ND``, ``_NCDHW``: bytes lie as torch expects."""
_REGISTER_PINNED = 0x10000000
"""``ACL_HOST_REG_PINNED``: lock the pages, map nothing."""
_NEWEST_KERNEL_THAT_CANNOT_PIN = (5, 10)
"""CANN: to register memory that is not locked yet "will cause exceptions" up to here."""


class NpuDriver(Driver):
    """
    One Ascend NPU.

    Copies are one call of vllm-ascend's ``swap_blocks_batch`` where that is registered
    and CANN is new enough, otherwise one torch copy each, for which the driver has to
    know the engine's memory: see ``adopt``.

    Args:
        index: Of the device, as torch_npu counts.

    Raises:
        ConfigError: torch_npu or CANN is missing, or there is no such device.
    """

    device_type = "npu"
    # CANN promises it for the calls that it gets. torch_npu's queue makes them later:
    # where each stream has a queue of its own (PER_STREAM_QUEUE=1), the owner's next
    # record may come before our wait.
    captures_waits = False

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._torch_npu = _import_torch_npu(index)
        self._npu = self._torch_npu.npu
        self._cann = str(self._npu.utils.get_cann_version())
        self.adopt(())

    def adopt(self, storages: Sequence[Storage]) -> None:
        """
        Take the engine's memory, for copies that torch has to make; replaces the last.

        Args:
            storages: Of the device. Kept alive until the next call.
        """
        tensors = cast("Sequence[torch.UntypedStorage]", storages)
        self._storages = sorted(tensors, key=lambda storage: storage.data_ptr())
        self._starts = [storage.data_ptr() for storage in self._storages]

    def bind_thread(self) -> None:
        """Make the device the calling thread's current one."""
        self._npu.set_device(self.index)

    def current_index(self) -> int:
        """Return torch_npu's current device; -1 where the thread has none yet."""
        visit = self._npu.device(self.index)
        with visit:  # ``current_device`` would open the first one for such a thread
            return int(visit.prev_idx)

    def make_current(self, index: int | None) -> None:
        """Have torch_npu's current device be another one again, and open none for that."""
        visit = self._npu.device(self.index)
        visit.prev_idx = index
        visit.__exit__(None, None, None)

    def is_capturing(self) -> bool:
        """Return whether the thread's current stream is recording a graph."""
        return bool(self._npu.is_current_stream_capturing())

    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread submits work."""
        return self._npu.current_stream(self.index)

    def make_stream(self) -> Stream:
        """Return a stream of torch_npu's; it has no priorities."""
        return self._npu.Stream(self.index)

    def key(self, stream: Stream) -> int:
        """
        Return torch's number of a stream.

        Its hash is of the native one, for which torch_npu first has its queue emptied, and
        nobody gets the interpreter lock meanwhile.
        """
        number: int = stream.stream_id
        return number

    def make_event(self) -> Event:
        """Return a new event; nobody waits for it on the host, so none can spin."""
        return self._npu.Event()

    def record(self, event: Event, stream: Stream) -> None:
        """Let *event*, one of ours, pass when all work now in *stream* is done."""
        event.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Hold all work submitted to *stream* from now on until *event* has passed."""
        stream.wait_event(event)

    def is_done(self, event: Event) -> bool:
        """Return whether *event* has passed; False while its record is queued."""
        return bool(event.query())

    def synchronize(self) -> None:
        """Block the thread until all work submitted to the device is done."""
        self._npu.synchronize(self.index)

    def handle(self, event: Event) -> int | None:
        """
        Return the ``aclrtEvent`` of an event; 0 before its first record.

        Engines also record torch's device-neutral events, whose name for it differs.

        Raises:
            AttributeError: It is no event of torch.
            TypeError: It is an event of another runtime.
        """
        handle: int | None = (
            event.npu_event if hasattr(event, "npu_event") else event.event_id
        )
        device = getattr(event, "device", None)
        if device is not None and device.type != self.device_type:
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
        Submit copies between device and host memory to *stream*.

        Raises:
            DeviceError: Torch has to copy memory that nobody adopted. Nothing moved.
        """
        swap = self._find_swap_blocks_batch()
        with self._npu.stream(stream):
            if swap is not None:
                # It first waits until torch_npu's queue is empty, so that what we and
                # the engine have submitted before stays before.
                swap(
                    _as_tensor(batch.sources),
                    _as_tensor(batch.targets),
                    _as_tensor(batch.nbytes),
                    _DIRECTION_CODES[direction],
                )
                return
            for target, source in self._find_views(batch, direction):
                target.copy_(source, non_blocking=is_pinned)

    def _find_swap_blocks_batch(self) -> Callable[..., None] | None:
        # Looked up each time: vllm-ascend registers its operators when it needs one.
        operators = torch.ops._C_ascend  # noqa: SLF001 - the name of its library
        if _version(self._cann) < _FIRST_CANN_TO_BATCH or not hasattr(
            operators, "swap_blocks_batch"
        ):
            return None
        operator: Callable[..., None] = operators.swap_blocks_batch
        schema = operators.swap_blocks_batch.default._schema  # noqa: SLF001 - no other
        types = [str(argument.type) for argument in schema.arguments]
        return operator if types == _SWAP_BLOCKS_BATCH_TYPES else None

    def _find_views(
        self, batch: CopyBatch, direction: Direction
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        find_target, find_source = self._view_device, _view_host
        if direction is Direction.TO_HOST:
            find_target, find_source = find_source, find_target
        copies = zip(
            batch.targets.tolist(),
            batch.sources.tolist(),
            batch.nbytes.tolist(),
            strict=True,
        )
        return [
            (find_target(target, nbytes), find_source(source, nbytes))
            for target, source, nbytes in copies
        ]

    def _view_device(self, address: int, nbytes: int) -> torch.Tensor:
        position = bisect.bisect_right(self._starts, address) - 1
        storage = self._storages[position] if position >= 0 else None
        if storage is None or address + nbytes > storage.data_ptr() + storage.nbytes():
            raise DeviceError(
                f"{nbytes} bytes at {address:#x} are in none of the "
                f"{len(self._storages)} storages of npu:{self.index} that torch may copy"
            )
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        view = empty.set_(storage, address - storage.data_ptr(), (nbytes,), (1,))
        if self._torch_npu.get_npu_format(view) not in _PLAIN_FORMATS:
            raise DeviceError(
                f"npu:{self.index} keeps the KV cache in an order of its own, which "
                f"torch would change; that takes vllm-ascend and CANN 8.5"
            )
        return view

    def pin(self, address: int, nbytes: int) -> None:
        """
        Lock host memory, so that the device reaches it at link speed.

        Raises:
            OSError: It cannot be pinned; the message says why.
        """
        release = platform.release()
        if _version(release) <= _NEWEST_KERNEL_THAT_CANNOT_PIN:
            raise OSError(f"CANN cannot lock memory under Linux {release}, up to 5.10")
        try:
            code = self._npu.npurt().npuHostRegister(address, nbytes, _REGISTER_PINNED)
        except (AttributeError, RuntimeError) as exc:
            # RuntimeError also when this build of torch_npu or CANN lacks the function,
            # which says nothing about the device.
            raise OSError(
                f"torch_npu {self._torch_npu.__version__} with CANN {self._cann} cannot "
                f"lock host memory: {exc}"
            ) from exc
        if code:
            raise OSError(f"npuHostRegister of {nbytes} bytes failed with code {code}")

    def unpin(self, address: int) -> None:
        """Undo ``pin``; no copy may be under way."""
        code = self._npu.npurt().npuHostUnregister(address)
        if code:
            raise RuntimeError(f"npuHostUnregister failed with code {code}")

    def numa_node(self) -> int | None:
        """Return None: torch_npu does not say where a device is attached."""
        return None

    def describe(self) -> dict[str, str]:
        """Return facts for the log: model, how it copies, versions."""
        swap = self._find_swap_blocks_batch()
        return {
            "model": str(self._npu.get_device_name(self.index)),
            "copies": "one by one" if swap is None else "batched",
            "torch_npu": str(self._torch_npu.__version__),
            "cann": self._cann,
        }


class NpuDevice(AcceleratorDevice):
    """
    The calling thread's current Ascend NPU.

    Args:
        num_blocks: See ``AcceleratorDevice``.

    Raises:
        ConfigError: torch_npu or CANN is missing.
    """

    def __init__(self, num_blocks: int | None = None) -> None:
        index = int(_import_torch_npu(0).npu.current_device())
        super().__init__(NpuDriver(index), num_blocks)


def _import_torch_npu(index: int) -> ModuleType:
    value = f"npu:{index}"
    try:
        import torch_npu  # type: ignore[import-not-found,import-untyped,unused-ignore]

        count = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
    except (ImportError, OSError, RuntimeError) as exc:
        raise ConfigError(
            "device",
            value,
            f"torch_npu cannot be used ({exc})",
            f"{how_to_install('npu')} Install CANN, and source its set_env.sh.",
        ) from exc
    if index not in range(count):
        raise ConfigError(
            "device",
            value,
            f"torch_npu sees {count} devices",
            "Look at `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES.",
        )
    found: ModuleType = torch_npu
    return found


def _as_tensor(values: npt.NDArray[np.int64]) -> torch.Tensor:
    # The operator reads them as one piece of memory whatever their strides.
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))


def _view_host(address: int, nbytes: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
