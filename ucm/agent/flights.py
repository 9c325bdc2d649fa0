# SPDX-License-Identifier: Apache-2.0
"""
Flights: how one block comes from a tier into the slab.

Those of one want fly together. All tiers that the want may use are asked which of them has
which (``ucm.agent.locating``); behind the first block that is nowhere nothing is fetched, nor behind
the first whose tier is predicted to take longer than computing (``ucm.worth``), and the rest waits for its
slots. The budget is apart from what saves take, and shared by tenants; a want has what it needs whole
before the next one has any. Then its calls stand in line with those of others (``ucm.agent.line``).

A block is seen only after its checksum, which travelled with it, was compared with the bytes
that came. What one tier does not deliver the others are asked for. What another writes to the slab
is waited for, and fetched only if that comes to nothing. A flight that nobody wants any more lands
nowhere, and flights that wait for their slots, or in line, end with their last want. Each has one end::

    begun = fetched + stored by others + failed (by reason) + open
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ucm.agent.budget import Budget, Place
from ucm.agent.flight import Flight, batches, have_slots, is_open, wants_of
from ucm.agent.landing import REASONS, land
from ucm.agent.line import Line, Turn
from ucm.agent.locating import Looks
from ucm.agent.wants import FetchCounts, Left, Slab, Want
from ucm.backends._many import together
from ucm.backends.abc import Fetched
from ucm.backends.wrap import BreakerBackend
from ucm.blocks import PackedKey
from ucm.errors import LeaseExpiredError, StoreFullError, StoreUnavailableError
from ucm.reasons import Reason
from ucm.stores.abc import WriteLease
from ucm.worth import Choice

__all__ = ["Flights"]

_OF_TIERS: Final = frozenset((*REASONS.values(), Reason.ERROR))
"""Reasons that say nothing of what the next tier has."""
_WRITTEN_S: Final = 0.02
"""Between looks at what others write, whose end nobody tells us."""


class Flights:
    """
    All that are on their way; each group flies in a task of its own.

    Args:
        slab: Where they land.
        tiers: In the order in which they are asked.
        budget: Slots.
        counts: Of how they end.
        why_absent: Says why none of these tiers has a block.
        brought: Called with the number of the tier from which a block came, and its key.
    """

    def __init__(
        self,
        slab: Slab,
        tiers: Sequence[BreakerBackend],
        budget: Budget,
        counts: FetchCounts,
        why_absent: Callable[[PackedKey, Sequence[int]], Reason],
        brought: Callable[[int, PackedKey], None],
    ) -> None:
        self.by_key: dict[tuple[PackedKey, tuple[int, ...]], Flight] = {}
        """By key and the tiers that may bring it."""
        self.kept_out: Counter[PackedKey] = Counter()
        """What begins meanwhile and lands nowhere, and how many want that."""
        self.tasks: TaskGroup | None = None
        """In which all of them fly."""
        self._slab = slab
        self._tiers = tiers
        self._budget = budget
        self._counts = counts
        self._why_absent = why_absent
        self._brought = brought
        self._choices = [Choice() for _ in tiers]
        self._lines = [Line(tier.capabilities) for tier in tiers]

    def begin(
        self, key: PackedKey, nbytes: int, tiers: tuple[int, ...], seated: anyio.Event
    ) -> Flight:
        """Begin one; ``fly`` ends it."""
        flight = self.by_key[key, tiers] = Flight(key, nbytes, tiers, tiers, seated)
        flight.is_kept_out = key in self.kept_out
        return flight

    def leave(self, want: Want, flights: Sequence[Flight]) -> None:
        """Have *want* wait no more; slots that nobody waits for are the next one's turn."""
        for flight in flights:
            flight.wants.pop(want, None)
        for turn in dict.fromkeys(flight.turn for flight in flights if flight.turn):
            if not turn.is_wanted:
                turn.scope.cancel()
                self._end_open(turn.flights)  # now: nobody may join what has given up

    async def fly(
        self,
        flights: Sequence[Flight],
        compute_s: float,
        behind: Sequence[anyio.Event],
        looks: Looks | None = None,
    ) -> None:
        """
        Bring each of *flights* to its end, at the cost of one who wants them.

        Args:
            flights: In the order in which they are of use.
            compute_s: How long computing these blocks would take; 0: not known.
            behind: See ``Turn``.
            looks: What tiers told of a hit, of which none is of use without all others.
        """
        is_whole = looks is not None
        try:
            of_tier = await self._locate(flights, looks, is_whole=is_whole)
            of_tier = self._worthwhile(flights, of_tier, compute_s, is_whole=is_whole)
            count = sum(map(len, of_tier))
            if not count:
                return
            want = await self._take_turn(flights, count, behind)
            if want is None:
                return
            flights[0].seated.set()
            want.num_taken += count
            try:
                while any(of_tier):
                    await self._get_all(of_tier, want)
                    await self._await_writers(flights, want)
                    self._end_unwanted(flights)
                    left = list(filter(is_open, flights))
                    of_tier = await self._locate(left, None, is_whole=is_whole)
            finally:  # not before: a call that hangs has its slots, whoever gave up
                if want.is_over:
                    self._budget.release(count, want.tenant)
                else:
                    want.num_slots += count
        finally:
            self._end_open(flights)
            flights[0].seated.set()

    async def _take_turn(
        self,
        flights: Sequence[Flight],
        count: int,
        behind: Sequence[anyio.Event],
    ) -> Want | None:
        """Wait for *count* slots; return whose they are, or None where they did not come."""
        wants = wants_of(flights)
        if not wants:
            return None
        place = Place(min(want.priority for want in wants), wants[0].tenant)
        turn = Turn(flights, self._budget, place, behind, partial(have_slots, flights))
        if not await turn.comes(count):
            self._end_all(filter(is_open, flights), Reason.STORE_FULL)
            return None
        if not (wants := wants_of(flights)):  # gone as the slots were granted
            self._budget.release(count, place.tenant)
            return None
        self._budget.pass_on(count, place.tenant, to=wants[0].tenant)
        return wants[0]

    async def _locate(
        self, flights: Sequence[Flight], looks: Looks | None, *, is_whole: bool
    ) -> list[list[Flight]]:
        """Return by tier the flights whose blocks it has, up to the first that none has."""
        of_tier: list[list[Flight]] = [[] for _ in self._tiers]
        if not (wants := wants_of(flights)):
            return of_tier
        if looks is None:
            assert self.tasks is not None
            deadline = max(one.deadline for one in wants)
            looks = Looks(self._tiers, flights[0].allowed, deadline, self.tasks)
            for flight in flights:
                looks.pass_over(flight.key, flight.tiers)
        keys = [flight.key for flight in flights]
        places = await looks.find(keys, is_whole=is_whole)
        for at, flight in enumerate(flights):
            if at >= len(places):
                why = Reason.UNAVAILABLE
                if not looks.is_unknown(flight.key):
                    why = self._why_absent(flight.key, flight.allowed)
                self._end(flight, flight.reason or why)
            elif at >= self._budget.total:
                self._end(flight, Reason.STORE_FULL)
            else:
                flight.medium = 1 + places[at]
                of_tier[places[at]].append(flight)
        return of_tier

    def _worthwhile(
        self,
        flights: Sequence[Flight],
        of_tier: list[list[Flight]],
        compute_s: float,
        *,
        is_whole: bool,
    ) -> list[list[Flight]]:
        """End the first that computing is faster than and those behind; return the others."""
        each_s, now = compute_s / len(flights), anyio.current_time()
        kept = most = sum(map(len, of_tier))
        at = {flight: number for number, flight in enumerate(flights)}
        used = [number for number, found in enumerate(of_tier) if found]
        for number in sorted(used, key=lambda number: -at[of_tier[number][0]]):
            found = [each for each in of_tier[number] if at[each] < kept]
            nbytes = sum(flight.nbytes for flight in found)
            if self._choices[number].declines(nbytes, each_s * kept, now):
                kept = at[found[0]]
        if is_whole and kept < most:
            kept = 0
        for flight in flights[kept:]:
            if not flight.is_done:
                self._end(flight, Reason.SLOWER)
        return [[each for each in found if at[each] < kept] for found in of_tier]

    async def _get_all(self, of_tier: Sequence[Sequence[Flight]], want: Want) -> None:
        await together(
            [
                partial(self._get_of, number, found, want)
                for number, found in enumerate(of_tier)
                if found
            ]
        )

    async def _get_of(self, number: int, found: Sequence[Flight], want: Want) -> None:
        """Get what one tier has, and take note of how long it took."""
        tier, began = self._tiers[number], anyio.current_time()
        for flight in found:
            flight.tiers = tuple(each for each in flight.tiers if each != number)
        cut = batches(found, tier.capabilities)
        await together([partial(self._get, number, batch, want) for batch in cut])
        landed = [
            each
            for each in found
            if each.is_done and each.medium and not each.reason  # not by a save
        ]
        if nbytes := sum(each.nbytes for each in landed):
            now = anyio.current_time()
            self._choices[number].saw(nbytes, now - began, now)

    async def _get(self, number: int, batch: Sequence[Flight], want: Want) -> None:
        """Get a batch in its turn, unless nobody wants it then, or it would be late."""
        tier, line = self._tiers[number], self._lines[number]
        self._end_unwanted(batch)
        if not (wants := wants_of(batch)):
            return
        share = line.share_of(len(batch), sum(each.nbytes for each in batch))
        place = Place(min(one.priority for one in wants), want.tenant)
        if not await Turn(batch, line.room, place).comes(share):
            return
        with contextlib.ExitStack() as turn:
            turn.callback(line.leave, share, place.tenant)
            self._end_unwanted(batch)
            flights = {flight.key: flight for flight in filter(is_open, batch)}
            nbytes, began = batch[0].nbytes, anyio.current_time()
            wants, late = wants_of(batch), len(flights) * nbytes
            if wants and line.is_late(late, max(one.deadline for one in wants)):
                self._end_open(batch)
                flights.clear()
            lease = await self._reserve(flights, want) if flights else None
            if lease is None:
                return
            has_landed = False
            try:
                slots = lease.slots
                targets = [slots.block(at).data for at in range(len(lease.keys))]
                answers = await tier.get(lease.keys, targets) if targets else []
                turn.close()  # the next ones come while these are looked at
                has_landed = await self._land(number, lease, answers, flights, want)
                if answers and not any(flights[key].reason for key in lease.keys):
                    seconds = anyio.current_time() - began
                    line.saw(len(answers) * nbytes, seconds)
            finally:
                if not has_landed:
                    with anyio.CancelScope(shield=True):
                        await self._slab.call(lease.discard)
            granted = set(lease.keys)
            left = [each for key, each in flights.items() if key not in granted]
            await self._part(left, want)

    async def _part(self, flights: Sequence[Flight], want: Want) -> None:
        """End those of one size that got no slot, but not what others write, or may have one."""
        if not flights:
            return
        keys, nbytes = [flight.key for flight in flights], flights[0].nbytes
        try:
            found = await self._slab.look(keys, nbytes, want.tenant)
        except StoreUnavailableError:
            self._end_all(flights, Reason.UNAVAILABLE)
            return
        for flight, left in zip(flights, found, strict=True):
            if left is Left.THERE:
                self._end(flight, Reason.STORED)
            elif left is Left.FULL:
                self._end(flight, Reason.STORE_FULL)
            else:  # the same tier is asked again
                flight.is_written = left is Left.WRITTEN
                flight.tiers = tuple(sorted({flight.medium - 1, *flight.tiers}))

    async def _await_writers(self, flights: Sequence[Flight], want: Want) -> None:
        """Wait for what others write, as long as they do and somebody wants it."""
        while any(each.is_written and not each.is_done for each in flights):
            await anyio.sleep(_WRITTEN_S)
            self._end_unwanted(flights)
            written = [each for each in flights if each.is_written and is_open(each)]
            for _, alike in itertools.groupby(written, lambda flight: flight.nbytes):
                await self._part(list(alike), want)

    async def _reserve(
        self, flights: dict[PackedKey, Flight], want: Want
    ) -> WriteLease | None:
        """Take slots; None where there are none, for which each flight has its end."""
        slab, nbytes = self._slab, next(iter(flights.values())).nbytes
        reserve = partial(slab.reserve, list(flights), nbytes, want.tenant)
        try:
            return await slab.call(reserve)
        except StoreFullError:
            await self._part(list(flights.values()), want)
        except StoreUnavailableError:
            self._end_all(flights.values(), Reason.UNAVAILABLE)
        return None

    async def _land(
        self,
        number: int,
        lease: WriteLease,
        answers: Sequence[Fetched],
        flights: dict[PackedKey, Flight],
        want: Want,
    ) -> bool:
        """Bring what got slots to its end; return whether the lease has ended."""
        keep = partial(self._slab.keep, hold_s=want.stay_s)
        forget = self._slab.store.forget

        def kept_out() -> list[int]:
            return [at for at, key in enumerate(lease.keys) if flights[key].is_kept_out]

        try:
            reasons = await self._slab.call(
                partial(land, lease, answers, keep, kept_out, forget)
            )
        except (LeaseExpiredError, StoreUnavailableError):
            self._end_all([flights[key] for key in lease.keys], Reason.UNAVAILABLE)
            return False
        for key, reason in zip(lease.keys, reasons, strict=True):
            flight = flights[key]
            flight.reason = reason
            if reason is Reason.ABSENT and not flight.tiers:
                self._end(flight, self._why_absent(key, flight.allowed))
            elif reason not in _OF_TIERS or not flight.tiers:
                self._end(flight, reason)
        wrong = [
            key
            for key, reason in zip(lease.keys, reasons, strict=True)
            if reason is Reason.CORRUPT
        ]
        if wrong:  # or it would be got again for each request
            self._counts.damaged[number] += len(wrong)
            await self._tiers[number].delete(wrong)
        return True

    def _end_open(self, flights: Sequence[Flight]) -> None:
        """End those that have not ended: nobody waited until they did."""
        for flight in flights:
            if not flight.is_done:
                self._end(flight, flight.reason or Reason.DEADLINE)

    def _end_unwanted(self, flights: Sequence[Flight]) -> None:
        """End what nobody wants, now: who wanted it later would join what is not got."""
        self._end_open([flight for flight in flights if not flight.wants])

    def _end_all(self, flights: Iterable[Flight], reason: Reason) -> None:
        for flight in flights:
            self._end(flight, reason)

    def _end(self, flight: Flight, reason: Reason) -> None:
        is_stored = reason is Reason.STORED
        flight.medium = 0 if is_stored else flight.medium
        flight.reason = Reason.NONE if is_stored else reason
        del self.by_key[flight.key, flight.allowed]
        flight.end()
        if is_stored:
            self._counts.stored += 1
        elif reason:
            self._counts.failed[reason] += 1
        else:
            self._counts.fetched += 1
            self._counts.nbytes += flight.nbytes
            self._brought(flight.medium - 1, flight.key)
