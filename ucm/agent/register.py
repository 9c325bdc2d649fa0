# SPDX-License-Identifier: Apache-2.0
"""
Which flights there are: one for each block and the tiers that may bring it, from its begin to its end.

Those of a long prompt are begun and ended in parts, between which others have their turn. A step is about
one part: its flights are looked for and begun, or ended and gone from here, without a turn between, and with
few calls for all of them: small blocks cost little else. Of a group that is over nothing is joined, though
some of it is still here: who wants that ends it, and begins anew.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from operator import attrgetter
from typing import Final

from ucm.agent.calls import Parts
from ucm.agent.flight import REASON, Flight, Group, open_of
from ucm.agent.wants import FetchCounts, Want
from ucm.blocks import PackedKey
from ucm.reasons import Reason

__all__ = ["Register"]

_GROUP: Final = attrgetter("group")
_KEY: Final = attrgetter("key")
_MEDIUM: Final = attrgetter("medium")
_NBYTES: Final = attrgetter("nbytes")
_TURN: Final = attrgetter("turn")


class Register:
    """
    All flights that have not ended.

    Args:
        counts: Of how they begin and end.
        brought: Called with the number of the tier from which blocks came, and their keys.
    """

    def __init__(
        self,
        counts: FetchCounts,
        brought: Callable[[int, Sequence[PackedKey]], None],
    ) -> None:
        self.by_key: dict[tuple[PackedKey, tuple[int, ...]], Flight] = {}
        """By key and the tiers that may bring it."""
        self.kept_out: Counter[PackedKey] = Counter()
        """What begins meanwhile and lands nowhere, and how many want that."""
        self._counts = counts
        self._brought = brought

    def join(self, want: Want, sizes: dict[PackedKey, int], own: Group) -> list[Flight]:
        """
        Return the flights of blocks that are wanted; of its own group where there is none.

        Args:
            want: Who wants them.
            sizes: The bytes of each block.
            own: Whose flights the others are.
        """
        names = list(zip(sizes, itertools.repeat(own.tiers), strict=False))
        found = list(filter(None, map(self.by_key.get, names)))
        self.end_open([each for each in found if each.group.is_over])
        joined = open_of(found)
        new = sizes.copy()
        for each in joined:
            del new[each.key]
            each.wants += (want,)
            each.group.wants[want] = None
        # That of who wants it less, maybe.
        for alike in (map(_TURN, joined), map(_TURN, map(_GROUP, joined))):
            for turn in dict.fromkeys(filter(None, alike)):
                turn.room.move_on(turn.place, want.priority)
        self._begin(want, new, own)
        self._counts.joined += len(joined)
        return list(map(self.by_key.__getitem__, names))

    def _begin(self, want: Want, sizes: dict[PackedKey, int], own: Group) -> None:
        """Begin flights of its own."""
        if not sizes:
            return
        group, tiers, wants = map(itertools.repeat, (own, own.tiers, (want,)))
        places = itertools.count(len(own.flights))
        new = list(map(Flight, sizes, sizes.values(), group, places, tiers, wants))
        names = zip(sizes, itertools.repeat(own.tiers), strict=False)
        self.by_key.update(zip(names, new, strict=False))
        for key in self.kept_out.keys() & sizes.keys():
            self.by_key[key, own.tiers].is_kept_out = True
        own.flights += new
        own.wants[want] = None
        self._counts.begun += len(new)

    def end(self, flights: Sequence[Flight], reason: Reason) -> None:
        """End some, all of which fare alike."""
        is_stored = reason is Reason.STORED
        for flight in flights:
            flight.is_done = True
            flight.reason = Reason.NONE if is_stored else reason
            del self.by_key[flight.key, flight.group.tiers]
            if is_stored:
                flight.medium = 0
            if flight.done is not None:
                flight.done.set()
        if is_stored:
            self._counts.stored += len(flights)
        elif reason:
            self._counts.failed[reason] += len(flights)
        else:
            self._counts.fetched += len(flights)
            self._counts.nbytes += sum(map(_NBYTES, flights))
            for medium, alike in itertools.groupby(flights, _MEDIUM):
                self._brought(medium - 1, list(map(_KEY, alike)))

    def end_each(self, flights: Iterable[Flight], reasons: Iterable[Reason]) -> None:
        """End some, each of which fares as it does."""
        alike = defaultdict[Reason, list[Flight]](list)
        for flight, reason in zip(flights, reasons, strict=True):
            alike[reason].append(flight)
        for reason, some in alike.items():
            self.end(some, reason)

    def end_open(
        self, flights: Sequence[Flight], reason: Reason = Reason.DEADLINE
    ) -> None:
        """End those that have not ended: nobody waited until they did."""
        left = open_of(flights)
        self.end_each(left, [why or reason for why in map(REASON, left)])

    def end_unwanted(self, flights: Sequence[Flight]) -> None:
        """End what nobody wants, now: who wanted it later would join what is not got."""
        self.end_open([flight for flight in flights if not flight.wants])

    async def wanted(self, flights: Sequence[Flight]) -> list[Flight]:
        """Return those that have not ended; what nobody wants has then."""
        left: list[Flight] = []
        async for some in Parts(flights):
            self.end_unwanted(some)
            left += open_of(some)
        return left

    async def give_up(self, group: Group, reason: Reason) -> None:
        """End all of a group that has not ended; from now on nobody joins it."""
        group.is_over = True
        async for some in Parts(group.flights):
            self.end_open(some, reason)

    @asynccontextmanager
    async def keep_out(self, keys: Sequence[PackedKey]) -> AsyncIterator[None]:
        """Have nothing of these blocks, distinct ones, land that is on its way by the end of this."""
        kept_out = self.kept_out
        async for some in Parts(keys):
            kept_out.update(some)
        try:
            flights = list(self.by_key.values())  # others begin knowing of it
            async for on_their_way in Parts(flights):
                for flight in on_their_way:
                    flight.is_kept_out |= flight.key in kept_out
            yield
        finally:
            async for some in Parts(keys):
                for key in some:
                    kept_out[key] -= 1
                    if not kept_out[key]:  # else somebody else keeps it out as well
                        del kept_out[key]
