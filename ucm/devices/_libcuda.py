# SPDX-License-Identifier: Apache-2.0
"""
libcuda, where torch has no word for what it can do.

torch cannot copy many pages by one call, cannot pin memory that somebody else allocated,
and does not always bind a new thread to its device: ``torch.cuda.set_device(0)`` leaves a
thread without a context, because 0 is what a thread starts with. libcuda is there wherever
torch's CUDA works, so that no other package is needed.

Copies are batched by ``cuMemcpyBatchAsync`` (CUDA 12.8). Its parameters changed with
CUDA 13.0, so it is asked for by version and never by name. On older drivers, and from
memory that is not pinned, each copy is a call of its own.

While any thread records a graph, CUDA forbids all others to ask whether an event has
passed, and the graph is lost if they do. Our calls only ever touch streams and events
of our own, which are in no graph; ``apart_from_graphs`` says so.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ucm import native
from ucm.devices.driver import Direction, News
from ucm.plan import CopyBatch

__all__ = ["CudaLibrary"]

_MOST_COPIES = 128
"""
Copies of one call. More of them are slower: 16 KB pages to an H100 by calls of 128, 512 and
2048 moved at 25, 21 and 16 GB/s, all of 16 MB in one at 15, and large pages alike
(``docs/gpu.md``). Drivers of 2026 crashed on batches of 50 000.
"""
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS, _LIMIT_NS = 20_000, 200_000, 50_000_000
"""Between two looks at events, and of all of them together."""
_NOT_READY = 600
_PORTABLE = 1
_RELAXED = 2
_READ_IN_STREAM_ORDER = 1
_READ_ANY_TIME = 3

_Function = Callable[..., int]
_NUMBER, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_LISTS = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)
"""Targets, sources, sizes, their count; attributes, where each begins, their count."""
_BATCH = ctypes.CFUNCTYPE(_NUMBER, *_LISTS, _POINTER)
"""Since CUDA 13.0: behind the lists comes the stream."""
_BATCH_BEFORE_13 = ctypes.CFUNCTYPE(_NUMBER, *_LISTS, _POINTER, _POINTER)
"""Before: behind the lists, where to put the number of the copy that failed."""


class CudaLibrary:
    """
    The entry points of libcuda that are used.

    Threading: any thread, after ``bind_thread`` on that thread.

    Args:
        library: libcuda, or what looks like it.
        is_batched: False to make each copy by a call of its own.
    """

    def __init__(self, library: Any, *, is_batched: bool = True) -> None:  # noqa: ANN401
        self._library = library
        self._error_name = self._entry("cuGetErrorName", _NUMBER, _POINTER)
        self._get_version = self._entry("cuDriverGetVersion", _POINTER)
        self._get_device = self._entry("cuDeviceGet", _POINTER, _NUMBER)
        self._get_bus_id = self._entry(
            "cuDeviceGetPCIBusId", _POINTER, _NUMBER, _NUMBER
        )
        self._retain = self._entry("cuDevicePrimaryCtxRetain", _POINTER, _NUMBER)
        self._set_context = self._entry("cuCtxSetCurrent", _POINTER)
        self._exchange_mode = self._brief("cuThreadExchangeStreamCaptureMode", _POINTER)
        self._query = ctypes.cast(library.cuEventQuery, _POINTER)
        self._load = self._entry("cuModuleLoadData", _POINTER, _POINTER)
        self._find = self._entry(
            "cuModuleGetFunction", _POINTER, _POINTER, ctypes.c_char_p
        )
        self._launch = self._entry(
            "cuLaunchKernel", _POINTER, *[_NUMBER] * 7, _POINTER, _POINTER, _POINTER
        )
        self._register = self._entry("cuMemHostRegister_v2", _POINTER, _SIZE, _NUMBER)
        self._unregister = self._entry("cuMemHostUnregister", _POINTER)
        copy = (_POINTER, _POINTER, _SIZE, _POINTER)
        self._copy = {
            Direction.TO_HOST: self._entry("cuMemcpyDtoHAsync_v2", *copy),
            Direction.TO_DEVICE: self._entry("cuMemcpyHtoDAsync_v2", *copy),
        }
        self._batch, self._names_failed = self._find_batch(is_batched)
        # The attributes of all copies: how the source is read, two hints, flags.
        self._attributes = {
            Direction.TO_HOST: np.array([_READ_IN_STREAM_ORDER, *[0] * 5], np.uint32),
            # Slots were written before the call and stay ours until the fence behind
            # it has passed: they may be read before the stream comes to the copy.
            Direction.TO_DEVICE: np.array([_READ_ANY_TIME, *[0] * 5], np.uint32),
        }
        # One index would do for one entry of attributes, say CUDA's documents; what
        # reads one for each copy must not read behind the array.
        self._indexes = np.zeros(_MOST_COPIES, np.uint64)
        self._contexts: dict[int, int] = {}

    @property
    def is_batched(self) -> bool:
        """Whether a batch is submitted by few calls."""
        return self._batch is not None

    def version(self) -> str:
        """Return the version of CUDA that the driver offers."""
        version = _NUMBER()
        self._check("cuDriverGetVersion", self._get_version(ctypes.byref(version)))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def bind_thread(self, index: int) -> None:
        """Make torch's context of the device the calling thread's current one."""
        if index not in self._contexts:
            context = _POINTER()
            # Kept until the process ends, as torch keeps it.
            self._check(
                "cuDevicePrimaryCtxRetain",
                self._retain(ctypes.byref(context), self._device(index)),
            )
            self._contexts[index] = context.value or 0
        self._check("cuCtxSetCurrent", self._set_context(self._contexts[index]))

    @contextmanager
    def apart_from_graphs(self) -> Iterator[None]:
        """Say that the thread's calls have nothing to do with graphs under record."""
        mode = _NUMBER(_RELAXED)
        name = "cuThreadExchangeStreamCaptureMode"
        self._check(name, self._exchange_mode(ctypes.byref(mode)))
        try:
            yield
        finally:
            self._check(name, self._exchange_mode(ctypes.byref(mode)))

    def await_any(self, events: Sequence[int], news: News) -> bool:
        """Look at events again and again; see ``Driver.await_any``."""
        if native.LIBRARY is None:
            return False
        handles = (_POINTER * len(events))(*events)
        number = ctypes.byref(news.number)
        pauses = (_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS, _LIMIT_NS)
        with self.apart_from_graphs():
            native.LIBRARY.await_events(
                self._query,
                handles,
                len(events),
                _NOT_READY,
                number,
                news.seen,
                *pauses,
            )
        return True

    def copy_batch(self, batch: CopyBatch, direction: Direction, stream: int) -> None:
        """
        Submit copies by a call for each ``_MOST_COPIES`` of them.

        Raises:
            RuntimeError: CUDA refused; names the error. Earlier copies may be under way.
        """
        assert self._batch is not None
        lists = [
            np.ascontiguousarray(each, np.int64)
            for each in (batch.targets, batch.sources, batch.nbytes)
        ]
        addresses = [each.ctypes.data for each in lists]
        attributes = self._attributes[direction].ctypes.data
        indexes = self._indexes.ctypes.data
        failed = _SIZE()
        behind = [ctypes.byref(failed), stream] if self._names_failed else [stream]
        begun = _SIZE()
        submit = self._copies_by_one if native.LIBRARY is None else self._copies
        code = submit(addresses, len(batch), attributes, indexes, behind, begun)
        if code:
            start = begun.value
            count = min(_MOST_COPIES, len(batch) - start)
            where = f"copies {start} to {start + count - 1} of {len(batch)}"
            if self._names_failed and failed.value < count:
                where = f"copy {start + failed.value} of {len(batch)}"
            self._check(f"cuMemcpyBatchAsync, {where}", code)

    def _copies(
        self,
        addresses: list[int],
        count: int,
        attributes: int,
        indexes: int,
        behind: list[Any],
        begun: ctypes.c_size_t,
    ) -> int:
        """Submit all by one call from Python; return the error, and where it *begun*."""
        assert native.LIBRARY is not None
        lists = *addresses, count, _MOST_COPIES, attributes, indexes
        last = behind[1] if self._names_failed else None
        return native.LIBRARY.copies(
            self._batch, *lists, behind[0], last, ctypes.byref(begun)
        )

    def _copies_by_one(
        self,
        addresses: list[int],
        count: int,
        attributes: int,
        indexes: int,
        behind: list[Any],
        begun: ctypes.c_size_t,
    ) -> int:
        """Do as ``_copies`` does, by a call for each batch."""
        assert self._batch is not None
        for start in range(0, count, _MOST_COPIES):
            begun.value = start
            at = [address + start * 8 for address in addresses]
            some = min(_MOST_COPIES, count - start)
            code = self._batch(*at, some, attributes, indexes, 1, *behind)
            if code:
                return code
        return 0

    def copy_each(self, batch: CopyBatch, direction: Direction, stream: int) -> None:
        """Submit copies one by one; from memory that is not pinned they may block."""
        copy = self._copy[direction]
        for source, target, nbytes in zip(
            batch.sources.tolist(),
            batch.targets.tolist(),
            batch.nbytes.tolist(),
            strict=True,
        ):
            code = copy(target, source, nbytes, stream)
            if code:
                self._check(f"a copy of {nbytes} bytes {direction.value}", code)

    def pin(self, address: int, nbytes: int) -> None:
        """
        Register the pages that the memory touches, and no more.

        Raises:
            OSError: CUDA refused; names the error. So it does for a page that is pinned
                already.
        """
        start = _page_start(address)
        stop = _page_start(address + nbytes + mmap.PAGESIZE - 1)
        code = self._register(start, stop - start, _PORTABLE)
        if code:
            raise OSError(
                f"{nbytes} bytes at {address:#x} cannot be pinned: {self._name(code)}"
            )

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self._check("cuMemHostUnregister", self._unregister(_page_start(address)))

    def load(self, code: bytes, name: str) -> int:
        """
        Return a kernel of PTX, which the driver compiles for the thread's current device.

        It stays there until the process ends.

        Raises:
            OSError: CUDA refused; names the error.
        """
        module, kernel = _POINTER(), _POINTER()
        error = self._load(ctypes.byref(module), code) or self._find(
            ctypes.byref(kernel), module, name.encode()
        )
        if error:
            raise OSError(f"{name} cannot be loaded: {self._name(error)}")
        return kernel.value or 0

    def launch(
        self,
        kernel: int,
        num_groups: int,
        num_threads: int,
        arguments: Sequence[int],
        stream: int,
    ) -> None:
        """
        Submit a kernel whose arguments all have 64 bits.

        Raises:
            RuntimeError: CUDA refused; names the error.
        """
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        start = ctypes.addressof(values)
        places = (_POINTER * len(arguments))(
            *range(start, start + ctypes.sizeof(values), 8)
        )
        shape = num_groups, 1, 1, num_threads, 1, 1, 0
        self._check(
            "cuLaunchKernel", self._launch(kernel, *shape, stream, places, None)
        )

    def bus_id(self, index: int) -> str:
        """Return the device's place on the PCI bus, as the kernel writes it."""
        text = ctypes.create_string_buffer(32)
        self._check(
            "cuDeviceGetPCIBusId",
            self._get_bus_id(ctypes.byref(text), len(text), self._device(index)),
        )
        return text.value.decode().lower()

    def _device(self, index: int) -> int:
        device = _NUMBER()
        self._check("cuDeviceGet", self._get_device(ctypes.byref(device), index))
        return device.value

    def _entry(self, name: str, *arguments: type) -> _Function:
        function = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = _NUMBER
        entry: _Function = function
        return entry

    def _brief(self, name: str, *arguments: type) -> _Function:
        """
        Return an entry that keeps the interpreter lock.

        For what only looks at the thread's own memory: beside a busy thread, getting the
        lock back takes a thousand times as long as the call.
        """
        address = ctypes.cast(getattr(self._library, name), _POINTER).value or 0
        entry: _Function = ctypes.PYFUNCTYPE(_NUMBER, *arguments)(address)
        return entry

    def _find_batch(self, is_batched: bool) -> tuple[_Function | None, bool]:  # noqa: FBT001
        """Return the newest variant that the driver has, and whether it names copies."""
        if not is_batched or not hasattr(self._library, "cuGetProcAddress_v2"):
            return None, False
        find = self._entry(
            "cuGetProcAddress_v2",
            ctypes.c_char_p,
            _POINTER,
            _NUMBER,
            ctypes.c_uint64,
            _POINTER,
        )
        # A driver refuses versions newer than itself.
        variants = ((13000, _BATCH), (12080, _BATCH_BEFORE_13))
        for version, prototype in variants:
            address, status = _POINTER(), _NUMBER()
            code = find(
                b"cuMemcpyBatchAsync",
                ctypes.byref(address),
                version,
                0,
                ctypes.byref(status),
            )
            if not code and address.value:
                return prototype(address.value), prototype is _BATCH_BEFORE_13
        return None, False

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        if self._error_name(code, ctypes.byref(name)) or name.value is None:
            return f"CUDA error {code}"
        return name.value.decode()

    def _check(self, what: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{what}: {self._name(code)}")


def _page_start(address: int) -> int:
    return address & -mmap.PAGESIZE
