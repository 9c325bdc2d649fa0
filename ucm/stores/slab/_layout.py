# SPDX-License-Identifier: Apache-2.0
"""What the index file of a slab consists of: header, arrays and one record a slot."""

import enum
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ucm.stores.slab._chains import KEY_WORDS

__all__ = ["RECORD", "Grant", "IndexLayout", "Sighting", "SlotState", "Word"]

_HEADER_BYTES = 4096

RECORD = np.dtype(
    [
        ("state", "u1"),
        ("unused", "V3"),
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
    CLEAN = 10
    BOOT = 11  # and 12
    CLOCK_BASE = 13


@attrs.frozen
class IndexLayout:
    """Where each part of the index of *num_slots* slots lies in its file."""

    num_slots: int

    @property
    def num_buckets(self) -> int:
        """Chains: a power of two, two to four for each slot."""
        return 1 << (2 * self.num_slots).bit_length()

    @property
    def parts(self) -> tuple[tuple[str, "np.dtype[np.generic]", int], ...]:
        """Name, element type and length of each array, in file order."""
        return (
            ("header", np.dtype("i8"), _HEADER_BYTES // 8),
            ("heads", np.dtype("i4"), self.num_buckets),
            ("nexts", np.dtype("i4"), self.num_slots),
            ("free", np.dtype("i4"), self.num_slots),
            ("stamps", np.dtype("i8"), self.num_slots),
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
