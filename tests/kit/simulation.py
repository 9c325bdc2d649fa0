# SPDX-License-Identifier: Apache-2.0
"""
Threads, locks, event loops and time, simulated on one thread from one seed.

Every simulated thread is a greenlet. Whoever waits, takes a lock, puts into a queue or
calls ``pause`` gives the hub the choice of who runs next, and the hub draws it from a
seeded generator: the same seed gives the same interleaving. Time is virtual; it creeps
on with each choice and jumps to the next deadline when everybody waits, so that a
timeout of minutes costs nothing and can expire in the middle of anything.

With ``line_modules``, threads are also preempted between the lines of these modules,
as an operating system would do it between any two instructions.

``Simulation.threads`` goes wherever the machinery takes ``ucm.threads.Threads``::

    simulation = Simulation(seed=7)
    simulation.run(engine)       # `engine` builds a Runtime(threads=simulation.threads)

Threading: all of it belongs to the one thread that calls ``run``. Needs greenlet, from
the extra ``testing``.
"""

import random
import sys
from asyncio.events import _get_running_loop, _set_running_loop
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import greenlet

from tests.kit.simulated import Actor, SimThreads
from ucm.threads import Threads

__all__ = ["Simulation", "SimulationDeadlockError"]

_START_S = 1000.0
_TICK_S = 2e-6
_LEAP_CHANCE = 0.002
_LEAPS_S = (1e-4, 1e-3, 1e-2, 0.1)
_EPOCH = 64
_MAX_WAITS_OUTSIDE = 10_000
_WEIGHTS = (1, 1, 1, 8, 64)


class SimulationDeadlockError(RuntimeError):
    """Every thread waits, and no deadline is left that could end one of the waits."""


