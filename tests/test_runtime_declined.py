# SPDX-License-Identifier: Apache-2.0
"""Orders that nothing is to be done for, under many interleavings; virtual time."""

import numpy as np
import pytest

from tests.kit.simulation import Simulation
from tests.rig import (
    BLOCK_BYTES,
    KEYSPACE_DIGEST,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    PAGE_BYTES,
    null_log,
    order,
)
from ucm.config import UCMConfig
from ucm.devices.cpu import CPUDevice
from ucm.metrics import Counters
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.reasons import Reason
from ucm.runtime import Runtime
from ucm.stores.memory import MemoryStore

SAVE, LOAD = Direction.SAVE, Direction.LOAD


def declined(seed):
    """Decline a save and a load; return what was told of them when that returned."""
    simulation, told = Simulation(seed), []

    def main():
        device = CPUDevice(NUM_BLOCKS)
        memory = np.zeros((len(LAYERS), NUM_BLOCKS, PAGE_BYTES), np.uint8)
        device.register(LAYOUT, dict(zip(LAYERS, memory, strict=True)))
        runtime = Runtime(
            MemoryStore(16, BLOCK_BYTES),
            device,
            layout=LAYOUT,
            config=UCMConfig(),
            counters=Counters(),
            log=null_log(),
            threads=simulation.threads,
        )
        runtime.start()
        orders = [
            order(1, SAVE, range(1), range(1)),
            order(2, LOAD, range(1, 2), range(1, 2), "l"),
        ]
        runtime.decline(KEYSPACE_DIGEST, orders, Reason.UNSUBMITTED)
        told.extend(runtime.poll())
        assert 0 == runtime.num_open
        runtime.close()

    simulation.run(main)
    return told


@pytest.mark.parametrize("seed", range(24))
def test_orders_that_are_declined_end_for_that_reason_at_once(seed):
    """R-02: wherever the loop is just then, it begins nothing of them: they have neither
    failed nor are they told of later."""
    told = declined(seed)
    ends = {n.ticket.transfer_id: n.outcome for n in told if n.outcome is not None}
    assert {1, 2} == ends.keys()
    words = {(outcome.kind, outcome.reason) for outcome in ends.values()}
    assert {(OutcomeKind.CANCELLED, Reason.UNSUBMITTED)} == words
    released = [n for n in told if n.kind is NoticeKind.RELEASED]
    assert {1, 2} == {notice.ticket.transfer_id for notice in released}
