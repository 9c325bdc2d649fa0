# SPDX-License-Identifier: Apache-2.0
"""The pipeline on a simulated accelerator under real threads; the poller drives it."""

import random
import threading

import numpy as np
import pytest
import torch

from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_ops import Copy
from tests.kit.accelerator_streams import CUDA, NPU, SimHardware
from tests.pipeline.kit import TIMEOUT
from tests.rig import (
    BLOCK_BYTES,
    KEYSPACE_DIGEST,
    NUM_BLOCKS,
    NUM_ROWS,
    PAGE_BYTES,
    order,
    running_on,
)
from ucm.devices.accelerator import AcceleratorDevice
from ucm.devices.driver import Direction as CopyDirection
from ucm.devices.events import DoneFence
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.stores.memory import MemoryStore

SPAN = 2
ROUNDS = 5
SPANS = NUM_BLOCKS // SPAN
POISON = 0xDB
CONTENTS = torch.from_numpy(
    np.random.default_rng(3).integers(
        0, 256, (ROUNDS * NUM_BLOCKS, NUM_ROWS, PAGE_BYTES), dtype=np.uint8
    )
)
BOTH = pytest.mark.parametrize("semantics", [CUDA, NPU], ids=lambda each: each.name)


class CountingDriver(SimulatedDriver):
    """
    A driver that knows how many copies were under way at most.

    Args:
        hardware: All devices.
        until: Once so many are, ``reached`` is set and the pace is ``then``.
        then: As of the hardware.
        can_pin: Host memory can be pinned.
    """

    def __init__(self, hardware, until=0, then=(1,), *, can_pin=True):
        super().__init__(0, hardware, can_pin=can_pin)
        self.until = until
        self.then = then
        self.most = dict.fromkeys(CopyDirection, 0)
        self.reached = threading.Event()

    def copy(self, batch, direction, stream, *, is_pinned):
        """Submit, and count what is pending."""
        super().copy(batch, direction, stream, is_pinned=is_pinned)
        pending = self.under_way(direction)
        self.most[direction] = max(self.most[direction], pending)
        if pending == self.until:
            self.hardware.pace = self.then
            self.reached.set()

    def under_way(self, direction):
        """Return how many copies of a direction are pending."""
        return sum(
            isinstance(op, Copy) and op.direction is direction
            for op in self.hardware.pending(self.index)
        )


def make(semantics=CUDA, *, until=0, then=(1,), can_pin=True, **options):
    """Return a driver, a device on it and a store."""
    hardware = SimHardware(random.Random(5), semantics=semantics, **options)
    driver = CountingDriver(hardware, until, then, can_pin=can_pin)
    return driver, AcceleratorDevice(driver), MemoryStore(1024, BLOCK_BYTES)


def spans(direction, at, first=0):
    """Return orders for all blocks, whose contents begin at *at*; ids from *first*."""
    return [
        order(
            first + number + 1,
            direction,
            range(at + SPAN * number, at + SPAN * (number + 1)),
            range(SPAN * number, SPAN * (number + 1)),
            f"r{number % 7}",
        )
        for number in range(SPANS)
    ]


class Engine:
    """What computes late on the rig's memory, and lends events."""

    def __init__(self, rig, driver):
        self.rig = rig
        self.driver = driver
        self.hardware = driver.hardware
        self.compute = driver.current_stream()
        self.lent = []

    def write(self, order, at):
        """Let each block of an order be written some time."""
        for block in order.block_ids:
            content = CONTENTS[at + block]
            self.driver.launch(
                self.compute,
                lambda block=block, content=content: self.put(block, content),
            )

    def put(self, block, content):
        """Write a block now."""
        self.rig.memory[:, block] = content

    def fence(self, number):
        """Return a fence behind what was written: by the stream, or one of two events."""
        how = number % 3
        if not how:
            return self.rig.device.lease(None)
        event = SimEvent(self.hardware)
        event.record(self.compute)
        fence = self.rig.device.lease(event)
        if how == 1:  # recorded again; the other one is dropped
            event.record(self.compute)
            self.lent.append(event)
        return fence

    def save(self, at, first):
        """Save all blocks, and overwrite each the moment it is given back."""
        wanted = {}
        self.rig.device.begin_step(first)
        for one in spans(Direction.SAVE, at, first):
            self.write(one, at)
            wanted[one.transfer_id] = one
            self.rig.runtime.submit(KEYSPACE_DIGEST, [one], self.fence(one.transfer_id))
        seen = set()
        while wanted.keys() - seen:
            self.rig.runtime.wait_for_notice(TIMEOUT)
            for notice in self.rig.poll():
                if notice.kind is NoticeKind.RELEASED:
                    seen.add(notice.ticket.transfer_id)
                    for block in notice.ticket.span.block_ids:
                        self.put(block, torch.tensor(POISON, dtype=torch.uint8))
        self.rig.settle()

    def load(self, at, first):
        """Load all blocks, behind a kernel that spoils them; return what is there."""
        for block in range(NUM_BLOCKS):
            self.driver.launch(
                self.compute,
                lambda block=block: self.put(
                    block, torch.tensor(POISON, dtype=torch.uint8)
                ),
            )
        self.rig.runtime.submit(
            KEYSPACE_DIGEST,
            spans(Direction.LOAD, at, first),
            self.rig.device.lease(None),
        )
        self.rig.settle()
        return torch.from_numpy(self.rig.memory.copy())


