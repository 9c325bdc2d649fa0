# SPDX-License-Identifier: Apache-2.0
"""
Where clocks, threads and what joins them come from.

The machinery asks ``Threads`` for everything that waits or tells the time, so that a
simulation can put a virtual clock and a seeded scheduler in its place (see
``tests.kit.simulation``). ``SYSTEM`` is the process's own; what it returns are the
plain objects of the standard library.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from ucm.affinity import leave_one_cpu
from ucm.waker import EventfdWaker, LoopWaker, Waker

__all__ = [
    "SYSTEM",
    "Aside",
    "Condition",
    "Event",
    "Lock",
    "Queue",
    "Thread",
    "Threads",
]

_T = TypeVar("_T")
_ONE_GO_S: Final = 2e-4
_TURN_S: Final = 2e-5


class Lock(Protocol):
    """The part of ``threading.Lock`` that is used."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> object: ...


class Condition(Lock, Protocol):
    """The part of ``threading.Condition`` that is used."""

    def wait_for(
        self, predicate: Callable[[], bool], timeout: float | None = None
    ) -> bool:
        """Block up to *timeout* seconds; return what *predicate* says."""

    def notify_all(self) -> None:
        """Let all waiters look at their predicates."""


class Event(Protocol):
    """The part of ``threading.Event`` that is used."""

    def is_set(self) -> bool:
        """Return whether it is set."""

    def set(self) -> None:
        """Let all waiters go."""

    def clear(self) -> None:
        """Hold waiters from now on."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block up to *timeout* seconds; return whether it is set."""


class Queue(Protocol):
    """The part of ``queue.SimpleQueue`` that is used."""

    def put(self, item: Any) -> None:  # noqa: ANN401 - holds what the user puts in
        """Put an item in. Never blocks."""

    def get(self) -> Any:  # noqa: ANN401
        """Block until there is an item and take it."""

    def get_nowait(self) -> Any:  # noqa: ANN401
        """Take an item; raises ``queue.Empty`` when there is none."""


class Thread(Protocol):
    """The part of ``threading.Thread`` that is used."""

    def start(self) -> None:
        """Start."""

    def join(self, timeout: float | None = None) -> None:
        """Block up to *timeout* seconds until it has ended."""

    def is_alive(self) -> bool:
        """Return whether it was started and has not ended."""


class Threads:
    """The standard library's clock, threads and locks."""

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds on a clock that never goes back."""

    def give_way(self) -> None:
        """
        Let whoever waits for the interpreter lock have it, amid what takes long.

        A wait of no time is not enough: the lock would be taken back before the other
        thread has woken up.
        """
        time.sleep(_TURN_S)

    def slowly(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield items, and give way before one as soon as those before it took long."""
        until = self.monotonic() + _ONE_GO_S
        for each in items:
            if self.monotonic() >= until:
                self.give_way()
                until = self.monotonic() + _ONE_GO_S
            yield each

    def lock(self) -> Lock:
        """Return a new lock."""
        return threading.Lock()

    def condition(self) -> Condition:
        """Return a new condition around a lock of its own, which is not reentrant."""
        return threading.Condition(threading.Lock())

    def event(self) -> Event:
        """Return a new event that is not set."""
        return threading.Event()

    def local(self) -> Any:  # noqa: ANN401 - holds what the user puts in
        """Return a new object whose attributes each thread has for itself."""
        return threading.local()

    def queue(self) -> Queue:
        """Return a new unbounded queue between threads."""
        return SimpleQueue()

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """Return a new daemon thread that is not started, and will not be bound to one CPU."""

        def run() -> None:
            leave_one_cpu()
            target()

        return threading.Thread(target=run, name=name, daemon=True)

    def waker(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]
    ) -> Waker:
        """Return what wakes *loop*, which runs on this thread, from other threads."""
        if hasattr(os, "eventfd"):
            return EventfdWaker(loop, callback)
        return LoopWaker(loop, callback)

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a new event loop for one of the threads."""
        return asyncio.new_event_loop()


SYSTEM = Threads()
"""The process's own."""


class Aside:
    """
    Does for a thread what that must not wait for, on one of its own.

    Which starts with the first job. All methods belong to the thread that it works for.

    Args:
        name: The thread's name.
        do: Called there with one job after the other; must raise nothing.
        threads: Where thread and queue come from.
    """

    def __init__(
        self, name: str, do: Callable[[Any], object], threads: Threads
    ) -> None:
        self._name = name
        self._do = do
        self._threads = threads
        self._jobs: Queue = threads.queue()
        self._thread: Thread | None = None

    def put(self, job: object) -> None:
        """Have a job done, with the next one if the system has no thread now. Never blocks."""
        self._jobs.put(job)
        self.begin()

    def begin(self) -> None:
        """Have what waits done, for which the system had no thread before. Never blocks."""
        if self._thread is None:
            thread = self._threads.thread(self._run, self._name)
            with contextlib.suppress(RuntimeError):  # it cannot be started
                thread.start()
                self._thread = thread

    def close(self, timeout: float) -> bool:
        """End the thread once it is through; False if it hangs. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._jobs.put(None)
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
