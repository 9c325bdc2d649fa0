# SPDX-License-Identifier: Apache-2.0
"""
The node's ledger: which blocks are in which medium, in one order for all who follow.

It is written by whoever sees a block come or go: what follows the slab's changes, and tiers.
A *reader* begins with a listing of all that is there, and is then told of each change once,
in the order of the ledger. What changes amid the listing is told between its blocks, so that
it goes on however much changes, and its end says what was there at one time. Changes are kept
in a ring; who was too slow for it begins anew, though not before its listing has ended: so
what was gone when a listing began is told by its end at the latest.
Nobody begins while somebody who writes has yet to say what was there before.

Engines *describe* blocks: whose tokens they hold, which no store knows. A description is bytes
that only engines read. It is kept as long as there is room, and travels with each entry that
tells of a stored block; where it comes later, the block is told of once more.

Pure, and on the agent's loop. Nothing of it costs anything before the first reader comes.
"""

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import anyio
import msgspec

from ucm.agent.protocol import Entry
from ucm.blocks import PackedKey, block_of

__all__ = ["AT_ONCE", "PREFIX_BYTES", "Batch", "Ledger", "Reader"]

_MOST_BLOCKS: Final = 1 << 20
"""Of all media; more are not told of."""
_MOST_CHANGES: Final = 1 << 16
_MOST_SAID_BYTES: Final = 64 << 20
AT_ONCE: Final = 512
"""Entries of one batch, at most."""
PREFIX_BYTES: Final = 17
"""Of a key those that say which key space it is of."""
_NOTHING: Final[Mapping[PackedKey, int]] = {}
_LISTED_SHARE: Final = 8
"""Of a listing's batch one part in so many lists, whatever changes meanwhile."""


class _Change(msgspec.Struct, frozen=True):
    """What has happened, and to which block."""

    medium: int
    is_stored: bool
    key: PackedKey


class Batch(NamedTuple):
    """
    What a reader is told at once.

    Args:
        entries: In order.
        begins: A listing begins with it.
        listed: A listing ends with it: what was not listed is not there.
    """

    entries: list[Entry]
    begins: bool
    listed: bool


