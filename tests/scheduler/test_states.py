# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers: offered once, saved then or never, loaded alone."""

import pytest
from msgspec.structs import replace

from tests.scheduler.model import (
    DIGEST,
    STATE,
    SetIndex,
    facts,
    hashes_of,
    loaded,
    make_adapter,
    make_layout,
    saved,
    saved_blocks,
    scheduled,
)
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepPlan
from ucm.scheduler.requests import ScheduledRequest, StateOffer, StepFacts

HASHES = hashes_of("s", 16)
LAYOUT = make_layout((4, None), (8, STATE))
FULL, RECURRENT = 0, 1


def prefill(name: str, *offers: tuple[int, int], tokens: int = 16) -> ScheduledRequest:
    """Return a request that computes 16 tokens or so and offers blocks at ends."""
    return scheduled(
        name,
        HASHES[: tokens // 4],
        [[1, 2, 3, 4, 5][: -(-tokens // 4)], [0, 9]],
        0,
        tokens,
        new=[[1, 2, 3, 4], [9]],
        is_new=True,
        states=[StateOffer(RECURRENT, block, end) for block, end in offers],
    )


def continued(name: str, *offers: tuple[int, int]) -> ScheduledRequest:
    """Return the next step of such a request, over 8 more tokens."""
    return scheduled(
        name,
        HASHES[:6],
        [[1, 2, 3, 4, 5, 6], [0, 9, 10]],
        16,
        8,
        states=[StateOffer(RECURRENT, block, end) for block, end in offers],
    )


def load_prefix(adapter: SchedulerAdapter, index: SetIndex, name: str) -> StepPlan:
    """Let a request load 16 tokens and return the plan."""
    index.put(FULL, HASHES[:4])
    index.put(RECURRENT, HASHES[3:4])
    assert 16 == adapter.match_prefix(name, 17, HASHES[:4], 0).tokens
    adapter.blocks_allocated(
        name,
        [[1, 2, 3, 4], [0, 9]],
        HASHES[:4],
        computed_tokens=0,
        external_tokens=16,
    )
    return adapter.plan_step(StepFacts())


class TestOffers:
    def test_offered_state_is_saved_under_the_hash_it_ends_with(self) -> None:
        """The step that brings an offer saves and holds its block, and only that one
        of all blocks in the table."""
        adapter = make_adapter(LAYOUT, SetIndex())
        plan = adapter.plan_step(facts(prefill("r", (9, 16))))
        assert {FULL: [1, 2, 3, 4], RECURRENT: [9]} == saved_blocks(plan)
        (order,) = (each for each in plan.saves if each.group_id == RECURRENT)
        assert [HASHES[3]] == order.split_hashes()
        assert 5 == adapter.counts()["held_blocks"]

    def test_state_that_is_not_offered_is_not_saved(self) -> None:
        """A block of the table is somebody's running state, not a prefix's."""
        adapter = make_adapter(LAYOUT, SetIndex())
        plan = adapter.plan_step(facts(prefill("r")))
        assert {FULL: [1, 2, 3, 4]} == saved_blocks(plan)
        adapter.request_finished("r")
        assert 0 == adapter.totals.dropped_blocks

    def test_offered_block_need_not_stand_in_the_table(self) -> None:
        """An engine may hand over a copy, of any boundary that the step completes."""
        adapter = make_adapter(LAYOUT, SetIndex())
        plan = adapter.plan_step(facts(prefill("r", (9, 16), (33, 8))))
        assert [33, 9] == saved_blocks(plan)[RECURRENT]

    @pytest.mark.parametrize(
        ("begun", "tokens", "known", "is_saved"),
        [
            (12, 8, 20, False),
            (12, 4, 20, True),
            (8, 12, 20, True),
            (16, 4, 20, True),
            (15, 3, 16, True),
        ],
        ids=["passed", "reached", "made on the way", "there before", "drafts"],
    )
    def test_state_that_a_step_went_past_is_not_that_of_the_blocks_end(
        self, begun: int, tokens: int, known: int, is_saved: bool
    ) -> None:
        """H-09: vLLM 0.32 offers the block with the state at a hit within it as the one with the
        state at its end, though the step that began there wrote no state at that end. Of drafts
        nothing is known yet: the engine sees to it that the block has the state at its end."""
        adapter = make_adapter(LAYOUT, SetIndex())
        request = prefill("r", (9, 16), tokens=known)
        request = replace(request, computed_tokens=begun, end_tokens=begun + tokens)
        plan = adapter.plan_step(facts(request))
        assert is_saved == (RECURRENT in saved_blocks(plan))

    @pytest.mark.parametrize("is_late", [False, True], ids=["one stage", "several"])
    def test_state_that_drafts_went_past_is_not_there_yet_on_all_stages(
        self, is_late: bool
    ) -> None:
        """Stages of a pipeline before the last hear with a later step which drafts were accepted,
        and copy the state then: in this step the block has an earlier one."""
        adapter = make_adapter(LAYOUT, SetIndex(), late_states=is_late)
        request = prefill("r", (9, 16))
        request = replace(request, computed_tokens=15, end_tokens=18)
        plan = adapter.plan_step(facts(request))
        assert is_late != (RECURRENT in saved_blocks(plan))

    @pytest.mark.parametrize(
        "offer",
        [(9, 12), (9, 24), (9, 0), (0, 16)],
        ids=["tail", "not computed", "nothing", "null block"],
    )
    def test_offer_that_no_hit_can_use_is_passed_over(
        self, offer: tuple[int, int]
    ) -> None:
        """Ends within a block and beyond the step name no block of the group."""
        adapter = make_adapter(LAYOUT, SetIndex())
        plan = adapter.plan_step(facts(prefill("r", offer)))
        assert {FULL: [1, 2, 3, 4]} == saved_blocks(plan)
        assert 0 == adapter.totals.dropped_blocks

    @pytest.mark.parametrize(
        "who", ["nobody", "itself", "who goes on", "another", "load", "copy"]
    )
    def test_state_whose_block_the_step_gives_away_is_lost(self, who: str) -> None:
        """Beside drafts in flight vLLM 0.32 offers states and takes their blocks back before it
        plans: what its next owner writes is not saved as the state, and the loss is counted."""
        adapter = make_adapter(LAYOUT, SetIndex())
        adapter.plan_step(facts(prefill("r")))
        table = [0, 0, 9] if who == "itself" else [0, 0, 10]
        request = replace(continued("r", (9, 16)), tables=[[1, 2, 3, 4, 5, 6], table])
        other = scheduled("o", HASHES[:0], [[50], [9]], 0, 3, is_new=True)
        if who == "load":
            adapter.blocks_allocated(
                "l",
                [[50, 51], [9]],
                hashes_of("l", 2),
                computed_tokens=0,
                external_tokens=8,
            )
        plan = adapter.plan_step(
            StepFacts(
                scheduled=(request, other) if who == "another" else (request,),
                allocated=[9] if who in {"itself", "who goes on"} else [],
                overwritten=frozenset([9] if who == "copy" else ()),
            )
        )
        expected = [9] if who == "nobody" else None
        assert expected == saved_blocks(plan).get(RECURRENT)
        assert (who != "nobody") == adapter.totals.dropped_blocks

    def test_offer_of_another_kind_of_group_is_passed_over(self) -> None:
        """What is saved of other groups stands in their tables."""
        adapter = make_adapter(LAYOUT, SetIndex())
        request = replace(prefill("r"), states=[StateOffer(FULL, 33, 16)])
        plan = adapter.plan_step(facts(request))
        assert {FULL: [1, 2, 3, 4]} == saved_blocks(plan)

    def test_offer_is_taken_now_or_never(self) -> None:
        """Without room in the step the state is lost and counted; other blocks wait."""
        adapter = make_adapter(LAYOUT, SetIndex(), max_step_blocks=4)
        plan = adapter.plan_step(facts(prefill("r", (9, 16))))
        assert {FULL: [1, 2, 3, 4]} == saved_blocks(plan)
        assert 1 == adapter.totals.dropped_blocks
        plan = adapter.plan_step(facts(continued("r")))
        assert RECURRENT not in saved_blocks(plan)

    def test_state_is_saved_once(self) -> None:
        """What is stored, or on its way there for another request, is left alone."""
        index = SetIndex()
        adapter = make_adapter(LAYOUT, index)
        plan = adapter.plan_step(facts(prefill("a", (9, 16)), prefill("b", (19, 16))))
        assert [9] == saved_blocks(plan)[RECURRENT]
        adapter.apply_report(saved(*plan.saves))
        index.put(RECURRENT, HASHES[3:4])
        plan = adapter.plan_step(facts(prefill("c", (29, 16))))
        assert RECURRENT not in saved_blocks(plan)
        assert 0 == adapter.totals.dropped_blocks

    def test_step_without_offers_asks_the_store_nothing(self) -> None:
        """Steps that complete no state cost no look-up."""
        index = SetIndex()
        adapter = make_adapter(LAYOUT, index)
        adapter.plan_step(facts(prefill("r")))
        assert 0 == index.calls

    def test_offer_after_a_doubt_is_lost(self) -> None:
        """Blocks of the time before a doubt are of no use behind it."""
        adapter = make_adapter(LAYOUT, SetIndex())
        adapter.plan_step(facts(prefill("r", (9, 16))))
        adapter.doubt(1)
        adapter.rekey(DIGEST[::-1])
        plan = adapter.plan_step(facts(continued("r", (10, 24))))
        assert () == plan.saves
        assert 1 == adapter.totals.dropped_blocks


class TestLoads:
    def test_one_state_is_loaded_for_a_whole_prefix(self) -> None:
        """The null blocks before it stay as they are."""
        index = SetIndex()
        adapter = make_adapter(LAYOUT, index)
        plan = load_prefix(adapter, index, "r")
        assert [(FULL, (1, 2, 3, 4)), (RECURRENT, (9,))] == [
            (order.group_id, order.block_ids) for order in plan.loads
        ]
        assert HASHES[3] == plan.loads[1].split_hashes()[0]

    def test_loaded_state_is_not_saved_again(self) -> None:
        """The engine offers what was loaded once the request runs; later states are
        new."""
        index = SetIndex()
        adapter = make_adapter(LAYOUT, index)
        plan = load_prefix(adapter, index, "r")
        adapter.apply_report(loaded(*plan.loads))
        index.keys.clear()
        request = replace(continued("r", (9, 16), (10, 24)), is_new=True)
        plan = adapter.plan_step(facts(request))
        assert {FULL: [5, 6], RECURRENT: [10]} == saved_blocks(plan)
        assert 0 == adapter.totals.dropped_blocks

    def test_state_on_top_of_an_open_load_is_lost(self) -> None:
        """If the load fails, the state is garbage; it is not kept for later."""
        index = SetIndex()
        adapter = make_adapter(LAYOUT, index)
        plan = load_prefix(adapter, index, "r")
        request = replace(continued("r", (9, 16), (10, 24)), is_new=True)
        assert () == adapter.plan_step(facts(request)).saves
        assert 1 == adapter.totals.dropped_blocks
        adapter.apply_report(loaded(*plan.loads))
        following = scheduled("r", HASHES[:6], request.tables, 24, 1)
        assert {FULL: [5, 6]} == saved_blocks(adapter.plan_step(facts(following)))


class TestFences:
    def test_block_that_a_step_overwrites_is_fenced(self) -> None:
        """S1-22, R-01: copies onto a block, and clearing it, name the save that reads it
        apart, though no request was given the block, and though one was."""
        adapter = make_adapter(LAYOUT, SetIndex())
        plan = adapter.plan_step(facts(prefill("r", (9, 16))))
        (state,) = (each for each in plan.saves if each.group_id == RECURRENT)
        plan = adapter.plan_step(StepFacts(overwritten=frozenset({9, 50})))
        assert ((), (state.transfer_id,)) == (plan.fences, plan.overwritten)
        given = StepFacts(scheduled=(prefill("s", (9, 1)),), overwritten=frozenset({9}))
        again = adapter.plan_step(given)
        assert plan.overwritten == again.overwritten
        assert set(plan.overwritten).isdisjoint(again.fences)

    def test_state_is_fenced_when_its_block_is_given_away(self) -> None:
        """S1-22: the engine takes a state's block back two steps after its boundary."""
        adapter = make_adapter(LAYOUT, SetIndex())
        plan = adapter.plan_step(facts(prefill("r", (9, 16))))
        (state,) = (each for each in plan.saves if each.group_id == RECURRENT)
        other = scheduled("o", HASHES[:0], [[50], [9]], 0, 3, is_new=True)
        assert (state.transfer_id,) == adapter.plan_step(facts(other)).fences
