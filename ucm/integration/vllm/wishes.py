# SPDX-License-Identifier: Apache-2.0
"""
What a request asks of the store: ``kv_transfer_params`` and the cache salt.

Ours are the keys below ``ucm``, so that they are nobody else's::

    {"ucm": {"retain_seconds": 3600, "store": false, "forget": true}}

``retain_seconds``: its blocks count as used so much later, up to a maximum that the
operator sets, or, below 0, so much earlier: they give way first, as those of a batch job
may. ``store``: false, nothing of it is saved. ``forget``: nothing of it is
saved, and its prompt's blocks are deleted when it ends, whoever stored them; of those
that others have in common, they compute the next one anew. What is not understood is as
if it was not given: counted, and told once of each key.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, cast

from xxhash import xxh32_intdigest

from ucm.metrics import Counters
from ucm.scheduler.requests import NO_WISHES, Wishes
from ucm.tracing import WISH_IGNORED, Log

__all__ = ["WishReader"]

_LONGEST_S: Final = 1e9
"""However much an operator allows: moments are nanoseconds in 64 bits."""

_OURS: Final = "ucm"
_RETAIN, _STORE, _FORGET = "retain_seconds", "store", "forget"
_REMEDIES: Final = {
    _RETAIN: "Give seconds; below 0, its blocks give way first.",
    _STORE: "Give true or false.",
    _FORGET: "Give true or false.",
    _OURS: f"Give a mapping with some of {_RETAIN}, {_STORE} and {_FORGET}.",
}


class WishReader:
    """
    Reads what requests ask for.

    Used on the scheduler's thread only.

    Args:
        max_retain_seconds: More is cut to it, in both directions.
        counters: Counts what is not understood.
        log: Told once of each key.
    """

    def __init__(
        self, max_retain_seconds: float, *, counters: Counters, log: Log
    ) -> None:
        self._max_retain_seconds = min(max_retain_seconds, _LONGEST_S)
        self._counters = counters
        self._log = log
        self._told: set[str] = set()

    def of(self, request: Any) -> Wishes:  # noqa: ANN401 - vLLM's Request
        """Return what a request asks for."""
        salt = getattr(request, "cache_salt", None)
        given = getattr(request, "kv_transfer_params", None)
        ours = given.get(_OURS, {}) if given and isinstance(given, Mapping) else {}
        if not (salt or ours):
            return NO_WISHES
        if not isinstance(ours, Mapping):
            self._ignore(_OURS, ours)
            ours = {}
        for key in ours.keys() - {_RETAIN, _STORE, _FORGET}:
            self._ignore(_OURS, key)
        forgets = self._read_switch(ours, _FORGET, default=False)
        return Wishes(
            tenant=_tenant(str(salt)) if salt else 0,
            retain_seconds=self._read_seconds(ours),
            saves=self._read_switch(ours, _STORE, default=True) and not forgets,
            forgets=forgets,
        )

    def _read_seconds(self, ours: Mapping[str, object]) -> float:
        value = ours.get(_RETAIN, 0)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and -math.inf < cast(float, value) < math.inf:
            # An integer may be too large for a float: cut it first.
            most = self._max_retain_seconds
            return float(max(-most, min(cast(float, value), most)))
        self._ignore(_RETAIN, value)
        return 0.0

    def _read_switch(
        self, ours: Mapping[str, object], key: str, *, default: bool
    ) -> bool:
        value = ours.get(key, default)
        if isinstance(value, bool):
            return value
        self._ignore(key, value)
        return default

    def _ignore(self, key: str, value: object) -> None:
        self._counters.add("ucm_ignored_wishes_total", 1, key=key)
        if key not in self._told:
            self._told.add(key)
            remedy = _REMEDIES[key]
            self._log.warning(WISH_IGNORED, key=key, value=_shown(value), remedy=remedy)


def _shown(value: object) -> str:
    """Return the beginning of what was given, or its type where it has no end."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        return type(value).__name__


def _tenant(salt: str) -> int:
    """Return a salt's number; never 0, which is nobody's."""
    return xxh32_intdigest(salt.encode(errors="surrogatepass")) or 1
