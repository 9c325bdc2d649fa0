# SPDX-License-Identifier: Apache-2.0
"""
Whether loading pays. Pure: amounts, seconds and the time in, a decision out.

A ``Speed`` learns from what things took: a latency, and so long for each byte. What was seen
last counts most. A ``Choice`` holds that against what computing would take. It declines
nothing before it has seen a few, nor what is much larger than all of them: where these are alike,
nobody can tell a latency from a rate. One in so many is done though it looks slower, or one
after a while, so that a source that was slow for a time is found to be well again.
"""

from typing import Final

import attrs

__all__ = ["Choice", "Speed"]

_KEPT: Final = 0.85
"""Of the weight of what was seen before."""
_LEAST_SEEN: Final = 4
_APART: Final = 0.1
"""Of their mean, that amounts must differ to tell a latency from a rate."""
_KNOWN: Final = 2
"""Times the largest amount that was seen, up to which something is known."""
_MOST_DECLINED: Final = 15
"""In a row."""
_STALE_S: Final = 30.0


@attrs.define
class Speed:
    """How long something takes, by how much it is."""

    num_seen: int = 0
    _weight: float = 0.0
    _amounts: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def saw(self, amount: float, seconds: float) -> None:
        """Take note that so much took so long."""
        self.num_seen += 1
        self._weight = _KEPT * self._weight + 1
        self._amounts = _KEPT * self._amounts + amount
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + amount * amount
        self._products = _KEPT * self._products + amount * seconds

    @property
    def is_known(self) -> bool:
        """Whether enough was seen."""
        return self.num_seen >= _LEAST_SEEN and self._amounts > 0

    def seconds_of(self, amount: float) -> float:
        """Return how long so much is likely to take; only if it is known."""
        mean, took = self._amounts / self._weight, self._seconds / self._weight
        each = took / mean
        spread = self._squares / self._weight - mean * mean
        if spread > (_APART * mean) ** 2:
            slope = (self._products / self._weight - mean * took) / spread
            each = min(max(slope, 0.0), each)  # neither takes less than no time
        return took + each * (amount - mean)


@attrs.define
class Choice:
    """Between one way to load and computing."""

    speed: Speed = attrs.Factory(Speed)
    _num_declined: int = 0
    _tried_at: float = 0.0
    _largest: float = 0.0

    def saw(self, amount: float, seconds: float, now: float, *, one: float = 0) -> None:
        """Take note that loading so much took so long; *one* of several was as large."""
        self.speed.saw(amount, seconds)
        self._tried_at = now
        self._largest = max(one or amount, _KEPT * self._largest)

    def declines(
        self, amount: float, compute_s: float, now: float, *, one: float = 0
    ) -> bool:
        """
        Decide whether to compute instead, and take note of it.

        Args:
            amount: To be loaded.
            compute_s: How long computing it would take; 0: not known.
            now: The time, in seconds on any clock.
            one: How much of that is asked about, if the rest is before it.
        """
        if not (compute_s > 0 and self.speed.is_known):
            return False
        if (one or amount) > _KNOWN * self._largest:
            return False
        is_slower = self.speed.seconds_of(amount) > compute_s
        is_stale = now - self._tried_at > _STALE_S
        if is_slower and self._num_declined < _MOST_DECLINED and not is_stale:
            self._num_declined += 1
            return True
        self._num_declined, self._tried_at = 0, now
        return False