class Simulation:
    """
    A hub that runs simulated threads one at a time.

    Args:
        seed: Decides everything.
        line_modules: Module files between whose lines threads are preempted too.
        line_chance: How likely a line is a point of preemption.
    """

    def __init__(
        self,
        seed: int,
        *,
        line_modules: Collection[str] = (),
        line_chance: float = 0.02,
    ) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.now = _START_S
        self.switches = 0
        self.threads: Threads = SimThreads(self)
        self.crashes: list[str] = []
        self._actors: list[Actor] = []
        self._current: Actor | None = None
        self._waits_outside = 0
        self._hub: greenlet.greenlet | None = None
        self._line_modules = frozenset(line_modules)
        self._line_chance = line_chance

    def run(self, main: Callable[[], None], *, linger: float = 100.0) -> None:
        """
        Run *main* as the first thread, and all it starts, until *main* returns.

        Args:
            main: The first thread.
            linger: Virtual seconds that other threads may still take to end; those
                that are left are ended without a word, as daemon threads are.

        Raises:
            SimulationDeadlockError: Nobody can go on.
            RuntimeError: A simulated thread, other than *main*, ended by an exception.
        """
        hooks = sys.get_asyncgen_hooks()
        tracer = sys.gettrace()
        self._hub = greenlet.getcurrent()
        first = self.spawn(main, "main")
        try:
            while first.alive:
                self._switch_to(self._pick())
            self._linger(linger)
            crashes = self.crashes.copy()
        finally:
            self._end_all()
            sys.settrace(tracer)
            sys.set_asyncgen_hooks(*hooks)
        if first.error is not None:
            raise first.error
        if crashes:
            raise RuntimeError("; ".join(crashes))

    def _linger(self, seconds: float) -> None:
        limit = self.now + seconds
        while self._actors and self.now < limit:
            if all(
                actor.is_ready and actor.deadline is None and not actor.is_ready()
                for actor in self._actors
            ):
                return
            self._switch_to(self._pick())

    def spawn(self, target: Callable[[], None], name: str) -> Actor:
        """Start a simulated thread."""
        actor = Actor(name)
        actor.alive = True
        actor.greenlet = greenlet.greenlet(lambda: self._live(actor, target), self._hub)
        self._actors.append(actor)
        return actor

    def pause(self) -> None:
        """Let the hub choose who goes on; this thread stays ready."""
        actor = self._current
        if actor is not None and greenlet.getcurrent() is actor.greenlet:
            self._to_hub()

    def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        self.block(lambda: False, seconds, "sleep")

    def block(
        self, is_ready: Callable[[], bool], timeout: float | None, what: str
    ) -> bool:
        """
        Wait until *is_ready* or for *timeout* virtual seconds; return the former.

        Args:
            is_ready: Without side effects; asked by the hub.
            timeout: None waits for ever.
            what: For the message of a deadlock.
        """
        actor = self._current
        if actor is None or greenlet.getcurrent() is not actor.greenlet:
            return self._block_outside(is_ready)
        actor.is_ready, actor.what = is_ready, what
        actor.deadline = None if timeout is None else self.now + max(0.0, timeout)
        self._to_hub()
        actor.is_ready = actor.deadline = None
        return is_ready()

    def _block_outside(self, is_ready: Callable[[], bool]) -> bool:
        """Answer at once: nobody else can run before or after the simulation."""
        self._waits_outside += 1
        if self._waits_outside > _MAX_WAITS_OUTSIDE:
            raise greenlet.GreenletExit  # cleans up in a circle
        return is_ready()

    def report(self, what: str) -> None:
        """Fail the run for something that nobody else is told of."""
        if self._current is not None:
            self.crashes.append(f"{self._current.name}: {what}")

    def names(self) -> list[str]:
        """Return the names of all threads that have not ended."""
        return [actor.name for actor in self._actors]

    def _live(self, actor: Actor, target: Callable[[], None]) -> None:
        if self._line_modules:
            sys.settrace(self._trace)
        try:
            target()
        except (SystemExit, greenlet.GreenletExit):
            pass  # as a thread that ends without a word
        except BaseException as exc:  # noqa: BLE001 - handed to whoever runs the simulation
            actor.error = exc
            if actor.name != "main":
                self.crashes.append(f"{actor.name}: {exc!r}")
        finally:
            actor.alive = False
            self._actors.remove(actor)

    def _to_hub(self) -> None:
        assert self._hub is not None  # set while anybody runs
        self._hub.switch()

    def _pick(self) -> Actor:
        """Choose who goes on, and let time pass."""
        self.switches += 1
        dice = self.dice
        if self.switches % _EPOCH == 1:
            for actor in self._actors:
                actor.weight = dice.choice(_WEIGHTS)
        self.now += _TICK_S
        if dice.random() < _LEAP_CHANCE:
            self.now += dice.choice(_LEAPS_S)
        ready = self._ready()
        if not ready:
            deadlines = [
                actor.deadline for actor in self._actors if actor.deadline is not None
            ]
            if not deadlines:
                waits = {actor.name: actor.what for actor in self._actors}
                raise SimulationDeadlockError(f"seed {self.seed}: {waits}")
            self.now = min(deadlines)
            ready = self._ready()
        if len(ready) == 1:
            return ready[0]
        return dice.choices(ready, [actor.weight for actor in ready])[0]

    def _ready(self) -> list[Actor]:
        """Return who can go on; asked at each switch, a million times in a test."""
        now = self.now
        return [
            actor
            for actor in self._actors
            if (is_ready := actor.is_ready) is None
            or is_ready()
            or (actor.deadline is not None and actor.deadline <= now)
        ]

    def _switch_to(self, actor: Actor) -> None:
        """Run *actor* until it waits; its event loop is the running one meanwhile."""
        assert actor.greenlet is not None
        self._current = actor
        try:
            _inside(actor, actor.greenlet.switch)
        finally:
            self._current = None

    def _end_all(self) -> None:
        for actor in list(self._actors):
            assert actor.greenlet is not None
            _inside(actor, actor.greenlet.throw, greenlet.GreenletExit)
            actor.alive = False
        self._actors.clear()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Follow the modules of interest, and preempt at some of their lines."""
        if frame.f_code.co_filename not in self._line_modules:
            return None
        if event == "line" and self.dice.random() < self._line_chance:
            self.pause()
        return self._trace


def _inside(actor: Actor, go: Callable[..., object], *arguments: object) -> None:
    """Let the actor's event loop be the running one: asyncio keeps one per thread."""
    _set_running_loop(actor.loop)
    try:
        go(*arguments)
    finally:
        actor.loop = _get_running_loop()
        _set_running_loop(None)
