# SPDX-License-Identifier: Apache-2.0
"""A request is told of once, with all that became of it."""

from collections.abc import Sequence

import pytest

from tests.scheduler.model import (
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    make_adapter,
    scheduled,
)
from ucm.blocks import Owner
from ucm.scheduler.messages import SpanOrder, TransferKind
from ucm.scheduler.records import Record, Records, SaveEnd
from ucm.scheduler.requests import StepFacts


def a_save(number: int, *shares: tuple[str, int, int]) -> SpanOrder:
    """Return a save of so many blocks of each life."""
    total = sum(num for _, _, num in shares)
    return SpanOrder(
        transfer_id=number,
        kind=TransferKind.SAVE,
        owners=tuple(Owner(*share) for share in shares),
        group_id=0,
        block_ids=tuple(range(1, total + 1)),
        hashes=bytes(32 * total),
    )


def end_of(order: SpanOrder, stored: int) -> list[SaveEnd]:
    """Return the end of a save that left so many blocks in the store."""
    return [SaveEnd(order.owners, len(order.block_ids), stored)]


def blocks_of(record: Record) -> tuple[int, int, int]:
    """Return how many blocks were saved, dropped, and are not known of."""
    return record.saved_blocks, record.dropped_blocks, record.unsettled_blocks


@pytest.fixture
def records() -> Records:
    """Return the records of an engine that has another request, which goes on."""
    records = Records()
    assert not records.present["goes on"].is_over
    return records


def names(taken: Sequence[Record]) -> list[str]:
    """Return whose records these are."""
    return [record.request_id for record in taken]


class TestOver:
    def test_request_is_told_once_it_has_ended(self, records: Records) -> None:
        """Not while it runs, and not twice."""
        record = records.begun(("r", 1))
        assert () == records.take()
        records.ended("r", is_deferred=False)
        assert [record] == records.take()
        assert () == records.take()
        assert 1 == len(records)

    def test_request_that_was_never_seen_is_not_told(self, records: Records) -> None:
        """An engine also ends what it never asked about."""
        records.ended("r", is_deferred=False)
        assert () == records.take()

    @pytest.mark.parametrize("is_freed_first", [False, True])
    def test_saves_and_kept_blocks_are_waited_for(
        self, records: Records, is_freed_first: bool
    ) -> None:
        """A line too early would call blocks unsaved that are about to be."""
        record, save = records.begun(("r", 1)), a_save(1, ("r", 1, 3))
        records.ordered([save])
        records.ended("r", is_deferred=True)
        facts = [
            lambda: records.saved(end_of(save, 3)),
            lambda: records.freed(["r"]),
        ]
        for take_note in reversed(facts) if is_freed_first else facts:
            assert () == records.take()
            take_note()
        assert [record] == records.take()
        assert (3, 0, 0) == blocks_of(record)

    def test_nothing_is_waited_for_where_nobody_may_come_back(self) -> None:
        """An engine without requests takes no step in which a save could be told of; but
        it takes some while it keeps blocks for us."""
        records = Records()
        record = records.begun(("r", 1))
        records.ordered([a_save(1, ("r", 1, 3))])
        records.ended("r", is_deferred=True)
        assert () == records.take()
        records.freed(["r"])
        assert [record] == records.take()
        assert (0, 0, 3) == blocks_of(record)
        assert 0 == len(records)

    def test_engine_that_stops_is_told_all(self, records: Records) -> None:
        """What has ended is told as it is; what still ran has no end to tell."""
        records.begun(("r", 1))
        records.ordered([a_save(1, ("r", 1, 3))])
        records.ended("r", is_deferred=True)
        assert ["r"] == names(records.take(at_end=True))

    def test_late_report_of_what_was_told_changes_nothing(self) -> None:
        """A save may end long after its request's line."""
        records, save = Records(), a_save(1, ("r", 1, 3))
        record = records.begun(("r", 1))
        records.ordered([save])
        records.ended("r", is_deferred=False)
        assert ["r"] == names(records.take())
        records.saved(end_of(save, 3))
        assert (0, 0, 3) == blocks_of(record)
        assert records.of_life(("r", 1)) is None

    def test_id_that_is_used_again_is_another_request(self, records: Records) -> None:
        """Each has its own line, and its own blocks."""
        saves = [a_save(number, ("r", number, number)) for number in (1, 2)]
        for save, generation in zip(saves, (1, 2), strict=True):
            records.begun(("r", generation))
            records.ordered([save])
            records.ended("r", is_deferred=False)
        for save, count in zip(reversed(saves), (2, 1), strict=True):
            records.saved(end_of(save, count))
        assert [2, 1] == [record.saved_blocks for record in records.take()]

    def test_preempted_request_has_one_record(self, records: Records) -> None:
        """Its stays in memory are told together."""
        first = records.begun(("r", 1))
        assert first is records.begun(("r", 2))
        assert [("r", 1), ("r", 2)] == first.lives


