# SPDX-License-Identifier: Apache-2.0
"""
What all machines together have in a share, without each of them walking through it.

One process walks at a time. It leaves a *count*: what it has found, and what each writer had put by
then. A writer keeps what it has put, its *tally*, in the name of a file, so that one look at a
directory tells what came behind the count::

    used = counted + sum(put - put at the count) + sum(moving)

Contents::

    room/WRITER_BLOCKS_BYTES_MOVING   a tally: what was put, and bytes that are about to be
    room/count-NUMBER                 a count; the highest number is the last one
    room/collecting                   made by whoever walks, named in it, who touches it meanwhile

What is about to be put is told before, and what was put behind that: whoever looks may count it twice, but never
not at all. The tally of a writer that was idle for long goes as orphans do, behind a count that has what it says; one
that lives all the same begins anew. On a share where no file can be made whoever needs room walks all the same.

Threading: ``mine`` is set on the loop. All else on any thread, and everything may hang.
"""

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import KeysView, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import attrs
import msgspec

from ucm.backends.files._share import NEW, OLD, ROOM, WRITER, Share
from ucm.backends.files._walk import AWAY, entries_of
from ucm.decoding import DECODE_ERRORS

__all__ = ["Ledger", "Seen", "Tally"]

_TALLY: Final = re.compile(
    rf"({WRITER})_(-?\d{{1,18}})_(\d{{1,18}})_(\d{{1,18}})", re.ASCII
)
_COUNT: Final = re.compile(r"count-(\d{1,18})", re.ASCII)
_LEASE: Final = "collecting"
_MOST_TEXT: Final = 1 << 24
_TOUCHED_S: Final = 5.0
_SILENT_S: Final = 60.0
"""Whoever collects and has not touched its file for so long does so no more."""
_PAUSE_S: Final = 0.02
"""Between looks at whether another process has made room."""
_TRIES: Final = 3
"""To list a directory in which files get new names, and later ones take their place."""
_Number = Annotated[int, msgspec.Meta(ge=0)]


class Tally(NamedTuple):
    """What one writer has put since it began."""

    blocks: int = 0
    """Less what it has removed, whoever had put that."""
    nbytes: int = 0
    moving: int = 0
    """Bytes that are about to be put."""


class _Count(msgspec.Struct, frozen=True):
    """What a walk has left."""

    blocks: _Number
    nbytes: _Number
    seconds: float
    """It took."""
    most_bytes: _Number | None
    """For which the mount has room; None: for as many as the settings say, so far."""
    tallies: dict[str, tuple[int, int]]
    """By writer: blocks and bytes that it had put before."""


@attrs.frozen
class Seen:
    """What a look at the share has told."""

    look: int = attrs.field(default=0, eq=False)
    """Its number, of this process: what a later one tells is newer."""
    number: int = 0
    """Of counts that this process knows of, this is the last one; 0: there is none."""
    age_s: float = 0.0
    """Since that count."""
    blocks: int = 0
    nbytes: int = 0
    """Of all others, and as far as it is counted of this writer."""
    moving: int = 0
    """Bytes that others are about to put."""
    own: Tally = Tally()
    """What of this writer is counted."""
    seconds: float = 0.0
    """The last walk took; without bound while one goes on that was waited for in vain."""
    most_bytes: int | None = None
    """See the count."""
    is_stuck: bool = False
    """This process has just counted, and the mount removed less than it was to."""

    def put(self, mine: Tally) -> int:
        """Return the bytes of all blocks, of which a writer knows its own better."""
        return self.nbytes + mine.nbytes - self.own.nbytes


