# SPDX-License-Identifier: Apache-2.0
"""
Streams and events of a simulated accelerator, run in an adversarial order by seed.

Whatever is submitted waits in its stream and runs later, one step at a time: a kernel, a
record and a wait take one step each, a batch of copies one per copy. Within a stream
steps keep their order; between streams the dice choose. A copy that does not wait for
its kernel thus reads the bytes of before, of after or some of each, by seed.

The hardware gets on when somebody asks an event (by a number of steps that is drawn),
in ``run``, ``drain`` and ``wait_for``, and never by itself: the same calls in the same
order run the same way.

Threading: any thread; a lock covers each step and each submission. A simulated thread
(``tests.kit.simulation``) counts as a thread, and gives way before it asks an event.
"""

import enum
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn
from weakref import WeakKeyDictionary

import attrs
import greenlet

from tests.kit.accelerator_ops import (
    Copy,
    Kernel,
    Misuse,
    MisuseError,
    Native,
    Op,
    Violation,
)
from ucm.devices.driver import Driver

__all__ = [
    "CUDA",
    "NPU",
    "Bias",
    "OnThreads",
    "Semantics",
    "SimHardware",
    "SimStream",
    "ThreadState",
]

_EPOCH = 24
_PACE = (0, 0, 0, 1, 1, 2, 8, 32)


@attrs.frozen(kw_only=True)
class Semantics:
    """
    In what the simulated runtimes differ.

    Args:
        name: Of the runtime.
        captures_waits: A wait is for the record that was there at the call. Otherwise it
            is for the latest record there is when the stream gets to the wait, and the
            event must live until then.
        has_priorities: Streams have a priority.
        has_tuple_caches: Engines hand over a tuple of tensors per layer.
    """

    name: str
    captures_waits: bool
    has_priorities: bool
    has_tuple_caches: bool


CUDA = Semantics(
    name="cuda", captures_waits=True, has_priorities=True, has_tuple_caches=False
)
NPU = Semantics(
    name="npu", captures_waits=False, has_priorities=False, has_tuple_caches=True
)


class Bias(enum.Enum):
    """Whom the hardware prefers among the streams that could go on."""

    UNIFORM = enum.auto()
    COPIES_FIRST = enum.auto()
    KERNELS_FIRST = enum.auto()
    STARVE_ONE = enum.auto()


@attrs.define(eq=False)
class SimStream:
    """
    Operations that run in order.

    Args:
        name: For logs.
        index: Of its device.
        priority: None where there are none; 0 is the lowest.
        ops: What has not run, or not wholly.
    """

    name: str
    index: int
    priority: int | None
    ops: deque[Op] = attrs.Factory(deque)


@attrs.define(eq=False)
class ThreadState:
    """
    What a runtime keeps per thread.

    Args:
        hardware: All devices.
        index: The current device; None before ``Driver.bind_thread``.
        streams: Device to its current stream, where it is not the default one.
        is_capturing: The thread records a graph.
    """

    hardware: "SimHardware"
    index: int | None = None
    streams: dict[int, SimStream] = attrs.Factory(dict)
    is_capturing: bool = False

    def current_stream(self, index: int | None = None) -> SimStream:
        """Return the stream for work on a device, by default on the current one."""
        at = index if index is not None else self.index or 0
        return self.streams.get(at) or self.hardware.default_stream(at)


class OnThreads(Driver):
    """The verbs that are about the calling thread alone."""

    hardware: "SimHardware"

    def current_index(self) -> int | None:
        """Return the thread's current device."""
        return self.hardware.thread().index

    def make_current(self, index: int | None) -> None:
        """Have it be another one again."""
        self.hardware.thread().index = index


