# SPDX-License-Identifier: Apache-2.0
"""
A store in memory whose blocks are found again: each commit is appended to a journal.

One process at a time uses a directory. A record is its kind, lengths, checksum, key and
bytes; the first one that is not whole ends the journal, as a death amid a write leaves it.
Opening reads it, and writes it anew with what there is room for.
"""

import fcntl
import json
import os
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

import attrs
from xxhash import xxh3_64_intdigest

from ucm.blocks import KeySpace, PackedKey
from ucm.config import StoreConfig
from ucm.errors import ConfigError, StoreUnavailableError
from ucm.fates import Fate
from ucm.stores.abc import StoreCapabilities, WriteLease
from ucm.stores.memory import MemoryStore
from ucm.stores.wrap import WrapperStore
from ucm.uses import Uses

__all__ = ["JournalStore"]

_HEAD = struct.Struct(">cBIQ")  # kind, length of the key, of the data, checksum
_BLOCK, _GONE, _TEXT = b"B", b"G", b"T"


def _record(kind: bytes, key: bytes, data: bytes = b"") -> bytes:
    head = kind, len(key), len(data)
    return _HEAD.pack(*head, xxh3_64_intdigest(repr(head).encode() + key + data)) + (
        key + data
    )


def _records(file: BinaryIO) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield kind, key and data of each record, up to the first that is not whole."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        kind, key_bytes, nbytes, _ = _HEAD.unpack(head)
        key, data = file.read(key_bytes), file.read(nbytes)
        if _record(kind, key, data) != head + key + data:
            return
        yield kind, key, data


class _Lease(WriteLease):
    """Writes to the journal what the memory's lease is about to publish."""

    def __init__(self, inner: WriteLease, store: "JournalStore") -> None:
        self._inner = inner
        self._store = store
        self.keys = inner.keys
        self.positions = inner.positions
        self.num_stored = inner.num_stored
        self.slots = inner.slots

    def seal(self, start: int, stop: int) -> None:
        """Have checksums computed."""
        self._inner.seal(start, stop)

    def commit(self, without: Collection[int] = ()) -> int:
        """Append, then publish: what is visible is in the journal."""
        self._inner.seal(0, 0)  # raises if the lease has ended
        self._store.append(
            (_BLOCK, key, self.slots.block(at).tobytes())
            for at, key in enumerate(self.keys)
            if at not in without
        )
        return self._inner.commit(without)

    def discard(self) -> None:
        """Give the slots back."""
        self._inner.discard()


class JournalStore(WrapperStore):
    """
    Memory, with a journal beside it.

    Args:
        path: A directory of its own; made if it is missing.
        num_blocks: Room, in blocks.
        block_bytes: Of the largest block.

    Raises:
        ConfigError: Another process has the directory, or it cannot be used.
    """

    def __init__(self, path: Path, num_blocks: int, block_bytes: int) -> None:
        super().__init__(MemoryStore(num_blocks, block_bytes))
        self._lock = threading.Lock()
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._owner = (path / "owner").open("w")
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = self._replayed(path / "journal")
        except OSError as exc:
            remedy = "Give a directory of its own, to one process at a time."
            raise ConfigError("store.path", str(path), str(exc), remedy) from exc

    @classmethod
    def open_configured(
        cls, config: StoreConfig, *, block_bytes: int, index_only: bool
    ) -> Self:
        """Open the store of these settings, as ``ucm`` asks for it."""
        if index_only:
            why, remedy = "is not shared between an engine's processes", "Use slab."
            raise ConfigError("store.type", config.type, why, remedy)
        return cls(Path(config.path), config.capacity // block_bytes, block_bytes)

    @property
    def capabilities(self) -> StoreCapabilities:
        """As memory, but what is committed outlives the process."""
        return attrs.evolve(self.inner.capabilities, durable=True, tier="disk")

    @property
    def directory(self) -> Path:
        """Where the journal lies."""
        return self._path

    def reserve(
        self, keys: Sequence[PackedKey], block_bytes: int, uses: Uses | None = None
    ) -> WriteLease:
        """Lease slots in memory; their commit goes to the journal, too."""
        return _Lease(self.inner.reserve(keys, block_bytes, uses), self)

    def forget(self, keys: Sequence[PackedKey], fate: Fate = Fate.FORGOTTEN) -> int:
        """Forget, and note that for the next start."""
        self.append((_GONE, key, b"") for key in keys)
        return self.inner.forget(keys, fate)

    def clear(self, prefix: bytes) -> int:
        """Forget what begins so, and note that for the next start."""
        self.append([(_GONE, prefix, b"*")])
        return self.inner.clear(prefix)

    def describe(self, keyspace: KeySpace) -> None:
        """Keep the text, here and there."""
        self.inner.describe(keyspace)
        text = json.dumps(attrs.asdict(keyspace)).encode()
        self.append([(_TEXT, keyspace.digest, text)])

    def close(self) -> None:
        """Let go of memory, journal and directory. Idempotent."""
        self.inner.close()
        with self._lock:
            self._file.close()
            self._owner.close()

    def append(self, records: Iterator[tuple[bytes, bytes, bytes]] | list) -> None:
        """
        Write records.

        Raises:
            StoreUnavailableError: There is no room on the disk, or the store is closed.
        """
        data = b"".join(_record(*each) for each in records)
        try:
            with self._lock:
                self._file.write(data)
        except (OSError, ValueError) as exc:
            raise StoreUnavailableError(f"the journal takes nothing: {exc}") from exc

    def _replayed(self, journal: Path) -> BinaryIO:
        """Fill the memory from a journal; return a new one with what is in it."""
        known: dict[PackedKey, None] = {}
        if journal.exists():
            with journal.open("rb") as file:
                for kind, key, data in _records(file):
                    self._replay(kind, PackedKey(key), data)
                    known[PackedKey(key)] = None
        fresh = journal.with_suffix(".new")
        file = fresh.open("wb", buffering=0)
        for keyspace in self.inner.keyspaces().values():
            text = json.dumps(attrs.asdict(keyspace)).encode()
            file.write(_record(_TEXT, keyspace.digest, text))
        keys = list(known)
        for key, is_there in zip(keys, self.inner.contains(keys), strict=True):
            if is_there:
                with self.inner.read([key]) as lease:
                    file.write(_record(_BLOCK, key, lease.slots.block(0).tobytes()))
        os.replace(fresh, journal)
        return file

    def _replay(self, kind: bytes, key: PackedKey, data: bytes) -> None:
        if kind == _TEXT:
            self.inner.describe(KeySpace(**json.loads(data)))
        elif kind == _GONE:
            self.inner.clear(key) if data else self.inner.forget([key])
        elif len(data) <= self.inner.capabilities.max_block_bytes:
            with self.inner.reserve([key], len(data)) as lease:
                if lease.keys:
                    lease.slots.block(0)[:] = memoryview(data)
                    lease.seal(0, 1)
                    lease.commit()
