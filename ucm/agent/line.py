# SPDX-License-Identifier: Apache-2.0
"""
The line in front of a tier: so much at a time, whoever wants it; in turn, as with the slots.

Without it a burst of prompts would have all of its calls under way at once, each at a share of
what the tier can do, and all of them would be late together. Small calls go side by side, as
many as make up the large ones that serve the tier best. Time is of the event loop, on which all
of it is called, by ``Flights``.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import anyio
import attrs

from ucm.agent.budget import Budget, Place
from ucm.agent.calls import share_of_call
from ucm.backends.abc import BackendCapabilities
from ucm.worth import Speed

if TYPE_CHECKING:
    from ucm.agent.flight import Flight, Group

__all__ = ["Line", "Turn"]

_Waits = TypeVar("_Waits", "Flight", "Group")
_CALL: Final = 1024
"""Of what may be under way, the largest call's part."""


class Line:
    """
    Calls that get blocks from one tier.

    Args:
        can: What the tier says of itself.
    """

    def __init__(self, can: BackendCapabilities) -> None:
        self._can = can
        self.room = Budget(can.in_flight * _CALL)
        """Shares of it are waited for; see there who comes first."""
        self._speed = Speed()

    def share_of(self, num_blocks: int, nbytes: int) -> int:
        """Return what a call of so many blocks and bytes takes of the room."""
        return max(1, int(_CALL * share_of_call(self._can, num_blocks, nbytes)))

    def is_late(self, nbytes: int, deadline: float) -> bool:
        """
        Return whether blocks would come behind *deadline*, and keep others from being in time.

        Where nobody waits they are got all the same: they are there for the next prompt.
        """
        if not (self.room.num_waiting and self._speed.is_known):
            return False
        return anyio.current_time() + self._speed.seconds_of(nbytes) > deadline

    def saw(self, nbytes: int, seconds: float) -> None:
        """Take note of how long blocks took that came, from their turn until they were seen."""
        self._speed.saw(nbytes, seconds)


@attrs.define(eq=False)
class Turn(Generic[_Waits]):
    """
    Flights that wait together for slots, or for a tier, and what ends the wait.

    Args:
        flights: Those; or their group.
        room: Of the slots, or of the tier.
        place: Where they stand.
        stand: Returns once others have slots for which whoever wants these waits as well, if any do.
        has_some: Whether somebody who wants them has slots by then: others may wait for those, so that
            nobody waits for more.
    """

    flights: Sequence[_Waits]
    room: Budget
    place: Place
    stand: Callable[[], Awaitable[object]] | None = None
    has_some: Callable[[], bool] = bool
    scope: anyio.CancelScope = attrs.Factory(anyio.CancelScope)

    @property
    def is_wanted(self) -> bool:
        """Whether any of them is."""
        return any(flight.wants for flight in self.flights)

    async def comes(self, count: int) -> bool:
        """Wait for so much room; return whether it came before nobody wanted them any more."""
        for flight in self.flights:
            flight.turn = self
        try:
            with self.scope:
                if self.stand is not None:
                    await self.stand()
                if self.has_some():
                    return self.room.take(count, self.place.tenant)
                await self.room.acquire(count, self.place)
        finally:
            for flight in self.flights:
                flight.turn = None
        return not self.scope.cancelled_caught
