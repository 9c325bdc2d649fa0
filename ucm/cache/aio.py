# SPDX-License-Identifier: Apache-2.0
"""
The face for hosts that run on asyncio or trio.

Threading: a cache belongs to the loop on which it was opened, and all of it is called
there. No call holds that loop: what blocks is done elsewhere.
"""

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar

import anyio.lowlevel

from ucm.cache.core import Core
from ucm.cache.fetches import Fetched
from ucm.cache.forgetting import Forgotten
from ucm.cache.host_loop import HostLoop
from ucm.cache.pending import Pending
from ucm.cache.transfers import Result, Statistics, Transfer
from ucm.cache.waits import late, limits_of, result_of
from ucm.devices.abc import EventRef
from ucm.errors import PipelineError, StoreUnavailableError
from ucm.metrics import Snapshot
from ucm.prefixes import Place

__all__ = ["Cache", "Moment", "Opening", "Save"]

_T = TypeVar("_T")
_ANYWHERE = Place()


class Opening(contextlib.AbstractAsyncContextManager["Cache"]):
    """
    A cache while it is open; see ``ucm.open``.

    Args:
        open_blocking: Opens it, in a thread.
    """

    def __init__(
        self, open_blocking: Callable[[], tuple[Core, contextlib.ExitStack]]
    ) -> None:
        self._open_blocking = open_blocking
        self._opened = contextlib.ExitStack()
        self._host: HostLoop | None = None

    async def __aenter__(self) -> "Cache":
        if self._host is not None:
            raise PipelineError("it is open already: open each cache anew")
        self._host = HostLoop()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._close)
            core = await self._host.in_thread(self._open)
            await anyio.lowlevel.checkpoint()  # it may have been cancelled meanwhile
            undo.pop_all()
        return Cache(core, self._host)

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def _open(self) -> Core:
        core, self._opened = self._open_blocking()
        return core

    async def _close(self) -> None:
        """Close it whatever happens meanwhile: that takes a bounded time."""
        if (host := self._host) is not None:
            try:
                await host.in_thread(self._opened.close)
            finally:
                self._host = None
                host.close()


class Moment(Awaitable[_T], Generic[_T]):
    """
    Something that will be; may be awaited by many, also again and after it was.

    Whoever is cancelled while awaiting it changes nothing for the others, nor for what
    they wait for.

    Args:
        cache: Whose loop is waited on.
        pending: What is waited for.
    """

    __slots__ = ("_cache", "_pending")

    def __init__(self, cache: "Cache", pending: Pending[_T]) -> None:
        self._cache = cache
        self._pending = pending

    def __await__(self) -> Generator[Any, Any, _T]:
        return self._cache.wait_save(self._pending).__await__()


class Save:
    """
    A save that was asked for; it goes on by itself, awaited or not.

    Args:
        cache: Whose.
        transfer: What it consists of.
    """

    __slots__ = ("_cache", "_transfer")

    def __init__(self, cache: "Cache", transfer: Transfer) -> None:
        self._cache = cache
        self._transfer = transfer

    @property
    def source_released(self) -> Moment[None]:
        """
        The moment from which on the blocks may be overwritten.

        As a rule long before ``committed``. Whether anything was saved it does not say.

        Raises:
            DeviceTimeoutError: A copy did not come to an end in its time.
        """
        return Moment(self._cache, self._transfer.released)

    @property
    def committed(self) -> Moment[Result]:
        """
        The moment from which on the blocks are found by all who share the store, as a rule.

        Its value says what was stored, and why not if it was not.

        Raises:
            DeviceTimeoutError: It did not come to an end in its time.
        """
        return Moment(self._cache, self._transfer.over)

    @property
    def is_over(self) -> bool:
        """Whether ``committed`` is not to be waited for any more."""
        return self._transfer.over.is_done

    def cancel(self) -> None:
        """
        Want it no more; nothing where it is over.

        Blocks that are stored by then stay stored. A copy that has begun comes to its
        end first: wait for ``source_released`` before you overwrite the blocks.
        """
        self._cache.cancel(self._transfer)


