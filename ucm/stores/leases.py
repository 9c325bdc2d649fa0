# SPDX-License-Identifier: Apache-2.0
"""What the leases of a store promise; see ``ucm.stores.abc``."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import index
from typing import Any, Self

from ucm.blocks import PackedKey
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    StoreUnavailableError,
    text_of,
)
from ucm.plan import HostSlots
from ucm.seals import block_checksum

__all__ = [
    "ReadLease",
    "WriteLease",
    "aligned",
    "check_checksum",
    "check_size",
    "seals_of",
    "told_count",
    "told_each",
]


def aligned(digests: Sequence[int], keys: Sequence[PackedKey]) -> Sequence[int]:
    """
    Return digests, one for each key.

    Raises:
        ValueError: They are more or fewer; a bug of the caller.
    """
    if len(digests) != len(keys):
        raise ValueError(f"{len(digests)} checksums for {len(keys)} blocks")
    return digests


def told_count(what: str, told: Any, most: int) -> int:  # noqa: ANN401 - of somebody else's
    """
    Return how many blocks a store told, as a plain number: numpy's go to no other process.

    Raises:
        StoreUnavailableError: It is no whole number from 0 to *most*.
    """
    try:
        count = int(index(told))
    except TypeError as exc:
        raise StoreUnavailableError(f"{what}: {text_of(exc)}") from exc
    if not 0 <= count <= most:
        raise StoreUnavailableError(f"{what} told {count}, of {most} blocks")
    return count


def told_each(what: str, told: Iterable[Any], count: int) -> list[bool]:
    """
    Return what a store told of each of *count* blocks, as plain values.

    Raises:
        StoreUnavailableError: It told of more or fewer.
        TypeError: It told of none, and something else.
    """
    each = list(map(bool, told))
    if len(each) != count:
        raise StoreUnavailableError(f"{what} told of {len(each)} blocks, not {count}")
    return each


def seals_of(
    keys: Sequence[PackedKey], slots: HostSlots, part: Iterable[int]
) -> Iterator[int]:
    """Yield the checksums of the bytes that some blocks of a lease have now."""
    for at in part:
        yield block_checksum(keys[at], slots.block(at).data)


def check_size(key: PackedKey, nbytes: int, slots: HostSlots) -> None:
    """
    Look at the size of a block that is read with others.

    Raises:
        BlockCorruptError: It is not theirs.
    """
    if nbytes != slots.block_bytes:
        wanted = f"the first of its lease {slots.block_bytes}"
        raise BlockCorruptError(key, f"it has {nbytes} bytes, {wanted}")


def check_checksum(key: PackedKey, found: int, known: int) -> None:
    """
    Compare a block's checksum with what is known.

    Raises:
        BlockCorruptError: It is another one.
    """
    if found != known:
        raise BlockCorruptError(key, f"checksum {found:016x} is not {known:016x}")


class WriteLease(ABC):
    """
    Slots that one writer fills and then publishes all at once.

    Used as a context manager: leaving without ``commit`` discards. Owned by one ticket;
    not safe for two threads at once.
    """

    keys: tuple[PackedKey, ...]
    """The keys granted, in the order asked; those already stored are left out."""
    positions: tuple[int, ...]
    """Index of each granted key in the sequence that was asked for."""
    num_stored: int
    """Keys asked for that are stored, or being written by another lease."""
    slots: HostSlots
    """Where the bytes go; one slot per granted key."""

    @abstractmethod
    def seal(self, start: int, stop: int) -> None:
        """
        Take the bytes of granted blocks ``start`` to ``stop`` as final.

        Computes their checksums, and moves the bytes where the store does not offer
        native buffers. Each block that ``commit`` publishes must be sealed once before.

        Raises:
            StoreUnavailableError: The store did not answer.
        """

    takes_digests: bool = False
    """Whether there is ``seal_with``."""

    def seal_with(self, digests: Sequence[int]) -> None:
        """
        Take the bytes of all granted blocks as final, whose checksums are known.

        Args:
            digests: ``block_checksum`` of the bytes that were copied into each slot; anything
                for one that ``commit`` leaves out.

        Raises:
            NotImplementedError: The store computes them itself.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no digests")

    def seals(self, start: int, stop: int) -> list[int]:
        """Return the checksums of blocks that were sealed: ``block_checksum`` of each."""
        return list(seals_of(self.keys, self.slots, range(start, stop)))

    @abstractmethod
    def commit(self, without: Collection[int] = ()) -> int:
        """
        Publish every granted block in one step and end the lease.

        Args:
            without: Indices of granted blocks that are given back instead, whatever
                is in their slots; they need not be sealed.

        Returns:
            Blocks that became visible. A block that another writer committed in the
            meantime is not counted; its slot is given back.

        Raises:
            LeaseExpiredError: The lease has ended, or the store took it back.
            StoreUnavailableError: Nothing became visible.
        """

    @abstractmethod
    def discard(self) -> None:
        """Give the slots back. Does nothing on a lease that has ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class ReadLease(ABC):
    """
    Committed blocks that one reader copies out.

    Optimistic: a store may recycle a slot while it is read. The order is ``verify``,
    copy, ``recheck``; only after ``recheck`` are the copied bytes known to be the
    block's.
    """

    keys: tuple[PackedKey, ...]
    slots: HostSlots

    @abstractmethod
    def verify(self, start: int, stop: int) -> None:
        """
        Compare the bytes of blocks ``start`` to ``stop`` with their checksums.

        Raises:
            BlockCorruptError: Length or checksum is wrong.
            StoreUnavailableError: The store did not answer.
        """

    skips_verified: bool = False
    """Whether ``verify`` leaves out what was verified before."""
    takes_digests: bool = False
    """Whether there is ``verify_with``."""

    def verify_with(self, start: int, digests: Sequence[int]) -> None:
        """
        Compare the checksums of copies of blocks with theirs, from *start* on.

        Args:
            start: The first of these blocks.
            digests: ``block_checksum`` of what each was copied to, or of what was copied.

        Raises:
            BlockCorruptError: As ``verify``.
            NotImplementedError: The store verifies its own bytes only.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no digests")

    @abstractmethod
    def recheck(self) -> None:
        """
        Make sure that no slot was recycled since the lease was opened.

        Raises:
            BlockNotFoundError: One was; what was copied from it is garbage.
        """

    def seals(self, start: int, stop: int) -> list[int]:
        """Return the checksums of blocks that were verified: ``block_checksum`` of each."""
        return list(seals_of(self.keys, self.slots, range(start, stop)))

    def recycled(self) -> list[bool]:
        """Return of each block whether its slot may have been recycled; see ``recheck``."""
        try:
            self.recheck()
        except BlockNotFoundError:
            return [True] * len(self.keys)
        return [False] * len(self.keys)

    @abstractmethod
    def close(self) -> None:
        """End the lease. Does nothing on a lease that has ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
