# SPDX-License-Identifier: Apache-2.0
"""Deadlines and fences of the runtime: who waits for what, and for how long."""

import threading

from tests.rig import BLOCK_BYTES, NUM_BLOCKS, keys_of, order, running, running_on
from ucm.devices.cpu import CPUDevice
from ucm.errors import DeviceError
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.reasons import Reason
from ucm.stores.memory import MemoryStore
from ucm.stores.wrap import WrapperStore
from ucm.testing.faults import Fault, FaultDevice, FaultPlan, Gate, raising

SAVE, LOAD = Direction.SAVE, Direction.LOAD
LONG = 1000.0
"""Seconds after which every deadline is over."""
PATIENT = {"timeout": {"fence": 60.0}}


class Clinging(WrapperStore):
    """A store that takes slots back behind a gate."""

    def __init__(self, inner):
        super().__init__(inner)
        self.gate = Gate()

    def reserve(self, keys, block_bytes, uses=None):
        """Return a lease whose slots are given back behind the gate."""
        lease = super().reserve(keys, block_bytes, uses)
        discard = lease.discard
        lease.discard = lambda: (self.gate(), discard())
        return lease


def await_hung(rig, *, is_hung=True):
    """Wait until the runtime has seen that the store's calls hang, or have returned."""
    for _ in range(6000):
        if is_hung is bool(rig.runtime._pipeline.queue._held_off):
            return
        rig.advance(0.1)
        rig.poll()
        rig.runtime.wait_for_notice(0.01)
    raise TimeoutError


