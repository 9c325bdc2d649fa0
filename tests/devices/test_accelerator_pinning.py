# SPDX-License-Identifier: Apache-2.0
"""Memory of a store that is pinned while copies of it are on their way to the driver."""

import attrs
import pytest

from tests.devices.accelerator_kit import ARRANGEMENT, TIMEOUT, World, simulated
from tests.kit.accelerator import SimulatedDriver

ONE_ROW = attrs.evolve(ARRANGEMENT, pages=(64,), paddings=(0,), groups=((0,),))
"""Neighbours of it are one copy."""


class SlowDriver(SimulatedDriver):
    """A runtime that takes a while to submit."""

    def copy(self, batch, direction, stream, *, is_pinned):
        """Submit, a second later."""
        self.sleep(1.0)
        super().copy(batch, direction, stream, is_pinned=is_pinned)


@pytest.mark.parametrize("move", [World.gather, World.scatter])
def test_copy_that_is_being_submitted_is_of_no_piece_that_is_pinned_meanwhile(move):
    """S2-04: a piece is pinned between copies, never within one: neither the copy that is
    on its way then nor the one that waits behind it lies in that piece in part."""

    def pin_meanwhile(world, simulation):
        world.driver.sleep = simulation.sleep
        moved = []

        def copy(ids):
            moved.append(move(world, ids).wait(TIMEOUT))

        threads = [
            simulation.threads.thread(lambda ids=ids: copy(ids), "copy")
            for ids in (range(4), range(4, 8))
        ]
        for thread in threads:
            thread.start()
        simulation.sleep(0.5)
        assert world.device.pin(world.pool[2:6]) == ""
        for thread in threads:
            thread.join()
        assert [True, True] == moved
        assert [1, 2] == [len(copy.batch) for copy in world.driver.copies]

    options = {"driver": SlowDriver, "is_pinned": False, "arrangement": ONE_ROW}
    for seed in range(6):
        simulated(pin_meanwhile, seed=seed, **options)
