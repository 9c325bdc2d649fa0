# SPDX-License-Identifier: Apache-2.0
"""
What became of each request's look-up, once in each life.

The engine asks in every step in which a request waits; the answer that counts is the one
before it gives the request its blocks. Only of that one it is found out why it fell short.
Whether a hit pays is decided when it is first found, and stands for as long as it is the same.

An engine takes up a request that loads only if some blocks stay free beside it. In a memory hardly
larger than the request they never do: it would be asked for again and again, and all behind it
would wait. So a hit that is not taken up though nothing runs is offered shorter, unless the engine
has blocks by far: then somebody else holds the request up, as another connector that is asked, too.

Threading: all of it runs on the engine's scheduler thread, and waits for nothing.
"""

from collections.abc import Callable
from typing import Final

import attrs
import msgspec
from msgspec.structs import replace

from ucm.integration.vllm.adapters import LATE
from ucm.layout import KVLayout
from ucm.metrics import Counters, sample_key
from ucm.reasons import MissReason
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.misses import Elsewhere, Miss, Misses
from ucm.scheduler.paying import Paying
from ucm.scheduler.requests import NO_LIMIT, Wishes

__all__ = ["Lookup", "Lookups"]

_REFUSED_STEPS: Final = 16
_REFUSED_S: Final = 1.0
"""After so many steps, and so long, a hit counts as one that the engine has no room for."""
_AMPLE: Final = 64
"""Free blocks, beside twice a request's own, of which an engine has kept none for something else."""
_NO_ROOM: Final = MissReason.QUEUE, "the engine has no room to load more"
_LOOKUPS: Final = "ucm_lookups_total"
_WANTED: Final = "ucm_wanted_tokens_total"
_MISSED: Final = {
    reason: sample_key("ucm_missed_lookups_total", {"reason": reason})
    for reason in MissReason
}
_UNWEIGHED: Final = range(0), False


class Lookup(msgspec.Struct, eq=False, gc=False):
    """
    The look-ups of one request.

    Args:
        computed_tokens: That the engine had itself at the last one.
        match: What the last one said; None once it has decided.
        life: How often the request was given blocks.
        found_tokens: That were found by the last one that decided.
        wanted_tokens: That it looked for.
        miss: Why the last one that decided fell short; None if it did not.
        weighed: The tokens of the hit on which was decided last, and whether it is computed.
        most: Tokens that the engine may have room to load.
    """

    computed_tokens: int = 0
    match: PrefixMatch | None = None
    life: int = 0
    found_tokens: int = 0
    wanted_tokens: int = 0
    miss: Miss | None = None
    weighed: tuple[range, bool] = _UNWEIGHED
    most: int = NO_LIMIT


