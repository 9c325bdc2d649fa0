# SPDX-License-Identifier: Apache-2.0
"""What tests of the simulated accelerator share."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_streams import CUDA, NPU, SimHardware
from ucm.devices.driver import Direction
from ucm.plan import CopyBatch

__all__ = [
    "BOTH",
    "NEW",
    "NUM_PAGES",
    "OLD",
    "PAGE_BYTES",
    "Pages",
    "kinds",
    "make_driver",
    "on_a_thread",
]

NUM_PAGES, PAGE_BYTES = 8, 16
OLD, NEW = 1, 2
BOTH = pytest.mark.parametrize("semantics", [CUDA, NPU], ids=lambda each: each.name)


def make_driver(seed=0, **options):
    """Return a driver of a device of its own, bound to this thread."""
    driver = SimulatedDriver(0, SimHardware(random.Random(seed), **options))
    driver.bind_thread()
    return driver


class Pages:
    """Device memory with pages of ``OLD``, and pinned host memory for them."""

    def __init__(self, driver, *, is_pinned=True):
        self.driver = driver
        self.is_pinned = is_pinned
        self.device = driver.allocate(NUM_PAGES * PAGE_BYTES)
        self.device.fill_(OLD)
        self.host = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        if is_pinned:
            driver.pin(self.host.ctypes.data, self.host.nbytes)

    def write(self):
        """Do what the engine's kernel does."""
        self.device.fill_(NEW)

    def batch(self, direction=Direction.TO_HOST):
        """Return one copy per page."""
        steps = np.arange(NUM_PAGES) * PAGE_BYTES
        sides = [self.device.data_ptr() + steps, self.host.ctypes.data + steps]
        if direction is Direction.TO_DEVICE:
            sides.reverse()
        return CopyBatch(*sides, np.full(NUM_PAGES, PAGE_BYTES))

    def gather(self, stream):
        """Submit the copy of all pages to the host."""
        self.driver.copy(
            self.batch(), Direction.TO_HOST, stream, is_pinned=self.is_pinned
        )

    def found(self):
        """Return the different bytes that the host has."""
        return set(self.host.ravel().tolist())


def kinds(driver):
    """Return which misuses were found."""
    return {each.kind for each in driver.hardware.violations}


def on_a_thread(function):
    """Return what *function* does on another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()