class Cache:
    """
    Saves and loads blocks of a host; made by ``ucm.open``.

    *keys* are ``[n]`` distinct keys of consecutive blocks of one prefix, as
    ``PrefixHasher.keys`` makes them; *blocks* are ``[n]`` indexes into the host's pool,
    aligned with the keys; *group* is the group of the layout they belong to.

    Each call but ``flush`` and ``measure`` raises ``PipelineClosedError`` once the cache is
    closed, ``KeyFormatError`` for keys that are none or do not match the blocks, and
    ``LayoutError`` for an unknown group: mistakes, found before anything is done.

    Args:
        core: What does it.
        host: The loop it is called on.
    """

    def __init__(self, core: Core, host: HostLoop) -> None:
        self._core = core
        self._host = host
        self._save_limit, self._load_limit = limits_of(core.timeout)

    async def match(self, keys: Sequence[bytes], *, group: int = 0) -> int:
        """
        Return how many keys, from the first on, are stored.

        That is no promise: a load may find less. A store that is in trouble, or does
        not answer within ``timeout.load``, has none.
        """
        answer = self._core.match(keys, group=group)
        try:
            return await self._answer(answer)
        except StoreUnavailableError:
            return 0

    async def contains(self, keys: Sequence[bytes], *, group: int = 0) -> list[bool]:
        """Return of each key whether it is stored, such as a window's; else as ``match``."""
        answer = self._core.contains(keys, group=group)
        try:
            return await self._answer(answer)
        except StoreUnavailableError:
            return [False] * len(keys)

    async def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        group: int = 0,
        timeout: float | None = None,
        place: Place = _ANYWHERE,
    ) -> Fetched:
        """
        Have what the store lacks of *keys* fetched from tiers, and say what there is then.

        What was fetched stays until the load of its last block is over, or it is given up,
        as it is where this is cancelled; for ``timeout.load`` at most. Waits for *timeout*
        seconds (``timeout.fetch``), a minute at most. It counts for the tenant of *place*.
        """
        self._check_here()
        with self._core.fetches.begin(keys, group, timeout, place) as fetch:
            await self._host.wait(fetch.over, fetch.left)
            return fetch.result()

    async def load(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        group: int = 0,
        place: Place = _ANYWHERE,
    ) -> Result:
        """
        Load stored blocks into the host's, and wait until that is over.

        From the call to its return the blocks are ours. Then the first
        ``Result.leading`` of them hold their bytes, verified, by whole tickets; what the
        others hold is no stored data: it is to be computed. The blocks count as used.

        Cancelled, it returns once nothing writes to the blocks any more; what they hold
        then is not to be used.

        Args:
            keys: Of the blocks.
            blocks: Where to; no save or load may use them.
            group: Of the layout.
            place: Where in its prefix they are, and whose.

        Raises:
            BlockInUseError: A block is in use, or there twice; nothing was begun.
            DeviceTimeoutError: A copy does not end: the blocks must not be used again.
            DeviceError: Else: the device has failed, or the calling thread records a graph.
        """
        self._check_here()
        cancelled = anyio.get_cancelled_exc_class(), KeyboardInterrupt
        transfer = self._core.load(keys, blocks, group=group, place=place)
        try:
            return await self._wait(transfer.over, self._load_limit)
        except cancelled:
            self._core.cancel(transfer)
            while not transfer.over.is_done:  # however often somebody cancels
                with contextlib.suppress(*cancelled), anyio.CancelScope(shield=True):
                    await self._wait(transfer.over, self._load_limit)
            raise

    def save(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        group: int = 0,
        place: Place = _ANYWHERE,
        after: EventRef | None = None,
        wait_for_room: bool = False,
    ) -> Save:
        """
        Have blocks saved that are stored nowhere yet; returns at once.

        Until ``Save.source_released`` the blocks must not change.

        Args:
            keys: Of the blocks.
            blocks: Where from; no load may use them.
            group: Of the layout.
            place: Where in its prefix they are, and whose.
            after: An event behind which the blocks are written; borrowed for the call.
                If not given, behind all that this thread has submitted to its device.
            wait_for_room: If the queue is full, wait for up to ``timeout.save``; as a
                rule such a save is refused, and its ``Result.reason`` says so.

        Raises:
            BlockInUseError: A load writes one of the blocks; nothing was begun.
            EventNotRecordedError: *after* proves nothing; subclasses say why. The cpu
                device knows no events.
            DeviceError: The device has failed, or the event is another one's.
        """
        transfer = self._core.save(
            keys, blocks, group=group, place=place, after=after, waits=wait_for_room
        )
        return Save(self, transfer)

    async def touch(
        self, keys: Sequence[bytes], *, group: int = 0, place: Place = _ANYWHERE
    ) -> None:
        """
        Say that blocks are used: what was used longest ago makes room first.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        await self._answer(self._core.touch(keys, group=group, place=place))

    async def retain(
        self,
        keys: Sequence[bytes],
        *,
        ttl: float,
        group: int = 0,
        place: Place = _ANYWHERE,
    ) -> None:
        """
        Keep stored blocks as if they were used in *ttl* seconds; unknown ones are none.

        Time is the priority here: until then all that was not retained makes room before
        them, and nothing is deleted then; they age from there on. Less takes nothing back.
        At most ``store.retain_share`` of the store is kept so; the rest is used now.

        Args:
            keys: Of the blocks.
            ttl: Seconds, above 0 and at most a day.
            group: Of the layout.
            place: Where in its prefix they are; ``began_ns`` is not looked at.

        Raises:
            ValueError: *ttl* is out of range.
            StoreUnavailableError: The store did not answer.
        """
        await self._answer(self._core.retain(keys, ttl=ttl, group=group, place=place))

    async def forget(self, keys: Sequence[bytes], *, group: int = 0) -> Forgotten:
        """
        Make blocks invisible in the store, have tiers part with them, and say who had some.

        Waits for ``timeout.load`` at most; deleting in tiers goes on behind that. A save that is
        under way may store them again: await its ``committed`` first.

        Raises:
            StoreUnavailableError: The store did not answer, or the agent nothing at all.
        """
        return await self._answer(self._core.fetches.forget(keys, group))

    async def flush(self) -> None:
        """
        Wait until every save and load that was asked for by now is over.

        Raises:
            DeviceTimeoutError: One did not come to an end in its time.
        """
        for transfer in self._core.open_transfers():
            await self._wait(transfer.over, self._save_limit)

    def measure(self) -> Snapshot:
        """Return all metrics, for ``ucm.exporter``; any thread that may wait a second."""
        return self._core.measure()

    async def statistics(self) -> Statistics:
        """
        Return how things stand.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        return await self._answer(self._core.statistics())

    def cancel(self, transfer: Transfer) -> None:
        """Want a save no more; for ``Save``."""
        self._core.cancel(transfer)

    def wait_save(self, pending: Pending[_T]) -> Coroutine[Any, Any, _T]:
        """Wait for a moment of a save; for ``Save``."""
        return self._wait(pending, self._save_limit)

    def _check_here(self) -> None:
        """Refuse to wait where nobody would be woken."""
        if not self._host.is_here:
            raise PipelineError("the cache was opened on another loop")

    async def _answer(self, pending: Pending[_T]) -> _T:
        """Wait for the store's answer; nobody is asked once nobody waits."""
        too_late = late()
        try:
            return await self._wait(pending, self._core.timeout.load, too_late)
        finally:
            pending.end(None, too_late)

    async def _wait(
        self, pending: Pending[_T], limit: float, error: Exception | None = None
    ) -> _T:
        """Wait for the end of something, for *limit* seconds at most."""
        self._check_here()
        await self._host.wait(pending, limit)
        return result_of(pending, limit, error)
