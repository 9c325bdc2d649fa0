# SPDX-License-Identifier: Apache-2.0
"""
What this scheduler knows of blocks that it did not get saved, or that went bad. Pure.

Bounds: 65536 blocks in a mebibyte, whatever happens, and 1024 of one request; later ones
take the places of others. How much is forgotten, and how seldom a block is taken for
another one, is told in ``ucm.fates``. What was saved after all, and lost again later, may
still be remembered: then the more recent word of the store is believed.
"""

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from ucm.fates import Sketch
from ucm.layout import GroupKind, KVLayout
from ucm.reasons import MissReason, Reason
from ucm.scheduler.decoded import Decoded
from ucm.scheduler.requests import NO_LIMIT, RequestEnd

__all__ = ["LOAD_FAILED", "NOT_TAKEN", "Unsaved", "Why"]

_ENTRIES: Final = 1 << 16
_MOST_OF_ONE: Final = 1024


class Why(NamedTuple):
    """
    Why a block is not stored, for all that is known here.

    Args:
        reason: In a word of metrics.
        detail: More exactly.
    """

    reason: MissReason
    detail: str


NOT_TAKEN: Final = Why(MissReason.QUEUE, "not_taken")
"""No plan had room for it in time."""
LOAD_FAILED: Final = Why(MissReason.FAILED, "load_failed")
"""It was computed behind blocks that did not come, and its request had ended by then."""
_WISH: Final = Why(MissReason.ADMISSION, "wish")
_DECODED: Final = Why(MissReason.ADMISSION, "save_decoded")
_SHORT: Final = Why(MissReason.ADMISSION, "shortest_saved_tokens")
_QUEUE: Final = frozenset(
    (
        *(Reason.QUEUE_TICKETS, Reason.QUEUE_BYTES),
        *(Reason.STORE_BEHIND, Reason.OVERLOAD),
    )
)


def _why(reason: Reason) -> Why:
    """Return what the end of a ticket says of its blocks."""
    if reason is Reason.CORRUPT:
        return Why(MissReason.CORRUPT, reason)
    if reason is Reason.EVICTED:
        return Why(MissReason.EVICTED, reason)
    return Why(MissReason.QUEUE if reason in _QUEUE else MissReason.FAILED, reason)


_OF_ENDS: Final = {reason: _why(reason) for reason in Reason}
_WHYS: Final = (NOT_TAKEN, LOAD_FAILED, _WISH, _DECODED, _SHORT, *_OF_ENDS.values())
_CODES: Final = {why: code for code, why in enumerate(_WHYS, start=1)}


class Unsaved:
    """
    A sketch of these blocks, by group and the engine's hash.

    Used on the scheduler's thread only.
    """

    def __init__(self) -> None:
        self._is_empty = True
        self._sketch = Sketch(np.zeros((2, _ENTRIES), dtype=np.uint64))

    def put(self, group_id: int, hashes: Sequence[bytes], why: Why, now: float) -> None:
        """Put down the same of some blocks of a group, if any; *now* is in seconds."""
        if not hashes:  # as of each state that a plan has room for
            return
        self._is_empty = False
        prints = map(xxh3_64_intdigest, hashes, itertools.repeat(group_id))
        self._sketch.put(
            np.fromiter(prints, dtype=np.uint64, count=len(hashes)),
            _CODES[why],
            int(now * 1000),
        )

    def ended(
        self, group_id: int, hashes: Sequence[bytes], reason: Reason, now: float
    ) -> None:
        """Put down how the ticket of these blocks ended."""
        self.put(group_id, hashes, _OF_ENDS[reason], now)

    def passed_over(
        self, layout: KVLayout, end: RequestEnd, now: float, decoded: Decoded
    ) -> None:
        """Put down what of a request was not to be saved, by its wish or a setting."""
        wish, prompt = end.wishes.most_saved, end.prompt_tokens
        is_short = decoded.is_short(end.accepted_tokens, prompt)
        saves_all = decoded.saves_all(end.accepted_tokens, prompt)
        setting = 0 if is_short else NO_LIMIT if saves_all else prompt
        if min(wish, setting) >= end.accepted_tokens:
            return
        hashed = len(end.hashes) * layout.hash_block_tokens
        for group in layout.groups:
            if group.kind is GroupKind.STATE:
                continue
            size = group.block_tokens
            start = min(wish, setting) // size
            stop = min(end.accepted_tokens, hashed) // size
            blocks = range(start, min(stop, start + _MOST_OF_ONE))
            self.put(
                group.group_id,
                layout.hashes_of(group, end.hashes, blocks.start, blocks.stop),
                _WISH if wish <= setting else _SHORT if is_short else _DECODED,
                now,
            )

    def of(
        self, group_id: int, block_hash: bytes, now: float
    ) -> tuple[Why, float] | None:
        """Return what is known of a block, and how many seconds it is old."""
        if self._is_empty:
            return None
        found = self._sketch.get(xxh3_64_intdigest(block_hash, group_id))
        if found is None:
            return None
        code, moment_ms = found
        return _WHYS[code - 1], now - moment_ms / 1000
