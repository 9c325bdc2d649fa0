# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline over a device whose copies end when the test says so."""

import contextlib
import time
import typing
from concurrent import futures

import pytest
import torch

from tests.pipeline.kit import TIMEOUT, AsyncDevice, HandFence
from tests.rig import (
    BLOCK_BYTES,
    KEYSPACE_DIGEST,
    NUM_BLOCKS,
    NUM_ROWS,
    PAGE_BYTES,
    keys_of,
    order,
    running_on,
)
from ucm.blocks import TransferId
from ucm.errors import DeviceError
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.stores.memory import MemoryStore
from ucm.testing.device_contract import DeviceContract
from ucm.testing.faults import Fault, FaultPlan, FaultStore, Gate, raising

SAVE, LOAD = Direction.SAVE, Direction.LOAD


@pytest.mark.slow
class TestContract(DeviceContract):
    """The fake is a device: its copies merely end later, on another thread."""

    def make_device(self, num_blocks):
        """Return a device that opens its fences by itself, in order."""
        stream = futures.ThreadPoolExecutor(max_workers=1)
        return AsyncDevice(num_blocks, lambda fence: stream.submit(fence.open))

    def make_memory(self, nbytes):
        """Return a tensor in host memory."""
        return torch.zeros(nbytes, dtype=torch.uint8)


def running(config=None):
    """Run a rig over an asynchronous device."""
    return running_on(MemoryStore(64, BLOCK_BYTES), AsyncDevice(NUM_BLOCKS), config)


def save(rig, contents, blocks, number=1):
    """Save and wait for the end; return the outcome."""
    rig.submit(order(number, SAVE, contents, blocks))
    rig.device.next_fence().open()
    return rig.settle()[number]


def begin_late(rig, number, direction, contents, blocks):
    """Submit an order whose deadline passes while its copy begins; return the fence."""

    def expire():
        rig.runtime._open[TransferId(number)].deadline = time.monotonic()

    rig.device.on_copy = expire
    rig.submit(order(number, direction, contents, blocks))
    fence = rig.device.next_fence()
    rig.device.on_copy = lambda: None
    return fence


class TestCopies:
    def test_source_is_released_when_the_fence_opens(self):
        """S1-12: not the call but the fence ends a save's hold, and what is stored
        are the bytes at that moment."""
        with running() as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            fence = rig.device.next_fence()
            saved = rig.fill(range(1, 5), seed=3)
            assert [] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.store.match(keys_of(0))
            fence.open()
            assert 4 == rig.settle()[1].committed
            assert [1] == rig.told(NoticeKind.RELEASED)
            rig.submit(order(2, LOAD, range(4), range(30, 34)))
            rig.device.next_fence().open()
            assert 4 == rig.settle()[2].committed
            assert saved == rig.content(range(30, 34))

    def test_load_is_told_behind_its_fence_only(self):
        """A request is not given blocks that the device still writes."""
        with running() as rig:
            save(rig, range(4), range(1, 5))
            rig.submit(order(2, LOAD, range(4), range(30, 34)))
            fence = rig.device.next_fence()
            assert [1] == rig.told(NoticeKind.SETTLED)
            assert [1] == rig.told(NoticeKind.RELEASED)
            fence.open()
            assert OutcomeKind.COMMITTED is rig.settle()[2].kind
            assert [1, 2] == rig.told(NoticeKind.RELEASED)

    def test_copy_begins_behind_the_engines_fence(self):
        """Nothing is read before the engine's own work on the blocks is over."""
        with running() as rig:
            ready = HandFence()
            (one,) = [order(1, SAVE, range(4), range(1, 5))]
            rig.runtime.submit(KEYSPACE_DIGEST, [one], ready)
            saved = rig.fill(range(1, 5), seed=4)
            assert not rig.device.was_asked
            ready.open()
            rig.device.next_fence().open()
            assert 4 == rig.settle()[1].committed
            with rig.store.read(keys_of(*range(4))) as lease:
                stored = [lease.slots.block(at).tobytes() for at in range(4)]
            pages = [
                saved[at : at + PAGE_BYTES] for at in range(0, len(saved), PAGE_BYTES)
            ]
            assert [b"".join(pages[at::4]) for at in range(4)] == stored


