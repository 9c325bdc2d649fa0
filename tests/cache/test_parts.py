# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the library: orders, users of blocks, room, ends."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache.kit import LAYOUT, TOKENS, keys_of
from ucm.blocks import ShardId
from ucm.cache.orders import Orders
from ucm.cache.pending import Pending
from ucm.cache.room import Room
from ucm.cache.transfers import Transfer
from ucm.cache.users import BlockUsers
from ucm.errors import BlockInUseError, DeviceTimeoutError
from ucm.pipeline.outcomes import Outcome, OutcomeKind
from ucm.pipeline.tickets import Direction
from ucm.prefixes import Place
from ucm.reasons import Reason
from ucm.scheduler.spans import TicketBytes

BLOCK = LAYOUT.max_block_bytes
TICKETS = TicketBytes(save=2 * BLOCK, load=3 * BLOCK)
_ANYWHERE = Place()


def orders_of(num_blocks: int, place: Place = _ANYWHERE, now_ns: int = 10**9) -> list:
    """Return the orders of a save, two blocks each."""
    orders = Orders(LAYOUT, ShardId(0), bytes(16), TICKETS)
    keys, blocks = keys_of(num_blocks), range(num_blocks)
    return orders.of(orders.check(Direction.SAVE, keys, blocks, 0, place, now_ns))


class TestOrders:
    def test_span_is_cut_into_tickets_of_one_lane(self) -> None:
        """Each carries as much as one may, in order, under a number of its own."""
        orders = orders_of(5)
        assert [(0, 1), (2, 3), (4,)] == [order.block_ids for order in orders]
        assert 3 == len({order.transfer_id for order in orders})
        assert 1 == len({order.owners[0].life for order in orders})
        hashes = b"".join(order.hashes for order in orders)
        assert b"".join(keys_of(5)) == hashes

    def test_deeper_blocks_count_as_used_before_those_they_need(self) -> None:
        """A nanosecond for each token before the block, from the start of its prefix."""
        place = Place(first=2, began_ns=1000, tenant=7)
        owners = [order.owners[0] for order in orders_of(3, place)]
        last = [1000 - 3 * TOKENS, 1000 - 4 * TOKENS]
        assert last == [owner.used_ns for owner in owners]
        assert {7} == {owner.tenant for owner in owners}

    def test_without_a_moment_it_is_now(self) -> None:
        """A host that says nothing has its blocks used when it asks."""
        (order,) = orders_of(1, now_ns=77)
        assert 77 == order.owners[0].used_ns

    def test_uses_are_those_of_the_orders(self) -> None:
        """What is touched and what is saved stands in one order."""
        orders = Orders(LAYOUT, ShardId(0), bytes(16), TICKETS)
        uses = orders.uses(3, 0, Place(first=2, began_ns=1000, tenant=7), 5)
        depth = [1000 - at * TOKENS for at in (2, 3, 4)]
        assert depth == uses.moments.tolist()
        assert [7, 7, 7] == uses.tenants.tolist()

    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"first": -1}, ValueError),
            ({"first": 1 << 62}, ValueError),
            ({"first": 1.5}, TypeError),
            ({"began_ns": -1}, ValueError),
            ({"began_ns": 1 << 63}, ValueError),
            ({"began_ns": time.monotonic()}, TypeError),
            ({"tenant": -1}, ValueError),
            ({"tenant": 1 << 32}, ValueError),
        ],
    )
    def test_place_that_is_none_is_refused(
        self, wrong: dict, error: type[Exception]
    ) -> None:
        """It would not fit into the store's books, and our loop would die of it."""
        with pytest.raises(error, match=next(iter(wrong))):
            Place(**wrong)

    def test_place_takes_whatever_is_a_whole_number(self) -> None:
        """An index out of an array is one, and the latest moment is one that fits."""
        orders = Orders(LAYOUT, ShardId(0), bytes(16), TICKETS)
        place = Place(first=np.int64(2), began_ns=1 << 62)
        uses = orders.uses(1, 0, place, 5)
        assert [(1 << 62) - 2 * TOKENS] == uses.moments.tolist()

    def test_small_numbers_of_numpy_are_whole_ones(self) -> None:
        """A moment has more bits than an array of indexes, and the loop would not get on."""
        place = Place(first=np.uint8(200), began_ns=np.int32(5), tenant=np.uint8(7))
        (order,) = orders_of(1, Place(first=np.uint8(200)), now_ns=10**15)
        assert 10**15 - 200 * TOKENS == order.owners[0].used_ns
        (order,) = orders_of(1, place)
        assert (5 - 200 * TOKENS, 7) == (
            order.owners[0].used_ns,
            order.owners[0].tenant,
        )

    def test_table_of_small_numbers_is_no_sum(self) -> None:
        """Blocks of a long prompt are more than 32 bits together, and each is well."""
        blocks = np.full(4, 2**31 - 1, np.int32)
        orders = Orders(LAYOUT, ShardId(0), bytes(16), TICKETS)
        keys = [bytes([at]) * 32 for at in range(4)]
        asked = orders.check(Direction.LOAD, keys, blocks, 0, Place(), 5)
        assert (2**31 - 1,) * 4 == asked.blocks
        assert {int} == set(map(type, asked.blocks))

    def test_group_is_the_layouts_number(self) -> None:
        """An element of a tensor equals it, and is in no table: the loop would not get on."""
        torch = pytest.importorskip("torch")
        orders = Orders(LAYOUT, ShardId(0), bytes(16), TICKETS)
        asked = orders.check(
            Direction.SAVE, [bytes(32)], [1], torch.tensor(0), Place(), 5
        )
        assert int is type(asked.group)

    def test_place_is_looked_at_in_the_call(self) -> None:
        """What is none is the caller's mistake, and no save without an end."""
        orders = Orders(LAYOUT, ShardId(0), bytes(16), TICKETS)
        with pytest.raises(AttributeError, match="began_ns"):
            orders.check(Direction.SAVE, [bytes(32)], [1], 0, (2, 0, 0), 5)


