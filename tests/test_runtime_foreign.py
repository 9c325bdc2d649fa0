# SPDX-License-Identifier: Apache-2.0
"""What code of others raises ends no more than what it was asked about."""

import threading

import pytest

from tests.pipeline import test_async_device
from tests.rig import KEYSPACE_DIGEST, keys_of, order, running
from ucm.devices.abc import Fence
from ucm.devices.events import DoneFence
from ucm.errors import BlockNotFoundError, text_of
from ucm.pipeline.tickets import Direction, OutcomeKind
from ucm.reasons import Reason
from ucm.testing.faults import Fault, FaultPlan, raising

SAVE, LOAD = Direction.SAVE, Direction.LOAD


class Never(Fence):
    """A fence that does not pass."""

    def is_done(self):
        """Return that it has not."""
        return False

    def wait(self, timeout):
        """Return that it did not."""
        return False


class UnspeakableError(Exception):
    """An error that cannot say what it is."""

    def __repr__(self):
        raise AttributeError


def test_error_that_cannot_say_what_it_is_has_its_types_name():
    """Whoever tells of it goes on."""
    assert "UnspeakableError" == text_of(UnspeakableError())
    assert "ValueError('x')" == text_of(ValueError("x"))


def test_save_whose_error_cannot_be_told_fails_alone():
    """S2-13: others are saved."""
    plan = FaultPlan(Fault("gather", raising(UnspeakableError()), nth=1))
    with running(plan=plan) as rig:
        for number in (1, 2):
            rig.submit(order(number, SAVE, [number], [number]))
            rig.settle()
        ends = rig.outcomes()
        assert OutcomeKind.FAILED is ends[1].kind
        assert "UnspeakableError" in ends[1].error
        assert OutcomeKind.COMMITTED is ends[2].kind
        assert "" == rig.runtime.failure


@pytest.mark.parametrize("error", [RuntimeError("x"), MemoryError()], ids=repr)
def test_load_whose_blocks_cannot_be_zeroed_is_told(error):
    """Whatever a device raises then: its blocks are nobody's, and its request hears of its
    end."""
    missing = BlockNotFoundError(keys_of(1)[0])
    plan = FaultPlan(Fault("recheck", raising(missing)), Fault("clear", raising(error)))
    with running(plan=plan) as rig:
        rig.submit(order(1, SAVE, [1], [1]))
        rig.settle()
        rig.submit(order(2, LOAD, [1], [5]))
        assert Reason.EVICTED is rig.settle()[2].reason
        assert "not zeroed" in rig.failure()


class TestFailure:
    def test_ticket_whose_end_raises_keeps_no_other_from_its_own(self):
        """All that is open ends when the service does, in the order in which it came."""
        with running() as rig:
            waiting = [order(n, LOAD, [n], [n], request=f"r{n}") for n in (1, 2, 3)]
            rig.runtime.submit(KEYSPACE_DIGEST, waiting, Never())
            rig.runtime._take_in()
            tell, recorder = rig.runtime._recorder._count, rig.runtime._recorder

            def count(ticket, *more):
                tell(ticket, *more)
                if ticket.transfer_id == 2:
                    raise ZeroDivisionError

            recorder._count = count
            with pytest.raises(ZeroDivisionError):
                rig.runtime._fail("for a test")
            ends = rig.outcomes()
            assert [1, 2, 3] == list(ends)
            assert {Reason.RUNTIME_FAILED} == {end.reason for end in ends.values()}
            recorder._write_line(*line_of(rig, 2))

    def test_batch_of_which_some_could_not_be_offered_ends_whole(self):
        """Those that were not looked at yet are in no list of what is open, and are told too."""
        orders = [order(n, SAVE, [n], [n]) for n in (1, 2, 3)]
        with running() as rig:
            recorder, inner = rig.runtime._recorder, rig.runtime._recorder.admitted

            def admitted(ticket, *more):
                if ticket.transfer_id == 2:
                    recorder.admitted = inner
                    raise MemoryError
                inner(ticket, *more)

            recorder.admitted = admitted
            rig.runtime._intake.submit(KEYSPACE_DIGEST, orders, DoneFence(), None)
            with pytest.raises(MemoryError):
                rig.runtime._take_in()
            reasons = {number: end.reason for number, end in rig.outcomes().items()}
            refused = dict.fromkeys((2, 3), Reason.FAILED)
            assert {1: Reason.RUNTIME_FAILED, **refused} == reasons
            assert 0 == rig.runtime.num_open

    def test_engine_that_waits_for_a_copy_hears_of_a_failure(self):
        """S2-13: its ticket has ended before, so that nothing else lets it go."""
        patient = {"timeout": {"fence": 600.0, "shutdown": 0.2}}
        with test_async_device.running(patient) as rig:
            rig.submit(order(1, SAVE, range(2), range(1, 3)))
            copy = rig.device.next_fence()
            rig.runtime.abandon([1], Reason.WITHDRAWN)
            engine = threading.Thread(target=rig.runtime.fence, args=([1],))
            engine.start()
            while not rig.runtime._intake.changed._awaited:
                rig.runtime.wait_for_notice(0.001)
            rig.runtime._fail("for a test")
            engine.join(60.0)
            assert not engine.is_alive()
            copy.open()


def line_of(rig, transfer_id):
    """Return what the log's line of a ticket is made of: here it was never written."""
    (notice,) = [
        each
        for each in rig.notices
        if each.outcome and each.ticket.transfer_id == transfer_id
    ]
    return notice.ticket, notice.outcome, 0.0, ""
