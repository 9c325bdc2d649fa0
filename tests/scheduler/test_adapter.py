# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of a connector: plans, ends and reports."""

import pytest

from tests.kit.consistency import validate
from tests.scheduler.model import (
    DIGEST,
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    failure_of,
    load,
    loaded,
    make_adapter,
    prefill,
    saved,
    saved_blocks,
    scheduled,
)
from ucm.blocks import PackedKey
from ucm.errors import LedgerError
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.messages import Deferral, StepPlan, StepReport
from ucm.scheduler.requests import Disposition, StepFacts


class TestPlans:
    def test_empty_facts_give_an_empty_plan(self, adapter: SchedulerAdapter) -> None:
        """S1-24: A step without any facts orders nothing and counts up."""
        assert StepPlan(
            keyspace_digest=DIGEST, step=1, is_idle=True
        ) == adapter.plan_step(StepFacts())
        assert StepPlan(
            keyspace_digest=DIGEST, step=2, is_idle=True
        ) == adapter.plan_step(StepFacts())

    def test_step_knows_if_idle(self, adapter: SchedulerAdapter) -> None:
        """R-02: a plan says whether its step computes anything."""
        plans = [
            adapter.plan_step(each) for each in (facts(prefill("r", [1])), facts())
        ]
        assert [False, True] == [plan.is_idle for plan in plans]

    def test_second_plan_without_news_is_empty(self, index: SetIndex) -> None:
        """S3-06: A plan resets what was for its step and leaves the facts alone."""
        adapter = make_adapter(ONE_FULL, index)
        index.put(0, HASHES[:2])
        adapter.blocks_allocated(
            "l", [[8, 9]], HASHES[:2], computed_tokens=0, external_tokens=8
        )
        told = facts(prefill("r", [1, 2]))
        plan = adapter.plan_step(told)
        assert (1, 1) == (len(plan.loads), len(plan.saves))
        assert told == facts(prefill("r", [1, 2]))
        again = facts(scheduled("r", HASHES[:2], [[1, 2]], 8, 1))
        assert StepPlan(keyspace_digest=DIGEST, step=2) == adapter.plan_step(again)

    def test_transfer_ids_are_never_used_again(self, adapter: SchedulerAdapter) -> None:
        """Every ticket has a number of its own, also after the first ones ended."""
        first = adapter.plan_step(facts(prefill("r", [1]))).saves
        adapter.apply_report(saved(*first))
        second = load(adapter, "s", [2])
        assert [1, 2] == [order.transfer_id for order in (*first, *second)]


