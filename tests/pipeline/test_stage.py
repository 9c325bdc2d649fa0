# SPDX-License-Identifier: Apache-2.0
"""Chains, how they are cut into segments, and what a segment does around a stage."""

import asyncio
import contextlib

import pytest
import structlog

from tests.pipeline.kit import AsyncDevice, make_ticket
from tests.rig import BLOCK_BYTES, NUM_BLOCKS
from ucm.devices.cpu import CPUDevice
from ucm.devices.events import DoneFence
from ucm.errors import StoreUnavailableError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.items import Item
from ucm.pipeline.load import load_chain
from ucm.pipeline.save import save_chain
from ucm.pipeline.stage import Chain, CopyStage, LoopStage, Segment, fail
from ucm.pipeline.tickets import Outcome, OutcomeKind
from ucm.reasons import Reason
from ucm.stores.memory import MemoryStore

OVER = Outcome(OutcomeKind.CANCELLED, "deadline")


class Copying(CopyStage[Item, Item]):
    """A copy stage that notes its run and does what the test says."""

    def __init__(self, name, ran=None, act=lambda ticket: None):
        self.name = name
        self.ran = [] if ran is None else ran
        self.act = act

    def run(self, given):
        """Note and act."""
        self.ran.append(self.name)
        self.act(given.ticket)
        return given


class Waiting(LoopStage[Item, Item]):
    """A loop stage that turns the loop once."""

    def __init__(self, name):
        self.name = name

    async def run(self, given):
        """Turn the loop."""
        await asyncio.sleep(0)
        return given


class Closable:
    """Notes that it was closed."""

    def __init__(self, left):
        self.left = left

    def close(self):
        """Note it."""
        self.left.append("closed")


def item_of(ticket):
    """Return an item without rows."""
    return Item(ticket, (), DoneFence())


def words(chain):
    """Return the names of a chain's stages, segment by segment."""
    return [[stage.name for stage in one.stages] for one in chain.segments()]


class TestChain:
    def test_neighbouring_copy_stages_share_a_segment(self):
        """Copy stages fuse; loop stages stand alone, also next to each other."""
        chain = Chain.start(Waiting("a")).then(Waiting("b")).then(Copying("c"))
        chain = chain.then(Copying("d")).then(Waiting("e")).then(Copying("f"))
        assert [["a"], ["b"], ["c", "d"], ["e"], ["f"]] == words(chain)
        assert [False, False, True, False, True] == [
            segment.is_copy for segment in chain.segments()
        ]

    def test_chain_that_starts_with_copies_fuses_them(self):
        """The first stage fuses like any other."""
        assert [["a", "b"]] == words(Chain.start(Copying("a")).then(Copying("b")))

    def test_then_leaves_the_shorter_chain_as_it_was(self):
        """Chains are values: one can be the start of two others."""
        start = Chain.start(Copying("a"))
        start.then(Copying("b"))
        assert [["a"]] == words(start)

    @pytest.mark.parametrize(
        ("make", "fused", "cut"),
        [
            (
                save_chain,
                [["event_wait"], ["gather"], ["transfer", "commit"]],
                [["event_wait"], ["gather"], ["gather_wait"], ["transfer", "commit"]],
            ),
            (
                load_chain,
                [["event_wait"], ["fetch", "scatter", "publish"]],
                [
                    *(["event_wait"], ["fetch", "scatter"], ["verify", "publish"]),
                    *(["scatter_wait"], ["publish"]),
                ],
            ),
        ],
    )
    def test_asynchronous_device_gets_a_wait_behind_its_copy(self, make, fused, cut):
        """Another device's fence is waited for; a store has a thread of its own."""
        store = MemoryStore(1, BLOCK_BYTES)
        assert fused == words(make(store, CPUDevice(NUM_BLOCKS)))
        assert cut == words(make(store, AsyncDevice(NUM_BLOCKS)))


