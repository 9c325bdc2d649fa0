# SPDX-License-Identifier: Apache-2.0
"""
Messages from loop and copy threads to the engine's thread.

Threading: ``put`` from any thread, ``drain`` and ``wait`` from the engine's thread only.
A deque's ``append`` and ``popleft`` are atomic, so that there is no lock around it. The
flag is raised behind each message, if it is not, and lowered before messages are taken: a
message may leave it raised without need, never lowered.
Bounded by the tickets that were accepted: each causes at most two messages.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ucm.threads import SYSTEM, Threads

__all__ = ["Mailbox"]

_M = TypeVar("_M")


class Mailbox(Generic[_M]):
    """
    A one-way box; nothing put in is lost or seen twice.

    Args:
        threads: Where its event comes from.
    """

    def __init__(self, threads: Threads = SYSTEM) -> None:
        self._messages: deque[_M] = deque()
        self._filled = threads.event()
        self.on_put: Callable[[], None] | None = None
        """Called behind each message, on the thread that put it. Must not block."""

    def put(self, message: _M) -> None:
        """Leave a message. Never blocks."""
        self._messages.append(message)
        if not self._filled.is_set():  # to raise it takes ten calls
            self._filled.set()
        if self.on_put is not None:
            self.on_put()

    def drain(self) -> list[_M]:
        """Take out all messages in the order they were put. Never blocks."""
        if not self._messages and not self._filled.is_set():
            return []  # as a rule, and cheaper than to lower the flag
        self._filled.clear()
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken

    def wait(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds; return whether there is a message."""
        return self._filled.wait(timeout)

    def __len__(self) -> int:
        return len(self._messages)
