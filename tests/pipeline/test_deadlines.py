# SPDX-License-Identifier: Apache-2.0
"""What time asks of tickets, wherever they are."""

import pytest

from tests.pipeline.kit import make_ticket
from ucm.pipeline.deadlines import Deadlines
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.reasons import Reason

SHUTDOWN = Outcome(OutcomeKind.CANCELLED, Reason.SHUTDOWN)


@pytest.fixture
def failures():
    """Return why nothing can go on."""
    return []


@pytest.fixture
def deadlines(failures):
    """Return deadlines that give a copy five seconds more."""
    queue = DumpQueue(max_tickets=9, max_nbytes=1 << 30)
    return Deadlines(queue, stuck_after=5.0, on_failure=failures.append)


class TestLook:
    def test_ticket_in_time_is_left_alone(self, deadlines):
        """Nothing is asked of it, copied or not."""
        for is_copying in (False, True):
            ticket = make_ticket()
            assert is_copying == (is_copying and ticket.guard.begin())
            deadlines.look(ticket, ticket.deadline)
            assert ticket.outcome is None
            assert not ticket.guard.torn

    def test_blocks_that_were_taken_back_end_a_ticket_that_waits(self, deadlines):
        """It says why; one at which a job works says so itself."""
        waiting, worked_on = make_ticket(1), make_ticket(2)
        worked_on.begin_work()
        for ticket in (waiting, worked_on):
            ticket.guard.revoke(Reason.RECYCLED)
            deadlines.look(ticket, 0.0)
        assert Outcome(OutcomeKind.CANCELLED, Reason.RECYCLED) == waiting.outcome
        assert worked_on.outcome is None

    def test_saved_blocks_that_went_back_are_not_taken_for_taken_back(self, deadlines):
        """A copied save whose blocks are free waits for the store."""
        ticket = make_ticket()
        assert ticket.guard.begin()
        assert ticket.copied(ticket.row_ids)
        deadlines.look(ticket, 0.0)
        assert ticket.outcome is None

    @pytest.mark.parametrize("direction", list(Direction))
    def test_ended_ticket_is_given_up_as_any_other(self, deadlines, direction):
        """A copy that goes on behind its ticket's end may be stuck as well."""
        ticket = make_ticket(direction=direction)
        assert ticket.guard.begin()
        ticket.end(SHUTDOWN)
        for late in (0.1, 5.1):
            assert not ticket.is_given_up
            deadlines.look(ticket, ticket.deadline + late)
        assert ticket.is_given_up
        assert SHUTDOWN is ticket.outcome

    def test_more_time_is_counted_from_its_end(self, deadlines):
        """Rows that are brought later move the deadline: a loop that is held up behind
        that looks at the copy once more, as behind the first."""
        ticket = make_ticket()
        assert ticket.guard.begin()
        deadlines.look(ticket, ticket.deadline + 0.1)
        ticket.deadline += 100.0
        for late in (-1.0, 6.0):
            deadlines.look(ticket, ticket.deadline + late)
            assert not ticket.is_given_up
        deadlines.look(ticket, ticket.deadline + 6.0)
        assert ticket.is_given_up


class TestLookThrough:
    def test_whoever_has_something_to_end_is_found_among_those_who_wait(
        self, deadlines
    ):
        """What is passed over quickly has nothing to end: late, taken back, torn and
        behind a thread that hangs are each looked at, and so are rows that came."""
        waiting, late, back, torn = map(make_ticket, range(1, 5))
        late.deadline, torn.is_late = 0.0, True
        back.guard.revoke(Reason.RECYCLED)
        assert torn.guard.begin()
        deadlines.look_through([waiting, late, back, torn], 1.0)
        ended = [each.outcome and each.outcome.reason for each in (late, back)]
        assert [Reason.DEADLINE, Reason.RECYCLED] == ended
        assert (None, False) == (waiting.outcome, torn.is_late)
        deadlines._hung[Direction.SAVE].add(make_ticket(9))
        deadlines.look_through([waiting], 1.0)
        assert waiting.outcome is not None
        assert Reason.STORE_HUNG is waiting.outcome.reason

    def test_slots_that_are_just_given_back_cancel_nobody(self, deadlines):
        """Each ticket that ends late gives them back late; only who stands there for a second
        hangs, and is noticed behind its end as well."""
        late, waiting = map(make_ticket, (1, 2))
        late.deadline = 0.0
        late.begin_work()
        late.end(SHUTDOWN)
        for now in (1.0, 1.9):
            deadlines.look_through([late, waiting], now)
            assert waiting.outcome is None
        deadlines.look_through([], 2.0)  # it was through, and is there once more
        for now in (2.1, 3.0):
            deadlines.look_through([late, waiting], now)
            assert waiting.outcome is None
        deadlines.look_through([late, waiting], 3.2)
        assert waiting.outcome is not None
        assert Reason.STORE_HUNG is waiting.outcome.reason


class TestWatched:
    def test_idle_loop_looks_again_while_something_may_come_to_an_end(self, deadlines):
        """Open tickets count, and ended ones that a copy or a job uses; not those that
        nobody can end any more."""
        open_, ended, copied, worked_on, stuck = map(make_ticket, range(1, 6))
        worked_on.begin_work()
        for ticket in (copied, stuck):
            assert ticket.guard.begin()
        stuck.direction = Direction.LOAD
        stuck.give_up()
        for ticket in (ended, copied, worked_on):
            ticket.end(SHUTDOWN)
        for expected, ticket in (
            (1, open_),
            (0, ended),
            (1, copied),
            (1, worked_on),
            (0, stuck),
        ):
            deadlines.look_through([ticket], 0.0)
            assert expected == deadlines.num_watched
