# SPDX-License-Identifier: Apache-2.0
"""
The file that blocks are exported to: written and read as a stream, believed in no part.

All integers are little endian; *sum* is xxh3-64 of all bytes from the last sum's end on,
without the bytes of blocks (``docs/store.md`` says the same)::

    file     start, block ..., end
    start    89 55 43 4D 0D 0A 1A 0A, version (4 bytes), length (4 bytes) of the JSON that
             follows, that JSON, sum
    block    length of its key (2), 0 (2), tenant (4), age in ns (8, signed), length of its
             bytes (8), their checksum (8), key, sum; then its bytes
    end      a block's head with an empty key and age 0: instead of lengths the number of
             blocks, instead of the checksum how many bytes they have; sum

The JSON is ``Start``. A block's checksum is xxh3-64 of its bytes, seeded with the xxh3-64 of
its key: that of a sealed block. The age is how long before the export it was used, and the
JSON tells when that was; tenant is a number for whose share it counts, 0 for nobody's. The
blocks used last come first.

Whatever does not fit is a ``StoreError`` that names the file and the place.
"""

import os
import stat
import struct
from typing import BinaryIO, Final

import attrs
import msgspec
from xxhash import xxh3_64_intdigest

from ucm.blocks import KeySpace, PackedKey
from ucm.decoding import DECODE_ERRORS
from ucm.errors import KeyFormatError, StoreError
from ucm.seals import block_checksum

__all__ = ["VERSION", "ExportReader", "ExportWriter", "Head", "Section", "Start"]

VERSION: Final = 1
_MAGIC: Final = b"\x89UCM\r\n\x1a\n"
_START: Final = struct.Struct("<8sII")
_HEAD: Final = struct.Struct("<HHIqQQ")
_SUM: Final = struct.Struct("<Q")
_MOST_JSON = 16 << 20
_MOST_KEY = 85
_MOST_BLOCK = 1 << 33
_PIECE = 1 << 20


class Section(msgspec.Struct, frozen=True):
    """
    What a file says of one key space.

    Args:
        digest: Of it, in hex; empty for keys of another making.
        block_bytes: Of its largest block in the slab: the slots that it needs.
        keyspace: Its text, if it was described.
    """

    digest: str
    block_bytes: int
    keyspace: KeySpace | None = None


class Start(msgspec.Struct, frozen=True):
    """
    What a file says of all of it.

    Args:
        blocks: That were to come.
        nbytes: That they have.
        sections: Of each key space.
        exported_ns: Since 1970 by the wall clock, when ages were taken; None in a file of a
            release that did not tell.
    """

    blocks: int
    nbytes: int
    sections: list[Section]
    exported_ns: int | None = None


@attrs.frozen
class Head:
    """What precedes the bytes of one block."""

    key: PackedKey
    nbytes: int
    checksum: int
    age_ns: int
    tenant: int


class ExportWriter:
    """
    Writes one.

    Args:
        file: Where to; need not be seekable.
        start: What it says first.
    """

    def __init__(self, file: BinaryIO, start: Start) -> None:
        self._file = file
        self.blocks = 0
        self.nbytes = 0
        text = msgspec.json.encode(start)
        self._put(_START.pack(_MAGIC, VERSION, len(text)) + text)

    def add(self, key: PackedKey, data: memoryview, age_ns: int, tenant: int) -> None:
        """Write one block."""
        checksum = block_checksum(key, data)
        head = _HEAD.pack(len(key), 0, tenant, age_ns, len(data), checksum)
        self._put(head + key)
        self._file.write(data)
        self.blocks += 1
        self.nbytes += len(data)

    def finish(self) -> None:
        """Write the end: a file without it was cut off."""
        self._put(_HEAD.pack(0, 0, 0, 0, self.blocks, self.nbytes))
        self._file.flush()

    def _put(self, data: bytes) -> None:
        self._file.write(data + _SUM.pack(xxh3_64_intdigest(data)))


