# SPDX-License-Identifier: Apache-2.0
"""
What a request asks of the store: ``kv_transfer_params``, priority, cache salt, and what it skips.

Ours are the keys below ``ucm``, so that they are nobody else's::

    {"ucm": {"retain_seconds": 3600, "store": false, "forget": true}}

``retain_seconds``: its blocks count as used so much later, up to a maximum that the
operator sets, or, below 0, so much earlier: they give way first, as those of a batch
job may. ``store``: false, nothing of it is saved. ``forget``: nothing of it is
saved, and its prompt's blocks are deleted when it ends, whoever stored them; of those
that others have in common, they compute the next one anew.

Beside it stand the engine's own, in the words of its offloading connector::

    {"max_load_tokens": 4096, "max_offload_tokens": 0, "kv_load_tiers": [{"medium": "disk"}]}

Of the tiers a request may name the ``medium``, as a tier calls its own or as the engine
sorts them (``CPU``, ``STORAGE``), the ``locality`` (``LOCAL``, ``REMOTE``), or both; an
empty list is no tier. The slab is not meant by it, as the engine does not mean its own first
tier.

A request that wants something of each token of its prompt, such as its log-probability, says
that it skips the prefix cache (``skip_reading_prefix_cache``): nothing of it is loaded. Before
vLLM 0.32 the engine leaves that to its connectors.

What is not understood is as if it was not given: counted, and told once of each key. So is a
medium that no tier has, of which none is meant, and so are the ``kv_hints`` of an orchestrator: no action of theirs is known here.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from ucm.agent.client import AgentClient
from ucm.metrics import Counters
from ucm.prefixes import tenant_of
from ucm.scheduler.requests import NO_LIMIT, NO_WISHES, Wishes
from ucm.tracing import WISH_IGNORED, Log

__all__ = ["WishReader"]

_LONGEST_S: Final = 1e9
"""However much an operator allows: moments are nanoseconds in 64 bits."""
_MOST_PRIORITY: Final = 1 << 31
_MOST_FILTERS: Final = 32
_MOST_WORD: Final = 64

_OURS: Final = "ucm"
_RETAIN, _STORE, _FORGET = "retain_seconds", "store", "forget"
_LOAD, _OFFLOAD, _TIERS = "max_load_tokens", "max_offload_tokens", "kv_load_tiers"
_HINTS: Final = "kv_hints"
_SORTS: Final = ("cpu", "storage")
"""Media in the engine's words, whatever tiers call theirs."""
_LOCALITIES: Final = ("", "local", "remote")
_REMEDIES: Final = {
    _RETAIN: "Give seconds; below 0, its blocks give way first.",
    _STORE: "Give true or false.",
    _FORGET: "Give true or false.",
    _OURS: f"Give a mapping with some of {_RETAIN}, {_STORE} and {_FORGET}.",
    _LOAD: "Give a number of tokens, 0 for none.",
    _OFFLOAD: "Give a number of tokens, 0 for none.",
    _TIERS: "Give a list of mappings with a medium, a locality (LOCAL, REMOTE), or both.",
    _HINTS: f"No action is known here; ask by {_OURS} in kv_transfer_params.",
}


