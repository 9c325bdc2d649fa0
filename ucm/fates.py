# SPDX-License-Identifier: Apache-2.0
"""
What becomes of blocks: the words for it, and a table that remembers it.

The table, a *sketch*, has a fixed size. Each key has one place, chosen by its fingerprint; a later one with the same place takes
it. So what is remembered is the most recent, and the memory never grows.

Error. Of what was put down, a share of about ``exp(-n / entries)`` is still known after
``n`` others: two thirds after half as many as there are entries, a third after as many.
A key that was never put down is taken for one of those with a chance of ``entries`` in
2**64, if fingerprints are as good as random.

Threading: any number of threads and processes may read and write the same memory, and
nobody waits. What one of them left half written, or what is not ours, does not hold
together: each entry is two words, the second one a value and the first one the same
mixed with the fingerprint. It is then as if nothing had been put down.
"""

import enum
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["ENTRY_BYTES", "Fate", "Sketch", "Told", "packed"]

ENTRY_BYTES: Final = 16
_CODE_BITS: Final = 8
_MOST_CODES: Final = (1 << _CODE_BITS) - 1
_LATEST: Final = (1 << 64 - _CODE_BITS) - 1


class Fate(enum.Enum):
    """What has become of a block, as far as a store remembers."""

    UNKNOWN = "unknown"
    """The store does not keep such things."""
    NEVER = "never"
    """It is not there, and nothing is remembered of it."""
    WRITING = "writing"
    """Slots are leased for it."""
    STORED = "stored"
    """It is there."""
    EVICTED = "evicted"
    """It made room for others."""
    FORGOTTEN = "forgotten"
    """Somebody asked for it to be deleted."""
    CLEARED = "cleared"
    """Somebody asked for all of its key space to be deleted."""
    CORRUPT = "corrupt"
    """Its bytes were not those that had been saved, so that it was deleted."""


@attrs.frozen
class Told:
    """
    What a store tells of a block.

    Args:
        fate: What has become of it.
        age_s: How many seconds ago, where that is kept.
    """

    fate: Fate
    age_s: float | None = None


class Sketch:
    """
    What became of keys.

    Args:
        words: ``[2, entries]`` uint64, zeros in the beginning; a power of two of them.
    """

    __slots__ = ("_check", "_checks", "_last", "_mask", "_value", "_values")

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._checks, self._values = words
        self._mask = np.uint64(len(self._values) - 1)
        # The same as Python's own numbers, for one key: a fifth of what numpy costs.
        self._check, self._value = self._checks.data, self._values.data
        self._last = len(self._values) - 1

    def put(self, prints: npt.NDArray[np.uint64], code: int, moment_ms: int) -> None:
        """
        Put down the same of some keys.

        Args:
            prints: The keys' fingerprints, 64 bits.
            code: What became of them, 1 to 255.
            moment_ms: When, on any clock that is the same for all.
        """
        value = np.uint64(packed(code, moment_ms))
        at = (prints & self._mask).view(np.int64)
        self._values[at] = value
        self._checks[at] = prints ^ value

    def get(self, fingerprint: int) -> tuple[int, int] | None:
        """Return what became of a key and when, or None if nothing is known."""
        at = fingerprint & self._last
        value = self._value[at]
        if not value or self._check[at] ^ value != fingerprint:
            return None
        return value & _MOST_CODES, value >> _CODE_BITS


def packed(code: int, moment_ms: int) -> int:
    """Return what became of a key and when, as a sketch keeps it; see ``Sketch.put``."""
    if not 0 < code <= _MOST_CODES:
        raise ValueError(f"code {code} is not in 1..{_MOST_CODES}")
    return (moment_ms & _LATEST) << _CODE_BITS | code