class TestBlocks:
    @pytest.mark.parametrize("stored", [0, 2, 3])
    def test_blocks_of_one_owner_are_known(self, records: Records, stored: int) -> None:
        """What the store does not have was dropped."""
        record, save = records.begun(("r", 1)), a_save(1, ("r", 1, 3))
        records.ordered([save])
        records.saved(end_of(save, stored))
        assert (stored, 3 - stored, 0) == blocks_of(record)

    @pytest.mark.parametrize(
        ("stored", "told"),
        [
            (0, [(0, 1, 0), (0, 2, 0)]),
            (3, [(1, 0, 0), (2, 0, 0)]),
            (2, [(0, 0, 1), (0, 0, 2)]),
        ],
    )
    def test_of_a_shared_save_that_was_cut_nobody_knows_whose_blocks(
        self, records: Records, stored: int, told: list[tuple[int, int, int]]
    ) -> None:
        """They count as neither; and their requests are told of nevertheless."""
        save = a_save(1, ("a", 1, 1), ("b", 2, 2))
        both = [records.begun(("a", 1)), records.begun(("b", 2))]
        records.ordered([save])
        records.saved(end_of(save, stored))
        assert told == [blocks_of(record) for record in both]
        for name in "ab":
            records.ended(name, is_deferred=False)
        assert ["a", "b"] == names(records.take())


class TestLoads:
    def test_time_and_tokens_of_loads_add_up(self) -> None:
        """A request may load again after a preemption."""
        record = Record("r")
        record.load_ordered(32, 10.0)
        record.load_over(12.0, tokens=32)
        record.load_ordered(16, 20.0)
        record.load_over(21.0, failure="evicted")
        record.load_over(99.0, failure="corrupt")
        assert (48, 32, 3.0) == (
            record.matched_tokens,
            record.loaded_tokens,
            record.load_s,
        )
        assert "evicted" == record.load_failure

    def test_who_goes_away_amid_a_load_has_waited_for_it(self) -> None:
        """A client that gave up on a load that hung was told to have waited for none."""
        adapter = make_adapter(ONE_FULL, SetIndex())
        adapter.tick(10.0)
        adapter.blocks_allocated(
            "r", [[1, 2]], HASHES[:2], computed_tokens=0, external_tokens=8
        )
        assert adapter.plan_step(StepFacts()).loads
        adapter.tick(70.0)
        adapter.request_finished("r")
        (record,) = adapter.records.take()
        assert (8, 0, 60.0) == (
            record.matched_tokens,
            record.loaded_tokens,
            record.load_s,
        )

    def test_who_is_preempted_amid_a_load_waits_no_more(self) -> None:
        """Where requests do not park, one may lose its blocks before its load's end is told: the
        time up to its own end, in which it computed all anew, counted as waiting."""
        adapter = make_adapter(ONE_FULL, SetIndex(), parks=False)
        adapter.tick(10.0)
        adapter.blocks_allocated(
            "r", [[1, 2]], HASHES[:2], computed_tokens=0, external_tokens=8
        )
        adapter.plan_step(
            facts(scheduled("r", HASHES[:2], [[1, 2, 3]], 8, 1, is_new=True))
        )
        adapter.tick(12.0)
        adapter.plan_step(StepFacts(preempted={"r": 9}))
        adapter.plan_step(facts(scheduled("r", [], [[4, 5, 6]], 0, 9, is_new=True)))
        adapter.tick(70.0)
        adapter.request_finished("r")
        (record,) = adapter.records.take()
        assert (1, 2.0) == (record.preemptions, record.load_s)
