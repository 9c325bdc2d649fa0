# SPDX-License-Identifier: Apache-2.0
"""
What a store of KV blocks promises.

All verbs are plain blocking calls. They run on the runtime's copy threads, never on
the event loop and never on the engine's thread; only ``match``, ``contains``, ``fates``
and ``touch`` are also called from the scheduler's thread and must answer within
microseconds per key or give up. A store may be used by several threads at once.
Neighbouring stages can therefore run as one worker call, and a store whose client is
asynchronous bridges inside its own implementation.

A block is visible to ``match`` and ``read`` only after ``WriteLease.commit``, and only
with the bytes that were in the lease's slots when ``seal`` ran over them. Leaving a
lease in any other way leaves nothing behind.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import KeySpace, PackedKey
from ucm.fates import Fate, Told
from ucm.stores.leases import ReadLease, WriteLease
from ucm.uses import Uses

__all__ = [
    "Change",
    "Changes",
    "Cursor",
    "ReadLease",
    "Store",
    "StoreCapabilities",
    "StoreGrowth",
    "StoreStats",
    "WriteLease",
]


@attrs.frozen(kw_only=True)
class StoreCapabilities:
    """What a store can do, as a value; nobody needs to ask by trying."""

    durable: bool
    """Committed blocks outlive the process."""
    shared: bool
    """Other processes of the node see committed blocks."""
    native_buffers: bool
    """Leases expose the final place of the bytes: sealing copies nothing."""
    max_block_bytes: int
    """Largest block that fits a slot."""
    keeps: bool = True
    """Committed blocks can be found again; a store for measuring may keep none."""
    tier: str = "memory"
    """Where blocks lie, a word for metrics: ``memory`` or ``disk``."""
    caveat: str = ""
    """What speaks against this store as it was opened, as advice; told once."""


@attrs.frozen(kw_only=True)
class StoreStats:
    """Occupancy, in blocks, and totals since this process opened the store."""

    capacity_blocks: int
    """That blocks of this size can have, beside those of others and with the memory that is there."""
    committed_blocks: int
    reserved_blocks: int
    evicted_blocks_total: int
    curbed_blocks_total: int = 0
    """Blocks that should have been retained, beyond the store's budget for that."""
    over_share_blocks_total: int = 0
    """Blocks refused to tenants that had their share, and no older block of theirs."""
    capacity_bytes: int = 0  # that slots may take, of all sizes together
    populated_bytes: int = attrs.Factory(lambda at: at.capacity_bytes, takes_self=True)
    """Those of them that are there by now."""


@attrs.frozen
class StoreGrowth:
    """How much of its memory a store has, which comes to it in the background."""

    nbytes: int
    """That it has by now, of its buffers from the start: whole slots, and whole pages."""
    total: int
    """That it was to have; 0: it does not grow."""
    problem: str = ""
    """Why it will not get more; empty while it grows, or when it has all."""


class Change(NamedTuple):
    """A block that came or went; in a listing, one that is there."""

    key: PackedKey
    nbytes: int
    """Its bytes; 0: it was removed."""
    tenant: int = 0
    """Whose share of the store it takes, as long as it is there; 0: nobody's. Tenants that have one
    share together are told as one."""


class Cursor(NamedTuple):
    """How far a reader of changes has come; nobody else's business."""

    epoch: int
    sequence: int
    unlisted_from: int


@attrs.frozen
class Changes:
    """
    What a reader of changes is told at once.

    Args:
        told: In the order in which it happened.
        cursor: What to ask with next.
        begins: A listing of all that is there begins with it, because the reader is new or
            was left behind; what it knew before may be gone.
        is_all: There is nothing more right now.
    """

    told: tuple[Change, ...]
    cursor: Cursor
    begins: bool
    is_all: bool


