# SPDX-License-Identifier: Apache-2.0
"""
How a drive's file is cut, and the marks in it by which an index is made again. Pure.

The file is a row of *extents* of one size. An extent's first page is its *mark*: a serial
number, drawn when it was taken, and the pages of data in each of its slots. Behind it are the
slots, each its data and then one page with the *stamp*::

    bytes 0-127    the block's envelope
    bytes 128-131  magic, ``UCMS``
    bytes 132-139  the extent's serial number
    bytes 140-147  where in the file the slot begins
    bytes 148-155  sequence number of the write
    bytes 156-163  xxh3-64 of the slot's first page
    bytes 164-171  xxh3-64 of the bytes before

A write goes through a slot from its beginning to its end. One that a death has cut short has
changed the first page or nothing, and has not written its stamp; so a stamp whose first page
is not the one it names stands behind a block that is no longer there.
"""

import itertools
import operator
import struct
from collections.abc import Sequence

import attrs
from xxhash import xxh3_64_intdigest

from ucm.backends.envelope import HEADER_BYTES, Envelope, headers_of
from ucm.blocks import PackedKey

__all__ = [
    "PAGE",
    "Geometry",
    "Mark",
    "Stamp",
    "checksums_in",
    "pages_of",
    "stamps_of",
]

PAGE = 4096
_STAMP = struct.Struct(">4sQQQQ")
_MARK = struct.Struct(">4sBxxxQQ")
_CHECK = struct.Struct(">Q")
_STAMP_MAGIC, _MARK_MAGIC, _VERSION = b"UCMS", b"UCMX", 1
_STAMP_BYTES = HEADER_BYTES + _STAMP.size
_TOLD = struct.Struct(">16xQ104x4sQQQQQ")
"""Of a stamp: the checksum of the block, and all that is not of its envelope."""
_LARGEST_EXTENT = 64 << 20
_LEAST_EXTENTS = 16


def pages_of(nbytes: int) -> int:
    """Return how many pages so many bytes need; at least one."""
    return max(1, -(-nbytes // PAGE))


@attrs.frozen
class Geometry:
    """
    How a file is cut.

    Args:
        num_extents: In it.
        extent_bytes: Of each; whole pages.
    """

    num_extents: int
    extent_bytes: int

    @classmethod
    def fit(cls, capacity_bytes: int, extent_bytes: int = 0) -> "Geometry":
        """Cut a capacity, in extents as large as useful unless their size is given."""
        if not extent_bytes:
            extent_bytes = min(_LARGEST_EXTENT, capacity_bytes // _LEAST_EXTENTS)
            extent_bytes -= extent_bytes % PAGE
        return cls(capacity_bytes // max(extent_bytes, 1), extent_bytes)

    @property
    def max_block_bytes(self) -> int:
        """The largest block that an extent holds."""
        return self.extent_bytes - 2 * PAGE

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return self.num_extents * self.extent_bytes

    def num_slots(self, pages: int) -> int:
        """Return how many slots with so many pages of data an extent holds."""
        return (self.extent_bytes - PAGE) // ((pages + 1) * PAGE)

    def place(self, extent: int, pages: int, slot: int) -> int:
        """Return where in the file a slot begins."""
        return extent * self.extent_bytes + PAGE + slot * (pages + 1) * PAGE


@attrs.frozen
class Mark:
    """
    What an extent's first page says.

    Args:
        serial: Of the extent since it was taken; in each of its stamps.
        pages: Of data in each slot.
    """

    serial: int
    pages: int

    def encode(self) -> bytes:
        """Return the whole page."""
        fields = _MARK.pack(_MARK_MAGIC, _VERSION, self.serial, self.pages)
        return (fields + _CHECK.pack(xxh3_64_intdigest(fields))).ljust(PAGE, b"\0")

    @classmethod
    def decode(cls, page: memoryview, geometry: Geometry) -> "Mark | None":
        """Read a first page; None where no extent was ever begun, or for garbage."""
        fields = bytes(page[: _MARK.size])
        magic, version, serial, pages = _MARK.unpack(fields)
        (check,) = _CHECK.unpack_from(page, _MARK.size)
        if (magic, version, check) != (
            _MARK_MAGIC,
            _VERSION,
            xxh3_64_intdigest(fields),
        ):
            return None
        return cls(serial, pages) if pages and geometry.num_slots(pages) else None


@attrs.frozen
class Stamp:
    """
    What the page behind a slot's data says.

    Args:
        envelope: Of the block.
        serial: Of the extent.
        place: Where in the file the slot begins.
        sequence: Of writes; the higher, the later.
        first: xxh3-64 of the slot's first page.
    """

    envelope: Envelope
    serial: int
    place: int
    sequence: int
    first: int

    @classmethod
    def decode(cls, page: memoryview) -> "Stamp | None":
        """Read a page; None for garbage, or where there is none."""
        fields = bytes(page[:_STAMP_BYTES])
        (check,) = _CHECK.unpack_from(page, _STAMP_BYTES)
        magic, serial, place, sequence, first = _STAMP.unpack_from(fields, HEADER_BYTES)
        if magic != _STAMP_MAGIC or check != xxh3_64_intdigest(fields):
            return None
        envelope = Envelope.decode(fields[:HEADER_BYTES])
        if envelope is None:
            return None
        return cls(envelope, serial, place, sequence, first)

    def belongs(self, mark: Mark, place: int) -> bool:
        """Return whether it was written where it was found, since the extent was taken."""
        pages = pages_of(self.envelope.nbytes)
        return (self.serial, self.place, pages) == (mark.serial, place, mark.pages)


def stamps_of(
    headers: Sequence[bytes],
    serial: int,
    places: Sequence[int],
    sequences: Sequence[int],
    firsts: Sequence[int],
) -> list[bytes]:
    """Return what pages begin with behind blocks of one extent, whose envelopes are given; see ``Stamp``."""
    magic, serials = map(itertools.repeat, (_STAMP_MAGIC, serial))
    told = map(_STAMP.pack, magic, serials, places, sequences, firsts)
    stamps = list(map(operator.add, headers, told))
    checks = map(_CHECK.pack, map(xxh3_64_intdigest, stamps))
    return list(map(operator.add, stamps, checks))


def checksums_in(
    pages: Sequence[memoryview],
    places: Sequence[int],
    keys: Sequence[PackedKey],
    sizes: Sequence[int],
) -> list[int | None]:
    """Return what stamps say of the blocks that are to be there; None for garbage, or another block."""
    stamps = [page[: _TOLD.size] for page in pages]
    told = list(map(_TOLD.unpack, stamps))
    headers = headers_of(keys, sizes, [fields[0] for fields in told])
    checks = map(xxh3_64_intdigest, [stamp[:_STAMP_BYTES] for stamp in stamps])
    found = zip(told, stamps, headers, places, checks, strict=True)
    return [
        fields[0]
        if (fields[1], fields[3], fields[-1]) == (_STAMP_MAGIC, place, check)
        and stamp[:HEADER_BYTES] == header
        else None
        for fields, stamp, header, place, check in found
    ]
