# SPDX-License-Identifier: Apache-2.0
"""Many awaits at a time."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio

__all__ = ["Many", "together"]

_Item = TypeVar("_Item")
_T = TypeVar("_T")


async def together(
    calls: Sequence[Callable[[], Coroutine[Any, Any, None]]],
) -> None:
    """Await several calls at a time, each in a task; one alone needs none."""
    if len(calls) == 1:
        await calls[0]()
        return
    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(call)


class Many:
    """
    A bound on requests to one other side.

    Args:
        most: Requests at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Not fast, each item would wait for a turn of the loop, whoever else asks.
        self._turns = anyio.Semaphore(most, fast_acquire=True)

    async def run(
        self,
        items: Sequence[_Item],
        ask: Callable[[_Item], Awaitable[_T]],
        results: list[_T],
    ) -> list[_T]:
        """
        Await *ask* of each item; put what it returns into *results*, and return these.

        A call has no more tasks than there are turns, so that a long one costs no more.
        """
        left = iter(range(len(items)))

        async def work() -> None:
            for at in left:
                async with self._turns:
                    results[at] = await ask(items[at])

        await together([work] * min(self.most, len(items)))
        return results
