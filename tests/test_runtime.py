# SPDX-License-Identifier: Apache-2.0
"""The runtime and its pipeline, on real threads, a real store and the CPU device."""

import threading

import pytest
from msgspec.structs import replace

from tests.rig import BLOCK_BYTES, KEYSPACE_DIGEST, keys_of, order, running
from ucm.blocks import KeyPacker
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    DeviceError,
    StoreFullError,
    StoreUnavailableError,
)
from ucm.pipeline.recorder import NoticeKind
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

SAVE, LOAD = Direction.SAVE, Direction.LOAD
SHORT = {"timeout": {"save": 0.05, "load": 0.05, "fence": 0.02, "shutdown": 0.2}}


def totals(rig, direction):
    """Return offered blocks and the sum of all ends."""
    name = "ucm_settled_parts_total"
    offered = rig.counters.total("ucm_offered_parts_total", direction=direction.value)
    return offered, rig.counters.total(name, direction=direction.value)


class TestSubmit:
    def test_tickets_are_made_off_the_engines_thread(self):
        """What is submitted costs the engine's thread nothing: the loop packs the keys."""
        packed_on = []
        pack = KeyPacker.pack

        def packing(packer, hashes):
            packed_on.append(threading.current_thread().name)
            return pack(packer, hashes)

        one = order(1, SAVE, range(2), range(1, 3))
        with running() as rig, pytest.MonkeyPatch.context() as patch:
            patch.setattr(KeyPacker, "pack", packing)
            rig.runtime.submit(KEYSPACE_DIGEST, [one], rig.device.lease(None))
            while not rig.outcomes():
                rig.runtime.wait_for_notice(60.0)
            assert (["ucm-loop"], 0) == (packed_on, rig.runtime.num_open)

    def test_fence_reaches_what_was_just_submitted(self):
        """S2-12: a fence covers saves of which the loop has not heard yet."""
        gate = Gate()
        with running(SHORT, FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            gate.wait_reached()
            rig.runtime._loop.call(gate)  # keeps the loop away
            second = order(2, SAVE, range(1, 2), range(2, 3), request="b")
            rig.runtime.submit(KEYSPACE_DIGEST, [second], rig.device.lease(None))
            rig.runtime.fence([2])
            assert 2 in rig.told(NoticeKind.RELEASED)
            gate.open()

    def test_failure_while_orders_are_taken_in_ends_each_ticket_once(self):
        """A runtime that fails between two tickets of a batch tells of each in order:
        its offer, then its end, and nothing of a ticket that was not offered."""
        with running() as rig:
            inner, seen = rig.runtime._recorder.admitted, []

            def admitted(*arguments):
                seen.append(arguments[0].transfer_id)
                if len(seen) == 2:
                    rig.runtime._fail("test")
                inner(*arguments)

            rig.runtime._recorder.admitted = admitted
            rig.submit(
                *(order(n, SAVE, range(n, n + 1), range(n, n + 1)) for n in (1, 2, 3))
            )
            assert [1, 2, 3] == seen == sorted(rig.outcomes())
            assert 0 == rig.runtime.num_open

    def test_batch_that_cannot_be_made_fails_the_runtime(self):
        """A caller's bug ends in a told failure, never in a ticket without an end."""
        orders = [order(n, SAVE, range(n, n + 1), range(n, n + 1)) for n in (2, 3)]
        orders[1] = replace(orders[1], group_id=7)
        gate = Gate()
        with running() as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            rig.settle()
            rig.runtime._loop.call(gate)  # or the bug dies with the loop
            with pytest.raises(KeyError, match="7"):
                rig.submit(*orders)
            gate.open()
            assert "could not be taken in" in rig.failure()
            refused = Outcome(OutcomeKind.REFUSED, "failed")
            ends = rig.outcomes()
            assert ({1, 2, 3}, refused, refused) == (set(ends), ends[2], ends[3])
            assert [1, 2, 3] == sorted(rig.told(NoticeKind.RELEASED))
            assert 0 == rig.runtime.num_open
            assert ["failed"] == rig.submit(order(4, SAVE, range(3), range(1, 4)))

    def test_ticket_refused_at_the_last_moment_is_told(self):
        """A queue that closes between the look and the offer ends the ticket,
        which was logged as accepted, and gives its blocks back."""
        with running() as rig:
            queue = rig.runtime._pipeline.queue
            offer = queue.offer

            def closing(item):
                queue.refuse(Reason.CLOSED)
                return offer(item)

            queue.offer = closing
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            assert Outcome(OutcomeKind.CANCELLED, "late") == rig.settle()[1]
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.runtime.num_open


class TestSaveAndLoad:
    def test_saved_blocks_load_into_other_blocks_byte_for_byte(self):
        """What was saved from some blocks is what a load puts into others."""
        with running() as rig:
            saved = rig.fill(range(1, 9), seed=1)
            rig.submit(order(1, SAVE, range(8), range(1, 9)))
            assert OutcomeKind.COMMITTED is rig.settle()[1].kind
            rig.submit(order(2, LOAD, range(8), range(30, 38)))
            assert 8 == rig.settle()[2].committed
            assert saved == rig.content(range(30, 38))

    def test_blocks_that_are_stored_are_skipped_with_their_reason(self):
        """A save of stored blocks copies nothing and is counted as skipped."""
        with running() as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.settle()
            rig.submit(order(2, SAVE, range(6), range(1, 7)))
            second = rig.settle()[2]
            assert (2, 4) == (second.committed, second.skipped)
            rig.submit(order(3, SAVE, range(6), range(1, 7)))
            third = rig.settle()[3]
            assert (OutcomeKind.SKIPPED, "stored") == (third.kind, third.reason)

    def test_source_is_released_before_the_store_is_done(self):
        """S1-12: blocks go back at the end of the copy, not at the commit."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("seal", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert [] == rig.told(NoticeKind.SETTLED)
            gate.open()
            assert OutcomeKind.COMMITTED is rig.settle()[1].kind

    def test_every_block_offered_ends_in_exactly_one_way(self):
        """Offered equals the sum of all ends, in blocks and bytes, over mixed ends."""
        plan = FaultPlan(Fault("reserve", raising(StoreUnavailableError("x")), nth=2))
        with running(plan=plan) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.settle()
            rig.submit(order(2, SAVE, range(4, 8), range(5, 9)))
            rig.submit(order(3, SAVE, range(6), range(1, 7)))
            rig.submit(order(4, LOAD, range(4), range(20, 24)))
            rig.submit(order(5, LOAD, range(90, 92), range(24, 26)))
            rig.settle()
            assert (14, 14) == totals(rig, SAVE)
            assert (6, 6) == totals(rig, LOAD)
            nbytes = rig.counters.total(
                "ucm_settled_part_bytes_total", direction="save"
            )
            assert 14 * BLOCK_BYTES == nbytes
            for kind in (NoticeKind.SETTLED, NoticeKind.RELEASED):
                assert [1, 2, 3, 4, 5] == sorted(rig.told(kind))


class TestFaults:
    @pytest.mark.parametrize("verb", ["reserve", "gather", "seal", "commit"])
    @pytest.mark.parametrize(
        "error",
        [
            StoreUnavailableError("x"),
            DeviceError("x"),
            ValueError("a bug of a store"),
            StoreFullError("x"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_failed_save_leaves_nothing_and_releases_its_blocks(self, verb, error):
        """S1-13, S1-14, S1-25: wherever a save fails, blocks and slots come back,
        nothing is visible, and the next save works."""
        with running(plan=FaultPlan(Fault(verb, raising(error)))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            outcome = rig.settle()[1]
            assert outcome.kind in (OutcomeKind.FAILED, OutcomeKind.REFUSED)
            assert outcome.reason
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert 0 == rig.store.match(keys_of(*range(4)))
            rig.submit(order(2, SAVE, range(4), range(1, 5)))
            assert 4 == rig.settle()[2].committed
            assert 0 == rig.store.stats().reserved_blocks

    @pytest.mark.parametrize("verb", ["read", "verify", "scatter", "recheck"])
    def test_failed_load_is_told_and_others_go_on(self, verb):
        """A load that fails anywhere ends as failed, its blocks come back."""
        plan = FaultPlan(Fault(verb, raising(StoreUnavailableError("x"))))
        with running(plan=plan) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.settle()
            rig.submit(order(2, LOAD, range(4), range(20, 24)))
            rig.submit(order(3, LOAD, range(4), range(30, 34), request="other"))
            outcomes = rig.settle()
            assert OutcomeKind.FAILED is outcomes[2].kind
            assert OutcomeKind.COMMITTED is outcomes[3].kind
            assert 4 == rig.counters.total(
                "ucm_settled_parts_total", direction="load", reason="unavailable"
            )

    def test_corrupt_blocks_are_blamed_and_forgotten_and_no_others(self):
        """The first block that does not verify is blamed; all such blocks of the span
        are misses from then on, so that one failure repairs them, and no other is."""
        with running() as rig:
            rig.submit(order(1, SAVE, range(6), range(1, 7)))
            rig.settle()
            for key in keys_of(2, 4):
                rig.store._pool[rig.store._entries[key].slot, 7] ^= 1
            rig.submit(order(2, LOAD, range(6), range(20, 26)))
            outcome = rig.settle()[2]
            assert ("corrupt", *keys_of(2)) == (outcome.reason, outcome.bad_key)
            found = rig.store.contains(keys_of(*range(6)))
            assert [True, True, False, True, False, True] == found

    def test_slot_recycled_while_it_is_verified_is_no_corruption(self):
        """Bytes of a slot that was taken meanwhile are a miss; nothing is forgotten."""
        (key,) = keys_of(2)
        plan = FaultPlan(
            Fault("verify", raising(BlockCorruptError(key, "checksum"))),
            Fault("recheck", raising(BlockNotFoundError(key))),
        )
        with running(plan=plan) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            rig.settle()
            rig.submit(order(2, LOAD, range(4), range(20, 24)))
            assert "evicted" == rig.settle()[2].reason
            assert 4 == rig.store.match(keys_of(*range(4)))

    def test_missing_block_fails_the_load_as_evicted(self):
        """A block that was evicted since the lookup is a named failure."""
        with running() as rig:
            rig.submit(order(1, LOAD, range(4), range(20, 24)))
            assert "evicted" == rig.settle()[1].reason

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("verb", ["reserve", "gather", "commit"])
    def test_death_of_a_copy_thread_fails_everything_and_refuses_more(self, verb):
        """S2-13: when a copy thread dies, all that waits ends, nothing hangs, and
        later saves are refused."""
        with running(plan=FaultPlan(Fault(verb, raising(SystemExit())))) as rig:
            rig.submit(*(order(n, SAVE, range(n, n + 1), range(1, 2)) for n in (1, 2)))
            outcomes = rig.settle()
            assert {OutcomeKind.FAILED} == {one.kind for one in outcomes.values()}
            assert "died" in rig.failure()
            assert ["failed"] == rig.submit(order(3, SAVE, range(3, 4), range(1, 2)))
            # One may have been copied while the other thread died.
            assert all(one.ticket.guard.wait_released(60.0) for one in rig.notices)
            assert [1, 2, 3] == sorted(rig.told(NoticeKind.RELEASED))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_death_of_the_loop_fails_everything_and_refuses_more(self):
        """When the loop thread dies, what is open ends as failed and poll says so."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            loop = rig.runtime._loop._loop
            loop.call_soon_threadsafe(loop.stop)
            rig.runtime._loop.join(60.0)
            assert OutcomeKind.FAILED is rig.outcomes()[1].kind
            assert [1] == rig.told(NoticeKind.RELEASED)
            assert ["failed"] == rig.submit(order(2, SAVE, range(2), range(1, 3)))
            gate.open()


class TestBounds:
    def test_full_queue_refuses_with_its_reason_and_keeps_nothing(self):
        """A refused save is counted, its blocks are free at once, and it is a miss."""
        gate = Gate()
        config = {"queue": {"tickets": 2, "window": 1}}
        with running(config, FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            gate.wait_reached()
            words = rig.submit(
                *(order(n, SAVE, range(n, n + 1), range(n, n + 1)) for n in range(2, 6))
            )
            assert ["accepted", "accepted", "queue_tickets", "queue_tickets"] == words
            assert [4, 5] == rig.told(NoticeKind.RELEASED)
            gate.open()
            outcomes = rig.settle()
            assert OutcomeKind.REFUSED is outcomes[5].kind
            assert (5, 5) == totals(rig, SAVE)

    def test_queue_is_bounded_by_bytes_too(self):
        """Waiting bytes never exceed the queue, except for one single large ticket."""
        gate = Gate()
        config = {"queue": {"nbytes": 3 * BLOCK_BYTES, "span_bytes": 1, "window": 1}}
        with running(config, FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            gate.wait_reached()
            words = rig.submit(
                order(2, SAVE, range(2, 4), range(2, 4)),
                order(3, SAVE, range(4, 6), range(4, 6)),
            )
            assert ["accepted", "queue_bytes"] == words
            gate.open()
            rig.settle()

    def test_full_queue_of_saves_refuses_no_load(self):
        """Loads outrank saves: what the engine waits for is taken in at any time."""
        gate = Gate()
        few = {"tickets": 1, "nbytes": BLOCK_BYTES, "span_bytes": BLOCK_BYTES}
        config = {"queue": {**few, "window": 1}}
        with running(config, FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(4), range(1, 5)))
            gate.wait_reached()
            rig.submit(order(2, SAVE, range(4, 5), range(5, 6)))
            loads = [order(n, LOAD, range(4), range(20, 24)) for n in range(3, 9)]
            assert ["accepted"] * 6 == rig.submit(*loads)
            gate.open()
            rig.settle()

    def test_store_without_room_refuses_and_says_so(self):
        """Blocks that find no slot are refused as store_full, the others are stored."""
        with running(capacity_blocks=4) as rig:
            rig.submit(order(1, SAVE, range(6), range(1, 7)))
            outcome = rig.settle()[1]
            assert (OutcomeKind.REFUSED, "store_full", 4) == (
                outcome.kind,
                outcome.reason,
                outcome.committed,
            )

    def test_requests_take_turns(self):
        """One request with many spans does not starve another: loads and saves of
        both are through, each request's own in order."""
        with running({"queue": {"window": 2}}) as rig:
            many = [
                order(n, SAVE, range(n, n + 1), range(1, 2), request="huge")
                for n in range(1, 40)
            ]
            rig.submit(*many, order(99, SAVE, range(99, 100), range(2, 3), request="b"))
            rig.settle()
            settled = rig.told(NoticeKind.SETTLED)
            assert settled.index(99) < 10
            assert {OutcomeKind.COMMITTED} == {
                one.kind for one in rig.outcomes().values()
            }
            assert sorted(settled) == sorted([*range(1, 40), 99])
            own = [number for number in settled if number != 99]
            assert sorted(own) == own


class TestClose:
    def test_close_drains_what_was_accepted(self):
        """What was accepted before close is stored, and no thread is left."""
        before = threading.active_count()
        with running() as rig:
            rig.submit(
                *(order(n, SAVE, range(n, n + 1), range(1, 2)) for n in range(20))
            )
            rig.runtime.close()
            assert {OutcomeKind.COMMITTED} == {
                one.kind for one in rig.outcomes().values()
            }
            rig.runtime.close()
        assert before == threading.active_count()

    def test_close_with_a_hung_store_ends_in_time(self):
        """S1-27, S2-18: close waits for its budget only; what is left is cancelled."""
        gate = Gate()
        config = {"timeout": {"shutdown": 0.05}}
        with running(config, FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(
                *(order(n, SAVE, range(n, n + 1), range(1, 2)) for n in range(8))
            )
            gate.wait_reached()
            rig.runtime.close()
            assert {OutcomeKind.CANCELLED} == {
                one.kind for one in rig.outcomes().values()
            }
            gate.open()

    def test_order_after_close_is_refused(self):
        """Nothing is taken in after close; the refusal has a reason."""
        with running() as rig:
            fence = rig.device.lease(None)
            rig.runtime.close()
            rig.runtime.submit(
                KEYSPACE_DIGEST, [order(1, SAVE, range(1), range(1, 2))], fence
            )
            assert Outcome(OutcomeKind.REFUSED, "closed") == rig.outcomes()[1]
