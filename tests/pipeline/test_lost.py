# SPDX-License-Identifier: Apache-2.0
"""What the engine takes back of a ticket is lost alone; the others are stored."""

from collections.abc import Callable

import pytest

from tests.rig import (
    BLOCK_BYTES,
    KEYSPACE_DIGEST,
    NUM_BLOCKS,
    Rig,
    keys_of,
    order,
    running,
    running_on,
)
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.stores.memory import MemoryStore
from ucm.testing.faults import Fault, FaultPlan, FaultStore, Gate

SAVE = Direction.SAVE


def lose(rig: Rig, lost: dict[int, list[int]], *others: int) -> None:
    """Wait in vain for saves of which some lose only some of their blocks."""
    rig.runtime._waits.for_saves([*lost, *others], lambda: True, lost)


def stored(rig: Rig, contents: range) -> list[bool]:
    """Return which blocks are in the store, of which nothing is reserved."""
    assert rig.store.stats().reserved_blocks == 0
    return rig.store.contains(keys_of(*contents))


class WatchedDevice(CPUDevice):
    """Remembers which blocks it read."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.read: list[list[int]] = []

    def gather(self, group_id, row_ids, block_ids, slots):
        """Note the blocks, then copy."""
        self.read.append(list(block_ids))
        return super().gather(group_id, row_ids, block_ids, slots)


class TestFence:
    def test_block_lost_under_its_copy_costs_only_itself(self) -> None:
        """R-01: the engine overwrites one block while the copy reads; the bytes of the
        others are stored as they were, that one is cancelled, and its slot is free."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("gather", gate))) as rig:
            before = rig.fill(range(1, 5), seed=1)
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            lose(rig, {1: [2]})
            rig.fill(range(3, 4), seed=9)
            gate.open()
            outcome = rig.settle()[1]
            assert (OutcomeKind.CANCELLED, "recycled") == (outcome.kind, outcome.reason)
            assert (3, 0) == (outcome.committed, outcome.skipped)
            assert [True, True, False, True] == stored(rig, range(4))
            assert [1] == rig.told(NoticeKind.RELEASED)
            rig.submit(order(2, Direction.LOAD, range(2), range(20, 22)))
            assert OutcomeKind.COMMITTED is rig.settle()[2].kind
            size = len(before) // 3
            for row in range(3):  # the first two of four blocks
                page = before[row * size : row * size + size // 2]
                read = rig.content(range(20, 22))
                assert page == read[row * size // 2 : (row + 1) * size // 2]

    def test_block_lost_before_its_copy_is_not_read(self) -> None:
        """A save that has not begun goes on without the block; the copy leaves it alone,
        whatever the store said before."""
        gate, device = Gate(), WatchedDevice()
        store = FaultStore(
            MemoryStore(8, BLOCK_BYTES), FaultPlan(Fault("reserve", gate))
        )
        with running_on(store, device) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            lose(rig, {1: [0]})
            assert [] == rig.told(NoticeKind.RELEASED)
            gate.open()
            assert 3 == rig.settle()[1].committed
            assert [[2, 3, 4]] == device.read
            assert [False, True, True, True] == stored(rig, range(4))

    def test_copy_that_is_over_loses_nothing(self) -> None:
        """Behind the copy's end the engine may overwrite what it likes."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("seal", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            lose(rig, {1: [0, 1]})
            gate.open()
            assert OutcomeKind.COMMITTED is rig.settle()[1].kind
            assert [True] * 4 == stored(rig, range(4))

    def test_save_that_is_not_named_is_lost_whole(self) -> None:
        """Of two saves one loses a block, the other all of them."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            rig.submit(order(2, SAVE, range(4, 8), range(5, 9), request="b"))
            lose(rig, {1: [3]}, 2)
            assert [2] == rig.told(NoticeKind.RELEASED)
            gate.open()
            assert [3, 0] == [
                each.committed for _, each in sorted(rig.settle().items())
            ]
            assert [True] * 3 + [False] * 5 == stored(rig, range(8))

    def test_save_that_loses_its_last_block_is_over(self) -> None:
        """Block by block all are lost: nothing is copied, and they are given back."""
        gate, device = Gate(), WatchedDevice()
        store = FaultStore(
            MemoryStore(8, BLOCK_BYTES), FaultPlan(Fault("reserve", gate))
        )
        with running_on(store, device) as rig:
            rig.submit(order(1, SAVE, range(2), range(1, 3)))
            gate.wait_reached()
            lose(rig, {1: [1]})
            lose(rig, {1: [0]})
            assert [1] == rig.told(NoticeKind.RELEASED)
            gate.open()
            assert ("recycled", 0) == (
                rig.settle()[1].reason,
                rig.outcomes()[1].committed,
            )
            assert [] == device.read
            assert [False, False] == stored(rig, range(2))

    def test_lost_block_that_is_stored_already_is_none(self) -> None:
        """The store has had the block before: the save is a success."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("gather", gate, nth=2))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            rig.settle()
            rig.submit(order(2, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            lose(rig, {2: [0]})
            gate.open()
            outcome = rig.settle()[2]
            assert (OutcomeKind.COMMITTED, 3) == (outcome.kind, outcome.committed)
            assert 1 == outcome.skipped

    def test_block_lost_between_rows_is_not_stored(self) -> None:
        """Layer by layer: the first row is copied, the block is lost, the others come."""
        with running() as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST,
                [order(1, SAVE, range(3), range(1, 4))],
                DoneFence(),
                row_ids=[0],
            )
            rig.runtime._take_in()
            assert rig.runtime._open[1].wait_copied([0], 60.0)
            lose(rig, {1: [1]})
            rig.runtime.add_rows([1], [1, 2], DoneFence())
            assert 2 == rig.settle()[1].committed
            assert [True, False, True] == stored(rig, range(3))

    def test_lost_and_full_are_both_missing(self) -> None:
        """Where the store has no room either, every block is counted once."""
        gate, device = Gate(), WatchedDevice()
        store = FaultStore(MemoryStore(2, BLOCK_BYTES), FaultPlan(Fault("seal", gate)))
        with running_on(store, device) as rig:
            rig.submit(order(1, SAVE, range(3), range(1, 4)))
            gate.wait_reached()
            rig.runtime._waits.tear([1], {1: [1]})
            gate.open()
            outcome = rig.settle()[1]
            assert (OutcomeKind.CANCELLED, 1) == (outcome.kind, outcome.committed)
            assert [True, False, False] == stored(rig, range(3))


class TestTear:
    @pytest.mark.parametrize(
        ("see", "committed", "reason"),
        [(lambda _: None, 3, "overwritten"), (Rig.poll, 4, "")],
        ids=["unseen", "confirmed"],
    )
    def test_copied_block_is_lost_unless_it_was_confirmed(
        self, see: Callable[[Rig], object], committed: int, reason: str
    ) -> None:
        """What is over may be torn while the engine's thread has not seen its end."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("seal", gate))) as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST, [order(1, SAVE, range(4), range(1, 5))], DoneFence()
            )
            gate.wait_reached()
            see(rig)
            rig.runtime._waits.tear([1], {1: [1]})
            gate.open()
            outcome = rig.settle()[1]
            assert (committed, reason) == (outcome.committed, outcome.reason)
            assert [True, committed == 4, True, True] == stored(rig, range(4))

    def test_save_that_is_not_named_is_torn_whole(self) -> None:
        """Of a save that no position is told of, nothing is stored."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("seal", gate))) as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST, [order(1, SAVE, range(4), range(1, 5))], DoneFence()
            )
            gate.wait_reached()
            rig.runtime._waits.tear([1], {7: [1]})
            gate.open()
            assert (0, "overwritten") == (
                rig.settle()[1].committed,
                rig.outcomes()[1].reason,
            )
