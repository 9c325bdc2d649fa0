# SPDX-License-Identifier: Apache-2.0
"""What a simulated accelerator's streams are made of, and what may be wrong with it."""

import ctypes
import enum
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

from ucm.devices.driver import Direction
from ucm.plan import CopyBatch

__all__ = [
    "Copy",
    "Kernel",
    "Machine",
    "Memory",
    "Misuse",
    "MisuseError",
    "Native",
    "Op",
    "Record",
    "Violation",
    "Wait",
    "addresses",
    "overlap",
    "within",
]


Memory = torch.Tensor | npt.NDArray[np.uint8]
"""What a test gives up: a tensor or an array."""


class Misuse(enum.Enum):
    """What a real device would answer with an error at best, with wrong bytes at worst."""

    AFTER_CLOSE = "used after close"
    CAPTURE = "would break the graph that is being captured"
    CLOSE_IN_USE = "closed under a copy"
    DEADLOCK = "nothing can go on"
    DEAD_MEMORY = "touches memory that was given up"
    DESTROYED_EVENT = "uses a destroyed event"
    NOT_PINNED = "takes memory for pinned that is not"
    OTHER_DEVICE = "mixes devices"
    UNBOUND_THREAD = "on a thread whose current device is another one"
    UNPIN_IN_USE = "unpins memory under a copy"
    WRONG_DIRECTION = "copies the wrong way"


@attrs.frozen
class Violation:
    """One misuse that was found."""

    kind: Misuse
    detail: str


class MisuseError(AssertionError):
    """A misuse that a real runtime would let pass silently; found at the call."""


class Machine(Protocol):
    """What operations need of whatever runs them."""

    dice: random.Random
    dead: list[range]
    """Addresses that nobody may touch any more."""

    def note(self, kind: Misuse, detail: str) -> None:
        """Write a misuse down."""


def addresses(memory: Memory) -> range:
    """Return where contiguous *memory* lies."""
    if isinstance(memory, torch.Tensor):
        start, is_dense = memory.data_ptr(), memory.is_contiguous()
    else:
        start, is_dense = memory.ctypes.data, memory.flags.c_contiguous
    if not is_dense:
        raise ValueError("only contiguous memory has one range of addresses")
    return range(start, start + memory.nbytes)


def within(part: range, wholes: Iterable[range]) -> bool:
    """Return whether one of *wholes* has all of *part*."""
    return any(
        whole.start <= part.start and part.stop <= whole.stop for whole in wholes
    )


def overlap(a: range, b: range) -> bool:
    """Return whether two ranges of addresses have a byte in common."""
    return max(a.start, b.start) < min(a.stop, b.stop)


class Op(ABC):
    """Something in a stream."""

    __slots__ = ("is_done", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_done = False

    def is_ready(self) -> bool:
        """Return whether it could go on now; asked of the first of a stream only."""
        return True

    @abstractmethod
    def step(self, machine: Machine) -> str:
        """Do one step, set ``is_done`` after the last, and return the step's name."""


class Kernel(Op):
    """A function, done in one step."""

    __slots__ = ("_kernel",)

    def __init__(self, kernel: Callable[[], object], name: str) -> None:
        super().__init__(name)
        self._kernel = kernel

    def step(self, machine: Machine) -> str:
        """Call the function."""
        self._kernel()
        self.is_done = True
        return self.name


class Copy(Op):
    """
    A batch of copies; which comes first is drawn.

    Args:
        batch: Copied from.
        direction: Of all.
        is_pinned: What the caller said of the host memory.
        name: Of the operation.
    """

    __slots__ = ("_left", "batch", "direction", "is_pinned")

    def __init__(
        self, batch: CopyBatch, direction: Direction, name: str, *, is_pinned: bool
    ) -> None:
        super().__init__(name)
        self.batch = CopyBatch(
            batch.sources.copy(), batch.targets.copy(), batch.nbytes.copy()
        )
        self.direction = direction
        self.is_pinned = is_pinned
        self._left = list(range(len(batch)))
        self.is_done = not self._left

    def sides(self, at: int) -> tuple[range, range]:
        """Return the addresses that copy *at* reads, and those that it writes."""
        source, target = int(self.batch.sources[at]), int(self.batch.targets[at])
        nbytes = int(self.batch.nbytes[at])
        return range(source, source + nbytes), range(target, target + nbytes)

    def touches(self, memory: range) -> bool:
        """Return whether a copy that is left reads or writes *memory*."""
        return any(
            overlap(side, memory) for at in self._left for side in self.sides(at)
        )

    def step(self, machine: Machine) -> str:
        """Move one copy's bytes, unless they are nobody's any more."""
        at = self._left.pop(machine.dice.randrange(len(self._left)))
        self.is_done = not self._left
        source, target = self.sides(at)
        name = f"{self.name}.{at}"
        if any(
            overlap(side, dead) for side in (source, target) for dead in machine.dead
        ):
            machine.note(Misuse.DEAD_MEMORY, name)
        else:
            ctypes.memmove(target.start, source.start, len(source))
        return name


class Native:
    """What an event's handle stands for."""

    __slots__ = ("handle", "index", "is_alive", "latest")

    def __init__(self, handle: int, index: int) -> None:
        self.handle = handle
        self.index = index
        self.is_alive = True
        self.latest: Op | None = None


class Record(Op):
    """A place in a stream; done when all before it is."""

    __slots__ = ()

    def step(self, machine: Machine) -> str:
        """Be done."""
        self.is_done = True
        return self.name


class Wait(Op):
    """
    Holds its stream until a record is done.

    Args:
        native: The event; its latest record counts where none was captured.
        captured: The record that was there at the call, where the runtime looks then.
        name: Of the operation.
    """

    __slots__ = ("_captured", "_native")

    def __init__(self, native: Native, captured: Op | None, name: str) -> None:
        super().__init__(name)
        self._native = native
        self._captured = captured

    def is_ready(self) -> bool:
        """Return whether the record is done."""
        record = self._captured or self._native.latest
        return record is None or record.is_done

    def step(self, machine: Machine) -> str:
        """Let the stream go on."""
        if self._captured is None and not self._native.is_alive:
            machine.note(Misuse.DESTROYED_EVENT, self.name)
        self.is_done = True
        return self.name
