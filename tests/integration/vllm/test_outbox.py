# SPDX-License-Identifier: Apache-2.0
"""R-17: whatever a worker has to tell, each report is a message that may be sent."""

import pytest

from ucm.integration.vllm.outbox import MAX_IDS, Outbox
from ucm.reasons import Reason
from ucm.scheduler.messages import Failure, StepReport, encode

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
