# SPDX-License-Identifier: Apache-2.0
"""What reaches libcuda: addresses, sizes, attributes, ranges; and what its errors become."""

import ctypes
import mmap

import numpy as np
import pytest

from tests.devices.cuda_kit import (
    INVALID_VALUE,
    NAMELESS,
    PTR,
    RELAXED,
    STREAM,
    Copies,
    FakeCuda,
    make_driver,
    stream,
)
from tests.native_kit import way  # noqa: F401  a fixture
from ucm import native
from ucm.devices._libcuda import CudaLibrary
from ucm.devices.driver import Direction, News
from ucm.plan import CopyBatch

pytestmark = pytest.mark.usefixtures("way")
"""Submit by one call from Python, and by one for each batch."""


BOTH_ABIS = pytest.mark.parametrize("version", [12080, 12090, 13000, 13020])


class TestBatches:
    @BOTH_ABIS
    @pytest.mark.parametrize(
        ("direction", "order"), [(Direction.TO_HOST, 1), (Direction.TO_DEVICE, 3)]
    )
    def test_pinned_copies_are_one_call_with_all_of_them(
        self, version: int, direction: Direction, order: int
    ) -> None:
        """S2-02: each address and size gets there, and how the source may be read."""
        fake, copies = FakeCuda(version), Copies(50)
        make_driver(fake).copy(copies.batch, direction, stream(), is_pinned=True)
        copies.check_moved()
        [call] = fake.calls
        assert copies.batch.sources.tolist() == call.sources
        assert copies.batch.targets.tolist() == call.targets
        assert copies.batch.nbytes.tolist() == call.nbytes
        assert [order, 0, 0, 0, 0, 0] == call.attributes
        assert [0] * 50 == call.indexes
        assert (1, STREAM) == (call.num_attributes, call.stream)
        assert not fake.singles

    @BOTH_ABIS
    @pytest.mark.parametrize(
        ("count", "calls"),
        [(0, []), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])],
    )
    def test_many_copies_are_few_calls(
        self, version: int, count: int, calls: list[int]
    ) -> None:
        """A call takes 128 copies, the last the rest, and no copies are no call."""
        fake, copies = FakeCuda(version), Copies(count)
        make_driver(fake).copy(
            copies.batch, Direction.TO_HOST, stream(), is_pinned=True
        )
        copies.check_moved()
        assert calls == [len(call.nbytes) for call in fake.calls]

    def test_arrays_with_gaps_are_passed_without_them(self) -> None:
        """Every second entry of an array is no list that C could read."""
        fake, copies = FakeCuda(), Copies(20)
        every = [
            np.repeat(each, 2)[::2]
            for each in (copies.batch.sources, copies.batch.targets)
        ]
        sizes = copies.batch.nbytes.astype(np.int32)
        make_driver(fake).copy(
            CopyBatch(*every, sizes), Direction.TO_HOST, stream(), is_pinned=True
        )
        copies.check_moved()

    @pytest.mark.parametrize(
        ("version", "failing", "named"),
        [
            (13000, 5, "copies 128 to 137 of 138"),
            (12080, 5, "copy 133 of 138"),
            (12080, 2**64 - 1, "copies 128 to 137 of 138"),
        ],
    )
    def test_refused_batch_names_the_error_and_what_is_known_of_the_copy(
        self, version: int, failing: int, named: str
    ) -> None:
        """CUDA before 13.0 tells which copy failed, where it knows."""
        fake, copies = FakeCuda(version), Copies(138)
        fake.failing_copy = failing
        fake.refuse, fake.patience = INVALID_VALUE, 1
        driver = make_driver(fake)
        with pytest.raises(
            RuntimeError, match=f"Async, {named}: CUDA_ERROR_INVALID_VALUE"
        ):
            driver.copy(copies.batch, Direction.TO_HOST, stream(), is_pinned=True)
        assert 2 == len(fake.calls)
        assert 0 == fake.mode

    def test_error_without_a_name_is_told_by_its_number(self) -> None:
        """A driver newer than its own list of errors is no riddle."""
        fake = FakeCuda()
        fake.refuse = NAMELESS
        with pytest.raises(RuntimeError, match="CUDA error 4711"):
            make_driver(fake).copy(
                Copies(1).batch, Direction.TO_HOST, stream(), is_pinned=True
            )

    @pytest.mark.parametrize("is_pinned", [True, False])
    def test_default_stream_is_refused(self, is_pinned: bool) -> None:
        """CUDA takes no batch on stream 0, and nothing else should be ordered by it."""
        fake = FakeCuda()
        with pytest.raises(ValueError, match="stream"):
            make_driver(fake).copy(
                Copies(2).batch, Direction.TO_HOST, stream(0), is_pinned=is_pinned
            )
        assert not fake.calls
        assert not fake.singles

    @pytest.mark.parametrize("is_pinned", [True, False])
    def test_copies_have_nothing_to_do_with_graphs(self, is_pinned: bool) -> None:
        """The thread's mode is relaxed for the call, and as it was afterwards."""
        fake = FakeCuda()
        make_driver(fake).copy(
            Copies(2).batch, Direction.TO_HOST, stream(), is_pinned=is_pinned
        )
        assert [RELAXED, 0] == fake.modes
        assert {RELAXED} >= {call.mode for call in fake.calls}


