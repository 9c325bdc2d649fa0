# SPDX-License-Identifier: Apache-2.0
"""How a device comes to reach a store's slots, behind the start."""

import threading

import pytest

from tests.kit.lockstep import Tracer
from tests.rig import BLOCK_BYTES, NUM_BLOCKS, order, running_on
from ucm.devices.cpu import CPUDevice
from ucm.errors import DeviceFailedError
from ucm.pinning import Pinning
from ucm.pipeline.tickets import Direction
from ucm.stores.abc import StoreGrowth
from ucm.stores.memory import MemoryStore
from ucm.stores.opening import growth_teller
from ucm.stores.wrap import WrapperStore
from ucm.threads import SYSTEM
from ucm.tracing import MEMORY_PINNED, MEMORY_UNPINNED, RUNTIME_STARTED

TIMEOUT = 60.0
HALF = 16 * BLOCK_BYTES
ALL = StoreGrowth(2 * HALF, 2 * HALF)


class PinningDevice(CPUDevice):
    """A device that wants memory pinned, and refuses the second piece."""

    is_synchronous = False

    def __init__(self):
        super().__init__(NUM_BLOCKS)
        self.given = []
        self.nbytes = []
        self.staged = ()
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_pinning = threading.Event()
        self.has_both = threading.Event()
        self.has_failed = False
        self.refuses = True

    def pin(self, memory):
        """Note the memory, and by whom it is pinned; refuse some of it."""
        self.is_pinning.set()
        assert self.may_go.wait(TIMEOUT)
        if self.has_failed:
            raise DeviceFailedError("gone")
        self.given.append((memory.ctypes.data, threading.current_thread().name))
        self.nbytes.append(memory.nbytes)
        if len(self.given) == 2:
            self.has_both.set()
        is_refused = self.refuses and len(self.given) > 1
        return "locked memory is scarce" if is_refused else ""

    def stage(self, nbytes, slot_bytes):
        """Note what is asked for."""
        self.staged = nbytes, slot_bytes
        return "and so is staging memory"

    def describe(self):
        """Say how it copies."""
        return {"copies": "by hand"}


class NoThreads:
    """A system that has no more of them."""

    def thread(self, *_):
        """Return one that does not start."""
        return self

    def start(self):
        """Fail as Python does."""
        raise RuntimeError("no thread")


class Growing(WrapperStore):
    """A store in two pieces of memory, that tells of itself when it is told to."""

    @property
    def buffers(self):
        """Two."""
        return self.inner.buffers * 2

    def watch(self, tell):
        """Note whom to tell."""
        self.tell = tell


class AllThere(Growing):
    """A store that has all of its memory."""

    def watch(self, tell):
        """Tell so."""
        self.inner.watch(tell)


def make_store() -> MemoryStore:
    """Return a small store."""
    return MemoryStore(capacity_blocks=16, block_bytes=BLOCK_BYTES)


@pytest.fixture
def world():
    """Return pinning of a store that grows, begun."""
    tracer = Tracer()
    with Growing(make_store()) as store:
        pinning = Pinning(
            store, PinningDevice(), staging_bytes=9, log=tracer.log, threads=SYSTEM
        )
        pinning.begin()
        yield pinning, store, tracer
        pinning.close(TIMEOUT)


def let_it_pin(pinning: Pinning) -> None:
    """Wait until all is pinned that is there."""
    if (thread := pinning._thread) is not None:
        thread.join(TIMEOUT)
    assert pinning._thread is None


def reasons(tracer: Tracer) -> list[str]:
    """Return why memory is not pinned, as told."""
    return [
        line["reason"] for line in tracer.events if line["event"] == MEMORY_UNPINNED
    ]


def test_memory_of_the_store_is_pinned_behind_the_start():
    """S2-04: the device may pin the memory that slots lie in, on a thread that nobody
    waits for; what it cannot pin is logged once, and served all the same."""
    store, device = make_store(), PinningDevice()
    memory, nbytes = store.buffers[0].ctypes.data, store.buffers[0].nbytes
    device.may_go.clear()
    config = {"queue": {"staging_bytes": 4096}}
    with running_on(AllThere(store), device, config) as rig:
        rig.submit(order(1, Direction.SAVE, range(4), range(1, 5)))
        assert 4 == rig.settle()[1].committed
        assert ([], (4096, BLOCK_BYTES)) == (device.given, device.staged)
        device.may_go.set()
        assert device.has_both.wait(TIMEOUT)
    assert [(memory, "ucm-pin")] * 2 == device.given
    told = reasons(rig.tracer)
    assert ["and so is staging memory", "locked memory is scarce"] == told
    by_event = {line["event"]: line for line in rig.tracer.events}
    assert "by hand" == by_event[RUNTIME_STARTED]["copies"]
    assert nbytes == by_event[MEMORY_PINNED]["nbytes"]


