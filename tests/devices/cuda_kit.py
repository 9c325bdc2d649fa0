# SPDX-License-Identifier: Apache-2.0
"""A libcuda that moves host memory, and copies that tell whether they were made."""

import ctypes
from types import SimpleNamespace

import numpy as np
from xxhash import xxh3_64_intdigest

from ucm.devices._libcuda import CudaLibrary
from ucm.devices.cuda import CudaDriver
from ucm.plan import CopyBatch

INT, SIZE, PTR = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
STREAM = 0x5700
INVALID_VALUE, ALREADY_REGISTERED, NAMELESS = 1, 712, 4711
ERRORS = {
    INVALID_VALUE: ctypes.create_string_buffer(b"CUDA_ERROR_INVALID_VALUE"),
    ALREADY_REGISTERED: ctypes.create_string_buffer(
        b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    ),
}
RELAXED = 2


def words(address: int, count: int, kind: type = ctypes.c_uint64) -> list[int]:
    """Return what lies at an address."""
    return list((kind * count).from_address(address))


def put(address: int, value: int, kind: type = ctypes.c_uint64) -> None:
    """Write one number to an address."""
    kind.from_address(address).value = value


class FakeCuda:
    """
    Stands for libcuda: C functions that check nothing, note all, and move host memory.

    Args:
        version: Of CUDA, as the driver counts; decides which batch calls there are.
    """

    def __init__(self, version: int = 13000) -> None:
        self.version = version
        self.calls: list[SimpleNamespace] = []
        self.singles: list[tuple[str, int, int, int, int]] = []
        self.registered: dict[int, tuple[int, int]] = {}
        self.contexts: list[int] = []
        self.retained: list[int] = []
        self.mode = 0
        self.modes: list[int] = []
        self.refuse = 0
        self.patience = 0
        self.failing_copy = 2**64 - 1
        self.launches: list[SimpleNamespace] = []
        self.looks: list[tuple[int, int]] = []
        self.answers: dict[int, list[int]] = {}
        lists = (PTR, PTR, PTR, SIZE, PTR, PTR, SIZE)
        self._kept = {
            13000: self._c(self._batch, *lists, PTR),
            12080: self._c(self._batch_before_13, *lists, PTR, PTR),
        }
        self.cuGetProcAddress_v2 = self._c(
            self._find, ctypes.c_char_p, PTR, INT, ctypes.c_uint64, PTR
        )
        self.cuGetErrorName = self._c(self._name, INT, PTR)
        self.cuDriverGetVersion = self._c(self._get_version, PTR)
        self.cuDeviceGet = self._c(self._get_device, PTR, INT)
        self.cuDeviceGetPCIBusId = self._c(self._get_bus_id, PTR, INT, INT)
        self.cuDevicePrimaryCtxRetain = self._c(self._retain, PTR, INT)
        self.cuCtxSetCurrent = self._c(self._set_current, PTR)
        self.cuThreadExchangeStreamCaptureMode = self._c(self._exchange, PTR)
        self.cuEventQuery = self._c(self._query, PTR)
        self.cuMemHostRegister_v2 = self._c(self._register, PTR, SIZE, ctypes.c_uint)
        self.cuMemHostUnregister = self._c(self._unregister, PTR)
        self.cuModuleLoadData = self._c(self._load, PTR, ctypes.c_char_p)
        self.cuModuleGetFunction = self._c(self._function, PTR, PTR, ctypes.c_char_p)
        self.cuLaunchKernel = self._c(self._launch, PTR, *[INT] * 7, PTR, PTR, PTR)
        for name in ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"):
            setattr(self, name, self._c(self._single(name), PTR, PTR, SIZE, PTR))

    @staticmethod
    def _c(function: object, *arguments: type) -> object:
        return ctypes.CFUNCTYPE(INT, *arguments)(function)

    def _batch(self, targets, sources, sizes, count, attributes, indexes, n, stream):
        call = SimpleNamespace(
            targets=words(targets, count),
            sources=words(sources, count),
            nbytes=words(sizes, count),
            attributes=words(attributes, 6, ctypes.c_uint32),
            indexes=words(indexes, count),
            num_attributes=n,
            stream=stream,
            mode=self.mode,
        )
        self.calls.append(call)
        if self.refuse and len(self.calls) > self.patience:
            return self.refuse
        for each in zip(call.targets, call.sources, call.nbytes, strict=True):
            ctypes.memmove(*each)
        return 0

    def _batch_before_13(self, *arguments):
        *lists, failed, stream = arguments
        put(failed, self.failing_copy)
        return self._batch(*lists, stream)

    def _find(self, symbol, address, version, flags, status):
        assert (b"cuMemcpyBatchAsync", 0) == (symbol, flags)
        if version > self.version:
            return INVALID_VALUE
        put(address, ctypes.cast(self._kept[version], PTR).value)
        put(status, 0, INT)
        return 0

    def _single(self, name):
        def copy(target, source, nbytes, stream):
            self.singles.append((name, target, source, nbytes, stream))
            if self.refuse:
                return self.refuse
            ctypes.memmove(target, source, nbytes)
            return 0

        return copy

    def _name(self, code, name):
        if code not in ERRORS:
            return INVALID_VALUE
        put(name, ctypes.addressof(ERRORS[code]))
        return 0

    def _get_version(self, version):
        put(version, self.version, INT)
        return 0

    def _get_device(self, device, index):
        put(device, 100 + index, INT)
        return 0

    def _get_bus_id(self, text, size, device):
        assert size > len(b"0000:3B:00.0")
        assert device == 101
        ctypes.memmove(text, b"0000:3B:00.0\0", 13)
        return 0

    def _retain(self, context, device):
        self.retained.append(device)
        put(context, 0xC0 + device)
        return 0

    def _set_current(self, context):
        self.contexts.append(context)
        return 0

    def _exchange(self, mode):
        before, self.mode = self.mode, words(mode, 1, INT)[0]
        put(mode, before, INT)
        self.modes.append(self.mode)
        return 0

    def _query(self, event):
        """Give an event's next answer; the last one stays."""
        self.looks.append((event, self.mode))
        answers = self.answers[event]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def _register(self, address, nbytes, flags):
        if address in self.registered:
            return ALREADY_REGISTERED
        self.registered[address] = (nbytes, flags)
        return 0

    def _unregister(self, address):
        return 0 if self.registered.pop(address, None) else INVALID_VALUE

    def _load(self, module, code):
        self.code, self.code_mode = code, self.mode
        put(module, 0xD1)
        return self.refuse

    def _function(self, function, module, name):
        assert 0xD1 == module
        self.kernel = name
        put(function, 0xD2)
        return 0

    def _launch(self, kernel, *shape_stream_arguments):
        """Do what the kernel does, one block after the other."""
        *shape, stream, arguments, more = shape_stream_arguments
        assert (0xD2, None) == (kernel, more)
        self.launches.append(
            SimpleNamespace(shape=shape, stream=stream, mode=self.mode)
        )
        values = [words(each, 1)[0] for each in words(arguments, 7)]
        starts, strides, num_chunks, blocks, seeds, digests, count = values
        chunks = [
            (words(starts + 8 * at, 1)[0], words(strides + 8 * at, 1)[0])
            for at in range(num_chunks)
        ]
        for at in range(count):
            block, seed = words(blocks + 8 * at, 1)[0], words(seeds + 8 * at, 1)[0]
            places = [start + block * stride for start, stride in chunks]
            data = b"".join(ctypes.string_at(place, 1024) for place in places)
            put(digests + 8 * at, xxh3_64_intdigest(data, seed))
        return self.refuse


class Copies:
    """Pages of two buffers and the batch that carries one to the other."""

    def __init__(self, count: int, page: int = 8) -> None:
        random = np.random.default_rng(count)
        self.source = random.integers(0, 256, (count + 3, page), np.uint8)
        self.target = np.zeros((count + 3, page), np.uint8)
        self.rows = random.permutation(count + 3)[:count]
        self.places = random.permutation(count + 3)[:count]
        self.batch = CopyBatch(
            self.source.ctypes.data + self.rows * page,
            self.target.ctypes.data + self.places * page,
            np.full(count, page),
        )

    def check_moved(self) -> None:
        """Each page is where it belongs and nothing else was written."""
        expected = np.zeros_like(self.target)
        expected[self.places] = self.source[self.rows]
        np.testing.assert_array_equal(expected, self.target)


def make_driver(fake: FakeCuda, index: int = 1, **options: bool) -> CudaDriver:
    """Return a driver on a libcuda that is none."""
    return CudaDriver(index, CudaLibrary(fake, **options))


def stream(handle: int = STREAM) -> SimpleNamespace:
    """Return what a driver reads of torch's stream."""
    return SimpleNamespace(cuda_stream=handle)
