# SPDX-License-Identifier: Apache-2.0
"""
The face for hosts without a loop: the same verbs, as calls that block.

A host whose thread may not wait, as it runs an engine's steps, begins things and looks whether they are
over: ``begin_load``, ``begin_contains``, ``begin_prefetch``, ``save``; ``when_over`` spares it looks.

Threading: all of it from any thread, also at once; not from a signal's handler or ``__del__``,
which may cut in amid a call on the same thread.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ucm.cache.calls import alone, check_may_wait
from ucm.cache.core import Core
from ucm.cache.fetches import Fetched, Fetching
from ucm.cache.forgetting import Forgotten
from ucm.cache.pending import Pending, at_end
from ucm.cache.transfers import Result, Statistics, Transfer
from ucm.cache.waits import late, limits_of, result_of, wait, wait_until
from ucm.devices.abc import EventRef
from ucm.errors import DeviceTimeoutError, StoreUnavailableError
from ucm.metrics import Snapshot
from ucm.prefixes import Place

__all__ = ["Answer", "Cache", "Fetching", "Load", "Save"]

_T = TypeVar("_T")
_ANYWHERE = Place()


class Save:
    """
    A save that was asked for; it goes on by itself, waited for or not.

    Args:
        core: What does it.
        transfer: What it consists of.
        limit: Seconds by which it ends.
    """

    __slots__ = ("_core", "_limit", "_transfer")

    def __init__(self, core: Core, transfer: Transfer, limit: float) -> None:
        self._core = core
        self._transfer = transfer
        self._limit = limit

    def wait_released(self) -> None:
        """
        Block until the blocks may be overwritten; as a rule long before the end.

        Raises:
            DeviceTimeoutError: A copy did not come to an end in its time.
        """
        wait(self._core, self._transfer.released, self._limit)

    def wait_committed(self) -> Result:
        """
        Block until it is over; return what was stored, and why not if it was not.

        Raises:
            DeviceTimeoutError: It did not come to an end in its time.
        """
        return wait(self._core, self._transfer.over, self._limit)

    @property
    def is_over(self) -> bool:
        """Whether ``wait_committed`` would not block."""
        return self._transfer.over.is_done

    def when_over(self, call: Callable[[], None]) -> None:
        """
        Have *call* made once, when it is over and its blocks are released.

        On the thread that brings the end, or at once. All others wait for that thread: the
        call must be brief, and what would block is a ``PipelineError`` in it. What it raises
        goes to ``threading.excepthook``, and harms nobody else.
        """
        over, made = self._transfer.over, alone(call)
        at_end(self._transfer.released, lambda: at_end(over, made))

    def cancel(self) -> None:
        """Want it no more; see ``ucm.cache.aio.Save.cancel``. Does not block."""
        self._core.cancel(self._transfer)


class Load:
    """
    A load that was begun; its blocks are ours until it is over.

    Args:
        core: What does it.
        transfer: What it consists of.
        limit: Seconds by which it ends.
    """

    __slots__ = ("_core", "_limit", "_transfer")

    def __init__(self, core: Core, transfer: Transfer, limit: float) -> None:
        self._core = core
        self._transfer = transfer
        self._limit = limit

    @property
    def is_over(self) -> bool:
        """Whether ``wait`` would not block."""
        return self._transfer.over.is_done

    def wait(self) -> Result:
        """
        Block until it is over; return what was loaded, and why not if it was not.

        Raises:
            DeviceTimeoutError: A copy does not end: the blocks must not be used again.
        """
        return wait(self._core, self._transfer.over, self._limit)

    def wait_until_over(self, timeout: float) -> bool:
        """Block for *timeout* seconds at most; return whether it is over."""
        with contextlib.suppress(DeviceTimeoutError):  # which may be its end as well
            wait(self._core, self._transfer.over, timeout)
        return self.is_over

    def when_over(self, call: Callable[[], None]) -> None:
        """Have *call* made once, when it is over; as ``Save.when_over``."""
        at_end(self._transfer.over, alone(call))


class Answer:
    """
    What the store says to a question, once it does, or that it did not in time.

    Args:
        core: What asks.
        pending: The answer to come.
        limit: Seconds by which it counts as late.
    """

    __slots__ = ("_core", "_pending", "_until")

    def __init__(self, core: Core, pending: Pending[list[bool]], limit: float) -> None:
        self._core = core
        self._pending = pending
        self._until = core.now() + limit

    @property
    def is_over(self) -> bool:
        """Whether there is an answer, or no time for one any more."""
        if not self._pending.is_done and self._core.now() >= self._until:
            self._pending.end(None, late())
        return self._pending.is_done

    @property
    def error(self) -> Exception | None:
        """What ``result`` would raise, once it is over; a mistake of the store's, too."""
        return self._pending.error

    def result(self) -> list[bool]:
        """
        Return for each key whether it is stored; once it is over.

        Raises:
            StoreUnavailableError: The store did not answer, or not in time.
        """
        return self._pending.result()


