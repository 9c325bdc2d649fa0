# SPDX-License-Identifier: Apache-2.0
"""The staging pool against plain sets, and under borrowers in any interleaving."""

import contextlib
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.devices.staging_kit import (
    NUM_SLOTS,
    ToldFence,
    indexes,
    make_pool,
    places_of,
    take,
)
from tests.kit.simulation import Simulation
from tests.pipeline.kit import HandFence
from ucm.devices import staging


class PoolMachine(RuleBasedStateMachine):
    """A pool beside sets of slots."""

    def __init__(self):
        super().__init__()
        self.pool = make_pool()
        self.free = set(range(NUM_SLOTS))
        self.leases = []
        self.quarantined = []
        self.fences = []

    def give_back(self):
        """Free what no closed fence holds any more."""
        for lease, fences in list(self.quarantined):
            if all(fence.is_done() for fence in fences):
                self.quarantined.remove((lease, fences))
                self.free |= indexes(lease)

    @rule(count=st.integers(1, 4))
    def borrow(self, count):
        """Slots are lent exactly when there are enough, and only free ones."""
        lease = take(self.pool, count)
        if count > len(self.free):
            assert lease is None
            return
        assert count == len(indexes(lease))
        assert set() == indexes(lease) - self.free
        self.free -= indexes(lease)
        self.leases.append((lease, []))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), kind=st.sampled_from([HandFence, ToldFence]))
    def submit(self, data, kind):
        """A copy begins on slots that are lent."""
        lease, fences = data.draw(st.sampled_from(self.leases))
        fences.append(kind())
        self.fences.append(fences[-1])
        lease.quarantine(fences[-1])

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def finish(self, data):
        """A copy ends."""
        fence = data.draw(st.sampled_from(self.fences))
        self.fences.remove(fence)
        fence.open()
        self.give_back()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), times=st.integers(1, 2))
    def end(self, data, times):
        """A lease ends, once however often it is closed."""
        at = data.draw(st.integers(0, len(self.leases) - 1))
        lease, fences = self.leases.pop(at)
        for _ in range(times):
            lease.close()
        self.quarantined.append((lease, fences))
        self.give_back()

    @invariant()
    def slots_are_where_the_model_has_them(self):
        """Every slot is in one place."""
        lent = sum(len(lease.slots) for lease, _ in self.leases)
        out = sum(len(lease.slots) for lease, _ in self.quarantined)
        assert (len(self.free), lent, out) == places_of(self.pool)
        assert NUM_SLOTS == sum(places_of(self.pool))


@pytest.mark.slow
class TestPoolMachine(PoolMachine.TestCase):
    """Design invariant 5: on any order of calls no slot is in two places."""

    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Borrowers:
    """
    Five threads that borrow, copy, fail and time out, beside a device that lags.

    Args:
        seed: Decides everything.
    """

    def __init__(self, seed):
        self.simulation = Simulation(seed, line_modules=[staging.__file__])
        self.dice = self.simulation.dice
        self.pool = make_pool(threads=self.simulation.threads)
        self.in_use = set()
        self.copies = []
        self.waits = self.timeouts = 0

    def device(self):
        """End one copy after the other, in the order in which they began."""
        while True:
            self.simulation.block(lambda: bool(self.copies), None, "copies")
            slots, fence = self.copies.pop(0)
            self.simulation.sleep(self.dice.choice([0.0, 0.001, 0.3]))
            self.in_use -= slots
            fence.open()

    def borrow(self):
        """Borrow once, and begin a copy or not."""
        wanted, timeout = self.dice.randint(1, 4), self.dice.choice([0, 1, 9])
        is_short = wanted > len(self.pool._free)
        lease = take(self.pool, wanted, timeout)
        self.timeouts += lease is None
        if lease is None:
            return
        self.waits += is_short
        with lease:
            taken = indexes(lease)
            assert set() == taken & self.in_use
            self.in_use |= taken
            self.simulation.pause()
            if self.dice.random() < 0.5:
                self.in_use -= taken
                return
            fence = self.dice.choice([HandFence, ToldFence])()
            lease.quarantine(fence)
            self.copies.append((taken, fence))
            if self.dice.random() < 0.3:
                raise KeyError

    def borrower(self):
        """Borrow some times."""
        for _ in range(10):
            with contextlib.suppress(KeyError):
                self.borrow()

    def run(self):
        """Run all threads to their end; return how many waited, and how many in vain."""
        self.simulation.run(self.main)
        return self.waits, self.timeouts

    def main(self):
        """Start all, and wait until no slot is in use."""
        start = self.simulation.threads.thread
        start(self.device, "device").start()
        threads = [start(self.borrower, f"borrower-{number}") for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(1e4)
            assert not thread.is_alive()
        self.simulation.block(lambda: not self.in_use, 1e4, "copies")
        self.simulation.sleep(1.0)
        assert NUM_SLOTS == places_of(self.pool).free
        assert self.pool.close()


class TestThreads:
    @pytest.mark.slow
    def test_nothing_is_lent_twice_in_any_interleaving(self):
        """S2-15: borrowers, copies and call-backs interleaved line by line never share
        a slot, never have more copies under way than there are slots, and leave none
        behind."""
        totals = [Borrowers(seed).run() for seed in range(30)]
        assert all(map(sum, zip(*totals, strict=True)))

    @pytest.mark.slow
    def test_real_threads_never_share_a_slot(self):
        """S2-15: what a thread writes into its slots is what it reads back, although
        there are many more threads than slots."""
        pool = make_pool(4)
        barrier = threading.Barrier(8)

        def borrower(number):
            dice = random.Random(number)
            barrier.wait(60.0)
            for _ in range(200):
                with take(pool, dice.randint(1, 4), 15.0) as slots:
                    for position in range(len(slots)):
                        slots.block(position)[:] = number
                    assert all(
                        (slots.block(position) == number).all()
                        for position in range(len(slots))
                    )

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(8) as executor:
                list(executor.map(borrower, range(8)))
        finally:
            sys.setswitchinterval(interval)
        assert 4 == places_of(pool).free
        assert pool.close()
