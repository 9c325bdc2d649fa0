# SPDX-License-Identifier: Apache-2.0
"""Whether threads may still use the memory of whoever has asked them for something."""

import ctypes
import threading
from collections.abc import Callable

from ucm import native

__all__ = ["Gate"]


class Gate:
    """Open until the caller leaves, and takes its memory along. Any thread."""

    def __init__(self) -> None:
        self._idle = threading.Condition(threading.Lock())
        self._num_touching = 0
        self.is_left = False
        self.words = (ctypes.c_int * 2)()
        """The same for ``native.c``, which waits for nothing of Python's."""

    def touch(self, use: Callable[[], None]) -> bool:
        """Use the caller's memory, for as long as a copy takes; False, unused, if it has gone."""
        with self._idle:
            if self.is_left:
                return False
            self._num_touching += 1
        try:
            use()
        finally:
            with self._idle:
                self._num_touching -= 1
                self._idle.notify_all()
        return True

    def leave(self) -> None:
        """Let nobody use it any more; waits for those who just do, as long as a copy takes."""
        with self._idle:
            self.is_left = True
            self._idle.wait_for(lambda: not self._num_touching)
        if native.LIBRARY is not None:
            native.LIBRARY.leave(self.words)
