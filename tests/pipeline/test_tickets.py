# SPDX-License-Identifier: Apache-2.0
"""Who may touch a ticket's blocks, its one last word, and what it owns."""

import contextlib
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.kit.lockstep import Tracer
from tests.pipeline.kit import TIMEOUT, make_ticket
from ucm.blocks import Owner
from ucm.pipeline.guard import BlockGuard, TicketOverError
from ucm.pipeline.tickets import (
    Direction,
    Outcome,
    OutcomeKind,
)

COMMITTED = Outcome(OutcomeKind.COMMITTED)
CANCELLED = Outcome(OutcomeKind.CANCELLED, "deadline")


class GuardMachine(RuleBasedStateMachine):
    """A guard beside the table of its states."""

    def __init__(self):
        super().__init__()
        self.releases = 0
        self.guard = BlockGuard(self.count, num_blocks=3)
        self.lost, self.lost_as = set(), ""
        self.state, self.revoked, self.torn = "free", "", ""
        self.copies = 0

    def count(self):
        """Note a release."""
        self.releases += 1

    def release(self, reason):
        """Move the model to its end."""
        self.state, self.revoked = "released", reason

    def take_back(self, reason):
        """Move the model as far as blocks can be taken back."""
        if self.state == "free":
            self.release(reason)
        elif self.state != "released":
            self.torn = self.torn or reason

    @rule()
    def begin(self):
        """Copies of several rows may be under way, none after blocks were taken back."""
        may_begin = self.state in ("free", "copying") and not self.torn
        if may_begin:
            self.state = "copying"
            self.copies += 1
        assert may_begin == self.guard.begin()

    @rule(last=st.booleans())
    def end(self, last):
        """The end of the last copy releases, except blocks in quarantine; the end of
        any other does so only if the blocks were asked for meanwhile."""
        if self.state in ("free", "copying"):
            self.copies = max(0, self.copies - 1)
            if not self.copies and (last or self.torn):
                self.release("")
            elif not self.copies:
                self.state = "free"
        self.guard.end(last=last)

    @rule(reason=st.sampled_from(["deadline", "recycled"]))
    def revoke(self, reason):
        """Blocks that nobody copies come back at once, others are marked torn."""
        self.take_back(reason)
        assert (self.state == "released") == self.guard.revoke(reason)

    @rule(
        reason=st.sampled_from(["deadline", "recycled"]),
        positions=st.sets(st.integers(0, 2), min_size=1),
    )
    def lose(self, reason, positions):
        """Blocks are lost until the copies are over; who loses all is taken back."""
        untouched = self.state in ("free", "released")
        if self.state != "released":
            self.lost |= positions
            self.lost_as = self.lost_as or reason
            if len(self.lost) == 3:
                self.take_back(reason)
        assert untouched == self.guard.revoke(reason, positions)

    @rule()
    def quarantine(self):
        """Only a copy under way can be given up."""
        copying = self.state == "copying"
        if copying:
            self.state = "quarantined"
        assert copying == self.guard.quarantine()

    @invariant()
    def agrees(self):
        """Guard and model agree; the release was told exactly once, or not yet."""
        guard = self.guard
        released = self.state == "released"
        assert released == guard.is_released == guard.wait_released(0)
        assert (self.state == "copying") == guard.is_copying
        assert (self.revoked, self.torn) == (guard.revoked, guard.torn)
        assert (self.lost, self.lost_as) == (guard.lost, guard.lost_as)
        assert int(released) == self.releases


@pytest.mark.slow
class TestGuardMachine(GuardMachine.TestCase):
    """S1-26: a guard answers like its table of states after any calls."""

    settings = settings(max_examples=100, stateful_step_count=12, deadline=None)


