# SPDX-License-Identifier: Apache-2.0
"""
The verbs of the files backend.

A mount may hang for as long as its server is away. Threads that hang are left behind when their
caller goes: what they read lies in memory of their own, and what they wrote gets no name, unless it
just does: a deletion waits for that. Once all of them hang, calls answer at once that they have no answer (X-14).
"""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import anyio
import attrs

from ucm.backends._crew import Crew, Job
from ucm.backends._puts import Puts
from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    BackendStats,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.envelope import HEADER_BYTES, LEAST_CAPACITY
from ucm.backends.files._room import Room
from ucm.backends.files._share import Share
from ucm.blocks import PackedKey
from ucm.config import Durability
from ucm.errors import ConfigError
from ucm.settings import check_path, field, read_section, read_size

__all__ = ["FilesBackend", "FilesSettings"]

_LARGEST_BLOCK = 1 << 30
_LONGEST_PATH = 3584
"""The system takes 4096 bytes, of which a block's own name has 300 at most."""
_OPENING_S = 5.0
_PART_BYTES = 1 << 20
"""Of blocks that one thread reads or writes by one call, if it has more than one."""
_PART_BLOCKS = 16
"""For each thread in a call: each call has two looks at what others have there besides."""
_UNAVAILABLE = Fetched(Verdict.UNAVAILABLE)


def _read_path(key: str, value: object) -> Path | None:
    if isinstance(value, str) and value and "\0" not in value:
        check_path(key, value)
        with contextlib.suppress(UnicodeEncodeError):  # no file can have such a name
            path = Path(value).absolute()
            if len(os.fsencode(path)) <= _LONGEST_PATH:
                return path
            raise ConfigError(
                key,
                f"{value[:40]}...",
                "too long for the names of blocks behind it",
                f"Give one of at most {_LONGEST_PATH} bytes.",
            )
    raise ConfigError(key, value, "no directory", "Give one, on the mount.")


@attrs.frozen(kw_only=True)
class FilesSettings:
    """Settings of a tier on a shared mount."""

    path: Path | None = field(None, "A directory of its own.", read=_read_path)
    capacity: int = field(
        1 << 40, "Of all machines together.", read=read_size, least=LEAST_CAPACITY
    )
    durability: Durability = field(Durability.PROCESS, "What blocks outlast.")
    threads: int = field(16, "Requests to the mount at a time.", least=2)
    touch_seconds: float = field(
        60.0, "A block that is read again and again is marked so often.", least=0.0
    )
    collect_seconds: float = field(
        600.0, "All is counted again so often, by one of the machines.", least=1.0
    )
    orphan_seconds: float = field(
        3600.0, "What a writer who has died has left is removed then.", least=0.0
    )

    @property
    def max_block_bytes(self) -> int:
        """The largest block that the tier takes."""
        return min(_LARGEST_BLOCK, self.capacity - HEADER_BYTES)


class _Done:
    """
    Bytes of the blocks that threads have put for one call.

    Args:
        late: Where those of blocks go that were put when whoever had called was gone.
    """

    def __init__(self, late: deque[int]) -> None:
        self._lock = threading.Lock()
        self._sizes = deque[int]()
        self._late = late

    def add(self, sizes: Iterable[int]) -> None:
        """Count some, on a thread."""
        with self._lock:
            self._sizes.extend(sizes)

    def end(self) -> deque[int]:
        """Return those that were put by now."""
        with self._lock:
            sizes, self._sizes = self._sizes, self._late
            return sizes


