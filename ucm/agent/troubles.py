# SPDX-License-Identifier: Apache-2.0
"""What tiers did not do with blocks, as lines of the agent's log."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ucm.reasons import Reason
from ucm.tracing import TIER_FAILED, Log

__all__ = ["Troubles"]

_PAUSE_S: Final = 60.0


class Troubles:
    """
    Tells of each kind of trouble with each tier at once, and then once a minute.

    Args:
        log: The agent's.
        clock: In seconds.
    """

    def __init__(self, log: Log, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._told: dict[tuple[int, Reason], tuple[int, float]] = {}
        """By tier and reason, how many blocks, and when."""

    def look(
        self, media: Sequence[str], totals: Mapping[tuple[int, Reason], int]
    ) -> None:
        """Tell what is new in *totals*, which are by the number of the tier."""
        now = self._clock()
        for (tier, reason), total in totals.items():
            told, at = self._told.get((tier, reason), (0, now - _PAUSE_S))
            if total > told and now - at >= _PAUSE_S:
                self._told[tier, reason] = total, now
                self._log.warning(
                    TIER_FAILED,
                    tier=tier,
                    medium=media[tier],
                    reason=reason,
                    blocks=total - told,
                )
