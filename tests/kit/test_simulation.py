# SPDX-License-Identifier: Apache-2.0
"""The simulation: seeded interleavings, virtual time, and threads that are none."""

import sys

import anyio
import pytest

from tests.kit import simulated_counter
from tests.kit.simulated_counter import Counter
from tests.kit.simulation import Simulation, SimulationDeadlockError

NAMES = "abc"


def interleaving(seed):
    """Return the order in which three threads of three steps ran."""
    simulation, ran = Simulation(seed), []

    def main():
        def steps(name):
            for _ in range(3):
                simulation.pause()
                ran.append(name)

        threads = [
            simulation.threads.thread(lambda name=name: steps(name), name)
            for name in NAMES
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    simulation.run(main)
    return "".join(ran)


def together(simulation, *targets):
    """Run functions on threads of their own and wait for all."""

    def main():
        threads = [simulation.threads.thread(each, "t") for each in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            assert not thread.is_alive()

    simulation.run(main)


class TestSeeds:
    def test_same_seed_runs_the_same_way(self):
        """A run is repeated by its number alone."""
        assert [interleaving(seed) for seed in range(20)] == [
            interleaving(seed) for seed in range(20)
        ]

    def test_seeds_differ(self):
        """Many interleavings are met, all complete."""
        runs = {interleaving(seed) for seed in range(50)}
        assert len(runs) > 20
        assert {"aaabbbccc"} == {"".join(sorted(run)) for run in runs}

    def test_race_between_lines_is_found(self):
        """Threads are preempted between lines of the modules that are named, only."""
        lost = {False: 0, True: 0}
        for by_lines in lost:
            modules = [simulated_counter.__file__] if by_lines else []
            for seed in range(30):
                counter = Counter()
                simulation = Simulation(seed, line_modules=modules, line_chance=0.3)
                together(simulation, *[counter.add] * 3)
                lost[by_lines] += counter.value < 3
        assert 0 == lost[False]
        assert 0 < lost[True]

    def test_lock_keeps_the_race_out(self):
        """Whoever holds a simulated lock is alone, also between lines."""
        for seed in range(30):
            counter = Counter()
            modules = [simulated_counter.__file__]
            simulation = Simulation(seed, line_modules=modules, line_chance=0.3)
            lock = simulation.threads.lock()

            def add(lock=lock, counter=counter):
                with lock:
                    counter.add()

            together(simulation, add, add, add)
            assert 3 == counter.value

    def test_tracer_of_the_process_is_put_back(self):
        """Whoever traces the process, such as a coverage tool, goes on afterwards."""
        before = sys.gettrace()
        together(Simulation(1, line_modules=[simulated_counter.__file__]))
        assert before is sys.gettrace()


class TestTime:
    def test_timeout_costs_no_time_and_is_exact(self):
        """Waiting for an hour ends when everybody waits, an hour later."""
        simulation, passed = Simulation(1), []

        def main():
            start = simulation.threads.monotonic()
            assert not simulation.threads.event().wait(3600.0)
            passed.append(simulation.threads.monotonic() - start)

        simulation.run(main)
        assert 3600.0 == pytest.approx(passed[0])

    def test_event_loop_sleeps_in_virtual_time(self):
        """Two loops on two threads keep their own timers on one clock."""
        simulation, woken = Simulation(3), []

        def serve(name, seconds):
            async def wait():
                with anyio.move_on_after(1000.0):
                    await anyio.sleep(seconds)
                woken.append((name, round(simulation.now - 1000.0)))

            anyio.run(
                wait, backend_options={"loop_factory": simulation.threads.event_loop}
            )

        together(simulation, lambda: serve("slow", 50.0), lambda: serve("quick", 20.0))
        assert [("quick", 20), ("slow", 50)] == woken

    def test_loop_is_woken_by_another_thread(self):
        """What another thread asks of a loop is done although the loop sleeps."""
        simulation, done = Simulation(5), []

        def main():
            loop = simulation.threads.event_loop()
            thread = simulation.threads.thread(loop.run_forever, "loop")
            thread.start()
            loop.call_soon_threadsafe(done.append, 1)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(1.0)
            assert not thread.is_alive()
            loop.close()

        simulation.run(main)
        assert [1] == done


class TestWaits:
    def test_deadlock_is_named(self):
        """Two threads that wait for each other for ever end in an error that says so."""
        simulation = Simulation(1)

        def main():
            simulation.threads.event().wait()

        with pytest.raises(SimulationDeadlockError, match=r"seed 1: .*main.*event"):
            simulation.run(main)

    def test_condition_looks_only_when_notified(self):
        """A change that nobody is notified of is not seen before the timeout."""
        simulation, seen = Simulation(1), []

        def main():
            condition = simulation.threads.condition()
            flags = []

            def change(*, tell):
                with condition:
                    flags.append(1)
                    if tell:
                        condition.notify_all()

            for tell in (False, True):
                flags.clear()
                with condition:
                    simulation.threads.thread(
                        lambda tell=tell: change(tell=tell), "changes"
                    ).start()
                    start = simulation.now
                    condition.wait_for(lambda: bool(flags), 100.0)
                    seen.append(simulation.now - start > 99.0)

        simulation.run(main)
        assert [True, False] == seen

    def test_queue_hands_over_in_order(self):
        """What one thread puts in the other takes out, in order, and waits for it."""
        simulation, taken = Simulation(2), []
        queue = simulation.threads.queue()
        together(
            simulation,
            lambda: [queue.put(number) for number in range(5)],
            lambda: [taken.append(queue.get()) for _ in range(5)],
        )
        assert [0, 1, 2, 3, 4] == taken


class TestEnds:
    def test_error_of_main_is_raised(self):
        """A failed assertion of the test's own thread reaches the test."""

        def main():
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            Simulation(1).run(main)

    def test_error_of_another_thread_is_told(self):
        """A thread that ends by an exception fails the run, with its name."""

        def target():
            raise ValueError("theirs")

        with pytest.raises(RuntimeError, match=r"t: ValueError\('theirs'\)"):
            together(Simulation(1), target)

    def test_thread_may_exit(self):
        """SystemExit ends a thread without a word, as in the standard library."""

        def target():
            raise SystemExit

        together(Simulation(1), target)

    def test_threads_left_are_ended(self):
        """When main returns, no simulated thread lives on."""
        simulation = Simulation(1)

        def main():
            forever = simulation.threads.event()
            simulation.threads.thread(forever.wait, "left").start()
            assert ["main", "left"] == simulation.names()

        simulation.run(main)
        assert [] == simulation.names()