class Lookups:
    """
    Those of all requests that are not finished.

    Args:
        layout: The engine's groups.
        misses: Finds out why a look-up fell short.
        elsewhere: Asked about blocks of which nothing is known.
        problem_of: Says why it is not known what a request's adapter holds.
        paying: Decides whether a hit is loaded.
        counters: Counts look-ups and reasons.
    """

    def __init__(
        self,
        layout: KVLayout,
        misses: Misses,
        *,
        elsewhere: Elsewhere,
        problem_of: Callable[[str], str],
        paying: Paying,
        counters: Counters,
    ) -> None:
        self._layout = layout
        self._misses = misses
        self._elsewhere = elsewhere
        self._problem_of = problem_of
        self._paying = paying
        self._counters = counters
        self._lookups: dict[str, Lookup] = {}
        self.has_limits = False
        """Whether the engine has ever shown that it has no room for all."""
        self.block_pool: object = None
        """vLLM's; None while it is not known."""
        self._offered: Lookup | None = None
        """What has a hit since the last step, and no blocks yet."""
        self._refused = 0, 0.0
        """Steps in a row that took up no hit though nothing ran, and when the first one was."""

    def __len__(self) -> int:
        return len(self._lookups)

    def looked(
        self, request_id: str, match: PrefixMatch, computed_tokens: int, now: float
    ) -> PrefixMatch:
        """
        Take note of what a look-up says; the next one may say something else.

        Returns:
            What the engine is to hear: nothing, if the hit is predicted not to pay.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            lookup = self._lookups[request_id] = Lookup()
        if match.tokens:
            hit = range(computed_tokens, computed_tokens + match.tokens)
            if lookup.weighed[0] != hit:
                lookup.weighed = hit, self._paying.declines(hit, now)
            if lookup.weighed[1]:
                match = PrefixMatch(0, MatchReason.SLOWER, match.wanted)
        lookup.match, lookup.computed_tokens = match, computed_tokens
        if match.tokens:
            self._offered = lookup
        return match

    def within(self, request_id: str, wishes: Wishes) -> Wishes:
        """Limit what is loaded to what the engine has room for, as far as it has shown."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.most == NO_LIMIT:
            return wishes
        return attrs.evolve(wishes, most_loaded=min(lookup.most, wishes.most_loaded))

    def stepped(self, now: float, *, is_idle: bool) -> None:
        """
        Take note of a step: a hit that is not taken up is offered shorter after a while.

        Args:
            now: Seconds.
            is_idle: Nothing runs, and nothing is loaded.
        """
        offered, self._offered = self._offered, None
        match = None if offered is None else offered.match
        if offered is None or match is None or not is_idle:
            self._refused = 0, now
            return
        num_tokens = offered.computed_tokens + max(match.tokens, match.wanted)
        if self._has_ample_room(num_tokens):
            self._refused = 0, now
            return
        steps, since = self._refused
        since = since if steps else now
        self._refused = steps + 1, since
        if steps >= _REFUSED_STEPS and now - since >= _REFUSED_S:
            offered.most, self.has_limits = match.tokens * 7 // 8, True
            self._refused = 0, now

    def decided(
        self, request_id: str, shortfall: tuple[MissReason, str] | None = None
    ) -> Lookup:
        """
        Take note that a request was given blocks, and find out why it found too little.

        Args:
            request_id: Which.
            shortfall: Why tiers did not bring what the slab lacks, if they say so.

        Returns:
            What the engine was told; nothing if nobody has looked since the last time.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.match is None:
            return Lookup()
        match, lookup.match = lookup.match, None
        lookup.weighed = _UNWEIGHED
        lookup.life += 1
        lookup.found_tokens, lookup.wanted_tokens = match.tokens, match.wanted
        computed = lookup.computed_tokens
        lookup.miss = self._misses.explain(match, computed, self._elsewhere)
        if match.reason is MatchReason.TOO_SHORT:
            lookup.miss = self._unkeyed(request_id) or lookup.miss
        if lookup.most < NO_LIMIT:
            shortfall, lookup.most = _NO_ROOM, NO_LIMIT
        if shortfall is not None and lookup.miss is not None:
            reason, text = shortfall
            detail = {**lookup.miss.detail, "text": text, "slab": lookup.miss.reason}
            detail.pop("age_s", None)
            lookup.miss = replace(lookup.miss, reason=reason, detail=detail)
        totals: dict[str, float] = {_LOOKUPS: 1}
        if match.wanted:
            totals[_WANTED] = match.wanted
        if lookup.miss is not None:
            totals[_MISSED[lookup.miss.reason]] = 1
        self._counters.add_all(totals)
        return lookup

    def forget(self, request_id: str) -> None:
        """Let go of a request that is finished."""
        self._lookups.pop(request_id, None)
        if request_id in self._paying.on_way:
            self._paying.forget(request_id)

    def _unkeyed(self, request_id: str) -> Miss | None:
        """Return why a request has no hashes, if that is because of its adapter."""
        if not (problem := self._problem_of(request_id)):
            return None
        reason = MissReason.LATE if problem == LATE else MissReason.UNKEYED
        return Miss(reason, {"text": f"its adapter: {problem}"})

    def _has_ample_room(self, num_tokens: int) -> bool:
        """Return whether the engine has far more free blocks than so many tokens need."""
        count = getattr(self.block_pool, "get_num_free_blocks", None)
        groups = self._layout.groups
        needed = sum(-(-num_tokens // group.block_tokens) for group in groups)
        return count is not None and count() >= 2 * needed + _AMPLE
