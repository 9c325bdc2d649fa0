# SPDX-License-Identifier: Apache-2.0
"""Requests that end in the step that loads, before anybody was told how the load went."""

import pytest

from tests.kit.consistency import validate
from tests.scheduler.model import (
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    failure_of,
    loaded,
    make_adapter,
    saved,
    saved_blocks,
    scheduled,
)
from ucm.config import SaveDecoded
from ucm.reasons import MissReason, Reason
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import SpanOrder, StepReport
from ucm.scheduler.misses import Miss
from ucm.scheduler.requests import (
    NO_WISHES,
    Disposition,
    RequestEnd,
    StepFacts,
    Wishes,
)

TABLE = [1, 2, 3, 4]


@pytest.fixture
def index() -> SetIndex:
    """Return an index that has two blocks of the prompt."""
    index = SetIndex()
    index.put(0, HASHES[:2], shards=2)
    return index


def make(index: SetIndex, *, parks: bool = False, **options: int) -> SchedulerAdapter:
    """Return an adapter whose requests run in the step that loads."""
    return make_adapter(
        *(ONE_FULL, index),
        parks=parks,
        full_hits=False,
        decoded=SaveDecoded.AT_END,
        **options,
    )


def load(adapter: SchedulerAdapter) -> tuple[SpanOrder, ...]:
    """Let a request load half of its prompt and compute the rest in one step."""
    assert 8 == adapter.match_prefix("r", 16, HASHES[:4], 0).tokens
    adapter.blocks_allocated(
        "r", [TABLE], HASHES[:4], computed_tokens=0, external_tokens=8
    )
    request = scheduled("r", HASHES[:4], [TABLE], 8, 8, is_new=True, prompt=16)
    plan = adapter.plan_step(facts(request))
    assert () == plan.saves
    return plan.loads


def end(adapter: SchedulerAdapter, wishes: Wishes = NO_WISHES) -> Disposition:
    """End the request behind its first token."""
    return adapter.request_finished(
        "r",
        RequestEnd(
            computed_tokens=16,
            known_tokens=17,
            prompt_tokens=16,
            hashes=HASHES[:4],
            tables=[TABLE],
            wishes=wishes,
        ),
    )


def miss_of(adapter: SchedulerAdapter) -> Miss | None:
    """Return why the next request with this prompt finds less than all."""
    match = adapter.match_prefix("s", 17, HASHES[:4], 0)
    return adapter.misses.explain(match, 0, lambda _: None)


