# SPDX-License-Identifier: Apache-2.0
"""
A directory on a mount that several machines share, and what is done in it.

Contents::

    ucm-files.json    what it is
    blocks/AA/BB/KEY  a block: its envelope, then its bytes
    writing/NAME      a block that somebody writes; gets its name among blocks at the end
    room/             how much there is; see ``_ledger``

A name below ``writing`` is never used twice: boot and container, process, its start, a number.
The last step is a rename or a link that leaves what is there, and of two writers tells the later
one so; where a file system has neither it is a rename that puts equal bytes in place of equal bytes.

Ages are taken from the share's own clock, by looking at a file that was just written.

Threading: everything on many threads at once; every call may hang.
"""

import contextlib
import errno
import itertools
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

from ucm import native
from ucm.backends._gate import Gate
from ucm.backends._places import Head, claim, path_error
from ucm.backends.abc import Fetched, Presence, Sealed, Verdict
from ucm.backends.envelope import GARBAGE, headers_of, judged
from ucm.backends.files._identity import identity, is_alive
from ucm.backends.files._reading import WRONG, Asked, find_reader
from ucm.backends.files._walk import AWAY, Walk, entries_of
from ucm.backends.files._writing import DAMAGED, NEW, Given, find_writer, write_whole
from ucm.blocks import PackedKey
from ucm.seals import checksum_seeds

__all__ = [
    "MANIFEST",
    "NEW",
    "OLD",
    "ROOM",
    "SPARE",
    "WRITER",
    "Collected",
    "Manifest",
    "Share",
]

MANIFEST = "ucm-files.json"
ROOM = "room"
SPARE = 16
"""A collection makes a sixteenth of what all blocks may have free."""
_BLOCKS, _WRITING = "blocks", "writing"
_SCHEMA = 1
OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_SHORT = {errno.ENOSPC, errno.EDQUOT}
_WRITTEN = {
    0: Verdict.DONE,
    errno.EEXIST: Verdict.PRESENT,
    DAMAGED: Verdict.GARBAGE,
    **dict.fromkeys((*_SHORT, errno.EFBIG), Verdict.FULL),
}
"""What it means that a file was written, or was not, where that is not that nobody can say."""
WRITER = r"[0-9a-f]{32}\.\d+\.\d*\.\d+"
"""A name of ours: see the module's text."""
_LEFT = re.compile(rf"{WRITER}(_-?\d+_\d+_\d+)?", re.ASCII)
"""What a writer that has died may have left."""
_PIECE_BYTES, _MOST_PIECES = 1 << 20, 64
"""Written at a time, and how often at most, to find out whether there is room."""
_FEW_FILES = 256
_MOST_NAME = 256
"""Bytes that are read of what may be a writer's name."""
_MOST_MARKED = 1 << 16
_MOST_REFUSED = 1 << 10
_NUMBERS = itertools.count()
"""Of files that this process has written, on whatever share."""
_UNAVAILABLE = Fetched(Verdict.UNAVAILABLE)
_NOT_READ = {
    errno.ENOENT: Fetched(Verdict.ABSENT),
    **dict.fromkeys((errno.ELOOP, errno.ENXIO, WRONG), GARBAGE),
}
"""What it means that a file was not read, where that is not that nobody can say."""
_PRESENCES = {0: Presence.PRESENT, errno.ENOENT: Presence.ABSENT}


class Manifest(Head, frozen=True, forbid_unknown_fields=True):
    """What the manifest of a share's directory says."""

    kind: str = "ucm-files"
    schema: int = _SCHEMA


class Collected(NamedTuple):
    """What a collection has found and done."""

    num_blocks: int
    nbytes: int
    num_evicted: int
    num_swept: int
    most_bytes: int | None = None
    """That blocks may have, where the mount has room for no more."""


