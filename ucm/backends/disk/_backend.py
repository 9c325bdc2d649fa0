# SPDX-License-Identifier: Apache-2.0
"""
The verbs of the disk backend.

The index lives on the loop, and nothing else does: threads move bytes between memory and a
slot that is held meanwhile. Saving reads nothing from a drive (R-61) that takes what it is given.

Durability is stated, not hoped for: with ``process`` what was put outlasts the process, whatever
ends it; with ``power`` a put ends behind an ``fdatasync`` of the drives it wrote to.
"""

import contextlib
import enum
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Self

import anyio

from ucm.backends._crew import Crew
from ucm.backends.abc import (
    Backend,
    BackendCapabilities,
    BackendStats,
    Fetched,
    Presence,
    Sealed,
    Verdict,
)
from ucm.backends.disk._drive import Drive
from ucm.backends.disk._extent import Slot
from ucm.backends.disk._keeping import Keeper
from ucm.backends.disk._runs import cut_runs, largest_of, tell_each
from ucm.backends.disk._settings import DiskSettings
from ucm.backends.disk._slots import Slots
from ucm.backends.envelope import GARBAGE
from ucm.blocks import PackedKey
from ucm.config import Durability
from ucm.errors import ConfigError
from ucm.settings import read_section

__all__ = ["DiskBackend"]

_ABSENT, _AWAY = Fetched(Verdict.ABSENT), Fetched(Verdict.AWAY)
_UNAVAILABLE = Fetched(Verdict.UNAVAILABLE)
_PRESENT = Verdict.PRESENT
_AT_ONCE_BYTES = 32 << 20
"""As many as an agent's call has: a drive serves all alike, and two would end together."""
_THREAD_BYTES = 8 << 20
"""Of a call for each of few threads: the next one is looked at meanwhile, and waits no longer than that."""
_LONG = 4
"""One of so many of which the largest call consists."""
_RUNS = 8
"""Of a call for each drive, where its blocks are side by side."""
_BATCHED, _FEW_BATCHED, _LEAST_BATCH = 8, 32, 256
"""Blocks of a call for each thread: small ones side by side are one request, so that 64 KB cost a third
less CPU than with two. Each call costs the loop and its threads a millisecond, however few threads there
are: so it has 256, but for each of few no more than a slow drive finds in time, wherever they lie."""
_LOOK_S = 5.0


class _End(enum.Enum):
    """What became of a write to a slot."""

    NOT_BEGUN = enum.auto()
    WRITTEN = enum.auto()
    WIPED = enum.auto()
    REFUSED = enum.auto()
    """It has changed nothing."""
    UNCLEAR = enum.auto()
    """It failed, and the stamp that may be there could not be removed, nor what was there be found."""


