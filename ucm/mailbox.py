# SPDX-License-Identifier: Apache-2.0
"""
Messages from loop and copy threads to the engine's thread.

Threading: ``put`` from any thread, ``drain`` from the engine's thread only. A deque's
``append`` and ``popleft`` are atomic, so there is no lock and neither side ever waits.
Bounded by the tickets that were accepted: each causes at most two messages.
"""

from collections import deque
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

_M = TypeVar("_M")


class Mailbox(Generic[_M]):
    """A one-way box; nothing put in is lost or seen twice."""

    def __init__(self) -> None:
        self._messages: deque[_M] = deque()

    def put(self, message: _M) -> None:
        """Leave a message. Never blocks."""
        self._messages.append(message)

    def drain(self) -> list[_M]:
        """Take out all messages in the order they were put. Never blocks."""
        taken = []
        while self._messages:
            taken.append(self._messages.popleft())
        return taken

    def __len__(self) -> int:
        return len(self._messages)
