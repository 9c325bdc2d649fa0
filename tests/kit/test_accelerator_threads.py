# SPDX-License-Identifier: Apache-2.0
"""Several simulated accelerators, and threads of both kinds."""

import threading

import pytest

from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_kit import (
    BOTH,
    NEW,
    Pages,
    kinds,
    make_driver,
    on_a_thread,
)
from tests.kit.accelerator_ops import Misuse, MisuseError
from tests.kit.accelerator_streams import CUDA, NPU, SimHardware
from tests.kit.simulation import Simulation


class TestDevices:
    def make_two(self, **options):
        """Return two devices of one machine; the thread is bound to the second."""
        first = make_driver(**options)
        second = SimulatedDriver(1, first.hardware)
        second.bind_thread()
        return first, second

    @BOTH
    def test_stream_waits_for_another_device(self, semantics):
        """Waiting through a stream of the waiter's device is legal (S0-26)."""
        first, second = self.make_two(semantics=semantics)
        ran, event, mine = [], SimEvent(first.hardware), second.make_stream()
        compute = first.current_stream()
        first.launch(compute, lambda: ran.append("first"))
        event.record(compute)
        second.wait(mine, event)
        second.launch(mine, lambda: ran.append("second"))
        second.synchronize()
        assert ["first", "second"] == ran
        assert (0, []) == (second.device_index(event), first.hardware.violations)

    def test_event_is_recorded_on_its_own_device_only(self):
        """Recording an event of another device raises and is noted (S0-26)."""
        first, second = self.make_two()
        event = SimEvent(first.hardware)
        event.record(first.current_stream())
        with pytest.raises(RuntimeError, match="own device"):
            second.record(event, second.current_stream())
        assert {Misuse.OTHER_DEVICE} == kinds(first)

    def test_stream_is_used_on_its_own_device_only(self):
        """Waits and copies on another device's stream are found."""
        first, second = self.make_two()
        pages, event = Pages(second), SimEvent(first.hardware)
        event.record()
        with pytest.raises(MisuseError, match="mixes devices"):
            second.wait(first.current_stream(), event)
        with pytest.raises(MisuseError, match="mixes devices"):
            pages.gather(first.current_stream())

    def test_thread_has_one_current_device(self):
        """A thread that turned to another device is not bound to the first any more."""
        first, second = self.make_two()
        second.make_event()
        with pytest.raises(MisuseError, match="current device"):
            first.make_event()

    def test_current_stream_is_per_device_and_thread(self):
        """A block can change its own thread's stream of its own device, for its length."""
        first, second = self.make_two()
        stream, default = second.make_stream(), second.current_stream()
        with second.on_stream(stream):
            assert stream is second.current_stream()
            with second.on_stream(default):
                assert default is second.current_stream()
            assert stream is second.current_stream()
            assert first.current_stream() is not stream
            assert default is on_a_thread(second.current_stream)
        assert default is second.current_stream()

    def test_failure_of_one_device_leaves_the_other(self):
        """Only the device that failed stands still."""
        first, second = self.make_two()
        ran = []
        for driver in (first, second):
            driver.launch(
                driver.current_stream(), lambda at=driver.index: ran.append(at)
            )
        first.fail("gone")
        second.synchronize()
        second.hardware.drain()
        assert [1] == ran


class TestThreads:
    def test_threads_share_the_hardware(self):
        """Real threads submit, poll and synchronize at once; each stream keeps its order."""
        driver, ran = make_driver(), {at: [] for at in range(4)}

        def work(at):
            driver.bind_thread()
            stream, event = driver.make_stream(), driver.make_event()
            for number in range(50):
                driver.launch(stream, lambda: ran[at].append(len(ran[at])))
                driver.record(event, stream)
                if number % 10 == 0:
                    driver.synchronize()
            while not driver.is_done(event):
                pass

        threads = [threading.Thread(target=work, args=(at,)) for at in ran]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {at: list(range(50)) for at in range(4)} == ran
        assert (4, []) == (len(driver.pollers), driver.hardware.violations)

    def simulate(self, seed, *, binds=True):
        """Copy on one simulated thread what another one's kernels write."""
        simulation = Simulation(seed)
        driver = SimulatedDriver(
            0, SimHardware(simulation.dice, pause=simulation.pause, semantics=NPU)
        )
        found = []

        def copy(pages, event):
            if binds:
                driver.bind_thread()
            ours, done = driver.make_stream(), driver.make_event()
            driver.wait(ours, event)
            pages.gather(ours)
            driver.record(done, ours)
            while not driver.is_done(done):
                pass
            found.append(pages.found())

        def main():
            driver.bind_thread()
            pages, event = Pages(driver), SimEvent(driver.hardware)
            driver.launch(driver.current_stream(), pages.write)
            event.record()
            thread = simulation.threads.thread(lambda: copy(pages, event), "copy")
            thread.start()
            driver.synchronize()
            thread.join()

        simulation.run(main)
        assert [{NEW}] == found
        assert [] == driver.hardware.violations
        return tuple(driver.hardware.executed), simulation.switches

    def test_simulated_threads_share_the_hardware(self):
        """Inside a simulation one seed decides the threads' order and the device's."""
        runs = [self.simulate(seed) for seed in range(10)]
        assert [self.simulate(seed) for seed in range(10)] == runs
        assert 5 < len(set(runs))

    def test_others_may_run_at_each_verb(self):
        """A verb gives way once, and synchronizing once more per step."""
        pauses = []
        driver = make_driver(pause=lambda: pauses.append(1))
        stream = driver.current_stream()
        assert sum(driver.calls.values()) == len(pauses) == 2
        for _ in range(3):
            driver.launch(stream, lambda: None)
        driver.synchronize()
        assert 2 + 1 + 3 == len(pauses)

    def test_simulated_thread_binds_itself(self):
        """Simulated threads are threads of their own to the driver."""
        with pytest.raises(RuntimeError, match="current device"):
            self.simulate(0, binds=False)


class TestFacts:
    def test_flavours_differ(self):
        """The runtimes differ in waits, priorities, and how KV caches come."""
        assert (True, True, False) == (
            CUDA.captures_waits,
            CUDA.has_priorities,
            CUDA.has_tuple_caches,
        )
        assert (False, False, True) == (
            NPU.captures_waits,
            NPU.has_priorities,
            NPU.has_tuple_caches,
        )
        assert 0 == make_driver(semantics=CUDA).make_stream().priority
        assert make_driver(semantics=NPU).make_stream().priority is None

    def test_driver_describes_itself(self):
        """It says what it is, where its tensors are, and the node that it was given."""
        driver = SimulatedDriver(0, make_driver(semantics=NPU).hardware, node=1)
        assert {"model": "simulated", "copies": "npu"} == driver.describe()
        assert (1, "cpu") == (driver.numa_node(), driver.device_type)
        assert make_driver().numa_node() is None
