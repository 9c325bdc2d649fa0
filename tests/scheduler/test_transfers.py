# SPDX-License-Identifier: Apache-2.0
"""Tickets that were ordered and have not come to their end on every rank."""

import pytest

from tests.kit.consistency import validate_transfers
from tests.scheduler.model import ONE_FULL, hashes_of
from ucm.blocks import GroupId, Owner
from ucm.errors import LedgerError
from ucm.scheduler import denials
from ucm.scheduler.denials import FIRST_DENIAL_S, LONGEST_DENIAL_S, Denials
from ucm.scheduler.messages import SpanOrder, StepReport, TransferKind
from ucm.scheduler.records import SaveEnd
from ucm.scheduler.shares import Run, Stay, joined
from ucm.scheduler.transfers import OpenTransfers

G0 = GroupId(0)
HASHES = hashes_of("t", 20)


def _open(
    book: OpenTransfers, kind: TransferKind, indexes: list[int]
) -> list[SpanOrder]:
    if kind is TransferKind.SAVE:
        runs = [_run(each) for each in joined(range(i, i + 1) for i in indexes)]
        for run in runs:
            book.claim(G0, run)
        shares = [(Stay("r", 1), run) for run in runs]
        return list(book.open_saves(ONE_FULL.groups[0], shares))
    ids = tuple(100 + i for i in indexes)
    return book.open_load(("r", 1), G0, ids, [HASHES[i] for i in indexes])


def _run(at: range) -> Run:
    return Run(at.start, [100 + i for i in at], [HASHES[i] for i in at])


def _book(num_ranks: int = 1) -> OpenTransfers:
    return OpenTransfers(num_ranks, {G0: 3})


def _end(
    book: OpenTransfers,
    order: SpanOrder,
    rank: int,
    *,
    is_stored: bool = True,
    new_blocks: int = 0,
) -> list[SaveEnd]:
    ids = (order.transfer_id,)
    report = StepReport(
        rank=rank,
        settled_saves=ids if is_stored else (),
        unstored_saves=() if is_stored else ids,
        new_blocks={order.transfer_id: new_blocks},
    )
    return book.end_saves(report)


class TestOpenTransfers:
    def test_blocks_are_cut_into_spans(self) -> None:
        """A ticket never passes its size, and each has a number of its own."""
        orders = _open(_book(), TransferKind.SAVE, [0, 1, 2, 3, 4, 5, 6])
        spans = [(100, 101, 102), (103, 104, 105), (106,)]
        assert spans == [order.block_ids for order in orders]
        assert [1, 2, 3] == [order.transfer_id for order in orders]
        assert [HASHES[i] for i in (3, 4, 5)] == orders[1].split_hashes()

    def test_blocks_behind_a_gap_are_a_ticket_of_their_own(self) -> None:
        """An owner says one moment, of blocks that are consecutive; what is before the
        gap comes first."""
        orders = _open(_book(), TransferKind.SAVE, [0, 1, 4, 6, 7, 8, 9])
        spans = [(100, 101), (104,), (106, 107, 108), (109,)]
        assert spans == [order.block_ids for order in orders]

    def test_block_twice_in_a_run_is_saved_once(self) -> None:
        """A store refuses a reservation that names a key twice: its first place counts."""
        book = _book()
        twice = Run(4, [104, 105, 106], [HASHES[0], HASHES[1], HASHES[0]])
        assert [Run(4, [104, 105], HASHES[:2])] == book.claim(G0, twice)
        assert [] == book.claim(G0, _run(range(2)))
        assert [_run(range(2, 3))] == book.claim(G0, _run(range(3)))

    def test_owner_tells_when_its_last_block_counts_as_used(self) -> None:
        """R-29: the moment of its life less the tokens before the block, whatever
        ticket the block is in; and whose share of the store it takes."""
        book, group = _book(), ONE_FULL.groups[0]
        alone, other = Stay("r", 1, 1000, 7), Stay("s", 2, 2000)
        shares = [(alone, _run(range(5))), (other, _run(range(2, 3)))]
        owners = [order.owners for order in book.open_saves(group, shares)]
        assert owners == [
            (Owner("r", 1, 3, 1000 - 2 * 4, 7),),
            (Owner("r", 1, 2, 1000 - 4 * 4, 7), Owner("s", 2, 1, 2000 - 2 * 4, 0)),
        ]

    def test_no_blocks_need_no_ticket(self) -> None:
        """Nothing is opened for nothing."""
        assert [] == _open(_book(), TransferKind.SAVE, [])

    def test_ticket_ends_when_every_rank_has_said_so_once(self) -> None:
        """What a rank says twice, or of another kind of ticket, counts for nothing."""
        book = _book(num_ranks=2)
        (order,) = _open(book, TransferKind.SAVE, [1])
        assert not _end(book, order, 0)
        assert not _end(book, order, 0)
        assert not book.end_load(order.transfer_id, 1)
        assert HASHES[1] in book.saving[0]
        assert [SaveEnd(order.owners, 1, 1)] == _end(book, order, 1)
        assert HASHES[1] not in book.saving[0]
        assert not _end(book, order, 1)
        (load,) = _open(book, TransferKind.LOAD, [2])
        assert [False, True] == [book.end_load(load.transfer_id, at) for at in (0, 1)]
        assert 3 == book.strays

    def test_load_carries_as_much_as_four_saves(self) -> None:
        """A load is not cut as small as what others wait behind; a message bounds it."""
        book = OpenTransfers(1, {G0: 2})
        orders = _open(book, TransferKind.LOAD, list(range(20)))
        assert [8, 8, 4] == [len(order.block_ids) for order in orders]
        assert [(100, 107), (108, 115), (116, 119)] == [
            (order.block_ids[0], order.block_ids[-1]) for order in orders
        ]

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
        assert book.end_load(former.transfer_id, 0)
        assert {later.transfer_id} == book.loads_into([101])
        validate_transfers(book)

    def test_denied_block_is_forgiven_when_a_save_of_it_ends(self) -> None:
        """A denied block counts as missing until it was saved anew."""
        book = _book()
        book.denied.deny((0, HASHES[1]))
        book.denied.deny((0, HASHES[2]))
        (order,) = _open(book, TransferKind.SAVE, [1])
        assert (0, HASHES[1]) in book.denied
        _end(book, order, 0)
        assert [(0, HASHES[2])] == list(book.denied)

    def test_denied_blocks_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beyond the bound the block that was denied longest ago is let go."""
        monkeypatch.setattr(denials, "MAX_DENIED_KEYS", 2)
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
            validate_transfers(book)
        book = _book()
        _open(book, TransferKind.LOAD, [1])
        book._open.clear()
        with pytest.raises(LedgerError, match="a load that is not open"):
            validate_transfers(book)

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
            _end(book, order, rank, is_stored=is_stored, new_blocks=new)
        assert saved == book.saved_blocks

    def test_ticket_fits_into_a_message_however_small_its_blocks_are(self) -> None:
        """R-17: a setting that allows for huge tickets does not make a message too long."""
        book = OpenTransfers(1, {G0: 1 << 40})
        run = Run(0, range(40_000), [bytes(32)] * 40_000)
        orders = list(book.open_saves(ONE_FULL.groups[0], [(Stay("r", 1), run)]))
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
