# SPDX-License-Identifier: Apache-2.0
"""Saves that wait for others, so that they share a ticket."""

from collections.abc import Callable

import pytest

from tests.scheduler.model import (
    DIGEST,
    HYBRID,
    ONE_FULL,
    SetIndex,
    facts,
    hashes_of,
    make_adapter,
    saved,
    saved_blocks,
    scheduled,
)
from tests.scheduler.test_decoded import AT_END, all_saved
from ucm.config import SaveDecoded
from ucm.layout import KVLayout
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.company import MOST_STEPS, Company, most_waiting
from ucm.scheduler.lives import Life
from ucm.scheduler.messages import StepPlan, StepReport
from ucm.scheduler.records import Record
from ucm.scheduler.requests import (
    Disposition,
    RequestEnd,
    ScheduledRequest,
    StepFacts,
)
from ucm.scheduler.shares import Run, Stay

SIZE = ONE_FULL.max_block_bytes
BUSY = None
Make = Callable[..., SchedulerAdapter]


@pytest.fixture
def make(index: SetIndex) -> Make:
    """Return what makes adapters in which less than four blocks wait."""

    def made(decoded: SaveDecoded = AT_END, **options: int) -> SchedulerAdapter:
        given = {"company": 4 * SIZE, **options}
        return make_adapter(ONE_FULL, index, decoded=decoded, **given)

    return made


def start(name: str, *blocks: int) -> ScheduledRequest:
    """Return the facts of a request that computes whole blocks, which are its prompt."""
    tokens = 4 * len(blocks)
    hashes = hashes_of(name, len(blocks))
    return scheduled(name, hashes, [blocks], 0, tokens, is_new=True, prompt=tokens)


def end(name: str, *blocks: int, prompt: int) -> RequestEnd:
    """Return what there is of a request whose blocks are whole."""
    return RequestEnd(
        computed_tokens=4 * len(blocks),
        known_tokens=4 * len(blocks) + 1,
        prompt_tokens=prompt,
        hashes=hashes_of(name, len(blocks)),
        tables=[blocks],
    )


def owners(plan: StepPlan) -> list[list[str]]:
    """Return whose the tickets of a plan are."""
    return [[owner.request_id for owner in order.owners] for order in plan.saves]


