# SPDX-License-Identifier: Apache-2.0
"""Copies by way of staging memory, for slots that are not pinned."""

import contextlib
import random
import re

import numpy as np
import pytest
import torch

from tests.devices.staging_kit import places_of
from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_streams import CUDA, SimHardware
from ucm.blocks import BlockId
from ucm.devices import _staged
from ucm.devices.accelerator import AcceleratorDevice
from ucm.errors import ConfigError, DeviceError
from ucm.plan import HostSlots
from ucm.testing.device_contract import DeviceContract
from ucm.testing.device_memory import Arrangement, Engine, Nesting

PLAIN = Arrangement(
    num_blocks=8,
    nesting=Nesting.LAYERS,
    pages=(64, 64, 32),
    paddings=(0, 0, 0),
    groups=((0, 1, 2),),
)
BLOCK_BYTES = 160
ROWS = (0, 1, 2)


def make_memory(nbytes):
    """Return memory that the simulated device can reach."""
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.slow
class TestContract(DeviceContract):
    """Whoever copies by way of staging memory sees the same device."""

    def make_device(self, num_blocks):
        """Return a device with staging memory for two blocks of any arrangement."""
        hardware = SimHardware(random.Random(num_blocks), semantics=CUDA)
        device = AcceleratorDevice(SimulatedDriver(0, hardware), num_blocks)
        device.stage(12 * 5 * 4096, 5 * 4096)
        return device

    def make_memory(self, nbytes):
        """Return memory that the simulated device can reach."""
        return make_memory(nbytes)


@pytest.fixture
def engine():
    """Return an engine's memory, filled."""
    engine = Engine(PLAIN, make_memory)
    engine.image = engine.fill(1)
    return engine


class HeldDriver(SimulatedDriver):
    """A driver whose events pass when the test lets them."""

    def __init__(self):
        super().__init__(0, SimHardware(random.Random(3), semantics=CUDA))
        self.is_held = False

    def is_done(self, event):
        """Say no while held."""
        return not self.is_held and super().is_done(event)


@pytest.fixture
def driver():
    """Return a driver; what it did must have been right."""
    driver = HeldDriver()
    yield driver
    assert [] == driver.hardware.violations


@pytest.fixture
def device(driver, engine):
    """Return a device with staging memory for four blocks."""
    device = AcceleratorDevice(driver, PLAIN.num_blocks)
    device.stage(4 * BLOCK_BYTES, BLOCK_BYTES)
    device.register(engine.layout, engine.kv_caches)
    with contextlib.closing(device):
        yield device


def slots_of(count):
    """Return so many slots of memory that is not pinned."""
    pool = np.zeros((8, BLOCK_BYTES), np.uint8)
    return HostSlots(pool, np.arange(count), BLOCK_BYTES)


def gather(device, engine, count, rows=ROWS):
    """Gather the first blocks; return the fence and the slots."""
    slots = slots_of(count)
    blocks = tuple(map(BlockId, range(count)))
    return device.gather(engine.layout.groups[0].group_id, rows, blocks, slots), slots


def expected(engine, count, rows=ROWS):
    """Return what slots of the first blocks must hold."""
    pool = np.zeros((8, BLOCK_BYTES), np.uint8)
    for block in range(count):
        pages = engine.pages(engine.image, engine.layout.groups[0], rows, block)
        for page, place in pages:
            pool[block, place] = page
    return pool


class TestGather:
    def test_slots_are_written_when_the_copy_lands(self, device, engine, driver):
        """S2-04: the device copies to pinned memory only; the slots are written by the
        host, behind the fence."""
        fence, slots = gather(device, engine, 3)
        assert fence.wait(60.0)
        assert not slots.pool.any()
        fence.land()
        np.testing.assert_array_equal(expected(engine, 3), slots.pool)
        (copy,) = driver.copies
        assert device._staging.memory.ctypes.data in driver.pins
        assert copy.is_pinned

    def test_rows_that_were_not_asked_for_stay(self, device, engine):
        """Only the rows of a copy are brought to the slots: others may be there."""
        fence, slots = gather(device, engine, 2, rows=(0, 2))
        assert fence.wait(60.0)
        slots.pool[:, 64:128] = 7
        fence.land()
        wanted = expected(engine, 2, rows=(0, 2))
        wanted[:, 64:128] = 7
        np.testing.assert_array_equal(wanted, slots.pool)

    def test_staging_memory_comes_back_when_the_copy_has_landed(self, device, engine):
        """A landed or closed copy frees its slots."""
        fence, _ = gather(device, engine, 3)
        assert (1, 3, 0) == places_of(device._staging)
        assert fence.wait(60.0)
        fence.land()
        fence.close()
        assert 4 == places_of(device._staging).free

    def test_copy_that_is_given_up_keeps_its_memory_until_its_fence(
        self, device, engine, driver
    ):
        """Design invariant 5: a buffer whose fence has not passed is lent to
        nobody, also when its borrower wants nothing any more."""
        driver.is_held = True
        fence, _ = gather(device, engine, 3)
        fence.close()
        assert 3 == places_of(device._staging).quarantined
        driver.is_held = False
        assert fence.wait(60.0)
        assert 0 == places_of(device._staging).quarantined

    def test_more_than_the_budget_goes_straight_to_the_slots(self, device, engine):
        """A span that will never fit is copied without staging memory, slowly."""
        fence, slots = gather(device, engine, 6)
        assert fence.wait(60.0)
        fence.land()
        np.testing.assert_array_equal(expected(engine, 6), slots.pool)


