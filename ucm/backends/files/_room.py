# SPDX-License-Identifier: Apache-2.0
"""
How much of a share is used, as far as this process knows, and how room is made.

Room is bounded by what a collection has counted and what was put since. A collection walks
through the share, on one thread, and nobody who puts meanwhile goes over the bound. Where the
mount refuses to remove blocks the share is full until it is counted again.

A short walk is waited for by whoever needs its room, so that nothing is refused that would fit.
A long one is not: what is put meanwhile without room is refused as full, in time, as one without
an answer would have the tier taken for silent. Where walks are long the next one begins once half
of what the last one has made free is used up.

A mount may have less room than the settings say, as it is smaller, under a quota, or filled by
others. Once it has refused a block the share is full until a collection has made room below what
was there, and that bounds it from then on. It is tried with all of its capacity again now and
then, as somebody may have given the mount more.

Threading: on the loop.
"""

import math
import time

import anyio

from ucm.backends._crew import Crew, Job
from ucm.backends.abc import BackendStats, Verdict
from ucm.backends.files._share import SPARE, Collected, Share

__all__ = ["Room"]

_PATIENCE_S = 0.5
"""A walk that takes longer is long: well below what a tier has for a call."""
_PAUSE_S = 30.0
"""Between two collections for a mount that refuses blocks: who else fills it is not raced."""
_COUNTS = 6
"""For as long as from one count to the sixth a mount's room bounds the share; where that is too
little for anything, to the next one."""


class Room:
    """
    The room of one share; rather too little than too much.

    Args:
        share: Whose.
        crew: Has a thread for a collection.
        capacity: That all blocks may have.
        collect_s: They are counted again so often.
    """

    def __init__(
        self, share: Share, crew: Crew, *, capacity: int, collect_s: float
    ) -> None:
        self._share = share
        self._crew = crew
        self._given = self.capacity = capacity
        self._collect_s = collect_s
        self._patience_s = _PATIENCE_S
        self._is_long = False
        """The last walk was."""
        self._collection: Job[Collected | None] | None = None
        self._is_known = False
        """Nothing is before the first collection."""
        self._most = 0
        """That all blocks may have behind the collection."""
        self._collected_at = self._full_until = -math.inf
        self._refused = 0
        """Bytes of blocks for which the mount had no room, and none was made yet."""
        self._making = 0
        """Of those, what a collection that goes on is for."""
        self._short_from = self._less_until = -math.inf
        self._num_blocks = 0
        """Counted by the last collection, and put since."""
        self._nbytes = 0
        """Of those, and of what is being put."""
        self._in_flight = 0
        self._since = self._num_since = 0
        """Put since a collection began, which it may have missed."""
        self._num_evicted = self._num_swept = 0

    async def make(self, nbytes: int) -> Verdict:
        """Return DONE if there is room for so many bytes, and have it made if there is none."""
        now = anyio.current_time()
        self._take()
        self._make_for_refused(now)
        if self._making:
            await self._collect(nbytes)
        if self._refused or self._making:
            return Verdict.FULL
        if self._has(nbytes):
            if self._is_due(nbytes):
                self.start(nbytes)  # nobody waits for it
            return Verdict.DONE
        if now >= self._full_until:
            is_begun = self._collection is not None
            await self._collect(nbytes)
            if is_begun and not self._has(nbytes):
                await self._collect(nbytes)  # that one was to make less room, or none
        if self._has(nbytes):
            return Verdict.DONE
        is_told = self._is_known or self._collection is not None
        return Verdict.FULL if is_told else Verdict.UNAVAILABLE

    def begin(self, nbytes: int) -> None:
        """Count on so many bytes, for which there is room."""
        self._nbytes += nbytes
        self._in_flight += nbytes

    def end(self, begun: int, done: int, num_done: int) -> None:
        """Of what was begun, count what was done."""
        self._in_flight -= begun
        self._nbytes -= begun - done
        self._since += done
        self._num_blocks += num_done
        self._num_since += num_done

    def removed(self, num_blocks: int) -> None:
        """Know that blocks were; their bytes are counted."""
        self._num_blocks -= num_blocks

    def refused(self, nbytes: int) -> None:
        """Know that the mount had no room for so many bytes, and have some made."""
        if not self._making:  # else these were begun before there was any
            self._refused = nbytes
            self._make_for_refused(anyio.current_time())

    def start(self, nbytes: int = 0) -> Job[Collected | None]:
        """Begin with a collection that makes room for so many bytes, unless one goes on."""
        self._take()
        if self._collection is not None:
            return self._collection
        now = self._collected_at = anyio.current_time()
        if now >= self._less_until:
            self.capacity = self._given
        wanted = max(0, self.capacity - nbytes - self.capacity // SPARE)
        most = self._most = self.capacity - nbytes - self._kept
        refused = self._making = self._refused
        self._refused = 0
        if refused:
            self._short_from = now + _PAUSE_S
        self._since = self._num_since = 0

        def walk() -> Collected | None:
            began = time.monotonic()
            counted = self._share.collect(most, wanted, refused)
            self._is_long = time.monotonic() - began > self._patience_s
            return counted

        self._collection = self._crew.start(walk)
        return self._collection

    def stats(self) -> BackendStats:
        """Tell what the last collection has counted, and what was put since."""
        self._take()
        return BackendStats(
            blocks=self._num_blocks if self._is_known else None,
            nbytes=self._nbytes if self._is_known else None,
            capacity_bytes=self.capacity,
            evicted_blocks_total=self._num_evicted,
            swept_total=self._num_swept,
        )

    def _make_for_refused(self, now: float) -> None:
        if self._refused and now >= self._short_from:
            self.start()

    def _has(self, nbytes: int) -> bool:
        """Return whether there is room for so many bytes, as far as is known."""
        return self._is_known and self._nbytes + nbytes <= self.capacity

    @property
    def _kept(self) -> int:
        """Bytes that are to be free when a walk begins."""
        return self.capacity // SPARE // 2 if self._is_long else 0

    def _is_due(self, nbytes: int) -> bool:
        """Return whether to walk already though there is room for so many bytes."""
        now = anyio.current_time()
        if now - self._collected_at > self._collect_s:
            return True  # others put, too
        is_near = self._nbytes + nbytes > self.capacity - self._kept
        return is_near and now >= self._full_until

    async def _collect(self, nbytes: int) -> None:
        """Have a collection make room, and wait for a short one; it goes on for all that."""
        if nbytes > self.capacity:  # all that is there would go for it, in vain
            return
        collection = self.start(nbytes)
        ends_at = self._collected_at + self._patience_s
        with anyio.move_on_after(ends_at - anyio.current_time()):
            await collection.wait()
        self._take()

    def _take(self) -> None:
        """Know what a collection has counted, once it is over."""
        if self._collection is None or not self._collection.is_over:
            return
        counted, self._collection = self._collection.result, None
        refused, self._making = self._making, 0
        if counted is None:
            return
        now = anyio.current_time()
        self._is_known = True
        self._num_evicted += counted.num_evicted
        self._num_swept += counted.num_swept
        self._num_blocks = counted.num_blocks + self._num_since
        self._nbytes = counted.nbytes + self._since + self._in_flight
        if counted.most_bytes is not None:
            self.capacity = min(self.capacity, counted.most_bytes)
            counts = _COUNTS if self.capacity >= refused else 1
            self._less_until = now + counts * self._collect_s
        if counted.nbytes > self._most:  # nor would the next one remove more
            self._full_until = now + self._collect_s