class WishReader:
    """
    Reads what requests ask for.

    Used on the scheduler's thread only.

    Args:
        max_retain_seconds: More is cut to it, in both directions.
        counters: Counts what is not understood.
        log: Told once of each key.
        client: Of the node's agent, which knows what tiers call their media.
        is_ranked: The engine runs requests by their priority. One that does not takes any
            from anybody, and fetches are in order of arrival as well.
    """

    def __init__(
        self,
        max_retain_seconds: float,
        counters: Counters,
        log: Log,
        client: AgentClient | None = None,
        *,
        is_ranked: bool = False,
    ) -> None:
        self._max_retain_seconds = min(max_retain_seconds, _LONGEST_S)
        self._counters = counters
        self._log = log
        self._is_ranked = is_ranked
        self._client = client
        self._told: set[str] = set()

    def of(self, request: Any) -> Wishes:  # noqa: ANN401 - vLLM's Request
        """Return what a request asks for."""
        salt = getattr(request, "cache_salt", None)
        given = getattr(request, "kv_transfer_params", None)
        priority = getattr(request, "priority", 0) if self._is_ranked else 0
        if (hints := getattr(request, _HINTS, None)) is not None:
            self._ignore(_HINTS, hints)
        skips = getattr(request, "skip_reading_prefix_cache", False)
        if not (salt or given or priority or skips):
            return NO_WISHES
        given = given if isinstance(given, Mapping) else {}
        ours = self._read_ours(given)
        forgets = self._read_switch(ours, _FORGET, default=False)
        saves = self._read_switch(ours, _STORE, default=True) and not forgets
        most_saved = self._read_tokens(given, _OFFLOAD)
        most_loaded = self._read_tokens(given, _LOAD)
        wishes = Wishes(
            tenant=tenant_of(str(salt or "").encode(errors="surrogatepass")),
            retain_seconds=self._read_seconds(ours),
            most_saved=most_saved if saves else 0,
            most_loaded=0 if skips else most_loaded,
            tiers=self._read_tiers(given),
            priority=_priority(priority),
            forgets=forgets,
        )
        return NO_WISHES if wishes == NO_WISHES else wishes

    def _read_ours(self, given: Mapping[str, Any]) -> Mapping[str, object]:
        ours = given.get(_OURS, {})
        if not isinstance(ours, Mapping):
            self._ignore(_OURS, ours)
            return {}
        for key in ours:
            if key not in (_RETAIN, _STORE, _FORGET):
                self._ignore(_OURS, key)
                break  # there may be a million
        return ours

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

    def _read_tokens(self, given: Mapping[str, object], key: str) -> int:
        value = given.get(key)
        if type(value) is int and value >= 0:  # no boolean, as in the engine
            return min(value, NO_LIMIT)
        if value is not None:
            self._ignore(key, value)
        return NO_LIMIT

    def _read_tiers(
        self, given: Mapping[str, object]
    ) -> tuple[tuple[str, str], ...] | None:
        """Return which tiers are meant; all where no entry makes sense, as in the engine."""
        value = given.get(_TIERS)
        if value is None:
            return None
        entries = value if isinstance(value, (list, tuple)) else [value]
        filters = tuple(map(_filter, entries[:_MOST_FILTERS]))
        known = tuple(each for each in filters if each is not None)
        if len(known) < len(entries):
            self._ignore(_TIERS, value)
        elif strange := self._strange(known):
            media = ", ".join(self._media)
            self._ignore(
                _TIERS,
                strange,
                f"Tiers have the media {media}, or give {' or '.join(_SORTS)}.",
            )
        return known if known or not entries else None

    @property
    def _media(self) -> Sequence[str]:
        """What tiers call theirs; nothing while that is not known."""
        return () if self._client is None else self._client.media

    def _strange(self, filters: Sequence[tuple[str, str]]) -> list[str]:
        """Return the media that no tier has: nothing is meant by them."""
        if not self._media:
            return []
        named = "", *_SORTS, *map(str.lower, self._media)
        return [medium for medium, _ in filters if medium not in named]

    def _ignore(self, key: str, value: object, remedy: str = "") -> None:
        self._counters.add("ucm_ignored_wishes_total", 1, key=key)
        if key not in self._told:
            self._told.add(key)
            remedy = remedy or _REMEDIES[key]
            self._log.warning(WISH_IGNORED, key=key, value=_shown(value), remedy=remedy)


def _filter(entry: object) -> tuple[str, str] | None:
    """Return medium and locality of one entry, each empty for any; None: no sense."""
    if not isinstance(entry, Mapping):
        return None
    medium, locality = entry.get("medium") or "", entry.get("locality") or ""
    if not (isinstance(medium, str) and isinstance(locality, str)):
        return None
    if len(medium) > _MOST_WORD or locality.lower() not in _LOCALITIES:
        return None
    if not medium.isprintable():  # half a surrogate pair, say, which no message carries
        return None
    return medium.lower(), locality.lower()


def _priority(value: object) -> int:
    number = value if isinstance(value, int) else 0
    return max(-_MOST_PRIORITY, min(number, _MOST_PRIORITY))


def _shown(value: object) -> str:
    """Return the beginning of what was given, or its type where it has no end."""
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        return type(value).__name__
