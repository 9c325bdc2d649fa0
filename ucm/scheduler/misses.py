# SPDX-License-Identifier: Apache-2.0
"""
Why a look-up found less than it might have. Pure.

The look-up says at which block it stopped; of that one block, and once in a life, it is
found out here why it is not there: what was denied or is being saved, as this scheduler
knows; what the store remembers; what this scheduler did not get saved. Of the last two
the more recent counts. If neither knows anything, the block may be there under another
key space; otherwise nobody ever offered it, as far as is remembered.

Error: what both have forgotten counts as never offered (``ucm.fates`` says how much), and
so does what a scheduler of another engine was refused.
"""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from ucm.blocks import PackedKey
from ucm.errors import UCMError, text_of
from ucm.fates import Fate, Told
from ucm.reasons import MissReason, Reason
from ucm.scheduler.matches import MatchReason, MissingBlock, PrefixMatch
from ucm.scheduler.matching import BlockIndex, PrefixMatcher
from ucm.scheduler.transfers import OpenTransfers

__all__ = ["SHORTFALLS", "Elsewhere", "Miss", "Misses"]

Elsewhere = Callable[[PackedKey], Mapping[str, object] | None]
"""Tells how the key space differs under which a block is stored, if there is one."""

_DECLINED: Final = {
    MatchReason.TOO_SHORT: (MissReason.TOO_SHORT, "no whole block"),
    MatchReason.PARTIAL_BLOCK: (
        MissReason.BYPASSED,
        "the engine's own hit ends inside a block",
    ),
    MatchReason.LOAD_FAILED: (MissReason.FAILED, "a load of this request failed"),
    MatchReason.LONG_ID: (MissReason.ADMISSION, "the request's id is too long"),
    MatchReason.LIMITED: (MissReason.ADMISSION, "the request limits what is loaded"),
    MatchReason.NO_ROOM: (MissReason.QUEUE, "the loads of others fill the step's plan"),
    MatchReason.ELSEWHERE: (
        MissReason.UNKNOWN,
        "a rank on another machine lacks its part",
    ),
    MatchReason.SLOWER: (MissReason.SLOWER, "loading was predicted to be slower"),
    MatchReason.UNAVAILABLE: (MissReason.UNAVAILABLE, "the store did not answer"),
    MatchReason.PAUSED: (MissReason.BYPASSED, "the store is not asked for a while"),
    MatchReason.UNKEYED: (
        MissReason.UNKEYED,
        "it is not known what the ranks store under",
    ),
    MatchReason.BYPASS: (MissReason.BYPASSED, "the runtime of a rank has failed"),
}
"""Nothing was looked for, or no answer came."""
SHORTFALLS: Final = {
    Reason.DEADLINE: (MissReason.LATE, "the tiers did not answer in time"),
    Reason.UNAVAILABLE: (MissReason.UNAVAILABLE, "a tier could not be asked"),
    Reason.STORE_FULL: (MissReason.EVICTED, "fetches had their share of the slab"),
    Reason.CORRUPT: (MissReason.CORRUPT, "a tier brought other bytes"),
    Reason.SLOWER: (MissReason.SLOWER, "fetching was predicted to be slower"),
    Reason.ADMISSION: (MissReason.ADMISSION, "no tier takes what was seen once"),
    Reason.QUEUE_TICKETS: (MissReason.QUEUE, "there was no room to ask the tiers"),
}
"""What the end of a question to tiers says of the blocks that the slab lacks."""
_JUST_STORED: Final = MissReason.NOT_COMMITTED, "it was stored just now"
_UNTOLD: Final = MissReason.UNKNOWN, "the store keeps no such things"
_GONE: Final = {
    Fate.EVICTED: MissReason.EVICTED,
    Fate.FORGOTTEN: MissReason.EVICTED,
    Fate.CLEARED: MissReason.EVICTED,
    Fate.CORRUPT: MissReason.CORRUPT,
}


class Miss(msgspec.Struct, frozen=True, gc=False):
    """
    Why a look-up fell short.

    Args:
        reason: In a word.
        detail: More, for people.
        block: The first one missing; None if none was looked for.
        key: Of the first part of that block.
    """

    reason: MissReason
    detail: Mapping[str, object]
    block: MissingBlock | None = None
    key: bytes = b""