class Store(ABC):
    """Keeps blocks by packed key. See the module's text for threads and promises."""

    @property
    @abstractmethod
    def capabilities(self) -> StoreCapabilities:
        """What this store can do; constant while it is open."""

    @property
    def buffers(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """
        The host memory that all slots of leases lie in, if it stays the same.

        ``[num_slots, slot_bytes]`` each; a device may pin it until the store is closed.
        """
        return ()

    @property
    def directory(self) -> Path | None:
        """Where it lies on this machine, for what its users put beside it; None: nowhere."""
        return None

    def watch(self, tell: Callable[[StoreGrowth], None]) -> None:
        """
        Have *tell* called now and then, on any thread, and at last with the last word.

        Which is that all memory is there, or why no more comes; at once if it was before.
        """
        tell(StoreGrowth(0, 0))

    def hash_on(self, most_threads: int) -> None:  # noqa: B027 - a hint
        """
        Let so many threads of this process compute checksums at once.

        Until this is called it is the thread that asks. A hint: ignored by a store that
        computes none, or has no means to.
        """

    @abstractmethod
    def match(self, keys: Sequence[PackedKey]) -> int:
        """Return how many keys from the start are committed. No side effect."""

    @abstractmethod
    def contains(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return for each key whether it is committed. No side effect."""

    def fates(self, keys: Sequence[PackedKey]) -> list[Told]:
        """
        Return what has become of blocks, for people: a hint, and bounded memory.

        As cheap as ``contains`` for a few keys; no side effect.
        """
        return [Told(Fate.UNKNOWN)] * len(keys)

    def everywhere(self, keys: Sequence[PackedKey]) -> list[bool]:
        """
        Return for each key whether it is committed, whatever size its block has.

        A hint: of other sizes than ours what ``keyspaces`` has seen the last time.
        """
        return self.contains(keys)

    @abstractmethod
    def touch(self, keys: Sequence[PackedKey], uses: Uses | None = None) -> None:
        """
        Mark blocks as used; unknown keys are passed over.

        A use before the one that is known changes nothing. Without *uses* it is now, and
        the first of the keys last. Whose they are stays as it was.
        """

    @abstractmethod
    def reserve(
        self, keys: Sequence[PackedKey], block_bytes: int, uses: Uses | None = None
    ) -> WriteLease:
        """
        Lease one slot for each key that is neither stored nor being written.

        Evicts least recently used blocks where no slot is free, but none for a block that
        counts as used before it. When fewer slots can be had than keys need one, they
        go to those used last, and among them to the first keys.

        Args:
            keys: Distinct packed keys.
            block_bytes: Bytes of each block.
            uses: When they count as used; now, the first of them last, if left out.

        Returns:
            A lease over the granted keys; possibly over none, when all are stored.

        Raises:
            StoreFullError: No slot at all could be had.
            StoreUnavailableError: The store did not answer.
            ValueError: *block_bytes* is more than ``max_block_bytes`` or below 1.
        """

    @abstractmethod
    def read(self, keys: Sequence[PackedKey]) -> ReadLease:
        """
        Open committed blocks for reading, all of them or none.

        That is no use of them: see ``touch``.

        Raises:
            BlockNotFoundError: A key is not committed.
            StoreUnavailableError: The store did not answer.
        """

    @abstractmethod
    def forget(self, keys: Sequence[PackedKey], fate: Fate = Fate.FORGOTTEN) -> int:
        """
        Make committed blocks invisible and free their slots; return how many.

        Args:
            keys: Of the blocks.
            fate: What is remembered of them, where that is kept.
        """

    @abstractmethod
    def clear(self, prefix: bytes) -> int:
        """Forget every committed block whose packed key starts with *prefix*."""

    @abstractmethod
    def describe(self, keyspace: KeySpace) -> None:
        """Keep the text of a key space beside the blocks, for ``keyspaces``."""

    @abstractmethod
    def keyspaces(self) -> dict[bytes, KeySpace]:
        """Return every key space described in this store, by digest."""

    def changes(self, cursor: Cursor | None) -> Changes:
        """
        Return what was stored and removed since the last call, some of it at a time.

        A block that changes while all are listed may be told of twice. Which were removed
        before a listing, the listing shows by leaving them out.

        Args:
            cursor: That of the last answer; None at first.

        Raises:
            NotImplementedError: The store keeps no record of changes.
            StoreUnavailableError: The store did not answer.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no record of changes")

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return occupancy and totals."""

    @abstractmethod
    def close(self) -> None:
        """
        End all leases of this object and let go of its resources.

        Idempotent. Committed blocks stay where the store is durable. Any later verb
        raises ``StoreUnavailableError``.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
