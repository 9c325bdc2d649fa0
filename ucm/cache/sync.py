# SPDX-License-Identifier: Apache-2.0
"""
The face for hosts without a loop: the same verbs, as calls that block.

Threading: all of it from any thread, also at once.
"""

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from ucm.cache.core import Core
from ucm.cache.pending import Pending
from ucm.cache.transfers import Result, Statistics, Transfer
from ucm.devices.abc import EventRef
from ucm.errors import DeviceTimeoutError, StoreUnavailableError
from ucm.metrics import Snapshot
from ucm.prefixes import Place

__all__ = ["Cache", "Save"]

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
        _wait(self._core, self._transfer.released, self._limit)

    def wait_committed(self) -> Result:
        """
        Block until it is over; return what was stored, and why not if it was not.

        Raises:
            DeviceTimeoutError: It did not come to an end in its time.
        """
        return _wait(self._core, self._transfer.over, self._limit)

    @property
    def is_over(self) -> bool:
        """Whether ``wait_committed`` would not block."""
        return self._transfer.over.is_done

    def cancel(self) -> None:
        """Want it no more; see ``ucm.cache.aio.Save.cancel``. Does not block."""
        self._core.cancel(self._transfer)


class Cache(contextlib.AbstractContextManager["Cache"]):
    """
    Saves and loads blocks of a host; made by ``ucm.blocking.open``.

    Each verb is that of ``ucm.cache.aio.Cache``, with the same arguments and errors, and
    blocks for at most the same time.

    Args:
        core: What does it.
        opened: Closes it, and all else.
    """

    def __init__(self, core: Core, opened: contextlib.ExitStack) -> None:
        self._core = core
        self._opened = opened
        timeout = core.timeout
        self._save_limit = 2 * timeout.save + timeout.stuck + timeout.shutdown
        self._load_limit = timeout.load + timeout.stuck + timeout.shutdown

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drain for ``timeout.shutdown``, end the rest, and close all. Idempotent."""
        self._opened.close()

    def match(self, keys: Sequence[bytes], *, group: int = 0) -> int:
        """Return how many keys, from the first on, are stored."""
        answer = self._core.match(keys, group=group)
        try:
            return self._answer(answer)
        except StoreUnavailableError:
            return 0

    def load(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        group: int = 0,
        place: Place = _ANYWHERE,
    ) -> Result:
        """Load stored blocks into the host's; block until that is over."""
        transfer = self._core.load(keys, blocks, group=group, place=place)
        return _wait(self._core, transfer.over, self._load_limit)

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
        """Have blocks saved; returns at once."""
        transfer = self._core.save(
            keys, blocks, group=group, place=place, after=after, waits=wait_for_room
        )
        return Save(self._core, transfer, self._save_limit)

    def touch(
        self, keys: Sequence[bytes], *, group: int = 0, place: Place = _ANYWHERE
    ) -> None:
        """Say that blocks are used."""
        self._answer(self._core.touch(keys, group=group, place=place))

    def retain(
        self,
        keys: Sequence[bytes],
        *,
        ttl: float,
        group: int = 0,
        place: Place = _ANYWHERE,
    ) -> None:
        """Keep stored blocks as if they were used in *ttl* seconds."""
        self._answer(self._core.retain(keys, ttl=ttl, group=group, place=place))

    def forget(self, keys: Sequence[bytes], *, group: int = 0) -> int:
        """Make blocks invisible, and return how many were stored."""
        return self._answer(self._core.forget(keys, group=group))

    def flush(self) -> None:
        """Block until every save and load that was asked for by now is over."""
        for transfer in self._core.open_transfers():
            _wait(self._core, transfer.over, self._save_limit)

    def measure(self) -> Snapshot:
        """Return all metrics, for ``ucm.exporter``; any thread that may wait a second."""
        return self._core.measure()

    def statistics(self) -> Statistics:
        """Return how things stand."""
        return self._answer(self._core.statistics())

    def _answer(self, pending: Pending[_T]) -> _T:
        """Wait for the store's answer; nobody is asked once nobody waits."""
        late = StoreUnavailableError("the store did not answer in time")
        try:
            return _wait(self._core, pending, self._core.timeout.load, late)
        finally:
            pending.end(None, late)


def _wait(
    core: Core, pending: Pending[_T], limit: float, late: Exception | None = None
) -> _T:
    """Block until something has ended, for *limit* seconds at most."""
    over = core.new_event()
    if pending.subscribe(over.set):
        over.wait(limit)
        pending.unsubscribe(over.set)
    if not pending.is_done:
        raise late or DeviceTimeoutError(f"no end after {limit} seconds")
    return pending.result()
