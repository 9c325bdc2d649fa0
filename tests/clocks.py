# SPDX-License-Identifier: Apache-2.0
"""Clocks that tests put forward, so that no deadline depends on a machine's pace, and threads that do not start."""

import asyncio
import contextlib
import functools
import itertools
import math
import selectors
import threading
import time

from anyio._backends._asyncio import CancelScope

from ucm.testing.faults import raising
from ucm.threads import Threads

__all__ = [
    "AdvancingThreads",
    "LeapingLoop",
    "RefusingThreads",
    "leaping",
    "no_threads",
    "numbered_scopes",
]


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


class RefusingThreads(AdvancingThreads):
    """
    Threads of which the system starts some not.

    Args:
        refused: Their name.
        times: How often; then it does.
    """

    def __init__(self, refused: str, times: float = math.inf) -> None:
        super().__init__()
        self._refused, self._times = refused, times
        self.made: list[threading.Thread] = []

    def thread(self, target, name):
        """Return one that may not start."""
        made = super().thread(target, name)
        self.made.append(made)
        if name == self._refused and self._times > 0:
            self._times -= 1
            made.start = raising(RuntimeError("can't start new thread"))
        return made


@contextlib.contextmanager
def no_threads(name):
    """Have the system start none of that name."""
    start = threading.Thread.start

    def starts(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = starts
    try:
        yield
    finally:
        threading.Thread.start = start


class _Leap(selectors.DefaultSelector):
    """Puts a loop's clock forward where the loop would wait for it, or for ever."""

    ahead = 0.0

    def select(self, timeout=None):
        if ready := super().select(0):
            return ready
        if timeout is None:  # only another thread can wake the loop
            return super().select()
        self.ahead += timeout
        return []


class _NumberedTask(asyncio.Task):
    """A task that has its place in a set by its number, and not by its address."""

    def __init__(self, number, *args, **kwargs) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class LeapingLoop(asyncio.SelectorEventLoop):
    """
    An event loop in virtual time: whoever sleeps has slept at once.

    For what happens on the loop only; time leaps over what another thread is doing.
    """

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coro, **more: _NumberedTask(
                next(numbers), coro, loop=loop, **more
            )
        )

    def time(self) -> float:
        """Return the seconds that were leapt over."""
        return self._leap.ahead


@contextlib.contextmanager
def numbered_scopes():
    """
    Have anyio cancel what is in a scope in the order in which it came.

    It goes through sets, whose order is that of addresses: a seed would not repeat a run.
    """
    numbers = {}
    init, by_address = CancelScope.__init__, CancelScope.__hash__

    def numbered(scope, *args, **kwargs):
        init(scope, *args, **kwargs)
        numbers[id(scope)] = len(numbers), scope  # its address is nobody else's now

    CancelScope.__init__ = numbered
    CancelScope.__hash__ = lambda scope: numbers.get(id(scope), (-2, scope))[0]
    try:
        yield
    finally:
        CancelScope.__init__, CancelScope.__hash__ = init, by_address


def leaping(test):
    """Run an asynchronous test on a loop in virtual time."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with asyncio.Runner(loop_factory=LeapingLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
