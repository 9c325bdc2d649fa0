# SPDX-License-Identifier: Apache-2.0
"""
Fetch: what an engine wants of its prefix comes from the tiers into slots of the slab.

A *want* is a request's keys in order. What the slab has of them is marked as used at a
moment still to come, so that it stays; for each other one there is a *flight*, one per key
however many want it. Who wants a key first starts its flight: all tiers are asked which of
them has it, behind the first key that is nowhere nothing is fetched, and the rest waits for
its slots. The budget is apart from what saves take, and a want has what it needs of it whole
before the next one has any. A want keeps its slots until it is dropped, or its time is over,
and its flights have ended: so what is pinned is bounded as well, also where a tier hangs.

A block is seen only after its checksum, which travelled with it, was compared with the bytes
that came. A flight that nobody wants any more lands nowhere. Each has one end::

    begun = fetched + stored by others + failed (by reason) + open
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import anyio
import attrs
import numpy as np
from anyio.abc import TaskGroup

from ucm.agent.budget import Budget
from ucm.agent.calls import Blocking, blocks_per_call
from ucm.backends.abc import (
    BackendCapabilities,
    Fetched,
    Presence,
    Verdict,
    block_checksum,
)
from ucm.backends.wrap import BreakerBackend
from ucm.blocks import PackedKey
from ucm.errors import LeaseExpiredError, StoreFullError, StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.abc import Store, WriteLease
from ucm.uses import Uses

__all__ = ["FetchCounts", "Fetcher", "Want"]

_VERDICTS: Final = {
    Verdict.ABSENT: Reason.ABSENT,
    Verdict.GARBAGE: Reason.CORRUPT,
    Verdict.UNAVAILABLE: Reason.UNAVAILABLE,
}


@attrs.define
class FetchCounts:
    """What became of wants and flights; see the module's text."""

    wants: int = 0
    begun: int = 0
    joined: int = 0
    """Keys of wants for which a flight was on its way."""
    fetched: int = 0
    stored: int = 0
    """Blocks that a save brought meanwhile."""
    failed: Counter[Reason] = attrs.Factory(Counter)
    nbytes: int = 0
    """Of what was fetched."""


@attrs.define(eq=False)
class _Flight:
    key: PackedKey
    nbytes: int
    wants: "set[Want]" = attrs.Factory(set)
    done: anyio.Event = attrs.Factory(anyio.Event)
    reason: Reason = Reason.DEADLINE
    """Why it failed; none: the slab has the block."""
    medium: int = 0
    """Where it was: 0 the slab, tiers behind it."""


@attrs.define(eq=False)
class Want:
    """
    Blocks that a request would load.

    Args:
        keys: In the order in which they are of use: a later one needs those before.
        sizes: The bytes of each.
        deadline: On the loop's clock; what has come by then is what there is.
        hold_s: For how long behind that what was found is kept in the slab.
    """

    keys: Sequence[PackedKey]
    sizes: Sequence[int]
    deadline: float
    hold_s: float
    found: int = 0
    """Keys from the start that the slab has, once it is fetched."""
    media: list[int] = attrs.Factory(list)
    """Where each of these was: 0 the slab, tiers behind it."""
    reason: Reason = Reason.NONE
    """Why it is not more."""
    num_slots: int = 0
    """Of the budget, once its flights have ended."""
    is_over: bool = False
    """Dropped."""


