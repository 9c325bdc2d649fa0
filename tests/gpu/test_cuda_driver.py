# SPDX-License-Identifier: Apache-2.0
"""What ``CudaDriver`` relies on and promises, on a real GPU."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.gpu.kit import make_host_memory, marks, stall, until
from ucm.devices.cuda import CudaDriver
from ucm.devices.driver import Direction, Stream
from ucm.plan import CopyBatch

pytestmark = marks


@pytest.fixture(params=[True, False], ids=["batched", "one by one"])
def driver(request: pytest.FixtureRequest) -> CudaDriver:
    """Return a driver, bound to this thread."""
    made = CudaDriver(0, is_batched=request.param)
    made.bind_thread()
    return made


@contextmanager
def pinned(driver: CudaDriver, memory: np.ndarray, is_pinned: bool) -> Iterator[None]:
    """Pin memory for the length of a block, if asked to."""
    if is_pinned:
        driver.pin(memory.ctypes.data, memory.nbytes)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        if is_pinned:
            driver.unpin(memory.ctypes.data)


def finish(driver: CudaDriver, stream: Stream) -> None:
    """Wait for a stream as a device does: by an event of our own."""
    event = driver.make_event()
    driver.record(event, stream)
    until(lambda: driver.is_done(event))


def run_on_thread(work: Callable[[], object]) -> None:
    """Run on a new thread and pass on what it raises."""
    raised: list[BaseException] = []

    def main() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - passed on
            raised.append(exc)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


class Pages:
    """Pages on device and host, in any order, and the batches that carry them."""

    def __init__(self, count: int, page: int) -> None:
        self.random = np.random.default_rng(page)
        self.count, self.page = count, page
        self.device = torch.empty((count, page), dtype=torch.uint8, device="cuda")
        self.host = make_host_memory(count * page).reshape(count, page)
        self.blocks, self.slots = (self.random.permutation(count) for _ in range(2))

    def noise(self) -> np.ndarray:
        """Return bytes as many as there are on either side."""
        return self.random.integers(0, 256, (self.count, self.page), np.uint8)

    def batch(self, direction: Direction) -> CopyBatch:
        """Return the copies of all pages."""
        there = self.device.data_ptr() + self.blocks * self.page
        here = self.host.ctypes.data + self.slots * self.page
        sizes = np.full(self.count, self.page)
        if direction is Direction.TO_HOST:
            return CopyBatch(there, here, sizes)
        return CopyBatch(here, there, sizes)


class TestCopies:
    @pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
    @pytest.mark.parametrize(
        ("count", "page"), [(1, 1), (20000, 100), (3000, 4096), (64, 1 << 20)]
    )
    def test_pages_arrive_in_both_directions(
        self, driver: CudaDriver, count: int, page: int, is_pinned: bool
    ) -> None:
        """S2-02, S2-04: every byte is where it belongs, in batches and one by one."""
        pages = Pages(count, page)
        stream = driver.make_stream()
        with pinned(driver, pages.host, is_pinned):
            noise = pages.noise()
            pages.device.copy_(torch.from_numpy(noise))
            torch.cuda.synchronize()
            batch = pages.batch(Direction.TO_HOST)
            driver.copy(batch, Direction.TO_HOST, stream, is_pinned=is_pinned)
            finish(driver, stream)
            np.testing.assert_array_equal(noise[pages.blocks], pages.host[pages.slots])
            noise = pages.noise()
            pages.host[:] = noise
            batch = pages.batch(Direction.TO_DEVICE)
            driver.copy(batch, Direction.TO_DEVICE, stream, is_pinned=is_pinned)
            finish(driver, stream)
            found = pages.device.cpu().numpy()
            np.testing.assert_array_equal(noise[pages.slots], found[pages.blocks])

    def test_this_driver_has_batches(self) -> None:
        """Or the tests that say *batched* prove nothing of them."""
        driver = CudaDriver(0)
        driver.bind_thread()
        assert "batched" == driver.describe()["copies"]

    def test_bound_thread_can_copy_as_its_first_act(self, driver: CudaDriver) -> None:
        """A new thread gets a context from ``bind_thread`` and from nothing else."""
        pages = Pages(100, 4096)
        pages.device.fill_(7)
        torch.cuda.synchronize()
        stream = driver.make_stream()

        def work() -> None:
            driver.bind_thread()
            driver.copy(
                pages.batch(Direction.TO_HOST),
                Direction.TO_HOST,
                stream,
                is_pinned=True,
            )
            finish(driver, stream)

        with pinned(driver, pages.host, is_pinned=True):
            run_on_thread(work)
        assert (pages.host == 7).all()

    def test_copies_run_in_the_order_of_their_stream(self, driver: CudaDriver) -> None:
        """What a stream waits for is written before its copies read device memory."""
        pages = Pages(3000, 4096)
        with pinned(driver, pages.host, is_pinned=True):
            for value in (3, 5):
                engine, stream = torch.cuda.Stream(), driver.make_stream()
                with torch.cuda.stream(engine):
                    stall(0.05)
                    pages.device.fill_(value)
                    event = torch.cuda.Event()
                    event.record()
                driver.wait(stream, event)
                driver.copy(
                    pages.batch(Direction.TO_HOST),
                    Direction.TO_HOST,
                    stream,
                    is_pinned=True,
                )
                finish(driver, stream)
                assert (pages.host == value).all()

    def test_default_stream_is_refused(self, driver: CudaDriver) -> None:
        """CUDA takes no batch on it."""
        batch = Pages(1, 64).batch(Direction.TO_HOST)
        with pytest.raises(ValueError, match="stream"):
            driver.copy(
                batch, Direction.TO_HOST, torch.cuda.default_stream(), is_pinned=False
            )


class TestPinning:
    def test_pinned_memory_is_known_to_cuda_until_it_is_unpinned(
        self, driver: CudaDriver
    ) -> None:
        """S2-04: torch, which asks CUDA, says that any part of the memory is pinned."""
        memory = make_host_memory(3 << 20)
        part = torch.from_numpy(memory[5000:])
        assert not part.is_pinned()
        driver.pin(memory.ctypes.data, memory.nbytes)
        assert part.is_pinned()
        driver.unpin(memory.ctypes.data)
        assert not part.is_pinned()

    def test_memory_that_is_pinned_already_is_an_os_error(
        self, driver: CudaDriver
    ) -> None:
        """The message has CUDA's name for it, and the first pin still holds."""
        memory = make_host_memory(1 << 20)
        with pinned(driver, memory, is_pinned=True):
            with pytest.raises(OSError, match="ALREADY_REGISTERED"):
                driver.pin(memory.ctypes.data, memory.nbytes)
            assert torch.from_numpy(memory).is_pinned()

    def test_memory_may_be_pinned_while_a_graph_is_recorded(
        self, driver: CudaDriver
    ) -> None:
        """A store grows while an engine records its graphs: none of them is lost."""
        memory = make_host_memory(1 << 20)
        before, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()

        def pin() -> None:
            driver.bind_thread()
            driver.pin(memory.ctypes.data, memory.nbytes)
            driver.unpin(memory.ctypes.data)

        with torch.cuda.graph(graph):
            behind = before + 1
            run_on_thread(pin)
        graph.replay()
        assert 8 == behind.sum().item()

    def test_unpinning_what_is_not_pinned_names_the_error(
        self, driver: CudaDriver
    ) -> None:
        """CUDA says so, and goes on working."""
        with pytest.raises(RuntimeError, match="CUDA_ERROR"):
            driver.unpin(make_host_memory(4096).ctypes.data)
        torch.cuda.synchronize()


