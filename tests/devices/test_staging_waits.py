# SPDX-License-Identifier: Apache-2.0
"""How borrowers of the staging pool wait, in virtual time."""

import pytest

from tests.devices.staging_kit import (
    NUM_SLOTS,
    ToldFence,
    make_pool,
    take,
)
from tests.kit.simulation import Simulation
from tests.pipeline.kit import HandFence
from ucm.errors import DeviceError


class TestWaiting:
    def test_wait_ends_at_its_deadline(self):
        """A wait takes the time it was given, in virtual seconds, and no more."""
        simulation = Simulation(3)
        took = []

        def main():
            pool = make_pool(threads=simulation.threads)
            with take(pool, NUM_SLOTS):
                began = simulation.now
                assert take(pool, 1, timeout=5.0) is None
                took.append(simulation.now - began)
            assert NUM_SLOTS == len(take(pool, NUM_SLOTS).slots)

        simulation.run(main)
        assert pytest.approx(5.0, abs=0.2) == took[0]

    @pytest.mark.parametrize("kind", [HandFence, ToldFence])
    @pytest.mark.parametrize("lent_for", [0.0, 1.0])
    def test_fence_that_passes_ends_a_wait(self, kind, lent_for):
        """Slots come back while somebody waits for them, whether the fence calls or has
        to be asked, and whether the lease ended before the wait or within it."""
        simulation = Simulation(5)
        fence = kind()

        def main():
            pool = make_pool(threads=simulation.threads)
            lease = take(pool, NUM_SLOTS)
            lease.quarantine(fence)

            def device():
                simulation.sleep(lent_for)
                lease.close()
                simulation.sleep(1.0)
                fence.open()

            simulation.threads.thread(device, "device").start()
            began = simulation.now
            assert take(pool, 1, timeout=100.0) is not None
            assert lent_for + 1.0 <= simulation.now - began < lent_for + 1.5

        simulation.run(main)

    def test_fence_that_calls_is_not_asked_over_and_over(self):
        """A wait for fences that call sleeps until one does."""
        simulation = Simulation(5)
        asked = []

        class Counted(ToldFence):
            def is_done(self):
                asked.append(simulation.now)
                return super().is_done()

        def main():
            pool = make_pool(threads=simulation.threads)
            lease = take(pool, NUM_SLOTS)
            lease.quarantine(Counted())
            lease.close()
            assert take(pool, 1, timeout=60.0) is None

        simulation.run(main)
        assert len(asked) < 10

    def test_large_request_is_not_overtaken(self):
        """Who came first is served first, so that small ones cannot starve a large."""
        order = []
        for seed in range(20):
            simulation = Simulation(seed)

            def main(simulation=simulation):
                pool = make_pool(threads=simulation.threads)
                held = [take(pool, 2), take(pool, 4)]
                joined = []

                def ask(count):
                    with take(pool, count, timeout=50.0):
                        order.append(count)

                for count in (6, 1):
                    thread = simulation.threads.thread(lambda n=count: ask(n), "ask")
                    thread.start()
                    simulation.sleep(1.0)
                    joined.append(thread)
                for lease in held:
                    lease.close()
                    simulation.sleep(1.0)
                for thread in joined:
                    thread.join(50.0)

            simulation.run(main)
        assert [6, 1] * 20 == order

    def test_one_who_gives_up_lets_the_next_go(self):
        """A large request that times out does not hold up the small one behind it."""
        simulation = Simulation(1)
        got = []

        def main():
            pool = make_pool(threads=simulation.threads)
            with take(pool, NUM_SLOTS - 1):

                def large():
                    assert take(pool, 2, timeout=3.0) is None

                simulation.threads.thread(large, "large").start()
                simulation.sleep(1.0)
                began = simulation.now
                assert take(pool, 1, timeout=50.0) is not None
                got.append(simulation.now - began)

        simulation.run(main)
        assert pytest.approx(2.0, abs=0.3) == got[0]

    def test_close_ends_every_wait(self):
        """Whoever waits when the pool is closed is told at once."""
        simulation = Simulation(2)
        ends = []

        def main():
            pool = make_pool(threads=simulation.threads)

            def wait():
                with pytest.raises(DeviceError, match="closed"):
                    take(pool, timeout=1e6)
                ends.append(simulation.now)

            with take(pool, NUM_SLOTS):
                for name in "ab":
                    simulation.threads.thread(wait, name).start()
                simulation.sleep(1.0)
                assert not pool.close()
                simulation.sleep(1.0)
            assert 2 == len(ends)
            assert pool.close()

        simulation.run(main)
