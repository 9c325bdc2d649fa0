# SPDX-License-Identifier: Apache-2.0
"""
Fetch: what an engine wants of its prefix comes from the tiers into slots of the slab.

A *want* is a request's keys in order. What the slab has of them is marked as used at a
moment still to come, so that it stays; for each other one there is a *flight*, one per key
however many want it from the same tiers (``ucm.agent.flights``). Who wants a key first starts
its flight. A want keeps its slots until it is dropped, or its time is over, and its flights
have ended: so what is pinned is bounded as well, also where a tier hangs. Of a want with several
hits it is found out first which of them is there (``ucm.agent.hits``). Slots are taken behind
those of flights that were joined; where somebody has some already, for a longer hit or as another gave
up, only if they are left: others may wait for what it has. What is being forgotten is *kept out*: it
may be asked for, and lands nowhere.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ucm.agent.budget import Budget
from ucm.agent.calls import Blocking, Parts
from ucm.agent.flight import Flight, Group
from ucm.agent.flights import Flights
from ucm.agent.locating import Looks
from ucm.agent.register import Register
from ucm.agent.wants import FetchCounts, Slab, Want
from ucm.backends.wrap import BreakerBackend
from ucm.blocks import PackedKey
from ucm.errors import StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.abc import Store

__all__ = ["FetchCounts", "Fetcher", "Want"]

_NOWHERE: Final = (Reason.ABSENT, Reason.ADMISSION, Reason.CORRUPT)
"""Reasons for which a block did not come, and will not for another hit."""


class Fetcher:
    """
    Brings wanted blocks from tiers into the slab.

    Args:
        store: The slab.
        tiers: In the order in which they are asked.
        call: For the slab's verbs.
        budget: Slots.
        why_absent: Says why none of these tiers has a block.
        brought: Called with the number of the tier from which blocks came, and their keys.
    """

    def __init__(
        self,
        store: Store,
        tiers: Sequence[BreakerBackend],
        call: Blocking,
        budget: Budget,
        why_absent: Callable[[PackedKey, Sequence[int]], Reason] = lambda *_: (
            Reason.ABSENT
        ),
        brought: Callable[[int, Sequence[PackedKey]], None] = lambda *_: None,
    ) -> None:
        self.counts = FetchCounts()
        self._slab = Slab(store, call)
        self._tiers = tiers
        self._budget = budget
        self._why_absent = why_absent
        self.register = Register(self.counts, brought)
        self._flights = Flights(
            self._slab, tiers, budget, self.counts, self.register, why_absent
        )
        self._joining = anyio.Lock(fast_acquire=True)
        self._tasks: TaskGroup | None = None

    @property
    def num_open(self) -> int:
        """Flights that have not ended."""
        return len(self.register.by_key)

    def told(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return self.counts.told() | {"open": self.num_open}

    async def run(self, ready: Callable[[], None]) -> None:
        """Let flights fly until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            self._flights.tasks = self._tasks
            ready()
            try:
                await anyio.sleep_forever()
            finally:  # who joins does not end amid that, and begins its flights here
                with anyio.CancelScope(shield=True):
                    async with self._joining:
                        pass

    async def fetch(self, want: Want) -> None:
        """Bring what *want* needs, until its deadline; say in it what is there then."""
        self.counts.wants += 1
        try:
            want.reason = Reason.DEADLINE
            with anyio.move_on_at(want.deadline):
                want.reason = await self._bring(want)
            if want.found:  # flights that others had begun were pinned for them
                there = await self._slab.pin(want.keys[: want.found], want.stay_s)
                if not all(there):  # evicted, or forgotten, before that
                    want.found = there.index(False)
                    want.reason = want.reason or Reason.EVICTED
        except StoreUnavailableError:
            want.reason = Reason.UNAVAILABLE

    def drop(self, want: Want) -> None:
        """Give up what a want has: its slots are the next one's. Idempotent."""
        want.is_over = True
        self._budget.release(want.num_slots, want.tenant)
        want.num_slots = 0

    async def _bring(self, want: Want) -> Reason:
        """
        Bring what *want* needs, or the longest of its hits that comes; return why not more.

        What was found when it was looked for may be nowhere all the same: of a prefix not each
        block is asked for. Then the next hit is a shorter one, and has what came by then.
        """
        if want.hits is None:
            return await self._fetch(want)
        named = want.keys, want.sizes, want.compute_s
        lost: list[int] = []
        why = Reason.NONE
        while True:
            assert self._tasks is not None
            numbers = want.tiers_of(self._tiers)
            looks = Looks(self._tiers, numbers, want.deadline, self._tasks)
            lacks = await self._choose(want, lost, looks)
            needed = want.hits.needed_for(want.reach)
            reason = await self._fetch(want, looks)
            is_full = bool(lost) and reason is Reason.STORE_FULL
            if reason not in _NOWHERE and not is_full:
                return reason or why or lacks
            why = why or reason
            lost.append(needed[want.found])
            want.keys, want.sizes, want.compute_s = named
            want.reach = want.found = 0
            want.media.clear()

    async def _fetch(self, want: Want, looks: Looks | None = None) -> Reason:
        """Bring what *want* needs, of which tiers told; return why not all of it."""
        there = await self._slab.pin(want.keys, want.stay_s)
        flights, (own, *joined) = await self._join(want, there)
        try:
            if own.flights:  # which fly behind the slots of those it has joined
                assert self._tasks is not None
                compute_s = want.compute_s * len(own.flights) / len(want.keys)
                stand = partial(want.stand_behind, [group.seated for group in joined])
                self._tasks.start_soon(self._flights.fly, own, compute_s, stand, looks)
            async for some in Parts(flights):
                for flight in some:
                    if flight is not None:
                        # Who waits for others' slots has none that they wait for.
                        group = flight.group
                        if not (
                            group is own or await want.stand_behind([group.seated])
                        ):
                            return Reason.STORE_FULL
                        if not flight.is_done:  # most are, as they come many at a time
                            await flight.wait()
                        if flight.reason:
                            return flight.reason
                    want.found += 1
            return Reason.NONE
        finally:
            async for some in Parts(flights[: want.found]):
                want.media += [0 if each is None else each.medium for each in some]
            await self._flights.leave(want, [own, *joined], flights)

    async def _join(
        self, want: Want, there: Sequence[bool]
    ) -> tuple[list[Flight | None], list[Group]]:
        """
        Return the flights of what is not there, and of which groups they are, its own first.

        One want at a time: of two that had begun what the other one joins, each would wait for
        the other's slots. It does not end amid that: others may have joined what it has begun.
        """
        own = Group(want.tiers_of(self._tiers))
        flights: list[Flight | None] = []
        groups = {own: None}
        async with self._joining:
            async for some in Parts(zip(want.keys, want.sizes, there, strict=True)):
                sizes = {key: nbytes for key, nbytes, is_there in some if not is_there}
                joined = self.register.join(want, sizes, own)
                groups |= dict.fromkeys([flight.group for flight in joined])
                of = dict(zip(sizes, joined, strict=True))
                flights += [of.get(key) for key, _, _ in some]
        return flights, list(groups)

    async def _choose(self, want: Want, lost: Sequence[int], looks: Looks) -> Reason:
        """
        Have it want the longest of its hits that can be had; return why not a longer one.

        Args:
            want: One with hits.
            lost: Its blocks that did not come.
            looks: Are told what tiers have of them.
        """
        assert want.hits is not None
        hits, keys = want.hits, want.keys
        there = await self._slab.has(keys)
        # Who has slots waits for no more: others may wait for those.
        most = self._budget.left if want.taken.is_set() else self._budget.total
        begin = partial(hits.choose, there, most, lost)
        hit, lacked = await looks.choose(begin, keys)
        if hit == hits.top:
            reason = Reason.NONE
        elif lacked is None:
            reason = Reason.STORE_FULL
        elif looks.is_unknown(keys[lacked]):
            reason = Reason.UNAVAILABLE
        else:
            reason = self._why_absent(keys[lacked], want.tiers_of(self._tiers))
        want.settle_on(hit)
        return reason
