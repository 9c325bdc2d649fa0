# SPDX-License-Identifier: Apache-2.0
"""What a consumer saves: blocks that it decodes, and none within a prompt."""

import pytest

from tests.scheduler.model import (
    HASHES,
    STATE,
    SetIndex,
    facts,
    make_adapter,
    make_layout,
    saved,
    saved_blocks,
    scheduled,
)
from tests.scheduler.test_decoded import TABLE, all_saved, decode, end, go_on, start
from ucm.config import SaveDecoded
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.requests import Disposition, RequestEnd, StateOffer, StepFacts

FULL = make_layout((4, None))
WAYS = [SaveDecoded.AT_END, SaveDecoded.EACH_BLOCK]


def make(
    index: SetIndex, decoded: SaveDecoded, span_blocks: int = 8
) -> SchedulerAdapter:
    """Return an adapter that saves no prompts."""
    return make_adapter(
        FULL, index, decoded=decoded, prompts=False, span_blocks=span_blocks
    )


class TestDecoded:
    @pytest.mark.parametrize("decoded", WAYS)
    def test_only_blocks_behind_the_prompt_are_saved(
        self, index: SetIndex, decoded: SaveDecoded
    ) -> None:
        """Of a prompt of two and a half blocks and its answer the third block and those
        behind it are saved, and nothing counts as dropped."""
        adapter = make(index, decoded)
        plans = [adapter.plan_step(facts(start("r", 10, prompt=10)))]
        plans += decode(adapter, "r", range(10, 22), prompt=10)
        for plan in plans:
            adapter.apply_report(saved(*plan.saves))
        adapter.request_finished("r", end(23, prompt=10))
        plans.append(adapter.plan_step(StepFacts()))
        assert [3, 4, 5] == all_saved(plans)
        assert 0 == adapter.totals.dropped_blocks

    def test_prompt_in_pieces_is_passed_over(self, index: SetIndex) -> None:
        """R-18: while a prompt is computed piece by piece no block of it is taken, and the
        next look is due when the first decoded block is whole."""
        adapter = make(index, SaveDecoded.EACH_BLOCK)
        first = scheduled("r", HASHES[:3], [TABLE[:4]], 0, 5, is_new=True, prompt=12)
        assert () == adapter.plan_step(facts(first)).saves
        assert 16 == adapter.due["r"]
        plan = adapter.plan_step(facts(go_on("r", 15, prompt=12)))
        assert {0: [4]} == saved_blocks(plan)

    def test_full_span_is_counted_from_the_prompt_on(self, index: SetIndex) -> None:
        """R-18: with ``at_end`` nobody is told of the request before a span is full."""
        adapter = make(index, SaveDecoded.AT_END, span_blocks=2)
        adapter.plan_step(facts(start("r", 8, prompt=8)))
        assert 16 == adapter.due["r"]
        plans = decode(adapter, "r", range(8, 16), prompt=8)
        assert [3, 4] == all_saved(plans)

    def test_prompt_alone_leaves_nothing(self, index: SetIndex) -> None:
        """A request without an answer gives its blocks back at once."""
        adapter = make(index, SaveDecoded.AT_END)
        adapter.plan_step(facts(start("r", 8, prompt=8)))
        answer = adapter.request_finished("r", end(9, prompt=8))
        assert (Disposition.FREE_NOW, 0) == (answer, adapter.totals.dropped_blocks)

    def test_life_after_a_preemption_saves_what_was_decoded_before(
        self, index: SetIndex
    ) -> None:
        """What the request decoded in a former life is no prompt in the next one."""
        adapter = make(index, SaveDecoded.AT_END)
        adapter.plan_step(facts(start("r", 8, prompt=8)))
        decode(adapter, "r", range(8, 15), prompt=8)
        adapter.plan_step(StepFacts(preempted={"r": 15}, is_idle=False))
        assert [3] == all_saved([adapter.plan_step(facts(start("r", 15, prompt=8)))])


class TestTurns:
    @pytest.mark.parametrize("company", [0, 1 << 20])
    @pytest.mark.parametrize("decoded", WAYS)
    def test_answers_of_a_session_are_saved_although_they_are_prompt_of_its_next_turn(
        self, index: SetIndex, decoded: SaveDecoded, company: int
    ) -> None:
        """What the consumer decodes in one turn, and what streams in behind it, no producer
        has: only the first turn's prompt is left out, and nothing counts as dropped."""
        options = {"decoded": decoded, "prompts": False, "company": company}
        adapter = make_adapter(FULL, index, **options)
        plans = [adapter.plan_step(facts(start("r", 8, prompt=8)))]
        plans += decode(adapter, "r", range(8, 17), prompt=8)
        turn = scheduled("r", HASHES[:6], [TABLE[:7]], 17, 7, is_new=True, prompt=24)
        plans.append(adapter.plan_step(facts(turn)))
        plans += decode(adapter, "r", range(24, 28), prompt=24)
        adapter.request_finished("r", end(29, prompt=24))
        plans.append(adapter.plan_step(StepFacts()))
        assert [3, 4, 5, 6, 7] == sorted(all_saved(plans))
        assert 0 == adapter.totals.dropped_blocks

    def test_answer_of_a_turn_is_saved_after_a_preemption_in_the_next(
        self, index: SetIndex
    ) -> None:
        """What is computed anew then is no prompt of the first turn either."""
        adapter = make(index, SaveDecoded.AT_END)
        adapter.plan_step(facts(start("r", 8, prompt=8)))
        decode(adapter, "r", range(8, 15), prompt=8)
        turn = scheduled("r", HASHES[:5], [TABLE[:6]], 15, 5, is_new=True, prompt=20)
        plan = adapter.plan_step(facts(turn))
        assert [3, 4, 5] == all_saved([plan])
        adapter.apply_report(saved(*plan.saves))
        adapter.plan_step(StepFacts(preempted={"r": 20}, is_idle=False))
        plan = adapter.plan_step(facts(start("r", 20, prompt=20)))
        assert [3, 4, 5] == all_saved([plan])


class TestKinds:
    @pytest.mark.parametrize(("prompt", "states"), [(8, [7]), (12, [])])
    def test_windows_and_states_within_the_prompt_are_left_alone(
        self, index: SetIndex, prompt: int, states: list[int]
    ) -> None:
        """The state at the prompt's own end is the producer's; the next one is saved with
        the block of each other group."""
        layout = make_layout((4, None), (4, 9), (4, STATE))
        adapter = make_adapter(layout, index, prompts=False)
        tables = [[1, 2, 3], [4, 5, 6], [0, 0, 7]]
        request = scheduled(
            *("r", HASHES[:3], tables, 0, 12),
            is_new=True,
            states=[StateOffer(2, 7, 12)],
            prompt=prompt,
        )
        found = saved_blocks(adapter.plan_step(facts(request)))
        blocks = [] if prompt == 12 else [3], [] if prompt == 12 else [6]
        assert (*blocks, states) == tuple(found.get(at, []) for at in range(3))
        left = RequestEnd(
            computed_tokens=12,
            known_tokens=13,
            prompt_tokens=prompt,
            hashes=HASHES[:3],
            tables=tables,
        )
        adapter.request_finished("r", left)
        assert () == adapter.plan_step(StepFacts()).saves
        assert 0 == adapter.totals.dropped_blocks
