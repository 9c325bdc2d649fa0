# SPDX-License-Identifier: Apache-2.0
"""Many awaits at a time, and puts of those of many blocks that are not there."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio

from ucm.backends.abc import Backend, Presence, Sealed, Verdict

__all__ = ["Many", "put_missing", "together"]

_Item = TypeVar("_Item")
_NOT_PUT = {Presence.PRESENT: Verdict.PRESENT, Presence.UNKNOWN: Verdict.UNAVAILABLE}


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
        self, items: Sequence[_Item], ask: Callable[[_Item], Awaitable[None]]
    ) -> None:
        """
        Await *ask* of each item.

        A call has no more tasks than there are turns, so that a long one costs no more.
        """
        left = iter(items)

        async def work() -> None:
            for item in left:
                async with self._turns:
                    await ask(item)

        await together([work] * min(self.most, len(items)))


async def put_missing(
    backend: Backend,
    blocks: Sequence[Sealed],
    largest: int,
    write: Callable[[Sequence[Sealed]], Awaitable[list[Verdict]]],
) -> list[Verdict]:
    """Have those blocks written that are not there, and are no larger; return what became of each."""
    there = await backend.exists([block.key for block in blocks])
    told = [
        _NOT_PUT.get(presence) or (Verdict.FULL if len(block.data) > largest else None)
        for block, presence in zip(blocks, there, strict=True)
    ]
    pairs = zip(blocks, told, strict=True)
    written = iter(await write([block for block, end in pairs if end is None]))
    return [end or next(written) for end in told]
