# SPDX-License-Identifier: Apache-2.0
"""The staging pool: a budget of slots, and copies that outlive their borrower."""

import gc
import math
import threading

import numpy as np
import pytest

from tests.devices.staging_kit import (
    NUM_SLOTS,
    SLOT,
    FailedFence,
    ToldFence,
    indexes,
    make_pool,
    places_of,
    take,
)
from tests.pipeline.kit import HandFence
from ucm.devices.events import DoneFence
from ucm.devices.staging import StagingPool
from ucm.errors import ConfigError, DeviceError


class TestBudget:
    def test_rest_of_the_budget_is_not_allocated(self):
        """Design invariant 5: slot bytes never exceed the budget, also by rounding."""
        pool = StagingPool(3 * SLOT - 1, SLOT)
        assert (2, SLOT) == pool.memory.shape
        assert (2, 0, 0) == places_of(pool)

    def test_budget_below_one_slot_is_refused(self):
        """A budget that holds nothing names the setting, its value and what will do."""
        with pytest.raises(ConfigError) as caught:
            StagingPool(SLOT - 1, SLOT)
        assert ("queue.staging_bytes", SLOT - 1) == (
            caught.value.key,
            caught.value.value,
        )
        assert f"at least {SLOT} bytes" in caught.value.remedy

    def test_request_that_will_never_fit_gets_nothing_at_once(self):
        """More than the whole pool is not waited for."""
        assert take(make_pool(), NUM_SLOTS + 1, timeout=1e9) is None

    @pytest.mark.parametrize(
        ("count", "nbytes", "timeout"),
        [
            (0, SLOT, 1.0),
            (1, 0, 1.0),
            (1, SLOT + 1, 1.0),
            (1, SLOT, math.inf),
            (1, SLOT, math.nan),
        ],
    )
    def test_request_that_makes_no_sense_is_refused(self, count, nbytes, timeout):
        """Nothing is lent for no block, too large a block, or an unbounded wait."""
        pool = make_pool()
        with pytest.raises(ValueError, match=r"slots of .* bytes|blocks of"):
            pool.borrow(count, nbytes, timeout)
        assert NUM_SLOTS == places_of(pool).free

    def test_slots_of_no_bytes_are_refused(self):
        """A slot has at least one byte; anything else is a bug of the caller."""
        with pytest.raises(ValueError, match="slots of 0 bytes"):
            StagingPool(SLOT, 0)

    def test_lease_is_a_span_of_neighbours(self):
        """A lease yields host slots over the pool's memory, next to each other."""
        pool = make_pool()
        with take(pool, 2), take(pool, 3) as slots:
            assert pool.memory is slots.pool
            assert [2, 3, 4] == slots.slots.tolist()
            assert (np.int64, SLOT - 8) == (slots.slots.dtype, slots.block_bytes)
            slots.block(1)[:] = 7
        assert 7 * (SLOT - 8) == pool.memory[3].sum()


class TestPinning:
    def test_memory_is_pinned_once_as_a_whole(self):
        """S2-04: buffers lie in memory that was pinned before the first is lent, from
        the allocator that the device gave."""
        pinned, made = [], []

        def allocate(nbytes):
            made.append(np.zeros(nbytes, np.uint8))
            return made[-1]

        def pin(memory):
            pinned.append(memory)
            return ""

        pool = make_pool(pin=pin, allocate=allocate)
        for _ in range(2):
            take(pool, 2).close()
        assert [(NUM_SLOTS, SLOT)] == [memory.shape for memory in pinned]
        assert np.shares_memory(made[0], pinned[0])
        assert "" == pool.pin_problem

    def test_memory_that_cannot_be_pinned_is_used_all_the_same(self):
        """S2-04: when pinning is not possible, the pool says why and still lends."""
        pool = make_pool(pin=lambda _: "ulimit -l is 64 KiB")
        assert "ulimit -l is 64 KiB" == pool.pin_problem
        with take(pool) as slots:
            assert 1 == len(slots)

    def test_memory_begins_at_a_page(self):
        """Pinning locks whole pages: the pool shares none with anybody."""
        assert 0 == make_pool().memory.ctypes.data % 4096


