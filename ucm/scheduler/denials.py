# SPDX-License-Identifier: Apache-2.0
"""
Blocks whose load failed.

Such a block is *denied*: it counts as missing, whatever the store says. Without this a
request would be matched, fail and be matched again for ever. A save that contains it ends
the denial, and so does time: the store may have been given the block anew by others. Each
further failure of the block doubles the time.
"""

from collections.abc import Iterable
from typing import Final

import attrs

from ucm.scheduler.matching import DeniedKey

__all__ = ["FIRST_DENIAL_S", "LONGEST_DENIAL_S", "MAX_DENIED_KEYS", "Denials"]

MAX_DENIED_KEYS: Final = 65536
FIRST_DENIAL_S: Final = 1.0
LONGEST_DENIAL_S: Final = 300.0


@attrs.frozen
class _Denial:
    until: float
    seconds: float


class Denials(dict[DeniedKey, _Denial]):
    """
    Blocks that count as missing, each until a time of its own; who is ``in`` it, does.

    What is over is remembered for a while, so that the next failure counts for more.
    """

    __slots__ = ("_forget_at", "now")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        """The time, in seconds on any clock that never goes back."""
        self._forget_at = 0.0

    def __contains__(self, key: object) -> bool:
        denial = self.get(key)  # type: ignore[call-overload]
        return denial is not None and self.now < denial.until

    def tick(self, now: float) -> None:
        """Take note of the time; all is forgotten once nothing failed for long."""
        self.now = now
        if self and now > self._forget_at:
            self.clear()

    def deny(self, key: DeniedKey) -> None:
        """Let a block count as missing; beyond the bound the oldest is let go."""
        former = self.get(key)
        if former is not None and self.now < former.until:
            return  # another rank or request met the same damage
        seconds = FIRST_DENIAL_S
        if former is not None:
            seconds = min(2 * former.seconds, LONGEST_DENIAL_S)
            del self[key]
        self[key] = _Denial(self.now + seconds, seconds)
        self._forget_at = self.now + 2 * LONGEST_DENIAL_S
        if len(self) > MAX_DENIED_KEYS:
            del self[next(iter(self))]

    def forgive(self, keys: Iterable[DeniedKey]) -> None:
        """Forget these blocks: they were stored anew."""
        for key in keys:
            self.pop(key, None)
