# SPDX-License-Identifier: Apache-2.0
"""A clock that a test puts forward, so that no deadline depends on a machine's pace."""

import time

from ucm.threads import Threads

__all__ = ["AdvancingThreads"]


class AdvancingThreads(Threads):
    """
    The process's own threads and locks, with a clock that can be put forward.

    Deadlines stay as long as they are by default, and a test that wants one to be over
    says when. What blocks with a timeout of its own still takes that time.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self.monotonic = self._monotonic

    def _monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once."""
        self._ahead += seconds
