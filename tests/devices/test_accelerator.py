# SPDX-License-Identifier: Apache-2.0
"""The device of any accelerator: its contract, and its leases."""

import gc
import threading
import weakref

import pytest

from tests.devices.accelerator_kit import (
    NEW,
    OLD,
    STILL,
    TIMEOUT,
    Gate,
    make_driver,
    running,
    simulated,
)
from tests.kit.accelerator import SimEvent
from tests.kit.accelerator_kit import BOTH
from tests.kit.accelerator_streams import CUDA, NPU
from ucm.devices.accelerator import AcceleratorDevice
from ucm.errors import (
    EventNotRecordedError,
    EventStaleError,
    EventUnreadableError,
    ForeignEventError,
    GraphCaptureError,
)
from ucm.testing.device_contract import DeviceContract

SEEDS = range(6)


class Contract(DeviceContract):
    """The contract; each device has hardware of its own, and of another seed."""

    semantics = CUDA
    is_pinned = True
    is_staged = False

    @pytest.fixture(autouse=True)
    def checked(self):
        """See after each test that nothing was misused and nothing is left."""
        self.fresh = None
        self.devices = []
        yield
        for device in self.devices:
            driver = device._driver
            driver.close()
            assert [] == driver.hardware.violations
            assert {} == driver.foreign_uses
            assert {} == driver.pins
            assert {} == device.events.borrowed
            assert 0 == device.events.num_own
            assert len(driver.pollers) <= 1
            copies = [  # zeros come from one place, which nobody pins
                copy for copy in driver.copies if len(set(copy.batch.sources)) > 1
            ]
            assert {self.is_pinned} >= {copy.is_pinned for copy in copies}

    def driver(self):
        """Return the driver of the device that comes next."""
        if self.fresh is None:
            self.fresh = make_driver(self.semantics, seed=len(self.devices))
        return self.fresh

    def make_device(self, num_blocks):
        """Return a device on the driver that allocated the engine's memory."""
        self.devices.append(AcceleratorDevice(self.driver(), num_blocks))
        self.fresh = None
        return self.devices[-1]

    def make_memory(self, nbytes):
        """Return memory of the device that comes next."""
        return self.driver().allocate(nbytes)

    def make_pool(self, num_slots, slot_bytes):
        """Return a pool that the last device has pinned, if it is to."""
        pool = super().make_pool(num_slots, slot_bytes)
        device = self.devices[-1]
        if self.is_staged:
            if device._staging is None:
                assert device.stage(3 * num_slots * slot_bytes, slot_bytes) == ""
        elif self.is_pinned:
            assert device.pin(pool) == ""
        return pool

    def make_unrecorded_event(self):
        """Return an event of the engine's."""
        return SimEvent(self.devices[-1]._driver.hardware)

    def test_pinned_memory_is_copied_like_any_other(self):
        """Pinned here are some copies, and some are not, whatever those of others are."""
        super().test_pinned_memory_is_copied_like_any_other()
        self.devices[-1]._driver.copies.clear()


@pytest.mark.slow
class TestCUDAContract(Contract):
    pass


@pytest.mark.slow
class TestNPUContract(Contract):
    semantics = NPU


@pytest.mark.slow
class TestUnpinnedCUDAContract(Contract):
    is_pinned = False


@pytest.mark.slow
class TestUnpinnedNPUContract(Contract):
    semantics = NPU
    is_pinned = False


@pytest.mark.slow
class TestStagedCUDAContract(Contract):
    is_staged = True


@pytest.mark.slow
class TestStagedNPUContract(Contract):
    semantics = NPU
    is_staged = True


def pending(world):
    """Close a stream of the engine's, which holds what follows until it is opened."""
    gate, stream = Gate("gate"), world.hardware.make_stream(0)
    stream.ops.append(gate)
    return gate, stream


