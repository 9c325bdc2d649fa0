# SPDX-License-Identifier: Apache-2.0
"""
A result that is still to come, for waiters of any kind.

Threading: all of it from any thread. Who waits hands in a call, which is made once, on
the thread that brings the result; it must be brief and raise nothing. One that raises all
the same keeps nobody else from being called.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["Pending", "at_end"]

T = TypeVar("T")


class Pending(msgspec.Struct, Generic[T], eq=False):  # made by one call, of C
    """
    Ends once, with a value or an error.

    Args:
        _lock: A ``ucm.threads.Lock``, shared by many: it is held for a few instructions.
    """

    _lock: Any
    _waiters: list[Callable[[], None]] = []
    _value: T | None = None
    error: Exception | None = None
    is_done: bool = False

    def end(self, value: T | None, error: Exception | None = None) -> None:
        """Bring the value, or the error; the first of them stays."""
        with self._lock:
            if self.is_done:
                return
            self._value, self.error = value, error
            self.is_done = True
            waiters, self._waiters = self._waiters, []
        with contextlib.ExitStack() as each:  # one that fails loses no others
            for wake in reversed(waiters):
                each.callback(wake)

    def subscribe(self, wake: Callable[[], None]) -> bool:
        """Have *wake* called at the end; False if that was before, and nobody calls."""
        with self._lock:
            if not self.is_done:
                self._waiters.append(wake)
            return not self.is_done

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        """Want no call any more; it may be under way."""
        with self._lock:
            if wake in self._waiters:
                self._waiters.remove(wake)

    def result(self) -> T:
        """Return the value, or raise the error; once it is done."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value] # an end without error has one


def at_end(pending: Pending[Any], call: Callable[[], None]) -> None:
    """Have *call* made at the end of something, or now."""
    if not pending.subscribe(call):
        call()