class FilesBackend(Backend):
    """
    Blocks as files; made by ``open_configured``.

    Args:
        share: The directory.
        settings: As read.
        key: What they are called in messages.
    """

    def __init__(self, share: Share, settings: FilesSettings, key: str) -> None:
        self._share = share
        self._settings = settings
        self._key = key
        self._crew = Crew(settings.threads, "ucm-files")
        self._puts = Puts()
        self._is_open = True
        self._late = deque[int]()
        """Bytes of blocks that were put behind the end of their call, and are not counted yet."""
        self._claim = self._start_claim()
        self._again: Job[None] | None = None
        """To have it anew, where it was emptied since."""
        self._before: Job[None] | None = None
        """The one before that."""
        self._room = Room(
            share,
            self._crew,
            capacity=settings.capacity,
            collect_s=settings.collect_seconds,
        )

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """
        Open a share; one whose mount hangs has no answers until it does not.

        Raises:
            ConfigError: The directory is somebody else's, or cannot be used.
        """
        read = read_section(FilesSettings, settings, f"{key}.")
        if read.path is None:
            raise ConfigError(f"{key}.path", "", "missing", "Give a directory.")
        share = Share(
            read.path,
            touch_s=read.touch_seconds,
            orphan_s=read.orphan_seconds,
            lasting=read.durability is Durability.POWER,
        )
        backend = cls(share, read, key)
        with anyio.move_on_after(_OPENING_S):
            await backend._claim.wait()
        if isinstance(backend._claim.error, ConfigError):
            await backend.aclose()
            raise backend._claim.error
        if backend._can_ask():
            backend._room.start()  # orphans go now, whoever puts when
        return backend

    def _start_claim(self) -> Job[None]:
        return self._crew.start(lambda: self._share.claim(f"{self._key}.path"))

    def _can_ask(self) -> bool:
        """Return whether the directory is known to be ours; finds out if it is not."""
        if not self._is_open or not self._claim.is_over:
            return False
        if self._claim.error is None:
            if self._share.is_lost and (self._again is None or self._again.is_over):
                self._before = self._again
                self._again = self._start_claim()  # beside: a mount may be back by now
            return True
        self._claim = self._start_claim()
        return False

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of a mount."""
        return BackendCapabilities(
            medium="files",
            shared=True,
            durable=self._settings.durability.value,
            max_block_bytes=self._settings.max_block_bytes,
            batch_blocks=_PART_BLOCKS * self._settings.threads,
            in_flight=2,
            creates=True,
            verifies=True,
        )

    @property
    def trouble(self) -> str:
        """Why the directory is not there, or not ours."""
        again = self._again
        if again is not None and not again.is_over:
            again = self._before  # as it was found last
        for claim in (again, self._claim):
            if claim is not None and claim.error is not None:
                return str(claim.error)
        return ""

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Ask the mount for each."""
        parts = self._parts([0] * len(keys))
        told = [[Presence.UNKNOWN] * len(keys[part]) for part in parts]

        def look(part: slice) -> list[Presence]:
            return self._share.look(keys[part])

        if self._can_ask():
            await self._crew.run(parts, look, told, leave=True)
        return list(itertools.chain.from_iterable(told))

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Read each file."""
        parts = self._parts(list(map(len, targets)))
        told = [[_UNAVAILABLE] * len(keys[part]) for part in parts]

        def read(part: slice) -> list[Fetched]:
            return self._share.read(keys[part], targets[part], self._crew.gate)

        if self._can_ask():
            await self._crew.run(parts, read, told, leave=True)
        return list(itertools.chain.from_iterable(told))

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """Write each to a file, for as long as there is room."""
        told = [Verdict.UNAVAILABLE] * len(blocks)
        if not blocks or not self._can_ask():
            return told
        sizes = [HEADER_BYTES + len(block.data) for block in blocks]
        if sum(sizes) > self._room.capacity // 2 and len(blocks) > 1:
            middle = len(blocks) // 2
            first = await self.put(blocks[:middle])
            return first + await self.put(blocks[middle:])
        most = self._settings.max_block_bytes
        if max(sizes) > HEADER_BYTES + most:
            fitting = [block for block in blocks if len(block.data) <= most]
            ends = iter(await self.put(fitting))
            return [
                next(ends) if len(block.data) <= most else Verdict.FULL
                for block in blocks
            ]
        while self._late:
            self._room.end(0, self._late.popleft(), 1)
        try:
            there = await self._room.take(sum(sizes))
            if there is not Verdict.DONE:
                return [there] * len(blocks)
            told = await self._write_all(blocks, sizes)
        except anyio.get_cancelled_exc_class():
            if self._is_open:
                self._room.tell_later()
            raise
        await self._room.tell()
        return told

    async def _write_all(
        self, blocks: Sequence[Sealed], sizes: Sequence[int]
    ) -> list[Verdict]:
        """Write blocks for which there is room."""
        done = _Done(self._late)
        parts = [blocks[part] for part in self._parts(sizes)]
        told = [[Verdict.UNAVAILABLE] * len(part) for part in parts]
        try:
            await self._crew.run(parts, partial(self._write, done), told, leave=True)
        finally:
            put = done.end()
            self._room.end(sum(sizes), sum(put), len(put))
            refused = self._share.take_refused()
            if refused and self._is_open:
                self._room.refused(refused)
        return list(itertools.chain.from_iterable(told))

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove each file."""
        told = [Verdict.UNAVAILABLE] * len(keys)
        if self._can_ask():
            await self._crew.run(keys, self._remove, told, leave=True)
            self._room.removed(told.count(Verdict.DONE))
        return told

    async def stats(self) -> BackendStats:
        """Tell what the last collection has counted, and what was put since."""
        return self._room.stats()

    async def aclose(self) -> None:
        """Let go of the threads; those that hang are left behind."""
        if self._is_open:
            self._is_open = False
            await self._crew.aclose()

    def _parts(self, sizes: Sequence[int]) -> list[slice]:
        """Cut a batch into parts for one thread each: few blocks go with one call of the system."""
        if not sizes:
            return []
        for_each = -(-len(sizes) // self._settings.threads)
        count = max(1, min(for_each, _PART_BYTES // max(1, *sizes)))
        return [slice(at, at + count) for at in range(0, len(sizes), count)]

    # On threads of the crew.

    def _write(self, done: _Done, blocks: Sequence[Sealed]) -> list[Verdict]:
        sizes = [HEADER_BYTES + len(block.data) for block in blocks]
        with self._puts.putting([block.key for block in blocks]):
            verdicts = self._share.write(blocks, self._crew.gate)
        are_done = [verdict is Verdict.DONE for verdict in verdicts]
        done.add(itertools.compress(sizes, are_done))
        return verdicts

    def _remove(self, key: PackedKey) -> Verdict:
        gate = self._crew.gate
        if not self._puts.await_end(key, lambda: gate.is_left):
            return Verdict.UNAVAILABLE
        return self._share.remove(key)
