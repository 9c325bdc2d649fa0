# SPDX-License-Identifier: Apache-2.0
"""
Mooncake's client, until a call of it may have left transfers behind.

It gives a batch up that took a minute by the wall clock, and says that it failed, while its transfers go on into
memory that was given back (``mooncake-store/src/transfer_task.cpp``). So does a clock that is set a minute ahead,
at once. They end with the client alone: whoever made such a call has its memory back behind that.

Threading: any thread.
"""

import threading
from collections.abc import Callable
from typing import Any, Final

from ucm.tracing import unix_now

__all__ = ["Client"]

_TRUSTED_S: Final = 50.0
"""So long a call may take, by the wall clock, and have left nothing behind for certain."""


class Client:
    """
    A client that has joined, and is called by several threads at once.

    Args:
        native: Mooncake's.
        clock: The wall clock, as the client looks at it.
    """

    def __init__(
        self,
        native: Any,  # noqa: ANN401 - it has no types
        clock: Callable[[], float] = unix_now,
    ) -> None:
        self._native = native
        self._clock = clock
        self._changed = threading.Condition()
        self._num_calls = 0
        self._is_closed = False
        self.is_over = False
        """Nobody may call it any more; another one is to join."""

    def call(self, use: Callable[[Any], None]) -> None:
        """
        Call *use* with Mooncake's, unless it is over.

        What may have left transfers behind ends with the client, behind the calls of others: the client's own
        time-outs end these, and nobody else can.
        """
        with self._changed:
            if self.is_over:
                return
            self._num_calls += 1
        began = self._clock()
        try:
            use(self._native)
        finally:
            is_late = self._clock() - began >= _TRUSTED_S
            with self._changed:
                self._num_calls -= 1
                self.is_over |= is_late
                if self.is_over and not self._num_calls:
                    self._close()
                elif is_late:
                    self._changed.wait_for(lambda: self._is_closed)

    def close(self) -> None:
        """End it, and whatever it has under way; nobody is amid a call, and it is not over."""
        with self._changed:
            self.is_over = True
            self._close()

    def _close(self) -> None:
        try:
            self._native.close()
        finally:
            self._is_closed = True
            self._changed.notify_all()
