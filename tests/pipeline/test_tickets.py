# SPDX-License-Identifier: Apache-2.0
"""A ticket's one end, what goes with it, and what it owns."""

import contextlib
import gc
import operator
import threading
import weakref

import pytest

from tests.kit.lockstep import Tracer
from tests.pipeline.kit import TIMEOUT, Told, make_ticket
from ucm.blocks import Owner
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.tickets import (
    Direction,
    Outcome,
    OutcomeKind,
)
from ucm.reasons import Reason

COMMITTED = Outcome(OutcomeKind.COMMITTED)
CANCELLED = Outcome(OutcomeKind.CANCELLED, "deadline")


class Resource(contextlib.AbstractContextManager):
    """Counts how often it was left."""

    def __init__(self):
        self.left = 0

    def __exit__(self, *_):
        self.left += 1


class TestTicket:
    def test_ticket_knows_its_size_and_lane(self):
        """Bytes are those of all blocks; the lane is direction, request and life."""
        ticket = make_ticket(3, Direction.LOAD, "a", num_blocks=4, block_bytes=10)
        assert 40 == ticket.nbytes
        assert (Direction.LOAD, "a", 1) == ticket.lane_key

    def test_shared_tickets_have_one_lane(self):
        """Whoever's blocks they are: their order counts among themselves only."""
        owners = (Owner("a", 1, 1), Owner("b", 2, 3))
        shared = make_ticket(3, num_blocks=4, owners=owners)
        other = make_ticket(4, num_blocks=4, owners=owners[::-1])
        assert shared.lane_key == other.lane_key
        assert shared.lane_key != make_ticket(5, request="a").lane_key

    def test_log_names_the_requests_of_a_shared_ticket(self):
        """A few of them, and how many they are; of one its life as well."""
        tracer = Tracer()
        owners = tuple(Owner(name, 1, 1) for name in "abcdef")
        make_ticket(3, num_blocks=6, owners=owners, log=tracer.log).log.info("one")
        make_ticket(4, request="a", log=tracer.log).log.info("two")
        shared, alone = tracer.events
        assert (["a", "b", "c", "d"], 6) == (shared["requests"], shared["num_requests"])
        assert not {"request_id", "generation"} & shared.keys()
        assert ("a", 1) == (alone["request_id"], alone["generation"])
        assert not {"requests", "num_requests"} & alone.keys()

    def test_release_is_told_with_its_ticket_and_time(self):
        """Who is told of a release gets the ticket, after its time was noted."""
        told = []
        ticket = make_ticket(on_release=lambda one: told.append(one.released_at))
        ticket.guard.end()
        assert [ticket.released_at] == told
        assert ticket.released_at >= ticket.accepted_at

    def test_last_word_is_given_once(self):
        """The first outcome stays, and is told once, whoever comes later."""
        told = []
        ticket = make_ticket(on_settle=told.append)
        assert ticket.end(COMMITTED)
        assert not ticket.end(CANCELLED)
        assert COMMITTED is ticket.outcome
        assert [ticket] == told

    def test_blocks_are_taken_back_before_the_end_is_told(self):
        """Who hears of the end, or waits for it, finds the blocks given back; and the
        notice is on its way before anybody goes on."""
        seen = []

        def tell(one):
            seen.append((one.guard.is_released, one.is_told))

        ticket = make_ticket(on_settle=tell)
        assert not ticket.wait_told(0)
        ticket.end(CANCELLED)
        assert [(True, False)] == seen
        assert ticket.wait_told(0)

    def test_waiters_go_on_although_the_end_cannot_be_told(self):
        """What goes wrong while it is told holds nobody up, and keeps no slots."""

        def tell(_):
            raise OSError("no space left")

        ticket, resource = make_ticket(on_settle=tell), Resource()
        ticket.own(resource)
        with pytest.raises(OSError, match="no space"):
            ticket.end(CANCELLED)
        assert ticket.wait_told(0)
        assert 1 == resource.left

    def test_cancelled_ticket_says_why_its_blocks_were_taken_back(self):
        """The reason is the first one; without a copy the ticket is over."""
        ticket = make_ticket()
        ticket.guard.revoke(Reason.RECYCLED)
        assert ticket.cancel(Reason.DEADLINE)
        assert Outcome(OutcomeKind.CANCELLED, Reason.RECYCLED) == ticket.outcome

    def test_ticket_under_a_copy_is_torn_and_not_over(self):
        """A copy that has begun is waited for."""
        ticket = make_ticket()
        assert ticket.guard.begin()
        assert not ticket.cancel(Reason.DEADLINE)
        assert ticket.outcome is None
        assert Reason.DEADLINE is ticket.guard.torn
        with pytest.raises(TicketOverError, match="deadline"):
            ticket.counting()

    def test_only_a_copy_can_be_given_up(self):
        """A save or load that copies nothing goes on."""
        for direction in Direction:
            ticket = make_ticket(direction=direction)
            ticket.give_up()
            assert ticket.outcome is None
            assert not ticket.is_given_up

    @pytest.mark.parametrize("direction", list(Direction))
    def test_given_up_copy_ends_its_ticket_and_keeps_its_slots(self, direction):
        """It is told before the end; a save is not released any more, a load is if the
        copy ends after all."""
        told, words = Told(), []
        told.given_up = lambda _: words.append("given up")
        told.failed = words.append
        told.ended = lambda _, outcome: words.append(outcome.reason)
        ticket, resource = make_ticket(direction=direction, listener=told), Resource()
        ticket.own(resource)
        assert ticket.guard.begin()
        ticket.give_up()
        stuck = "a device copy of transfer 1 is stuck"
        assert ["given up", Reason.STUCK, stuck] == words
        ticket.give_back()
        assert 0 == resource.left
        ticket.guard.end()
        assert (direction is Direction.LOAD) == ticket.guard.is_released

    def test_nothing_is_left_to_the_collector(self):
        """R-18: a ticket that is over is gone with its last reference: cycles of twelve
        tickets in each step would stop the engine for the collector's passes."""
        told = Told()
        gone = weakref.ref(told)
        ticket = make_ticket(listener=told)
        ticket.guard.begin()
        ticket.copied(ticket.row_ids)
        ticket.end(COMMITTED)
        gc.disable()
        try:
            del told, ticket
            assert gone() is None
        finally:
            gc.enable()

    def test_of_many_threads_one_gives_the_last_word(self):
        """Threads that settle at once: exactly one of them did it."""
        for _ in range(10):
            ticket, won = make_ticket(), []
            start = threading.Barrier(4, timeout=TIMEOUT)

            def settle(ticket=ticket, won=won, start=start):
                start.wait()
                won.append(ticket.end(CANCELLED))

            threads = [threading.Thread(target=settle) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT)
            assert [False, False, False, True] == sorted(won)

    def test_unwind_leaves_each_resource_once(self):
        """Resources are left exactly once, also when unwound twice."""
        ticket, resource = make_ticket(), Resource()
        ticket.own(resource)
        for _ in range(2):
            ticket.unwind()
            assert 1 == resource.left

    def test_all_resources_are_left_also_when_one_fails(self):
        """R-18: slots are not lost because a fence behind them could not be closed."""
        ticket, resource = make_ticket(), Resource()
        stack = contextlib.ExitStack()
        stack.callback(operator.truediv, 1, 0)
        ticket.own(resource)
        ticket.own(stack)
        with pytest.raises(ZeroDivisionError):
            ticket.unwind()
        assert 1 == resource.left

    def test_slots_stay_with_a_ticket_that_goes_on(self):
        """Slots stay from one job to the next, and however often it is asked."""
        ticket, resource = make_ticket(), Resource()
        ticket.begin_work()
        ticket.own(resource)
        ticket.end_work()
        ticket.give_back()
        assert 0 == resource.left

    def test_resources_outlive_a_job_whose_ticket_has_ended(self):
        """A ticket that ends while a job runs keeps its slots until the job is over."""
        ticket, resource = make_ticket(), Resource()
        ticket.begin_work()
        ticket.own(resource)
        ticket.end(CANCELLED)
        ticket.unwind()
        assert 0 == resource.left
        ticket.end_work()
        assert 1 == resource.left
        ticket.unwind()
        assert 1 == resource.left

    def test_resources_outlive_a_copy_whose_ticket_has_ended(self):
        """Nor does anybody get slots into which a copy still writes."""
        ticket, resource = make_ticket(), Resource()
        ticket.own(resource)
        assert ticket.guard.begin()
        ticket.end(CANCELLED)
        ticket.unwind()
        assert 0 == resource.left
        ticket.guard.end()
        ticket.give_back()
        assert 1 == resource.left

    def test_job_on_an_ended_ticket_does_not_start(self):
        """No job begins behind the last word: the slots may be another ticket's."""
        ticket = make_ticket()
        ticket.end(CANCELLED)
        with pytest.raises(TicketOverError, match=r"^over$"):
            ticket.begin_work()
        assert not ticket.is_worked_on