class TestVerifying:
    CONFIG: typing.ClassVar = {
        "threads": {"verify": 3},
        "queue": {"window": 8},
        "timeout": {"shutdown": 0.2},
    }

    @contextlib.contextmanager
    def loading(self, *faults):
        """Run a rig with three saved blocks, of which each is loaded by its own ticket."""
        plan = FaultPlan(*faults)
        inner = MemoryStore(64, BLOCK_BYTES)
        store = FaultStore(inner, plan)
        with running_on(store, AsyncDevice(NUM_BLOCKS), self.CONFIG) as rig:
            save(rig, range(3), range(1, 4), number=9)
            orders = [
                order(at + 1, LOAD, [at], [20 + at], request=f"r{at}")
                for at in range(3)
            ]
            yield rig, inner, orders

    def test_tickets_are_verified_side_by_side(self):
        """No ticket's checksums wait for another's: each has a thread."""
        gates = [Gate(), Gate(), Gate()]
        faults = [Fault("verify", gate, nth=at + 1) for at, gate in enumerate(gates)]
        with self.loading(*faults) as (rig, _, orders):
            rig.submit(*orders)
            for gate in gates:
                gate.wait_reached()
            for _ in orders:
                rig.device.next_fence().open()
            for gate in gates:
                gate.open()
            ends = rig.settle()
            assert [1, 1, 1] == [ends[number].committed for number in (1, 2, 3)]

    def test_all_copies_are_submitted_before_any_is_verified(self):
        """The link does not wait for checksums: copies go on beside those that hang."""
        gates = [Gate(), Gate(), Gate()]
        faults = [Fault("verify", gate, nth=at + 1) for at, gate in enumerate(gates)]
        with self.loading(*faults) as (rig, _, orders):
            more = order(4, LOAD, [0], [30], request="r4")
            rig.submit(*orders, more)
            fences = [rig.device.next_fence() for _ in range(4)]
            for gate in gates:
                gate.open()
            for fence in fences:
                fence.open()
            assert 1 == rig.settle()[4].committed

    @pytest.mark.parametrize("corrupt", range(3))
    def test_corrupt_block_in_any_thread_fails_its_own_ticket(self, corrupt):
        """The damaged block is forgotten, its place zeroed; the others are loaded."""
        with self.loading() as (rig, inner, orders):
            entry = inner._entries[keys_of(corrupt)[0]]
            inner._pool[entry.slot, 7] ^= 1
            rig.submit(*orders)
            for _ in orders:
                rig.device.next_fence().open()
            rig.device.next_fence().open()  # of the zeros
            ends = rig.settle()
            kinds = [ends[number].kind for number in (1, 2, 3)]
            wanted = [OutcomeKind.COMMITTED] * 3
            wanted[corrupt] = OutcomeKind.FAILED
            assert wanted == kinds
            assert not any(rig.content(range(20 + corrupt, 21 + corrupt)))
            assert [False] == inner.contains(keys_of(corrupt))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_blocks_under_a_copy_outlast_the_thread_that_verified_them(self):
        """A thread that dies ends the service; blocks go back when nothing writes them."""
        with self.loading(Fault("verify", raising(SystemExit()))) as (rig, _, orders):
            rig.submit(orders[0])
            fence = rig.device.next_fence()
            assert "runtime_failed" == rig.settle()[1].reason
            assert "ucm-load-verify has died" in rig.failure()
            assert [9] == rig.told(NoticeKind.RELEASED)
            fence.open()
            rig.device.next_fence().open()  # of the zeros
            assert [9, 1] == rig.told(NoticeKind.RELEASED)