class Ledger:
    """
    What is where; see the module's text.

    Args:
        num_media: The slab, which is 0, and the tiers behind it.
        most_blocks: That it knows at a time.
        most_changes: That a reader may be behind.
        most_said_bytes: Of all descriptions, and of the names of their blocks.
    """

    def __init__(
        self,
        num_media: int,
        *,
        most_blocks: int = _MOST_BLOCKS,
        most_changes: int = _MOST_CHANGES,
        most_said_bytes: int = _MOST_SAID_BYTES,
    ) -> None:
        self._num_media = num_media
        self._most_blocks = most_blocks
        self._there: dict[bytes, dict[PackedKey, int]] = {}
        """By key space, and then by key, a bit for each medium."""
        self._num_blocks = 0
        self._guesses = 0
        """A bit for each medium of which it is not known what it lets go."""
        self._guessed: OrderedDict[PackedKey, None] = OrderedDict()
        """What only such media have; the oldest gives room, or they would have all of it for good."""
        self.num_forgotten = 0
        """Blocks that did."""
        self._changes: deque[_Change] = deque(maxlen=most_changes)
        self.num_changes = 0
        """So far."""
        self._said: OrderedDict[bytes, bytes] = OrderedDict()
        self._said_bytes = 0
        self._most_said_bytes = most_said_bytes
        self._changed: anyio.Event | None = None
        """Made for who waits: blocks come and go whether anybody follows or not."""
        self._queues: dict[bytes, list[Reader]] = {}
        """By key space the readers that want to be the only one, the one that is first."""
        self.num_untold = 0
        """Blocks that came when there was no room for more."""
        self._num_listing = 0
        """Of those who write, how many have not said what was there before."""

    def told(self) -> dict[str, int]:
        """Return the counts as plain values."""
        return {
            "blocks": self._num_blocks,
            "changes": self.num_changes,
            "described": len(self._said),
            "untold": self.num_untold,
            "forgotten": self.num_forgotten,
        }

    # Whoever sees blocks come and go.

    @contextmanager
    def lists(self) -> Iterator[None]:
        """Keep readers from beginning, while what was there before is told."""
        self._num_listing += 1
        try:
            yield
        finally:
            self._num_listing -= 1
            self._wake()

    def guess(self, medium: int) -> None:
        """Know that a medium does not tell what it lets go; before it is told of."""
        self._guesses |= 1 << medium

    def stored(self, medium: int, key: PackedKey) -> None:
        """Take note that a medium has a block."""
        media = self._media_of(key)
        if media >> medium & 1:
            if key in self._guessed:
                self._guessed.move_to_end(key)
            return
        if not media and self._num_blocks >= self._most_blocks:
            if not self._guessed:
                self.num_untold += 1
                return
            self._forget(next(iter(self._guessed)))
        self._put(key, media | 1 << medium)
        self._tell(_Change(medium, is_stored=True, key=key))

    def removed(self, medium: int, key: PackedKey) -> None:
        """Take note that a medium has a block no more, if it had it."""
        media = self._media_of(key)
        if not media >> medium & 1:
            return
        self._put(key, media & ~(1 << medium))
        self._tell(_Change(medium, is_stored=False, key=key))

    def _put(self, key: PackedKey, media: int) -> None:
        """Write down which media have a block."""
        self._guessed.pop(key, None)
        there = self._there.setdefault(key[:PREFIX_BYTES], {})
        self._num_blocks += bool(media) - (key in there)
        if not media:
            del there[key]
            if not there:
                del self._there[key[:PREFIX_BYTES]]
            return
        there[key] = media
        if not media & ~self._guesses:
            self._guessed[key] = None

    def _forget(self, key: PackedKey) -> None:
        """Tell that a block is gone, which may be so."""
        self.num_forgotten += 1
        for medium in range(self._num_media):
            self.removed(medium, key)

    def describe(self, key: PackedKey, said: bytes) -> None:
        """
        Take the description of a block, unless it has one.

        Args:
            key: Of one of its parts, which is told of once more where it is.
            said: Holds for all parts.
        """
        block = block_of(key)
        if block in self._said:
            self._said.move_to_end(block)
            return
        self._said[block] = said
        self._said_bytes += len(block) + len(said)
        while self._said_bytes > self._most_said_bytes:
            self._said_bytes -= sum(map(len, self._said.popitem(last=False)))
        for medium in range(self._num_media):
            if self.has(medium, key):
                self._tell(_Change(medium, is_stored=True, key=key))

    def _tell(self, change: _Change) -> None:
        self._changes.append(change)
        self.num_changes += 1
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    # Whoever reads.

    def read(self, prefix: bytes, *, alone: bool) -> "Reader":
        """
        Return a reader of one key space, at its beginning.

        Args:
            prefix: What the space's keys begin with.
            alone: It is to be told nothing while another such reader is open.
        """
        reader = Reader(self, prefix, alone=alone)
        if alone:
            self._queues.setdefault(prefix, []).append(reader)
        return reader

    def close(self, reader: "Reader") -> None:
        """End a reader; the next one in its line has its place. Idempotent."""
        queue = self._queues.get(reader.prefix, [])
        if reader in queue:
            queue.remove(reader)
            self._wake()
        if not queue:
            self._queues.pop(reader.prefix, None)

    def is_first(self, reader: "Reader") -> bool:
        """Return whether a reader is told."""
        return not reader.alone or self._queues.get(reader.prefix, [])[:1] == [reader]

    @property
    def is_whole(self) -> bool:
        """Whether it has all that was there before."""
        return not self._num_listing

    async def changed(self) -> None:
        """Wait for something new."""
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def since(self, sequence: int) -> list[_Change] | None:
        """Return some changes from a number on; None: they are no longer known."""
        left = self.num_changes - sequence
        if left > len(self._changes):
            return None
        newest = reversed(self._changes)  # most readers are near the end
        return list(itertools.islice(newest, max(0, left - AT_ONCE), left))[::-1]

    def entry(self, change: _Change) -> Entry:
        """Return what is told of a change."""
        said = self._said.get(block_of(change.key), b"") if change.is_stored else b""
        return Entry(change.medium, change.is_stored, change.key, said)

    def listing(self, prefix: bytes) -> Iterator[Entry]:
        """
        Return what tells of all that is there of a key space now.

        Each block is told of as it is when its turn comes: what happens meanwhile is
        among the changes as well.
        """
        keys = list(self._there.get(prefix, ()))  # in one go, and nothing else is
        return (
            self.entry(_Change(medium, is_stored=True, key=key))
            for key in keys
            for medium in range(self._num_media)
            if self.has(medium, key)
        )

    def has(self, medium: int, key: PackedKey) -> bool:
        """Return whether a medium has a block."""
        return bool(self._media_of(key) >> medium & 1)

    def _media_of(self, key: PackedKey) -> int:
        """Return a bit for each medium that has a block."""
        return self._there.get(key[:PREFIX_BYTES], _NOTHING).get(key, 0)


