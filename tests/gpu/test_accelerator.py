# SPDX-License-Identifier: Apache-2.0
"""The whole device layer on a real GPU: contract, borrowed events, torn copies."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import numpy as np
import pytest
import torch

from tests.gpu.kit import make_host_memory, marks, stall
from ucm.blocks import BlockId, GroupId, RowId
from ucm.devices.abc import Fence
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.cuda import CudaDriver
from ucm.errors import (
    EventNotRecordedError,
    EventStaleError,
    ForeignEventError,
    GraphCaptureError,
)
from ucm.plan import HostSlots
from ucm.testing.device_contract import DeviceContract
from ucm.testing.device_memory import Arrangement, Engine, Nesting

pytestmark = marks
TIMEOUT = 60.0


def make_gpu_memory(nbytes: int) -> torch.Tensor:
    """Return memory of an engine on a GPU."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")


class GpuContract(DeviceContract):
    """The contract of devices, in one of the ways in which bytes get to a GPU."""

    is_batched = True
    is_pinned = True

    def make_device(self, num_blocks: int) -> AcceleratorDevice:
        """Return a device on the first GPU."""
        driver = CudaDriver(0, is_batched=self.is_batched)
        return AcceleratorDevice(driver, num_blocks)

    def make_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory on the GPU."""
        return make_gpu_memory(nbytes)

    @contextmanager
    def opened(
        self, arrangement: Arrangement
    ) -> Iterator[tuple[AcceleratorDevice, Engine]]:
        """Register an engine's memory, and pin what pools are made meanwhile."""
        with super().opened(arrangement) as (device, engine):
            self.device = device
            self.pools: list[np.ndarray] = []  # outlive the device, which unpins them
            try:
                yield device, engine
            finally:
                self.device = None

    def make_pool(self, num_slots: int, slot_bytes: int) -> np.ndarray:
        """Return host memory, pinned if the test is about that."""
        memory = make_host_memory(num_slots * slot_bytes)
        pool = memory.reshape(num_slots, slot_bytes)
        device = getattr(self, "device", None)
        if self.is_pinned and device is not None:
            assert device.pin(pool) == ""
            assert torch.from_numpy(pool).is_pinned()
            self.pools.append(pool)
        return pool


class TestPinnedBatched(GpuContract):
    """As it is meant to be used."""


class TestPinnedOneByOne(GpuContract):
    """As on drivers older than CUDA 12.8."""

    is_batched = False


class TestPageable(GpuContract):
    """Where nothing could be pinned."""

    is_pinned = False


@attrs.define
class Opened:
    """A device with an engine's memory: two rows of pages, and a pinned slot for each."""

    device: AcceleratorDevice
    rows: torch.Tensor
    pool: np.ndarray
    random: np.random.Generator

    def fill(self, blocks: slice, values: torch.Tensor, pieces: int = 8) -> None:
        """Overwrite blocks as an engine's layers do, by kernels on the current stream."""
        parts = zip(
            self.rows[:, blocks].chunk(pieces, 1), values.chunk(pieces), strict=True
        )
        for part, value in parts:
            part.copy_(value[None, :, None].expand_as(part))

    def slots(self, blocks: slice) -> tuple[list[BlockId], HostSlots]:
        """Return blocks in some order, each with the slot of its own number."""
        ids = self.random.permutation(np.arange(blocks.start, blocks.stop))
        slots = HostSlots(self.pool, ids, self.pool.shape[1])
        return [BlockId(each) for each in ids.tolist()], slots


