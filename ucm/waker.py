# SPDX-License-Identifier: Apache-2.0
"""
How another thread wakes the loop without a pause of its own.

``loop.call_soon_threadsafe`` writes to a socket and gives up the interpreter lock for
it. The loop, which the write has just woken, then often takes the lock first, and the
engine's thread waits until the loop has done what it was woken for: milliseconds, in
the middle of an engine step. A copy thread stands still for as long between two
spans. ``EventfdWaker`` writes to an eventfd *with* the lock held, which costs a
microsecond and lets the engine's thread go on; the loop gets its turn when the engine's
thread waits or computes outside of Python.

Threading: made and closed on the loop's thread; ``wake`` from any.
"""

import asyncio
import contextlib
import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

__all__ = ["EventfdWaker", "LoopWaker", "Waker"]


class Waker(ABC):
    """
    Has a function called on a loop.

    Args:
        loop: Runs on the calling thread.
        callback: Called on the loop once or more after each ``wake``.
    """

    @abstractmethod
    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]
    ) -> None: ...

    @abstractmethod
    def wake(self) -> None:
        """Have the function called soon. Never blocks; nothing behind ``close``."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the loop. Idempotent."""


class LoopWaker(Waker):
    """Wakes by the loop's own means, which every loop has."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._callback = callback

    def wake(self) -> None:
        """Write to the loop's own socket."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._callback)

    def close(self) -> None:
        """There is nothing to let go of."""


class EventfdWaker(Waker):
    """Wakes by an eventfd (Linux, eventfd(2)), without giving up the interpreter lock."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]
    ) -> None:
        # PyDLL keeps the lock. With types for its arguments a call would take half as long
        # again, where the CPU has forgotten its way: a plain number is an int.
        self._write = ctypes.PyDLL(None).eventfd_write
        self._one = ctypes.c_uint64(1)
        self._loop = loop
        self._callback = callback
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._fd, self._read)

    def wake(self) -> None:
        """Write to the eventfd; a full one wakes the loop anyway."""
        with self._lock:  # a number that was closed may be somebody else's file
            if self._fd >= 0:
                self._write(self._fd, self._one)

    def close(self) -> None:
        """Close the eventfd."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(fd)
            os.close(fd)

    def _read(self) -> None:
        try:  # noqa: SIM105 - at each wake-up, and ``suppress`` is three calls
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        self._callback()
