# SPDX-License-Identifier: Apache-2.0
"""What turns cost the agent's loop where very many tenants wait."""

from collections import Counter

import anyio
import pytest

from tests.agent.unruly import run_virtual
from ucm.agent import budget as budget_module
from ucm.agent.budget import Budget, Place

TENANTS = 400


class Looked(Counter[int]):
    """What tenants have, and how often anybody looked."""

    num_looks = 0

    def __getitem__(self, tenant: int) -> int:
        self.num_looks += 1
        return super().__getitem__(tenant)


@pytest.mark.parametrize(
    ("tenants", "priorities"), [(TENANTS, 1), (1, TENANTS), (TENANTS, TENANTS)]
)
def test_turn_costs_the_same_however_many_tenants_wait(
    tenants: int, priorities: int
) -> None:
    """R-53: a flood of salts or priorities, each with one want, has none looked at for each
    turn of another's."""

    async def run() -> int:
        budget = Budget(10)
        budget.held = Looked()

        async def want(number: int) -> None:
            tenant = number % tenants
            await budget.acquire(3, Place(number % priorities, tenant))
            await anyio.sleep(1.0)
            budget.release(3, tenant)

        async with anyio.create_task_group() as tasks:
            for number in range(TENANTS):
                tasks.start_soon(want, number)
        assert 10 == budget.left
        return budget.held.num_looks

    assert run_virtual(run) < 40 * TENANTS


def test_what_was_before_is_not_kept() -> None:
    """R-53: a tenant that waits while it has more and less again is remembered as it is."""

    async def run() -> int:
        budget = Budget(10)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(budget.acquire, 10, Place(0, 1))
            await anyio.sleep(1.0)
            budget.release(1, 1)
            for tenant in (1, 2):
                tasks.start_soon(budget.acquire, 5, Place(0, tenant))
            await anyio.sleep(1.0)
            for _ in range(1000):
                assert budget.take(1, 1)
                budget.release(1, 1)
            kept = len(budget._rows[0].ranks)
            tasks.cancel_scope.cancel()
        return kept

    assert run_virtual(run) < 100


def test_tenants_are_known_as_they_are_behind_many_turns_of_others(monkeypatch) -> None:
    """R-53: who has given all back, while those of another priority came first, has its turn
    before who has something, however much has changed."""
    monkeypatch.setattr(budget_module, "_MOST_CHANGED", 2)

    async def run() -> list[int]:
        budget, came = Budget(10), []

        async def want(count: int, place: Place) -> None:
            await budget.acquire(count, place)
            came.append(place.tenant)

        assert budget.take(6, 1)
        assert budget.take(4, 2)
        async with anyio.create_task_group() as tasks:
            for tenant in (2, 1):
                tasks.start_soon(want, 9, Place(1, tenant))
            tasks.start_soon(want, 9, Place(0, 3))
            await anyio.sleep(1.0)
            for _ in range(6):
                budget.release(1, 1)
            budget.release(3, 2)
            await anyio.sleep(1.0)
            budget.release(9, 3)
            await anyio.sleep(1.0)
            tasks.cancel_scope.cancel()
        return came

    assert [3, 1] == run_virtual(run)