class TestSingleCopies:
    @pytest.mark.parametrize("reason", ["not pinned", "old", "ancient", "asked"])
    @pytest.mark.parametrize(
        ("direction", "name"),
        [
            (Direction.TO_HOST, "cuMemcpyDtoHAsync_v2"),
            (Direction.TO_DEVICE, "cuMemcpyHtoDAsync_v2"),
        ],
    )
    def test_without_batches_each_copy_is_a_call(
        self, reason: str, direction: Direction, name: str
    ) -> None:
        """S2-04: memory that is not pinned, and old drivers, are served all the same."""
        fake, copies = FakeCuda(12070 if reason == "old" else 13000), Copies(20)
        if reason == "ancient":
            del fake.cuGetProcAddress_v2
        driver = make_driver(fake, is_batched=reason != "asked")
        driver.copy(copies.batch, direction, stream(), is_pinned=reason != "not pinned")
        copies.check_moved()
        assert not fake.calls
        assert {(name, STREAM)} == {(each[0], each[-1]) for each in fake.singles}
        assert 20 == len(fake.singles)

    def test_refused_copy_names_the_error(self) -> None:
        """Size, direction and CUDA's word for it are in the message."""
        fake = FakeCuda()
        fake.refuse = INVALID_VALUE
        with pytest.raises(
            RuntimeError, match="8 bytes host_to_device: CUDA_ERROR_INVALID_VALUE"
        ):
            make_driver(fake).copy(
                Copies(2).batch, Direction.TO_DEVICE, stream(), is_pinned=False
            )


class TestPinning:
    PAGE = mmap.PAGESIZE

    @pytest.mark.parametrize(
        ("offset", "nbytes", "pages"),
        [
            (0, 3 * PAGE, 3),
            (0, 1, 1),
            (1, PAGE, 2),
            (PAGE - 1, 1, 1),
            (PAGE - 1, 2, 2),
            (64, 5 * PAGE - 64, 5),
        ],
    )
    def test_pages_that_the_memory_touches_are_registered_and_no_more(
        self, offset: int, nbytes: int, pages: int
    ) -> None:
        """S2-04: whole pages, for all devices, and never up to a power of two."""
        fake, start = FakeCuda(), 0x7F0000000000
        driver = make_driver(fake)
        driver.pin(start + offset, nbytes)
        assert {start: (pages * self.PAGE, 1)} == fake.registered
        driver.unpin(start + offset)
        assert {} == fake.registered

    def test_memory_that_cannot_be_pinned_is_an_os_error_with_cudas_name(self) -> None:
        """S2-04: what is pinned already counts as that: somebody else may unpin it."""
        driver = make_driver(FakeCuda())
        driver.pin(self.PAGE, 10)
        with pytest.raises(OSError, match=r"20 bytes at 0x1005.*ALREADY_REGISTERED"):
            driver.pin(0x1005, 20)

    def test_unpinning_what_is_not_pinned_is_a_device_error(self) -> None:
        """The runtime's word is passed on."""
        with pytest.raises(RuntimeError, match="Unregister: CUDA_ERROR_INVALID_VALUE"):
            make_driver(FakeCuda()).unpin(self.PAGE)


class TestDevice:
    """What is asked about the device."""

    def test_bound_thread_has_the_devices_context(self) -> None:
        """Each call makes it current; torch's context is retained once per device."""
        fake = FakeCuda()
        library = CudaLibrary(fake)
        for index in (1, 0, 1):
            library.bind_thread(index)
        assert [0xC0 + 101, 0xC0 + 100, 0xC0 + 101] == fake.contexts
        assert [101, 100] == fake.retained

    def test_version_is_told_as_people_write_it(self) -> None:
        """12080 is 12.8."""
        assert "12.8" == CudaLibrary(FakeCuda(12080)).version()
        assert "13.0" == CudaLibrary(FakeCuda(13000)).version()

    def test_bus_id_is_told_as_the_kernel_writes_it(self) -> None:
        """The kernel's folders are in lower case."""
        assert "0000:3b:00.0" == CudaLibrary(FakeCuda()).bus_id(1)


class TestWaits:
    """Events are asked by native code, again and again, where there is any."""

    PENDING, GONE = 600, 4711

    def wait(self, fake, events, number=None):
        """Wait as the poller does; return whether there is such a wait."""
        number = number or ctypes.c_int(3)
        return CudaLibrary(fake).await_any(events, News(number, 3))

    @pytest.mark.parametrize("last", [0, GONE])
    def test_wait_ends_with_the_first_event_that_is_over(self, last: int) -> None:
        """Events that are pending are asked again, all of them, apart from any graph, until
        one has passed or failed; which of both is for ``is_done`` to say."""
        fake = FakeCuda()
        fake.answers = {7: [self.PENDING], 8: [self.PENDING] * 3 + [last]}
        if not self.wait(fake, [7, 8]):
            assert native.LIBRARY is None
            assert [] == fake.looks
            return
        assert [(7, RELAXED), (8, RELAXED)] * 4 == fake.looks
        assert 0 == fake.mode

    def test_wait_ends_with_news(self) -> None:
        """Whoever has another event to be asked for changes a number: the wait is over,
        with no event passed."""
        fake, number = FakeCuda(), ctypes.c_int(3)
        fake.answers = {7: [self.PENDING]}

        def change(event: int) -> int:
            number.value = len(fake.looks)
            fake.looks.append((event, 0))
            return self.PENDING

        fake.cuEventQuery = fake._c(change, PTR)
        number.value = 0
        assert (native.LIBRARY is not None) == CudaLibrary(fake).await_any(
            [7], News(number, 0)
        )
        if native.LIBRARY is not None:
            assert 2 == len(fake.looks)

    def test_wait_ends_by_itself(self) -> None:
        """An event that never passes holds nobody for long: others look at deadlines."""
        fake = FakeCuda()
        fake.answers = {7: [self.PENDING]}
        self.wait(fake, [7])
        assert 0 == fake.mode