class Reader:
    """
    How far one who follows the ledger has come; made by ``Ledger.read``.

    Args:
        ledger: Which.
        prefix: Of the keys that it is told of.
        alone: Whether it waits until it is first in its line.
    """

    def __init__(self, ledger: Ledger, prefix: bytes, *, alone: bool) -> None:
        self.prefix = prefix
        self.alone = alone
        self._ledger = ledger
        self._sequence = 0
        self._listing: Iterator[Entry] | None = None
        self._listing_ends: int | None = None
        """With this change, as all is listed."""
        self._has_begun = False
        self._was_put_off = False

    async def next(self) -> Batch:
        """Return what comes next, once there is something; for one task at a time."""
        await anyio.lowlevel.checkpoint()  # one that is closed looks no more
        while (batch := self.look()) is None:
            await self._ledger.changed()
        return batch

    def look(self) -> Batch | None:
        """Return what comes next if it is there."""
        ledger = self._ledger
        if not ledger.is_first(self):
            if self._was_put_off:
                return None
            self._was_put_off = True
            return Batch([], begins=True, listed=True)
        if self._listing is not None:
            return self._list(self._listing)
        entries = self._news(AT_ONCE) if self._has_begun else None
        if entries is not None:
            return Batch(entries, begins=False, listed=False) if entries else None
        if not ledger.is_whole:
            return None
        self._has_begun = True
        self._sequence = ledger.num_changes
        self._listing = ledger.listing(self.prefix)
        return self._list(self._listing, begins=True)

    def _list(self, listing: Iterator[Entry], *, begins: bool = False) -> Batch:
        """Return what comes next of a listing, behind what has changed."""
        news = self._news(AT_ONCE - max(1, AT_ONCE // _LISTED_SHARE))
        entries = news or []
        entries += itertools.islice(listing, AT_ONCE - len(entries))
        if len(entries) < AT_ONCE and self._listing_ends is None:
            self._listing_ends = self._ledger.num_changes
        is_over = self._listing_ends is not None and (
            news is None or self._sequence >= self._listing_ends
        )
        if is_over:
            self._listing = self._listing_ends = None
        return Batch(entries, begins, is_over)

    def _news(self, most: int) -> list[Entry] | None:
        """Take note of changes, and return what is told of them; None: some are lost."""
        entries: list[Entry] = []
        while found := self._ledger.since(self._sequence):
            for change in found:
                self._sequence += 1
                if change.key.startswith(self.prefix):
                    entries.append(self._ledger.entry(change))
                if len(entries) == most:
                    return entries
        return entries if found is not None else None
