# SPDX-License-Identifier: Apache-2.0
"""
What became of each request's look-up, once in each life.

The engine asks in every step in which a request waits; the answer that counts is the one
before it gives the request its blocks. Only of that one it is found out why it fell short.
Whether a hit pays is decided when it is first found, and stands for as long as it is the same.
One that is computed is the reason if it is most of what was wanted; else the block behind it is,
and the detail has how many tokens were there.

An engine takes up a request that loads only if some blocks stay free beside it. In a memory hardly
larger than the request they never do: it would be asked for again and again, and all behind it
would wait. So a hit that is not taken up though nothing runs is offered shorter, unless the engine
has blocks by far: then somebody else holds the request up, as another connector that is asked, too.

Threading: all of it runs on the engine's scheduler thread, and waits for nothing.
"""

from collections.abc import Callable, Sequence
from typing import Final

import attrs
from msgspec.structs import replace

from ucm.integration.vllm.adapters import LATE
from ucm.integration.vllm.running import UNWEIGHED, Known
from ucm.layout import GroupKind, KVLayout
from ucm.metrics import Counters, sample_key
from ucm.reasons import MissReason
from ucm.scheduler.matches import MatchReason, MissingBlock, PrefixMatch
from ucm.scheduler.misses import Elsewhere, Miss, Misses
from ucm.scheduler.paying import Paying
from ucm.scheduler.requests import NO_LIMIT, Wishes

__all__ = ["Lookups"]

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
_UNASKED: Final = Miss(MissReason.ADMISSION, {"text": "it was not looked up"})
"""Of an engine that loads nothing, and of who is not kept waiting until it can be looked up."""


class Lookups:
    """
    Decides what the engine hears of a look-up, and finds out why it fell short.

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
        self.has_limits = False
        """Whether the engine has ever shown that it has no room for all."""
        self.block_pool: object = None
        """vLLM's; None while it is not known."""
        self._offered: Known | None = None
        """What has a hit since the last step, and no blocks yet."""
        self._refused = 0, 0.0
        """Steps in a row that took up no hit though nothing ran, and when the first one was."""

    def looked(self, known: Known, match: PrefixMatch, now: float) -> PrefixMatch:
        """
        Take note of what a look-up says; the next one may say something else.

        Returns:
            What the engine is to hear: nothing, if the hit is predicted not to pay.
        """
        if match.tokens:
            hit = range(known.computed_tokens, known.computed_tokens + match.tokens)
            if known.weighed[0] != hit:
                known.weighed = hit, self._paying.declines(hit, now)
            if known.weighed[1]:
                is_most = 2 * match.tokens >= match.wanted
                missing = None if is_most else match.missing
                match = PrefixMatch(0, MatchReason.SLOWER, match.wanted, missing)
        known.match = match
        if match.tokens:
            self._offered = known
        return match

    def within(self, known: Known) -> Wishes:
        """Limit what is loaded to what the engine has room for, as far as it has shown."""
        wishes = known.wishes
        if known.most == NO_LIMIT:
            return wishes
        return attrs.evolve(wishes, most_loaded=min(known.most, wishes.most_loaded))

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
        self,
        known: Known,
        shortfall: tuple[MissReason, str] | None = None,
        hashes: Sequence[bytes] = (),
    ) -> None:
        """
        Take note that a request was given blocks, and find out why it found too little.

        If nobody has looked since the last time, it wanted nothing.

        Args:
            known: Which.
            shortfall: Why tiers did not bring what the slab lacks, if they say so.
            hashes: The engine's block hashes.
        """
        match, known.match = known.match, None
        if match is None:
            known.miss = None if known.life else _UNASKED
            known.life = known.life or 1
            return
        slower = 0
        if match.reason is MatchReason.SLOWER and match.missing is not None:
            slower = len(known.weighed[0])
            match = PrefixMatch(slower, match.reason, match.wanted, match.missing)
        if match.reason is MatchReason.LIMITED:
            match = self._limited(known, match, hashes)
        known.weighed = UNWEIGHED
        known.life += 1
        known.found_tokens, known.wanted_tokens = match.tokens, match.wanted
        computed = known.computed_tokens
        known.miss = self._misses.explain(match, computed, self._elsewhere)
        if slower and known.miss is not None:
            detail = {**known.miss.detail, "slower_tokens": slower}
            known.miss = replace(known.miss, detail=detail)
        if match.reason is MatchReason.TOO_SHORT:
            self._look_at_adapter(known)
        if known.most < NO_LIMIT:
            shortfall, known.most = _NO_ROOM, NO_LIMIT
        if shortfall is not None and known.miss is not None:
            reason, text = shortfall
            detail = {**known.miss.detail, "text": text, "slab": known.miss.reason}
            detail.pop("age_s", None)
            known.miss = replace(known.miss, reason=reason, detail=detail)
        totals: dict[str, float] = {_LOOKUPS: 1}
        if known.wanted_tokens:
            totals[_WANTED] = known.wanted_tokens
        if known.miss is not None:
            totals[_MISSED[known.miss.reason]] = 1
        self._counters.add_all(totals)

    def _limited(
        self, known: Known, match: PrefixMatch, hashes: Sequence[bytes]
    ) -> PrefixMatch:
        """
        Say who limits a hit: the request or the engine, or else what ranks elsewhere have.

        Behind that nobody has looked: the block there may be missing here as well.
        """
        most = min(known.wishes.most_loaded, known.most)
        if match.tokens + self._layout.alignment_tokens > most:
            return match
        layout, missing = self._layout, None
        for group in layout.groups:
            at = (known.computed_tokens + match.tokens) // group.block_tokens
            mine = layout.hashes_of(group, hashes, at, at + 1)
            if group.kind is GroupKind.FULL and mine:
                missing = MissingBlock(group, at, mine[0])
                break
        reason = MatchReason.ELSEWHERE
        return PrefixMatch(match.tokens, reason, match.wanted, missing)

    def _look_at_adapter(self, known: Known) -> None:
        """Say why a request has no hashes, and what it wanted, if that is because of its adapter."""
        if problem := self._problem_of(known.request.request_id):
            reason = MissReason.LATE if problem == LATE else MissReason.UNKEYED
            known.miss = Miss(reason, {"text": f"its adapter: {problem}"})
            block = self._layout.alignment_tokens
            wanted = (known.request.num_tokens - 1) // block * block
            known.wanted_tokens = max(0, wanted - known.computed_tokens)

    def _has_ample_room(self, num_tokens: int) -> bool:
        """Return whether the engine has far more free blocks than so many tokens need."""
        count = getattr(self.block_pool, "get_num_free_blocks", None)
        groups = self._layout.groups
        needed = sum(-(-num_tokens // group.block_tokens) for group in groups)
        return count is not None and count() >= 2 * needed + _AMPLE
