# SPDX-License-Identifier: Apache-2.0
"""What becomes known of a ticket when the ways of telling it fail."""

import pytest
import structlog

from tests.rig import BLOCK_BYTES, keys_of, null_log
from ucm.blocks import BlockId, BlockSpan, GroupId, Owner, RowId, TransferId
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline import load, save
from ucm.pipeline.recorder import STAGES, Notice, NoticeKind, Recorder
from ucm.pipeline.tickets import Direction, Listener, Outcome, OutcomeKind, Ticket
from ucm.reasons import Reason
from ucm.tracing import Log


class Recording(Listener):
    """Has a recorder told what becomes of tickets."""

    def __init__(self, recorder: Recorder) -> None:
        self.released = recorder.released  # type: ignore[method-assign]
        self.ended = recorder.ended  # type: ignore[method-assign]


def a_ticket(recorder: Recorder, log: Log) -> Ticket:
    """Return a load of one block."""
    return Ticket(
        transfer_id=TransferId(1),
        direction=Direction.LOAD,
        owners=(Owner("r", 1, 1),),
        span=BlockSpan(GroupId(0), (BlockId(1),), keys_of(1)),
        row_ids=(RowId(0),),
        block_bytes=BLOCK_BYTES,
        accepted_at=0.0,
        deadline=0.0,
        listener=Recording(recorder),
        log=log,
    )


class TestRecorder:
    def test_engine_hears_of_the_end_although_the_log_breaks(self) -> None:
        """A log that raises costs its line; the notice is on its way already."""

        def broken(*_: object) -> str:
            raise OSError("no space left")

        log = structlog.wrap_logger(
            structlog.ReturnLogger(),
            processors=[broken],
            wrapper_class=structlog.make_filtering_bound_logger(20),
        )
        mailbox: Mailbox[Notice] = Mailbox()
        recorder = Recorder(Counters(), mailbox, null_log())
        ticket = a_ticket(recorder, log)
        with pytest.raises(OSError, match="no space left"):
            ticket.end(Outcome(OutcomeKind.FAILED, "evicted"))
        kinds = [notice.kind for notice in mailbox.drain()]
        assert [NoticeKind.RELEASED, NoticeKind.SETTLED] == kinds
        assert ticket.wait_told(0)

    def test_last_word_is_given_once(self) -> None:
        """A second outcome changes nothing and is told to nobody."""
        mailbox: Mailbox[Notice] = Mailbox()
        recorder = Recorder(Counters(), mailbox, null_log())
        ticket = a_ticket(recorder, null_log())
        assert ticket.end(Outcome(OutcomeKind.FAILED, "evicted"))
        assert not ticket.end(Outcome(OutcomeKind.COMMITTED, committed=1))
        assert 2 == len(mailbox.drain())
        assert OutcomeKind.FAILED is ticket.outcome.kind

    def test_stages_and_hits_are_counted_with_the_bytes_they_moved(self) -> None:
        """X-10: seconds beside the bytes they were spent on, hits by where they lay;
        a host's own stages are one word, whatever they are called."""
        counters = Counters()
        recorder = Recorder(counters, Mailbox(), null_log(), tier="disk")
        ticket = a_ticket(recorder, null_log())
        ticket.stage_times.update(
            {"fetch": (0.0, 0.5, 0.5), "a|b": (0.0, 1.0, 1.0), "c": (0.0, 2.0, 2.0)}
        )
        ticket.end(Outcome(OutcomeKind.COMMITTED, committed=1))
        seen = counters.snapshot().counters
        expected = {
            "ucm_stage_seconds_total|load|fetch": 0.5,
            "ucm_stage_part_bytes_total|load|fetch": BLOCK_BYTES,
            "ucm_stage_seconds_total|load|own": 3.0,
            "ucm_stage_part_bytes_total|load|own": 2 * BLOCK_BYTES,
            "ucm_hit_parts_total|disk": 1,
            "ucm_hit_part_bytes_total|disk": BLOCK_BYTES,
        }
        assert expected == {key: seen.get(key) for key in expected}
        assert seen.keys() - expected.keys() == {
            key for key in seen if key.startswith("ucm_settled_")
        }

    @pytest.mark.parametrize(
        "outcome",
        [
            Outcome(OutcomeKind.SKIPPED, skipped=1),
            Outcome(OutcomeKind.FAILED, Reason.EVICTED),
        ],
    )
    def test_nothing_but_what_was_copied_is_a_hit(self, outcome: Outcome) -> None:
        """X-10: a failed load is no hit, and what was stored before moved no byte."""
        counters = Counters()
        ticket = a_ticket(Recorder(counters, Mailbox(), null_log()), null_log())
        ticket.stage_times["fetch"] = (0.0, 0.5, 0.5)
        ticket.end(outcome)
        assert 0 == counters.total("ucm_hit_parts_total")
        moved = 0 if outcome.skipped else BLOCK_BYTES
        assert moved == counters.total("ucm_stage_part_bytes_total")

    def test_every_stage_of_ours_is_known_to_metrics(self) -> None:
        """A stage that is renamed would be counted as a host's own."""
        ours = {
            cls.name
            for module in (load, save)
            for cls in vars(module).values()
            if isinstance(cls, type) and isinstance(getattr(cls, "name", None), str)
        }
        assert ours == STAGES
