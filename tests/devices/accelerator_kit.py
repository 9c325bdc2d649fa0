# SPDX-License-Identifier: Apache-2.0
"""An engine's memory on a simulated accelerator, with a pool of slots, for tests."""

import contextlib
import gc
import random

import greenlet
import numpy as np

from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_ops import Op
from tests.kit.accelerator_streams import CUDA, SimHardware
from tests.kit.simulation import Simulation
from ucm.blocks import BlockId, GroupId
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.events import EventBook
from ucm.devices.poller import EventPoller
from ucm.plan import HostSlots
from ucm.testing.device_memory import Arrangement, Engine, Nesting
from ucm.threads import SYSTEM

__all__ = [
    "ARRANGEMENT",
    "NEW",
    "NUM_BLOCKS",
    "OLD",
    "STILL",
    "TIMEOUT",
    "Gate",
    "Watch",
    "World",
    "make_driver",
    "running",
    "simulated",
]

NUM_BLOCKS = 8
ARRANGEMENT = Arrangement(
    num_blocks=NUM_BLOCKS,
    nesting=Nesting.STORAGES,
    pages=(64, 32, 16),
    paddings=(0, 0, 0),
    groups=((0, 1, 2),),
)
OLD, NEW = 1, 2
STILL = (0,)
"""A pace: asking an event does not let the hardware get on."""
TIMEOUT = 60.0
_NUM_KERNELS = 20
"""So many that what does not wait for them comes first."""


def make_driver(
    semantics=CUDA, seed=0, *, driver=SimulatedDriver, can_pin=True, **given
):
    """Return a driver of hardware of its own."""
    hardware = SimHardware(random.Random(seed), semantics=semantics, **given)
    return driver(0, hardware, can_pin=can_pin)


class Gate(Op):
    """Holds its stream until the test opens it."""

    is_open = False

    def is_ready(self):
        """Return whether it is open."""
        return self.is_open

    def step(self, machine):
        """Let the stream go on."""
        self.is_done = True
        return self.name


class World:
    """
    An engine, its device and a pool of slots.

    Args:
        driver: Of the device.
        threads: Where the device's threads come from.
        is_pinned: The pool is pinned, so that copies are asynchronous.
        arrangement: Of the engine's memory.
    """

    def __init__(
        self, driver, threads=SYSTEM, *, is_pinned=True, arrangement=ARRANGEMENT
    ):
        self.driver = driver
        self.hardware = driver.hardware
        self.threads = threads
        driver.bind_thread()
        self.engine = Engine(arrangement, driver.allocate)
        self.device = AcceleratorDevice(driver, NUM_BLOCKS, threads)
        self.device.register(self.engine.layout, self.engine.kv_caches)
        self.group = self.engine.layout.groups[0]
        self.row_ids = [row.row_id for row in self.group.rows]
        self.pool = np.zeros((NUM_BLOCKS, self.group.block_bytes), np.uint8)
        if is_pinned:
            assert self.device.pin(self.pool) == ""
        self.set_blocks(OLD)

    def set_blocks(self, value):
        """Write to all blocks at once, as nobody does but a test."""
        for memory in self.engine.memory:
            memory.fill_(value)

    def write(self, value=NEW, stream=None):
        """Submit the engine's kernels, of which the last writes to all blocks."""
        stream = stream or self.driver.current_stream()
        for _ in range(_NUM_KERNELS):
            self.driver.launch(stream, lambda: None)
        self.driver.launch(stream, lambda: self.set_blocks(value))

    def event(self, stream=None):
        """Return an event that the engine has recorded."""
        event = SimEvent(self.hardware)
        event.record(stream)
        return event

    def slots(self, slots=range(NUM_BLOCKS), pool=None):
        """Return slots of a pool, by default of the one there is."""
        rows = np.array(slots, dtype=np.int64)
        return HostSlots(
            self.pool if pool is None else pool, rows, self.group.block_bytes
        )

    def gather(self, blocks=range(NUM_BLOCKS), slots=None, rows=None):
        """Copy blocks to slots, by default all to those of the same number."""
        return self.device.gather(
            GroupId(0),
            self.row_ids if rows is None else rows,
            [BlockId(block) for block in blocks],
            self.slots(blocks) if slots is None else slots,
        )

    def scatter(self, blocks=range(NUM_BLOCKS), slots=None):
        """Copy slots to blocks, by default all of the same number."""
        return self.device.scatter(
            GroupId(0),
            self.row_ids,
            self.slots(blocks) if slots is None else slots,
            [BlockId(block) for block in blocks],
        )

    def saved(self):
        """Return the different bytes in the pool."""
        return set(self.pool.ravel().tolist())

    def loaded(self):
        """Return the different bytes in the blocks."""
        return {byte for part in self.engine.read() for byte in part.tolist()}

    def stream_of(self, copy):
        """Return the stream in which a copy has run."""
        streams = {
            stream
            for stream, op in self.hardware.executed
            if op.startswith(f"{copy.name}.")
        }
        return streams.pop()

    def close(self):
        """Close device and driver, and see that nothing is left or was misused."""
        self.hardware.drain()
        self.device.close()
        self.check_closed()
        assert {} == self.driver.pins

    def check_closed(self):
        """See that no event is left, none was misused, and who asked."""
        self.driver.close()
        assert [] == self.hardware.violations
        assert {} == self.driver.foreign_uses
        assert {} == self.device.events.borrowed
        assert 0 == self.device.events.num_own
        assert len(self.driver.pollers) <= 1


