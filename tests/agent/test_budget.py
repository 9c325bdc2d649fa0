# SPDX-License-Identifier: Apache-2.0
"""The budget of fetches: whole, in turn, and never lost."""

import anyio
import pytest

from tests.agent.unruly import run_virtual
from ucm.agent.budget import Budget, Place


@pytest.mark.parametrize("is_granted", [False, True])
def test_cancelled_turn_is_the_next_ones(is_granted: bool) -> None:
    """R-53: whoever is cancelled while waiting, or just as its turn came, leaves nothing
    taken."""

    async def run() -> tuple[int, bool]:
        budget, served = Budget(4), anyio.Event()
        await budget.acquire(3, Place(0))

        async def last() -> None:
            await budget.acquire(2, Place(0))
            served.set()

        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def first() -> None:
                with scope:
                    await budget.acquire(4, Place(0))
                    budget.release(4, 0)

            tasks.start_soon(first)
            await anyio.sleep(1.0)
            tasks.start_soon(last)
            await anyio.sleep(1.0)
            if is_granted:
                budget.release(3, 0)
            scope.cancel()
            await anyio.sleep(1.0)
            if not is_granted:
                budget.release(3, 0)
            await served.wait()
        return budget.left

    assert 2 == run_virtual(run)


def test_who_comes_first_does_not_wait_behind_a_large_one() -> None:
    """R-53: what is left goes to whoever comes before all that wait, not to the next who
    gives something back."""

    async def run() -> int:
        budget = Budget(4)
        await budget.acquire(3, Place(0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(budget.acquire, 4, Place(0))
            await anyio.sleep(1.0)
            with anyio.fail_after(1.0):
                await budget.acquire(1, Place(-1))
            tasks.cancel_scope.cancel()
        return budget.left

    assert 0 == run_virtual(run)