class TestDeadlines:
    @pytest.mark.parametrize("direction", [SAVE, LOAD])
    def test_copy_past_its_deadline_is_waited_for_and_does_not_count(self, direction):
        """S1-26: blocks under a copy come back when its fence opens, not before;
        nothing of it is committed, and the runtime goes on."""
        with running() as rig:
            save(rig, range(8, 12), range(1, 5), number=9)
            contents = range(4) if direction is SAVE else range(8, 12)
            fence = begin_late(rig, 1, direction, contents, range(20, 24))
            assert not rig.runtime.flush(0.02)
            assert [9] == rig.told(NoticeKind.RELEASED)
            assert [] == rig.told(NoticeKind.QUARANTINED)
            fence.open()
            outcome = rig.settle()[1]
            assert (OutcomeKind.CANCELLED, "deadline") == (outcome.kind, outcome.reason)
            if direction is LOAD:
                assert [9] == rig.told(NoticeKind.RELEASED)
                rig.device.next_fence().open()  # what was copied is zero now
                assert bytes(4 * NUM_ROWS * PAGE_BYTES) == rig.content(range(20, 24))
            assert [9, 1] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.store.match(keys_of(0))
            assert "" == rig.runtime.failure
            assert 4 == save(rig, range(4), range(1, 5), number=2).committed
            assert 0 == rig.store.stats().reserved_blocks

    def test_save_whose_fence_never_opens_is_quarantined(self):
        """A copy that overruns every limit keeps its slots for good, is reported
        before its ticket ends, and the runtime serves nothing more."""
        with running({"timeout": {"stuck": 0.01, "shutdown": 0.1}}) as rig:
            begin_late(rig, 1, SAVE, range(4), range(20, 24))
            assert "stuck" == rig.settle()[1].reason
            assert [1] == rig.told(NoticeKind.QUARANTINED)
            kinds = [n.kind for n in rig.notices if n.ticket.transfer_id == 1]
            assert [NoticeKind.QUARANTINED, NoticeKind.SETTLED] == kinds
            assert "stuck" in rig.failure()
            assert ["failed"] == rig.submit(order(2, SAVE, range(1), range(1, 2)))
        assert 1 not in rig.told(NoticeKind.RELEASED)
        # Nobody else may get slots into which the device still writes.
        assert 4 == rig.store.stats().reserved_blocks

    def test_load_whose_fence_never_opens_fails_and_keeps_its_blocks(self):
        """A load that overruns every limit ends the service; its request is given
        back only when the device no longer writes its blocks."""
        with running({"timeout": {"stuck": 0.01, "shutdown": 0.1}}) as rig:
            save(rig, range(4), range(1, 5), number=9)
            fence = begin_late(rig, 1, LOAD, range(4), range(20, 24))
            assert "stuck" == rig.settle()[1].reason
            assert "stuck" in rig.failure()
            assert [9] == rig.told(NoticeKind.RELEASED)
            assert [] == rig.told(NoticeKind.QUARANTINED)
            fence.open()

    def test_load_that_ends_behind_the_close_was_not_called_quiet(self):
        """A copy that was given up may end when all else is over: the log does not say
        before that nothing will follow."""
        with running({"timeout": {"stuck": 0.01, "shutdown": 0.1}}) as rig:
            save(rig, range(4), range(1, 5), number=9)
            fence = begin_late(rig, 1, LOAD, range(4), range(20, 24))
            assert "stuck" == rig.settle()[1].reason
            rig.runtime.close()
            fence.open()
            rig.device.next_fence().open()  # of the zeros
            assert [9, 1] == rig.told(NoticeKind.RELEASED)

    def test_load_whose_blocks_are_not_zeroed_ends_the_service(self):
        """Blocks that a failed load leaves and the device does not zero stay, as those
        of a stuck copy do, and the runtime says so: their request waits for them."""
        with running() as rig:
            save(rig, range(4), range(1, 5), number=9)
            begin_late(rig, 1, LOAD, range(4), range(20, 24)).open()
            assert "deadline" == rig.settle()[1].reason
            assert "" == rig.runtime.failure
            rig.device.next_fence().fail(DeviceError("planned"))
            assert "blocks of transfer 1 are not zeroed" == rig.failure()
            assert [9] == rig.told(NoticeKind.RELEASED)
            assert ["failed"] == rig.submit(order(2, SAVE, range(1), range(1, 2)))

    def test_load_whose_zeros_never_come_ends_the_service(self):
        """A device that neither zeroes blocks nor fails is waited for as long as for a
        copy that is stuck, also when there is nothing else to do."""
        with running({"timeout": {"stuck": 5, "shutdown": 0.1}}) as rig:
            save(rig, range(4), range(1, 5), number=9)
            begin_late(rig, 1, LOAD, range(4), range(20, 24)).open()
            assert "deadline" == rig.settle()[1].reason
            zeros = rig.device.next_fence()
            for _ in range(100):  # let the loop come to rest first
                rig.runtime.wait_for_notice(0.002)
            rig.advance(6.0)
            assert "blocks of transfer 1 are not zeroed in time" == rig.failure()
            assert [9] == rig.told(NoticeKind.RELEASED)
            zeros.open()

    def test_engine_work_that_never_ends_costs_the_save_only(self):
        """A save whose blocks are never written is dropped before any copy."""
        with running({"timeout": {"save": 0.02}}) as rig:
            rig.runtime.submit(
                KEYSPACE_DIGEST, [order(1, SAVE, range(4), range(1, 5))], HandFence()
            )
            assert "deadline" == rig.settle()[1].reason
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert not rig.device.was_asked

    def test_copy_whose_fence_fails_is_quarantined(self):
        """A device that cannot say whether a copy is over keeps the blocks."""
        with running({"timeout": {"shutdown": 0.2}}) as rig:

            def broken():
                raise DeviceError("the device is gone")

            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            fence = rig.device.next_fence()
            fence.is_done = broken
            fence.open()  # whoever waits already is called, and asks
            assert OutcomeKind.FAILED is rig.settle()[1].kind
            assert [1] == rig.told(NoticeKind.QUARANTINED)
            assert [] == rig.told(NoticeKind.RELEASED)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_copies_under_a_dead_loop_are_given_up(self):
        """R-16: nobody would ever see such a copy end; the engine hears of it at once,
        and the slots stay reserved."""
        with running({"timeout": {"shutdown": 0.2}}) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.device.next_fence()

            def die():
                raise SystemExit

            rig.runtime._loop.call(die)
            rig.runtime._loop.join(TIMEOUT)
            assert "runtime_failed" == rig.settle()[1].reason
            assert [1] == rig.told(NoticeKind.QUARANTINED)
            assert [] == rig.told(NoticeKind.RELEASED)
        assert 4 == rig.store.stats().reserved_blocks


