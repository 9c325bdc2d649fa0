# SPDX-License-Identifier: Apache-2.0
"""Staging pools for tests, and fences that stand for copies."""

from typing import NamedTuple

from tests.pipeline.kit import HandFence
from ucm.devices.staging import StagingPool
from ucm.errors import DeviceFailedError

SLOT = 64
NUM_SLOTS = 6


def make_pool(num_slots=NUM_SLOTS, **given):
    """Return a pool of so many slots."""
    return StagingPool(num_slots * SLOT, SLOT, **given)


def take(pool, count=1, timeout=0.0):
    """Borrow, with a payload of less than a slot."""
    return pool.borrow(count, SLOT - 8, timeout)


class Places(NamedTuple):
    """How many slots of a pool are where."""

    free: int
    borrowed: int
    quarantined: int


def places_of(pool):
    """Return where the slots of a pool are, now that it has looked at its fences."""
    pool._look_at_fences()
    leases = pool._borrowed, pool._quarantined
    return Places(
        len(pool._free), *(sum(len(each.slots) for each in some) for some in leases)
    )


def indexes(lease):
    """Return which slots a lease has."""
    return set(lease.slots.slots.tolist())


class ToldFence(HandFence):
    """A fence that calls when the test opens it."""

    def __init__(self):
        super().__init__()
        self.callbacks = []

    def open(self):
        """Open, and call."""
        super().open()
        for callback in self.callbacks:
            callback()

    def call_when_over(self, callback):
        """Call at once if it is open, otherwise later."""
        if self.is_done():
            callback()
        else:
            self.callbacks.append(callback)
        return True


class FailedFence(HandFence):
    """A fence of a device that has failed."""

    def is_done(self):
        """Say so."""
        raise DeviceFailedError("gone")
