# SPDX-License-Identifier: Apache-2.0
"""
What stages did last: a ring of the begin and the end of each, of all tickets of a runtime.

It is always on. Taking note of an edge is one tuple and one ``append``; nothing is made of
it before somebody asks (``last``), or something fails.

Threading: any. ``deque.append`` and the copy of a deque are each one step of the
interpreter, so that there is no lock.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from ucm.threads import SYSTEM
from ucm.tracing import TRACE_RING, Log

__all__ = ["BEGIN", "END", "Edge", "EdgeRing"]

BEGIN: Final = "begin"
END: Final = "end"
_SIZE: Final = 2048
_FAILURE_S: Final = 10.0

Edge = tuple[float, int, str, str]
"""When, on the ring's clock; number of the ticket; stage; ``BEGIN`` or ``END``."""


class EdgeRing:
    """
    The last edges.

    Args:
        log: Where ``dump`` writes them.
        clock: In seconds; as the tickets'.
    """

    def __init__(self, log: Log, clock: Callable[[], float] = SYSTEM.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._edges: deque[Edge] = deque(maxlen=_SIZE)
        self._quiet_until = -_FAILURE_S
        self.mark = self._edges.append
        """Take note of an edge; the oldest one is forgotten."""

    def __len__(self) -> int:
        return len(self._edges)

    def last(self, most: int = _SIZE) -> list[Edge]:
        """Return the last edges, each with how long ago it was instead of when."""
        now = self._clock()
        return [
            (round(now - at, 6), ticket, stage, edge)
            for at, ticket, stage, edge in list(self._edges.copy())[-most:]
        ]

    def dump(self, reason: str) -> None:
        """Write a line with what there is; some ms of work."""
        self._log.warning(TRACE_RING, reason=reason, edges=self.last())

    def failed(self, reason: str) -> None:
        """Write it because something has failed, unless that was done just now."""
        now = self._clock()
        if self._edges and now >= self._quiet_until:
            self._quiet_until = now + _FAILURE_S
            self.dump(reason)
