# SPDX-License-Identifier: Apache-2.0
"""
From where hits came, in the engine's words and in ours.

Threading: the engine's scheduler thread.
"""

from typing import Any, Final

from ucm.integration.vllm.compat import hit_source
from ucm.metrics import Counters, sample_key

__all__ = ["Hits"]

_KNOWN: Final = (
    "slab",
    "disk",
    "files",
    "object",
    "redis",
    "mooncake",
    "yuanrong",
    "memory",
)
_TOKENS: Final = {
    tier: sample_key("ucm_hit_tokens_total", {"tier": tier})
    for tier in (*_KNOWN, "other")
}


class Hits:
    """
    Counts hits by tier.

    Args:
        counters: Told of tokens.
        slab: What the slab is: ``memory`` or ``disk``.
    """

    def __init__(self, counters: Counters, slab: str) -> None:
        self._counters = counters
        self._slab = "host" if slab == "memory" else "disk"
        self._last: tuple[str, dict[str, int]] = ("", {})

    def found(self, request_id: str, tokens: dict[str, int]) -> None:
        """Take note of a hit, by where its tokens were."""
        self._last = request_id, tokens
        for name, count in tokens.items():
            tier = name if name in _KNOWN else "other"
            if count:
                self._counters.add_all({_TOKENS[tier]: count})

    def sources(self, request_id: str, tokens: int) -> dict[Any, int]:
        """
        Return the tokens of the last hit by the engine's words for where they were.

        Empty where it was another request's, or another hit.
        """
        last, found = self._last
        if last != request_id or sum(found.values()) != tokens:
            return {}
        told: dict[Any, int] = {}
        for name, count in found.items():
            if (word := hit_source(self._word(name))) is not None:
                told[word] = told.get(word, 0) + count
        return told

    def _word(self, name: str) -> str:
        if name == "slab":
            return self._slab
        return "disk" if name == "disk" else "external_unspecified"
