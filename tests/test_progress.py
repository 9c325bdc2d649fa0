# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of its requests, and what it tells of them."""

import pytest
from msgspec.structs import replace

from tests.pipeline.kit import make_ticket
from tests.rig import order
from ucm.blocks import Owner
from ucm.pipeline.recorder import Notice, NoticeKind
from ucm.pipeline.tickets import Direction
from ucm.progress import MAX_IDS, Outbox, Progress
from ucm.reasons import Reason
from ucm.scheduler.messages import Deferral, Failure, StepReport, encode

IDS = ("released", "quarantined", "settled_saves", "unstored_saves", "loads_done")


def failure(transfer_id: int, request_id: str = "r") -> Failure:
    """Return the failure of a load."""
    return Failure(
        transfer_id=transfer_id,
        request_id=request_id,
        generation=1 << 40,
        group_id=0,
        bad_hash=bytes(64),
        reason=Reason.EVICTED,
    )


def emptied(outbox: Outbox) -> list[StepReport]:
    """Take reports until there is none, each as a message."""
    reports = []
    while (report := outbox.take(0, healthy=True)) is not None:
        encode(report)
        reports.append(report)
    return reports


class TestSharedSaves:
    OWNERS = (Owner("a", 1, 1), Owner("b", 2, 1), Owner("c", 1, 2))

    def progress(self) -> Progress:
        """Return what knows of one save of three requests, two of which are deferred."""
        progress = Progress()
        shared = order(1, Direction.SAVE, range(4), range(1, 5))
        progress.begin_saves([replace(shared, owners=self.OWNERS)])
        progress.defer(
            [
                Deferral(request_id="a", generation=1),
                Deferral(request_id="c", generation=1),
            ]
        )
        return progress

    def released(self, number: int, owners: tuple[Owner, ...]) -> Notice:
        """Return the word that a ticket's blocks may be overwritten."""
        ticket = make_ticket(number)
        ticket.owners = owners
        return Notice(NoticeKind.RELEASED, ticket)

    def test_blocks_of_each_request_are_read_until_the_save_is_released(self) -> None:
        """Whoever has a block in a ticket waits for it, and nobody for longer."""
        progress = self.progress()
        assert set() == progress.take_freed()
        progress.note([self.released(1, self.OWNERS)])
        assert {"a", "c"} == progress.take_freed()
        assert {0} == set(progress.counts().values())

    def test_request_waits_for_every_save_that_has_a_block_of_it(self) -> None:
        """A save of its own keeps a request's blocks when the shared one is over."""
        progress = self.progress()
        own = (Owner("a", 1, 4),)
        save = order(2, Direction.SAVE, range(4), range(1, 5))
        progress.begin_saves([replace(save, owners=own)])
        progress.note([self.released(1, self.OWNERS)])
        assert {"c"} == progress.take_freed()
        progress.note([self.released(2, own)])
        assert {"a"} == progress.take_freed()

    def test_later_life_of_a_request_is_not_kept_by_a_former_one(self) -> None:
        """Ids are used again: a save of life two does not hold back what life one had."""
        progress = Progress()
        save = order(1, Direction.SAVE, range(4), range(1, 5), "a", generation=2)
        progress.begin_saves([save])
        progress.defer([Deferral(request_id="a", generation=1)])
        assert {"a"} == progress.take_freed()


class TestOutbox:
    @pytest.mark.slow
    def test_reports_of_a_million_tickets_are_cut_and_lose_nothing(self) -> None:
        """R-17: each of the reports can be sent, and together they tell everything."""
        outbox, count = Outbox(), 200_000
        for name in IDS:
            getattr(outbox, name).extend(range(1 << 40, (1 << 40) + count))
        outbox.new_blocks.update(dict.fromkeys(outbox.settled_saves, 1 << 40))
        reports = emptied(outbox)
        for name in IDS:
            told = [each for report in reports for each in getattr(report, name)]
            assert list(range(1 << 40, (1 << 40) + count)) == told
        assert count == sum(len(report.new_blocks) for report in reports)
        assert {} == outbox.new_blocks
        assert -(-count // MAX_IDS) == len(reports) == outbox.cut_reports + 1

    def test_load_is_not_told_as_over_before_its_failure(self) -> None:
        """R-17: with failures left over, no load has ended; a failed one would count as
        loaded, and what is computed on it would be stored."""
        outbox = Outbox(loads_done=[1, 2])
        outbox.failures = [failure(1, "r" * 600_000), failure(2)]
        first, second = emptied(outbox)
        assert ((1,), ()) == (
            tuple(each.transfer_id for each in first.failures),
            first.loads_done,
        )
        assert ((2,), (1, 2)) == (
            tuple(each.transfer_id for each in second.failures),
            second.loads_done,
        )

    def test_nothing_to_tell_is_no_report(self) -> None:
        """Health is told when it changes for the worse, once."""
        outbox = Outbox()
        assert outbox.take(0, healthy=True) is None
        assert outbox.take(0, healthy=False) == StepReport(rank=0, healthy=False)
        assert outbox.take(0, healthy=False) is None
