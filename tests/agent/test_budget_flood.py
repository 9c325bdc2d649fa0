# SPDX-License-Identifier: Apache-2.0
"""What turns cost the agent's loop where very many tenants wait."""

from collections import Counter

import anyio

from tests.agent.unruly import run_virtual
from ucm.agent.budget import Budget, Place

TENANTS = 400


class Looked(Counter[int]):
    """What tenants have, and how often anybody looked."""

    num_looks = 0

    def __getitem__(self, tenant: int) -> int:
        self.num_looks += 1
        return super().__getitem__(tenant)


def test_turn_costs_the_same_however_many_tenants_wait() -> None:
    """R-53: a flood of salts, each with one want, has no tenant looked at for each turn of
    another's."""

    async def run() -> int:
        budget = Budget(10)
        budget.held = Looked()

        async def want(tenant: int) -> None:
            await budget.acquire(3, Place(0, tenant))
            await anyio.sleep(1.0)
            budget.release(3, tenant)

        async with anyio.create_task_group() as tasks:
            for tenant in range(TENANTS):
                tasks.start_soon(want, tenant)
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
