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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

import anyio
from anyio.abc import TaskGroup

from ucm.agent.budget import Budget, Place
from ucm.agent.calls import Parts
from ucm.agent.flight import (
    REASON,
    WANTS,
    Flight,
    Group,
    batches,
    open_of,
    place,
    try_no_more,
    wants_of,
)
from ucm.agent.landing import REASONS, land
from ucm.agent.line import Line, Turn
from ucm.agent.locating import Looks
from ucm.agent.register import Register
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
_TURN: Final = attrgetter("turn")
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
        register: All that have not ended.
        why_absent: Says why none of these tiers has a block.
    """

    def __init__(
        self,
        slab: Slab,
        tiers: Sequence[BreakerBackend],
        budget: Budget,
        counts: FetchCounts,
        register: Register,
        why_absent: Callable[[PackedKey, Sequence[int]], Reason],
    ) -> None:
        self.tasks: TaskGroup | None = None
        """In which all of them fly."""
        self._slab = slab
        self._tiers = tiers
        self._budget = budget
        self._counts = counts
        self._register = register
        self._why_absent = why_absent
        self._choices = [Choice() for _ in tiers]
        self._lines = [Line(tier.capabilities) for tier in tiers]

    async def leave(
        self, want: Want, groups: Iterable[Group], flights: Sequence[Flight | None]
    ) -> None:
        """Have *want* wait no more; slots that nobody waits for are the next one's turn."""
        for group in groups:
            group.wants.pop(want, None)
            if group.turn and not group.turn.is_wanted:
                group.is_over = True  # now: nobody may join what has given up
                group.turn.scope.cancel()
        async for some in Parts(filter(None, flights)):
            for wants, alike in itertools.groupby(some, WANTS):
                left = tuple([each for each in wants if each is not want])
                for flight in alike:
                    flight.wants = left
            for turn in dict.fromkeys(map(_TURN, some)):
                if turn and not turn.is_wanted:
                    turn.scope.cancel()
                    self._register.end_open(turn.flights)

    async def fly(
        self,
        group: Group,
        compute_s: float,
        stand: Callable[[], Awaitable[object]],
        looks: Looks | None,
    ) -> None:
        """
        Bring each flight of *group* to its end, at the cost of one who wants them.

        Args:
            group: Those.
            compute_s: How long computing these blocks would take; 0: not known.
            stand: See ``Turn``.
            looks: What tiers told of a hit, of which none is of use without all others.
        """
        is_whole = looks is not None
        try:
            of_tier = await self._locate(group.flights, looks, is_whole=is_whole)
            of_tier = await self._worthwhile(
                group.flights, of_tier, compute_s, is_whole=is_whole
            )
            count = sum(map(len, of_tier))
            if not count:
                return
            want = await self._take_turn(group, count, stand)
            if want is None:
                return
            group.seated.set()
            want.taken.set()
            try:
                while any(of_tier):
                    calls = [
                        partial(self._get_of, number, found, want)
                        for number, found in enumerate(of_tier)
                        if found
                    ]
                    await together(calls)
                    left = await self._await_writers(group.flights, want)
                    of_tier = await self._locate(left, None, is_whole=is_whole)
            finally:  # not before: a call that hangs has its slots, whoever gave up
                if want.is_over:
                    self._budget.release(count, want.tenant)
                else:
                    want.num_slots += count
        finally:
            await self._register.give_up(group, Reason.DEADLINE)
            group.seated.set()

    async def _take_turn(
        self, group: Group, count: int, stand: Callable[[], Awaitable[object]]
    ) -> Want | None:
        """Wait for *count* slots; return whose they are, or None where they did not come."""
        if not (wants := list(group.wants)):
            return None
        place = Place(min(want.priority for want in wants), wants[0].tenant)
        turn = Turn([group], self._budget, place, stand, lambda: group.has_slots)
        if not await turn.comes(count):
            if not group.is_over:
                await self._register.give_up(group, Reason.STORE_FULL)
            return None
        if not (wants := list(group.wants)):  # gone as the slots were granted
            self._budget.release(count, place.tenant)
            return None
        self._budget.pass_on(count, place.tenant, to=wants[0].tenant)
        return wants[0]

    async def _locate(
        self, flights: Sequence[Flight], looks: Looks | None, *, is_whole: bool
    ) -> list[list[Flight]]:
        """Return by tier the flights whose blocks it has, up to the first that none has."""
        of_tier: list[list[Flight]] = [[] for _ in self._tiers]
        if not flights or not (wants := flights[0].group.wants):
            return of_tier
        tiers = flights[0].group.tiers
        if looks is None:
            assert self.tasks is not None
            deadline = max(one.deadline for one in wants)
            looks = Looks(self._tiers, tiers, deadline, self.tasks)
            async for some in Parts(flights):
                for flight in some:
                    if flight.tiers != tiers:
                        looks.pass_over(flight.key, flight.tiers)
        keys = [flight.key for flight in flights]
        places = await looks.find(keys, is_whole=is_whole)
        found = flights[: min(len(places), self._budget.total)]
        async for placed in Parts(zip(found, places, strict=False)):
            place(placed, of_tier)
        async for some in Parts(flights[len(found) : len(places)]):
            self._register.end(some, Reason.STORE_FULL)
        async for some in Parts(flights[len(places) :]):
            whys = [
                each.reason
                or (looks.is_unknown(each.key) and Reason.UNAVAILABLE)
                or self._why_absent(each.key, tiers)
                for each in some
            ]
            self._register.end_each(some, whys)
        return of_tier

    async def _worthwhile(
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
        used = [number for number, found in enumerate(of_tier) if found]
        for number in sorted(used, key=lambda number: -of_tier[number][0].at):
            nbytes = 0
            async for some in Parts(of_tier[number]):
                nbytes += sum([flight.nbytes for flight in some if flight.at < kept])
            if self._choices[number].declines(nbytes, each_s * kept, now):
                kept = of_tier[number][0].at
        if is_whole and kept < most:
            kept = 0
        if kept == most:
            return of_tier
        async for some in Parts(flights[kept:most]):
            self._register.end(some, Reason.SLOWER)
        return [[each for each in found if each.at < kept] for found in of_tier]

    async def _get_of(self, number: int, found: Sequence[Flight], want: Want) -> None:
        """Get what one tier has, and take note of how long it took."""
        tier, began = self._tiers[number], anyio.current_time()
        cut = batches(found, tier.capabilities)
        if len(cut) == 1:
            await self._get(number, cut[0], want)
        else:
            async with anyio.create_task_group() as calls:
                async for begun in Parts(cut, len(cut[0])):
                    for batch in begun:
                        calls.start_soon(self._get, number, batch, want)
        now, nbytes = anyio.current_time(), 0
        async for some in Parts(found):
            got = [
                each.nbytes
                for each in some
                if each.is_done and each.medium and not each.reason  # not by a save
            ]
            nbytes += sum(got)
        if nbytes:
            self._choices[number].saw(nbytes, now - began, now)

    async def _get(self, number: int, batch: Sequence[Flight], want: Want) -> None:
        """Get a batch in its turn, unless nobody wants it then, or it would be late."""
        tier, line = self._tiers[number], self._lines[number]
        try_no_more(batch, number)
        self._register.end_unwanted(batch)
        if not (wants := wants_of(batch)):
            return
        nbytes = batch[0].nbytes
        share = line.share_of(len(batch), len(batch) * nbytes)
        place = Place(min(one.priority for one in wants), want.tenant)
        if not await Turn(batch, line.room, place).comes(share):
            return
        with contextlib.ExitStack() as turn:
            turn.callback(line.room.release, share, place.tenant)
            self._register.end_unwanted(batch)
            flights = open_of(batch)
            began = anyio.current_time()
            wants, late = wants_of(batch), len(flights) * nbytes
            if wants and line.is_late(late, max(one.deadline for one in wants)):
                self._register.end_open(batch)
                flights.clear()
            lease = await self._reserve(flights, want) if flights else None
            if lease is None:
                return
            has_landed = False
            try:
                targets = lease.slots.views()
                mine = list(map(flights.__getitem__, lease.positions))
                answers = await tier.get(lease.keys, targets) if targets else []
                turn.close()  # the next ones come while these are looked at
                has_landed = await self._land(number, lease, answers, mine, want)
                if answers and not any(map(REASON, mine)):
                    seconds = anyio.current_time() - began
                    line.saw(len(answers) * nbytes, seconds)
            finally:
                if not has_landed:
                    with anyio.CancelScope(shield=True):
                        await self._slab.call(lease.discard)
            granted = set(lease.keys)
            await self._part(
                [each for each in flights if each.key not in granted], want
            )

    async def _part(self, flights: Sequence[Flight], want: Want) -> None:
        """End those of one size that got no slot, but not what others write, or may have one."""
        if not flights:
            return
        keys, nbytes = [flight.key for flight in flights], flights[0].nbytes
        try:
            found = await self._slab.look(keys, nbytes, want.tenant)
        except StoreUnavailableError:
            self._register.end(flights, Reason.UNAVAILABLE)
            return
        async for some in Parts(zip(flights, found, strict=True)):
            for flight, left in some:
                if left is Left.THERE:
                    self._register.end([flight], Reason.STORED)
                elif left is Left.FULL:
                    self._register.end([flight], Reason.STORE_FULL)
                else:  # the same tier is asked again
                    flight.is_written = left is Left.WRITTEN
                    flight.tiers = tuple(sorted({flight.medium - 1, *flight.tiers}))

    async def _await_writers(
        self, flights: Sequence[Flight], want: Want
    ) -> list[Flight]:
        """Wait for what others write, as long as they do and somebody wants it; return what has not ended."""
        while True:
            left = await self._register.wanted(flights)
            written = [each for each in left if each.is_written]
            if not written:
                return left
            await anyio.sleep(_WRITTEN_S)
            for _, alike in itertools.groupby(written, lambda flight: flight.nbytes):
                await self._part(list(alike), want)

    async def _reserve(
        self, flights: Sequence[Flight], want: Want
    ) -> WriteLease | None:
        """Take slots; None where there are none, for which each flight has its end."""
        slab, keys = self._slab, [flight.key for flight in flights]
        reserve = partial(slab.reserve, keys, flights[0].nbytes, want.tenant)
        try:
            return await slab.call(reserve)
        except StoreFullError:
            await self._part(flights, want)
        except StoreUnavailableError:
            self._register.end(flights, Reason.UNAVAILABLE)
        return None

    async def _land(
        self,
        number: int,
        lease: WriteLease,
        answers: Sequence[Fetched],
        flights: Sequence[Flight],
        want: Want,
    ) -> bool:
        """Bring what got slots to its end; return whether the lease has ended."""
        keep = partial(self._slab.keep, hold_s=want.stay_s)
        forget = self._slab.store.forget

        def kept_out() -> list[int]:
            return [at for at, flight in enumerate(flights) if flight.is_kept_out]

        try:
            reasons = await self._slab.call(
                partial(land, lease, answers, keep, kept_out, forget)
            )
        except (LeaseExpiredError, StoreUnavailableError):
            self._register.end(flights, Reason.UNAVAILABLE)
            return False
        if not any(reasons):
            self._register.end(flights, Reason.NONE)
            return True
        for flight, reason in zip(flights, reasons, strict=True):
            flight.reason = reason
        ended = [
            each for each in flights if each.reason not in _OF_TIERS or not each.tiers
        ]
        whys = [
            self._why_absent(each.key, each.group.tiers)
            if each.reason is Reason.ABSENT
            else each.reason
            for each in ended
        ]
        wrong = [each.key for each in flights if each.reason is Reason.CORRUPT]
        self._register.end_each(ended, whys)
        if wrong:  # or it would be got again for each request
            self._counts.damaged[number] += len(wrong)
            await self._tiers[number].delete(wrong)
        return True