class DiskBackend(Backend):
    """
    Blocks in slots on drives; made by ``open_configured``.

    Args:
        drives: Allocated.
        slots: Their index, scanned.
        crew: Threads that talk to them.
        settings: As read.
    """

    def __init__(
        self, drives: Sequence[Drive], slots: Slots, crew: Crew, settings: DiskSettings
    ) -> None:
        self._drives = drives
        self._slots = slots
        self._crew = crew
        self._keeper = Keeper(drives, slots, crew)
        self._settings = settings
        self._is_open = True
        self._changing: dict[PackedKey, anyio.Event] = {}
        """Blocks that are being written, written over or deleted: it is not known yet whether
        they are there, and who puts or deletes one waits. So none is ever in two slots."""
        self._num_swept = 0

    @classmethod
    async def open_configured(cls, settings: object, key: str) -> Self:
        """
        Open the drives and look through them.

        Raises:
            ConfigError: A directory is somebody else's, in use, or has no room.
        """
        read = read_section(DiskSettings, settings, f"{key}.")
        if not read.path:
            raise ConfigError(f"{key}.path", "", "missing", "Give a directory.")
        wanted = read.geometry
        crew = Crew(read.threads, "ucm-disk", _AT_ONCE_BYTES)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(crew.aclose)
            drives: list[Drive] = []
            for path in read.path:
                drives.append(Drive(path, wanted.extent_bytes, f"{key}.path"))
                stack.callback(drives[-1].close, is_used=False)
            sizes = [drive.extent_bytes for drive in drives]
            geometry = read.geometry_of(sizes, f"{key}.capacity")
            allocated: list[object] = [None] * len(drives)
            await crew.run(drives, lambda drive: drive.allocate(geometry), allocated)
            slots = Slots(geometry, len(drives), lambda: secrets.randbits(64))
            backend = cls(drives, slots, crew, read)
            backend._num_swept = await backend._keeper.load()
            stack.pop_all()
        return backend

    @property
    def capabilities(self) -> BackendCapabilities:
        """Of these drives."""
        return BackendCapabilities(
            medium="disk",
            shared=False,
            durable=self._settings.durability.value,
            max_block_bytes=self._slots.geometry.max_block_bytes,
            batch_blocks=self._batch_blocks,
            in_flight=2,
            batch_bytes=min(_AT_ONCE_BYTES, self._settings.threads * _THREAD_BYTES),
        )

    @property
    def _batch_blocks(self) -> int:
        threads = self._settings.threads
        return max(_BATCHED * threads, min(_LEAST_BATCH, _FEW_BATCHED * threads))

    @property
    def _num_runs(self) -> int:
        return min(self._settings.threads, _RUNS * len(self._drives))

    def _row_of(self, verb: str, slots: Sequence[Slot]) -> str:
        """Return with which calls one waits for its turn; a short one does not wait for a long one's end."""
        nbytes = sum([slot.nbytes for slot in slots])
        return verb if _LONG * nbytes >= self.capabilities.batch_bytes else ""

    def watch(self, tell: Callable[[PackedKey, bool], None]) -> Sequence[PackedKey]:
        """Tell of what the index finds, and of what no more."""
        self._slots.tell = tell
        return self._slots.keys()

    async def attend(self) -> None:
        """Look now and then whether something is read again of a drive that is away."""
        while True:
            await anyio.sleep(_LOOK_S)
            away = [drive for drive in self._drives if drive.is_silent]
            await self._crew.run(away, Drive.answers, [False] * len(away), leave=True)

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Look into the index."""
        if not self._is_open:
            return [Presence.UNKNOWN] * len(keys)
        return [
            Presence.PRESENT if slot else Presence.ABSENT
            for slot in self._slots.find_each(keys)
        ]

    async def get(
        self, keys: Sequence[PackedKey], targets: Sequence[memoryview]
    ) -> list[Fetched]:
        """Read from the drives, all at once."""
        if not self._is_open:
            return [_UNAVAILABLE] * len(keys)
        found = self._slots.find_each(keys)
        got = [GARBAGE if slot else _ABSENT for slot in found]
        asked = enumerate(zip(found, targets, map(len, targets), strict=True))
        numbered = [
            (at, slot, target)
            for at, (slot, target, nbytes) in asked
            if slot is not None and slot.nbytes == nbytes
        ]
        held = [(slot, target) for _, slot, target in numbered]
        slots = [slot for slot, _ in held]
        self._slots.use(*slots)
        self._slots.hold(*slots)
        runs = cut_runs(held, self._num_runs)
        told: list[list[Fetched] | None] = [None] * len(runs)
        try:
            nbytes, row = largest_of(runs), self._row_of("get", slots)
            await self._crew.run(runs, self._read, told, nbytes=nbytes, row=row)
        finally:
            ends = tell_each(runs, told, _UNAVAILABLE)
            for (at, slot, _), one in zip(numbered, ends, strict=True):
                got[at] = _ABSENT if slot.is_gone and one is GARBAGE else one
            self._slots.let_go(*slots)
        return got

    async def put(self, blocks: Sequence[Sealed]) -> list[Verdict]:
        """
        Write to slots that are free, or of the oldest blocks; a key at a time once.

        Nothing goes for what a drive would be given that is known to refuse.
        """
        verdicts: dict[PackedKey, Verdict] = {}
        waiting = list(blocks)
        if self._is_open:
            await self._keeper.before_put()
        while waiting and self._is_open:
            over, changing = anyio.Event(), self._changing
            others = [block for block in waiting if block.key in changing]
            # One that is twice in a call is written once.
            asked = {each.key: each for each in waiting if each.key not in changing}
            found = dict(zip(asked, self._slots.find_each(asked), strict=True))
            there = [slot for slot in found.values() if slot]
            self._slots.use(*there)
            verdicts = dict.fromkeys([slot.key for slot in there], _PRESENT) | verdicts
            new = [block for key, block in asked.items() if not found[key]]
            if mine := self._reserve(new, verdicts):
                keys = _changed([slot for slot, _ in mine])
                self._changing |= dict.fromkeys(keys, over)
                await self._write_all(mine, verdicts, over)
            elif others:
                await self._changing[others[0].key].wait()
            waiting = others
        return [verdicts.get(block.key, Verdict.UNAVAILABLE) for block in blocks]

    def _reserve(
        self, blocks: Sequence[Sealed], verdicts: dict[PackedKey, Verdict]
    ) -> list[tuple[Slot, Sealed]]:
        """Return slots to write blocks to, and say what is told of those for which there is none."""
        most = self._slots.geometry.max_block_bytes
        fitting = [block for block in blocks if block.data.nbytes <= most]
        wanted = [(block.key, block.data.nbytes) for block in fitting]
        found = zip(self._slots.reserve(wanted), fitting, strict=True)
        pairs = [(slot, block) for slot, block in found if slot is not None]
        if len(pairs) < len(blocks):
            all_refuse = len(self._slots.refusing) == len(self._drives)
            why = Verdict.UNAVAILABLE if all_refuse else Verdict.FULL
            verdicts |= {block.key: why for block in fitting}
            verdicts |= {
                block.key: Verdict.FULL for block in blocks if block.data.nbytes > most
            }
        return pairs

    async def _write_all(
        self,
        pairs: list[tuple[Slot, Sealed]],
        verdicts: dict[PackedKey, Verdict],
        over: anyio.Event,
    ) -> None:
        """Write blocks to their slots, and find or free each one, also when cancelled."""
        runs = cut_runs(pairs, self._num_runs)
        told: list[list[_End] | None] = [None] * len(runs)
        lasting = [self._settings.durability is Durability.PROCESS] * len(self._drives)
        try:
            nbytes, row = largest_of(runs), self._row_of("put", [s for s, _ in pairs])
            await self._crew.run(runs, self._write, told, nbytes=nbytes, row=row)
            if not all(lasting):
                await self._crew.run(self._drives, Drive.flush, lasting)
        finally:
            over.set()
            ends, written = tell_each(runs, told, _End.NOT_BEGUN), list[Slot]()
            for key in _changed([slot for slot, _ in pairs]):
                del self._changing[key]
            drives = [slot.extent.drive for slot, _ in pairs]
            by_drive = zip(drives, ends, strict=True)
            well = {at for at, end in by_drive if end is _End.WRITTEN and lasting[at]}
            for (slot, block), at, end in zip(pairs, drives, ends, strict=True):
                if end is _End.WRITTEN:
                    written.append(slot)
                elif end in (_End.WIPED, _End.UNCLEAR):
                    self._slots.clear(slot, is_wiped=end is _End.WIPED)
                else:
                    self._slots.abort(slot, is_refused=end is _End.REFUSED)
                is_done = end is _End.WRITTEN and at in well
                why = _why_not(well - {at})
                verdicts[block.key] = Verdict.DONE if is_done else why
            self._slots.commit(*written)

    async def delete(self, keys: Sequence[PackedKey]) -> list[Verdict]:
        """Remove stamps, so that no scan finds the blocks again."""
        while changing := [key for key in keys if key in self._changing]:
            await self._changing[changing[0]].wait()
        if not self._is_open:
            return [Verdict.UNAVAILABLE] * len(keys)
        found = {key: slot for key in keys if (slot := self._slots.find(key))}
        over = anyio.Event()
        for key, slot in found.items():
            self._slots.hold(slot)
            self._slots.remove(slot)
            self._changing[key] = over
        wiped: list[bool | None] = [None] * len(found)
        wipe = lambda slot: self._drives[slot.extent.drive].wipe(slot)
        try:
            await self._crew.run(list(found.values()), wipe, wiped)
        finally:
            over.set()
            for (key, slot), is_wiped in zip(found.items(), wiped, strict=True):
                del self._changing[key]
                if is_wiped is None:
                    self._slots.restore(slot)
                    self._slots.let_go(slot)
                else:
                    self._slots.clear(slot, is_wiped=is_wiped)
        kept = await self._keeper.wipe_unclear_of(keys)
        kept |= {key for key, end in zip(found, wiped, strict=True) if end is None}
        if not await self._keeper.mark_taken():
            kept = set(keys)
        pairs = zip(found.values(), wiped, strict=True)
        well = {slot.extent.drive for slot, is_wiped in pairs if is_wiped}
        why = _why_not(well - self._slots.refusing)
        told = dict.fromkeys(found, Verdict.DONE) | dict.fromkeys(kept, why)
        return [told.get(key, Verdict.ABSENT) for key in keys]

    @property
    def away(self) -> Sequence[str]:
        """Those of several drives of which nothing could be read."""
        return self._named([drive for drive in self._drives if drive.is_silent])

    @property
    def refusing(self) -> Sequence[str]:
        """Those of several drives that have refused to write, until they take a block again."""
        asked, known = enumerate(self._drives), self._slots.refusing
        return self._named([each for at, each in asked if each.is_tried or at in known])

    def _named(self, drives: Sequence[Drive]) -> Sequence[str]:
        return [str(each.path) for each in drives if len(self._drives) > 1]

    @property
    def trouble(self) -> str:
        """Why a drive takes no blocks."""
        return next(filter(None, [drive.trouble for drive in self._drives]), "")

    async def stats(self) -> BackendStats:
        """Tell what the index knows."""
        geometry = self._slots.geometry
        return BackendStats(
            blocks=len(self._slots),
            nbytes=self._slots.nbytes,
            capacity_bytes=geometry.nbytes * len(self._drives),
            evicted_blocks_total=self._slots.num_evicted,
            swept_total=self._num_swept,
        )

    async def aclose(self) -> None:
        """Wait for what is under way, and let go of the drives."""
        if not self._is_open:
            return
        self._is_open = False
        await self._keeper.aclose()

    # On threads of the crew.

    def _read(self, run: list[tuple[Slot, memoryview]]) -> list[Fetched]:
        drive = self._drives[run[0][0].extent.drive]
        if (told := drive.read(run)) is not None:
            return told
        if len(run) > 1:
            return [one for pair in run for one in self._read([pair])]
        # A place that cannot be read is no word on the drive: the block goes, and may come anew.
        if drive.answers():
            return [GARBAGE]
        # Nor is a drive on the tier, where another one answers.
        others = [each for each in self._drives if each is not drive]
        return [_AWAY if any(map(Drive.answers, others)) else _UNAVAILABLE]

    def _write(self, run: list[tuple[Slot, Sealed]]) -> list[_End]:
        drive = self._drives[run[0][0].extent.drive]
        is_written = drive.write(run)
        if is_written is not False:
            return [_End.WRITTEN if is_written else _End.NOT_BEGUN] * len(run)
        if len(run) > 1:
            return [end for pair in run for end in self._write([pair])]
        slot = run[0][0]
        is_as_before = drive.is_as_before(slot)
        if is_as_before and slot.previous[0]:
            return [_End.REFUSED]
        if drive.renew(slot):
            return [_End.WIPED]
        # A free place is refused where the drive is; if it writes elsewhere, nobody is to have it again.
        is_refused = is_as_before and not drive.writes(slot.extent)
        return [_End.REFUSED if is_refused else _End.UNCLEAR]


def _why_not(well: Collection[int]) -> Verdict:
    """What one drive does not do is its own affair where others have done something."""
    return Verdict.AWAY if well else Verdict.UNAVAILABLE


def _changed(slots: Sequence[Slot]) -> list[PackedKey]:
    """Return the blocks that are to be written to slots, and those that are there."""
    return [key for slot in slots for key in (slot.key, slot.previous[0]) if key]
