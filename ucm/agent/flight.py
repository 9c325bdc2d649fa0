# SPDX-License-Identifier: Apache-2.0
"""One block on its way from a tier, for all who want it, and those that fly together."""

import itertools
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter

import anyio
import attrs
import msgspec

from ucm.agent.calls import blocks_per_call
from ucm.agent.line import Turn
from ucm.agent.wants import Want
from ucm.backends.abc import BackendCapabilities
from ucm.blocks import PackedKey
from ucm.reasons import Reason

__all__ = [
    "REASON",
    "WANTS",
    "Flight",
    "Group",
    "batches",
    "open_of",
    "place",
    "try_no_more",
    "wants_of",
]

_NUMBER, _TIERS = itemgetter(1), attrgetter("tiers")
_NBYTES, _IS_DONE = attrgetter("nbytes"), attrgetter("is_done")
REASON = attrgetter("reason")
WANTS = attrgetter("wants")


class Flight(msgspec.Struct, eq=False):
    """
    One block on its way; made by no line of Python of its own.

    Args:
        key: Its packed key.
        nbytes: Its bytes.
        group: With which it flies.
        at: Its place among these.
        tiers: Numbers of those that may bring it and were not tried yet.
        wants: Who wants it, the first one first.
    """

    key: PackedKey
    nbytes: int
    group: "Group"
    at: int
    tiers: tuple[int, ...]
    wants: tuple[Want, ...]
    is_done: bool = False
    reason: Reason = Reason.NONE
    """Why it failed, or a tier did; none: the slab has the block, or nothing is known."""
    medium: int = 0
    """Where it was: 0 the slab, tiers behind it."""
    is_written: bool = False
    """Another writes it to the slab, as far as is known."""
    is_kept_out: bool = False
    """It lands nowhere: the block is forgotten meanwhile."""
    turn: "Turn[Flight] | None" = None
    """While it waits for its tier."""
    done: anyio.Event | None = None
    """Made for who waits: most end before they are waited for, and a turn of the loop each
    costs more than all else of a small block."""

    async def wait(self) -> None:
        """Wait until it has ended."""
        if not self.is_done:
            self.done = self.done or anyio.Event()
            await self.done.wait()


@attrs.define(eq=False)
class Group:
    """
    Flights that one want has begun, and that fly together.

    Args:
        tiers: Numbers of those that may bring them.
    """

    tiers: tuple[int, ...]
    flights: list[Flight] = attrs.Factory(list)
    """In the order in which they are of use."""
    wants: "dict[Want, None]" = attrs.Factory(dict)
    """Who wants some of them, in the order in which they came: slots are the first one's."""
    seated: anyio.Event = attrs.Factory(anyio.Event)
    """They have their slots, or have ended."""
    turn: "Turn[Group] | None" = None
    """While they wait for slots."""
    is_over: bool = False
    """What has not ended does: nobody may join it."""

    @property
    def has_slots(self) -> bool:
        """Whether some of those who want them have slots already."""
        return any(want.taken.is_set() for want in self.wants)


def open_of(flights: Iterable[Flight]) -> list[Flight]:
    """Return those that have not ended: some tier is yet to be asked."""
    return list(itertools.filterfalse(_IS_DONE, flights))


def try_no_more(flights: Iterable[Flight], number: int) -> None:
    """Take note that a tier is asked for them, and is not to be asked again."""
    for tiers, alike in itertools.groupby(flights, _TIERS):
        left = tuple([each for each in tiers if each != number])
        for flight in alike:
            flight.tiers = left


def wants_of(flights: Iterable[Flight]) -> list[Want]:
    """Return who wants some of them, the first one first."""
    distinct = dict.fromkeys(map(WANTS, flights))
    return list(dict.fromkeys(itertools.chain.from_iterable(distinct)))


def place(
    placed: Iterable[tuple[Flight, int]], of_tier: Sequence[list[Flight]]
) -> None:
    """Have tiers, by their numbers, bring flights; add each to those of its tier."""
    for number, alike in itertools.groupby(placed, _NUMBER):
        theirs = [flight for flight, _ in alike]
        for flight in theirs:
            flight.medium = 1 + number
        of_tier[number].extend(theirs)


def batches(flights: Sequence[Flight], can: BackendCapabilities) -> list[list[Flight]]:
    """Cut flights into batches of blocks of one size."""
    cut = []
    for nbytes, alike in itertools.groupby(flights, _NBYTES):
        rest, most = list(alike), blocks_per_call(can, nbytes)
        cut += [rest[at : at + most] for at in range(0, len(rest), most)]
    return cut
