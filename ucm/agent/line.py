# SPDX-License-Identifier: Apache-2.0
"""
The line in front of a tier: so many calls at a time, whoever wants them; first come, first served.

Without it a burst of prompts would have all of its calls under way at once, each at a share of
what the tier can do, and all of them would be late together. Time is of the event loop.
"""

import anyio

from ucm.worth import Speed

__all__ = ["Line"]


class Line:
    """
    Calls that get blocks from one tier.

    Args:
        most: Calls at a time that serve it best.
    """

    def __init__(self, most: int) -> None:
        self._turns = anyio.CapacityLimiter(most)
        self._speed = Speed()

    async def enter(self) -> None:
        """Wait for a turn; ``leave`` ends it."""
        await self._turns.acquire()

    def leave(self) -> None:
        """Let the next one in."""
        self._turns.release()

    def is_late(self, nbytes: int, deadline: float) -> bool:
        """
        Return whether blocks would come behind *deadline*, and keep others from being in time.

        Where nobody waits it goes on: what comes late is there for the next prompt.
        """
        if not (self._turns.statistics().tasks_waiting and self._speed.is_known):
            return False
        return anyio.current_time() + self._speed.seconds_of(nbytes) > deadline

    def saw(self, nbytes: int, seconds: float) -> None:
        """Take note of how long blocks took that came, from their turn until they were seen."""
        self._speed.saw(nbytes, seconds)
