# SPDX-License-Identifier: Apache-2.0
"""What the index file of a slab consists of: header, arrays and one record a slot."""

import enum
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

__all__ = [
    "ABSENT",
    "COMMITTED",
    "FREE",
    "GROUP",
    "KEY_WORDS",
    "MOST",
    "NEVER",
    "NUM_TENANTS",
    "RECORD",
    "RESERVED",
    "Grant",
    "IndexLayout",
    "Limits",
    "Sighting",
    "SlotState",
    "Word",
    "is_used",
]

_HEADER_BYTES = 4096
KEY_WORDS = 11
GROUP = 256
"""Slots that are counted together, and of whose stamps one bound is kept."""
MOST = 4096
"""Slots that one change touches at most: what a death may leave to be put right."""
NUM_TENANTS = 1 << 16
"""Places in the table of tenants; the first belongs to nobody."""
NEVER = np.iinfo(np.int64).max
"""Stamp of a slot that holds nothing to evict."""

RECORD = np.dtype(
    [
        ("unused", "V4"),
        ("owner", "u4"),
        ("generation", "u8"),
        ("nbytes", "u8"),
        ("checksum", "u8"),
        ("hash", "u8"),
        ("key", "u8", (KEY_WORDS,)),
    ]
)
"""What is known of one slot: 128 bytes, never across a page."""


class SlotState(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    ABSENT = 3
    """There is no memory for it."""


# Members of an enum cost more than the numpy calls that they are given to.
FREE = int(SlotState.FREE)
RESERVED = int(SlotState.RESERVED)
COMMITTED = int(SlotState.COMMITTED)
ABSENT = int(SlotState.ABSENT)
_USED = np.zeros(256, dtype=np.bool_)  # a byte of damaged memory may say anything
_USED[[RESERVED, COMMITTED]] = True


def is_used(states: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return which of these states are of slots that have a key."""
    return _USED[states]


class Word(enum.IntEnum):
    """Places in the header, 8 bytes each."""

    MAGIC = 0
    SEED = 1
    VERSION = 2
    GENERATION = 3
    PUBLISHING = 4
    NUM_FREE = 5
    NUM_COMMITTED = 6
    NUM_RESERVED = 7
    NUM_EVICTED = 8
    OWNER = 9
    # 10 to 13 were those of slabs on disks.
    JOURNAL = 14
    JOURNAL_LEAVING = 19
    JOURNAL_TENANTS = 15
    FREE_GROUP = 16
    NUM_CURBED = 17
    NUM_OVER_SHARE = 18
    CHANGES = 20
    EPOCH = 21


@attrs.frozen
class IndexLayout:
    """Where each part of the index of *num_slots* slots lies in its file."""

    num_slots: int

    @property
    def num_buckets(self) -> int:
        """Chains: a power of two, two to four for each slot."""
        return 1 << (2 * self.num_slots).bit_length()

    @property
    def num_groups(self) -> int:
        """Groups of slots; the last may have less than ``GROUP``."""
        return -(-self.num_slots // GROUP)

    @property
    def num_changes(self) -> int:
        """Places for what changed of late: a power of two, and room for any one change."""
        return 1 << (min(max(self.num_slots, 64), 4 * MOST) - 1).bit_length()

    @property
    def parts(self) -> tuple[tuple[str, "np.dtype[np.generic]", int], ...]:
        """Name, element type and length of each array, in file order."""
        return (
            ("header", np.dtype("i8"), _HEADER_BYTES // 8),
            ("journal", np.dtype("i8"), 2 * MOST),
            ("journal_tenants", np.dtype("i8"), 4 * MOST),
            ("shares", np.dtype("i8"), NUM_TENANTS),
            ("tally", np.dtype("u2"), 3 * self.num_groups),
            ("bounds", np.dtype("i8"), -(-self.num_groups // GROUP) * GROUP),
            ("uppers", np.dtype("i8"), -(-self.num_groups // GROUP)),
            ("heads", np.dtype("i4"), self.num_buckets),
            ("nexts", np.dtype("i4"), self.num_slots),
            ("states", np.dtype("u1"), self.num_groups * GROUP),
            ("payers", np.dtype("u2"), self.num_slots),
            ("stamps", np.dtype("i8"), self.num_groups * GROUP),
            ("change_kinds", np.dtype("u1"), self.num_changes),
            ("changes", RECORD, self.num_changes),
            ("records", RECORD, self.num_slots),
        )

    def place(self) -> dict[str, tuple[int, "np.dtype[np.generic]", int]]:
        """Return offset, element type and length of each array."""
        placed = {}
        offset = 0
        for name, dtype, length in self.parts:
            placed[name] = (offset, dtype, length)
            offset += -(-dtype.itemsize * length // _HEADER_BYTES) * _HEADER_BYTES
        return placed

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        offset, dtype, length = self.place()["records"]
        size = offset + dtype.itemsize * length
        return -(-size // _HEADER_BYTES) * _HEADER_BYTES


@attrs.frozen
class Limits:
    """
    How much of a slab single users may claim, as shares of what their class can have.

    Args:
        retained: Blocks that count as used at a moment that is still to come.
        of_tenant: Blocks of one tenant.
    """

    retained: float
    of_tenant: float


@attrs.frozen(eq=False)
class Grant:
    """
    Slots that one lease holds: positions asked for and the slot of each.

    ``num_stored`` keys were in a slot already, committed or being written. ``moments``
    are those that the blocks count as used at.
    """

    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    generation: int
    num_stored: int
    moments: npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class Sighting:
    """
    What the index said about keys at one moment.

    Where ``committed`` is False the other columns mean nothing.
    """

    committed: npt.NDArray[np.bool_]
    slots: npt.NDArray[np.int64]
    records: npt.NDArray[Any]
    """A copy of the slots' records."""

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        """Of each slot's content."""
        generations: npt.NDArray[np.uint64] = self.records["generation"]
        return generations

    @property
    def nbytes(self) -> npt.NDArray[np.uint64]:
        """Of each block."""
        nbytes: npt.NDArray[np.uint64] = self.records["nbytes"]
        return nbytes

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        """Of each block."""
        checksums: npt.NDArray[np.uint64] = self.records["checksum"]
        return checksums