class Misses:
    """
    Finds out why.

    Used on the scheduler's thread only.

    Args:
        matcher: Knows the keys of a block.
        index: Remembers what became of blocks.
        transfers: Knows what is on its way, denied, and not saved.
    """

    def __init__(
        self, matcher: PrefixMatcher, index: BlockIndex, transfers: OpenTransfers
    ) -> None:
        self._matcher = matcher
        self._index = index
        self._transfers = transfers

    def explain(
        self, match: PrefixMatch, computed_tokens: int, elsewhere: Elsewhere
    ) -> Miss | None:
        """
        Return why a look-up fell short; None if it did not.

        A request without a whole block counts, unless the engine has blocks of it.

        Args:
            match: What was found.
            computed_tokens: What the engine had itself.
            elsewhere: Asked about a block of which nothing is known.
        """
        if (block := match.missing) is None:
            return _declined(match, computed_tokens)
        matcher = self._matcher
        if not matcher.keyspace_digest:  # weights came into doubt since
            reason, text = _DECLINED[MatchReason.UNKEYED]
            return Miss(reason, {"text": text}, block)
        keys = block.keys or matcher.keys_of(block.group, [block.block_hash])
        try:
            parts = self._index.fates(keys)
            told = parts[0]
            for each in parts:
                if each.fate is not Fate.STORED:
                    told = each
                    break
            is_here = match.reason is MatchReason.ELSEWHERE
            stored = _DECLINED[match.reason] if is_here else _JUST_STORED
            reason, detail = self._reason(block, told, stored)
            if reason is MissReason.NEVER_OFFERED and not match.tokens:
                differs = elsewhere(keys[0])
                if differs is not None:
                    reason, detail = MissReason.OTHER_KEY_SPACE, dict(differs)
        except (KeyboardInterrupt, SystemExit):  # the engine's own, by a signal
            raise
        except BaseException as exc:  # noqa: BLE001 - a store of others, on the engine's thread
            text = str(exc) if isinstance(exc, UCMError) else text_of(exc)
            reason, detail = MissReason.UNAVAILABLE, {"text": text}
        return Miss(reason, detail, block, keys[0])

    def _reason(
        self, block: MissingBlock, told: Told, stored: tuple[MissReason, str]
    ) -> tuple[MissReason, dict[str, object]]:
        """Return why, *told* of the first part that is not there, or that all are: then why is *stored*."""
        transfers, now = self._transfers, self._transfers.denied.now
        group_id, block_hash = block.group.group_id, block.block_hash
        known = transfers.unsaved.of(group_id, block_hash, now)
        detail: dict[str, object] = {}
        if known is not None:
            detail = {"text": known[0].detail, "age_s": round(known[1], 3)}
        if transfers.denied and (group_id, block_hash) in transfers.denied:
            is_corrupt = known is not None and known[0].reason is MissReason.CORRUPT
            return MissReason.CORRUPT if is_corrupt else MissReason.DENIED, detail
        if block_hash in transfers.saving[group_id]:
            return MissReason.NOT_COMMITTED, {"text": "this engine is saving it"}
        if told.fate is Fate.NEVER:  # nearly always
            reason = MissReason.NEVER_OFFERED if known is None else known[0].reason
            return reason, detail
        if told.fate is Fate.WRITING:
            return MissReason.NOT_COMMITTED, {"text": "it is being written"}
        if told.fate is Fate.STORED:
            return stored[0], {"text": stored[1]}
        age_s = told.age_s or 0.0
        if told.fate in _GONE and (known is None or age_s <= known[1]):
            detail = {"text": told.fate.value, "age_s": round(age_s, 3)}
            return _GONE[told.fate], detail
        if known is not None:
            return known[0].reason, detail
        reason, text = _UNTOLD
        return reason, {"text": text}


def _declined(match: PrefixMatch, computed_tokens: int) -> Miss | None:
    """Return why a look-up that lacks no block fell short; None if it did not."""
    declined = _DECLINED.get(match.reason)
    is_all = match.reason is MatchReason.TOO_SHORT and computed_tokens
    if declined is None or is_all:
        return None
    if not match.wanted and match.reason is not MatchReason.TOO_SHORT:
        return None
    reason, text = declined
    return Miss(reason, {"text": text})
