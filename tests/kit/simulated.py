# SPDX-License-Identifier: Apache-2.0
"""
What a simulated thread is given instead of locks, queues, threads and an event loop.

They do what their models in the standard library do, and leave each choice of who goes
on to the hub (``tests.kit.simulation``): before a lock is taken, before an event is
set, at each wait.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty
from types import TracebackType
from typing import Any, Protocol

import greenlet

from ucm.threads import Condition, Event, Lock, Queue, Thread, Threads
from ucm.waker import LoopWaker, Waker

__all__ = ["Actor", "Hub", "SimThreads"]


class Actor:
    """One simulated thread."""

    __slots__ = (
        "alive",
        "deadline",
        "error",
        "greenlet",
        "is_ready",
        "loop",
        "name",
        "weight",
        "what",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = False
        self.is_ready: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.what = ""
        self.weight = 1
        self.loop: asyncio.AbstractEventLoop | None = None
        self.error: BaseException | None = None
        self.greenlet: greenlet.greenlet | None = None


class Hub(Protocol):
    """What simulated things need of the simulation."""

    now: float

    def pause(self) -> None:
        """Let the hub choose who goes on."""

    def block(
        self, is_ready: Callable[[], bool], timeout: float | None, what: str
    ) -> bool:
        """Wait until *is_ready* or for *timeout* seconds."""

    def report(self, what: str) -> None:
        """Fail the run for something that nobody else is told of."""

    def spawn(self, target: Callable[[], None], name: str) -> Actor:
        """Start a simulated thread."""


class SimThreads(Threads):
    """Hands out simulated things."""

    def __init__(self, simulation: Hub) -> None:
        self._simulation = simulation
        self.monotonic = lambda: simulation.now

    def give_way(self) -> None:
        """Let the hub choose who goes on."""
        self._simulation.pause()

    def lock(self) -> Lock:
        """Return a simulated lock."""
        return _SimLock(self._simulation)

    def condition(self) -> Condition:
        """Return a simulated condition."""
        return _SimCondition(self._simulation)

    def event(self) -> Event:
        """Return a simulated event."""
        return _SimEvent(self._simulation)

    def local(self) -> Any:
        """Return an object whose attributes each simulated thread has for itself."""
        return _SimLocal()

    def queue(self) -> Queue:
        """Return a simulated queue."""
        return _SimQueue(self._simulation)

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        """Return a simulated thread."""
        return _SimThread(self._simulation, target, name)

    def waker(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]
    ) -> Waker:
        """Return what wakes a simulated loop."""
        return LoopWaker(loop, callback)

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop whose clock and waits are simulated."""
        return _SimLoop(self._simulation)


class _SimLock:
    def __init__(self, simulation: Hub) -> None:
        self._simulation = simulation
        self._taken = False

    def __enter__(self) -> bool:
        self._simulation.pause()
        while self._taken:
            self._simulation.block(lambda: not self._taken, None, "lock")
        self._taken = True
        return True

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        self._taken = False


class _SimCondition(_SimLock):
    def __init__(self, simulation: Hub) -> None:
        super().__init__(simulation)
        self._notified = 0

    def notify_all(self) -> None:
        self._notified += 1

    def wait_for(
        self, predicate: Callable[[], bool], timeout: float | None = None
    ) -> bool:
        """Look at *predicate* after each notification only, as threads do."""
        limit = None if timeout is None else self._simulation.now + timeout
        while not predicate():
            left = None if limit is None else limit - self._simulation.now
            if left is not None and left <= 0:
                return False
            seen = self._notified
            self._taken = False
            self._simulation.block(self._notified_since(seen), left, "condition")
            self.__enter__()
        return True

    def _notified_since(self, seen: int) -> Callable[[], bool]:
        return lambda: self._notified != seen


class _SimEvent:
    def __init__(self, simulation: Hub) -> None:
        self._simulation = simulation
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._simulation.pause()
        self._is_set = True

    def clear(self) -> None:
        self._simulation.pause()
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._simulation.block(lambda: self._is_set, timeout, "event")


class _SimLocal:
    _by_thread: weakref.WeakKeyDictionary[greenlet.greenlet, dict[str, object]]

    def __init__(self) -> None:
        vars(self)["_by_thread"] = weakref.WeakKeyDictionary()

    def __setattr__(self, name: str, value: object) -> None:
        self._by_thread.setdefault(greenlet.getcurrent(), {})[name] = value

    def __getattr__(self, name: str) -> object:
        try:
            return self._by_thread[greenlet.getcurrent()][name]
        except KeyError as exc:
            raise AttributeError(name) from exc


class _SimQueue:
    def __init__(self, simulation: Hub) -> None:
        self._simulation = simulation
        self._items: deque[object] = deque()

    def put(self, item: object) -> None:
        self._simulation.pause()
        self._items.append(item)

    def get(self) -> object:
        self._simulation.block(lambda: bool(self._items), None, "queue")
        return self._items.popleft()

    def get_nowait(self) -> object:
        if not self._items:
            raise Empty
        return self._items.popleft()


class _SimThread:
    def __init__(self, simulation: Hub, target: Callable[[], None], name: str) -> None:
        self._simulation = simulation
        self._target = target
        self._name = name
        self._actor: Actor | None = None

    def start(self) -> None:
        self._actor = self._simulation.spawn(self._target, self._name)
        self._simulation.pause()

    def is_alive(self) -> bool:
        return self._actor is not None and self._actor.alive

    def join(self, timeout: float | None = None) -> None:
        self._simulation.block(lambda: not self.is_alive(), timeout, "join")


class _SimSelector:
    """What the loop waits at: nothing but other threads, and time."""

    def __init__(self, simulation: Hub) -> None:
        self._simulation = simulation
        self.is_woken = False

    def select(self, timeout: float | None) -> list[object]:
        self._simulation.block(lambda: self.is_woken, timeout, "select")
        self.is_woken = False
        return []


class _SimLoop(asyncio.BaseEventLoop):
    """An event loop without files: call-backs and timers only."""

    def __init__(self, simulation: Hub) -> None:
        super().__init__()
        self._simulation = simulation
        self._selector = _SimSelector(simulation)

    def time(self) -> float:
        return self._simulation.now

    def call_exception_handler(self, context: dict[str, object]) -> None:
        """Let an error that nobody awaits fail the run."""
        self._simulation.report(f"{context['message']}: {context.get('exception')!r}")

    def _process_events(self, event_list: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        self._simulation.pause()
        self._selector.is_woken = True
