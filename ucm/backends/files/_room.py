# SPDX-License-Identifier: Apache-2.0
"""
How room is made on a share, and who may put.

What all machines have there is told by ``_ledger``, which is looked at for each put. Nobody puts
what would go over the bound, nor what would with that which others are about to put. A collection
walks through the share, on one thread of one machine. Where the mount refuses to remove blocks the
share is full until it is counted again.

A short walk is waited for by whoever needs its room, so that nothing is refused that would fit.
A long one is not: what is put meanwhile without room is refused as full, in time, as one without
an answer would have the tier taken for silent. Where walks are long the next one begins once half
of what the last one has made free is used up.

A mount may have less room than the settings say, as it is smaller, under a quota, or filled by
others. Once it has refused a block the share is full until a collection has made room below what
was there, and that bounds it from then on, for all. It is tried with all of its capacity again now
and then, as somebody may have given the mount more.

Threading: on the loop.
"""

import math
from functools import partial

import anyio

from ucm.backends._crew import Crew, Job
from ucm.backends.abc import BackendStats, Verdict
from ucm.backends.files._ledger import Ledger, Seen, Tally
from ucm.backends.files._share import SPARE, Share

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
        self._ledger = Ledger(share, collect_s)
        self._crew = crew
        self._given = self.capacity = capacity
        self._collect_s = collect_s
        self._patience_s = _PATIENCE_S
        self._seen = Seen()
        self._counted_at = self._started_at = -math.inf
        self._collection: Job[Seen | None] | None = None
        self._telling: Job[Seen | None] | None = None
        """What nobody waits for, as whoever put has gone."""
        self._is_away = False
        """Nobody could be asked when the last one was over."""
        self._full_until = -math.inf
        self._refused = 0
        """Bytes of blocks for which the mount had no room, and none was made yet."""
        self._making = 0
        """Of those, what a collection that goes on is for."""
        self._short_from = self._less_until = -math.inf

    async def take(self, nbytes: int) -> Verdict:
        """Return DONE if so many bytes may be put; ``end`` is to be called then."""
        if nbytes > self._bound:
            return Verdict.FULL  # others need not know of it
        self._move(nbytes)
        verdict = Verdict.UNAVAILABLE
        try:
            verdict = await self._find()
        finally:
            if verdict is not Verdict.DONE:
                self._move(-nbytes)
        if verdict is Verdict.FULL:
            await self.tell()
        return verdict

    async def _find(self) -> Verdict:
        """Find room for what has been counted on by now, or make it."""
        if not await self.tell():
            return Verdict.UNAVAILABLE
        self._take()
        self._make_for_refused()
        if self._making:
            await self._collect()
        if self._refused or self._making:
            return Verdict.FULL
        if self._has_room():
            if self._is_due:
                self.start()  # nobody waits for it
            return Verdict.DONE
        await self._make()
        if self._has_room():
            return Verdict.DONE
        is_known = self._seen.number > 0 or self._collection is not None
        return Verdict.FULL if is_known or not self._is_away else Verdict.UNAVAILABLE

    async def _make(self) -> None:
        """
        Have room made; what one collection makes may be for others, and is taken by them.

        None is where all that is about to be put has more than there is: all would go in vain.
        """
        now = anyio.current_time()
        ends_at = now + self._patience_s
        while self._moving <= self._bound and self._full_until <= now <= ends_at:
            await self._collect()
            is_long = (
                self._collection is not None or self._seen.seconds > self._patience_s
            )
            if is_long or self._is_away or self._has_room():
                break
            now = anyio.current_time()

    def end(self, begun: int, done: int, num_done: int) -> None:
        """Of what was taken, count what was done; ``tell`` lets others know."""
        self._move(-begun, done, num_done)

    async def tell(self) -> bool:
        """Tell others what is put here, and see what they do; False if the share is away."""
        seen: list[Seen | None] = [None]
        await self._crew.run([self._ledger], Ledger.look, seen, leave=True)
        if seen[0] is not None:
            self._see(seen[0])
        return seen[0] is not None

    def tell_later(self) -> None:
        """Tell others what is not put any more, as whoever put it has gone."""
        if self._telling is None or self._telling.is_over:
            self._telling = self._crew.start(self._ledger.look)

    def removed(self, num_blocks: int) -> None:
        """Know that blocks were; their bytes are counted."""
        self._move(0, 0, -num_blocks)

    def refused(self, nbytes: int) -> None:
        """Know that the mount had no room for so many bytes, and have some made."""
        if not self._making:  # else these were begun before there was any
            self._refused = nbytes
            self._make_for_refused()

    def start(self) -> "Job[Seen | None]":
        """Begin with a collection that makes room for what is being put, unless one goes on."""
        self._take()
        if self._collection is not None:
            return self._collection
        now = self._started_at = anyio.current_time()
        self.capacity = self._bound
        wanted = max(0, self.capacity - self._moving - self.capacity // SPARE)
        most = max(0, self.capacity - self._moving - self._kept)
        self._making, self._refused = self._refused, 0
        if self._making:
            self._short_from = now + _PAUSE_S
        known, patience_s = self._seen.number, self._patience_s
        self._collection = self._crew.start(
            partial(self._ledger.collect, known, most, wanted, self._making, patience_s)
        )
        return self._collection

    def stats(self) -> BackendStats:
        """Tell what the share has, as this process has seen it last."""
        self._take()
        seen, mine = self._seen, self._ledger.mine
        return BackendStats(
            blocks=seen.blocks + mine.blocks - seen.own.blocks if seen.number else None,
            nbytes=seen.put(mine) if seen.number else None,
            capacity_bytes=self.capacity,
            evicted_blocks_total=self._ledger.num_evicted,
            swept_total=self._ledger.num_swept,
        )

    def _move(self, moving: int, nbytes: int = 0, blocks: int = 0) -> None:
        mine = self._ledger.mine
        self._ledger.mine = Tally(
            mine.blocks + blocks, mine.nbytes + nbytes, mine.moving + moving
        )

    def _make_for_refused(self) -> None:
        if self._refused and anyio.current_time() >= self._short_from:
            self.start()

    @property
    def _bound(self) -> int:
        """The capacity that a collection is to keep to."""
        is_less = anyio.current_time() < self._less_until
        return self.capacity if is_less else self._given

    @property
    def _moving(self) -> int:
        """
        Bytes that are about to be put.

        Those of others are no more than half of the share, or where they are, all would wait for
        each other.
        """
        return self._ledger.mine.moving + min(self._seen.moving, self.capacity // 2)

    @property
    def _used(self) -> int:
        """Bytes that are there, or about to be, as far as is known."""
        return self._seen.put(self._ledger.mine) + self._moving

    def _has_room(self) -> bool:
        """Return whether there is room for all that is about to be put, as far as is known."""
        return self._seen.number > 0 and self._used <= self.capacity

    @property
    def _kept(self) -> int:
        """Bytes that are to be free when a walk begins."""
        is_long = self._seen.seconds > self._patience_s
        return self.capacity // SPARE // 2 if is_long else 0

    @property
    def _is_due(self) -> bool:
        """Whether to walk already though there is room."""
        now = anyio.current_time()
        if now - self._counted_at > self._collect_s:
            return True  # what was removed is to be known
        return self._used > self.capacity - self._kept and now >= self._full_until

    async def _collect(self) -> None:
        """Have a collection make room, and wait for a short one; it goes on for all that."""
        collection = self.start()
        ends_at = self._started_at + self._patience_s
        with anyio.move_on_after(ends_at - anyio.current_time()):
            await collection.wait()
        self._take()

    def _take(self) -> None:
        """Know what a collection has counted, once it is over."""
        if self._collection is None or not self._collection.is_over:
            return
        seen, self._collection = self._collection.result, None
        self._is_away = seen is None
        if seen is not None:
            self._see(seen)
            if seen.is_stuck:  # nor would the next one remove more
                self._full_until = anyio.current_time() + self._collect_s
        self._making = 0

    def _see(self, seen: Seen) -> None:
        """Know what a look has told, unless a later one has: it would hide who began since."""
        if seen.look < self._seen.look:
            return
        is_new, self._seen = seen.number > self._seen.number, seen
        if not is_new:
            return
        now = anyio.current_time()
        self._counted_at = now - seen.age_s
        if seen.most_bytes is not None:
            self.capacity = min(self.capacity, seen.most_bytes)
            least = max(self._making, self._ledger.mine.moving, 1)
            counts = _COUNTS if self.capacity >= least else 1
            self._less_until = now + counts * self._collect_s
