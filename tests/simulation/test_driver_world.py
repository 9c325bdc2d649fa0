# SPDX-License-Identifier: Apache-2.0
"""Each call of an accelerator's driver fails once, in each of the ways in which it may."""

import pytest

from tests.kit.accelerator_streams import CUDA, NPU
from tests.simulation.driver_troubles import Trouble
from tests.simulation.driver_world import DriverWorld

RUNS = {
    Trouble.ERROR: (CUDA, "all"),
    Trouble.LATE: (NPU, "staging"),
    Trouble.STICKY: (NPU, "all"),
    Trouble.HANG: (CUDA, "staging"),
}
"""The runtime, and what memory it pins."""


@pytest.mark.slow
@pytest.mark.parametrize("trouble", Trouble)
def test_whatever_call_fails_nothing_is_wrong_and_all_is_given_back(trouble):
    """Whichever call of the driver fails, and however, what was told as loaded or stored is
    what was computed, each ticket ends, and threads, events, pins and slots come back."""
    semantics, pins = RUNS[trouble]
    well = DriverWorld(semantics, pins)
    well.run()
    assert 100 < len(well.driver.verbs)
    for nth in range(1, len(well.driver.verbs) + 1):
        world = DriverWorld(semantics, pins, nth, trouble)
        world.run()
        assert well.driver.verbs[nth - 1] == world.driver.failing
