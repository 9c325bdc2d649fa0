# SPDX-License-Identifier: Apache-2.0
"""Requests that are too short to be worth saving."""

from msgspec.structs import replace

from tests.scheduler.model import (
    HASHES,
    ONE_FULL,
    STATE,
    SetIndex,
    facts,
    make_adapter,
    make_layout,
    saved_blocks,
    scheduled,
)
from tests.scheduler.test_decoded import all_saved, decode, end, go_on, start
from tests.scheduler.test_loads import failure_of, load
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepReport
from ucm.scheduler.requests import Disposition, StateOffer, StepFacts


def make(index: SetIndex, shortest: int) -> SchedulerAdapter:
    """Return an adapter that saves nothing of shorter requests."""
    return make_adapter(ONE_FULL, index, shortest=shortest)


class TestShortest:
    def test_short_request_is_not_saved_and_nobody_looks(self, index: SetIndex) -> None:
        """R-56, R-18: a request that ends below the limit leaves nothing, counts nothing as
        dropped, and is told of in no step but its first."""
        adapter = make(index, 20)
        plans = [adapter.plan_step(facts(start("r", 8, prompt=8)))]
        assert 20 == adapter.due["r"]
        plans += decode(adapter, "r", range(8, 18), prompt=8)
        answer = adapter.request_finished("r", end(19, prompt=8))
        assert Disposition.FREE_NOW is answer
        plans.append(adapter.plan_step(StepFacts()))
        assert ([], 0) == (all_saved(plans), adapter.totals.dropped_blocks)

    def test_request_that_grows_is_saved_from_its_first_block_on(
        self, index: SetIndex
    ) -> None:
        """R-56: with the step that reaches the limit all that there is is saved."""
        adapter = make(index, 16)
        plans = [adapter.plan_step(facts(start("r", 8, prompt=8)))]
        plans += decode(adapter, "r", range(8, 15), prompt=8)
        assert [] == all_saved(plans)
        last = decode(adapter, "r", range(15, 16), prompt=8)
        assert [1, 2, 3, 4] == all_saved(last)

    def test_request_that_ends_just_above_the_limit_is_saved(
        self, index: SetIndex
    ) -> None:
        """R-56: also where looks wait for others. Without one that goes through its blocks
        the end would leave nothing, and count nothing as dropped."""
        size = ONE_FULL.max_block_bytes
        adapter = make_adapter(ONE_FULL, index, shortest=16, company=4 * size)
        plans = [adapter.plan_step(facts(start("r", 8, prompt=8)))]
        for computed in range(8, 17):
            is_told = computed + 1 >= adapter.due["r"] + adapter.due.patience
            told = [go_on("r", computed, prompt=8)] if is_told else []
            plans.append(
                adapter.plan_step(StepFacts(scheduled=tuple(told), is_idle=False))
            )
        assert Disposition.DEFER is adapter.request_finished("r", end(18, prompt=8))
        plans.append(adapter.plan_step(StepFacts()))
        assert [1, 2, 3, 4] == all_saved(plans)

    def test_long_prompt_is_saved_piece_by_piece(self, index: SetIndex) -> None:
        """R-56: what counts of a prompt is its length, not how far it is computed."""
        adapter = make(index, 16)
        one = replace(start("r", 8, prompt=16), prompt_tokens=16)
        plans = [adapter.plan_step(facts(one))]
        plans.append(adapter.plan_step(facts(go_on("r", 11, prompt=16))))
        assert [1, 2, 3] == all_saved(plans)

    def test_what_a_failed_load_did_not_bring_is_saved_again(
        self, index: SetIndex
    ) -> None:
        """R-56: it was worth storing once, and a look from the limit on would come too late
        to see from where on it was computed anew."""
        adapter = make(index, 100)
        index.put(0, HASHES[:2])
        (order,) = load(adapter, "r", [1, 2])
        adapter.apply_report(
            StepReport(
                rank=0,
                loads_done=(order.transfer_id,),
                failures=(failure_of(order, 1),),
            )
        )
        again = scheduled("r", HASHES[:2], [[1, 2]], 4, 4, is_new=True)
        assert {0: [2]} == saved_blocks(adapter.plan_step(facts(again)))

    def test_states_of_short_requests_are_not_saved(self, index: SetIndex) -> None:
        """R-56: nor are they dropped: nobody wanted them."""
        layout = make_layout((4, None), (4, STATE))
        adapter = make_adapter(layout, index, shortest=9)
        one = scheduled(
            *("r", HASHES[:2], [[1, 2], [0, 7]], 0, 8),
            is_new=True,
            states=[StateOffer(1, 7, 8)],
            prompt=8,
        )
        assert {} == saved_blocks(adapter.plan_step(facts(one)))
        assert 0 == adapter.totals.dropped_blocks