class Fetcher:
    """
    Brings wanted blocks from tiers into the slab.

    Args:
        store: The slab.
        tiers: In the order in which they are asked.
        call: For the slab's verbs.
        budget: Slots.
        clock_ns: The machine's monotonic clock, on which uses are told.
    """

    def __init__(
        self,
        store: Store,
        tiers: Sequence[BreakerBackend],
        call: Blocking,
        budget: Budget,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.counts = FetchCounts()
        self._store = store
        self._tiers = tiers
        self._call = call
        self._budget = budget
        self._clock_ns = clock_ns
        self._flights: dict[PackedKey, _Flight] = {}
        self._tasks: TaskGroup | None = None

    @property
    def num_open(self) -> int:
        """Flights that have not ended."""
        return len(self._flights)

    def told(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return attrs.asdict(self.counts) | {
            "failed": {str(reason): n for reason, n in self.counts.failed.items()},
            "open": self.num_open,
        }

    async def run(self, ready: Callable[[], None]) -> None:
        """Let flights fly until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            ready()
            await anyio.sleep_forever()

    async def fetch(self, want: Want) -> None:
        """Bring what *want* needs, until its deadline; say in it what is there then."""
        self.counts.wants += 1
        try:
            want.reason = Reason.DEADLINE
            with anyio.move_on_at(want.deadline):
                want.reason = await self._fetch(want)
            if want.found:  # flights that others had begun were pinned for them
                found = want.keys[: want.found]
                await self._call(partial(self._pin, found, self._stay(want)))
        except StoreUnavailableError:
            want.reason = Reason.UNAVAILABLE

    def drop(self, want: Want) -> None:
        """Give up what a want has: its slots are the next one's. Idempotent."""
        want.is_over = True
        self._budget.release(want.num_slots)
        want.num_slots = 0

    async def _fetch(self, want: Want) -> Reason:
        """Bring what *want* needs; return why not all of it."""
        there = await self._call(partial(self._pin, want.keys, self._stay(want)))
        flights: list[_Flight | None] = []
        own: list[_Flight] = []
        for key, nbytes, is_there in zip(want.keys, want.sizes, there, strict=True):
            flight = None if is_there else self._flights.get(key)
            if flight is not None:
                self.counts.joined += 1
            elif not is_there:
                self._flights[key] = flight = _Flight(key, nbytes)
                own.append(flight)
            if flight is not None:
                flight.wants.add(want)
            flights.append(flight)
        try:
            if own:
                self.counts.begun += len(own)
                assert self._tasks is not None
                self._tasks.start_soon(self._fly, own)
            for at, flight in enumerate(flights):
                if flight is not None:
                    await flight.done.wait()
                    if flight.reason:
                        return flight.reason
                want.found = at + 1
                want.media.append(0 if flight is None else flight.medium)
            return Reason.NONE
        finally:
            for flight in filter(None, flights):
                flight.wants.discard(want)

    def _pin(self, keys: Sequence[PackedKey], hold_s: float) -> list[bool]:
        """Keep what there is of *keys*, and return which are there; on a thread."""
        self._store.touch(keys, self._uses(len(keys), hold_s))
        return self._store.contains(keys)

    def _stay(self, want: Want) -> float:
        """Return for how many seconds what is found for *want* is to be kept."""
        return max(0.0, want.deadline - anyio.current_time()) + want.hold_s

    def _uses(self, count: int, hold_s: float) -> Uses:
        until = self._clock_ns() + int(hold_s * 1e9)
        return Uses(until - np.arange(count), np.zeros(count, dtype=np.uint32))

    # Flights, in tasks of their own: several wants may wait for one.

    async def _fly(self, flights: Sequence[_Flight]) -> None:
        """Bring each of *flights* to its end, at the cost of one who wants them."""
        try:
            of_tier = await self._locate(flights)
            count = sum(map(len, of_tier))
            if not count:
                return
            await self._budget.acquire(count)
            want = next((want for each in flights for want in each.wants), None)
            if want is None:
                self._budget.release(count)
                return
            try:
                await self._get_all(of_tier, want)
            finally:  # not before: a call that hangs has its slots, whoever gave up
                if want.is_over:
                    self._budget.release(count)
                else:
                    want.num_slots += count
        finally:
            for flight in flights:
                if not flight.done.is_set():
                    self._end(flight, flight.reason)

    async def _locate(self, flights: Sequence[_Flight]) -> list[list[_Flight]]:
        """Return by tier the flights whose blocks it has, up to the first that none has."""
        tier_of: dict[_Flight, int] = {}
        unknown: set[_Flight] = set()
        for number, tier in enumerate(self._tiers):
            if not (asked := [each for each in flights if each not in tier_of]):
                break
            answers = await tier.exists([flight.key for flight in asked])
            for flight, answer in zip(asked, answers, strict=True):
                if answer is Presence.PRESENT:
                    tier_of[flight] = number
                elif answer is Presence.UNKNOWN:
                    unknown.add(flight)
        wanted = list(itertools.takewhile(tier_of.__contains__, flights))
        kept = wanted[: self._budget.total]
        for at, flight in enumerate(flights[len(kept) :], len(kept)):
            if at < len(wanted):
                self._end(flight, Reason.STORE_FULL)
            else:
                is_unknown = flight in unknown
                self._end(flight, Reason.UNAVAILABLE if is_unknown else Reason.ABSENT)
        of_tier: list[list[_Flight]] = [[] for _ in self._tiers]
        for flight in kept:
            flight.medium = 1 + tier_of[flight]
            of_tier[tier_of[flight]].append(flight)
        return of_tier

    async def _get_all(self, of_tier: Sequence[Sequence[_Flight]], want: Want) -> None:
        async with anyio.create_task_group() as tasks:
            for tier, found in zip(self._tiers, of_tier, strict=True):
                limiter = anyio.CapacityLimiter(tier.capabilities.in_flight)
                for batch in _batches(found, tier.capabilities):
                    tasks.start_soon(self._get, tier, batch, want, limiter)

    async def _get(
        self,
        tier: BreakerBackend,
        batch: Sequence[_Flight],
        want: Want,
        limiter: anyio.CapacityLimiter,
    ) -> None:
        async with limiter:
            flights = {flight.key: flight for flight in batch if flight.wants}
            if not flights:
                return  # they ended for want of time
            uses = self._uses(len(flights), self._stay(want))
            try:
                lease = await self._call(
                    lambda: self._store.reserve(list(flights), batch[0].nbytes, uses)
                )
            except StoreFullError:
                self._end_all(flights, Reason.STORE_FULL)
                return
            except StoreUnavailableError:
                self._end_all(flights, Reason.UNAVAILABLE)
                return
            try:
                await self._fill(tier, lease, flights)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._call(lease.discard)

    async def _fill(
        self, tier: BreakerBackend, lease: WriteLease, flights: dict[PackedKey, _Flight]
    ) -> None:
        targets = [lease.slots.block(at).data for at in range(len(lease.keys))]
        answers = await tier.get(lease.keys, targets) if targets else []
        left = [key for key in flights if key not in lease.keys]
        try:
            reasons = await self._call(lambda: _publish(lease, answers))
            there = await self._call(lambda: self._store.contains(left))
        except (LeaseExpiredError, StoreUnavailableError):
            self._end_all(flights, Reason.UNAVAILABLE)
            return
        for key, reason in zip(lease.keys, reasons, strict=True):
            self._end(flights[key], reason)
        for key, is_there in zip(left, there, strict=True):
            self._end(flights[key], Reason.STORED if is_there else Reason.STORE_FULL)
        wrong = [
            key
            for key, reason in zip(lease.keys, reasons, strict=True)
            if reason is Reason.CORRUPT
        ]
        if wrong:  # or it would be got again for each request
            await tier.delete(wrong)

    def _end_all(self, flights: dict[PackedKey, _Flight], reason: Reason) -> None:
        for flight in flights.values():
            self._end(flight, reason)

    def _end(self, flight: _Flight, reason: Reason) -> None:
        is_stored = reason is Reason.STORED
        flight.medium = 0 if is_stored else flight.medium
        flight.reason = Reason.NONE if is_stored else reason
        del self._flights[flight.key]
        flight.done.set()
        if is_stored:
            self.counts.stored += 1
        elif reason:
            self.counts.failed[reason] += 1
        else:
            self.counts.fetched += 1
            self.counts.nbytes += flight.nbytes


def _batches(
    flights: Sequence[_Flight], can: BackendCapabilities
) -> list[list[_Flight]]:
    """Cut flights into batches of blocks of one size."""
    cut = []
    for nbytes, alike in itertools.groupby(flights, lambda flight: flight.nbytes):
        rest, most = list(alike), blocks_per_call(can, nbytes)
        cut += [rest[at : at + most] for at in range(0, len(rest), most)]
    return cut


def _publish(lease: WriteLease, answers: Sequence[Fetched]) -> list[Reason]:
    """Make visible what came whole; return why the others did not, on a thread."""
    reasons = []
    for at, (key, answer) in enumerate(zip(lease.keys, answers, strict=True)):
        reason = Reason.NONE
        if answer.verdict is not Verdict.DONE:
            reason = _VERDICTS.get(answer.verdict, Reason.ERROR)
        elif block_checksum(key, lease.slots.block(at).data) != answer.checksum:
            reason = Reason.CORRUPT
        else:
            lease.seal(at, at + 1)
        reasons.append(reason)
    lease.commit(without=[at for at, reason in enumerate(reasons) if reason])
    return reasons