class TestRunCopy:
    def test_stages_run_in_order_and_their_seconds_are_kept(self):
        """Each stage of a segment runs once, in order, and its time is recorded."""
        ran, ticket = [], make_ticket()
        segment = Segment((Copying("a", ran), Copying("b", ran)))
        segment.run_copy(item_of(ticket))
        assert ["a", "b"] == ran == list(ticket.stage_times)
        assert "b" == ticket.stages[()]
        assert all(spent >= 0 for _, _, spent in ticket.stage_times.values())

    def test_stage_that_runs_again_adds_its_seconds(self):
        """A ticket of several items has one sum per stage."""
        ticket = make_ticket()
        ticket.stage_times["a"] = (1.0, 6.0, 5.0)
        Segment((Copying("a"),)).run_copy(item_of(ticket))
        begin, end, spent = ticket.stage_times["a"]
        assert 1.0 == begin
        assert 6.0 < end
        assert 5.0 <= spent < 6.0

    def test_settled_ticket_runs_no_stage(self):
        """A ticket that is over before its job starts touches nothing."""
        stage, ticket = Copying("a"), make_ticket()
        ticket.end(OVER)
        with pytest.raises(TicketOverError):
            Segment((stage,)).run_copy(item_of(ticket))
        assert [] == stage.ran

    def test_ticket_settled_between_stages_goes_no_further(self):
        """A ticket that ends in one stage never reaches the next; what it owns is
        left once."""
        left, ran, ticket = [], [], make_ticket()

        def settle(ticket):
            ticket.own(contextlib.closing(Closable(left)))
            ticket.end(OVER)

        segment = Segment((Copying("a", ran, settle), Copying("b", ran)))
        with pytest.raises(TicketOverError):
            segment.run_copy(item_of(ticket))
        ticket.unwind()
        assert (["a"], ["closed"]) == (ran, left)

    def test_stage_that_raises_names_itself(self):
        """The error passes through, and the ticket knows the stage."""
        ticket = make_ticket()

        def raise_it(_):
            raise ZeroDivisionError

        segment = Segment((Copying("a"), Copying("b", act=raise_it), Copying("c")))
        with pytest.raises(ZeroDivisionError):
            segment.run_copy(item_of(ticket))
        assert "b" == ticket.stages[()]
        assert ["a", "b"] == list(ticket.stage_times)
        assert 0.0 == ticket.stage_times["b"][1]
        assert not ticket.is_worked_on

    def test_last_word_of_the_last_stage_is_given_where_it_was_said(self):
        """R-18: a ticket ends on the copy thread, which gives its slots back by the way:
        that needs no further job."""
        left, ticket = [], make_ticket()
        item = item_of(ticket)

        def finish(ticket):
            ticket.own(contextlib.closing(Closable(left)))
            item.outcome = OVER

        Segment((Copying("a", act=finish),)).run_copy(item)
        assert OVER is ticket.outcome
        assert ["closed"] == left

    def test_each_stage_is_traced(self):
        """A stage's start and end are events with its name, the end with its time."""
        capture = structlog.testing.LogCapture()
        log = structlog.wrap_logger(
            structlog.ReturnLogger(),
            processors=[capture],
            wrapper_class=structlog.make_filtering_bound_logger(0),
        )
        ticket = make_ticket(log=log)
        Segment((Copying("a"),)).run_copy(item_of(ticket))
        started, finished = capture.entries
        assert ("stage.started", "a") == (started["event"], started["stage"])
        assert ("stage.finished", "a") == (finished["event"], finished["stage"])
        assert finished["elapsed_s"] == ticket.stage_times["a"][2]


class TestFail:
    def failed(self, error, **given):
        """Let a stage raise; return its item."""
        item = item_of(make_ticket(7, **given))
        item.segment = Segment((Copying("a"),))
        item.ticket.stages[()] = "a"
        fail(item, error)
        return item

    def test_error_ends_the_ticket_and_its_item(self):
        """The item goes no further, and whoever reads why finds stage and cause."""
        item = self.failed(StoreUnavailableError("gone"))
        assert item.has_failed
        outcome = item.ticket.outcome
        assert (OutcomeKind.FAILED, "unavailable") == (outcome.kind, outcome.reason)
        assert "stage a failed for transfer 7" in outcome.error
        assert "StoreUnavailableError('gone')" in outcome.error

    def test_slots_of_a_failed_ticket_are_given_back_once(self):
        """What it owns is left when nothing uses it, and no more."""
        left, ticket = [], make_ticket()
        ticket.own(contextlib.closing(Closable(left)))
        item = item_of(ticket)
        item.segment = Segment((Copying("a"),))
        fail(item, ZeroDivisionError())
        ticket.unwind()
        assert ["closed"] == left

    def test_ticket_that_has_ended_keeps_its_word(self):
        """A row that finds its ticket over tells nothing new."""
        item = self.failed(StoreUnavailableError("gone"))
        before = item.ticket.outcome
        fail(item, TicketOverError(Reason.OVER))
        assert before is item.ticket.outcome


class TestRunLoop:
    def test_loop_stage_runs_and_is_timed(self):
        """A loop stage turns its value over and its time is recorded."""
        given = item_of(make_ticket())
        segment = Segment((Waiting("a"),))
        asyncio.run(segment.run_loop(given))
        assert ["a"] == list(given.ticket.stage_times)
