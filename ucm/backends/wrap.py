# SPDX-License-Identifier: Apache-2.0
"""
Backends around a backend: one that forwards, one with deadlines, one that stops asking.

Around each configured backend stands a breaker around deadlines: one that is down costs a
few deadlines, then nothing, and is tried again by itself::

    BreakerBackend(DeadlineBackend(backend, 1.0), clock=loop.time)
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias, TypeVar, Unpack

import anyio

from ucm.backends._circuit import Circuit, Limits
from ucm.backends.abc import (
    Advice,
    Backend,
    BackendCapabilities,
    BackendStats,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.blocks import PackedKey
from ucm.errors import masked, text_of

__all__ = ["BreakerBackend", "DeadlineBackend", "WrapperBackend"]

_T = TypeVar("_T")
_Call: TypeAlias = Callable[[], Awaitable[list[_T]]]
_AWAY: Mapping[object, object] = {
    Presence.UNKNOWN: Presence.AWAY,
    Verdict.UNAVAILABLE: Verdict.AWAY,
    Fetched(Verdict.UNAVAILABLE): Fetched(Verdict.AWAY),
}
"""What a backend says of a server that it counts by itself, by what callers are told in its place."""


class WrapperBackend(Backend):
    """
    Forwards every verb; subclasses override what they change.

    Args:
        inner: The backend to wrap; closed with the wrapper.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> BackendCapabilities:
        """What the inner backend can do."""
        return self.inner.capabilities

    @property
    def away(self) -> Sequence[str]:
        """Servers of the inner backend."""
        return self.inner.away

    @property
    def refusing(self) -> Sequence[str]:
        """Servers of the inner backend."""
        return self.inner.refusing

    @property
    def trouble(self) -> str:
        """Of the inner backend."""
        return self.inner.trouble

    async def advice(self) -> Sequence[Advice]:
        """Forward."""
        return await self.inner.advice()

    async def register(self, memory: Sequence[memoryview]) -> None:
        """Forward."""
        await self.inner.register(memory)

    async def attend(self) -> None:
        """Forward."""
        await self.inner.attend()

    def watch(
        self, tell: Callable[[PackedKey, bool], None]
    ) -> Sequence[PackedKey] | None:
        """Forward."""
        return self.inner.watch(tell)

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Forward."""
        return await self.inner.exists(keys)

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Forward."""
        return await self.inner.get(keys, targets)

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Forward."""
        return await self.inner.put(blocks)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Forward."""
        return await self.inner.delete(keys)

    async def stats(self) -> BackendStats:
        """Forward."""
        return await self.inner.stats()

    async def aclose(self) -> None:
        """Forward."""
        await self.inner.aclose()


class _GuardedBackend(WrapperBackend):
    """
    Asks for the inner backend's answer by way of ``_ask``, which may do without it.

    Args:
        inner: The backend to wrap; closed with the wrapper.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._last_stats = BackendStats()

    async def _ask(
        self, call: _Call[_T], unknown: _T, count: int, *, is_write: bool = False
    ) -> list[_T]:
        """Return the inner backend's answers, *count* of them; *unknown* where none came."""
        raise NotImplementedError

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Ask; unknown where no answer came."""
        ask = lambda: self.inner.exists(keys)
        return await self._ask(ask, Presence.UNKNOWN, len(keys))

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Ask; unavailable where no answer came."""
        ask = lambda: self.inner.get(keys, targets)
        return await self._ask(ask, Fetched(Verdict.UNAVAILABLE), len(keys))

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Ask; unavailable where no answer came, though it may have been done."""
        ask = lambda: self.inner.put(blocks)
        return await self._ask(ask, Verdict.UNAVAILABLE, len(blocks), is_write=True)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Ask; unavailable where no answer came, though it may have been done."""
        ask = lambda: self.inner.delete(keys)
        return await self._ask(ask, Verdict.UNAVAILABLE, len(keys), is_write=True)

    async def stats(self) -> BackendStats:
        """Ask; as they were last told where no answer came."""

        async def ask() -> list[BackendStats | None]:
            return [await self.inner.stats()]

        (told,) = await self._ask(ask, None, 1)
        self._last_stats = told or self._last_stats
        return self._last_stats