class TestQuarantine:
    @pytest.mark.parametrize("kind", [HandFence, ToldFence])
    def test_slots_under_a_copy_are_never_lent(self, kind):
        """Design invariant 1, for host memory: until each of its fences has passed, no
        slot of a lease is handed out, however much is asked for."""
        pool = make_pool()
        fences = [kind(), kind()]
        with pool.borrow(2, SLOT, 0.0) as slots:
            under_copy = set(slots.slots.tolist())
        lease = take(pool, 2)
        assert under_copy == indexes(lease)
        for fence in fences:
            lease.quarantine(fence)
        lease.close()
        rest = take(pool, NUM_SLOTS - 2)
        assert set() == under_copy & indexes(rest)
        for fence in fences:
            assert take(pool) is None
            assert 2 == places_of(pool).quarantined
            fence.open()
        assert under_copy == indexes(take(pool, 2))

    def test_fence_that_has_passed_costs_nothing(self):
        """A copy that ended within the lease leaves its slots free at once."""
        pool = make_pool()
        lease = take(pool)
        lease.quarantine(DoneFence())
        lease.close()
        assert 0 == places_of(pool).quarantined

    @pytest.mark.parametrize("calls", [True, False])
    def test_fence_that_failed_keeps_its_slots_for_good(self, calls, monkeypatch):
        """Nothing is known of a copy on a device that failed: its slots stay out, and
        raise nothing into the next borrower."""
        monkeypatch.setattr(
            FailedFence, "call_when_over", lambda _, callback: callback() or calls
        )
        pool = make_pool()
        lease = take(pool, 2)
        lease.quarantine(FailedFence())
        lease.close()
        assert set() == indexes(lease) & indexes(take(pool, NUM_SLOTS - 2))
        assert 2 == places_of(pool).quarantined
        assert take(pool) is None

    def test_fence_that_two_see_pass_frees_its_slots_once(self):
        """Two threads that ask the same fence at once do not free its slots twice."""
        pool = make_pool()

        class Asked(HandFence):
            def is_done(self):
                if super().is_done() and not totals:
                    totals.append(None)
                    totals.append(places_of(pool))
                return super().is_done()

        fence, totals = Asked(), []
        lease = take(pool, 2)
        lease.quarantine(fence)
        lease.close()
        fence.open()
        assert NUM_SLOTS == places_of(pool).free
        assert NUM_SLOTS == totals[1].free
        assert list(range(NUM_SLOTS)) == take(pool, NUM_SLOTS).slots.slots.tolist()

    def test_lease_that_has_ended_takes_no_fence(self):
        """Slots that may be another's cannot be put under a copy any more."""
        pool = make_pool()
        lease = take(pool)
        lease.close()
        with pytest.raises(DeviceError, match="has ended"):
            lease.quarantine(DoneFence())

    def test_error_within_the_lease_leaks_nothing(self):
        """Design invariant 5: a borrower that fails gives its slots back, or leaves
        them behind the copy that it had begun."""
        pool = make_pool()
        fence = ToldFence()
        with pytest.raises(KeyError), take(pool, 3):
            raise KeyError
        lease = take(pool, 2)

        def fail():
            with lease:
                lease.quarantine(fence)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert (NUM_SLOTS - 2, 0, 2) == places_of(pool)
        fence.open()
        assert NUM_SLOTS == places_of(pool).free

    def test_fence_that_is_pending_keeps_the_memory(self):
        """Memory that a copy may still write lives as long as a fence that calls, even
        when everybody has forgotten the pool."""
        freed = threading.Event()

        class Memory(np.ndarray):
            def __del__(self):
                freed.set()

        pool = make_pool(allocate=lambda n: np.zeros(n, np.uint8).view(Memory))
        fence = ToldFence()
        lease = take(pool)
        lease.quarantine(fence)
        lease.close()
        del pool, lease
        gc.collect()
        assert not freed.is_set()
        del fence
        gc.collect()
        assert freed.is_set()


class TestClose:
    def test_close_tells_whether_memory_is_unused(self):
        """S2-18: memory may be unpinned only when no lease and no copy is left; who
        asks again learns of it."""
        pool = make_pool()
        fence = HandFence()
        lease = take(pool)
        assert not pool.close()
        lease.quarantine(fence)
        lease.close()
        assert not pool.close()
        fence.open()
        assert pool.close()
        assert pool.close()

    def test_closed_pool_lends_nothing(self):
        """Design invariant 7: nothing is taken from a pool that was closed."""
        pool = make_pool()
        pool.close()
        with pytest.raises(DeviceError, match="closed"):
            take(pool, timeout=10.0)
        assert pool.close()