def scatter(device, engine, count):
    """Load other bytes into the first blocks; return the fence and the slots."""
    slots = slots_of(count)
    slots.pool[:] = np.random.default_rng(5).integers(0, 256, slots.pool.shape)
    blocks = tuple(map(BlockId, range(count)))
    group_id = engine.layout.groups[0].group_id
    return device.scatter(group_id, ROWS, slots, blocks), slots


def check_loaded(engine, slots):
    """Make sure that blocks hold what their slots do."""
    now = engine.read()
    for block in range(len(slots)):
        for page, place in engine.pages(now, engine.layout.groups[0], ROWS, block):
            np.testing.assert_array_equal(slots.pool[block, place], page)


class TestScatter:
    def test_bytes_reach_the_pages_by_way_of_pinned_memory(
        self, device, engine, driver, monkeypatch
    ):
        """S2-04: a load is copied on the host first, part by part, also one that is larger
        than the memory; that is free when its fence has passed."""
        monkeypatch.setattr(_staged, "_TIMEOUT_S", 60.0)
        fence, slots = scatter(device, engine, 6)
        assert fence.wait(60.0)
        check_loaded(engine, slots)
        assert [True] * 6 == [copy.is_pinned for copy in driver.copies]
        assert 4 == places_of(device._staging).free

    def test_parts_that_get_no_memory_in_time_go_straight(self, device, engine, driver):
        """A load waits for others once, and the fence is behind all of its parts."""
        driver.is_held = True
        fence, slots = scatter(device, engine, 6)
        assert [*[True] * 4, False] == [copy.is_pinned for copy in driver.copies]
        driver.is_held = False
        assert fence.wait(60.0)
        check_loaded(engine, slots)

    def test_failure_behind_the_first_part_gives_no_block_back(
        self, device, engine, driver, monkeypatch
    ):
        """What is under way may still write: there is a fence, which never passes."""
        submit, calls = driver.copy, []

        def fails_later(*given, **options):
            calls.append(given)
            if len(calls) > 1:
                raise RuntimeError("out of order")
            submit(*given, **options)

        monkeypatch.setattr(driver, "copy", fails_later)
        fence, _ = scatter(device, engine, 3)
        assert 2 == len(calls)
        with pytest.raises(DeviceError, match="out of order"):
            fence.is_done()

    @pytest.mark.parametrize("error", [MemoryError(), DeviceError("closed")], ids=repr)
    def test_part_that_is_not_submitted_gives_those_before_it_no_block_back(
        self, device, engine, driver, monkeypatch, error
    ):
        """Whatever a later part meets on the host, the first is under way: there is a fence
        that fails; where it meets the first, nothing is, and the error is raised."""
        moved, left = _staged.move, [1, 0]

        def fails_later(*given):
            if not left.pop(0):
                raise error
            moved(*given)

        monkeypatch.setattr(_staged, "move", fails_later)
        driver.is_held = True
        fence, _ = scatter(device, engine, 3)
        assert (1, 3) == (len(driver.copies), places_of(device._staging).free)
        with pytest.raises(DeviceError, match=re.escape(str(error) or repr(error))):
            fence.is_done()
        driver.is_held, left[:] = False, [0]
        with pytest.raises(type(error)):
            scatter(device, engine, 3)
        assert device.lease(None).wait(60.0)


def test_budget_below_one_block_is_refused_by_name(driver):
    """X-09: the error names the setting, its value and what it takes."""
    with pytest.raises(ConfigError, match=r"queue\.staging_bytes=100.*160 bytes"):
        AcceleratorDevice(driver).stage(100, 160)
