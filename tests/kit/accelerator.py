# SPDX-License-Identifier: Apache-2.0
"""
A simulated accelerator: a ``Driver`` whose work happens late, in an order drawn by seed.

Device memory is memory of the host, so that a test reads and poisons it as it likes; but
kernels and copies get to it only when the hardware runs (``accelerator_streams``). The
driver takes notes of what a real device would answer with wrong bytes: see ``Misuse``.
A test ends with ``assert not hardware.violations``.

Threading: as ``Driver`` says, and it checks what is said there. Plain threads and
simulated ones.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import greenlet
import torch

from tests.kit.accelerator_ops import (
    Copy,
    Memory,
    Misuse,
    Native,
    Record,
    Wait,
    addresses,
    overlap,
    within,
)
from tests.kit.accelerator_streams import OnThreads, Semantics, SimHardware, SimStream
from ucm.devices.driver import Direction
from ucm.plan import CopyBatch

__all__ = ["SimEvent", "SimulatedDriver"]

_POISON = 0xDB


class SimEvent:
    """
    An event with torch's ways: it has no native event before it was first recorded.

    Until then it has passed, and nobody waits for it. The native event dies with it.

    Args:
        hardware: All the devices that may wait for it.
        is_ours: Made by ``Driver.make_event``, not by the engine.
    """

    __slots__ = ("__weakref__", "_hardware", "_native", "is_ours", "uses")

    def __init__(self, hardware: SimHardware, *, is_ours: bool = False) -> None:
        self._hardware = hardware
        self._native: Native | None = None
        self.is_ours = is_ours
        self.uses: Counter[str] = Counter()

    @property
    def native(self) -> int:
        """The native handle; 0 before the first record."""
        return 0 if self._native is None else self._native.handle

    @property
    def index(self) -> int | None:
        """The device; None before the first record."""
        return None if self._native is None else self._native.index

    @property
    def semantics(self) -> Semantics:
        """Of the runtime that it belongs to."""
        return self._hardware.semantics

    def record(self, stream: SimStream | None = None) -> None:
        """Pass when all that is now in *stream*, by default the current one, has run."""
        hardware = self._hardware
        with hardware.lock:
            native = self._use("record")
            if stream is None:
                stream = hardware.thread().current_stream()
            hardware.check(stream.index)
            if native is None:
                native = self._native = hardware.make_native(stream.index)
            if native.index != stream.index:
                hardware.note(Misuse.OTHER_DEVICE, f"record on {stream.name}")
                raise RuntimeError("an event is recorded on its own device only")
            native.latest = Record(hardware.name("record"))
            stream.ops.append(native.latest)

    def wait(self, stream: SimStream | None = None) -> None:
        """Hold what is submitted to *stream* from now on until this has passed."""
        hardware = self._hardware
        with hardware.lock:
            native = self._use("wait")
            if native is None:
                return
            captured = native.latest if self.semantics.captures_waits else None
            stream = stream or hardware.thread().current_stream()
            stream.ops.append(Wait(native, captured, hardware.name("wait")))

    def query(self) -> bool:
        """Return whether it has passed, after the hardware got on a little."""
        hardware = self._hardware
        with hardware.lock:
            native = self._use("query")
            if native is None:
                return True
            assert native.latest is not None  # made by the first record
            hardware.run(hardware.dice.choice(hardware.pace))
            return native.latest.is_done

    def synchronize(self) -> None:
        """Block until it has passed."""
        with self._hardware.lock:
            native = self._use("synchronize")
        if native is not None and native.latest is not None:
            self._hardware.wait_for([native.latest], native.index)

    def destroy(self) -> None:
        """Destroy the native event, as its owner may, though the object lives on."""
        self.uses["destroy"] += 1
        if self._native is not None:
            if not self._native.is_alive:
                self._hardware.misuse(Misuse.DESTROYED_EVENT, "destroy")
            self._hardware.kill(self._native)

    def __del__(self) -> None:
        if self._native is not None:
            self._hardware.kill(self._native)

    def _use(self, verb: str) -> Native | None:
        self.uses[verb] += 1
        native = self._native
        if native is not None:
            self._hardware.check(native.index)
            if not native.is_alive:
                self._hardware.misuse(Misuse.DESTROYED_EVENT, verb)
        return native


class SimulatedDriver(OnThreads):
    """
    One device of simulated hardware.

    ``calls`` counts verbs, ``copies`` keeps what was submitted, ``foreign_uses`` counts
    what verbs did to events that are not ours, ``pollers`` are the threads that asked.

    Args:
        index: Of the device.
        hardware: All devices; those that share it can wait for each other's events.
        can_pin: Host memory can be pinned.
        node: The NUMA node.
    """

    device_type = "cpu"

    def __init__(
        self,
        index: int,
        hardware: SimHardware,
        *,
        can_pin: bool = True,
        node: int | None = None,
    ) -> None:
        super().__init__(index)
        self.hardware = hardware
        self.captures_waits = hardware.semantics.captures_waits
        self.calls: Counter[str] = Counter()
        self.foreign_uses: Counter[str] = Counter()
        self.copies: list[Copy] = []
        self.pollers: set[object] = set()
        self.pins: dict[int, range] = {}
        self.is_closed = False
        self._can_pin = can_pin
        self._node = node
        self._faults: dict[str, tuple[int, bool]] = {}
        self._device_memory: list[range] = []
        self._kept: list[Memory] = []

    def bind_thread(self) -> None:
        """Make this the thread's current device."""
        with self.entered("bind_thread", is_bound=False):
            self.hardware.thread().index = self.index

    def is_capturing(self) -> bool:
        """Return whether the thread is inside ``capturing``."""
        with self.entered("is_capturing"):
            return self.hardware.thread().is_capturing

    def current_stream(self) -> SimStream:
        """Return the stream of ``on_stream``, or the device's default one."""
        with self.entered("current_stream", is_bound=False):
            return self.hardware.thread().current_stream(self.index)

    def make_stream(self) -> SimStream:
        """Return a new stream, of priority 0 where there are any."""
        with self.entered("make_stream"):
            return self.hardware.make_stream(self.index)

    def make_event(self) -> SimEvent:
        """Return a new event that counts as ours."""
        with self.entered("make_event"):
            return SimEvent(self.hardware, is_ours=True)

    def record(self, event: SimEvent, stream: SimStream) -> None:
        """Record *event*."""
        with self.entered("record", breaks_capture=True):
            self._count(event, "record")
            event.record(stream)

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        """Let *stream*, which is this device's, wait for an event of any."""
        with self.entered("wait", breaks_capture=True):
            self._check_stream(stream, "wait")
            event.wait(stream)

    def is_done(self, event: SimEvent) -> bool:
        """Let the hardware get on a little and query *event*."""
        with self.entered("is_done", breaks_capture=True):
            self.pollers.add(greenlet.getcurrent())
            self._count(event, "is_done")
            return event.query()

    def synchronize(self) -> None:
        """Run all that the device has now."""
        with self.entered("synchronize", breaks_capture=True):
            pending = self.hardware.pending(self.index)
        self.hardware.wait_for(pending, self.index)

    def handle(self, event: object) -> int:
        """Return the handle of an event of this runtime."""
        if (
            not isinstance(event, SimEvent)
            or event.semantics != self.hardware.semantics
        ):
            raise AttributeError(f"{type(event).__name__} is no event of this runtime")
        return event.native

    def device_index(self, event: SimEvent) -> int | None:
        """Return the event's device."""
        return event.index

    def copy(
        self,
        batch: CopyBatch,
        direction: Direction,
        stream: SimStream,
        *,
        is_pinned: bool,
    ) -> None:
        """Submit copies; when *is_pinned* is False, wait for them too."""
        hardware = self.hardware
        with self.entered("copy", breaks_capture=True):
            self._check_stream(stream, "copy")
            copy = Copy(batch, direction, hardware.name("copy"), is_pinned=is_pinned)
            self.copies.append(copy)
            self._check_sides(copy)
            if not copy.is_done:
                stream.ops.append(copy)
        if not is_pinned:
            hardware.wait_for([copy], self.index)

    def pin(self, address: int, nbytes: int) -> None:
        """Note that the memory is pinned."""
        with self.entered("pin", breaks_capture=True):
            memory = range(address, address + nbytes)
            if not self._can_pin:
                raise OSError("memory cannot be pinned here")
            if not memory:
                raise OSError("there is nothing to pin")
            if any(overlap(memory, other) for other in self.pins.values()):
                raise OSError("part or all of the memory is pinned already")
            self.pins[address] = memory

    def unpin(self, address: int) -> None:
        """Note that the memory is not pinned any more."""
        with self.entered("unpin", breaks_capture=True):
            if address not in self.pins:
                self.hardware.misuse(Misuse.NOT_PINNED, "unpin")
            memory = self.pins.pop(address)
            if any(copy.touches(memory) for copy in self.copies):
                self.hardware.misuse(Misuse.UNPIN_IN_USE, f"{len(memory)} bytes")

    def numa_node(self) -> int | None:
        """Return the node that was given."""
        return self._node

    def describe(self) -> dict[str, str]:
        """Return the runtime's name."""
        return {"model": "simulated", "copies": self.hardware.semantics.name}

    def close(self) -> None:
        """End every verb: whatever comes now is a misuse, and so are copies left."""
        self.is_closed = True
        left = [copy.name for copy in self.copies if not copy.is_done]
        if left and self.index not in self.hardware.failures:
            self.hardware.misuse(Misuse.CLOSE_IN_USE, f"{left}")

    def fail(self, message: str) -> None:
        """Let the device fail: no step runs any more, and verbs raise RuntimeError."""
        self.hardware.failures[self.index] = message

    def fail_at(self, verb: str, nth: int, *, stays: bool = True) -> None:
        """Fail at the *nth* call of *verb* from now, the first being 1, for good or not."""
        self._faults[verb] = self.calls[verb] + nth, stays

    def launch(
        self, stream: SimStream, kernel: Callable[[], object], name: str = ""
    ) -> None:
        """Submit a kernel, as the engine does, on any thread."""
        if self.is_closed:
            self.hardware.misuse(Misuse.AFTER_CLOSE, "launch")
        self.hardware.launch(stream, kernel, name)

    @contextlib.contextmanager
    def on_stream(self, stream: SimStream) -> Iterator[None]:
        """Let *stream* be the thread's current one."""
        state = self.hardware.thread()
        before = state.streams
        state.streams = {**before, self.index: stream}
        try:
            yield
        finally:
            state.streams = before

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Let the thread be recording a graph."""
        state = self.hardware.thread()
        before, state.is_capturing = state.is_capturing, True
        try:
            yield
        finally:
            state.is_capturing = before

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return ``[nbytes]`` uint8 device memory; copies know their way from now on."""
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._kept.append(memory)
        self._device_memory.append(addresses(memory))
        return memory

    def forbid(self, memory: Memory) -> None:
        """Let every later touch of contiguous *memory* be a misuse, and move nothing."""
        self._kept.append(memory)  # nobody else gets the addresses
        self.hardware.dead.append(addresses(memory))

    def poison(self, memory: Memory) -> None:
        """Overwrite and forbid *memory*, as if it were somebody else's now."""
        memory[...] = _POISON
        self.forbid(memory)

    def allow(self, memory: Memory) -> None:
        """Undo ``forbid`` or ``poison``; the bytes stay."""
        self.hardware.dead.remove(addresses(memory))

    @contextlib.contextmanager
    def entered(
        self, verb: str, *, is_bound: bool = True, breaks_capture: bool = False
    ) -> Iterator[None]:
        """Do what each verb begins with, and hold the lock."""
        hardware = self.hardware
        hardware.pause()
        with hardware.lock:
            self.calls[verb] += 1
            if self.is_closed:
                hardware.misuse(Misuse.AFTER_CLOSE, verb)
            nth, stays = self._faults.get(verb, (0, False))
            if self.calls[verb] == nth:
                if not stays:
                    raise RuntimeError(f"{verb} failed as planned")
                self.fail(f"{verb} failed as planned")
            hardware.check(self.index)
            state = hardware.thread()
            if is_bound and state.index != self.index:
                hardware.misuse(Misuse.UNBOUND_THREAD, verb)
            if breaks_capture and state.is_capturing:
                hardware.note(Misuse.CAPTURE, verb)
                raise RuntimeError(f"{verb} while a graph is captured")
            yield

    def _count(self, event: SimEvent, verb: str) -> None:
        if not event.is_ours:
            self.foreign_uses[verb] += 1

    def _check_stream(self, stream: SimStream, verb: str) -> None:
        if stream.index != self.index:
            self.hardware.misuse(Misuse.OTHER_DEVICE, f"{verb} on {stream.name}")

    def _check_sides(self, copy: Copy) -> None:
        step = 1 if copy.direction is Direction.TO_HOST else -1
        for at in range(len(copy.batch)):
            device, host = copy.sides(at)[::step]
            known = self._device_memory
            if known and (not within(device, known) or within(host, known)):
                self.hardware.misuse(Misuse.WRONG_DIRECTION, copy.name)
            is_touched = any(overlap(host, pin) for pin in self.pins.values())
            if copy.is_pinned | is_touched and not within(host, self.pins.values()):
                self.hardware.misuse(Misuse.NOT_PINNED, copy.name)
