# SPDX-License-Identifier: Apache-2.0
"""
Which flights there are: one for each block and the tiers that may bring it, from its begin to its end.

Those of a long prompt are begun and ended in parts, between which others have their turn. A step is about
one flight: it is looked for and begun, or ended and gone from here, without a turn between. Of a group that
is over nothing is joined, though some of it is still here: who wants that ends it, and begins anew.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ucm.agent.calls import Parts
from ucm.agent.flight import Flight, Group, open_of
from ucm.agent.wants import FetchCounts, Want
from ucm.blocks import PackedKey
from ucm.reasons import Reason

__all__ = ["Register"]


class Register:
    """
    All flights that have not ended.

    Args:
        counts: Of how they begin and end.
        brought: Called with the number of the tier from which a block came, and its key.
    """

    def __init__(
        self, counts: FetchCounts, brought: Callable[[int, PackedKey], None]
    ) -> None:
        self.by_key: dict[tuple[PackedKey, tuple[int, ...]], Flight] = {}
        """By key and the tiers that may bring it."""
        self.kept_out: Counter[PackedKey] = Counter()
        """What begins meanwhile and lands nowhere, and how many want that."""
        self._counts = counts
        self._brought = brought

    def join(self, want: Want, key: PackedKey, nbytes: int, own: Group) -> Flight:
        """Return the flight of a block that is wanted; one of its own group where there is none."""
        flight = self.by_key.get((key, own.tiers))
        if flight is not None and flight.group.is_over:
            self.end(flight, flight.reason or Reason.DEADLINE)
            flight = None
        if flight is None:
            flight = Flight(key, nbytes, own, len(own.flights), own.tiers)
            flight.is_kept_out = key in self.kept_out
            self.by_key[key, own.tiers] = flight
            own.flights.append(flight)
            self._counts.begun += 1
        else:
            self._counts.joined += 1
        flight.wants[want] = flight.group.wants[want] = None
        for turn in (flight.turn, flight.group.turn):
            if turn:  # that of who wants it less, maybe
                turn.move_on(want.priority)
        return flight

    def end(self, flight: Flight, reason: Reason) -> None:
        """End one."""
        is_stored = reason is Reason.STORED
        flight.medium = 0 if is_stored else flight.medium
        flight.reason = Reason.NONE if is_stored else reason
        del self.by_key[flight.key, flight.group.tiers]
        flight.end()
        if is_stored:
            self._counts.stored += 1
        elif reason:
            self._counts.failed[reason] += 1
        else:
            self._counts.fetched += 1
            self._counts.nbytes += flight.nbytes
            self._brought(flight.medium - 1, flight.key)

    def end_open(
        self, flights: Sequence[Flight], reason: Reason = Reason.DEADLINE
    ) -> None:
        """End those that have not ended: nobody waited until they did."""
        for flight in open_of(flights):
            self.end(flight, flight.reason or reason)

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
