# SPDX-License-Identifier: Apache-2.0
"""
A backend in an SQLite file, which several processes of a machine may share.

SQLite blocks, so each call runs on a thread, one at a time, and is waited for even where
its caller is cancelled: a thread never writes to memory that was given back.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import anyio
import anyio.to_thread
import attrs

from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    BackendStats,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import Envelope
from ucm.blocks import PackedKey
from ucm.errors import ConfigError
from ucm.settings import field, read_section, read_size

__all__ = ["SqliteBackend", "SqliteSettings"]

_T = TypeVar("_T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID
"""


@attrs.frozen(kw_only=True)
class SqliteSettings:
    """Settings of such a tier."""

    path: str = field("", "The file.")
    capacity: int = field(1 << 30, "Room for blocks.", read=read_size, least=1)


class SqliteBackend(Backend):
    """
    Keeps values in rows; the one whose use is oldest makes room.

    Args:
        path: The file; made if it is missing.
        capacity_bytes: Of all values.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._num_evicted = 0
        self._limiter = anyio.CapacityLimiter(1)
        self._is_open = True
        self._file = sqlite3.connect(
            path, timeout=5.0, isolation_level=None, check_same_thread=False
        )
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = NORMAL")
        self._file.execute(_SCHEMA)

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """Open the tier of these settings, as ``ucm`` asks for it."""
        given = read_section(SqliteSettings, settings, f"{key}.")
        try:
            return cls(Path(given.path), given.capacity)
        except sqlite3.Error as exc:
            why, remedy = f"cannot be opened: {exc}", "Name a file in a directory."
            raise ConfigError(f"{key}.path", given.path, why, remedy) from exc

    @property
    def capabilities(self) -> BackendCapabilities:
        """A file of this machine."""
        return BackendCapabilities(
            medium="sqlite",
            shared=True,
            durable="process",
            max_block_bytes=self._capacity_bytes,
            batch_blocks=16,
            in_flight=1,
        )

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Look for rows."""

        def look() -> list[Presence]:
            return [
                Presence.ABSENT if self._value(key, "1") is None else Presence.PRESENT
                for key in keys
            ]

        return await self._call(look, [Presence.UNKNOWN] * len(keys))

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Copy from rows."""

        def get() -> list[Fetched]:
            return [self._get(*each) for each in zip(keys, targets, strict=True)]

        return await self._call(get, [Fetched(Verdict.UNAVAILABLE)] * len(keys))

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Add rows, each whole or not at all."""

        def put() -> list[Verdict]:
            return [self._put(block) for block in blocks]

        return await self._call(put, [Verdict.UNAVAILABLE] * len(blocks))

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove rows."""

        def delete() -> list[Verdict]:
            removed = "DELETE FROM blocks WHERE key = ?"
            return [
                Verdict.DONE if self._run(removed, key).rowcount else Verdict.ABSENT
                for key in keys
            ]

        return await self._call(delete, [Verdict.UNAVAILABLE] * len(keys))

    async def stats(self) -> BackendStats:
        """Count rows."""

        def count() -> tuple[int, int]:
            row = self._run("SELECT count(*), total(length(value)) FROM blocks")
            blocks, nbytes = row.fetchone()
            return blocks, int(nbytes)

        blocks, nbytes = await self._call(count, (None, None))
        return BackendStats(
            blocks=blocks,
            nbytes=nbytes,
            capacity_bytes=self._capacity_bytes,
            evicted_blocks_total=self._num_evicted,
        )

    async def aclose(self) -> None:
        """Close the file. Idempotent."""
        self._is_open = False
        await anyio.to_thread.run_sync(self._file.close, limiter=self._limiter)

    async def _call(self, function: Callable[[], _T], unavailable: _T) -> _T:
        """Call on the thread; *unavailable* where the file does not answer."""
        if not self._is_open:
            return unavailable
        try:
            return await anyio.to_thread.run_sync(function, limiter=self._limiter)
        except sqlite3.Error:
            return unavailable

    # On the thread.

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._file.execute(statement, values)

    def _value(self, key: PackedKey, column: str) -> bytes | None:
        row = self._run(f"SELECT {column} FROM blocks WHERE key = ?", key).fetchone()
        return None if row is None else row[0]

    def _get(self, key: PackedKey, target: memoryview) -> Fetched:
        value = self._value(key, "value")
        if value is None:
            return Fetched(Verdict.ABSENT)
        self._run("UPDATE blocks SET used = ? WHERE key = ?", time.time_ns(), key)
        return Envelope.open(value, key, target)

    def _put(self, block: Sealed) -> Verdict:
        header = Envelope(block.key, len(block.data), block.checksum).encode()
        value = header + block.data
        if len(value) > self._capacity_bytes:
            return Verdict.FULL
        added = self._run(
            "INSERT INTO blocks VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            *(block.key, value, time.time_ns()),
        )
        if not added.rowcount:
            self._run(
                "UPDATE blocks SET used = ? WHERE key = ?", time.time_ns(), block.key
            )
            return Verdict.PRESENT
        self._make_room(block.key)
        return Verdict.DONE

    def _make_room(self, newest: PackedKey) -> None:
        """Remove what was used longest ago until all fit, and never the newest."""
        oldest = "SELECT key FROM blocks WHERE key != ? ORDER BY used LIMIT 1"
        while self._nbytes() > self._capacity_bytes:
            (key,) = self._run(oldest, newest).fetchone()
            self._run("DELETE FROM blocks WHERE key = ?", key)
            self._num_evicted += 1

    def _nbytes(self) -> int:
        return int(self._run("SELECT total(length(value)) FROM blocks").fetchone()[0])
