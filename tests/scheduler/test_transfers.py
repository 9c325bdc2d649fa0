# SPDX-License-Identifier: Apache-2.0
"""Tickets that were ordered and have not come to their end on every rank."""

import pytest

from tests.scheduler.model import hashes_of
from ucm.blocks import GroupId
from ucm.errors import LedgerError
from ucm.scheduler import transfers
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.transfers import (
    FIRST_DENIAL_S,
    LONGEST_DENIAL_S,
    BlockRef,
    Denials,
    OpenTransfers,
)

G0 = GroupId(0)
HASHES = hashes_of("t", 20)


def _open(
    book: OpenTransfers, kind: TransferKind, indexes: list[int]
) -> list[SpanOrder]:
    if kind is TransferKind.SAVE:
        blocks = [BlockRef(i, 100 + i, HASHES[i]) for i in indexes]
        return list(book.open_saves(G0, [(("r", 1), blocks)]))
    ids = tuple(100 + i for i in indexes)
    return book.open_load(("r", 1), G0, ids, [HASHES[i] for i in indexes])


def _book(num_ranks: int = 1) -> OpenTransfers:
    return OpenTransfers(num_ranks, {G0: 3})


class TestOpenTransfers:
    @pytest.mark.parametrize("kind", TransferKind)
    def test_blocks_are_cut_into_spans(self, kind: TransferKind) -> None:
        """A ticket never passes its size, and each has a number of its own."""
        orders = _open(_book(), kind, [0, 1, 2, 3, 5, 6, 9])
        spans = [(100, 101, 102), (103, 105, 106), (109,)]
        assert spans == [order.block_ids for order in orders]
        assert [1, 2, 3] == [order.transfer_id for order in orders]
        assert [HASHES[i] for i in (3, 5, 6)] == orders[1].split_hashes()

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
        book.denied.deny((0, HASHES[1]))
        book.denied.deny((0, HASHES[2]))
        (order,) = _open(book, TransferKind.SAVE, [1])
        assert (0, HASHES[1]) in book.denied
        book.end(TransferKind.SAVE, order.transfer_id, 0)
        assert [(0, HASHES[2])] == list(book.denied)

    def test_denied_blocks_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beyond the bound the block that was denied longest ago is let go."""
        monkeypatch.setattr(transfers, "MAX_DENIED_KEYS", 2)
        book = _book()
        for at in (1, 2, 3):
            book.denied.deny((0, HASHES[at]))
        assert [(0, HASHES[2]), (0, HASHES[3])] == list(book.denied)

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

    @pytest.mark.parametrize(
        ("told", "saved"),
        [
            (((True, 3), (True, 3)), 3),
            (((True, 3), (True, 0)), 3),  # a replica, or a rank that had its part
            (((True, 0), (True, 0)), 0),
            (((False, 2), (True, 3)), 2),
            (((False, 0), (True, 3)), 0),
        ],
    )
    def test_saved_block_counts_once_when_every_rank_has_its_part(
        self, told: tuple[tuple[bool, int], ...], saved: int
    ) -> None:
        """R-20: parts of one block on several ranks are one saved block, if all are there
        and some are new."""
        book = _book(num_ranks=2)
        (order,) = _open(book, TransferKind.SAVE, [0, 1, 2])
        for rank, (is_stored, new) in enumerate(told):
            assert 0 == book.saved_blocks
            book.end(
                TransferKind.SAVE,
                order.transfer_id,
                rank,
                is_stored=is_stored,
                new_blocks=new,
            )
        assert saved == book.saved_blocks

    def test_ticket_fits_into_a_message_however_small_its_blocks_are(self) -> None:
        """R-17: a setting that allows for huge tickets does not make a message too long."""
        book = OpenTransfers(1, {G0: 1 << 40})
        blocks = [BlockRef(i, i, bytes(32)) for i in range(40_000)]
        orders = list(book.open_saves(G0, [(("r", 1), blocks)]))
        assert [16384, 16384, 7232] == [len(each.block_ids) for each in orders]


class TestDenials:
    def test_block_is_found_again_after_a_time_that_doubles(self) -> None:
        """R-15: each time that a block fails anew it is missing for twice as long, up to
        a limit, and never for good."""
        denied, key = Denials(), (0, HASHES[0])
        now = waited = 0.0
        while waited < LONGEST_DENIAL_S:
            denied.deny(key)
            waited = min(2 * waited or FIRST_DENIAL_S, LONGEST_DENIAL_S)
            denied.tick(now + 0.99 * waited)
            assert key in denied
            now += waited
            denied.tick(now)
            assert key not in denied
        denied.deny(key)
        denied.tick(now + LONGEST_DENIAL_S)
        assert key not in denied
        assert [] == list(denied)

    def test_failures_at_the_same_time_count_once(self) -> None:
        """Four ranks that meet one damaged block do not make it missing for longer."""
        denied, key = Denials(), (0, HASHES[0])
        for _ in range(4):
            denied.deny(key)
        denied.tick(FIRST_DENIAL_S)
        assert key not in denied

    def test_what_has_not_failed_for_long_is_forgotten(self) -> None:
        """Nothing is kept of old failures, and the next one is a first one again."""
        denied, key = Denials(), (0, HASHES[0])
        denied.deny(key)
        denied.tick(3 * LONGEST_DENIAL_S)
        assert 0 == len(denied)
        denied.deny(key)
        denied.tick(3 * LONGEST_DENIAL_S + FIRST_DENIAL_S)
        assert key not in denied
