# SPDX-License-Identifier: Apache-2.0
"""Whether threads may still use the memory of whoever has asked them for something."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from ucm import native

__all__ = ["Gate"]

_T = TypeVar("_T")


class Gate:
    """Open until the caller leaves, and takes its memory along. Any thread."""

    def __init__(self) -> None:
        self._idle = threading.Condition(threading.Lock())
        self._num_touching = 0
        self.is_left = False
        self.words = (ctypes.c_int * 2)()
        """The same for ``native.c``, which waits for nothing of Python's."""

    def touch(self, use: Callable[[], _T]) -> _T | None:
        """Return what comes of using the caller's memory, as long as a copy takes; None if it has gone."""
        with self._idle:
            if self.is_left:
                return None
            self._num_touching += 1
        try:
            return use()
        finally:
            with self._idle:
                self._num_touching -= 1
                self._idle.notify_all()

    def leave(self) -> None:
        """Let nobody use it any more; waits for those who just do, as long as a copy takes."""
        with self._idle:
            self.is_left = True
            self._idle.wait_for(lambda: not self._num_touching)
        if native.LIBRARY is not None:
            native.LIBRARY.leave(self.words)
