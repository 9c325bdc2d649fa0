# SPDX-License-Identifier: Apache-2.0
"""A step of which nothing is to be told is planned by a shorter way, to the same end."""

from collections.abc import Callable

import attrs
import pytest

from tests.scheduler.model import (
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    make_adapter,
)
from tests.scheduler.test_company import end, start
from tests.scheduler.test_decoded import AT_END
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import StepPlan, StepReport
from ucm.scheduler.requests import StepFacts

_SIZE = ONE_FULL.max_block_bytes


@attrs.frozen(kw_only=True)
class _Told(StepFacts):
    """Facts that are gone through, whatever they are."""

    @property
    def is_of_nobody(self) -> bool:
        """Say that somebody is told of."""
        return False


def _over(plan: StepPlan) -> StepReport:
    """Return the report that a plan's saves are over."""
    over = tuple(order.transfer_id for order in plan.saves)
    return StepReport(rank=0, released=over, settled_saves=over)


def _nothing(adapter: SchedulerAdapter) -> None:
    """Leave the adapter as it is."""


def _load(adapter: SchedulerAdapter) -> None:
    """Leave the load of a request to a later plan."""
    for name, blocks in (("l", [8, 9]), ("m", [10, 11])):
        adapter.blocks_allocated(
            name, [blocks], HASHES[:2], computed_tokens=0, external_tokens=8
        )
    assert 1 == len(adapter.plan_step(facts()).loads)


def _touch(adapter: SchedulerAdapter) -> None:
    """Leave the prefix of a load that has gone to be marked by a later plan."""
    adapter.blocks_allocated(
        "t", [[8, 9]], HASHES[:2], computed_tokens=0, external_tokens=8
    )
    assert 1 == len(adapter.plan_step(StepFacts(is_idle=False)).loads)


def _hold(adapter: SchedulerAdapter) -> None:
    adapter.plan_step(facts(start("h", 1, 2)))


def _deferral(adapter: SchedulerAdapter) -> None:
    plan = adapter.plan_step(facts(start("d", 1, 2)))
    adapter.request_finished("d")
    adapter.apply_report(_over(plan))


def _company(adapter: SchedulerAdapter) -> None:
    adapter.plan_step(facts(start("c", 1)))


def _ending(adapter: SchedulerAdapter) -> None:
    adapter.plan_step(facts(start("e", 1)))
    adapter.request_finished("e", end("e", 1, 2, 3, prompt=4))


def _hurry(adapter: SchedulerAdapter) -> None:
    adapter.plan_step(facts(start("p", 1)))
    adapter.plan_step(facts(preempted=["p"]))


@pytest.mark.parametrize("waits", [False, True], ids=["at_once", "in_company"])
@pytest.mark.parametrize("blocks", [(), (99,), (1, 99)], ids=["none", "free", "held"])
@pytest.mark.parametrize(
    "prepare",
    [_nothing, _load, _touch, _hold, _deferral, _company, _ending, _hurry],
    ids=lambda prepare: prepare.__name__[1:],
)
def test_short_way_plans_what_the_long_one_does(
    prepare: Callable[[SchedulerAdapter], None], blocks: tuple[int, ...], waits: bool
) -> None:
    """R-18: whatever waits goes with the same plan and to the same store, who reads blocks
    that others are given is fenced, what comes behind is planned alike, and nothing is left."""
    given = {"allocated": blocks, "is_idle": False}
    told: list[tuple[list[StepPlan], dict[str, int], list[bytes]]] = []
    for nothing_new in (
        _Told(**given),
        StepFacts(**given),
        *(() if blocks else (None,)),
    ):
        index = SetIndex()
        index.put(0, HASHES[:2])
        company = 8 * _SIZE if waits else 0
        adapter = make_adapter(
            ONE_FULL, index, decoded=AT_END, company=company, max_step_blocks=2
        )
        prepare(adapter)
        plans = [adapter.plan_step(nothing_new) for _ in range(12)]
        touched = [*index.touched]
        plans.append(adapter.plan_step(facts(start("n", 20))))
        plans += [adapter.plan_step(nothing_new) for _ in range(80)]
        for plan in plans:
            adapter.apply_report(_over(plan))
        plans.append(adapter.plan_step(nothing_new))
        told.append((plans, adapter.counts(), touched))
    assert told == [told[0]] * len(told)


@pytest.mark.parametrize("waits", [False, True], ids=["at_once", "in_company"])
def test_requests_of_a_failed_worker_are_let_go_by_the_next_plan(waits: bool) -> None:
    """Nothing more is saved of those that ended: their blocks go back, whoever decodes."""
    company = 8 * _SIZE if waits else 0
    adapter = make_adapter(ONE_FULL, SetIndex(), decoded=AT_END, company=company)
    _ending(adapter)
    adapter.apply_report(StepReport(rank=0, healthy=False))
    (deferral,) = adapter.plan_step(None).deferred
    assert "e" == deferral.request_id
    assert 0 == adapter.counts()["endings"]
