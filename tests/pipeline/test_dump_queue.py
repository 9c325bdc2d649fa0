# SPDX-License-Identifier: Apache-2.0
"""The queue in front of the pipeline against a plain list."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.pipeline.kit import make_item, make_ticket
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.tickets import Direction, Outcome, OutcomeKind
from ucm.reasons import Reason

SAVE, LOAD = Direction.SAVE, Direction.LOAD
MAX_TICKETS, MAX_NBYTES = 6, 40
SHARE = 8
DONE = Outcome(OutcomeKind.COMMITTED)
requests = st.sampled_from("abc")
directions = st.sampled_from(list(Direction))


def offer(queue, number, request="a", direction=SAVE, nbytes=1):
    """Offer a ticket of *nbytes*; return the admission."""
    ticket = make_ticket(
        number, direction, request, block_bytes=nbytes, on_settle=queue.over
    )
    return queue.offer(make_item(ticket))


def take(queue, direction=SAVE):
    """Take an item; return its number."""
    item = queue.take_nowait(direction)
    return None if item is None else item.ticket.transfer_id


class QueueMachine(RuleBasedStateMachine):
    """A queue beside a list of what waits and a list of whose turn it is."""

    def __init__(self):
        super().__init__()
        self.queue = DumpQueue(max_tickets=MAX_TICKETS, max_nbytes=MAX_NBYTES)
        self.waiting = []
        self.begun = []
        self.due = {SAVE: [], LOAD: []}
        self.turns = []
        self.credit = self.ticks = 0
        self.promoted = set()
        self.number = 0
        self.closed = None
        self.counts = Counter()

    def sizes(self, *directions):
        """Return the bytes of each item in the list whose ticket has not ended."""
        return [
            item.ticket.nbytes
            for item in self.waiting
            if item.ticket.direction in directions and item.ticket.outcome is None
        ]

    def expected_refusal(self, direction, nbytes):
        """Return what the bounds say to an offer."""
        if self.closed is not None:
            return self.closed
        saves = self.sizes(SAVE)
        if direction is SAVE and len(saves) >= MAX_TICKETS:
            return Reason.QUEUE_TICKETS
        if direction is SAVE and saves and sum(saves) + nbytes > MAX_NBYTES:
            return Reason.QUEUE_BYTES
        due = [each.nbytes for each in self.due[SAVE]]
        if direction is SAVE and (len(due) >= MAX_TICKETS or sum(due) >= MAX_NBYTES):
            return Reason.STORE_BEHIND
        return Reason.NONE

    def lane(self, key):
        """Return what waits in a lane, oldest first."""
        return [item for item in self.waiting if item.ticket.lane_key == key]

    def drop(self, items, how):
        """Take items out of the model."""
        self.counts[how] += len(items)
        self.waiting = [item for item in self.waiting if item not in items]
        self.turns = [key for key in self.turns if self.lane(key)]
        self.promoted.intersection_update(self.turns)

    @rule(request=requests, direction=directions, nbytes=st.integers(1, 50))
    def offer(self, request, direction, nbytes):
        """An offer is taken in exactly when the bounds allow it."""
        self.number += 1
        ticket = make_ticket(
            self.number,
            direction,
            request,
            block_bytes=nbytes,
            on_release=self.queue.released,
            on_settle=self.queue.over,
        )
        item = make_item(ticket)
        expected = self.expected_refusal(direction, nbytes)
        assert expected is self.queue.offer(item)
        if expected is Reason.NONE:
            self.counts["accepted"] += 1
            self.waiting.append(item)
            if direction is LOAD:
                self.due[LOAD].append(ticket)
            if ticket.lane_key not in self.turns:
                self.turns.append(ticket.lane_key)

    @rule(direction=directions)
    def take(self, direction):
        """The oldest item of the next lane comes; loads one request after the other,
        saves in turns; loads go before saves, except before saves that were promoted
        and those whose share it is."""
        loads_wait = any(key[0] is LOAD for key in self.turns)
        held_back = direction is SAVE and loads_wait and self.credit <= 0
        keys = [
            key
            for key in self.turns
            if key[0] is direction and (key in self.promoted or not held_back)
        ]
        key = keys[0] if keys else None
        item = self.queue.take_nowait(direction)
        assert (None if key is None else self.lane(key)[0]) is item
        if item is None:
            return
        if direction is LOAD:
            self.ticks = 0
            saves_wait = any(key[0] is SAVE for key in self.turns)
            self.credit = self.credit + item.nbytes if saves_wait else 0
        elif loads_wait and key not in self.promoted:
            self.credit -= SHARE * item.nbytes
        self.drop([item], "taken")
        self.begun.append(item.ticket)
        if key in self.turns and direction is SAVE:
            self.turns.remove(key)
            self.turns.append(key)

    @rule(ticks=st.integers(1, 6))
    def tick(self, ticks):
        """When no load was taken for a while a save may go although loads wait."""
        for _ in range(ticks):
            self.queue.tick()
        loads_wait = any(key[0] is LOAD for key in self.turns)
        self.ticks = self.ticks + ticks if loads_wait else 0
        if self.ticks > 10:
            self.credit = max(1, self.credit)

    @rule()
    @precondition(lambda self: self.begun)
    def copied(self):
        """What has begun is copied; a save waits for the store from now on."""
        ticket = self.begun.pop(0)
        assert ticket.guard.revoke("copied")
        if ticket.direction is SAVE:
            self.due[SAVE].append(ticket)

    @rule(direction=directions, at=st.integers(0, 5))
    def end(self, direction, at):
        """A ticket ends, and makes room."""
        if at < len(self.due[direction]):
            self.settle(self.due[direction][at])

    def settle(self, ticket):
        """End a ticket, which may have ended before."""
        ticket.end(DONE)
        for due in self.due.values():
            if ticket in due:
                due.remove(ticket)

    @rule(request=requests, direction=directions)
    def promote(self, request, direction):
        """A lane that waits gets the next turn; any other name changes nothing."""
        key = (direction, request, 1)
        self.queue.promote(key)
        if key in self.turns:
            self.turns.remove(key)
            self.turns.insert(0, key)
            self.promoted.add(key)

    @rule(divisor=st.integers(1, 4))
    def sweep(self, divisor):
        """Exactly the items of tickets that have ended come out."""
        for item in self.waiting:
            if item.ticket.transfer_id % divisor == 0:
                self.settle(item.ticket)
        over = [item for item in self.waiting if item.ticket.outcome is not None]
        self.queue.drop_ended()
        self.drop(over, "swept")

    @rule(reason=st.sampled_from([Reason.CLOSED, Reason.FAILED]))
    @precondition(lambda self: self.number > 8)
    def refuse(self, reason):
        """From now on nothing is taken in; the first reason stays."""
        self.queue.refuse(reason)
        self.closed = self.closed or reason

    @rule()
    @precondition(lambda self: self.number > 8)
    def close(self):
        """What waits is given back, once."""
        left = self.queue.close()
        assert sorted(map(id, self.waiting)) == sorted(map(id, left))
        self.closed = self.closed or Reason.CLOSED
        self.drop(left, "closed")
        for item in left:
            self.settle(item.ticket)

    @invariant()
    def is_bounded_and_conserves(self):
        """Bounds hold, sizes are exact, and accepted = out + waiting."""
        queue = self.queue
        saves = self.sizes(SAVE)
        assert len(self.waiting) == queue.num_items
        assert len(saves) <= MAX_TICKETS
        assert sum(saves) <= MAX_NBYTES or len(saves) == 1
        for direction in Direction:
            sizes = self.sizes(direction)
            assert (len(sizes), sum(sizes)) == queue.waiting(direction)
            due = [ticket.nbytes for ticket in self.due[direction]]
            assert (len(due), sum(due)) == queue.due(direction)
        out = sum(self.counts[how] for how in ("taken", "swept", "closed"))
        assert self.counts["accepted"] == out + len(self.waiting)


@pytest.mark.slow
class TestQueueMachine(QueueMachine.TestCase):
    """X-06: a queue answers like a list after any calls, and loses nothing."""

    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class TestDumpQueue:
    @given(st.lists(st.sampled_from("abcde"), max_size=20), st.data())
    @settings(max_examples=50, deadline=None)
    def test_lane_with_one_item_is_served_in_its_round(self, crowd, data):
        """However much others wait or come, a lane's turn is within one round."""
        queue = DumpQueue(max_tickets=1000, max_nbytes=1000)
        for number, request in enumerate(crowd, start=2):
            offer(queue, number, request)
        offer(queue, 1, "lonely")
        for _ in range(len(set(crowd)) + 1):
            offer(queue, 500, data.draw(st.sampled_from("abcdefg")))
            if take(queue) == 1:
                return
        raise AssertionError("the lane was starved")

    def test_item_larger_than_the_queue_passes_alone(self):
        """A ticket above the byte bound is taken when nothing else waits."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        assert Reason.NONE is offer(queue, 1, nbytes=100)
        assert Reason.QUEUE_BYTES is offer(queue, 2)

    def test_ticket_that_has_ended_is_in_nobodys_way(self):
        """Its item goes with the next sweep, and who comes before has its room."""
        queue = DumpQueue(max_tickets=1, max_nbytes=9)
        ticket = make_ticket(1, on_settle=queue.over)
        assert Reason.NONE is queue.offer(make_item(ticket))
        ticket.end(DONE)
        assert Reason.NONE is offer(queue, 2)
        assert 2 == queue.num_items

    def test_full_queue_refuses_no_load(self):
        """The engine has allocated blocks for a load: it is taken whatever waits."""
        queue = DumpQueue(max_tickets=1, max_nbytes=1)
        offer(queue, 1)
        for number in range(2, 9):
            assert Reason.NONE is offer(queue, number, direction=LOAD, nbytes=9)
        assert Reason.QUEUE_TICKETS is offer(queue, 9)

    def test_promotion_ends_with_what_waited(self):
        """A lane that the engine waited for once does not go before loads for ever."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        offer(queue, 1, "urgent")
        queue.promote((SAVE, "urgent", 1))
        assert 1 == take(queue, SAVE)
        offer(queue, 2, "urgent")
        offer(queue, 3, direction=LOAD)
        assert take(queue, SAVE) is None

    def test_save_is_held_back_while_a_load_waits(self):
        """Loads outrank saves; only a save that the engine waits for goes before them."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        offer(queue, 1)
        offer(queue, 2, direction=LOAD)
        assert take(queue, SAVE) is None
        offer(queue, 3, "urgent")
        queue.promote((SAVE, "urgent", 1))
        assert 3 == take(queue, SAVE)
        assert 2 == take(queue, LOAD)
        assert 1 == take(queue, SAVE)

    def test_loads_come_one_request_after_the_other(self):
        """R-12: of two requests that load at once the first is through before the second
        begins, so that one of them is in time when both together would not be."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        for number, request in enumerate("abab"):
            offer(queue, number, request, LOAD)
        assert [0, 2, 1, 3] == [take(queue, LOAD) for _ in range(4)]

    def test_saves_have_a_share_beside_loads_that_never_end(self):
        """R-13: while loads and saves wait, each eight bytes of loads let a byte of saves
        go, however large a single save is, and no more."""
        queue = DumpQueue(max_tickets=900, max_nbytes=1000)
        for number in range(100):
            offer(queue, number, f"s{number}", nbytes=2)
        for number in range(1000, 1021):
            offer(queue, number, "endless", LOAD, nbytes=4)
        saved = []
        for _ in range(20):
            take(queue, LOAD)
            while (number := take(queue)) is not None:
                saved.append(number)
        assert list(range(5)) == saved

    def test_saves_get_on_though_the_loads_before_them_do_not(self):
        """R-13: when no load was taken for ten ticks a save goes at each of them; loads
        that do get on leave it at the share."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        for number, direction in ((1, SAVE), (2, SAVE), (3, LOAD), (4, LOAD)):
            offer(queue, number, str(number), direction, nbytes=2)
        for _ in range(10):
            queue.tick()
        assert take(queue) is None
        queue.tick()
        assert [1, None] == [take(queue), take(queue)]
        assert 3 == take(queue, LOAD)
        queue.tick()
        assert take(queue) is None

    def test_quiet_time_is_no_standstill(self):
        """R-13: ticks in which no load waited do not let a save go before the next one."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        for _ in range(99):
            queue.tick()
        offer(queue, 1)
        offer(queue, 2, direction=LOAD)
        assert take(queue) is None

    def test_loads_of_a_quiet_time_let_no_crowd_of_saves_go_first(self):
        """What was loaded while no save waited is no claim of later saves."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        for number in range(9):
            offer(queue, number, direction=LOAD, nbytes=1000)
        for _ in range(8):
            take(queue, LOAD)
        offer(queue, 20)
        assert take(queue) is None

    @pytest.mark.parametrize(("bounds", "nbytes"), [((2, 1 << 30), 1), ((99, 20), 10)])
    def test_saves_are_refused_while_the_store_is_behind(self, bounds, nbytes):
        """R-11: saves that were copied and are not stored are bounded by tickets and by
        bytes; beyond, others are refused with a reason of their own, and taken again as
        soon as one of those has ended. Loads are not concerned."""
        queue = DumpQueue(max_tickets=bounds[0], max_nbytes=bounds[1])
        tickets = [
            make_ticket(
                number,
                block_bytes=nbytes,
                on_release=queue.released,
                on_settle=queue.over,
            )
            for number in range(3)
        ]
        for ticket in tickets[:2]:
            assert Reason.NONE is queue.offer(make_item(ticket))
            assert queue.take_nowait(SAVE) is not None
            assert Reason.NONE is queue.refusal_of(tickets[2])
            ticket.guard.revoke("copied")
        assert Reason.STORE_BEHIND is queue.refusal_of(tickets[2])
        assert Reason.NONE is offer(queue, 9, direction=LOAD)
        tickets[0].end(DONE)
        assert Reason.NONE is queue.refusal_of(tickets[2])

    def test_ticket_that_ended_before_its_offer_is_not_counted(self):
        """A ticket that was settled while it was taken in takes up no room for good."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        for direction in Direction:
            ticket = make_ticket(1, direction, on_settle=queue.over)
            ticket.end(DONE)
            queue.offer(make_item(ticket))
            queue.released(ticket)
            assert (0, 0) == queue.due(direction)

    def test_direction_that_hangs_takes_nothing_in(self):
        """R-14: while a call of the store hangs, what would stand behind it is refused;
        the other direction goes on, and so does this one when the call has returned."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        queue.hold_off(LOAD, is_hung=True)
        assert Reason.STORE_HUNG is offer(queue, 1, direction=LOAD)
        assert Reason.NONE is offer(queue, 2)
        queue.hold_off(LOAD, is_hung=False)
        assert Reason.NONE is offer(queue, 3, direction=LOAD)