class TestEnds:
    def test_deferral_is_answered_and_planned_once(
        self, adapter: SchedulerAdapter
    ) -> None:
        """S1-02: A request with holds is deferred, and workers are told once."""
        plan = adapter.plan_step(facts(prefill("r", [1])))
        assert Disposition.DEFER is adapter.request_finished("r")
        assert Disposition.DEFER is adapter.request_finished("r")
        adapter.apply_report(saved(*plan.saves))
        deferral = Deferral(request_id="r", generation=plan.saves[0].generation)
        assert (deferral,) == adapter.plan_step(StepFacts()).deferred
        assert () == adapter.plan_step(StepFacts()).deferred
        adapter.deferral_ended({"r"})
        assert adapter.is_idle
        assert Disposition.FREE_NOW is adapter.request_finished("r")

    def test_request_without_holds_is_free_now(self, on_two: SchedulerAdapter) -> None:
        """S1-02: Once every rank has released all, blocks are free at the end."""
        plan = on_two.plan_step(facts(prefill("r", [1]), prefill("s", [2])))
        for rank in range(2):
            on_two.apply_report(saved(*plan.saves, rank=rank))
        for request_id in ("r", "s"):
            assert Disposition.FREE_NOW is on_two.request_finished(request_id)
        assert on_two.plan_step(StepFacts()).is_empty
        assert on_two.is_idle

    def test_request_that_was_never_scheduled_is_free_now(
        self, adapter: SchedulerAdapter
    ) -> None:
        """S1-28: An abort before the first step is no error."""
        adapter.match_prefix("r", 9, HASHES[:2], 0)
        assert Disposition.FREE_NOW is adapter.request_finished("r")
        assert adapter.is_idle

    def test_used_again_id_starts_a_new_life(self, adapter: SchedulerAdapter) -> None:
        """S1-16: The holds of a finished request do not defer its successor."""
        first = adapter.plan_step(facts(prefill("r", [1])))
        adapter.request_finished("r")
        second = adapter.plan_step(
            facts(scheduled("r", HASHES[:1], [[2]], 0, 2, is_new=True))
        )
        assert (first.saves[0].generation,) == tuple(
            each.generation for each in second.deferred
        )
        assert Disposition.FREE_NOW is adapter.request_finished("r")

    def test_resumed_request_starts_afresh(self, adapter: SchedulerAdapter) -> None:
        """H-10: After a preemption no block id of the former life is used."""
        first = adapter.plan_step(facts(prefill("r", [1, 2])))
        adapter.apply_report(StepReport(rank=0, settled_saves=(1,)))
        adapter.plan_step(facts(preempted=["r", "unknown"]))
        second = adapter.plan_step(facts(prefill("r", [3, 4])))
        assert {0: [3, 4]} == saved_blocks(second)
        assert first.saves[0].generation < second.saves[0].generation
        adapter.apply_report(StepReport(rank=0, released=(2,)))
        # The hold of the former life is fenced by block and defers nothing.
        assert Disposition.FREE_NOW is adapter.request_finished("r")
        assert (1,) == adapter.plan_step(facts(prefill("s", [2]))).fences

    def test_resumption_without_word_of_a_preemption_starts_afresh(
        self, adapter: SchedulerAdapter
    ) -> None:
        """H-10: A running request that is new again has begun another life."""
        first = adapter.plan_step(facts(prefill("r", [1])))
        adapter.apply_report(saved(*first.saves))
        second = adapter.plan_step(facts(prefill("r", [2])))
        assert {0: [2]} == saved_blocks(second)
        assert first.saves[0].generation < second.saves[0].generation

    def test_preempted_and_loading_in_one_step_keeps_theload(
        self, adapter: SchedulerAdapter
    ) -> None:
        """S1-16: A preemption ends the life that ran, not the one that loads now."""
        adapter.plan_step(facts(prefill("r", [1])))
        adapter.blocks_allocated(
            "r", [[2]], HASHES[:1], computed_tokens=0, external_tokens=4
        )
        plan = adapter.plan_step(facts(preempted=["r"]))
        adapter.apply_report(loaded(*plan.loads))
        request = scheduled("r", HASHES[:2], [[2, 3]], 4, 4, is_new=True)
        assert {0: [3]} == saved_blocks(adapter.plan_step(facts(request)))
        generation = plan.loads[0].generation
        assert Disposition.DEFER is adapter.request_finished("r")
        (deferral,) = adapter.plan_step(StepFacts()).deferred
        assert generation == deferral.generation


