# SPDX-License-Identifier: Apache-2.0
"""
The other key spaces of a store, for a thread that must not wait for it.

A prompt of which nothing is found may be stored by an engine whose settings differ.
Their descriptions are read on a thread of its own, at most once a second and when
somebody asks; who asks gets what was read last.

Threading: all but ``_read`` is called on one thread, the engine's.
"""

import contextlib
import heapq
from collections.abc import Mapping
from typing import Final

from ucm.blocks import KeySpace, PackedKey, digest_of, under
from ucm.errors import StoreError
from ucm.stores.abc import Store
from ucm.threads import Aside, Threads

__all__ = ["MAX_NEIGHBOURS", "Neighbours"]

MAX_NEIGHBOURS: Final = 8
"""As many are asked for a block, those that are most like ours."""
_READ_EVERY_S: Final = 1.0
_CLOSE_TIMEOUT_S: Final = 1.0


class Neighbours:
    """
    Finds blocks under other key spaces.

    Args:
        store: Any call may be made on any thread.
        threads: Where clock, thread and queue come from.
    """

    def __init__(self, store: Store, threads: Threads) -> None:
        self._store = store
        self._threads = threads
        self._aside = Aside("ucm-neighbours", lambda _: self._read(), threads)
        self._is_closed = False
        self._read_at = -_READ_EVERY_S
        self._own: KeySpace | None = None
        self._others: Mapping[bytes, KeySpace] = {}

    def moved(self, own: KeySpace) -> None:
        """Take note of our own key space; reads at once, as it is seldom told."""
        self._own = own
        self._read()

    def holding(self, key: PackedKey) -> dict[str, tuple[object, object]] | None:
        """
        Return how a key space differs under which the same block is stored.

        Each field with our value and theirs; None if no other one is known to have it.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        if (now := self._threads.monotonic()) >= self._read_at + _READ_EVERY_S:
            self._ask(now)
        others, own = self._others, self._own
        if own is None or not others:
            return None
        found = self._store.everywhere([under(digest, key) for digest in others])
        for theirs, is_there in zip(others.values(), found, strict=True):
            if is_there and theirs.digest != digest_of(key):
                return own.diff(theirs)
        return None

    def close(self) -> bool:
        """End the thread; False if it hangs in the store. Idempotent."""
        self._is_closed = True
        return self._aside.close(_CLOSE_TIMEOUT_S)

    def _ask(self, now: float) -> None:
        """Have descriptions read anew, as they were not for a while."""
        if not self._is_closed:
            self._read_at = now
            self._aside.put(True)

    def _read(self) -> None:
        own = self._own
        if own is None:
            return
        with contextlib.suppress(StoreError):
            found = self._store.keyspaces()
            found.pop(own.digest, None)
            nearest = heapq.nsmallest(
                MAX_NEIGHBOURS, found.items(), key=lambda each: len(own.diff(each[1]))
            )
            self._others = dict(nearest)
