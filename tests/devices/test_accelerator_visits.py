# SPDX-License-Identifier: Apache-2.0
"""A host's thread that uses another device than the cache does."""

import contextlib

import numpy as np
import pytest

from tests.devices.accelerator_kit import TIMEOUT, World, make_driver, running
from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_kit import BOTH
from ucm.blocks import BlockId, GroupId
from ucm.devices.accelerator import AcceleratorDevice
from ucm.errors import DeviceError, GraphCaptureError

VERBS = {
    "lease": lambda world: world.device.lease(),
    "lease of an event": lambda world: world.device.lease(
        world.event(world.hardware.default_stream(0))
    ),
    "synchronize": lambda world: world.device.synchronize(),
    "pin": lambda world: world.device.pin(np.zeros((4, 4), np.uint8)),
    "clear": lambda world: world.device.clear(
        GroupId(0), world.row_ids, [BlockId(0)]
    ).wait(TIMEOUT),
    "register": lambda world: register(world),
    "close": lambda world: world.device.close(),
}


def register(world):
    """Take memory for another device of the same hardware."""
    device = AcceleratorDevice(SimulatedDriver(2, world.hardware))
    device.register(world.engine.layout, world.engine.kv_caches)
    device.close()


@contextlib.contextmanager
def on_another_device(world):
    """Let the thread's current device be the second one, and see that it stays so."""
    other = SimulatedDriver(1, world.hardware)
    other.bind_thread()
    yield other
    assert 1 == other.current_index()
    world.driver.bind_thread()


@BOTH
@pytest.mark.parametrize("verb", VERBS)
def test_thread_of_a_host_has_its_own_device_behind_each_verb(verb, semantics):
    """C6 rule 8: what a host computes next is on the device that it has chosen, whichever
    one the cache is of."""
    with running(semantics) as world:
        for _ in range(2):
            with on_another_device(world):
                VERBS[verb](world)


def test_threads_own_device_is_there_again_behind_an_error():
    """C6 rule 8: also where a verb raises, for good or not."""
    with running() as world, on_another_device(world) as other:
        with world.driver.capturing(), pytest.raises(GraphCaptureError):
            world.device.lease()
        assert 1 == other.current_index()
        world.driver.fail_at("record", 1, stays=False)
        with pytest.raises(DeviceError):
            world.device.lease()


class HalfBound(SimulatedDriver):
    """A driver that binds a thread to the device and fails behind that, if it is told to."""

    fails = False

    def bind_thread(self):
        """Bind it, and fail perhaps."""
        super().bind_thread()
        if self.fails:
            raise RuntimeError("an earlier launch failed")


def test_threads_own_device_is_there_again_where_it_was_bound_in_part():
    """C6 rule 8: also where the device was made the current one and then an error came."""
    world = World(make_driver(driver=HalfBound))
    with contextlib.closing(world.device), on_another_device(world) as other:
        world.driver.fails = True
        with pytest.raises(DeviceError):
            world.device.lease()
        assert 1 == other.current_index()
        world.driver.fails = False


def test_thread_uses_several_devices_in_turn():
    """C6 rule 8: a graph is looked for, and an event recorded, on the device that is asked,
    also where the thread has bound another one since."""
    with running() as world:
        second = SimulatedDriver(1, world.hardware)
        second.bind_thread()
        device = AcceleratorDevice(second)
        device.register(world.engine.layout, world.engine.kv_caches)
        with contextlib.closing(device):
            for each in (world.device, device) * 2:
                assert each.lease().wait(TIMEOUT)
                assert 1 == second.current_index()
        world.driver.bind_thread()


def test_thread_that_visits_is_bound_when_it_copies():
    """C6 rule 8: a thread of ours may lease, and copies on the right device behind that."""
    with running() as world:
        with on_another_device(world):
            assert world.device.lease().wait(TIMEOUT)
        SimulatedDriver(1, world.hardware).bind_thread()
        world.device.lease()
        assert World.gather(world).wait(TIMEOUT)
