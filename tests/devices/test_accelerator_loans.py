# SPDX-License-Identifier: Apache-2.0
"""Events on loan from the engine, when something fails or the device is closed."""

import gc

import pytest

from tests.devices.accelerator_kit import (
    STILL,
    TIMEOUT,
    World,
    make_driver,
    running,
    simulated,
)
from tests.kit.accelerator import SimulatedDriver
from tests.kit.accelerator_kit import BOTH
from tests.kit.accelerator_streams import CUDA, NPU
from ucm.devices import _relay, accelerator
from ucm.errors import DeviceError, DeviceFailedError


class LateDriver(SimulatedDriver):
    """A runtime that fails once it has made a stream wait."""

    def wait(self, stream, event):
        """Have it wait, and fail."""
        super().wait(stream, event)
        raise RuntimeError("too late")


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
                assert [] == world.device._relay._held_back

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

    def test_loan_outlives_a_wait_that_failed_once_it_was_submitted(self):
        """C6 rule 5: of a wait that failed nobody knows whether a stream still looks for its
        event, which is not dropped."""
        world = World(make_driver(NPU, driver=LateDriver, pace=STILL))
        world.write()
        with pytest.raises(DeviceFailedError, match="too late"):
            world.device.lease(world.event())
        world.device.close()
        gc.collect()
        world.hardware.drain()
        world.check_closed()

    @pytest.mark.slow
    def test_leases_of_several_threads_end_behind_their_own_waits(self):
        """C6 rule 5: hosts lease on whatever thread they save on. Where waits look late, no
        thread's fence ends another one's loan before that one's wait has looked."""

        def lease_at_once(world, simulation):
            def lease():
                for _ in range(3):
                    stream = world.hardware.make_stream(0)
                    for _ in range(10):
                        world.driver.launch(stream, lambda: None)
                    fence = world.device.lease(world.event(stream))  # and dropped
                    assert fence.wait(TIMEOUT)

            threads = [simulation.threads.thread(lease, "host") for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        lines = (accelerator.__file__, _relay.__file__)
        for seed in range(20):
            simulated(lease_at_once, NPU, seed, lines=lines)

    @BOTH
    def test_lease_waits_for_nobody_who_waits_for_the_device(self, semantics):
        """C6 rule 5: while one thread waits for all that the device has the engine's thread
        lends an event as ever; each loan ends."""

        def lease_meanwhile(world, simulation):
            def synchronize():
                simulation.sleep(10.0)
                wait()

            wait, world.driver.synchronize = world.driver.synchronize, synchronize
            host = simulation.threads.thread(world.device.synchronize, "host")
            began = simulation.threads.monotonic()
            host.start()
            simulation.sleep(1.0)
            assert world.device.lease(world.event()).wait(TIMEOUT)
            assert simulation.threads.monotonic() < began + 10.0
            host.join()

        simulated(lease_meanwhile, semantics)

    def test_loan_that_is_just_being_given_back_keeps_no_device(self):
        """S2-18: a close just behind the last fence waits until the poller has given back
        what stood in front of it, rather than leave all open."""

        def close_at_once(world, simulation):
            recycle = world.device._poller._recycle

            def recycle_late(event):
                simulation.sleep(0.5)
                recycle(event)

            world.device._poller._recycle = recycle_late
            fence = world.device.lease(world.event())
            while not fence.is_done():
                simulation.sleep(0.01)

        simulated(close_at_once, NPU)
