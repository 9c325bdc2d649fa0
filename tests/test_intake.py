# SPDX-License-Identifier: Apache-2.0
"""What is submitted, on its way to tickets."""

import itertools

import pytest
from msgspec.structs import replace

from tests.pipeline.kit import Told
from tests.rig import KEYSPACE_DIGEST, LAYOUT, NUM_ROWS, null_log, order
from ucm.blocks import GroupId, KeyPacker, Owner, RowId, ShardId
from ucm.config import UCMConfig
from ucm.devices.events import DoneFence
from ucm.intake import Intake
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.recorder import Recorder
from ucm.pipeline.tickets import Direction
from ucm.threads import SYSTEM, Threads

ROWS = tuple(RowId(row) for row in range(NUM_ROWS))


class TestKeys:
    def test_keys_are_those_of_the_space_and_the_part_they_were_submitted_with(self):
        """Two plans under different key spaces are taken in one after the other."""
        one, other = (bytes([space]) * 16 for space in (1, 2))
        intake = make_intake(SYSTEM, shard=3)
        for number, digest in ((1, one), (2, other), (3, one)):
            save = order(number, Direction.SAVE, range(2), range(1, 3))
            intake.submit(digest, [save], DoneFence(), None)
        intake.take_in()
        wanted = [
            KeyPacker(digest, GroupId(0), ShardId(3)).pack(save.split_hashes())
            for digest in (one, other, one)
        ]
        assert wanted == [list(ticket.span.keys) for ticket in intake.open.values()]


class TestOwners:
    def test_ticket_of_several_requests_has_them_in_the_order_of_its_blocks(self):
        """What the scheduler put together is one ticket, one item and one line."""
        owners = (Owner("a", 1, 1), Owner("b", 2, 2))
        save = order(1, Direction.SAVE, range(3), range(1, 4))
        intake = make_intake(SYSTEM)
        save = replace(save, owners=owners)
        intake.submit(KEYSPACE_DIGEST, [save], DoneFence(), None)
        intake.take_in()
        (ticket,) = intake.open.values()
        assert (owners, (1, 2, 3)) == (ticket.owners, ticket.span.block_ids)

    def test_blocks_of_each_owner_count_as_used_by_their_depth(self):
        """R-29: an owner says when its last block counts as used, and each one before it
        does so later by the tokens of a block; whose share they take goes with them."""
        size = LAYOUT.groups[0].block_tokens
        owners = (Owner("a", 1, 1, 1000, 7), Owner("b", 2, 3, 5000), Owner("c", 3, 2))
        save = order(1, Direction.SAVE, range(6), range(1, 7))
        intake = make_intake(At(3.0))
        save = replace(save, owners=owners)
        intake.submit(KEYSPACE_DIGEST, [save], DoneFence(), None)
        intake.take_in()
        (ticket,) = intake.open.values()
        b, now = 5000, 3_000_000_000
        moments = [1000, b + 2 * size, b + size, b, now + size, now]
        uses = ticket.span.uses
        assert (moments, [7, 0, 0, 0, 0, 0]) == (
            uses.moments.tolist(),
            uses.tenants.tolist(),
        )

    def test_load_is_no_use_of_its_blocks(self):
        """The scheduler has marked them when it ordered the load."""
        intake = make_intake(SYSTEM)
        load = order(1, Direction.LOAD, range(3), range(1, 4))
        intake.submit(KEYSPACE_DIGEST, [load], DoneFence(), None)
        intake.take_in()
        assert [None] == [ticket.span.uses for ticket in intake.open.values()]


class At(Threads):
    """Threads at a time that stands still."""

    def __init__(self, now):
        self.monotonic = lambda: now


def make_intake(threads, shard=0):
    """Return an intake over a queue that nobody empties."""
    recorder = Recorder(Counters(), Mailbox(threads), null_log())
    return Intake(
        LAYOUT,
        ShardId(shard),
        DumpQueue(max_tickets=9, max_nbytes=1 << 30, threads=threads),
        recorder,
        Told(),
        timeout=UCMConfig().timeout,
        log=null_log(),
        threads=threads,
        on_failure=pytest.fail,
    )


class TestTime:
    def test_long_forward_pass_uses_up_no_time_of_its_transfers(self):
        """A pass that takes longer than any deadline, but goes on, loses neither what it
        saves nor what it loads: each row that comes begins a ticket's time anew."""

        class Clock(Threads):
            now = 0.0

            def monotonic(self):
                return self.now

        clock = Clock()
        timeout = UCMConfig().timeout
        intake = make_intake(clock)
        orders = [
            order(1, Direction.SAVE, range(2), range(1, 3)),
            order(2, Direction.LOAD, range(2), range(20, 22)),
        ]
        intake.submit(KEYSPACE_DIGEST, orders, DoneFence(), ROWS[:1])
        intake.take_in()
        clock.now = 8.0
        intake.add_rows([1, 2], ROWS[1:2], DoneFence())
        intake.take_in()
        limits = (8.0 + timeout.save, 8.0 + timeout.load)
        assert limits == tuple(ticket.deadline for ticket in intake.open.values())


class Ticking(Threads):
    """Threads whose clock goes on by a tenth of a millisecond at each look."""

    def __init__(self, made):
        self._made = made
        self._looks = itertools.count()

    def monotonic(self):
        """Return the next time."""
        return next(self._looks) * 1e-4

    def give_way(self):
        """Begin to count anew."""
        self._made.append(0)


class TestTurns:
    @pytest.mark.parametrize("gives_way", [True, False])
    def test_many_orders_of_a_step_are_taken_in_with_pauses(self, gives_way):
        """R-18: tickets are made and offered a few at a time, and other threads may have
        the interpreter lock in between; not where the engine's thread does it itself."""
        orders = [order(n, Direction.LOAD, [n], [n]) for n in range(1, 101)]
        made = [0]
        intake = make_intake(Ticking(made))
        make, offer = intake._ticket, intake._offer_item

        def counted(*arguments):
            made[-1] += 1
            return make(*arguments)

        def counted_offer(item):
            made[-1] += 1
            offer(item)

        intake._ticket, intake._offer_item = counted, counted_offer
        intake.submit(KEYSPACE_DIGEST, orders, DoneFence(), None)
        intake.take_in(gives_way=gives_way)
        assert 100 == len(intake.open)
        assert 200 == sum(made)
        assert gives_way == (max(made) < 10)