class Watch:
    """
    A poller in virtual time.

    Args:
        seed: Decides everything.
        driver: The runtime's class.
        lines: Modules between whose lines threads are preempted.
        hardware: More for the hardware; by default it gets on only in ``run``.
    """

    def __init__(self, seed=0, *, driver=SimulatedDriver, lines=(), **hardware):
        self.simulation = Simulation(seed, line_modules=lines, line_chance=0.1)
        self.hardware = SimHardware(
            self.simulation.dice,
            **({"pause": self.simulation.pause, "pace": STILL} | hardware),
        )
        self.driver = driver(0, self.hardware)
        self.book = EventBook(self.driver, self.simulation.threads)
        self.recycled = []
        self.failures = []
        self.poller = EventPoller(
            self.driver,
            self.recycle,
            self.failures.append,
            "events",
            self.simulation.threads,
        )

    def recycle(self, event):
        """Note the event and take it back."""
        self.recycled.append(event)
        self.book.recycle(event)

    def run(self, body):
        """Run ``body(self)`` beside the poller, close it, and see that it has ended."""

        def main():
            self.driver.bind_thread()
            self.main = greenlet.getcurrent()
            self.streams = [self.driver.make_stream() for _ in range(3)]
            self.poller.start()
            body(self)
            assert self.poller.close(TIMEOUT)

        self.simulation.run(main)
        assert [] == self.hardware.violations

    def watch(self, stream=0, count=1):
        """Record events on a stream; return them and their fences."""
        pairs = []
        for _ in range(count):
            event = self.book.record(self.streams[stream])
            pairs.append((event, self.poller.watch(self.streams[stream], event)))
        return pairs

    def sleep(self, seconds=0.1):
        """Let virtual time pass: the poller has looked often after that."""
        self.simulation.sleep(seconds)

    def counted(self, seconds):
        """Return how often the runtime was asked within so many seconds."""
        before = self.driver.calls["is_done"]
        self.sleep(seconds)
        return self.driver.calls["is_done"] - before


@contextlib.contextmanager
def running(
    semantics=CUDA, seed=0, *, is_pinned=True, arrangement=ARRANGEMENT, **given
):
    """Run a world on plain threads; it is closed and checked when all went well."""
    driver = make_driver(semantics, seed, **given)
    world = World(driver, is_pinned=is_pinned, arrangement=arrangement)
    try:
        yield world
        world.close()
    finally:
        world.device.close()  # its thread, when a test has failed


def simulated(
    body,
    semantics=CUDA,
    seed=0,
    *,
    driver=SimulatedDriver,
    lines=(),
    close=True,
    is_pinned=True,
    arrangement=ARRANGEMENT,
    **given,
):
    """Run ``body(world, simulation)`` in virtual time; close and check the world."""
    simulation = Simulation(seed, line_modules=lines, line_chance=0.1)
    hardware = SimHardware(
        simulation.dice, pause=simulation.pause, semantics=semantics, **given
    )

    def main():
        world = World(
            driver(0, hardware),
            simulation.threads,
            is_pinned=is_pinned,
            arrangement=arrangement,
        )
        body(world, simulation)
        if close:
            world.close()

    simulation.run(main)
    assert [] == hardware.violations
    gc.collect()