class Share:
    """
    The directory as one process uses it.

    Args:
        root: Its path.
        touch_s: A block that is read is marked as used, at most so often.
        orphan_s: What was being written so long ago, by nobody who lives, is removed.
        lasting: Have each block outlast a loss of power.
    """

    def __init__(
        self, root: Path, *, touch_s: float, orphan_s: float, lasting: bool
    ) -> None:
        self._root = root
        self._blocks = self.path(_BLOCKS)
        self._prefix = os.fsencode(self._blocks)
        self._writing = self.path(_WRITING)
        self._touch_s = touch_s
        self._orphan_s = orphan_s
        self._reader = find_reader(native.LIBRARY)
        self._writer = find_writer(native.LIBRARY, is_lasting=lasting)
        self._marked: dict[PackedKey, float] = {}
        self._refused: deque[int] = deque(maxlen=_MOST_REFUSED)
        self._claimed: os.stat_result | None = None
        """The directory that was ours last."""
        self.is_lost = False
        """Whether it was not ours any more when somebody looked last."""
        self._me = identity(os.getpid())

    def path(self, name: str) -> str:
        """Return where something of the share lies."""
        return str(self._root / name)

    def claim(self, key: str) -> None:
        """
        Make sure that the directory is ours.

        One that was, and that somebody has emptied, is so again; not where its mount is away.

        Raises:
            ConfigError: It is somebody else's, or cannot be used.
            OSError: Its server is away.
        """
        try:
            claim(self._root, MANIFEST, Manifest(), key, self._left())
            for name in (_BLOCKS, _WRITING):
                (self._root / name).mkdir(mode=0o700, exist_ok=True)
            self._claimed, self.is_lost = os.stat(self._root), False
        except OSError as exc:
            if exc.errno in AWAY:
                raise
            raise path_error(key, self._root, f"it cannot be used: {exc}") from exc

    def make_room(self) -> None:
        """Make the folder of counts; raises OSError where the directory is not ours (any more)."""
        os.stat(self.path(MANIFEST))
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path(ROOM), 0o700)

    def _left(self) -> Sequence[str]:
        """Return what is ours without a manifest; raises OSError where the mount is not there."""
        if self._claimed is None:
            return ()
        is_same = os.path.samestat(os.stat(self._root), self._claimed)
        if not is_same and not os.path.exists(self.path(MANIFEST)):
            raise OSError(errno.ENODEV, "the directory is another one, and empty")
        return _BLOCKS, _WRITING, ROOM

    def look(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Return whether blocks are there."""
        errors = self._reader.find(self._paths(keys))
        told = {} if self._is_gone(errors) else _PRESENCES
        return [told.get(error, Presence.UNKNOWN) for error in errors]

    def read(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview], gate: Gate
    ) -> list[Fetched]:
        """Read blocks into targets of their length, while *gate* is open."""
        given = self._paths(keys), targets, self._are_due(keys), checksum_seeds(keys)
        answers = self._reader.read(list(map(Asked, *given)), gate)
        errors = [came.error for came in answers]
        told = {} if self._is_gone(errors) else _NOT_READ
        done = [at for at, error in enumerate(errors) if not error]
        ends = iter(
            judged(
                [answers[at].header for at in done],
                [keys[at] for at in done],
                list(map(len, [targets[at] for at in done])),
                [answers[at].digest for at in done],
            )
        )
        return [
            told.get(error, _UNAVAILABLE) if error else next(ends) for error in errors
        ]

    def write(self, blocks: Sequence[Sealed], gate: Gate) -> list[Verdict]:
        """
        Write blocks to files of their own, then give those their names, while *gate* is open.

        What is written when it is left gets no name: the bytes may be another block's by then.
        """
        keys, data = [each.key for each in blocks], [each.data for each in blocks]
        sizes, checksums = list(map(len, data)), [each.checksum for each in blocks]
        temporary = os.fsencode(f"{self._writing}/{self._me}")
        numbers = itertools.islice(_NUMBERS, len(keys))
        given = map(
            Given,
            [b"%b.%d" % (temporary, number) for number in numbers],
            self._paths(keys),
            headers_of(keys, sizes, checksums),
            *(data, checksum_seeds(keys), checksums),
        )
        errors = self._writer.write(list(given), gate)
        self._is_gone(errors)
        if not _SHORT.isdisjoint(errors):
            are_short = [error in _SHORT for error in errors]
            self._refused.extend(itertools.compress(sizes, are_short))
        return list(map(_WRITTEN.get, errors, itertools.repeat(Verdict.UNAVAILABLE)))

    def remove(self, key: PackedKey) -> Verdict:
        """Remove a block."""
        try:
            os.unlink(*self._paths([key]))
        except FileNotFoundError as exc:
            return Verdict.UNAVAILABLE if self._is_gone([exc.errno]) else Verdict.ABSENT
        except OSError:
            return Verdict.UNAVAILABLE
        return Verdict.DONE

    def _is_gone(self, errors: Sequence[int | None]) -> bool:
        """Return whether nothing is there because the mount is not, where something is not."""
        is_gone = errno.ENOENT in errors and not os.path.exists(self.path(MANIFEST))
        self.is_lost |= is_gone
        return is_gone

    def take_refused(self) -> int:
        """Return for how many bytes of blocks the mount had no room since this was asked."""
        refused = 0
        while self._refused:
            refused += self._refused.popleft()
        return refused

    def collect(
        self,
        most_bytes: int,
        wanted_bytes: int,
        refused_bytes: int = 0,
        alive: Callable[[], None] = lambda: None,
    ) -> Collected | None:
        """
        Look through the whole share; remove orphans, and the oldest blocks.

        Args:
            most_bytes: If all blocks have more than this,
            wanted_bytes: remove until they have no more than this.
            refused_bytes: The mount had no room for so many. If it still has none, what is
                there and a spare less is all that blocks may have, and a spare of that goes.
            alive: Called again and again meanwhile.

        Returns:
            What is left; None if the share could not be read.
        """
        try:
            num_swept = self.sweep()
            walk, bound, num_evicted = Walk(self._blocks, alive), None, 0
            if refused_bytes > 0 and not self._takes(refused_bytes):
                bound = walk.nbytes - walk.nbytes // SPARE
                most_bytes = min(most_bytes, bound)
                wanted_bytes = min(wanted_bytes, bound - bound // SPARE)
            if walk.nbytes > most_bytes:
                # Behind the walk: what was used amid it was not later.
                now_s = self._now()
                now_ns = None if now_s is None else int(now_s * 1e9)
                num_evicted = walk.evict(wanted_bytes, now_ns)
        except OSError:
            return None
        return Collected(walk.num_files, walk.nbytes, num_evicted, num_swept, bound)

    def _takes(self, nbytes: int) -> bool:
        """
        Return whether the mount has room for twice as many bytes, by writing them.

        Of several machines that were refused one makes room, and the others find it.
        """
        about = os.statvfs(self._writing)
        if about.f_files and about.f_favail < _FEW_FILES:
            return False
        probe, piece = self.temporary(), memoryview(os.urandom(_PIECE_BYTES))
        try:
            fd = os.open(probe, NEW, 0o600)
            try:
                for _ in range(min(1 + 2 * nbytes // _PIECE_BYTES, _MOST_PIECES)):
                    write_whole(fd, b"", piece)
                os.fsync(fd)  # else it may be told nobody
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno in AWAY:
                raise
            return exc.errno not in _SHORT
        finally:
            with contextlib.suppress(OSError):
                os.unlink(probe)
        return True

    def sweep(self) -> int:
        """
        Remove what nobody writes any more (X-03); return how many blocks these would have been.

        Raises:
            OSError: The share cannot be read.
        """
        num_swept = 0
        for path in self.orphans(self._writing):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(path)
                num_swept += 1
        return num_swept

    def orphans(self, folder: str) -> list[str]:
        """Return what of ours is nobody's any more, for long; raises OSError, as ``sweep`` does."""
        if (now_s := self._now()) is None or not os.path.exists(folder):
            return []  # a share that is full or read-only is counted, and gets room, all the same
        orphans = []
        for entry in entries_of(folder):
            if _LEFT.fullmatch(entry.name) is None:
                continue
            owner = entry.name.partition("_")[0].rpartition(".")[0]
            with contextlib.suppress(FileNotFoundError):
                # Of a time to come, where the clock was set back: as old as that is far.
                age_s = abs(now_s - entry.stat(follow_symlinks=False).st_mtime)
                if age_s > self._orphan_s and not is_alive(owner):
                    orphans.append(entry.path)
        return orphans

    def _now(self) -> float | None:
        """Return the time of the share's own clock; None where it takes no file to tell that."""
        probe = self.temporary()
        try:
            fd = os.open(probe, NEW, 0o600)
            try:
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                os.unlink(probe)
        except OSError as exc:
            if exc.errno in AWAY:
                raise
            return None

    def temporary(self) -> str:
        """Return where a file may be written before it has its name."""
        return f"{self._writing}/{self.new_name()}"

    def new_name(self) -> str:
        """Return a name that nothing else ever had."""
        return f"{self._me}.{next(_NUMBERS)}"

    def _are_due(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which files are to be marked as used: this process has not done so lately."""
        now = time.monotonic()
        marked = map(self._marked.get, keys, itertools.repeat(-math.inf))
        are_due = [now - at >= self._touch_s for at in marked]
        if len(self._marked) >= _MOST_MARKED:
            self._marked.clear()
        self._marked.update(dict.fromkeys(itertools.compress(keys, are_due), now))
        return are_due

    def has_ended(self, file: str) -> bool:
        """Return whether a file names whoever made it, a process of this machine that runs no more."""
        try:
            with open(file, "rb", opener=lambda file, _: os.open(file, OLD)) as text:
                name = text.read(_MOST_NAME).decode("ascii", "replace")
        except OSError as exc:
            if exc.errno in AWAY:
                raise
            return False
        owner, here = name.rpartition(".")[0], self._me.partition(".")[0]
        is_known = re.fullmatch(WRITER, name) and name.startswith(f"{here}.")
        return bool(is_known) and not is_alive(owner)

    def _paths(self, keys: Sequence[PackedKey]) -> list[bytes]:
        """Return where blocks lie; what spreads them is not what attackers choose."""
        named = zip(map(xxh3_64_hexdigest, keys), map(bytes.hex, keys), strict=True)
        names = [f"{spread[:2]}/{spread[2:4]}/{name}" for spread, name in named]
        return [b"%b/%b" % (self._prefix, name) for name in map(str.encode, names)]