class TestFence:
    def test_engine_that_cannot_wait_tears_the_save(self):
        """S1-09: an engine that goes on while the device reads gets its blocks, and
        what was read is never stored."""
        with running({"timeout": {"fence": 0.01}}) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            fence = rig.device.next_fence()
            rig.runtime.fence([1])
            assert [] == rig.told(NoticeKind.RELEASED)
            fence.open()
            outcome = rig.settle()[1]
            assert (OutcomeKind.CANCELLED, "recycled") == (outcome.kind, outcome.reason)
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.store.match(keys_of(0))


class TestFailure:
    def test_ticket_failed_from_outside_gives_its_slots_back_after_the_copy(self):
        """S1-14: when the runtime fails under a copy, the slots are kept until the
        copy is over, and then nothing is leased any more."""
        with running() as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            fence = rig.device.next_fence()
            rig.runtime._fail("test")
            assert OutcomeKind.FAILED is rig.outcomes()[1].kind
            assert 4 == rig.store.stats().reserved_blocks
            fence.open()
            rig.runtime._loop.call(rig.runtime._pipeline.stop)
            rig.runtime._loop.join(TIMEOUT)
            assert rig.runtime._pipeline.join_threads(TIMEOUT)
            assert 0 == rig.store.stats().reserved_blocks


class TestClose:
    def test_close_under_a_copy_leaves_store_and_device_open(self):
        """S1-27: close ends in time; what the device still uses stays until the copy
        is over, and then every thread ends."""
        with running({"timeout": {"shutdown": 0.02}}) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            fence = rig.device.next_fence()
            rig.runtime.close()
            assert OutcomeKind.CANCELLED is rig.outcomes()[1].kind
            assert [] == rig.told(NoticeKind.RELEASED)
            assert 4 == rig.store.stats().reserved_blocks
            fence.open()
            rig.runtime._loop.join(TIMEOUT)
            assert rig.runtime._pipeline.join_threads(TIMEOUT)
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.store.match(keys_of(0))
            rig.store.close()
            rig.device.close()
