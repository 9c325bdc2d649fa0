# SPDX-License-Identifier: Apache-2.0
"""Blocks that another connector loads within a step, and whether they came."""

from collections.abc import Sequence

import msgspec
import pytest

from tests.kit.consistency import validate
from tests.scheduler.model import (
    HASHES,
    HYBRID,
    ONE_FULL,
    SetIndex,
    facts,
    make_adapter,
    make_layout,
    saved_blocks,
    scheduled,
)
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepPlan
from ucm.scheduler.requests import (
    NO_LIMIT,
    Disposition,
    RequestEnd,
    ScheduledRequest,
    StepFacts,
)

TABLE = [1, 2, 3, 4, 5, 6, 7, 8]
WINDOW = make_layout((4, 8))
NOBODY: dict[int, list[int]] = {}


@pytest.fixture
def adapter() -> SchedulerAdapter:
    """Return an adapter of an engine that has two steps under way."""
    return make_adapter(ONE_FULL, SetIndex())


def served(
    name: str = "r",
    computed: int = 8,
    tokens: int = 8,
    *,
    own: int = 0,
    table: Sequence[int] = TABLE,
    is_new: bool = True,
) -> ScheduledRequest:
    """Return the facts of a request of whose tokens so many are not of its own cache."""
    blocks = list(table[: (computed + tokens + 3) // 4])
    request = scheduled(
        name, HASHES[: len(blocks)], [blocks], computed, tokens, is_new=is_new
    )
    own_tokens = own if is_new else NO_LIMIT
    return msgspec.structs.replace(request, own_tokens=own_tokens, prompt_tokens=32)


def going_on(computed: int, tokens: int = 1, name: str = "r") -> ScheduledRequest:
    """Return the facts of one that goes on."""
    return served(name, computed, tokens, is_new=False)


def left(computed: int = 16) -> RequestEnd:
    """Return what there is of one that ends."""
    return RequestEnd(
        computed_tokens=computed,
        known_tokens=computed + 1,
        prompt_tokens=computed,
        hashes=HASHES[: computed // 4],
        tables=[TABLE[: computed // 4]],
    )


def run(adapter: SchedulerAdapter, *requests: ScheduledRequest) -> dict[int, list[int]]:
    """Return which blocks the plan of a step saves."""
    plan: StepPlan = adapter.plan_step(facts(*requests))
    validate(adapter)
    return saved_blocks(plan)


class TestDoubt:
    def test_nothing_is_saved_until_the_output_of_the_step_has_come(
        self, adapter: SchedulerAdapter
    ) -> None:
        """What another connector loads, and what is computed on top, may be garbage while
        the step's output is under way; all of it is saved with the next plan behind that."""
        assert NOBODY == run(adapter, served())
        assert NOBODY == run(adapter, going_on(16))
        assert 1 == adapter.counts()["doubts"]
        assert {0: TABLE[:4]} == run(adapter, going_on(17))
        assert 0 == adapter.counts()["doubts"]

    @pytest.mark.parametrize("batches", [1, 3])
    def test_more_steps_are_under_way_in_a_pipeline(self, batches: int) -> None:
        """An engine with so many batches has an output so many plans later."""
        adapter = make_adapter(ONE_FULL, SetIndex(), batches=batches)
        run(adapter, served())
        for at in range(batches - 1):
            assert NOBODY == run(adapter, going_on(16 + at))
        assert {0: TABLE[:4]} == run(adapter, going_on(18))

    @pytest.mark.parametrize("own", [8, 9, NO_LIMIT])
    def test_request_that_nobody_else_serves_waits_for_nothing(
        self, adapter: SchedulerAdapter, own: int
    ) -> None:
        """What the engine's own cache or we gave is known to be good."""
        assert {0: TABLE[:4]} == run(adapter, served(own=own))
        assert 0 == adapter.counts()["doubts"]

    def test_layouts_of_several_groups_are_left_as_they_are(self) -> None:
        """With several groups an engine has no way to take blocks back."""
        adapter = make_adapter(HYBRID, SetIndex())
        tables = [TABLE[:4], [9, 10]]
        request = scheduled("r", HASHES[:4], tables, 8, 8, is_new=True, prompt=16)
        request = msgspec.structs.replace(request, own_tokens=0)
        assert {0: TABLE[:4], 1: [9, 10]} == run(adapter, request)

    def test_one_that_ends_meanwhile_is_saved_behind_the_output(
        self, adapter: SchedulerAdapter
    ) -> None:
        """Its blocks are kept until it is known that they are good, and saved then."""
        run(adapter, served())
        assert Disposition.DEFER is adapter.request_finished("r", left())
        assert NOBODY == saved_blocks(adapter.plan_step(StepFacts()))
        plan = adapter.plan_step(StepFacts())
        assert {0: TABLE[:4]} == saved_blocks(plan)
        assert ["r"] == [each.request_id for each in plan.deferred]

    def test_one_that_ends_with_blocks_that_did_not_come_is_dropped(
        self, adapter: SchedulerAdapter
    ) -> None:
        """An engine that fails such requests ends them before it tells why: nothing of it
        is saved, and its blocks are free with the next plan."""
        run(adapter, served())
        assert Disposition.DEFER is adapter.request_finished("r", left())
        adapter.foreign.lost({1})
        for deferred in (["r"], []):
            plan = adapter.plan_step(StepFacts())
            assert NOBODY == saved_blocks(plan)
            assert deferred == [each.request_id for each in plan.deferred]
        adapter.deferral_ended(["r"])
        assert 4 == adapter.totals.dropped_blocks
        assert adapter.is_idle

    def test_preempted_one_leaves_its_doubt_to_nobody(
        self, adapter: SchedulerAdapter
    ) -> None:
        """Its next life computes everything itself, and waits for nothing."""
        run(adapter, served())
        adapter.plan_step(facts(preempted=["r"]))
        assert {0: TABLE[:4]} == run(adapter, served(computed=0, tokens=16))


class TestLost:
    @pytest.mark.parametrize("tells", ["blocks", "facts"])
    @pytest.mark.parametrize("in_flight", [0, 1])
    def test_what_is_computed_anew_is_saved_then(
        self, adapter: SchedulerAdapter, tells: str, in_flight: int
    ) -> None:
        """Where blocks did not come, be it that the output says so or that the engine goes
        back, what the next step computes is saved, with the good blocks before it, once."""
        run(adapter, served(computed=12, tokens=4))
        for at in range(in_flight):
            assert NOBODY == run(adapter, going_on(16 + at))
        if tells == "blocks":
            adapter.foreign.lost({2, 3, 99})
        again = run(adapter, going_on(4, 4))
        assert {0: TABLE[:2]} == again
        assert {0: TABLE[2:4]} == run(adapter, going_on(8, 8))
        assert {0: TABLE[4:5]} == run(adapter, going_on(16, 4))
        assert not adapter.foreign.bad

    def test_blocks_of_others_are_not_missed(self, adapter: SchedulerAdapter) -> None:
        """What did not come for somebody else ends no doubt of ours, nor does a doubt's end."""
        run(adapter, served())
        adapter.foreign.lost({77})
        assert NOBODY == run(adapter, going_on(16))
        assert {0: TABLE[:4]} == run(adapter, going_on(17))
        adapter.foreign.lost({1})
        assert {0: TABLE[4:5]} == run(adapter, going_on(18, 2))


class TestShared:
    OTHER = (1, 2, 13, 14, 15)

    def other(self, computed: int = 8, *, is_new: bool = True) -> ScheduledRequest:
        """Return the facts of one whose first two blocks the engine lets it share."""
        request = served(
            "s", computed, 8, own=computed, table=self.OTHER, is_new=is_new
        )
        hashes = [*HASHES[:2], *HASHES[20:23]]
        return msgspec.structs.replace(request, hashes=hashes)

    @pytest.mark.parametrize("order", [1, -1])
    def test_whoever_shares_them_waits_as_well(
        self, adapter: SchedulerAdapter, order: int
    ) -> None:
        """In the step that loads, in whatever order the engine tells of them, and in one
        that follows before the output."""
        assert NOBODY == run(adapter, *(served(), self.other())[::order])
        later = msgspec.structs.replace(self.other(), request_id="t")
        assert NOBODY == run(adapter, going_on(16), later)
        goes_on = self.other(16, is_new=False)
        assert {0: [*TABLE[:4], 13, 14, 15]} == run(adapter, going_on(17), goes_on)

    def test_one_that_goes_on_from_what_others_compute_anew_is_not_saved(
        self, adapter: SchedulerAdapter
    ) -> None:
        """The engine lets one compute shared blocks again, and the others go on from them
        in the same step, or before that: nothing of these is saved in that life."""
        run(adapter, served(), self.other())
        adapter.foreign.lost({1, 2})
        assert NOBODY == run(adapter, self.other(is_new=False))
        assert {0: TABLE[:4]} == run(adapter, going_on(0, 16))
        assert NOBODY == run(adapter, self.other(16, is_new=False))

    @pytest.mark.parametrize("tokens", [4, 8])
    def test_one_that_comes_before_they_are_computed_anew_is_not_saved(
        self, adapter: SchedulerAdapter, tokens: int
    ) -> None:
        """The engine's cache has them all the while; behind that it may share them."""
        run(adapter, served())
        adapter.foreign.lost({1, 2})
        run(adapter, going_on(0, tokens))
        wanted = NOBODY if tokens == 4 else {0: [13, 14]}
        assert wanted == run(adapter, self.other())

    def test_block_that_is_computed_anew_in_part_is_not_shared(
        self, adapter: SchedulerAdapter
    ) -> None:
        """Only whole blocks are good again."""
        run(adapter, served())
        adapter.foreign.lost({1, 2})
        run(adapter, going_on(0, 6))
        assert {2, 3, 4} == adapter.foreign.bad
        run(adapter, going_on(6, 13))
        assert not adapter.foreign.bad

    def test_one_that_goes_back_behind_what_it_was_served_leaves_all_of_it_bad(
        self, adapter: SchedulerAdapter
    ) -> None:
        """Where a request was served on top of what others were, it may go back to theirs."""
        both = served("s", 12, 6, own=8, table=[1, 2, 13, 14, 15])
        run(adapter, served(), both)
        assert NOBODY == run(adapter, going_on(16), going_on(4, 4, "s"))
        assert {13, 14} == adapter.foreign.bad

    @pytest.mark.parametrize("by", ["new", "allocated", "load", "served"])
    def test_block_that_is_another_ones_is_good(
        self, adapter: SchedulerAdapter, by: str
    ) -> None:
        """Once the engine has given it to somebody else, it is what that one makes of it."""
        run(adapter, served())
        adapter.foreign.lost({1, 2})
        adapter.request_finished("r")
        assert adapter.holds_blocks
        if by == "new":
            run(adapter, served("n", 0, 16, own=0))
        elif by == "allocated":
            adapter.plan_step(StepFacts(allocated=TABLE, is_idle=False))
        elif by == "served":
            run(adapter, served("n", 8, 8))
        else:
            adapter.blocks_allocated(
                "n", [TABLE[:4]], HASHES[:4], computed_tokens=0, external_tokens=16
            )
            run(adapter, served("m", 4, 4, table=[21, 22], own=4))
        assert not adapter.foreign.bad

    def test_window_computed_on_top_is_in_doubt_by_itself(self) -> None:
        """With a window another request may share what was computed, and none of the blocks
        that were loaded."""
        adapter = make_adapter(WINDOW, SetIndex())
        run(adapter, served())
        table = [0, 0, 3, 4, 13, 14]
        shares = served("s", 16, 8, own=16, table=table)
        assert NOBODY == run(adapter, going_on(16), shares)