class TestLease:
    @BOTH
    def test_save_waits_for_the_engines_work(self, semantics):
        """S2-06: behind a lease's fence a save finds what the engine wrote before the
        lease, in whatever order the hardware runs."""
        for seed in SEEDS:
            with running(semantics, seed) as world:
                world.write()
                assert world.device.lease().wait(TIMEOUT)
                assert world.gather().wait(TIMEOUT)
                assert {NEW} == world.saved()

    @BOTH
    def test_save_waits_for_the_engines_event(self, semantics):
        """S0-21: behind an event that the engine lends a save finds what was written
        before it, on a stream that is not the current one."""
        for seed in SEEDS:
            with running(semantics, seed) as world:
                stream = world.hardware.make_stream(0)
                world.write(stream=stream)
                assert world.device.lease(world.event(stream)).wait(TIMEOUT)
                assert world.gather().wait(TIMEOUT)
                assert {NEW} == world.saved()

    def test_save_without_a_lease_finds_what_was_there(self):
        """The hardware does run copies before kernels: without a lease saves are old or
        torn."""
        found = set()
        for seed in SEEDS:
            with running(seed=seed) as world:
                world.write()
                assert world.gather().wait(TIMEOUT)
                found |= world.saved()
        assert {OLD, NEW} == found

    def test_lease_waits_for_nothing_else_than_its_event(self):
        """C6 rule 8: the fence stands behind the event given, not behind the current
        stream, which is passed over."""
        with running(pace=STILL) as world:
            event = world.event(world.hardware.make_stream(0))
            gate = Gate("gate")
            world.driver.current_stream().ops.append(gate)
            fence = world.device.lease(event)
            assert 3 == world.hardware.run(3)
            assert fence.wait(TIMEOUT)
            gate.is_open = True

    def test_event_recorded_again_does_not_hold_the_fence(self):
        """S0-25, C6 rules 4 and 5: the wait is submitted and the event given back within
        the call, so that a record after it neither delays the fence nor undoes it."""
        with running(CUDA, pace=STILL) as world:
            event = world.event()
            fence = world.device.lease(event)
            assert {} == world.device.events.borrowed
            gate, stream = pending(world)
            event.record(stream)
            assert 3 == world.hardware.run(3)
            assert fence.wait(TIMEOUT)
            assert not event.query()
            assert fence.is_done()
            gate.is_open = True

    def test_event_recorded_again_where_waits_look_later_is_safe(self):
        """S0-25: where a wait is for the latest record, one that comes after the lease
        may hold the fence and never lets it pass early; once passed it stays so."""
        for seed in SEEDS:
            with running(NPU, seed, pace=STILL) as world:
                world.write()
                event = world.event()
                fence = world.device.lease(event)
                gate, stream = pending(world)
                event.record(stream)
                assert not fence.is_done()
                gate.is_open = True
                world.hardware.drain()
                assert fence.wait(TIMEOUT)
                event.record()
                assert not event.query()
                assert fence.is_done()

    def test_event_is_on_loan_until_the_wait_has_looked(self):
        """C6 rule 5: where a wait does not capture the record, the event stays alive
        until the fence has passed, whoever else drops it, and is given back then."""
        with running(NPU, pace=STILL) as world:
            event = world.event()
            native, alive = event.native, weakref.ref(event)
            fence = world.device.lease(event)
            del event
            gc.collect()
            assert alive() is not None
            assert {native: 1} == world.device.events.borrowed
            assert native in world.hardware.live_events
            given_back = threading.Event()
            fence.call_when_over(given_back.set)  # after the device's own
            world.hardware.drain()
            assert given_back.wait(TIMEOUT)
            assert {} == world.device.events.borrowed
            assert alive() is None

    @BOTH
    def test_event_of_an_earlier_step_is_refused(self, semantics):
        """S0-24: an event that was seen in an earlier step is stale, and one that was
        never recorded proves nothing; neither is waited for."""
        with running(semantics) as world:
            world.device.begin_step(1)
            event, unrecorded = world.event(), SimEvent(world.hardware)
            assert world.device.lease(event).wait(TIMEOUT)
            assert world.device.lease(event).wait(TIMEOUT)
            world.device.begin_step(2)
            with pytest.raises(EventStaleError, match="step 1 and this is 2"):
                world.device.lease(event)
            with pytest.raises(EventNotRecordedError, match="never recorded"):
                world.device.lease(unrecorded)
            assert {"record": 1, "wait": 2} == event.uses
            assert {} == unrecorded.uses
            assert world.device.lease(world.event()).wait(TIMEOUT)

    @BOTH
    def test_event_of_another_device_is_refused(self, semantics):
        """S0-26, C6 rule 7: another device's event is refused by its index, and neither
        waited for nor recorded."""
        with running(semantics) as world:
            event = world.event(world.hardware.make_stream(1))
            with pytest.raises(ForeignEventError, match="device 1, not 0"):
                world.device.lease(event)
            assert {"record": 1} == event.uses

    def test_event_of_another_runtime_is_refused(self):
        """C6 rule 7: an event of another runtime is none at all here."""
        with running(CUDA) as world, running(NPU) as other:
            event = other.event()
            with pytest.raises(EventUnreadableError, match="SimEvent has no handle"):
                world.device.lease(event)
            assert {"record": 1} == event.uses

    @BOTH
    def test_graph_that_is_recorded_is_left_alone(self, semantics):
        """C6 rule 11: while a graph is recorded neither lease nor synchronize does
        anything but refuse."""
        with running(semantics) as world:
            event = world.event()
            with world.driver.capturing():
                for refused in (
                    world.device.lease,
                    lambda: world.device.lease(event),
                    world.device.synchronize,
                ):
                    with pytest.raises(GraphCaptureError):
                        refused()
            assert {"record": 1} == event.uses
            assert world.device.lease(event).wait(TIMEOUT)

    def test_synchronize_waits_for_all(self):
        """Behind ``synchronize`` nothing that the engine has submitted is left."""
        with running(pace=STILL) as world:
            world.write()
            world.device.synchronize()
            assert {NEW} == world.loaded()

    @BOTH
    def test_many_leases_leave_nothing(self, semantics):
        """S0-28: after hundreds of leases, each of an event of its own, nothing is on
        loan, nothing recorded, and the events of ours are a handful."""

        def lease_often(world, simulation):
            for step in range(300):
                world.device.begin_step(step)
                assert world.device.lease(world.event()).wait(TIMEOUT)
                assert world.device.lease().wait(TIMEOUT)
            simulation.sleep(1.0)
            assert {} == world.device.events.borrowed
            assert 0 == world.device.events.num_own
            gc.collect()
            assert len(world.hardware.live_events) < 10

        simulated(lease_often, semantics)
