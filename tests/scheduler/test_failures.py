# SPDX-License-Identifier: Apache-2.0
"""Many loads that fail at once."""

import random

import pytest
from msgspec.structs import replace

from tests.scheduler.model import (
    HASHES,
    ONE_FULL,
    SetIndex,
    facts,
    failure_of,
    make_adapter,
    scheduled,
)
from ucm.reasons import Reason
from ucm.scheduler.adapter import SchedulerAdapter
from ucm.scheduler.messages import SpanOrder, StepReport
from ucm.scheduler.requests import RequestEnd, StepFacts

NUM_BLOCKS = 4
"""Of a request; each is a ticket of its own."""
REASONS = (Reason.CORRUPT, Reason.EVICTED, Reason.DEADLINE)


class Name(str):
    """A request's id that counts how often one is looked for, or compared."""

    __slots__ = ()
    looks = 0

    def __hash__(self) -> int:
        """Count."""
        Name.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        """Count."""
        Name.looks += 1
        return super().__eq__(other)


def load(adapter: SchedulerAdapter, name: str, at: int) -> tuple[SpanOrder, ...]:
    """Let a request load blocks of its own, which it computes on in the same step."""
    first = 1 + at * NUM_BLOCKS
    table = [*range(first, first + NUM_BLOCKS + 1)]
    hashes = HASHES[: NUM_BLOCKS + 1]
    tokens = 4 * NUM_BLOCKS
    adapter.blocks_allocated(
        name, [table], hashes, computed_tokens=0, external_tokens=tokens
    )
    request = scheduled(name, hashes, [table], tokens, 4, is_new=True, prompt=tokens)
    return adapter.plan_step(facts(request)).loads


def make() -> SchedulerAdapter:
    """Return an adapter whose requests run in the step that loads."""
    return make_adapter(ONE_FULL, SetIndex(), parks=False, span_blocks=1, load_spans=1)


def test_lives_are_gone_through_once_for_all_of_a_report() -> None:
    """R-18: however many loads of a report have failed, the scheduler's thread looks at
    each life once, and at each failure."""
    adapter, num_lives = make(), 40
    names = [Name(f"r{at}") for at in range(num_lives)]
    orders = [each for at, name in enumerate(names) for each in load(adapter, name, at)]
    assert num_lives * NUM_BLOCKS == len(orders)
    failures = tuple(
        replace(failure_of(each), request_id=str(each.request_id)) for each in orders
    )
    Name.looks = 0
    adapter.apply_report(StepReport(rank=0, failures=failures))
    assert {"evicted": num_lives} == adapter.totals.failed_loads
    assert Name.looks <= 4 * (num_lives + len(failures))


def end(adapter: SchedulerAdapter, name: str, at: int) -> None:
    """End a request, whose loads nobody was told of."""
    first = 1 + at * NUM_BLOCKS
    left = RequestEnd(
        computed_tokens=4 * NUM_BLOCKS + 4,
        known_tokens=4 * NUM_BLOCKS + 5,
        prompt_tokens=4 * NUM_BLOCKS,
        hashes=HASHES[: NUM_BLOCKS + 1],
        tables=[[*range(first, first + NUM_BLOCKS + 1)]],
    )
    adapter.request_finished(name, left)


@pytest.mark.parametrize("seed", range(20))
def test_failures_of_a_report_are_those_told_one_by_one(seed: int) -> None:
    """R-20: lives that run, share what another loads, came anew or have ended hear of the
    failures of one report as of as many reports: the reason told first is what counts."""
    states = []
    for is_together in (True, False):
        dice = random.Random(seed)
        adapter, orders = make(), list[SpanOrder]()
        for at in range(6):
            orders += load(adapter, f"r{at}", at)
        for at in dice.sample(range(6), 2):
            first = 1 + at * NUM_BLOCKS
            table = [first, first + 1, 90 + at]
            sharer = scheduled(f"s{at}", HASHES[:3], [table], 8, 4, is_new=True)
            adapter.plan_step(facts(sharer))
        for at in dice.sample(range(6), 2):
            end(adapter, f"r{at}", at)
        orders += load(adapter, f"r{dice.randrange(6)}", 7)
        failures = [
            failure_of(each, dice.choice([0, 0, None]), dice.choice(REASONS))
            for each in dice.choices(orders, k=9)
        ]
        adapter.tick(1.0)
        told = [failures] if is_together else [[each] for each in failures]
        for some in told:
            adapter.apply_report(StepReport(rank=0, failures=tuple(some)))
        lives = adapter.lives
        known = [*lives._lives.values(), *lives._finished]
        heard = {
            life.key
            for life in known
            for each in failures
            if each.transfer_id in life.loads
            or life.key == (each.request_id, each.generation)
        }
        assert heard == {life.key for life in known if life.starts_at_computed}
        states.append(
            (
                adapter.totals,
                dict(adapter.due),
                [(each.key, each.may_load, each.may_save) for each in known],
                [(each.loading, each.external, each.cursors) for each in known],
                [(each.record.load_failure, each.record.load_s) for each in known],
                adapter.plan_step(StepFacts()),
            )
        )
    assert states[0] == states[1]
    assert states[0][0].failed_loads