class TestDeadlines:
    def test_save_behind_a_hung_store_gives_its_blocks_back(self):
        """S1-01: a store that hangs costs the save, never the engine's blocks."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(*(order(n, SAVE, range(n, n + 1), range(1, 2)) for n in (1, 2)))
            gate.wait_reached()
            rig.advance(LONG)
            ends = rig.settle()
            assert "deadline" == ends[1].reason
            assert [1, 2] == sorted(rig.told(NoticeKind.RELEASED))
            # One stood at the store; the other one behind it need not wait so long.
            assert {"deadline", "store_hung"} >= {one.reason for one in ends.values()}
            words = rig.submit(order(3, SAVE, range(3, 4), range(1, 2)))
            assert ["store_hung"] == words
            gate.open()
            await_hung(rig, is_hung=False)
            rig.submit(order(4, SAVE, range(4, 5), range(1, 2)))
            assert OutcomeKind.COMMITTED is rig.settle()[4].kind
            assert [False, False, True] == rig.store.contains(keys_of(1, 2, 4))
            assert 0 == rig.store.stats().reserved_blocks

    def test_save_that_is_still_copying_at_its_deadline_is_never_stored(self):
        """A copy under way is waited for, its blocks are released when it ended, and
        what it copied is not committed."""
        gate = Gate()
        config = {"timeout": {"save": 30.0, "stuck": 600.0}}
        with running(config, FaultPlan(Fault("gather", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            rig.advance(31.0)
            assert not rig.runtime.flush(0.1)
            assert [] == rig.told(NoticeKind.RELEASED)
            gate.open()
            assert OutcomeKind.CANCELLED is rig.settle()[1].kind
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.store.match(keys_of(0))

    def test_copy_that_never_ends_is_quarantined_and_never_released(self):
        """A device copy that overruns every limit keeps its blocks, is reported, and
        the runtime serves nothing more."""
        gate = Gate()
        config = {"timeout": {"shutdown": 0.2}}
        with running(config, FaultPlan(Fault("gather", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            rig.advance(LONG)
            assert "stuck" == rig.settle()[1].reason
            assert [1] == rig.told(NoticeKind.QUARANTINED)
            assert "stuck" in rig.failure()
            gate.open()
        assert [] == rig.told(NoticeKind.RELEASED)

    def test_load_behind_a_hung_store_fails_in_time(self):
        """A load has a deadline: its request is given back for recompute."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("read", gate))) as rig:
            rig.submit(order(1, LOAD, range(4), range(20, 24)))
            gate.wait_reached()
            rig.advance(LONG)
            assert "deadline" == rig.settle()[1].reason
            assert [1] == rig.told(NoticeKind.RELEASED)
            before = rig.content(range(20, 24))
            gate.open()
        assert before == rig.content(range(20, 24))

    def test_hang_is_noticed_though_its_load_was_withdrawn(self):
        """Nobody waits for the load any more, but those behind it would."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("read", gate))) as rig:
            rig.submit(order(1, LOAD, [1], [1]))
            gate.wait_reached()
            rig.runtime.abandon([1], Reason.WITHDRAWN)
            assert Reason.WITHDRAWN is rig.settle()[1].reason
            rig.submit(order(2, LOAD, [2], [2], request="other"))
            rig.advance(LONG)
            await_hung(rig)
            words = rig.submit(order(3, LOAD, [3], [3], request="third"))
            assert [Reason.STORE_HUNG] == words
            assert rig.settle()[2].reason in (Reason.DEADLINE, Reason.STORE_HUNG)
            gate.open()
            await_hung(rig, is_hung=False)

    def test_hang_while_slots_are_given_back_is_noticed(self):
        """What is behind it would wait for the store as well."""
        plan = FaultPlan(Fault("gather", raising(DeviceError("once"))))
        store = Clinging(MemoryStore(capacity_blocks=8, block_bytes=BLOCK_BYTES))
        with running_on(store, FaultDevice(CPUDevice(NUM_BLOCKS), plan)) as rig:
            rig.submit(order(1, SAVE, [1], [1]))
            store.gate.wait_reached()
            assert OutcomeKind.FAILED is rig.settle()[1].kind
            rig.advance(LONG)
            await_hung(rig)
            assert [Reason.STORE_HUNG] == rig.submit(order(2, SAVE, [2], [2]))
            store.gate.open()
            await_hung(rig, is_hung=False)
            rig.submit(order(3, SAVE, [3], [3]))
            assert OutcomeKind.COMMITTED is rig.settle()[3].kind

    def test_load_that_lands_after_it_was_given_up_is_told_in_the_end(self):
        """A load whose copy overruns every limit ends as failed; its blocks are given
        back when the copy ends after all, so that its request is not kept for ever."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("scatter", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.settle()
            rig.submit(order(2, LOAD, range(4), range(20, 24)))
            gate.wait_reached()
            rig.advance(LONG)
            assert "stuck" == rig.settle()[2].reason
            assert [1] == rig.told(NoticeKind.RELEASED)
            gate.open()
            rig.runtime.close()
            assert [1, 2] == rig.told(NoticeKind.RELEASED)
            assert [] == rig.told(NoticeKind.QUARANTINED)

    def test_engine_that_waits_for_a_stuck_load_does_not_spin(self):
        """The end of every ticket is told, but a copy goes on: whoever asks again and
        again meanwhile waits a little each time."""
        gate, waits = Gate(), []
        with running(plan=FaultPlan(Fault("scatter", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.settle()
            rig.submit(order(2, LOAD, range(4), range(20, 24)))
            gate.wait_reached()
            rig.advance(LONG)
            assert "stuck" == rig.settle()[2].reason
            assert "stuck" in rig.failure()
            rig.runtime._mailbox.wait = waits.append
            rig.runtime.wait_for_notice(0.001)
            rig.runtime.wait_for_notice(60.0)
            assert [0.001, 0.002] == waits
            gate.open()


class TestFence:
    def test_fence_waits_for_a_copy_under_way(self):
        """A fence returns after the copy of its block has ended, and the save counts."""
        gate = Gate()
        with running(PATIENT, FaultPlan(Fault("gather", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            threading.Timer(0.02, gate.open).start()
            rig.runtime.fence([1])
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert 4 == rig.settle()[1].committed

    def test_fenced_save_that_has_not_begun_is_dropped(self):
        """What still waits when the engine needs the block is dropped and counted."""
        gate = Gate()
        config = {"timeout": {"fence": 0.02}}
        with running(config, FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            rig.submit(order(2, SAVE, range(4, 8), range(5, 9), request="b"))
            rig.runtime.fence([2])
            assert [2] == rig.told(NoticeKind.RELEASED)
            gate.open()
            assert OutcomeKind.CANCELLED is rig.settle()[2].kind
            assert "recycled" == rig.outcomes()[2].reason
            assert 0 == rig.store.match(keys_of(4))

    def test_torn_copy_is_never_stored(self):
        """A fence that cannot wait any longer lets the engine go on; the bytes that
        were being copied are thrown away."""
        gate = Gate()
        config = {"timeout": {"fence": 0.01}}
        with running(config, FaultPlan(Fault("gather", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            rig.runtime.fence([1])
            rig.fill(range(1, 5), seed=9)
            gate.open()
            outcome = rig.settle()[1]
            assert (OutcomeKind.CANCELLED, "recycled") == (outcome.kind, outcome.reason)
            assert 0 == rig.store.match(keys_of(0))

    def test_fence_does_not_wait_behind_loads(self):
        """A save that the engine waits for goes before loads that wait."""
        gate = Gate()
        config = {"queue": {"window": 1}, **PATIENT}
        with running(config, FaultPlan(Fault("read", gate))) as rig:
            rig.submit(order(1, LOAD, range(4), range(20, 24), request="a"))
            gate.wait_reached()
            rig.submit(
                order(2, LOAD, range(4), range(24, 28), request="b"),
                order(3, SAVE, range(4), range(1, 5), request="c"),
            )
            rig.runtime.fence([3])
            assert 3 in rig.told(NoticeKind.RELEASED)
            gate.open()
            assert OutcomeKind.COMMITTED is rig.settle()[3].kind

    def test_fence_waits_only_for_the_saves_it_names(self):
        """S1-07, S1-17: another request's slow save neither delays a fence nor is
        touched by it."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("seal", gate, nth=2))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.settle()
            rig.submit(order(2, SAVE, range(4, 8), range(5, 9), request="slow"))
            gate.wait_reached()
            rig.runtime.fence([1, 77])
            assert [1] == rig.told(NoticeKind.SETTLED)
            gate.open()
            assert 4 == rig.settle()[2].committed
