# SPDX-License-Identifier: Apache-2.0
"""Events on loan from the engine, when something fails or the device is closed."""

import gc

import pytest

from tests.devices.accelerator_kit import STILL, running
from tests.kit.accelerator_streams import CUDA, NPU
from ucm.errors import DeviceError, DeviceFailedError


class TestLoans:
    def test_loan_of_a_lease_without_an_event_is_over(self):
        """X-07: a lease that raises for want of an event of ours gives the engine's back."""
        with running(CUDA) as world:
            world.driver.fail_at("record", 1, stays=False)
            with pytest.raises(DeviceError):
                world.device.lease(world.event())
            assert {} == world.device.events.borrowed

    def test_loan_outlives_a_record_that_failed_behind_a_late_wait(self):
        """C6 rule 5: where a wait looks at the event when it gets there, the event stays
        alive until then, also when no event of ours could be recorded behind it."""
        with running(NPU, pace=STILL) as world:
            world.write()
            event = world.event()
            world.driver.fail_at("record", 1, stays=False)
            with pytest.raises(DeviceError):
                world.device.lease(event)
            del event
            gc.collect()
            world.device.lease(world.event())  # stands behind that wait too

    def test_loan_that_nothing_stands_behind_ends_with_the_device(self):
        """C6 rule 5: a wait without an event of ours behind it is fenced by closing."""
        with running(NPU) as world:
            world.driver.fail_at("record", 1, stays=False)
            with pytest.raises(DeviceError):
                world.device.lease(world.event())
            assert 1 == len(world.device.events.borrowed)

    def test_loan_without_an_event_behind_it_ends_when_all_was_waited_for(self):
        """C6 rule 5: where no event of ours is to be had, the device is synchronized, and
        no step's event stays on loan behind that."""
        with running(NPU, pace=STILL) as world:
            for _ in range(3):
                world.write()
                world.driver.fail_at("record", 1, stays=False)
                with pytest.raises(DeviceError):
                    world.device.lease(world.event())
                assert 1 == len(world.device.events.borrowed)
                world.device.synchronize()
                assert {} == world.device.events.borrowed

    def test_loan_outlives_a_device_that_is_closed_before_a_late_wait(self):
        """C6 rule 5: an event that a stream of ours still looks for is not dropped by
        closing the device."""
        with running(NPU, pace=STILL) as world:
            world.write()
            event = world.event()
            world.device.lease(event)
            del event
            world.device.close()
            gc.collect()

    def test_loan_outlives_a_device_that_failed_before_a_late_wait(self):
        """C6 rule 5: an event that a stream still looks for outlives the device, when
        that has failed and nobody can tell how far its streams are."""
        with running(NPU, pace=STILL) as world:
            world.write()
            event = world.event()
            world.device.lease(event)
            world.driver.fail_at("synchronize", 1, stays=False)
            with pytest.raises(DeviceFailedError):
                world.device.synchronize()
            del event
            world.device.close()
            gc.collect()
            world.hardware.drain()
            world.driver.pins.clear()  # a device that has failed unpins nothing