def test_memory_is_pinned_as_it_comes(world):
    """R-25: pinning faults all pages in, so that it takes whole slots that the store has;
    none is left to staging memory until the last has come, and none is pinned twice."""
    pinning, store, tracer = world
    device = pinning._device
    store.tell(StoreGrowth(3 * BLOCK_BYTES + 1, 2 * HALF))
    let_it_pin(pinning)
    assert [3 * BLOCK_BYTES] == device.nbytes
    device.refuses = False
    store.tell(ALL)
    store.tell(ALL)
    let_it_pin(pinning)
    assert [3 * BLOCK_BYTES, HALF - 3 * BLOCK_BYTES, HALF] == device.nbytes
    store.tell(StoreGrowth(2 * HALF, 2 * HALF, "told once more"))
    let_it_pin(pinning)
    (told,) = (line for line in tracer.events if line["event"] == MEMORY_PINNED)
    assert 2 * HALF == told["nbytes"]


def test_memory_that_never_comes_is_not_touched(world):
    """R-26: what a container has no room for is not faulted in by way of pinning, and what
    it has is pinned."""
    pinning, store, tracer = world
    store.tell(StoreGrowth(2 * BLOCK_BYTES, 2 * HALF, "no room"))
    store.tell(StoreGrowth(BLOCK_BYTES, 2 * HALF, "no room"))
    let_it_pin(pinning)
    assert [2 * BLOCK_BYTES] == pinning._device.nbytes
    assert ["and so is staging memory"] == reasons(tracer)


def test_thread_that_cannot_start_is_tried_again(world):
    """R-25: whoever populates goes on, and memory is pinned with the next word."""
    pinning, store, tracer = world
    ready, pinning._threads = pinning._threads, NoThreads()
    store.tell(StoreGrowth(HALF, 2 * HALF))
    assert "no thread" == reasons(tracer)[-1]
    pinning._threads = ready
    pinning._device.refuses = False
    store.tell(ALL)
    let_it_pin(pinning)
    assert [HALF, HALF] == pinning._device.nbytes


def test_log_has_by_tenths_how_a_store_grows():
    """R-25: a terabyte comes in a hundred parts, and a log wants ten lines of it; why it
    comes no more is said always."""
    tracer = Tracer()
    tell = growth_teller(tracer.log)
    for nbytes in (0, 5, 10, 14, 19, 20, 15, 29, 100):
        tell(StoreGrowth(nbytes, 100))
    tell(StoreGrowth(100, 100, "no room"))
    tell(StoreGrowth(0, 0))
    assert [10, 20, 100, 100] == [line["nbytes"] for line in tracer.events]


def test_nothing_is_pinned_after_a_close(world):
    """A store may tell of its memory while everything is let go of."""
    pinning, store, _ = world
    assert pinning.close(TIMEOUT)
    store.tell(ALL)
    assert not pinning._device.is_pinning.is_set()


def test_close_tells_that_memory_is_still_being_pinned(world):
    """A runtime that does not know keeps device and store as they are; the second piece
    is not begun any more."""
    pinning, store, _ = world
    device = pinning._device
    device.may_go.clear()
    store.tell(ALL)
    assert device.is_pinning.wait(TIMEOUT)
    assert not pinning.close(0.0)
    device.may_go.set()
    assert pinning.close(TIMEOUT)
    assert 1 == len(device.given)


def test_device_that_has_failed_ends_the_thread_only(world):
    """Whoever copies next hears of it; pinning has nothing more to say."""
    pinning, store, tracer = world
    pinning._device.has_failed = True
    store.tell(ALL)
    assert pinning.close(TIMEOUT)
    assert ["and so is staging memory"] == reasons(tracer)


def test_device_that_copies_by_itself_needs_neither():
    """A CPU gets no staging memory and no thread."""
    device = PinningDevice()
    device.is_synchronous = True
    with AllThere(make_store()) as store:
        pinning = Pinning(
            store, device, staging_bytes=9, log=Tracer().log, threads=SYSTEM
        )
        pinning.begin()
        assert pinning.close(TIMEOUT)
    assert ([], ()) == (device.given, device.staged)
