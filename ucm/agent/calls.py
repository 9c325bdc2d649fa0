# SPDX-License-Identifier: Apache-2.0
"""How the loop calls what blocks: the slab's verbs, on a bounded number of threads."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

__all__ = ["Blocking", "ThreadCalls"]

_T = TypeVar("_T")


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