class ExportReader:
    """
    Reads one: ``next``, then ``take`` or ``skip``, until ``next`` has no more.

    Args:
        file: Where from; need not be seekable.
        name: Its name in messages.

    Raises:
        StoreError: It is no export, of another version, or damaged.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._at = 0
        self._blocks = 0
        self._nbytes = 0
        self.start = self._read_start()

    def exported_ns(self) -> int | None:
        """Return since 1970 when it was exported, or else the file changed; None: no file."""
        told = self.start.exported_ns
        return self._changed_ns() if told is None else told

    def next(self) -> Head | None:
        """
        Return what follows; None at the end.

        Raises:
            StoreError: It is damaged or was cut off.
        """
        data = self._get(_HEAD.size)
        size, zero, tenant, age_ns, nbytes, checksum = _HEAD.unpack(data)
        if size > _MOST_KEY or zero:
            raise self._wrong("there is no head of a block")
        key = self._get(size)
        self._check(data + key)
        if not size:
            self._check_end(nbytes, checksum)
            return None
        if not 1 <= nbytes <= _MOST_BLOCK:
            raise self._wrong(f"a block has {nbytes} bytes")
        self._blocks += 1
        self._nbytes += nbytes
        return Head(PackedKey(key), nbytes, checksum, age_ns, tenant)

    def take(self, head: Head, into: memoryview) -> bool:
        """
        Read a block's bytes; return whether they are what was exported.

        Raises:
            StoreError: The file was cut off.
        """
        done = 0
        while done < head.nbytes:
            count = self._file.readinto(into[done : head.nbytes])  # type: ignore[attr-defined]
            if not count:
                raise self._wrong("it was cut off")
            done += count
        self._at += head.nbytes
        return block_checksum(head.key, into[: head.nbytes]) == head.checksum

    def skip(self, head: Head) -> None:
        """
        Pass over a block's bytes.

        Raises:
            StoreError: The file was cut off.
        """
        if self._file.seekable():
            self._file.seek(head.nbytes, 1)  # a file that ends there shows at the next
            self._at += head.nbytes
            return
        left = head.nbytes
        while left:
            left -= len(self._get(min(left, _PIECE)))

    def _changed_ns(self) -> int | None:
        try:
            found = os.fstat(self._file.fileno())
        except OSError:  # it is no file of the system
            return None
        return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else None

    def _read_start(self) -> Start:
        data = self._file.read(_START.size)
        self._at += len(data)
        if len(data) < _START.size or not data.startswith(_MAGIC):
            raise StoreError(f"{self._name} is no export of ucm")
        _, version, size = _START.unpack(data)
        if version != VERSION:
            raise StoreError(
                f"{self._name} is an export of version {version}; this release reads "
                f"version {VERSION}"
            )
        if size > _MOST_JSON:
            raise self._wrong("its start is too long")
        text = self._get(size)
        self._check(data + text)
        try:
            start = msgspec.json.decode(text, type=Start)
        except (*DECODE_ERRORS, KeyFormatError) as exc:
            raise self._wrong(f"its start says nothing known: {exc}") from exc
        for section in start.sections:
            self._check_section(section)
        return start

    def _check_section(self, section: Section) -> None:
        text = section.keyspace
        if text is not None and text.digest.hex() != section.digest:
            raise self._wrong("a key space is not the one that it is named after")
        if not 1 <= section.block_bytes <= _MOST_BLOCK:
            raise self._wrong(f"blocks of {section.block_bytes} bytes")

    def _check_end(self, blocks: int, nbytes: int) -> None:
        if (blocks, nbytes) != (self._blocks, self._nbytes):
            raise self._wrong(
                f"its end tells of {blocks} blocks, and {self._blocks} came"
            )
        if self._file.read(1):
            raise self._wrong("it goes on behind its end")

    def _check(self, data: bytes) -> None:
        (found,) = _SUM.unpack(self._get(_SUM.size))
        if found != xxh3_64_intdigest(data):
            raise self._wrong("it is damaged")

    def _get(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            raise self._wrong("it was cut off")
        self._at += nbytes
        return data

    def _wrong(self, problem: str) -> StoreError:
        return StoreError(
            f"{self._name}, at byte {self._at}: {problem}; {self._blocks} blocks were "
            "read before"
        )