class DeadlineBackend(_GuardedBackend):
    """
    Cancels a call that is not over in time; what it did by then is not known.

    Only a backend whose native client still writes to the caller's memory may take longer.

    What a call raises is a bug of the backend's, and no answer where somebody is told of it.

    Args:
        inner: The backend to wrap; closed with the wrapper.
        seconds: For each call, on the loop's clock.
        tell_bug: Called with the kind of what a call raised, and with its words without
            secrets; must not raise. Left out: the call raises it.
    """

    def __init__(
        self,
        inner: Backend,
        seconds: float,
        tell_bug: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._tell_bug = tell_bug
        self._bug = ""
        self.num_late = 0

    @property
    def trouble(self) -> str:
        """What the last call raised, or of the inner backend."""
        return self._bug or self.inner.trouble

    async def _ask(
        self, call: _Call[_T], unknown: _T, count: int, *, is_write: bool = False
    ) -> list[_T]:
        told = [unknown] * count
        with self._in_time():
            answers = await call()
            if len(answers) != count:
                raise ValueError(f"{len(answers)} answers to {count} questions")
            told, self._bug = answers, ""
        return told

    async def register(self, memory: Sequence[memoryview]) -> None:
        """Forward."""
        with self._in_time():
            await self.inner.register(memory)

    async def aclose(self) -> None:
        """Forward."""
        with self._in_time():
            await self.inner.aclose()

    async def attend(self) -> None:
        """Forward, and again some time behind what it raised: calls count on it."""
        is_over = False
        while not is_over:
            with self._telling():
                await self.inner.attend()
                is_over = True
            await anyio.sleep(0 if is_over else self._seconds)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        with anyio.move_on_after(self._seconds) as scope, self._telling():
            yield
        if scope.cancelled_caught:
            self.num_late += 1
            self._bug = ""

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # a backend of others may raise anything
            if self._tell_bug is None:
                raise
            self._bug = str(masked(text_of(exc)))
            self._tell_bug(type(exc).__name__, self._bug)


class BreakerBackend(_GuardedBackend):
    """
    Does not ask for a while once too many calls have had blocks without an answer.

    When the while is over a single call tries, and the others go on without; if it is
    bad too, the next while is twice as long. One without an answer of its own kind, such
    as a cancelled one, counts for neither. One that cannot be ended, as of a drive that hangs
    in the kernel, opens the circuit until it ends.

    What takes no blocks may have those that it has: puts and deletes have a circuit of their own.
    They are not asked for either while nothing else is.

    A backend of several servers that counts those by itself that do not answer, or take nothing, tells so
    of their blocks (``AWAY``). These count for neither, and callers are told that there is no answer.

    Args:
        inner: The backend to wrap, whose calls end; closed with the wrapper.
        clock: In seconds.
        tell: Called with the seconds of each while that begins, and with 0 once all is
            well again; must not raise.
        tell_writes: Likewise, of puts and deletes.
        limits: Of both circuits.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        clock: Callable[[], float],
        tell: Callable[[float], None] = lambda seconds: None,
        tell_writes: Callable[[float], None] = lambda seconds: None,
        **limits: Unpack[Limits],
    ) -> None:
        super().__init__(inner)
        self._reads = Circuit(clock, tell=tell, **limits)
        self._writes = Circuit(clock, tell=tell_writes, **limits)

    @property
    def is_open(self) -> bool:
        """Whether nothing came back since it was decided not to ask."""
        return self._reads.is_open

    @property
    def refuses(self) -> bool:
        """Whether it took nothing since it was decided to put nothing there."""
        return self._writes.is_open

    @property
    def num_skipped(self) -> int:
        """Calls that were not made."""
        return self._reads.num_skipped + self._writes.num_skipped

    @property
    def wait_s(self) -> float:
        """How long to wait before a block could be put; 0: not at all."""
        return max(self._reads.wait_s, self._writes.wait_s)

    async def _ask(
        self, call: _Call[_T], unknown: _T, count: int, *, is_write: bool = False
    ) -> list[_T]:
        told: list[_T] | None = None
        find = partial(_find, unknown)
        if not is_write:
            told = await self._reads.ask(call, find)
        elif self._reads.wait_s > 0:
            self._writes.num_skipped += 1
        else:
            with self._reads.under_way():  # what hangs in a put hangs in a get
                told = await self._writes.ask(call, find)
        if told is None:
            return [unknown] * count
        away = _AWAY.get(unknown)
        if away in told:
            return [unknown if each == away else each for each in told]
        return told


def _find(unknown: object, told: Sequence[object]) -> bool | None:
    """Return whether a call was bad; None: nobody was asked who could have answered."""
    if unknown in told:
        return True
    away = _AWAY.get(unknown)
    is_vain = away in told and all(each == away for each in told)
    return None if is_vain else False