class Ledger:
    """
    What one writer tells of a share, and what it sees of it.

    Args:
        share: Which.
        collect_s: For so long a count is good.
    """

    def __init__(self, share: Share, collect_s: float) -> None:
        self.mine = Tally()
        self.num_evicted = self.num_swept = 0
        """By this process."""
        self._share = share
        self._room = share.path(ROOM)
        self._collect_s = collect_s
        self._lock = threading.Lock()
        self._writer = share.new_name()
        self._file = self._next = ""
        """Of the own tally, and what it may be called since; none could be made yet."""
        self._began = self._told = Tally()
        """What was put before the own tally began, and what was last told."""
        self._ahead_s = -math.inf
        """So much the share's clock is ahead of this process's, once that is known."""
        self._newest = 0
        """Of the counts that lie there, when that was looked at last."""
        self._number = self._look = 0
        self._count: _Count | None = None
        """The one that is known, and how many were; those that lie there may begin anew."""
        self._counted_at = self._touched_at = 0.0
        self._vain = -1
        """The number behind which a later one was waited for in vain."""
        self._turn = (0.0, 0.0)
        """When whoever walks had touched its file, and when that was first seen."""
        self._writers: KeysView[str] = {}.keys()
        """That were seen last."""

    def look(self) -> Seen | None:
        """Tell the own tally, and see those of others; None if the share is away."""
        with self._lock, contextlib.suppress(OSError):
            self._tell()
            return self._see(self._read())
        return None

    def collect(
        self, known: int, most: int, wanted: int, refused: int, patience_s: float
    ) -> Seen | None:
        """
        Have all counted and room made, by this process or the one that is at it.

        Args:
            known: The count that is known; a later one is as good, if it leaves room.
            most: See ``Share.collect``, and so are ``wanted`` and ``refused``.
            wanted: Of bytes.
            refused: Of bytes.
            patience_s: For so long another process is waited for.

        Returns:
            What is there then; None if the share is away.
        """
        ends_at = time.monotonic() + patience_s
        try:
            while not self._begin():
                seen = self.look()
                if seen is None or seen.number > known or seen.seconds > patience_s:
                    return seen
                if time.monotonic() > ends_at:
                    self._vain = seen.number
                    return seen
                time.sleep(_PAUSE_S)
        except OSError:
            return None
        try:
            return self._collect(known, most, wanted, refused)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._room}/{_LEASE}")

    def _collect(self, known: int, most: int, wanted: int, refused: int) -> Seen | None:
        seen = self.look()
        if seen is None:
            return None
        is_new = seen.number > known and seen.age_s < self._collect_s
        try:
            if is_new and not refused and seen.put(self.mine) <= most:
                if not known:  # else whoever has counted has swept
                    self.num_swept += self._share.sweep()
                return seen
            with self._lock:
                tallies = self._read()
                tallies[self._writer] = self._own(self.mine)
            left = self._share.orphans(self._room)
        except OSError:
            return None
        began = time.monotonic()
        counted = self._share.collect(most, wanted, refused, self._touch)
        if counted is None:
            return None
        self.num_evicted += counted.num_evicted
        self.num_swept += counted.num_swept
        count = _Count(
            blocks=counted.num_blocks,
            nbytes=counted.nbytes,
            seconds=time.monotonic() - began,
            most_bytes=counted.most_bytes,
            tallies={name: one[:2] for name, one in tallies.items()},
        )
        with self._lock:
            self._keep(count, left)
        seen = self.look()
        return seen and attrs.evolve(seen, is_stuck=counted.nbytes > most)

    # The own tally.

    def _own(self, mine: Tally) -> Tally:
        """Return what the own tally is to say."""
        blocks, nbytes, _ = self._began
        return Tally(mine.blocks - blocks, mine.nbytes - nbytes, mine.moving)

    def _tell(self) -> None:
        """Keep the own tally; where no file can be made it is known to nobody else."""
        mine = self.mine
        try:
            try:
                self._write(mine)
            except FileNotFoundError:  # none yet, idle for long, or no answer came
                if self._file == self._next:
                    self._writer, self._began = self._share.new_name(), self._told
                    self._next = ""
                self._file = self._next
                self._write(mine)
        except OSError as exc:
            if exc.errno in AWAY:
                self._next = self._name(mine)  # which may be so by now
                raise

    def _name(self, mine: Tally) -> str:
        return "_".join([f"{self._room}/{self._writer}", *map(str, self._own(mine))])

    def _write(self, mine: Tally) -> None:
        file = self._name(mine)
        if not self._file:
            self._make(file)
        elif file != self._file:
            os.rename(self._file, file)
        self._file = self._next = file
        self._told = mine
        os.utime(file)
        self._ahead_s = os.stat(file).st_mtime - time.monotonic()

    def _make(self, file: str, text: str = "") -> None:
        """Make a file, and the directory for it."""
        try:
            fd = os.open(file, NEW, 0o600)
        except FileNotFoundError:
            self._share.make_room()
            fd = os.open(file, NEW, 0o600)
        with open(fd, "w") as made:
            made.write(text)

    def _age_s(self, then_s: float) -> float:
        """Return how long ago a time of the share's was; 0 where that is not known, or ahead."""
        return max(0.0, time.monotonic() + self._ahead_s - then_s)

    # Those of others.

    def _read(self) -> dict[str, Tally]:
        """Read all tallies, and the last count if that is a new one."""
        tallies: dict[str, Tally] = {}
        for _ in range(_TRIES):
            tallies, numbers = self._list()
            is_new = bool(numbers) and max(numbers) != self._newest
            is_read = not is_new or self._load(max(numbers))
            if is_read and self._writers <= tallies.keys():
                break  # else one was not seen amid a rename, or is gone
        self._writers = tallies.keys()
        return tallies

    def _list(self) -> tuple[dict[str, Tally], list[int]]:
        tallies, numbers = dict[str, Tally](), list[int]()
        try:
            there = entries_of(self._room)
        except FileNotFoundError:
            there = []
        for entry in there:
            if found := _TALLY.fullmatch(entry.name):
                one = Tally(*map(int, found.groups()[1:]))
                last = tallies.get(found[1], one)  # amid a rename
                tallies[found[1]] = max(one, last)
            elif found := _COUNT.fullmatch(entry.name):
                numbers.append(int(found[1]))
        return tallies, numbers

    def _load(self, number: int) -> bool:
        """Read a count, unless there is a later one by now; what is none of ours tells nothing."""
        try:
            name = f"{self._room}/count-{number}"
            with open(name, "rb", opener=lambda file, _: os.open(file, OLD)) as text:
                counted_at = os.fstat(text.fileno()).st_mtime
                count = msgspec.json.decode(text.read(_MOST_TEXT), type=_Count)
        except FileNotFoundError:
            return False
        except OSError as exc:
            if exc.errno in AWAY:
                raise
            count = None
        except DECODE_ERRORS:  # what does not fit, too
            count = None
        self._newest = number
        if count is not None:
            self._count = count
            self._number += 1
            self._counted_at = time.monotonic() - self._age_s(counted_at)
        return True

    def _see(self, tallies: Mapping[str, Tally]) -> Seen:
        count, is_vain = self._count, self._vain == self._number
        self._look += 1
        if count is None:
            return Seen(self._look, seconds=math.inf if is_vain else 0.0)
        blocks, nbytes, moving = count.blocks, count.nbytes, 0
        for writer, one in tallies.items():
            if writer != self._writer:
                counted = count.tallies.get(writer, (0, 0))
                blocks += one.blocks - counted[0]
                nbytes += max(0, one.nbytes - counted[1])  # it was listed before
                moving += one.moving
        began, counted = self._began, count.tallies.get(self._writer, (0, 0))
        return Seen(
            look=self._look,
            number=self._number,
            age_s=time.monotonic() - self._counted_at,
            blocks=blocks,
            nbytes=nbytes,
            moving=moving,
            own=Tally(began.blocks + counted[0], began.nbytes + counted[1]),
            seconds=math.inf if is_vain else count.seconds,
            most_bytes=count.most_bytes,
        )

    # Counting.

    def _begin(self) -> bool:
        """Begin to collect; False while another process does."""
        try:
            self._make(f"{self._room}/{_LEASE}", self._writer)
        except FileExistsError:
            self._end_silent()
            return False
        except OSError as exc:
            if exc.errno in AWAY:
                raise
        self._touched_at = time.monotonic()
        return True

    def _end_silent(self) -> None:
        """Take the turn from a process that has died amid it, whatever the share's clock says."""
        file, now = f"{self._room}/{_LEASE}", time.monotonic()
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            touched = os.lstat(file).st_mtime
            if touched != self._turn[0]:
                self._turn = (touched, now)
            silent_s = max(self._age_s(touched), now - self._turn[1])
            if silent_s > _SILENT_S or self._share.has_ended(file):
                os.unlink(file)

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._touched_at > _TOUCHED_S:
            self._touched_at = now
            with contextlib.suppress(OSError):
                os.utime(f"{self._room}/{_LEASE}")

    def _keep(self, count: _Count, left: Sequence[str] = ()) -> None:
        """Have a count take the place of others, and of tallies that are *left*, for all if they can be told."""
        self._count, self._counted_at = count, time.monotonic()
        self._number += 1
        temporary = self._share.temporary()
        try:
            _, numbers = self._list()
            newest = max([self._newest, *numbers]) + 1
            with open(os.open(temporary, NEW, 0o600), "wb") as file:
                file.write(msgspec.json.encode(count))
            os.rename(temporary, f"{self._room}/count-{newest}")
            self._newest = newest
            for path in [*left, *(f"{self._room}/count-{each}" for each in numbers)]:
                with contextlib.suppress(OSError):  # it may be none of ours
                    os.unlink(path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
