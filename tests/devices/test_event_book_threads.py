# SPDX-License-Identifier: Apache-2.0
"""Loans that several threads take and give back at once."""

import pytest

from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_streams import SimHardware
from tests.kit.simulation import Simulation
from ucm.devices import events
from ucm.devices.events import EventBook
from ucm.errors import DeviceError


class SlowDriver(SimulatedDriver):
    """A runtime that takes a second to submit a wait."""

    is_waiting = False

    def wait(self, stream, event):
        """Take a second."""
        self.is_waiting = True
        self.sleep(1.0)
        super().wait(stream, event)
        self.is_waiting = False


class Contention:
    """
    Threads that borrow, close and count on one book, preempted between its lines.

    Args:
        seed: Decides everything.
    """

    def __init__(self, seed):
        self.simulation = Simulation(
            seed, line_modules=[events.__file__], line_chance=0.2
        )
        self.hardware = SimHardware(self.simulation.dice, pause=self.simulation.pause)
        self.driver = SimulatedDriver(0, self.hardware)
        self.book = EventBook(self.driver, self.simulation.threads)
        self.closes_begun = self.closes_over = self.loans_ended = 0

    def run(self):
        """Run to the end; return how many loans were ended by closing the book."""
        self.simulation.run(self._main)
        self.hardware.drain()
        assert [] == self.hardware.violations
        assert {} == self.driver.foreign_uses
        return self.loans_ended

    def _main(self):
        self.driver.bind_thread()
        self.shared = SimEvent(self.hardware)
        self.shared.record()
        targets = [self._borrow] * 3 + [self._close, self._count]
        threads = [self.simulation.threads.thread(each, "t") for each in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {} == self.book.borrowed
        self.book.close()
        assert 0 == self.book.num_own

    def _borrow(self):
        """Borrow an event of this thread's and one of all threads, and fence both."""
        self.driver.bind_thread()
        stream = self.driver.make_stream()
        for _ in range(3):
            event = SimEvent(self.hardware)
            event.record()
            before = self.closes_over
            loans = [self.book.borrow(event), self.book.borrow(self.shared)]
            del event
            for loan in loans:
                self._fence(loan, stream, before)
            self.book.recycle(self.book.record(stream))

    def _fence(self, loan, stream, closes):
        is_there = loan.handle in self.book.borrowed
        assert is_there or self.closes_begun > closes
        try:
            loan.hold_back(stream)
        except DeviceError:
            assert self.closes_begun > closes
            self.loans_ended += 1
        loan.release()

    def _close(self):
        for _ in range(2):
            self.closes_begun += 1
            self.book.close()
            self.closes_over += 1

    def _count(self):
        for _ in range(4):
            assert min(self.book.borrowed.values(), default=1) > 0
            assert self.book.num_own >= 0


@pytest.mark.slow
def test_threads_that_borrow_while_another_closes():
    """S0-32: in a thousand runs threads borrow while others close and count; no loan is
    lost or ends early but by ``close``, nobody sees another error, nothing is left."""
    ended = sum(Contention(seed).run() for seed in range(1000))
    assert 100 < ended < 17000


def test_release_waits_for_a_wait_under_way():
    """C6 rule 6: who gives back an event while another thread makes a stream wait for it
    does so after that."""
    simulation = Simulation(1)
    driver = SlowDriver(0, SimHardware(simulation.dice, pause=simulation.pause))
    driver.sleep = simulation.sleep
    book = EventBook(driver, simulation.threads)

    def main():
        driver.bind_thread()
        stream, event = driver.make_stream(), SimEvent(driver.hardware)
        event.record()
        loan = book.borrow(event)

        def hold_back():
            driver.bind_thread()
            loan.hold_back(stream)

        simulation.spawn(hold_back, "hold back")
        simulation.sleep(0.5)
        assert driver.is_waiting
        loan.release()
        assert not driver.is_waiting
        assert 1 == event.uses["wait"]

    simulation.run(main)
    assert [] == driver.hardware.violations
