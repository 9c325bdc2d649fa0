# SPDX-License-Identifier: Apache-2.0
"""
The header that travels with a block's bytes through whatever keeps them. Pure.

All integers big endian, 128 bytes::

    bytes 0-3      magic, ``UCMB``
    byte 4         version
    byte 5         length of the key
    bytes 6-7      zero
    bytes 8-15     length of the block's bytes
    bytes 16-23    the block's checksum, as it was sealed
    bytes 24-119   the key, filled up with zeros
    bytes 120-127  xxh3-64 of the bytes before

What is not exactly this is garbage: of another release, foreign, cut, too long, damaged.
The header says of which block the bytes claim to be; whether they are, only their checksum
says.
"""

import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import attrs
from xxhash import xxh3_64_intdigest

from ucm.backends.abc import Fetched, Sealed, Verdict
from ucm.blocks import PackedKey

__all__ = [
    "ENVELOPE_VERSION",
    "GARBAGE",
    "HEADER_BYTES",
    "LEAST_CAPACITY",
    "MAX_KEY_BYTES",
    "Envelope",
    "headers_for",
    "headers_of",
    "judged",
]

ENVELOPE_VERSION = 1
_FIELDS = struct.Struct(">4sBBHQQ96s")
_CHECK = struct.Struct(">Q")
_CHECKSUMS = struct.Struct(">16xQ104x")
"""Of a header that alone."""
_MAGIC = b"UCMB"
HEADER_BYTES = _FIELDS.size + _CHECK.size
MAX_KEY_BYTES = 96
_FETCHED: Callable[[Iterable[object]], Fetched] = partial(tuple.__new__, Fetched)
"""Makes one with no line of Python, as its own way does."""
LEAST_CAPACITY = HEADER_BYTES + 4096
"""Of a tier: no slot of a slab has less than a page."""
GARBAGE = Fetched(Verdict.GARBAGE)


@attrs.frozen
class Envelope:
    """
    What a header says.

    Args:
        key: Packed key of the block, of 1 to ``MAX_KEY_BYTES`` bytes.
        nbytes: Length of its bytes.
        checksum: As it was sealed.
    """

    key: PackedKey
    nbytes: int
    checksum: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        (header,) = headers_of([self.key], [self.nbytes], [self.checksum])
        return header

    @classmethod
    def decode(cls, header: bytes | memoryview) -> "Envelope | None":
        """Read the bytes of a header; None for garbage."""
        if len(header) != HEADER_BYTES:
            return None
        fields = bytes(header[: _FIELDS.size])
        magic, version, key_bytes, zero, nbytes, checksum, key = _FIELDS.unpack(fields)
        if (magic, version, zero) != (_MAGIC, ENVELOPE_VERSION, 0):
            return None
        if _CHECK.unpack(header[_FIELDS.size :])[0] != xxh3_64_intdigest(fields):
            return None
        if not 1 <= key_bytes <= MAX_KEY_BYTES or any(key[key_bytes:]):
            return None
        return cls(PackedKey(key[:key_bytes]), nbytes, checksum)

    @classmethod
    def judge(
        cls,
        header: bytes | memoryview,
        key: PackedKey,
        nbytes: int,
        digest: int | None = None,
    ) -> Fetched:
        """Return what became of a block of which the header and *nbytes* bytes came; see ``Fetched``."""
        if len(header) != HEADER_BYTES:
            return GARBAGE
        (told,) = judged([bytes(header)], [key], [nbytes], [digest])
        return told

    @classmethod
    def open(
        cls, value: bytes | memoryview, key: PackedKey, target: memoryview
    ) -> Fetched:
        """Copy a value's bytes, header first, into *target* if they are of this block."""
        if len(value) != HEADER_BYTES + len(target):
            return GARBAGE
        view = memoryview(value)
        judged = cls.judge(view[:HEADER_BYTES], key, len(target))
        if judged.verdict is Verdict.DONE:
            target[:] = view[HEADER_BYTES:]
        return judged


def headers_of(
    keys: Sequence[PackedKey], sizes: Sequence[int], checksums: Sequence[int]
) -> list[bytes]:
    """
    Return the header of each block; no line of Python is for one of them alone.

    Raises:
        ValueError: A key is too long, or has no bytes; a bug of the caller.
    """
    lengths = list(map(len, keys))
    if lengths and not 1 <= min(lengths) <= max(lengths) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of none of 1 to {MAX_KEY_BYTES} bytes: {lengths}")
    magic, version, zero = map(itertools.repeat, (_MAGIC, ENVELOPE_VERSION, 0))
    told = magic, version, lengths, zero, sizes, checksums, keys
    fields = list(map(_FIELDS.pack, *told))
    checks = map(_CHECK.pack, map(xxh3_64_intdigest, fields))
    return list(map(operator.add, fields, checks))


def headers_for(blocks: Sequence[Sealed]) -> list[bytes]:
    """Do as ``headers_of`` for blocks that are to be put."""
    return headers_of(
        [block.key for block in blocks],
        [len(block.data) for block in blocks],
        [block.checksum for block in blocks],
    )


def judged(
    headers: Sequence[bytes],
    keys: Sequence[PackedKey],
    sizes: Sequence[int],
    digests: Sequence[int | None],
) -> list[Fetched]:
    """Do as ``Envelope.judge`` for many blocks, whose headers are whole."""
    fields = b"".join(headers)
    checksums = [checksum for (checksum,) in _CHECKSUMS.iter_unpack(fields)]
    claimed = headers_of(keys, sizes, checksums)  # no other header would do
    done = map(_FETCHED, zip(itertools.repeat(Verdict.DONE), checksums, digests))
    return [
        each if header == its else GARBAGE
        for each, header, its in zip(done, headers, claimed, strict=True)
    ]