class TestWaiting:
    def test_few_blocks_of_several_steps_share_a_ticket(self, make: Make) -> None:
        """R-18: three requests that begin one after the other cost the workers one ticket
        and not three, as soon as there is enough for it."""
        adapter = make()
        plans = [
            adapter.plan_step(facts(start("a", 1))),
            adapter.plan_step(facts(start("b", 2))),
            adapter.plan_step(facts(start("c", 3, 4))),
        ]
        assert [(), (), ()] == [plan.saves for plan in plans]
        plan = adapter.plan_step(BUSY)
        assert [["a", "b", "c"]] == owners(plan)
        assert {0: [1, 2, 3, 4]} == saved_blocks(plan)
        adapter.apply_report(saved(*plan.saves))
        assert 4 == adapter.totals.saved_blocks

    @pytest.mark.parametrize(
        ("layout", "seconds", "tokens"),
        [(ONE_FULL, 10.0, 4), (ONE_FULL, 0.0, 0), (HYBRID, 10.0, 0)],
    )
    def test_looks_wait_for_others_as_saves_do(
        self, index: SetIndex, layout: KVLayout, seconds: float, tokens: int
    ) -> None:
        """R-18: where all blocks stay where they are, and nowhere else."""
        given = {"company": 4 * SIZE, "company_seconds": seconds}
        adapter = make_adapter(layout, index, decoded=AT_END, **given)
        assert tokens == adapter.due.patience

    def test_whoever_is_alone_waits_for_some_steps_only(self, make: Make) -> None:
        """Blocks of one request go without others, and whoever comes then goes along."""
        adapter = make()
        assert () == adapter.plan_step(facts(start("a", 1))).saves
        for _ in range(MOST_STEPS - 1):
            assert () == adapter.plan_step(BUSY).saves
        assert [["a", "b"]] == owners(adapter.plan_step(facts(start("b", 2))))
        assert () == adapter.plan_step(facts(start("c", 3))).saves
        assert () == adapter.plan_step(BUSY).saves

    def test_nobody_waits_longer_than_is_allowed(self, make: Make) -> None:
        """Where steps take long, blocks go when their time is over."""
        adapter = make(company_seconds=2)
        adapter.tick(7.0)
        adapter.plan_step(facts(start("a", 1)))
        adapter.tick(8.9)
        assert () == adapter.plan_step(BUSY).saves
        adapter.tick(9.0)
        assert {0: [1]} == saved_blocks(adapter.plan_step(BUSY))

    def test_time_begins_with_the_step_that_lets_wait(self, make: Make) -> None:
        """However late the next step is, and also of a request that has ended."""
        adapter = make(company_seconds=2)
        adapter.tick(7.0)
        adapter.plan_step(facts(start("a", 1)))
        adapter.tick(9.0)
        assert {0: [1]} == saved_blocks(adapter.plan_step(BUSY))
        adapter.request_finished("a", end("a", 1, 2, prompt=4))
        adapter.tick(10.0)
        assert () == adapter.plan_step(BUSY).saves
        adapter.tick(11.0)
        assert {0: [2]} == saved_blocks(adapter.plan_step(BUSY))

    def test_step_that_computes_nothing_takes_all(self, make: Make) -> None:
        """No other step may follow."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1)))
        assert (1, True) == (adapter.counts()["waiting"], adapter.awaits_step())
        assert {0: [1]} == saved_blocks(adapter.plan_step(StepFacts(is_idle=True)))
        assert (0, False) == (adapter.counts()["waiting"], adapter.awaits_step())

    def test_engine_is_not_kept_awake_by_what_nobody_saves(self, make: Make) -> None:
        """Neither while the weights are doubted, nor once a worker has failed."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1)))
        adapter.doubt(1)
        assert not adapter.awaits_step()
        adapter.rekey(DIGEST)
        adapter.plan_step(facts(start("b", 2)))
        adapter.apply_report(StepReport(rank=0, healthy=False))
        assert () == adapter.plan_step(StepFacts(is_idle=True)).saves
        assert not adapter.awaits_step()
        for name, block in (("a", 1), ("b", 2)):
            adapter.request_finished(name, end(name, block, prompt=4))
        assert (2, True) == (adapter.totals.dropped_blocks, adapter.is_idle)

    def test_engine_is_not_kept_awake_by_who_is_gone(self, make: Make) -> None:
        """Nothing waits of a request that was aborted, and nobody else's does."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1)))
        adapter.request_finished("a", None)
        assert (0, False) == (adapter.counts()["waiting"], adapter.awaits_step())

    def test_what_fills_a_ticket_does_not_wait(self, make: Make) -> None:
        """A long prompt is saved in its own step, behind what came before of it."""
        adapter = make(SaveDecoded.EACH_BLOCK)
        adapter.plan_step(facts(start("a", 1)))
        more = scheduled(*("a", hashes_of("a", 5), [[1, 2, 3, 4, 5]], 4, 16), prompt=20)
        plan = adapter.plan_step(facts(more))
        assert {0: [1, 2, 3, 4, 5]} == saved_blocks(plan)
        assert () == adapter.plan_step(StepFacts(is_idle=True)).saves

    def test_what_waited_goes_before_the_same_request_s_later_blocks(
        self, make: Make
    ) -> None:
        """R-18: of one life the earlier blocks are in tickets that come first, whoever
        waited behind it, and none owns a ticket twice."""
        adapter = make(SaveDecoded.EACH_BLOCK)
        adapter.plan_step(facts(start("a", 1, 2), start("b", 3, 4)))
        table = [1, 2, *range(11, 18)]
        more = scheduled(*("a", hashes_of("a", 9), [table], 8, 28), prompt=36)
        plan = adapter.plan_step(facts(more))
        assert [["a"], ["a", "b"]] == owners(plan)
        assert {0: [*table, 3, 4]} == saved_blocks(plan)

    def test_blocks_of_windows_do_not_wait(self, index: SetIndex) -> None:
        """The engine takes them back in the next step."""
        adapter = make_adapter(HYBRID, index, company=100 * SIZE)
        request = scheduled(
            *("a", hashes_of("a", 4), [[1, 2, 3, 4], [5, 6]], 0, 16),
            is_new=True,
            prompt=16,
        )
        assert {1: [5, 6]} == saved_blocks(adapter.plan_step(facts(request)))
        plan = adapter.plan_step(StepFacts(is_idle=True))
        assert {0: [1, 2, 3, 4]} == saved_blocks(plan)

    def test_plan_without_room_leaves_the_rest_to_the_next(self, make: Make) -> None:
        """What waited goes at the pace of plans, each block once."""
        adapter = make(max_step_blocks=3)
        for name, blocks in (("a", (1, 2)), ("b", (3, 4))):
            assert () == adapter.plan_step(facts(start(name, *blocks))).saves
        plans = [adapter.plan_step(BUSY) for _ in range(3)]
        assert [3, 1, 0] == [len(all_saved([plan])) for plan in plans]

    @pytest.mark.parametrize("options", [{"company": 0}, {"company_seconds": 0}])
    def test_nothing_waits_where_it_is_not_wanted(
        self, make: Make, options: dict[str, int]
    ) -> None:
        """A single block is saved in its own step."""
        adapter = make(**options)
        assert {0: [1]} == saved_blocks(adapter.plan_step(facts(start("a", 1))))

    @pytest.mark.parametrize(("pool", "most"), [(1600, 90), (800, 50), (15, 0)])
    def test_small_part_of_the_engines_blocks_waits(self, pool: int, most: int) -> None:
        """However large a ticket may be, and a ticket's at most."""
        assert most == most_waiting(90, pool)


