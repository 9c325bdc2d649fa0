# SPDX-License-Identifier: Apache-2.0
"""
Blocks out of a slab into an export, and into a slab again, while engines use both.

Out: what was used last comes first; a block that is evicted meanwhile is left out, one that
is damaged as well. In: a block that is stored is passed over, so that what was broken off
goes on where it was; one whose bytes are not what was exported is left out. A block counts as
used when it was, by its age and the date of the export, so that none goes for one that was
used before it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import attrs
import numpy as np
import numpy.typing as npt

from ucm.blocks import KeySpace
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    StoreError,
    StoreFullError,
)
from ucm.fates import Fate
from ucm.stores.exports import ExportReader, ExportWriter, Head, Section, Start
from ucm.stores.slab import Blocks, SlabStore, SlabSurvey
from ucm.uses import Uses

__all__ = ["Incoming", "Moved", "Outgoing"]

_HEAD = 17
_BATCH_BYTES = 4 << 20
_MOST_BATCH = 1024
_MOST_SIZES = 8
_NAP_S, _GROWS_S = 0.02, 600.0
_EARLIEST_NS = -(1 << 61)
_SECOND_NS = 10**9
_THERE = Fate.STORED, Fate.WRITING
_OLDEST_NS = 1 << 61
"""Older than 73 years is nothing: a date that somebody made up stays a number of 64 bits."""


@attrs.define
class Moved:
    """What became of blocks."""

    blocks: int = 0
    """Written, or stored."""
    nbytes: int = 0
    present: int = 0
    """Were stored before."""
    gone: int = 0
    """Were evicted before they were read."""
    damaged: int = 0
    """Had other bytes than they should; left out."""
    no_room: int = 0
    """Found no slot that nothing newer has."""
    read_bytes: int = 0
    """Of the blocks that were looked at, for progress."""


class Outgoing:
    """
    Those blocks of a slab that are to be exported, as they are now.

    Args:
        survey: The slab.
        choose: Returns which of some blocks.
    """

    def __init__(
        self, survey: SlabSurvey, choose: Callable[[Blocks], npt.NDArray[np.bool_]]
    ) -> None:
        self._survey = survey
        self._exported_ns = time.time_ns()
        self._largest: dict[bytes, int] = {}
        self._chosen: set[bytes] = set()
        self._found: list[npt.NDArray[np.int64]] = []
        self.blocks = self.nbytes = 0
        for number, surveyed in enumerate(survey.classes):
            for blocks in surveyed.blocks():
                self._add(number, blocks, blocks.where(choose(blocks)))

    def write(self, file: BinaryIO, told: Callable[[Moved], None]) -> Moved:
        """
        Write them.

        Args:
            file: Where to.
            told: Called after each.

        Raises:
            OSError: It cannot be written.
            StoreUnavailableError: A file of the slab was shortened.
        """
        moved = Moved()
        writer = ExportWriter(file, self._start())
        classes = self._survey.classes
        most = max((each.geometry.slot_bytes for each in classes), default=0)
        into = memoryview(bytearray(most))
        for number, slot, generation, age in self._hottest_first():
            surveyed = classes[number]
            block = surveyed.at(slot)
            if not len(block) or int(block.records["generation"][0]) != generation:
                moved.gone += 1
                continue
            moved.read_bytes += int(block.records["nbytes"][0])
            try:
                data = surveyed.fetch(block, 0, into)
            except BlockNotFoundError:
                moved.gone += 1
            except BlockCorruptError:
                moved.damaged += 1
            else:
                writer.add(block.key(0), data, age, int(block.tenants[0]))
            told(moved)
        writer.finish()
        moved.blocks, moved.nbytes = writer.blocks, writer.nbytes
        return moved

    def _add(self, number: int, blocks: Blocks, chosen: Blocks) -> None:
        """Remember where the chosen ones are, and how large blocks of theirs can be."""
        heads, sizes = _heads(blocks), blocks.records["nbytes"]
        fits = sizes <= self._survey.classes[number].geometry.slot_bytes  # or damaged
        for head in np.unique(heads):
            largest = int(sizes[fits & (heads == head)].max(initial=1))
            name = head.tobytes()
            self._largest[name] = max(self._largest.get(name, 0), largest)
        self._chosen |= {head.tobytes() for head in np.unique(_heads(chosen))}
        if len(chosen):
            self.blocks += len(chosen)
            self.nbytes += int(chosen.records["nbytes"].sum(dtype=np.float64))
            columns = (
                np.full(len(chosen), number),
                chosen.slots,
                chosen.records["generation"].astype(np.int64),
                chosen.ages_ns,
            )
            self._found.append(np.stack(columns))

    def _hottest_first(self) -> Iterator[tuple[int, int, int, int]]:
        if self._found:
            found = np.concatenate(self._found, axis=1)
            for at in found[3].argsort(kind="stable"):
                number, slot, generation, age = found[:, at].tolist()
                yield number, slot, generation, age

    def _start(self) -> Start:
        known, _ = self._survey.keyspaces()
        sections = [
            Section(head[1:].hex(), self._largest[head], known.get(head[1:]))
            for head in sorted(self._chosen)
        ]
        return Start(self.blocks, self.nbytes, sections, self._exported_ns)


def _heads(blocks: Blocks) -> npt.NDArray[np.void]:
    """Return of each key what tells its key space."""
    heads: npt.NDArray[np.void] = np.ascontiguousarray(blocks.fields[:, :_HEAD]).view(
        f"V{_HEAD}"
    )
    return heads[:, 0]


@attrs.define
class _Batch:
    """Blocks of one size for one store, and their bytes."""

    store: SlabStore
    block_bytes: int
    data: memoryview
    heads: list[Head] = attrs.field(factory=list)
    keys: set[bytes] = attrs.field(factory=set)

    @property
    def is_full(self) -> bool:
        """Whether there is room for no more."""
        return (len(self.heads) + 1) * self.block_bytes > len(self.data)


class Incoming:
    """
    Brings an export into a slab.

    Args:
        reader: The export.
        path: The slab's directory; it is there.
        most_bytes: Bring no more than that.
        evicts: Make room among what was used before; otherwise none is made.
        stack: Closes the slab in the end.
    """

    def __init__(
        self,
        reader: ExportReader,
        path: Path,
        stack: contextlib.ExitStack,
        *,
        most_bytes: int,
        evicts: bool,
    ) -> None:
        self._reader = reader
        self._path = path
        self._stack = stack
        self._left = most_bytes
        self._evicts = evicts
        self._stores: dict[int, SlabStore] = {}
        self._sizes = {each.digest: each.block_bytes for each in reader.start.sections}
        if len(set(self._sizes.values())) > _MOST_SIZES:
            raise StoreError(
                f"the export has blocks for over {_MOST_SIZES} sizes of slots"
            )
        self._batch: _Batch | None = None
        self._full: set[int] = set()
        self._exported_ns = _moment_of(reader.exported_ns())
        self._grown_by = time.monotonic() + _GROWS_S
        self.moved = Moved()

    def run(self, told: Callable[[Moved], None]) -> Moved:
        """
        Store all that comes, as far as there is room; return what became of it.

        Args:
            told: Called after each.

        Raises:
            StoreError: The file is damaged; what came before is stored.
        """
        texts = [each.keyspace for each in self._reader.start.sections]
        try:
            while (head := self._reader.next()) is not None:
                self._bring(head)
                told(self.moved)
        finally:
            self._flush()
        self._describe([text for text in texts if text is not None])
        return self.moved

    def _describe(self, texts: list[KeySpace]) -> None:
        for store in list(self._stores.values())[:1]:
            for text in texts:
                store.describe(text)

    def _bring(self, head: Head) -> None:
        self.moved.read_bytes += head.nbytes
        store = self._store_for(head)
        if store.match([head.key]):
            self.moved.present += 1
        elif (
            head.nbytes > self._left or store.capabilities.max_block_bytes in self._full
        ):
            self.moved.no_room += 1
        else:
            self._take(head, store)
            return
        self._reader.skip(head)

    def _take(self, head: Head, store: SlabStore) -> None:
        batch = self._batch
        if (
            batch is None
            or batch.store is not store
            or batch.block_bytes != head.nbytes
            or batch.is_full
            or head.key in batch.keys
        ):
            self._flush()
            count = max(1, min(_MOST_BATCH, _BATCH_BYTES // head.nbytes))
            data = memoryview(bytearray(count * head.nbytes))
            batch = self._batch = _Batch(store, head.nbytes, data)
        at = len(batch.heads) * head.nbytes
        if self._reader.take(head, batch.data[at : at + head.nbytes]):
            batch.heads.append(head)
            batch.keys.add(head.key)
            self._left -= head.nbytes
        else:
            self.moved.damaged += 1

    def _store_for(self, head: Head) -> SlabStore:
        """Return the store for the slots in which an engine would look for a block."""
        wanted = self._sizes.get(head.key[1:_HEAD].hex(), 0)
        if head.nbytes > wanted:
            raise StoreError(
                f"block {head.key.hex()} has {head.nbytes} bytes, and the largest of its "
                f"key space is told to have {wanted}"
            )
        if wanted not in self._stores:
            store = SlabStore.join(self._path, block_bytes=wanted)
            self._stores[wanted] = self._stack.enter_context(store)
        return self._stores[wanted]

    def _flush(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None or not batch.heads:
            return
        left = dict(enumerate(batch.heads))
        while left:
            may_grow = batch.store.is_growing and time.monotonic() < self._grown_by
            with contextlib.suppress(StoreFullError):
                left = self._store(batch, left)
            if not may_grow:
                break
            if left:
                time.sleep(_NAP_S)
        if left:
            self.moved.no_room += len(left)
            self._full.add(batch.store.capabilities.max_block_bytes)

    def _store(self, batch: _Batch, left: dict[int, Head]) -> dict[int, Head]:
        """Store what finds a slot; return what does not."""
        places, heads = list(left), list(left.values())
        uses = self._uses(heads)
        keys = [head.key for head in heads]
        asked = uses if self._evicts else _first_to_go(uses)
        with batch.store.reserve(keys, batch.block_bytes, asked) as lease:
            for at, position in enumerate(lease.positions):
                start = places[position] * batch.block_bytes
                lease.slots.block(at)[:] = batch.data[start : start + batch.block_bytes]
            lease.seal(0, len(lease.keys))
            stored = lease.commit()
            granted = set(lease.positions)
            self.moved.present += lease.num_stored
        batch.store.touch(keys, uses)
        self.moved.blocks += stored
        self.moved.nbytes += stored * batch.block_bytes
        if len(granted) + lease.num_stored == len(keys):
            return {}  # also where an engine is still writing one of them
        there = [told.fate in _THERE for told in batch.store.fates(keys)]
        return {
            place: left[place]
            for position, place in enumerate(places)
            if position not in granted and not there[position]
        }

    def _uses(self, heads: list[Head]) -> Uses:
        moments = [
            self._exported_ns - min(max(0, head.age_ns), _OLDEST_NS) for head in heads
        ]
        tenants = [head.tenant for head in heads]
        return Uses(
            np.array(moments, dtype=np.int64), np.array(tenants, dtype=np.uint32)
        )


def _moment_of(wall_ns: int | None) -> int:
    """
    Return by the monotonic clock, up to a second early, when the wall clock showed that.

    To whole seconds the two clocks differ by the same at each import, so that what found no
    room at one does not displace at the next what came a moment after it. What is still to
    come, or None, is now.
    """
    now_ns, moment = time.time_ns(), time.monotonic_ns()
    ahead = -((moment - now_ns) // _SECOND_NS) * _SECOND_NS
    wall_ns = now_ns if wall_ns is None else min(wall_ns, now_ns)
    return max(wall_ns - ahead, moment - _OLDEST_NS)


def _first_to_go(uses: Uses) -> Uses:
    """Return uses before all others, so that no block goes for one of these."""
    return attrs.evolve(uses, moments=uses.moments + _EARLIEST_NS)
