# SPDX-License-Identifier: Apache-2.0
"""What becomes known of a ticket when the ways of telling it fail."""

import pytest
import structlog

from tests.rig import BLOCK_BYTES, keys_of, null_log
from ucm.blocks import BlockId, BlockSpan, GroupId, Owner, RowId, TransferId
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline.recorder import Notice, NoticeKind, Recorder
from ucm.pipeline.tickets import Direction, Listener, Outcome, OutcomeKind, Ticket
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