class Cache(contextlib.AbstractContextManager["Cache"]):
    """
    Saves and loads blocks of a host; made by ``ucm.blocking.open``.

    Each verb is that of ``ucm.cache.aio.Cache``, and blocks for at most the same time.

    Args:
        core: What does it.
        opened: Closes it, and all else.
    """

    def __init__(self, core: Core, opened: contextlib.ExitStack) -> None:
        self._core = core
        self._opened = opened
        self._closing = threading.Lock()
        self._save_limit, self._load_limit = limits_of(core.timeout)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """
        Drain for ``timeout.shutdown``, end the rest, and close all. Idempotent.

        Interrupted, as by Ctrl-C, it closes all the same, and raises then. Where the interpreter
        takes objects apart, behind the end of all threads, it leaves everything as it is.
        """
        check_may_wait()
        if sys.is_finalizing():  # as a generator's that nobody has ended
            return
        with ThreadPoolExecutor(1, "ucm-close") as aside:  # where no signal cuts in
            try:
                closing = aside.submit(self._close)
            except RuntimeError:  # the interpreter ends, and starts no thread any more
                self._close()
            else:
                closing.result()

    def _close(self) -> None:
        with self._closing:  # whoever returns finds it closed
            self._opened.close()

    def match(
        self, keys: Sequence[bytes], *, group: int = 0, timeout: float | None = None
    ) -> int:
        """Return how many leading keys are stored; 0 after *timeout* (``timeout.load``)."""
        answer = self._waited.match(keys, group=group)
        with contextlib.suppress(StoreUnavailableError):
            return self._answer(answer, timeout)
        return 0

    def contains(
        self, keys: Sequence[bytes], *, group: int = 0, timeout: float | None = None
    ) -> list[bool]:
        """Return of each key whether it is stored; of none after *timeout*."""
        answer = self._waited.contains(keys, group=group)
        with contextlib.suppress(StoreUnavailableError):
            return self._answer(answer, timeout)
        return [False] * len(keys)

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        group: int = 0,
        timeout: float | None = None,
        place: Place = _ANYWHERE,
    ) -> Fetched:
        """Have what the store lacks of *keys* fetched from tiers; say what there is."""
        with self._waited.fetches.begin(keys, group, timeout, place) as fetch:
            wait_until(self._core, fetch.over, fetch.left)
            return fetch.result()

    def begin_prefetch(
        self,
        keys: Sequence[bytes],
        *,
        group: int = 0,
        timeout: float | None = None,
        place: Place = _ANYWHERE,
    ) -> Fetching:
        """Begin a ``prefetch``; returns at once."""
        return Fetching(self._core.fetches.begin(keys, group, timeout, place))

    def load(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        group: int = 0,
        place: Place = _ANYWHERE,
    ) -> Result:
        """
        Load stored blocks into the host's; block until that is over.

        Interrupted, as by Ctrl-C, it returns once nothing writes to the blocks any more.
        """
        transfer = self._waited.load(keys, blocks, group=group, place=place)
        is_interrupted = True
        try:
            wait_until(self._core, transfer.over, self._load_limit)
            is_interrupted = False
        finally:
            if is_interrupted:
                self._core.cancel(transfer)
                wait_until(self._core, transfer.over, self._load_limit)
        return result_of(transfer.over, self._load_limit)

    def begin_load(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        group: int = 0,
        place: Place = _ANYWHERE,
    ) -> Load:
        """Have stored blocks loaded; returns at once."""
        transfer = self._core.load(keys, blocks, group=group, place=place)
        load = None
        try:
            load = Load(self._core, transfer, self._load_limit)
        finally:
            if load is None:
                self._core.undo(transfer)
        return load

    def begin_contains(
        self, keys: Sequence[bytes], *, group: int = 0, timeout: float | None = None
    ) -> Answer:
        """Ask of each key whether it is stored, for *timeout* (``timeout.load``)."""
        limit = self._core.timeout.load if timeout is None else timeout
        if not limit >= 0:  # nor is NaN, at which it would never be late
            raise ValueError(f"timeout={timeout} is not 0 or more seconds")
        return Answer(self._core, self._core.contains(keys, group=group), limit)

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
        """Have blocks saved; returns at once. Interrupted, it leaves none in use."""
        transfer = self._core.save(
            keys, blocks, group=group, place=place, after=after, waits=wait_for_room
        )
        save = None
        try:
            save = Save(self._core, transfer, self._save_limit)
        finally:
            if save is None:
                self._core.undo(transfer)
        return save

    def touch(
        self, keys: Sequence[bytes], *, group: int = 0, place: Place = _ANYWHERE
    ) -> None:
        """Say that blocks are used."""
        self._answer(self._waited.touch(keys, group=group, place=place))

    def retain(
        self,
        keys: Sequence[bytes],
        *,
        ttl: float,
        group: int = 0,
        place: Place = _ANYWHERE,
    ) -> None:
        """Keep stored blocks as if they were used in *ttl* seconds."""
        self._answer(self._waited.retain(keys, ttl=ttl, group=group, place=place))

    def forget(self, keys: Sequence[bytes], *, group: int = 0) -> Forgotten:
        """Make blocks invisible in the store, and have tiers part with them."""
        return self._answer(self._waited.fetches.forget(keys, group))

    def flush(self) -> None:
        """Block until every save and load that was asked for by now is over."""
        for transfer in self._waited.open_transfers():
            wait(self._core, transfer.over, self._save_limit)

    def measure(self) -> Snapshot:
        """Return all metrics, for ``ucm.exporter``; any thread that may wait a second."""
        return self._waited.measure()

    def statistics(self) -> Statistics:
        """Return how things stand."""
        return self._answer(self._waited.statistics())

    @property
    def _waited(self) -> Core:
        """What does it, for a call that waits for that."""
        check_may_wait()
        return self._core

    def _answer(self, pending: Pending[_T], timeout: float | None = None) -> _T:
        """Wait for the store's answer; nobody is asked once nobody waits."""
        too_late = late()
        limit = self._core.timeout.load if timeout is None else timeout
        try:
            return wait(self._core, pending, limit, too_late)
        finally:
            pending.end(None, too_late)
