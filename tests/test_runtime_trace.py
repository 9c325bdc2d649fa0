# SPDX-License-Identifier: Apache-2.0
"""What a runtime leaves behind of its tickets: one line of each, and a ring of edges."""

import itertools
import time

import pytest

from tests.rig import order, running
from ucm.blocks import Owner
from ucm.errors import StoreUnavailableError
from ucm.pipeline.tickets import Direction
from ucm.scheduler.messages import SpanOrder
from ucm.testing.faults import Fault, FaultPlan, Gate, raising

SAVE, LOAD = Direction.SAVE, Direction.LOAD
CHAINS = {
    SAVE: ["event_wait", "gather", "transfer", "commit"],
    LOAD: ["event_wait", "fetch", "scatter", "publish"],
}


def lines(rig, event):
    """Return the lines of an event."""
    return [line for line in rig.tracer.events if line["event"] == event]


class TestTicket:
    @pytest.mark.parametrize("direction", [SAVE, LOAD])
    def test_line_tells_the_whole_way(self, direction):
        """One line has when the ticket was asked for, each stage's begin and end, and the
        release, in seconds after that; the stages follow each other."""
        with running() as rig:
            rig.runtime.begin_step(3, {})
            before = time.time()
            for number, way in enumerate((SAVE, direction), start=1):
                if way is not SAVE or number == 1:
                    rig.submit(order(number, way, range(2), range(1, 3)))
                    rig.settle()
        line = lines(rig, "ticket.settled")[-1]
        assert (line["transfer_id"], ["r"], 1) == (
            line["ticket"],
            line["requests"],
            line["num_requests"],
        )
        assert (3, 0) == (line["step"], line["group"])
        assert before - 0.1 < line["accepted_s"] < time.time()
        assert CHAINS[direction] == [stage for stage, _, _ in line["edges"]]
        times = [at for _, begin, end in line["edges"] for at in (begin, end)]
        assert [0.0, *times, line["total_s"] + 1e-6] == sorted(
            [0.0, *times, line["total_s"] + 1e-6]
        )
        assert 0 < line["released_s"] <= line["total_s"]

    def test_line_names_four_of_many_requests(self):
        """A ticket that many requests share says how many, and stays short."""
        owners = tuple(Owner(f"r{number}", 1, 1) for number in range(6))
        shared = order(1, SAVE, range(6), range(1, 7))
        with running() as rig:
            rig.submit(
                SpanOrder(
                    transfer_id=1,
                    kind=shared.kind,
                    owners=owners,
                    group_id=0,
                    block_ids=shared.block_ids,
                    hashes=shared.hashes,
                )
            )
            rig.settle()
        (line,) = lines(rig, "ticket.settled")
        assert (["r0", "r1", "r2", "r3"], 6) == (line["requests"], line["num_requests"])

    def test_stage_that_failed_ends_with_its_ticket(self):
        """Where a ticket came to is in its line too: the stage that raised is the last."""
        gone = raising(StoreUnavailableError("gone"))
        with running(plan=FaultPlan(Fault("reserve", gone))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            rig.settle()
        (line,) = lines(rig, "ticket.settled")
        stage, begin, end = line["edges"][-1]
        assert ("gather", line["total_s"]) == (stage, end)
        assert begin <= end
        assert "gather_s" not in line


class TestRing:
    def test_failed_ticket_leaves_what_stages_did_last(self):
        """R-72: the line has the edges of tickets that went well before, too; in ten
        seconds there is one."""
        gone = raising(StoreUnavailableError("gone"))
        plan = FaultPlan(*(Fault("reserve", gone, nth) for nth in (2, 3)))
        with running(plan=plan) as rig:
            for number in (1, 2, 3):
                blocks = range(number, number + 1)
                rig.submit(order(number, SAVE, blocks, blocks, request=str(number)))
                rig.settle()
        (line,) = lines(rig, "trace.ring")
        whole = [[(1, stage, "begin"), (1, stage, "end")] for stage in CHAINS[SAVE]]
        failed = [(2, "event_wait", "begin"), (2, "event_wait", "end")]
        seen = [(ticket, stage, edge) for _, ticket, stage, edge in line["edges"]]
        assert [*itertools.chain(*whole), *failed, (2, "gather", "begin")] == seen
        assert "unavailable" == line["reason"]

    def test_failed_runtime_leaves_it_behind_its_own_line(self):
        """Who looks for the cause finds it right there."""
        with running() as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            rig.settle()
            rig.runtime._fail("test")
        names = [line["event"] for line in rig.tracer.events]
        at = names.index("runtime.failed")
        assert "trace.ring" == names[at + 1]

    def test_ring_is_told_on_demand(self):
        """A ticket that hangs can be looked at while it does."""
        gate = Gate()
        with running(plan=FaultPlan(Fault("reserve", gate))) as rig:
            rig.submit(order(1, SAVE, range(1), range(1, 2)))
            gate.wait_reached()
            edge = rig.runtime.ring.last(1)[0]
            gate.open()
            rig.settle()
        assert (1, "gather", "begin") == edge[1:]
        assert 0 <= edge[0] < 600
