# SPDX-License-Identifier: Apache-2.0
"""
What became of each request's look-up: counted, and told once in each life.

The engine asks in every step in which a request waits; the answer that counts is the one
before it gives the request its blocks. Only of that one it is found out why it fell short.

Threading: all of it runs on the engine's scheduler thread, and waits for nothing.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from ucm.integration.vllm.adapters import LATE
from ucm.metrics import Counters, sample_key
from ucm.reasons import MissReason
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.misses import Elsewhere, Miss, Misses
from ucm.tracing import PREFIX_MISSED, Log, is_told

__all__ = ["Lookup", "Lookups"]

_LOOKUPS: Final = "ucm_lookups_total"
_WANTED: Final = "ucm_wanted_tokens_total"
_MISSED: Final = {
    reason: sample_key("ucm_missed_lookups_total", {"reason": reason})
    for reason in MissReason
}


@attrs.define
class Lookup:
    """
    The look-ups of one request.

    Args:
        computed_tokens: That the engine had itself at the last one.
        match: What the last one said; None once it has decided.
        life: How often the request was given blocks.
        miss: Why the last one that decided fell short; None if it did not.
    """

    computed_tokens: int = 0
    match: PrefixMatch | None = None
    life: int = 0
    miss: Miss | None = None

    @property
    def first_missing(self) -> int | None:
        """The first block that was missing, by its position."""
        block = None if self.miss is None else self.miss.block
        return None if block is None else block.at


class Lookups:
    """
    Those of all requests that are not finished.

    Args:
        misses: Finds out why a look-up fell short.
        elsewhere: Asked about blocks of which nothing is known.
        problem_of: Says why it is not known what a request's adapter holds.
        counters: Counts look-ups and reasons.
        log: Told of each that fell short.
    """

    def __init__(
        self,
        misses: Misses,
        *,
        elsewhere: Elsewhere,
        problem_of: Callable[[str], str],
        counters: Counters,
        log: Log,
    ) -> None:
        self._misses = misses
        self._elsewhere = elsewhere
        self._problem_of = problem_of
        self._counters = counters
        self._log = log
        self._is_told = is_told(log, PREFIX_MISSED) and log.is_enabled_for(logging.INFO)
        self._lookups: dict[str, Lookup] = {}

    def __len__(self) -> int:
        return len(self._lookups)

    def looked(self, request_id: str, match: PrefixMatch, computed_tokens: int) -> None:
        """Take note of what a look-up says; the next one may say something else."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            lookup = self._lookups[request_id] = Lookup()
        lookup.match, lookup.computed_tokens = match, computed_tokens

    def decided(self, request_id: str) -> int:
        """
        Take note that a request was given blocks, and tell why it found too little.

        Returns:
            Tokens that the engine had itself; 0 if nobody has looked since the last time.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.match is None:
            return 0
        match, lookup.match = lookup.match, None
        lookup.life += 1
        lookup.miss = self._explain(request_id, match, lookup.computed_tokens)
        totals: dict[str, float] = {_LOOKUPS: 1}
        if match.wanted:
            totals[_WANTED] = match.wanted
        if lookup.miss is not None:
            totals[_MISSED[lookup.miss.reason]] = 1
            if self._is_told:
                self._tell(request_id, lookup, match, lookup.miss)
        self._counters.add_all(totals)
        return lookup.computed_tokens

    def get(self, request_id: str) -> Lookup | None:
        """Return the look-ups of a request, which is not finished."""
        return self._lookups.get(request_id)

    def forget(self, request_id: str) -> None:
        """Let go of a request that is finished."""
        self._lookups.pop(request_id, None)

    def _explain(
        self, request_id: str, match: PrefixMatch, computed_tokens: int
    ) -> Miss | None:
        if match.reason is MatchReason.TOO_SHORT and (
            problem := self._problem_of(request_id)
        ):
            reason = MissReason.LATE if problem == LATE else MissReason.UNKEYED
            return Miss(reason, {"text": f"its adapter: {problem}"})
        return self._misses.explain(match, computed_tokens, self._elsewhere)

    def _tell(
        self, request_id: str, lookup: Lookup, match: PrefixMatch, miss: Miss
    ) -> None:
        told: dict[str, Any] = {}
        if miss.block is not None:
            told["block"] = miss.block.at
            told["group"] = miss.block.group.group_id
            told["key"] = miss.key.hex()
        detail: Mapping[str, object] = miss.detail
        self._log.info(
            PREFIX_MISSED,
            request_id=request_id,
            life=lookup.life,
            computed_tokens=lookup.computed_tokens,
            found_tokens=match.tokens,
            wanted_tokens=match.wanted,
            reason=miss.reason,
            detail=dict(detail),
            **told,
        )