class SimHardware:
    """
    All devices of a machine, and what their programs did wrong.

    With plain threads, and inside a simulation::

        SimHardware(random.Random(seed), semantics=NPU)
        SimHardware(simulation.dice, pause=simulation.pause)

    Args:
        dice: Decides who goes on; in a simulation the simulation's own.
        semantics: The runtime.
        bias: Whom to prefer; None draws another now and then.
        pace: How many steps to run when an event is asked; one of them is drawn.
        pause: Called where others may run; in a simulation its ``pause``.
    """

    def __init__(
        self,
        dice: random.Random,
        *,
        semantics: Semantics = CUDA,
        bias: Bias | None = None,
        pace: Sequence[int] = _PACE,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.dice = dice
        self.semantics = semantics
        self.pace = pace
        self.pause = pause
        self.lock = threading.RLock()
        self.executed: list[tuple[str, str]] = []
        self.violations: list[Violation] = []
        self.failures: dict[int, str] = {}
        self.dead: list[range] = []
        self.live_events: set[int] = set()
        self._bias = bias
        self._now = Bias.UNIFORM
        self._starved: SimStream | None = None
        self._streams: list[SimStream] = []
        self._defaults: dict[int, SimStream] = {}
        self._numbers = itertools.count(1)
        self._threads: WeakKeyDictionary[object, ThreadState] = WeakKeyDictionary()

    def name(self, what: str) -> str:
        """Return a name that nothing else has."""
        return f"{what}-{next(self._numbers)}"

    def make_stream(self, index: int, name: str = "") -> SimStream:
        """Return a new stream of a device."""
        with self.lock:
            priority = 0 if self.semantics.has_priorities else None
            stream = SimStream(name or self.name("stream"), index, priority)
            self._streams.append(stream)
            return stream

    def default_stream(self, index: int) -> SimStream:
        """Return the stream on which a device computes if nobody says otherwise."""
        with self.lock:
            if index not in self._defaults:
                self._defaults[index] = self.make_stream(index, f"compute-{index}")
            return self._defaults[index]

    def make_native(self, index: int) -> Native:
        """Return a new native event of a device."""
        native = Native(next(self._numbers), index)
        self.live_events.add(native.handle)
        return native

    def kill(self, native: Native) -> None:
        """Destroy a native event. Takes no lock: the garbage collector calls it."""
        native.is_alive = False
        self.live_events.discard(native.handle)

    def thread(self) -> ThreadState:
        """Return the calling thread's state."""
        with self.lock:
            return self._threads.setdefault(greenlet.getcurrent(), ThreadState(self))

    def launch(
        self, stream: SimStream, kernel: Callable[[], object], name: str = ""
    ) -> None:
        """Submit a kernel: a function that changes memory and raises nothing."""
        with self.lock:
            stream.ops.append(Kernel(kernel, name or self.name("kernel")))

    def pending(self, index: int) -> list[Op]:
        """Return what a device has not run, or not wholly."""
        with self.lock:
            return [
                op for each in self._streams if each.index == index for op in each.ops
            ]

    def run(self, steps: int) -> int:
        """
        Run up to *steps* steps; return how many there were.

        Raises:
            MisuseError: Something is left on a device in good health, and all of it
                waits.
        """
        with self.lock:
            for done in range(steps):
                if not self._step(self._streams):
                    self._check_idle()
                    return done
            return steps

    def drain(self) -> None:
        """Run all there is; what a failed device has stays where it is."""
        while self.run(1):
            self.pause()

    def wait_for(self, ops: Sequence[Op], index: int) -> None:
        """
        Run until *ops* have, and no more of other streams than that takes.

        Raises:
            RuntimeError: The device *index* has failed.
        """
        while True:
            with self.lock:
                self.check(index)
                left = {op for op in ops if not op.is_done}
                if not left:
                    return
                mine = [each for each in self._streams if not left.isdisjoint(each.ops)]
                if not (self._step(mine) or self._step(self._streams)):
                    self._check_idle()
            self.pause()

    def check(self, index: int) -> None:
        """
        Do nothing for a device in good health.

        Raises:
            RuntimeError: The device has failed.
        """
        if index in self.failures:
            raise RuntimeError(self.failures[index])

    def note(self, kind: Misuse, detail: str) -> None:
        """Write a misuse down."""
        self.violations.append(Violation(kind, detail))

    def misuse(self, kind: Misuse, detail: str) -> NoReturn:
        """
        Write a misuse down and end the call.

        Raises:
            MisuseError: Always.
        """
        self.note(kind, detail)
        raise MisuseError(f"{kind.value}: {detail}")

    def _step(self, streams: Sequence[SimStream]) -> bool:
        ready = [each for each in streams if self._can_run(each)]
        if not ready:
            return False
        if len(self.executed) % _EPOCH == 0:
            self._now = self._bias or self.dice.choice(list(Bias))
            self._starved = self.dice.choice([each for each in streams if each.ops])
        stream = self.dice.choice([s for s in ready if self._prefers(s)] or ready)
        op = stream.ops[0]
        self.executed.append((stream.name, op.step(self)))
        if op.is_done:
            stream.ops.popleft()
        return True

    def _check_idle(self) -> None:
        stuck = [
            (each.name, each.ops[0].name)
            for each in self._streams
            if each.ops and each.index not in self.failures
        ]
        if stuck:
            self.misuse(Misuse.DEADLOCK, f"{stuck}")

    def _can_run(self, stream: SimStream) -> bool:
        return (
            bool(stream.ops)
            and stream.index not in self.failures
            and stream.ops[0].is_ready()
        )

    def _prefers(self, stream: SimStream) -> bool:
        if self._now is Bias.COPIES_FIRST:
            return any(isinstance(op, Copy) for op in stream.ops)
        if self._now is Bias.KERNELS_FIRST:
            return any(isinstance(op, Kernel) for op in stream.ops)
        return self._now is Bias.UNIFORM or stream is not self._starved
