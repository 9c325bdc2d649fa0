# SPDX-License-Identifier: Apache-2.0
"""
Deletes blocks for a thread that must not wait for the store, and has tiers told behind that.

Threading: ``put`` and ``close`` are called on one thread, the engine's.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from ucm.blocks import PackedKey
from ucm.errors import StoreError
from ucm.stores.abc import Store
from ucm.threads import Aside, Threads

__all__ = ["MAX_WAITING_KEYS", "Forgetter"]

MAX_WAITING_KEYS: Final = 1 << 20
_KEYS_AT_ONCE: Final = 256
"""Bounds how long a store's lock is held."""
_CLOSE_TIMEOUT_S: Final = 1.0


class Forgetter:
    """
    Best effort: what does not fit, or the store refuses, stays until it is evicted.

    Args:
        store: Any call may be made on any thread.
        threads: Where thread, lock and queue come from.
        tell: Called with keys behind their deletion, on the thread; brief, raises nothing.
    """

    def __init__(
        self,
        store: Store,
        threads: Threads,
        tell: Callable[[Sequence[PackedKey]], object] = lambda _: None,
    ) -> None:
        self._store = store
        self._tell = tell
        self._aside = Aside("ucm-forgetter", self._forget, threads)
        self._lock = threads.lock()
        self._num_waiting = 0

    def put(self, keys: Sequence[PackedKey]) -> bool:
        """Have keys deleted soon; False if too many wait already. Never blocks."""
        with self._lock:
            has_room = self._num_waiting + len(keys) <= MAX_WAITING_KEYS
            self._num_waiting += len(keys) if has_room else 0
        if has_room:
            self._aside.put(keys)
        else:
            self._aside.begin()  # or what waits would keep all others out
        return has_room

    def close(self) -> bool:
        """End the thread once it is through; False if it hangs in the store. Idempotent."""
        return self._aside.close(_CLOSE_TIMEOUT_S)

    def _forget(self, keys: Sequence[PackedKey]) -> None:
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            with contextlib.suppress(StoreError):
                self._store.forget(keys[start : start + _KEYS_AT_ONCE])
        self._tell(keys)
        with self._lock:
            self._num_waiting -= len(keys)
