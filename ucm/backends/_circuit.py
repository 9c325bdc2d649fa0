# SPDX-License-Identifier: Apache-2.0
"""
Whether somebody who may be away is asked, by how the last calls went.

It costs a few bad calls, then nothing, and is tried again by itself. Nothing waits here.
"""

import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import TypedDict, TypeVar

__all__ = ["Circuit", "Limits"]

_T = TypeVar("_T")


class Limits(TypedDict, total=False):
    """When a circuit opens, and for how long; ``Circuit`` says what is meant, and what holds without."""

    bad_calls: int
    of_calls: int
    pause_s: float
    longest_pause_s: float
    hung_s: float


class Circuit:
    """
    Whether calls of a kind are made, by how the last ones went; see ``ucm.backends.wrap``.

    Args:
        clock: In seconds.
        bad_calls: So many bad ones
        of_calls: among so many open it.
        pause_s: The first while,
        longest_pause_s: and the longest.
        hung_s: A call that takes so long hangs.
        tell: Called with the seconds of each while, and with 0 once all is well again; must not raise.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        bad_calls: int = 3,
        of_calls: int = 8,
        pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
        hung_s: float = math.inf,
        tell: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._clock = clock
        self._most_bad = bad_calls
        self._bad: deque[bool] = deque(maxlen=of_calls)
        self._first_pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._tell = tell
        self._pause_s = 0.0
        """How long the last while was; 0: the circuit is closed."""
        self._until = 0.0
        self._is_trying = False
        self._hung_s = hung_s
        self._began: dict[object, float] = {}
        """When calls under way were begun, the first one first."""
        self.num_skipped = 0

    @property
    def is_open(self) -> bool:
        """Whether nothing came back since it was decided not to ask."""
        return self._pause_s > 0

    @property
    def wait_s(self) -> float:
        """How long to wait before a call would be made; 0: none."""
        self._look_for_hung()
        if not self.is_open:
            return 0.0
        if self._is_trying:
            return self._first_pause_s
        return max(0.0, self._until - self._clock())

    @property
    def is_well(self) -> bool:
        """Whether the last call that was judged, if any was, was no bad one."""
        return not self.is_open and not (self._bad and self._bad[-1])

    async def ask(
        self,
        call: Callable[[], Awaitable[list[_T]]],
        find: Callable[[list[_T]], bool | None],
    ) -> list[_T] | None:
        """
        Make a call and judge it by its answers; None: it was not made.

        Args:
            call: Ends.
            find: Returns whether it was bad; None: it counts for neither.
        """
        self._look_for_hung()
        if self.is_open and (self._is_trying or self._clock() < self._until):
            self.num_skipped += 1
            return None
        is_try = self._is_trying = self.is_open
        try:
            with self.under_way():
                told = await call()
            is_bad = find(told)
            is_new = is_try == self.is_open  # else it was begun before the while
            if is_new and is_bad is not None:
                self.judge(is_bad=is_bad)
            return told
        finally:
            if is_try:
                self._is_trying = False

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Have it open, should a call not end."""
        this = object()
        self._began[this] = self._clock()
        try:
            yield
        finally:
            del self._began[this]

    def judge(self, *, is_bad: bool) -> None:
        """Count a call that was made, also one past ``ask``."""
        self._bad.append(is_bad)
        if is_bad and (self.is_open or sum(self._bad) >= self._most_bad):
            self._open()
        elif self.is_open and not is_bad:
            self._pause_s = 0.0
            self._tell(0.0)

    def _open(self) -> None:
        self._bad.clear()
        pause_s = max(2 * self._pause_s, self._first_pause_s)
        self._pause_s = min(pause_s, self._longest_pause_s)
        self._until = self._clock() + self._pause_s
        self._tell(self._pause_s)

    def _look_for_hung(self) -> None:
        """Ask no more for a while, and another one, while a call does not end."""
        began, now = next(iter(self._began.values()), math.inf), self._clock()
        if now - began >= self._hung_s and now >= self._until:
            self._open()