class TestEvents:
    @pytest.mark.parametrize(
        "make", [torch.cuda.Event, lambda: torch.Event("cuda")], ids=["cuda", "neutral"]
    )
    def test_event_has_a_handle_from_its_first_record_on(
        self, driver: CudaDriver, make: Callable[[], torch.Event]
    ) -> None:
        """S0-18, S0-19: before it, torch says that the event is done."""
        event = make()
        assert event.query()
        assert not driver.handle(event)
        event.record(torch.cuda.current_stream())
        handle = driver.handle(event)
        assert handle
        assert 0 == driver.device_index(event)
        event.record(torch.cuda.current_stream())
        assert handle == driver.handle(event)

    def test_wait_is_for_the_record_that_was_there(self, driver: CudaDriver) -> None:
        """S0-25: an owner who records again delays nobody who waited before."""
        engine, stream = torch.cuda.Stream(), driver.make_stream()
        theirs, ours = torch.cuda.Event(), driver.make_event()
        theirs.record(engine)
        driver.wait(stream, theirs)
        with torch.cuda.stream(engine):
            stall(1.0)
            theirs.record()
        driver.record(ours, stream)
        until(lambda: driver.is_done(ours))
        assert not engine.query()
        engine.synchronize()

    def test_event_passes_when_its_stream_came_to_it(self, driver: CudaDriver) -> None:
        """Not before, and without anybody who waits for it."""
        stream, event = driver.make_stream(), driver.make_event()
        with torch.cuda.stream(stream):
            stall(0.2)
        driver.record(event, stream)
        assert not driver.is_done(event)
        until(lambda: driver.is_done(event))
        assert stream.query()

    def test_own_streams_yield_to_the_engines(self, driver: CudaDriver) -> None:
        """No stream of anybody has a lower priority."""
        assert torch.cuda.Stream.priority_range()[0] == driver.make_stream().priority


class TestGraphs:
    def test_our_threads_break_no_graph_that_the_engine_records(
        self, driver: CudaDriver
    ) -> None:
        """Copies, records and questions of another thread leave the graph whole."""
        pages = Pages(100, 4096)
        numbers = torch.zeros(1000, device="cuda")
        stream, event = driver.make_stream(), driver.make_event()
        graph, engine = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        numbers.add_(1)  # loads the kernel

        def work() -> None:
            driver.bind_thread()
            batch = pages.batch(Direction.TO_HOST)
            driver.copy(batch, Direction.TO_HOST, stream, is_pinned=True)
            driver.record(event, stream)
            until(lambda: driver.is_done(event))

        with pinned(driver, pages.host, is_pinned=True):
            torch.cuda.synchronize()
            with torch.cuda.stream(engine):
                assert not driver.is_capturing()
                graph.capture_begin()
                assert driver.is_capturing()
                numbers.add_(1)
                run_on_thread(work)
                numbers.add_(1)
                graph.capture_end()
        graph.replay()
        assert bool((3.0 == numbers).all())


class TestDevice:
    def test_facts_are_told(self, driver: CudaDriver) -> None:
        """Model and version are there, and the NUMA node is one or unknown."""
        facts = driver.describe()
        assert torch.cuda.get_device_name(0) == facts["model"]
        assert 12 <= float(facts["driver_cuda"])
        node = driver.numa_node()
        assert node is None or node >= 0

    def test_device_that_is_not_there_is_refused(self) -> None:
        """One behind the last."""
        with pytest.raises(ValueError, match="counts"):
            CudaDriver(torch.cuda.device_count())

    def test_import_touches_no_device(self) -> None:
        """A process that may fork later must not have started CUDA."""
        code = (
            "import torch, ucm.devices.cuda as cuda\n"
            "assert not torch.cuda.is_initialized()\n"
            "assert not torch._C._cuda_hasPrimaryContext(0)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