class TestBytes:
    @pytest.mark.slow
    @BOTH
    @pytest.mark.parametrize("can_pin", [True, False], ids=["pinned", "pageable"])
    def test_what_is_loaded_is_what_was_computed(self, semantics, can_pin):
        """S2-01, S2-04, S2-06, S0-25: hundreds of spans that are computed late, proved
        by streams and events, saved, overwritten and loaded come back byte by byte."""
        driver, device, store = make(semantics, can_pin=can_pin)
        with running_on(
            store, device, {"queue": {"window": 4}}, torch.from_numpy
        ) as rig:
            engine = Engine(rig, driver)
            for number in range(ROUNDS):
                at, first = number * NUM_BLOCKS, 2 * number * SPANS
                engine.save(at, first)
                found = engine.load(at, first + SPANS)
                expected = CONTENTS[at : at + NUM_BLOCKS].permute(1, 0, 2)
                assert torch.equal(expected, found)
            outcomes = rig.outcomes()
        assert {OutcomeKind.COMMITTED} == {each.kind for each in outcomes.values()}
        assert 2 * ROUNDS * SPANS == len(outcomes)
        assert [] == driver.hardware.violations
        assert not driver.foreign_uses


class TestWindow:
    @pytest.mark.parametrize("window", [1, 3])
    @pytest.mark.parametrize("direction", Direction, ids=lambda each: each.value)
    def test_no_more_copies_are_under_way_than_the_window(self, direction, window):
        """S2-15: hardware that stands still gets ``queue.window`` copies of a direction
        and, however many spans wait, not one more until one of them is over."""
        driver, device, store = make(pace=(8,))
        copies = CopyDirection.TO_HOST
        with running_on(
            store, device, {"queue": {"window": window}}, torch.from_numpy
        ) as rig:
            if direction is Direction.LOAD:
                copies = CopyDirection.TO_DEVICE
                rig.runtime.submit(
                    KEYSPACE_DIGEST, spans(Direction.SAVE, 0), DoneFence()
                )
                rig.settle()
            driver.hardware.pace, driver.until = (0,), window
            rig.runtime.submit(KEYSPACE_DIGEST, spans(direction, 0, SPANS), DoneFence())
            assert driver.reached.wait(TIMEOUT)
            rig.settle()
        assert window == driver.most[copies]
        assert [] == driver.hardware.violations


class TestClose:
    @BOTH
    def test_nothing_is_let_go_of_before_copies_are_over(self, semantics):
        """S2-18: a close in the middle of copies drains them, ends the threads and only
        then destroys events, ends loans and unpins."""
        driver, device, store = make(semantics, until=2, pace=(0,))
        before = set(threading.enumerate())
        with running_on(
            store, device, {"queue": {"window": 2}}, torch.from_numpy
        ) as rig:
            rig.runtime.submit(KEYSPACE_DIGEST, spans(Direction.SAVE, 0), DoneFence())
            assert driver.reached.wait(TIMEOUT)
        driver.close()
        assert [] == driver.hardware.violations
        assert (0, {}) == (device.events.num_own, device.events.borrowed)
        assert ({}, set()) == (driver.pins, driver.hardware.live_events)
        assert set() == set(threading.enumerate()) - before

    def test_device_whose_copies_do_not_end_is_left_as_it_is(self):
        """S2-18: hardware that stands still holds a close up for its budget only; what
        the copies may still use stays pinned, and nothing is taken from under them."""
        driver, device, store = make(pace=(0,), until=1, then=(0,))
        config = {"timeout": {"shutdown": 0.05}, "queue": {"window": 1}}
        with running_on(store, device, config, torch.from_numpy) as rig:
            rig.runtime.submit(KEYSPACE_DIGEST, spans(Direction.SAVE, 0), DoneFence())
            assert driver.reached.wait(TIMEOUT)
        assert 1 == driver.under_way(CopyDirection.TO_HOST)
        assert (3, 1) == (len(driver.pins), device.events.num_own)
        driver.hardware.drain()
        rig.runtime._loop.join(TIMEOUT)
        device.close()
        assert ({}, []) == (driver.pins, driver.hardware.violations)
