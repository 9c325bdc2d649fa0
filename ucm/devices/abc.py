# SPDX-License-Identifier: Apache-2.0
"""
What a device promises to the pipeline.

Threading: ``register``, ``unregister``, ``pin``, ``begin_step``, ``lease`` and ``synchronize`` run on
the engine's thread; ``gather`` and ``scatter`` on copy threads, possibly several at once;
``clear`` and ``Fence`` methods anywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ucm.blocks import BlockId, GroupId, RowId
from ucm.layout import KVLayout
from ucm.plan import HostSlots

__all__ = ["Device", "EventRef", "Fence"]


class EventRef(Protocol):
    """An event that the engine owns and lends; torch's, of whatever device."""

    def query(self) -> bool:
        """Return whether the recorded work is done; True also if none was recorded."""


class Fence(ABC):
    """
    An event that we own; the only thing we ever wait for.

    Once it is done it stays so.
    """

    @abstractmethod
    def is_done(self) -> bool:
        """
        Return whether all work before the fence is done. Never blocks.

        Raises:
            DeviceFailedError: The device has failed: the fence will never pass.
        """

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """
        Block the thread up to *timeout* seconds; return whether it is done.

        Raises:
            DeviceFailedError: The device has failed: the fence will never pass.
        """

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        """
        Call *callback* once when the fence has passed or failed, on any thread.

        At once if that was before. The callback is short and raises nothing.

        Returns:
            False when nobody would call: whoever waits looks at ``is_done`` instead.
        """
        return False

    def land(self) -> None:
        """
        Bring what was gathered to its final place, where it is not there yet.

        On a copy thread, once the fence has passed, and once only.
        """
        return

    tells_digests: bool = False
    """Whether ``digests`` tells those of the blocks that were copied."""

    def digests(self) -> Sequence[int]:
        """
        Return the checksum of each block that was copied, in order, of the device's bytes.

        A synchronous device may tell those of what it is just about to copy. Seeded as the copy was told; once the fence has passed.

        Raises:
            NotImplementedError: It does not tell.
        """
        raise NotImplementedError(f"{type(self).__name__} tells no digests")

    def close(self) -> None:
        """Give back what the copy needed of the device's own. Idempotent."""
        return


class Device(ABC):
    """
    Moves bytes between the engine's paged blocks and host slots.

    Every method raises ``DeviceError`` for an unknown group, row, block or slot, and after
    ``close``; those that lease, wait or copy also before ``register``. ``ValueError`` when
    aligned arguments differ in length. All are bugs of the caller, found before any byte
    moves.
    """

    is_synchronous: bool
    """Whether ``gather`` and ``scatter`` return only after the bytes have moved."""
    tells_digests: bool = False
    """
    Whether ``scatter`` takes seeds, and may return a fence that tells digests; ``gather``
    too, if it is not synchronous. Set to False by whoever finds that they are wrong.
    """

    @abstractmethod
    def register(self, layout: KVLayout, kv_caches: Mapping[str, object]) -> None:
        """
        Take the engine's KV cache, before any other call and again after ``unregister``.

        Args:
            layout: Groups and rows.
            kv_caches: Layer name to the engine's tensor. Borrowed for the engine's
                lifetime; must not be reallocated.

        Raises:
            LayoutError: A tensor does not lie as the layout says; names the layer.
        """

    @abstractmethod
    def unregister(self) -> None:
        """
        Let go of the engine's KV cache, whose memory is about to go away.

        No copy may be under way. What is pinned stays so; copies and leases raise
        ``DeviceError`` until ``register``. Idempotent.
        """

    @abstractmethod
    def pin(self, memory: npt.NDArray[np.uint8]) -> str:
        """
        Make host memory fast to reach, before the first copy uses it.

        Only a matter of speed: memory that cannot be pinned, or that nobody pinned, is
        copied all the same.

        Args:
            memory: ``[num_slots, slot_bytes]`` of a store, or a piece of it in which every
                slot is whole. Borrowed until ``close``.

        Returns:
            Why it is not pinned; empty when it is, or need not be.
        """

    def hash_on(self, most_threads: int) -> None:  # noqa: B027 - a hint
        """
        Let so many threads of this process compute checksums at once, as in ``Store``.

        Asked of a synchronous device that tells digests; any other may ignore it.
        """

    def numa_node(self) -> int | None:
        """Return the NUMA node that copies had best be made on; None when any is."""
        return None

    def describe(self) -> Mapping[str, str]:
        """Return facts for the log, such as how bytes are copied."""
        return {}

    def stage(self, nbytes: int, slot_bytes: int) -> str:
        """
        Take host memory for copies whose slots are not pinned, before the first of them.

        For devices to which that makes a difference.

        Args:
            nbytes: At most so much.
            slot_bytes: Of the largest block.

        Returns:
            Why it is not pinned; empty when it is, or need not be.

        Raises:
            ConfigError: That is less than one slot.
        """
        return ""

    @abstractmethod
    def begin_step(self, step: int) -> None:
        """
        Say that the engine's next step begins: what was recorded before is stale.

        Args:
            step: Any number that the step before did not have.
        """

    @abstractmethod
    def lease(self, event: EventRef | None = None) -> Fence:
        """
        Return a fence behind everything the engine has submitted so far.

        Args:
            event: Behind this event instead, which the engine has recorded in this
                step. Borrowed for the duration of the call only.

        Raises:
            EventNotRecordedError: *event* proves nothing; subclasses say why.
            ForeignEventError: *event* is another device's.
            GraphCaptureError: The engine is recording a graph.
            DeviceFailedError: The device has failed.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """
        Block until everything that the engine has submitted so far is done.

        Raises:
            DeviceFailedError: The device has failed.
        """

    @abstractmethod
    def gather(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
        slots: HostSlots,
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """
        Copy pages of blocks into their slots.

        Args:
            group_id: Decides where each row lies within a slot.
            row_ids: The rows to copy; of the group.
            block_ids: ``[n]`` blocks in the engine's pool.
            slots: ``[n]`` slots, aligned with *block_ids*.
            seeds: ``[n]`` of the blocks' checksums, for devices that tell digests.

        Returns:
            Passes when the source may be overwritten; then, behind ``land``, the slots
            are readable. To be closed by the caller, at whatever end.

        Raises:
            DeviceError: A block id is out of range, or the copy failed. Nothing
                touches source or slots any more when this is raised.
        """

    @abstractmethod
    def scatter(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        slots: HostSlots,
        block_ids: Sequence[BlockId],
        seeds: Sequence[int] | None = None,
    ) -> Fence:
        """Copy slots into pages; the mirror of ``gather``."""

    @abstractmethod
    def clear(
        self,
        group_id: GroupId,
        row_ids: Sequence[RowId],
        block_ids: Sequence[BlockId],
    ) -> Fence:
        """
        Zero pages of blocks, behind every ``scatter`` that was asked for before.

        For what must not stay in blocks that go back to the engine. ``unregister`` and
        ``close`` wait until it is over.

        Returns:
            Passes when the pages are zero; calls back when it is over.

        Raises:
            DeviceError: A block id is out of range; nothing is zeroed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the engine's tensors. Idempotent; no copy may be under way."""