class TestBlockUsers:
    def test_many_read_and_one_writes(self) -> None:
        """Until the last reader has given a block back it is not written."""
        users = BlockUsers()
        users.read([1, 2], "a")
        users.read([2, 3], "a")
        users.count()
        users.give_back([1, 2])
        with pytest.raises(BlockInUseError, match="block 2"):
            users.write([1, 2], "a")
        users.give_back([2, 3])
        users.write([1, 2], "a")
        with pytest.raises(BlockInUseError):
            users.write([2], "a")

    def test_refused_reader_has_taken_nothing(self) -> None:
        """All or none."""
        users = BlockUsers()
        users.write([2], "a")
        with pytest.raises(BlockInUseError):
            users.read([1, 2, 3], "a")
        users.give_back([2])
        assert 0 == len(users)

    def test_block_is_not_written_twice_by_one(self) -> None:
        """Which bytes would be in it nobody could say."""
        with pytest.raises(BlockInUseError, match="block 4"):
            BlockUsers().write([4, 5, 4], "a")

    def test_undone_taker_leaves_no_trace_and_others_have_theirs(self) -> None:
        """Refused, interrupted amid it or behind it: of whom nothing is there."""
        users = BlockUsers()
        users.read([1], "a")
        users.write([2, 3], "b")
        users.read([1, 4], "c")
        for blocks, owner in (([1, 4], "c"), ([2, 3], "d"), ([1], "d")):
            users.undo(blocks, owner)
        assert 3 == len(users)
        users.undo([2, 3], "b")
        users.write([2, 3, 4], "e")
        assert 4 == len(users)

    @given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6)))
    def test_all_is_free_in_the_end(self, reads: list[list[int]]) -> None:
        """Whoever reads what, and how often."""
        users = BlockUsers()
        for blocks in reads:
            users.read(blocks, "a")
        for blocks in reads:
            users.count()
            users.give_back(blocks)
        assert 0 == len(users)


