# SPDX-License-Identifier: Apache-2.0
"""What tiers did not do with blocks, and which of their servers are away, as lines of the agent's log."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ucm.backends.abc import Backend
from ucm.reasons import Reason
from ucm.tracing import TIER_ANSWERS, TIER_FAILED, TIER_SILENT, Log

__all__ = ["ServerTroubles", "Troubles", "servers_of"]

_PAUSE_S: Final = 60.0
_MOST_NAMED: Final = 32
"""Servers of a tier, of each kind of trouble; a cluster may have hundreds."""
_SAVE: Final = "save"


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
        self._bugs: set[tuple[int, str]] = set()

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

    def tell_bug(self, tier: int, medium: str, kind: str, error: str) -> None:
        """Tell what a call of a tier has raised, once of each kind: its blocks had no answer."""
        if (bug := (tier, kind)) not in self._bugs:
            self._bugs.add(bug)
            told = {"tier": tier, "medium": medium, "reason": Reason.ERROR}
            self._log.warning(TIER_FAILED, **told, error=error)


class ServerTroubles:
    """
    Tells which servers of tiers of several are away or take nothing, and of which that is over.

    Args:
        log: The agent's.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._told: dict[tuple[int, str], str] = {}
        """By tier and name, for which direction; empty: for both."""

    def look(self, tiers: Sequence[Backend]) -> None:
        """Tell what is new."""
        now: dict[tuple[int, str], str] = {}
        for at, tier in enumerate(tiers):
            now |= {(at, name): _SAVE for name in tier.refusing[:_MOST_NAMED]}
            now |= {(at, name): "" for name in tier.away[:_MOST_NAMED]}
        for at, name in sorted(now.keys() | self._told.keys()):
            was, what = self._told.get((at, name)), now.get((at, name))
            if was == what:
                continue
            medium = tiers[at].capabilities.medium
            named = {"tier": at, "medium": medium, "server": name}
            if was is not None and what != "":  # who goes takes nothing on
                self._log.info(TIER_ANSWERS, **named, **_direction(was))
            if what is not None:
                self._log.warning(TIER_SILENT, **named, **_direction(what))
        self._told = now


def servers_of(tier: Backend) -> dict[str, object]:
    """Return which servers of a tier are away or take nothing, as plain values; the first ones by name."""
    return {
        "away": list(tier.away[:_MOST_NAMED]),
        "num_away": len(tier.away),
        "refusing": list(tier.refusing[:_MOST_NAMED]),
        "num_refusing": len(tier.refusing),
    }


def _direction(word: str) -> dict[str, str]:
    return {"direction": word} if word else {}
