# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernel for checksums, compiled for the CPU: each of its threads is one here."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

import ucm.devices
from tests.devices.cuda_kit import FakeCuda, make_driver, stream
from ucm.devices._cuda_digester import CudaDigester
from ucm.devices.digests import check
from ucm.devices.driver import Placed, Table

DEVICES = Path(ucm.devices.__file__).parent
HARNESS = Path(__file__).with_name("digest_harness.cpp")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Return what launches the kernel."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ is not there to compile the kernel with")
    built = tmp_path_factory.mktemp("kernel") / "kernel.so"
    flags = ["-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
    command = [compiler, *flags, f"-I{DEVICES}", str(HARNESS), "-o", str(built)]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(built)).launch


@pytest.mark.parametrize("num_chunks", [1, 2, 31, 32, 33, 65])
def test_the_kernel_computes_what_xxhash_does(launch, num_chunks):
    """Of blocks of any number of chunks, which lie anywhere, whatever their seed,
    by fewer groups of threads than there are blocks."""
    dice = np.random.default_rng(num_chunks)
    data = dice.integers(0, 256, (5, num_chunks, 1024), np.uint8)
    places = dice.permutation(num_chunks)
    starts = (data.ctypes.data + places * 1024).astype(np.uint64)
    strides = np.full(num_chunks, num_chunks * 1024, np.uint64)
    job = np.zeros((3, 3), np.uint64)
    job[0], job[1] = [4, 0, 3], [0, 2**64 - 1, 0x9E3779B97F4A7C15]
    arrays = [starts, strides, *job]
    first, second, *rows = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
    sizes = ctypes.c_uint64(num_chunks), ctypes.c_uint64(len(job[0]))
    launch(2, first, second, sizes[0], *rows, sizes[1])
    blocks = job[0].astype(int).tolist()
    wanted = [
        xxh3_64_intdigest(data[block][places].tobytes(), seed)
        for block, seed in zip(blocks, job[1].tolist(), strict=True)
    ]
    assert wanted == job[2].tolist()


def test_what_the_driver_is_given_was_made_of_this_source():
    """``scripts/digest_ptx.py`` has run since the source was changed, and made this."""
    source = (DEVICES / "digest.cu").read_bytes()
    first, second, code = (DEVICES / "digest.ptx").read_bytes().split(b"\n", 2)
    assert b"// digest.cu" in first
    of, made = (f"{xxh3_64_intdigest(each):016x}" for each in (source, code))
    assert f"// of {of} it made {made}" == second.decode()


class HostDigester(CudaDigester):
    """One whose device is the host, but for the calls of CUDA."""

    def place(self, words):
        """Keep them."""
        words = words.copy()
        return Placed(words.ctypes.data, words)

    def make_memory(self, num_words):
        """Return some."""
        return np.zeros(num_words, np.uint64)


class TestCalls:
    def test_a_launch_has_the_kernel_arguments(self):
        """What CUDA is told makes a kernel compute the right digests, in the stream, on
        no more groups of threads than there are blocks, apart from graphs."""
        fake = FakeCuda()
        digester = HostDigester(0, make_driver(fake)._library)
        assert b"ucm_digest" == fake.kernel
        assert (DEVICES / "digest.ptx").read_bytes() == fake.code
        check(digester, stream(), lambda: None)
        (launched,) = fake.launches
        assert [3, 1, 1, 288, 1, 1, 0] == launched.shape
        assert (stream().cuda_stream, 2) == (launched.stream, launched.mode)
        threads = re.search(r"maxntid (\d+)", fake.code.decode())
        assert "288" == threads.group(1)

    def test_the_kernel_is_loaded_apart_from_graphs(self):
        """An engine may record one on another thread."""
        fake = FakeCuda()
        assert isinstance(make_driver(fake).make_digester(), CudaDigester)
        assert (2, 0) == (fake.code_mode, fake.mode)

    def test_the_kernel_is_loaded_for_its_own_device(self):
        """A thread that has used another device is bound anew."""
        fake = FakeCuda()
        first, second = make_driver(fake, 1), make_driver(fake, 2)
        first._library.bind_thread(1)
        second._library.bind_thread(2)
        first.make_digester()
        assert fake.contexts[0] == fake.contexts[-1] != fake.contexts[1]

    def test_many_blocks_take_turns(self):
        """However many there are, half of a large GPU's processors compute them."""
        fake = FakeCuda()
        digester = HostDigester(0, make_driver(fake)._library)
        table = Table(
            digester.place(np.zeros(0, np.int64)),
            digester.place(np.zeros(0, np.int64)),
            0,
        )
        digester.submit(table, digester.make_memory(300).reshape(3, 100), 100, stream())
        assert [64, 1, 1] == fake.launches[0].shape[:3]

    def test_a_driver_that_refuses_the_kernel_is_named(self):
        """The error says which one; nothing has failed."""
        fake = FakeCuda()
        fake.refuse = 1
        driver = make_driver(fake)
        with pytest.raises(
            OSError, match="ucm_digest cannot be loaded: CUDA_ERROR_INV"
        ):
            driver.make_digester()
        assert 0 == fake.mode

    def test_a_launch_that_fails_is_an_error(self):
        """The device's: what stands before it in the stream may be under way."""
        fake = FakeCuda()
        digester = HostDigester(0, make_driver(fake)._library)
        fake.refuse = 1
        table = Table(*[digester.place(np.zeros(1, np.int64))] * 2, 1)
        with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA_ERROR_INVALID"):
            digester.submit(table, digester.make_memory(3).reshape(3, 1), 1, stream())

    def test_a_first_launch_that_is_refused_is_no_failure(self):
        """The host computes; an error that stays is found by whoever waits."""
        fake, waits = FakeCuda(), []
        digester = HostDigester(0, make_driver(fake)._library)
        fake.refuse = 1
        with pytest.raises(OSError, match="cuLaunchKernel: CUDA_ERROR_INVALID"):
            check(digester, stream(), lambda: waits.append(1))
        assert [1] == waits