class TestRoom:
    def test_line_moves_as_room_is_made(self) -> None:
        """In order, and never beyond either bound."""
        room: Room[str] = Room(2, 100)
        line = (("a", 60), ("b", 30), ("c", 10), ("d", 10))
        for at, (name, nbytes) in enumerate(line):
            assert room.wait(at, name, nbytes, 9.0)
        assert ("a", True) == room.next(0.0)
        assert ("b", True) == room.next(0.0)
        assert room.next(0.0) is None  # two are in
        room.leave(60)
        assert ("c", True) == room.next(0.0)
        room.leave(30)
        room.leave(10)
        assert ("d", True) == room.next(0.0)
        assert room.next(0.0) is None

    def test_larger_than_all_goes_in_alone(self) -> None:
        """It would wait for ever otherwise."""
        room: Room[str] = Room(2, 100)
        room.wait(0, "small", 10, 9.0)
        room.wait(1, "huge", 1000, 9.0)
        assert ("small", True) == room.next(0.0)
        assert room.next(0.0) is None
        room.leave(10)
        assert ("huge", True) == room.next(0.0)

    def test_who_waits_too_long_is_told_and_takes_no_room(self) -> None:
        """The one behind goes in as if nobody had been before it."""
        room: Room[str] = Room(1, 100)
        room.wait(0, "late", 10, 1.0)
        room.wait(1, "next", 10, 3.0)
        assert ("late", False) == room.next(2.0)
        assert ("next", True) == room.next(2.0)

    def test_line_has_a_bound(self) -> None:
        """Beyond it whoever comes is refused as if it did not wait."""
        room: Room[int] = Room(1, 1)
        assert all(room.wait(at, at, 1, 9.0) for at in range(1 << 16))
        assert not room.wait(1 << 16, 0, 1, 9.0)

    def test_withdrawn_are_out_and_the_others_in_order(self) -> None:
        """Nobody loses a place by it."""
        room: Room[int] = Room(1, 1)
        for at in range(5):
            room.wait(10 + at, at, 1, 9.0)
        assert [1, 3] == room.withdraw([11, 13, 15])
        assert [0, 2, 4] == room.drain()
        assert 0 == room.num_waiting


def transfer_of(direction: Direction, num_blocks: int = 4) -> Transfer:
    """Return a transfer of two blocks a ticket."""
    transfer = Transfer(direction, threading.Lock())
    transfer.begin(orders_of(num_blocks))
    return transfer


WHOLE = Outcome(OutcomeKind.COMMITTED, committed=2)
FAILED = Outcome(OutcomeKind.FAILED, Reason.CORRUPT)


class TestTransfer:
    def test_save_is_released_before_it_is_over(self) -> None:
        """With its last ticket each."""
        transfer = transfer_of(Direction.SAVE)
        one, two = transfer.orders
        assert not transfer.hear(one, None)
        transfer.look()
        assert not transfer.released.is_done
        assert not transfer.hear(two, None)
        transfer.look()
        assert (True, False) == (transfer.released.is_done, transfer.over.is_done)
        assert transfer.hear(one, WHOLE)
        transfer.look()
        assert not transfer.over.is_done
        assert transfer.hear(two, WHOLE)
        transfer.look()
        assert transfer.over.result().is_whole

    def test_load_is_not_over_while_its_blocks_are_touched(self) -> None:
        """A ticket may be settled while its copy goes on."""
        transfer = transfer_of(Direction.LOAD, 2)
        (one,) = transfer.orders
        assert not transfer.hear(one, FAILED)
        transfer.look()
        assert not transfer.over.is_done
        assert transfer.hear(one, None)
        transfer.look()
        assert Reason.CORRUPT is transfer.over.result().reason

    @pytest.mark.parametrize(
        ("ends", "leading"),
        [((WHOLE, WHOLE), 4), ((WHOLE, FAILED), 2), ((FAILED, WHOLE), 0)],
    )
    def test_prefix_ends_with_the_first_part_that_failed(
        self, ends: tuple[Outcome, Outcome], leading: int
    ) -> None:
        """What lies behind it is of no use."""
        transfer = transfer_of(Direction.LOAD)
        for transfer_id, end in zip(transfer.orders, ends, strict=True):
            transfer.hear(transfer_id, None)
            transfer.hear(transfer_id, end)
        transfer.look()
        assert leading == transfer.over.result().leading

    def test_load_that_is_given_up_is_an_error(self) -> None:
        """Its blocks may still be written; a save's are read at worst."""
        load, save = transfer_of(Direction.LOAD), transfer_of(Direction.SAVE)
        load.give_up()
        save.give_up()
        with pytest.raises(DeviceTimeoutError):
            load.over.result()
        assert save.released.is_done
        assert OutcomeKind.CANCELLED is save.over.result().kind


class TestPending:
    def test_first_end_stays_and_each_waiter_is_called_once(self) -> None:
        """Also who comes when it is over is told so."""
        pending: Pending[int] = Pending(threading.Lock())
        called: list[str] = []
        assert pending.subscribe(lambda: called.append("a"))
        gone = called.clear
        assert pending.subscribe(gone)
        pending.unsubscribe(gone)
        pending.end(1)
        pending.end(2)
        assert (["a"], 1) == (called, pending.result())
        assert not pending.subscribe(lambda: called.append("b"))