def test_what_a_request_computes_that_ends_before_its_load_is_told_over_is_saved(
    index: SetIndex,
) -> None:
    """The plan behind the load's end on the last rank has all that was computed, and defers
    the request; none before it does. The load counts as one that was used."""
    adapter = make(index, num_ranks=2, shards=2)
    orders = load(adapter)
    assert Disposition.DEFER is end(adapter)
    for rank in range(2):
        plan = adapter.plan_step(StepFacts())
        assert ((), ()) == (plan.saves, plan.deferred)
        assert adapter.lives.loading()
        adapter.apply_report(loaded(*orders, rank=rank))
        validate(adapter)
    plan = adapter.plan_step(StepFacts())
    assert {0: [3, 4]} == saved_blocks(plan)
    assert HASHES[2:4] == plan.saves[0].split_hashes()
    assert ["r"] == [each.request_id for each in plan.deferred]
    for rank in range(2):
        adapter.apply_report(saved(*plan.saves, rank=rank))
    adapter.deferral_ended({"r"})
    assert adapter.is_idle
    totals = adapter.totals
    assert (8, 2, 0) == (
        totals.loaded_tokens,
        totals.loaded_blocks,
        totals.dropped_blocks,
    )
    (record,) = adapter.records.take()
    assert (8, 2, 0) == (
        record.loaded_tokens,
        record.saved_blocks,
        record.dropped_blocks,
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_nothing_is_saved_of_one_whose_load_fails_on_any_rank(
    index: SetIndex, failing: int
) -> None:
    """What stands on a load that failed is garbage: it counts as dropped, a later miss says
    why, and the engine has its blocks back."""
    adapter = make(index, num_ranks=2, shards=2)
    (order,) = load(adapter)
    assert Disposition.DEFER is end(adapter)
    for rank in range(2):
        failures = (failure_of(order, at=None),) if rank == failing else ()
        done = (order.transfer_id,)
        adapter.apply_report(StepReport(rank=rank, loads_done=done, failures=failures))
    plan = adapter.plan_step(StepFacts())
    assert ((), ["r"]) == (plan.saves, [each.request_id for each in plan.deferred])
    adapter.deferral_ended({"r"})
    assert adapter.is_idle
    assert {} == adapter.due
    totals = adapter.totals
    assert (2, 0, 1) == (
        totals.dropped_blocks,
        totals.loaded_blocks,
        totals.failed_loads[Reason.EVICTED],
    )
    miss = miss_of(adapter)
    assert miss is not None
    assert (MissReason.FAILED, "load_failed") == (miss.reason, miss.detail["text"])


def test_another_that_ended_passes_one_whose_load_is_open(index: SetIndex) -> None:
    """A load that hangs holds up the saves of nobody else."""
    adapter = make(index)
    load(adapter)
    end(adapter)
    other = scheduled("s", HASHES[4:5], [[9, 10]], 0, 4, is_new=True, prompt=4)
    adapter.apply_report(saved(*adapter.plan_step(facts(other)).saves))
    left = RequestEnd(
        computed_tokens=8,
        known_tokens=9,
        prompt_tokens=4,
        hashes=HASHES[4:6],
        tables=[[9, 10]],
    )
    adapter.request_finished("s", left)
    plan = adapter.plan_step(StepFacts())
    assert ({0: [10]}, ["s"]) == (
        saved_blocks(plan),
        [each.request_id for each in plan.deferred],
    )


def test_blocks_are_not_kept_for_ever_for_a_load_that_does_not_end(
    index: SetIndex,
) -> None:
    """As any that waits for too long it is dropped and counted, and then deferred."""
    adapter = make(index)
    load(adapter)
    end(adapter)
    for now, deferred in ((0.0, 0), (29.0, 0), (30.0, 1)):
        adapter.tick(now)
        plan = adapter.plan_step(StepFacts())
        assert ((), deferred) == (plan.saves, len(plan.deferred))
    assert 2 == adapter.totals.dropped_blocks
    miss = miss_of(adapter)
    assert miss is not None
    assert "not_taken" == miss.detail["text"]


@pytest.mark.parametrize("what", ["parks", "doubt", "nothing_left", "short", "wish"])
def test_one_that_leaves_nothing_to_save_is_not_waited_for(
    index: SetIndex, what: str
) -> None:
    """Where requests park the engine waits for the load itself, and waiting for it in both
    directions would crash it; elsewhere nobody waits where nothing is to be saved."""
    shortest = 20 if what == "short" else 0
    adapter = make(index, parks=what == "parks", shortest=shortest)
    orders = load(adapter)
    if what == "doubt":
        adapter.doubt(1)
    if what == "nothing_left":
        index.put(0, HASHES[2:4])
    wishes = Wishes(most_saved=8) if what == "wish" else NO_WISHES
    if what == "wish":
        adapter.lives.loading()[0].most_saved = 8
    assert Disposition.FREE_NOW is end(adapter, wishes)
    adapter.apply_report(loaded(*orders))
    plan = adapter.plan_step(StepFacts())
    assert ((), ()) == (plan.saves, plan.deferred)
    assert 0 == adapter.counts()["lives"]


def test_one_that_shares_the_blocks_that_another_loads_waits_for_its_load(
    index: SetIndex,
) -> None:
    """An engine shares blocks of a load at once: what stands on them is garbage if it fails,
    and saved behind it if not."""
    adapter = make(index)
    orders = load(adapter)
    table = [1, 2, 8]
    hashes = [*HASHES[:2], HASHES[9]]
    adapter.plan_step(
        facts(scheduled("s", hashes, [table], 8, 4, is_new=True, prompt=12))
    )
    left = RequestEnd(
        computed_tokens=12,
        known_tokens=13,
        prompt_tokens=12,
        hashes=hashes,
        tables=[table],
    )
    assert Disposition.DEFER is adapter.request_finished("s", left)
    assert () == adapter.plan_step(StepFacts()).saves
    adapter.apply_report(loaded(*orders))
    assert {0: [8]} == saved_blocks(adapter.plan_step(StepFacts()))
