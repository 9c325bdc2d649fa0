# SPDX-License-Identifier: Apache-2.0
"""The runtime takes all blocks back, before their memory goes away."""

import threading

import pytest

from tests.pipeline.kit import AsyncDevice
from tests.rig import BLOCK_BYTES, NUM_BLOCKS, order, running, running_on
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, Gate

SAVE, LOAD = Direction.SAVE, Direction.LOAD
SHORT = {"timeout": {"fence": 0.02, "shutdown": 0.2, "stuck": 5.0}}


class TestQuiesce:
    def test_idle_runtime_is_quiet_and_serves_on(self):
        """R-08: nothing is waited for where nothing is copied, and it is no end."""
        with running(SHORT) as rig:
            assert rig.runtime.quiesce()
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            assert OutcomeKind.COMMITTED is rig.settle()[1].kind
            assert rig.runtime.quiesce()

    def test_what_has_not_begun_touches_no_block_any_more(self):
        """R-08: saves and loads that wait are taken back; they fail, and say so."""
        gate = Gate()
        with running(SHORT, FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            gate.wait_reached()
            rig.submit(order(2, SAVE, range(1, 2), range(2, 3), request="b"))
            assert rig.runtime.quiesce()
            gate.open()
            kinds = {outcome.kind for outcome in rig.settle().values()}
            assert not kinds & {OutcomeKind.COMMITTED}

    @pytest.mark.parametrize("direction", [SAVE, LOAD])
    def test_copy_under_way_is_waited_for_and_does_not_count(self, direction):
        """R-08: a copy that has begun ends before the memory goes; what it moved is
        torn."""
        device = AsyncDevice(NUM_BLOCKS)
        store = MemoryStore(capacity_blocks=8, block_bytes=BLOCK_BYTES)
        with running_on(store, device, SHORT) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            fence = device.next_fence()
            if direction is LOAD:
                fence.open()
                rig.settle()
                rig.submit(order(2, LOAD, range(1), range(3, 4)))
                fence = device.next_fence()
            quiet: list[bool] = []
            thread = threading.Thread(
                target=lambda: quiet.append(rig.runtime.quiesce())
            )
            thread.start()
            ticket = next(iter(rig.runtime._open.values()))
            while not ticket.guard.torn:
                assert thread.is_alive(), quiet
            fence.open()
            if direction is LOAD:
                device.next_fence().open()  # behind zeros
            thread.join(60.0)
            assert [True] == quiet
            outcome = rig.settle()[ticket.transfer_id]
            assert outcome.kind is not OutcomeKind.COMMITTED

    def test_copy_that_does_not_end_is_told(self):
        """R-08: whoever takes memory away is told that somebody may still touch it."""
        device = AsyncDevice(NUM_BLOCKS)
        store = MemoryStore(capacity_blocks=8, block_bytes=BLOCK_BYTES)
        config = {"timeout": {"fence": 0.02, "shutdown": 0.2, "stuck": 0.05}}
        with running_on(store, device, config) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            fence = device.next_fence()
            assert not rig.runtime.quiesce()
            fence.open()
            rig.settle()
