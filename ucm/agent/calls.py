# SPDX-License-Identifier: Apache-2.0
"""
How much one call takes on, and how the loop calls what blocks.

A tier's call has a deadline: however large its blocks are, a call is of so many bytes only
that a slow drive or network can be through with it. Nor does the loop go through very many blocks without a turn for others.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from ucm.backends.abc import BackendCapabilities

__all__ = [
    "CALL_BYTES",
    "Blocking",
    "ThreadCalls",
    "blocks_per_call",
    "in_turns",
    "parts",
    "share_of_call",
]

CALL_BYTES: Final = 32 << 20
"""Of one call of a tier at most, if it has more blocks than one."""

_IN_TURN: Final = 1 << 10
"""Blocks that the loop goes through before others have their turn."""

_T = TypeVar("_T")


def blocks_per_call(can: BackendCapabilities, nbytes: int) -> int:
    """Return how many blocks of a size go with one call of a tier; at least one."""
    return max(1, min(can.batch_blocks, CALL_BYTES // nbytes))


def share_of_call(can: BackendCapabilities, num_blocks: int, nbytes: int) -> float:
    """Return how much of the largest call a smaller one is; at most 1."""
    return min(1.0, max(num_blocks / can.batch_blocks, nbytes / CALL_BYTES))


async def in_turns(do: Callable[[_T], object], items: Sequence[_T]) -> None:
    """Call *do* with each of *items*; behind some of them others have their turn."""
    for at in range(0, len(items), _IN_TURN):
        for item in items[at : at + _IN_TURN]:
            do(item)
        await anyio.lowlevel.checkpoint()


async def parts(items: Sequence[_T]) -> AsyncIterator[Sequence[_T]]:
    """Yield some of *items* at a time; others have their turn between, not behind them all."""
    for at in range(0, len(items), _IN_TURN):
        if at:
            await anyio.lowlevel.checkpoint()
        yield items[at : at + _IN_TURN]


class Blocking(Protocol):
    """Carries out a blocking call."""

    async def __call__(self, function: Callable[[], _T]) -> _T:
        """Return what *function* returns, or raise what it raises."""


class ThreadCalls:
    """
    Carries blocking calls out on threads, so many at a time.

    A call that has begun is waited for, whatever becomes of who asked for it: what it
    holds is given back by what comes behind it.

    Args:
        num_threads: At most.
    """

    def __init__(self, num_threads: int) -> None:
        self._limiter = anyio.CapacityLimiter(num_threads)

    async def __call__(self, function: Callable[[], _T]) -> _T:
        """Return what *function* returns, or raise what it raises."""
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)