class TestReports:
    def test_failed_runtime_stops_new_work_only(
        self, adapter: SchedulerAdapter, index: SetIndex
    ) -> None:
        """In bypass nothing is matched or saved; fences and deferrals go on."""
        index.put(0, HASHES[:2])
        plan = adapter.plan_step(facts(prefill("r", [1])))
        adapter.apply_report(StepReport(rank=0, healthy=False))
        adapter.apply_report(StepReport(rank=0))
        assert adapter.bypass
        expected = PrefixMatch(0, MatchReason.BYPASS)
        assert expected == adapter.match_prefix("s", 9, HASHES[:2], 0)
        adapter.request_finished("r")
        after = adapter.plan_step(facts(prefill("s", [1])))
        assert (plan.saves[0].transfer_id,) == after.fences
        assert ((), 1) == (after.saves, len(after.deferred))

    def test_nothing_is_saved_in_bypass(self, adapter: SchedulerAdapter) -> None:
        """S2-13: blocks that nobody saves yet are not ordered from a dead worker."""
        adapter.apply_report(StepReport(rank=0, healthy=False))
        assert () == adapter.plan_step(facts(prefill("r", [1, 2]))).saves
        assert 0 == adapter.counts()["holds"]

    def test_promised_load_is_ordered_in_bypass(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A load that the engine waits for is ordered, so that a worker can fail it."""
        adapter.apply_report(StepReport(rank=0, healthy=False))
        assert 1 == len(load(adapter, "r", [1]))

    def test_unknown_tickets_are_counted_and_passed_over(
        self, adapter: SchedulerAdapter
    ) -> None:
        """A report of tickets that are not open is no error."""
        adapter.apply_report(
            StepReport(
                rank=0,
                released=(91,),
                quarantined=(92,),
                settled_saves=(93,),
                loads_done=(94,),
            )
        )
        assert 4 == adapter.totals.stray_reports
        assert adapter.is_idle

    def test_rank_that_releases_twice_is_a_bug(self, on_two: SchedulerAdapter) -> None:
        """A rank that releases a hold twice must not release it for another."""
        plan = on_two.plan_step(facts(prefill("r", [1])))
        number = plan.saves[0].transfer_id
        on_two.apply_report(StepReport(rank=0, released=(number,)))
        with pytest.raises(LedgerError, match="rank 0 does not hold"):
            on_two.apply_report(StepReport(rank=0, released=(number,)))

    def test_quarantined_hold_defers_no_request(
        self, adapter: SchedulerAdapter
    ) -> None:
        """R-16: blocks under a save that was given up go back to the engine; what it
        still reads is published by nobody."""
        plan = adapter.plan_step(facts(prefill("r", [1])))
        number = plan.saves[0].transfer_id
        adapter.apply_report(
            StepReport(rank=0, quarantined=(number,), unstored_saves=(number,))
        )
        assert Disposition.FREE_NOW is adapter.request_finished("r")
        again = adapter.plan_step(facts(prefill("s", [1])))
        assert number not in again.fences
        assert 1 == adapter.totals.quarantined_holds
        adapter.apply_report(saved(*again.saves))
        adapter.request_finished("s")
        assert adapter.is_idle

    def test_validate_sees_a_life_that_loads_andsaved_blocks(
        self, index: SetIndex
    ) -> None:
        """A life with open loads and holds would be reported in both directions."""
        adapter = make_adapter(ONE_FULL, index)
        adapter.plan_step(facts(prefill("r", [1])))
        life = adapter._lives.get("r")
        assert life is not None
        adapter._lives.waits(life, [99])
        with pytest.raises(LedgerError, match="loads and saves at once"):
            validate(adapter)


@pytest.mark.slow
def test_ten_thousand_requests_of_all_outcomes_leave_nothing(
    adapter: SchedulerAdapter,
) -> None:
    """S1-15: Nothing is kept of 10 000 requests, however each of them ended."""
    for number in range(10_000):
        name = f"r{number}"
        match number % 6:
            case 0:  # aborted before it ran
                adapter.match_prefix(name, 9, HASHES[:2], 0)
            case 1:  # saved and released before it ended
                plan = adapter.plan_step(facts(prefill(name, [1])))
                adapter.apply_report(saved(*plan.saves))
            case 2:  # deferred
                plan = adapter.plan_step(facts(prefill(name, [1])))
                assert Disposition.DEFER is adapter.request_finished(name)
                adapter.plan_step(StepFacts())
                adapter.apply_report(saved(*plan.saves))
                adapter.deferral_ended({name})
            case 3:  # preempted and aborted
                plan = adapter.plan_step(facts(prefill(name, [1])))
                adapter.plan_step(facts(preempted=[name]))
                adapter.apply_report(saved(*plan.saves))
            case 4:  # loaded
                adapter.apply_report(loaded(*load(adapter, name, [1])))
                adapter.loads_finished({name})
            case _:  # aborted while it loaded, and the load failed
                (order,) = load(adapter, name, [1])
                adapter.request_finished(name)
                failed = failure_of(order, None)
                adapter.apply_report(StepReport(rank=0, failures=(failed,)))
                adapter.apply_report(loaded(order))
                adapter.loads_finished({name})
        assert Disposition.FREE_NOW is adapter.request_finished(name)
    assert {0} == set(adapter.counts().values())
    assert 0 == adapter.totals.stray_reports


def test_asking_changes_nothing(adapter: SchedulerAdapter, index: SetIndex) -> None:
    """S3-07: Any number of look-ups leaves the adapter and the store as they were."""
    index.put(0, HASHES[:4])
    stored: set[PackedKey] = set(index.keys)  # type: ignore[arg-type]
    answers = {adapter.match_prefix("r", 17, HASHES[:4], 0) for _ in range(3)}
    assert {PrefixMatch(16, MatchReason.HIT)} == answers
    assert adapter.is_idle
    assert (stored, []) == (index.keys, index.touched)
