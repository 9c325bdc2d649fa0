# SPDX-License-Identifier: Apache-2.0
"""
How much one call takes on, and how the loop calls what blocks.

A tier's call has a deadline: however large its blocks are, a call is of so many bytes only
that a slow drive or network can be through with it. Nor does the loop go through very many blocks without a turn for others.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Thread
from typing import Final, Generic, Protocol, Self, TypeAlias, TypeVar, cast

import anyio
import anyio.lowlevel

from ucm.backends.abc import BackendCapabilities

__all__ = [
    "CALL_BYTES",
    "Blocking",
    "Parts",
    "ThreadCalls",
    "blocks_per_call",
    "share_of_call",
]

CALL_BYTES: Final = 32 << 20
"""Of one call of a tier at most, if it has more blocks than one."""

_IN_TURN: Final = 1 << 10
"""Blocks that the loop goes through before others have their turn."""
_ENDS_S: Final = 5.0
"""Until a thread must have ended: only one whose call nobody waited for has one still."""

_T = TypeVar("_T")
_Future: TypeAlias = asyncio.Future[tuple[object, BaseException | None]]
_Call: TypeAlias = tuple[Callable[[], object], _Future]


def blocks_per_call(can: BackendCapabilities, nbytes: int) -> int:
    """Return how many blocks of a size go with one call of a tier; at least one."""
    return max(1, min(can.batch_blocks, _bytes_per_call(can) // nbytes))


def share_of_call(can: BackendCapabilities, num_blocks: int, nbytes: int) -> float:
    """Return how much of the largest call a smaller one is; at most 1."""
    return min(1.0, max(num_blocks / can.batch_blocks, nbytes / _bytes_per_call(can)))


def _bytes_per_call(can: BackendCapabilities) -> int:
    return min(CALL_BYTES, can.batch_bytes)


class Parts(Generic[_T]):
    """
    Some of many items at a time; others have their turn between, not behind them all.

    Nobody is cancelled there: who goes through blocks leaves none of them half done.

    Args:
        items: Each is taken as its part comes.
        each: Blocks of one.
    """

    def __init__(self, items: Iterable[_T], each: int = 1) -> None:
        self._items = iter(items)
        self._size = max(1, _IN_TURN // each)
        self._num_taken = 0

    def __aiter__(self) -> "Parts[_T]":
        """Return itself."""
        return self

    async def __anext__(self) -> list[_T]:
        """Return the next ones."""
        if self._num_taken == self._size:
            await anyio.lowlevel.cancel_shielded_checkpoint()
        some = list(itertools.islice(self._items, self._size))
        self._num_taken = len(some)
        if not some:
            raise StopAsyncIteration
        return some


class Blocking(Protocol):
    """Carries out a blocking call."""

    async def __call__(self, function: Callable[[], _T]) -> _T:
        """Return what *function* returns, or raise what it raises."""


class ThreadCalls:
    """
    Carries blocking calls out on threads, so many at a time.

    A call that has begun is waited for, whatever becomes of who asked for it: what it
    holds is given back by what comes behind it.

    Used as a context manager: threads end as it is left, when nobody calls any more.

    Args:
        num_threads: At most; fewer do where the system starts no more.
    """

    def __init__(self, num_threads: int) -> None:
        self._most = num_threads
        self._turns = anyio.Semaphore(num_threads, fast_acquire=True)
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        for _ in self._threads:
            self._queue.put(None)
        while self._threads:
            self._threads.pop().join(_ENDS_S)

    async def __call__(self, function: Callable[[], _T]) -> _T:
        """Return what *function* returns, or raise what it raises; RuntimeError: no thread can be started."""
        async with self._turns:
            if len(self._threads) < self._most - self._turns.value:
                self._hire()
            with anyio.CancelScope(shield=True):
                over = asyncio.get_running_loop().create_future()
                self._queue.put((function, over))
                result, error = await over
        try:
            if error is not None:
                raise error
        finally:
            del error, over  # which have this frame, and what it holds
        return cast(_T, result)

    def _hire(self) -> None:
        queue = (self._queue,)
        thread = Thread(target=_serve, args=queue, name="ucm-calls", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more; it is asked again
            if not self._threads:
                raise
        else:
            self._threads.append(thread)


def _serve(queue: "SimpleQueue[_Call | None]") -> None:
    """Carry calls out."""
    while (call := queue.get()) is not None:
        function, over = call
        told: tuple[object, BaseException | None]
        try:
            told = function(), None
        except BaseException as exc:  # noqa: BLE001 - handed to whoever asked
            told = None, exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            over.get_loop().call_soon_threadsafe(_tell, over, told)
        del call, function, over, told  # or they would stay until the next one


def _tell(over: _Future, told: tuple[object, BaseException | None]) -> None:
    if not over.done():  # a loop that ends cancels all
        over.set_result(told)