NUM_BLOCKS, PAGE = 8192, 256
HALVES = (slice(0, NUM_BLOCKS // 2), slice(NUM_BLOCKS // 2, NUM_BLOCKS))
ROWS = [RowId(0), RowId(1)]
GROUP = GroupId(0)


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Open a device for the length of a test."""
    engine = Engine(
        Arrangement(
            num_blocks=NUM_BLOCKS,
            nesting=Nesting.LAYERS,
            pages=(PAGE, PAGE),
            paddings=(0, 0),
            groups=((0, 1),),
        ),
        make_gpu_memory,
    )
    device = AcceleratorDevice(CudaDriver(0), NUM_BLOCKS)
    device.register(engine.layout, engine.kv_caches)
    pool = make_host_memory(NUM_BLOCKS * 2 * PAGE).reshape(NUM_BLOCKS, 2 * PAGE)
    assert device.pin(pool) == ""
    rows = engine.memory[0].view(2, NUM_BLOCKS, PAGE)
    yield Opened(device, rows, pool, np.random.default_rng(0))
    torch.cuda.synchronize()
    device.close()
    assert not torch.from_numpy(pool).is_pinned()


NEUTRAL = pytest.mark.parametrize(
    "make", [torch.cuda.Event, lambda: torch.Event("cuda")], ids=["cuda", "neutral"]
)


class TestBorrowedEvents:
    @NEUTRAL
    def test_event_without_a_record_is_refused(
        self, opened: Opened, make: Callable[[], torch.Event]
    ) -> None:
        """S0-24: torch calls it done, and a copy behind it would be torn."""
        event = make()
        assert event.query()
        with pytest.raises(EventNotRecordedError):
            opened.device.lease(event)

    @NEUTRAL
    def test_event_of_an_earlier_step_is_refused(
        self, opened: Opened, make: Callable[[], torch.Event]
    ) -> None:
        """S0-24: what it proved then says nothing of this step."""
        event = make()
        opened.device.begin_step(1)
        event.record(torch.cuda.current_stream())
        assert opened.device.lease(event).wait(TIMEOUT)
        opened.device.begin_step(2)
        with pytest.raises(EventStaleError):
            opened.device.lease(event)

    @NEUTRAL
    def test_fence_stands_behind_the_event(
        self, opened: Opened, make: Callable[[], torch.Event]
    ) -> None:
        """S0-21: the fence passes when the engine's work before the record is done."""
        event = make()
        opened.device.begin_step(1)
        stall(0.2)
        event.record(torch.cuda.current_stream())
        fence = opened.device.lease(event)
        assert not fence.is_done()
        assert fence.wait(TIMEOUT)
        assert torch.cuda.current_stream().query()

    def test_fence_without_event_stands_behind_the_current_stream(
        self, opened: Opened
    ) -> None:
        """S0-22: it is the stream of the thread that asks, not another."""
        engine = torch.cuda.Stream()
        with torch.cuda.stream(engine):
            stall(0.2)
            fence = opened.device.lease()
        assert not fence.is_done()
        assert fence.wait(TIMEOUT)
        assert engine.query()

    def test_record_after_the_lease_changes_nothing(self, opened: Opened) -> None:
        """S0-25: the fence passes while the owner's next record is still far away."""
        event = torch.cuda.Event()
        opened.device.begin_step(1)
        event.record()
        fence = opened.device.lease(event)
        stall(1.0)
        event.record()
        assert fence.wait(TIMEOUT)
        assert not torch.cuda.current_stream().query()

    def test_owner_may_drop_the_event(self, opened: Opened) -> None:
        """S0-30: after the lease nobody needs it any more."""
        opened.device.begin_step(1)
        event = torch.cuda.Event()
        stall(0.1)
        event.record()
        fence = opened.device.lease(event)
        del event
        gc.collect()
        assert fence.wait(TIMEOUT)

    def test_recording_a_graph_is_refused_and_the_graph_is_whole(
        self, opened: Opened
    ) -> None:
        """A lease would become part of the graph, and be replayed with it."""
        numbers = torch.zeros(1000, device="cuda")
        numbers.add_(1)  # loads the kernel
        event = torch.cuda.Event()
        event.record()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            numbers.add_(1)
            for offered in (None, event):
                with pytest.raises(GraphCaptureError):
                    opened.device.lease(offered)
        graph.replay()
        assert 2.0 == numbers.mean().item()
        assert opened.device.lease().wait(TIMEOUT)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_event_of_another_gpu_is_refused(self, opened: Opened) -> None:
        """S0-26: another device's event is not waited for by mistake."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(1))
        with pytest.raises(ForeignEventError):
            opened.device.lease(event)


class TestTornCopies:
    ROUNDS = 512

    def test_saved_blocks_are_whole_while_the_engine_writes_others(
        self, opened: Opened, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Of two million blocks, saved behind their fence, each byte is the last written."""
        torn = self.save(opened, self.ROUNDS, is_fenced=True)
        self.tell(capsys, "fenced", self.ROUNDS, torn)
        assert 0 == torn

    def test_without_the_fence_blocks_are_torn(
        self, opened: Opened, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The same saves that do not wait are wrong, so that the test above can fail."""
        torn = self.save(opened, 16, is_fenced=False)
        self.tell(capsys, "not fenced", 16, torn)
        assert 0 < torn

    def test_loaded_blocks_are_whole_when_their_fence_has_passed(
        self, opened: Opened, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The engine reads half a million blocks right behind the fence of their load."""
        numbers = np.arange(NUM_BLOCKS // 2)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        rounds = self.ROUNDS // 4
        for number in range(rounds):
            half = HALVES[number % 2]
            values = ((numbers + 37 * number) % 256).astype(np.uint8)
            opened.pool[half] = values[:, None]
            ids, slots = opened.slots(half)
            assert opened.device.scatter(GROUP, ROWS, slots, ids).wait(TIMEOUT)
            found = opened.rows[:, half]
            wanted = torch.from_numpy(values).cuda()[None, :, None]
            wrong += (found != wanted).any(2).any(0).sum()
            torch.cuda.current_stream().synchronize()
        self.tell(capsys, "loaded", rounds, int(wrong.item()))
        assert 0 == wrong.item()

    def save(self, opened: Opened, rounds: int, *, is_fenced: bool) -> int:
        """
        Let the engine write one half while the other is saved; return the torn blocks.

        Each round writes other bytes, behind a kernel that takes its time.
        """
        numbers = np.arange(NUM_BLOCKS // 2)
        on_gpu = torch.from_numpy(numbers).cuda()
        engine = torch.cuda.Stream()
        saves: list[tuple[Fence, np.ndarray, np.ndarray]] = []
        torn = 0
        torch.cuda.synchronize()
        for number in range(1, rounds + 1):
            half = HALVES[number % 2]
            opened.device.begin_step(number)
            event = torch.cuda.Event()
            with torch.cuda.stream(engine):
                stall(0.0005 if is_fenced else 0.05)
                opened.fill(half, ((on_gpu + 37 * number) % 255 + 1).to(torch.uint8))
                event.record()
                lease = opened.device.lease(event)
            torn += self.check(saves)
            if is_fenced:
                assert lease.wait(TIMEOUT)
            ids, slots = opened.slots(half)
            saved = opened.device.gather(GROUP, ROWS, ids, slots)
            wanted = ((numbers + 37 * number) % 255 + 1).astype(np.uint8)
            saves.append((saved, opened.pool[half], wanted))
        torn += self.check(saves)
        engine.synchronize()
        return torn

    def check(self, saves: list[tuple[Fence, np.ndarray, np.ndarray]]) -> int:
        """Wait for what is being saved and count the blocks that are not as wanted."""
        torn = 0
        while saves:
            saved, found, wanted = saves.pop()
            assert saved.wait(TIMEOUT)
            torn += int((found != wanted[:, None]).any(1).sum())
        return torn

    def tell(
        self, capsys: pytest.CaptureFixture[str], what: str, rounds: int, torn: int
    ) -> None:
        """Print what was compared, whether or not the test passes."""
        with capsys.disabled():
            blocks = rounds * NUM_BLOCKS // 2
            print(f"\n{what}: {blocks} blocks compared, {torn} torn")  # noqa: T201
