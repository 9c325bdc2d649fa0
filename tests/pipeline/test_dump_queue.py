# SPDX-License-Identifier: Apache-2.0
"""The queue in front of the pipeline against a plain list."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.pipeline.kit import make_item, make_ticket
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.tickets import Admission, Direction

SAVE, LOAD = Direction.SAVE, Direction.LOAD
MAX_TICKETS, MAX_NBYTES = 6, 40
requests = st.sampled_from("abc")
directions = st.sampled_from(list(Direction))


def anywhere(_):
    """Let every lane have room."""
    return True


def offer(queue, number, request="a", direction=SAVE, nbytes=1):
    """Offer a ticket of *nbytes*; return the admission."""
    ticket = make_ticket(number, direction, request, block_bytes=nbytes)
    return queue.offer(make_item(ticket))


def take(queue, direction=SAVE, has_room=anywhere):
    """Take an item; return its number."""
    item = queue.take_nowait(direction, has_room)
    return None if item is None else item.ticket.transfer_id


class QueueMachine(RuleBasedStateMachine):
    """A queue beside a list of what waits and a list of whose turn it is."""

    def __init__(self):
        super().__init__()
        self.queue = DumpQueue(max_tickets=MAX_TICKETS, max_nbytes=MAX_NBYTES)
        self.waiting = []
        self.turns = []
        self.promoted = set()
        self.number = 0
        self.closed = None
        self.counts = Counter()

    def sizes(self, *directions):
        """Return the bytes of each item of some directions in the list."""
        return [
            item.ticket.nbytes
            for item in self.waiting
            if item.ticket.direction in directions
        ]

    def expected_admission(self, direction, nbytes):
        """Return what the bounds say to an offer."""
        if self.closed is not None:
            return self.closed
        saves = self.sizes(SAVE)
        if direction is SAVE and len(saves) >= MAX_TICKETS:
            return Admission.QUEUE_TICKETS
        if direction is SAVE and saves and sum(saves) + nbytes > MAX_NBYTES:
            return Admission.QUEUE_BYTES
        return Admission.ACCEPTED

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
        ticket = make_ticket(self.number, direction, request, block_bytes=nbytes)
        item = make_item(ticket)
        expected = self.expected_admission(direction, nbytes)
        assert expected is self.queue.offer(item)
        if expected is Admission.ACCEPTED:
            self.counts["accepted"] += 1
            self.waiting.append(item)
            if ticket.lane_key not in self.turns:
                self.turns.append(ticket.lane_key)

    @rule(direction=directions, full=st.sets(requests))
    def take(self, direction, full):
        """The oldest item of the next lane with room comes; loads go before saves,
        except before saves that were promoted."""
        held_back = direction is SAVE and any(k[0] is LOAD for k in self.turns)
        keys = [
            key
            for key in self.turns
            if key[0] is direction
            and key[1] not in full
            and (key in self.promoted or not held_back)
        ]
        key = keys[0] if keys else None
        item = self.queue.take_nowait(direction, lambda lane: lane[1] not in full)
        assert (None if key is None else self.lane(key)[0]) is item
        if item is not None:
            self.drop([item], "taken")
            if key in self.turns:
                self.turns.remove(key)
                self.turns.append(key)

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
        """Exactly the items that are over come out."""

        def is_over(item):
            return item.ticket.transfer_id % divisor == 0

        over = [item for item in self.waiting if is_over(item)]
        swept = self.queue.sweep(is_over)
        assert sorted(map(id, over)) == sorted(map(id, swept))
        self.drop(over, "swept")

    @rule(reason=st.sampled_from([Admission.CLOSED, Admission.FAILED]))
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
        self.closed = self.closed or Admission.CLOSED
        self.drop(left, "closed")

    @invariant()
    def is_bounded_and_conserves(self):
        """Bounds hold, sizes are exact, and accepted = out + waiting."""
        queue = self.queue
        sizes, saves = self.sizes(*Direction), self.sizes(SAVE)
        assert len(sizes) == queue.num_items
        assert len(saves) <= MAX_TICKETS
        assert sum(saves) <= MAX_NBYTES or len(saves) == 1
        for direction in Direction:
            sizes = self.sizes(direction)
            assert (len(sizes), sum(sizes)) == queue.waiting(direction)
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
        assert Admission.ACCEPTED is offer(queue, 1, nbytes=100)
        assert Admission.QUEUE_BYTES is offer(queue, 2)

    def test_full_queue_refuses_no_load(self):
        """The engine has allocated blocks for a load: it is taken whatever waits."""
        queue = DumpQueue(max_tickets=1, max_nbytes=1)
        offer(queue, 1)
        for number in range(2, 9):
            assert Admission.ACCEPTED is offer(queue, number, direction=LOAD, nbytes=9)
        assert Admission.QUEUE_TICKETS is offer(queue, 9)

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
        """Loads outrank saves, also loads that find no room yet; only a save that the
        engine waits for goes before them."""
        queue = DumpQueue(max_tickets=9, max_nbytes=10)
        offer(queue, 1)
        offer(queue, 2, direction=LOAD)
        assert take(queue, LOAD, lambda _: False) is None
        assert take(queue, SAVE) is None
        offer(queue, 3, "urgent")
        queue.promote((SAVE, "urgent", 1))
        assert 3 == take(queue, SAVE)
        assert 2 == take(queue, LOAD)
        assert 1 == take(queue, SAVE)


def test_deep_queue_is_not_searched_for_each_item():
    """With thousands of requests waiting, taking one looks at one lane."""
    queue = DumpQueue(max_tickets=5000, max_nbytes=1 << 40)
    for number in range(2000):
        queue.offer(make_item(make_ticket(number, request=f"r{number}")))
    asked = []

    def has_room(key):
        asked.append(key)
        return True

    assert [0, 1, 2] == [take(queue, has_room=has_room) for _ in range(3)]
    assert 3 == len(asked)
