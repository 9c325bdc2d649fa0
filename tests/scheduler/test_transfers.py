# SPDX-License-Identifier: Apache-2.0
"""Tickets that were ordered and have not come to their end on every rank."""

import pytest

from tests.scheduler.model import hashes_of
from ucm.blocks import GroupId
from ucm.errors import LedgerError
from ucm.scheduler import transfers
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.transfers import BlockRef, OpenTransfers, split_at_request

G0 = GroupId(0)
HASHES = hashes_of("t", 20)


def _open(
    book: OpenTransfers, kind: TransferKind, indexes: list[int]
) -> list[SpanOrder]:
    blocks = [BlockRef(i, 100 + i, HASHES[i]) for i in indexes]
    return book.open(kind, ("r", 1), G0, blocks)


def _book(num_ranks: int = 1) -> OpenTransfers:
    return OpenTransfers(num_ranks, {G0: 3})


class TestOpenTransfers:
    def test_blocks_are_cut_into_spans_of_consecutive_ones(self) -> None:
        """A ticket never passes its size nor a gap, and each has a number of its own."""
        orders = _open(_book(), TransferKind.SAVE, [0, 1, 2, 3, 5, 6, 9])
        spans = [(100, 101, 102), (103,), (105, 106), (109,)]
        assert spans == [order.block_ids for order in orders]
        assert [1, 2, 3, 4] == [order.transfer_id for order in orders]
        assert HASHES[5:7] == orders[2].split_hashes()

    def test_no_blocks_need_no_ticket(self) -> None:
        """Nothing is opened for nothing."""
        assert [] == _open(_book(), TransferKind.SAVE, [])

    def test_ticket_ends_when_every_rank_has_said_so_once(self) -> None:
        """What a rank says twice, or of another kind of ticket, counts for nothing."""
        book = _book(num_ranks=2)
        (order,) = _open(book, TransferKind.SAVE, [1])
        assert not book.end(TransferKind.SAVE, order.transfer_id, 0)
        assert not book.end(TransferKind.SAVE, order.transfer_id, 0)
        assert not book.end(TransferKind.LOAD, order.transfer_id, 1)
        assert book.is_saving(0, HASHES[1])
        assert book.end(TransferKind.SAVE, order.transfer_id, 1)
        assert not book.is_saving(0, HASHES[1])
        assert not book.end(TransferKind.SAVE, order.transfer_id, 1)
        assert 3 == book.strays

    def test_open_loads_are_found_by_the_blocks_they_fill(self) -> None:
        """A block that a load fills names it until the load has ended."""
        book = _book()
        assert set() == book.loads_into([101])
        (order,) = _open(book, TransferKind.LOAD, [1, 2])
        assert {order.transfer_id} == book.loads_into([7, 101, 102])
        assert [order.transfer_id] == book.end_loads_of({"r"})
        assert set() == book.loads_into([101])
        assert [] == book.end_loads_of({"r"})

    def test_block_that_two_loads_fill_belongs_to_the_later_one(self) -> None:
        """The end of a former load does not hide that a later one is open."""
        book = _book()
        (former,) = _open(book, TransferKind.LOAD, [1])
        (later,) = _open(book, TransferKind.LOAD, [1])
        book.end(TransferKind.LOAD, former.transfer_id, 0)
        assert {later.transfer_id} == book.loads_into([101])
        book.validate()

    def test_denied_block_is_forgiven_when_a_save_of_it_ends(self) -> None:
        """A denied block counts as missing until it was saved anew."""
        book = _book()
        book.deny(0, HASHES[1])
        book.deny(0, HASHES[2])
        (order,) = _open(book, TransferKind.SAVE, [1])
        assert (0, HASHES[1]) in book.denied
        book.end(TransferKind.SAVE, order.transfer_id, 0)
        assert [(0, HASHES[2])] == list(book.denied)

    def test_denied_blocks_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beyond the bound the block that was denied longest ago is let go."""
        monkeypatch.setattr(transfers, "MAX_DENIED_KEYS", 2)
        book = _book()
        for at in (1, 2, 1, 3):
            book.deny(0, HASHES[at])
        assert [(0, HASHES[1]), (0, HASHES[3])] == list(book.denied)

    def test_validate_sees_broken_indexes(self) -> None:
        """Two open saves of one block and a lost load are both found."""
        book = _book()
        _open(book, TransferKind.SAVE, [1])
        _open(book, TransferKind.SAVE, [1])
        with pytest.raises(LedgerError, match="two open saves"):
            book.validate()
        book = _book()
        _open(book, TransferKind.LOAD, [1])
        book._open.clear()
        with pytest.raises(LedgerError, match="a load that is not open"):
            book.validate()

    def test_loads_of_one_request_are_never_split_over_two_plans(self) -> None:
        """A plan takes whole requests until it has its share; a huge one goes alone."""
        book = _book()
        first = _open(book, TransferKind.LOAD, [0, 1, 2, 3, 4])
        other = book.open(
            TransferKind.LOAD, ("s", 2), G0, [BlockRef(9, 109, HASHES[9])]
        )
        assert (tuple(first), other) == split_at_request(first + other, 2)
        assert (tuple(first + other), []) == split_at_request(first + other, 6)
        assert ((), []) == split_at_request([], 1)