class TestBlockGuard:
    @pytest.mark.slow
    def test_copy_and_revoke_on_two_threads_never_overlap(self):
        """Over many races the blocks are never copied and released at once, and the
        release is told once."""
        rounds, clashes, told = 2000, [], []
        meet = threading.Barrier(2, timeout=TIMEOUT)
        guards = [BlockGuard(lambda at=at: told.append(at)) for at in range(rounds)]

        def copy():
            for guard in guards:
                meet.wait()
                if guard.begin():
                    if guard.is_released or not guard.is_copying:
                        clashes.append("released under a copy")
                    guard.end()

        def revoke():
            for guard in guards:
                meet.wait()
                if guard.revoke("recycled") and guard.is_copying:
                    clashes.append("copied after the release")

        threads = [threading.Thread(target=one) for one in (copy, revoke)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert [] == clashes
        assert list(range(rounds)) == sorted(told)
        assert all(guard.is_released for guard in guards)

    def test_no_copy_begins_once_the_blocks_were_asked_for(self):
        """The copy of one row is waited for, that of the next does not begin, and the
        blocks are free when the first is over, though rows are missing."""
        guard = BlockGuard(lambda: None)
        assert guard.begin()
        assert not guard.revoke("recycled")
        assert not guard.begin()
        guard.end(last=False)
        assert guard.is_released

    def test_block_is_not_lost_behind_the_end_of_the_copy(self):
        """A copy that ends while somebody gives up waiting for it has lost nothing."""
        guard = BlockGuard(lambda: None, num_blocks=2)
        assert guard.begin()
        guard.end()
        assert guard.revoke("recycled", [1])
        assert (frozenset(), "") == (guard.lost, guard.lost_as)

    def test_waiter_is_woken_by_the_release(self):
        """Whoever waits for the blocks goes on as soon as the copy has ended."""
        guard = BlockGuard(lambda: None)
        guard.begin()
        waiting, seen = threading.Event(), []

        def wait():
            waiting.set()
            seen.append(guard.wait_released(TIMEOUT))

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(TIMEOUT)
        guard.end()
        thread.join(TIMEOUT)
        assert [True] == seen


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
        """The first outcome stays, whoever comes later."""
        ticket = make_ticket()
        assert ticket.settle(COMMITTED)
        assert not ticket.settle(CANCELLED)
        assert COMMITTED is ticket.outcome

    def test_waiter_goes_on_when_the_end_was_told(self):
        """Settled is not told: who waits for the end can then read its notice."""
        ticket = make_ticket()
        ticket.settle(COMMITTED)
        assert not ticket.wait_told(0)
        ticket.mark_told()
        assert ticket.wait_told(0)

    def test_of_many_threads_one_gives_the_last_word(self):
        """Threads that settle at once: exactly one of them did it."""
        for _ in range(10):
            ticket, won = make_ticket(), []
            start = threading.Barrier(4, timeout=TIMEOUT)

            def settle(ticket=ticket, won=won, start=start):
                start.wait()
                won.append(ticket.settle(CANCELLED))

            threads = [threading.Thread(target=settle) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT)
            assert [False, False, False, True] == sorted(won)

    def test_unwind_leaves_each_resource_once(self):
        """Resources are left exactly once, also when unwound twice."""
        ticket, resource = make_ticket(), Resource()
        assert not ticket.owns_resources
        ticket.own(resource)
        assert ticket.owns_resources
        for _ in range(2):
            ticket.unwind()
            assert 1 == resource.left
            assert not ticket.owns_resources

    def test_job_that_raises_leaves_resources_once(self):
        """A failed job gives back what its ticket holds, on its own thread."""
        ticket, resource = make_ticket(), Resource()

        def fail():
            with ticket.working():
                ticket.own(resource)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        ticket.unwind()
        assert 1 == resource.left

    def test_job_behind_one_that_raised_does_not_start(self):
        """The slots of a ticket are given back with the job that raised: another row's,
        which stands behind it before the ticket is settled, must not write there."""
        ticket = make_ticket()

        def work():
            with ticket.working():
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()
        assert ticket.outcome is None
        with pytest.raises(TicketOverError, match=r"^over$"):
            work()

    def test_job_that_ends_well_keeps_resources_for_the_next(self):
        """Slots stay with the ticket from one job to the next."""
        ticket, resource = make_ticket(), Resource()
        with ticket.working():
            ticket.own(resource)
        assert 0 == resource.left
        assert ticket.owns_resources

    def test_resources_outlive_a_job_whose_ticket_is_settled(self):
        """A ticket that ends while a job runs keeps its slots until the job is over."""
        ticket, resource = make_ticket(), Resource()
        with ticket.working():
            ticket.own(resource)
            ticket.settle(CANCELLED)
            ticket.unwind()
            assert 0 == resource.left
        assert 1 == resource.left
        ticket.unwind()
        assert 1 == resource.left

    def test_job_on_a_settled_ticket_does_not_start(self):
        """No job begins behind the last word."""
        ticket = make_ticket()
        ticket.settle(CANCELLED)
        with pytest.raises(TicketOverError, match=r"^over$"), ticket.working():
            raise AssertionError("the job has begun")