class TestTurns:
    def test_blocks_that_wait_as_a_session_goes_on_are_saved_and_not_counted_as_dropped(
        self, make: Make
    ) -> None:
        """The engine has taken nothing back: the next life has the blocks, and they are its
        own. Nor was the request preempted, as its story would tell."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1, 2)))
        hashes = hashes_of("a", 3)
        turn = scheduled("a", hashes, [[1, 2, 3]], 9, 3, is_new=True, prompt=12)
        adapter.plan_step(facts(turn))
        plan = adapter.plan_step(StepFacts(is_idle=True))
        assert {0: [1, 2, 3]} == saved_blocks(plan)
        assert 0 == adapter.totals.dropped_blocks
        record = adapter.records.present["a"]
        assert (0, 0) == (record.preemptions, record.dropped_blocks)


class TestEnds:
    def test_request_that_ends_takes_what_waited_along(self, make: Make) -> None:
        """Its blocks are kept until the plan that saves them, in one piece, which comes
        when there is enough, and the plan that has them defers it."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1)))
        left = end("a", 1, 2, prompt=4)
        assert Disposition.DEFER is adapter.request_finished("a", left)
        plan = adapter.plan_step(BUSY)
        assert ((), ()) == (plan.saves, plan.deferred)
        adapter.plan_step(facts(start("b", 3)))
        plan = adapter.plan_step(BUSY)
        assert {0: [1, 2, 3]} == saved_blocks(plan)
        assert [["a", "b"]] == owners(plan)
        assert ["a"] == [each.request_id for each in plan.deferred]

    def test_blocks_beyond_what_was_accepted_are_not_saved(self, make: Make) -> None:
        """What a step was to compute when the request was aborted is left out."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1, 2)))
        left = RequestEnd(
            computed_tokens=4,
            known_tokens=9,
            prompt_tokens=8,
            hashes=hashes_of("a", 2),
            tables=[[1, 2]],
        )
        adapter.request_finished("a", left)
        plan = adapter.plan_step(StepFacts(is_idle=True))
        assert {0: [1]} == saved_blocks(plan)

    def test_preempted_request_saves_nothing_and_others_go(self, make: Make) -> None:
        """Its blocks are another's; they count as dropped, and where memory is short
        nobody waits."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1), start("b", 2)))
        plan = adapter.plan_step(StepFacts(preempted={"a": 4}, is_idle=False))
        assert {0: [2]} == saved_blocks(plan)
        assert 1 == adapter.totals.dropped_blocks
        assert {0: [3]} == saved_blocks(adapter.plan_step(facts(start("c", 3))))

    def test_blocks_of_a_former_life_are_not_saved(self, make: Make) -> None:
        """An id that is used again has other blocks."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1)))
        adapter.blocks_allocated(
            "a", [[2]], hashes_of("a", 1), computed_tokens=0, external_tokens=4
        )
        plan = adapter.plan_step(StepFacts(is_idle=True))
        assert ((), [(2,)]) == (plan.saves, [each.block_ids for each in plan.loads])

    def test_what_a_former_life_leaves_counts_as_dropped(self, make: Make) -> None:
        """R-18: whether the next one begins with a load or as a new request."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1), start("b", 2)))
        adapter.blocks_allocated(
            "a", [[3]], hashes_of("a", 1), computed_tokens=0, external_tokens=4
        )
        assert 1 == adapter.totals.dropped_blocks
        adapter.plan_step(facts(start("b", 4)))
        assert 2 == adapter.totals.dropped_blocks

    def test_life_that_is_taken_back_and_goes_on_with_a_load_counts_as_preempted(
        self, make: Make
    ) -> None:
        """R-18: in one step, as an engine does that resets its cache: what the life had
        decoded and nobody saved is dropped, and its record says that it was preempted."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1)))
        adapter.blocks_allocated(
            *("a", [[4]], hashes_of("a", 3)),
            computed_tokens=0,
            external_tokens=4,
            known_tokens=12,
        )
        adapter.plan_step(StepFacts(preempted={"a": 12}, is_idle=False))
        record = adapter.records.present["a"]
        assert (3, 3) == (adapter.totals.dropped_blocks, record.dropped_blocks)
        assert 1 == record.preemptions

    def test_doubt_about_the_weights_drops_what_waits(self, make: Make) -> None:
        """What was computed before is not saved under the key space of later."""
        adapter = make()
        adapter.plan_step(facts(start("a", 1)))
        adapter.doubt(1)
        adapter.rekey(DIGEST)
        assert () == adapter.plan_step(StepFacts(is_idle=True)).saves
        adapter.request_finished("a", end("a", 1, prompt=4))
        assert (1, True) == (adapter.totals.dropped_blocks, adapter.is_idle)

    def test_life_that_is_not_saved_any_more_waits_for_nothing(self) -> None:
        """What a request computed on bad blocks does not go with others' blocks."""
        company, taken = Company(4 * SIZE, 1.0), []
        for name in "ab":
            life = Life(key=(name, 1), stay=Stay(name, 1), record=Record(name))
            company.put(life, 0, Run(0, (1,), hashes_of(name, 1)), SIZE)
            life.may_save = name == "b"
        assert 1 == len(company)
        company.leave(lambda left: taken.extend(stay.request_id for stay, _ in left))
        assert ["b"] == taken
