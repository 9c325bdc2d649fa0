# SPDX-License-Identifier: Apache-2.0
"""
What an accelerator's runtime offers, in the few words that ``AcceleratorDevice`` uses.

A driver decides nothing: it forwards to the runtime (CUDA, torch-npu, the simulated one)
and keeps no books. Which event may be trusted, when a buffer may be used again and what a
failure means is decided once, above it.

Threading: every thread calls ``bind_thread`` before anything else. Events and streams are
used by one thread at a time, which the caller sees to; ``is_done`` is called on the
poller's thread only, for events that nobody records meanwhile; so is ``await_any``.

Errors: ``RuntimeError`` from any verb but ``make_event`` and ``record`` means that the
device has failed. Such an error stays (CUDA calls it sticky), and nothing may be assumed
about copies under way. Events may merely be scarce.
"""

import ctypes
import enum
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from ucm.devices._regions import Storage
from ucm.plan import CopyBatch

__all__ = [
    "Digester",
    "Direction",
    "Driver",
    "Event",
    "News",
    "Placed",
    "Stream",
    "Table",
    "Words",
]

Stream = Any
"""A stream of the runtime; torch's own object where torch has one."""
Event = Any
"""An event of the runtime; torch's own object where torch has one."""
Words = npt.NDArray[np.uint64]


class News(NamedTuple):
    """A number that changes, and what it was when the caller has looked."""

    number: ctypes.c_int
    seen: int


class Direction(enum.Enum):
    """Which way bytes go."""

    TO_HOST = "device_to_host"
    TO_DEVICE = "host_to_device"


@attrs.frozen(eq=False)
class Placed:
    """
    Words in the device's memory.

    Args:
        address: Where they begin.
        owner: Keeps them there.
    """

    address: int
    owner: object


@attrs.frozen(eq=False)
class Table:
    """
    Where the chunks of a group's blocks are.

    Args:
        starts: Address of each chunk of block 0.
        strides: Bytes from each chunk to that of the next block.
        num_chunks: Of a block.
    """

    starts: Placed
    strides: Placed
    num_chunks: int


class Digester(ABC):
    """Computes xxh3-64 in the memory of a device; decides nothing, as a driver does."""

    chunk_bytes: int
    """A block is read by so many bytes at a time, each of them in one piece."""

    @abstractmethod
    def place(self, words: npt.NDArray[np.int64]) -> Placed:
        """
        Copy words to the device's memory; return when they are there.

        Raises:
            OSError: There is no room for them.
        """

    @abstractmethod
    def make_memory(self, num_words: int) -> Words:
        """
        Return zeroed memory of the host that the device reads and writes too.

        Raises:
            OSError: There is none to be had.
        """

    @abstractmethod
    def submit(self, table: Table, job: Words, count: int, stream: Stream) -> None:
        """
        Have xxh3-64 of some blocks computed, behind what *stream* has by now.

        Args:
            table: Where their chunks are.
            job: ``[3, n]`` of what ``make_memory`` returned: the blocks' numbers, their
                seeds, and the digests, which are written.
            count: Of blocks.
            stream: In whose order.

        Raises:
            RuntimeError: The device has failed.
        """


class Driver(ABC):
    """
    One device of one runtime.

    Args:
        index: Of the device, as the runtime counts.
    """

    device_type: str
    """torch's word for where the engine's tensors are: ``cuda``, ``npu``."""
    captures_waits: bool
    """
    Whether a stream that was told to wait for an event waits for the record that was there
    at the call, whatever the owner records later. CUDA promises it. Where it is not
    promised, the event stays borrowed until a fence behind the wait has passed.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def adopt(self, storages: Sequence[Storage]) -> None:  # noqa: B027 - most need not know
        """
        Take note of the engine's memory, for drivers that cannot copy by address.

        Args:
            storages: All that copies will touch; none lets go of them.
        """

    @abstractmethod
    def bind_thread(self) -> None:
        """Make the device the calling thread's current one."""

    def current_index(self) -> int | None:
        """Return which of the runtime's devices is the calling thread's current one."""
        return self.index

    def make_current(self, index: int | None) -> None:  # noqa: B027 - of one device alone
        """
        Undo ``bind_thread``, and open no device for that.

        Args:
            index: What ``current_index`` has said before.
        """

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return whether the thread's current stream is recording a graph."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread submits work."""

    @abstractmethod
    def make_stream(self) -> Stream:
        """Return a new stream, of the lowest priority where there are any."""

    def key(self, stream: Stream) -> Hashable:
        """Return what tells a stream from the device's others, without asking the device."""
        key: Hashable = stream
        return key

    @abstractmethod
    def make_event(self) -> Event:
        """Return a new event that nobody else knows; one that does not spin."""

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Let *event*, one of ours, pass when all work now in *stream* is done."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Hold all work submitted to *stream* from now on until *event* has passed."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """
        Return whether *event* has passed. Never blocks.

        True for an event that was never recorded, as torch says: callers know better
        than to ask.
        """

    def await_any(self, events: Sequence[Event], news: News) -> bool:
        """
        Block until one of *events* may have passed, without the interpreter lock.

        Args:
            events: Ours, as for ``is_done``.
            news: Changed by whoever wants the call to end; it ends by itself before long.

        Returns:
            False, at once, where there is no such wait.
        """
        return False

    def make_digester(self) -> Digester | None:
        """
        Return what computes checksums in the device's memory; None where nothing does.

        Raises:
            OSError: The device's runtime does not take it; the message says why.
        """
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Block the thread until all work submitted to the device is done."""

    @abstractmethod
    def handle(self, event: Event) -> int | None:
        """
        Return the native handle of somebody's event; 0 or None before its first record.

        Raises:
            AttributeError: It is no event of this runtime. Also TypeError, ValueError.
        """

    @abstractmethod
    def device_index(self, event: Event) -> int | None:
        """Return the device of a recorded event; None when the runtime cannot say."""

    @abstractmethod
    def copy(
        self,
        batch: CopyBatch,
        direction: Direction,
        stream: Stream,
        *,
        is_pinned: bool,
    ) -> None:
        """
        Submit copies between device and host memory to *stream*.

        Args:
            batch: Addresses; need not outlive the call. Memory must outlive the copies.
            direction: Of all of them.
            stream: In whose order they run; among themselves they have none.
            is_pinned: Whether ``pin`` has taken all host memory of the batch. If not, the
                call may block until the bytes have moved.
        """

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> None:
        """
        Lock host memory, so that the device reaches it at link speed.

        Raises:
            OSError: It cannot be pinned; the message says why. The memory can still be
                used.
        """

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Undo ``pin``; no copy may be under way."""

    @abstractmethod
    def numa_node(self) -> int | None:
        """Return the NUMA node that the device is attached to; None when unknown."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """Return facts for the log: model, how it copies, driver version."""
