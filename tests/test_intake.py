# SPDX-License-Identifier: Apache-2.0
"""What is submitted, on its way to tickets."""

import pytest

from tests.rig import NUM_ROWS, null_log, order
from ucm.blocks import RowId
from ucm.config import UCMConfig
from ucm.devices.events import DoneFence
from ucm.intake import Intake
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.recorder import Recorder
from ucm.pipeline.tickets import Direction
from ucm.threads import Threads

ROWS = tuple(RowId(row) for row in range(NUM_ROWS))


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
        recorder = Recorder(Counters(), Mailbox(clock), null_log())
        queue = DumpQueue(max_tickets=9, max_nbytes=1 << 30, threads=clock)
        intake = Intake(
            queue,
            recorder,
            timeout=timeout,
            log=null_log(),
            threads=clock,
            on_failure=pytest.fail,
        )
        orders = [
            order(1, Direction.SAVE, range(2), range(1, 3)),
            order(2, Direction.LOAD, range(2), range(20, 22)),
        ]
        intake.submit(orders, DoneFence(), ROWS[:1])
        intake.take_in()
        clock.now = 8.0
        intake.add_rows([1, 2], ROWS[1:2], DoneFence())
        intake.take_in()
        limits = (8.0 + timeout.save, 8.0 + timeout.load)
        assert limits == tuple(ticket.deadline for ticket in intake.open.values())
