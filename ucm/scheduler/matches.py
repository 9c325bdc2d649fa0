# SPDX-License-Identifier: Apache-2.0
"""What a look-up says: how much can be loaded, why not more, and for want of what."""

import enum
from collections.abc import Sequence

import msgspec

from ucm.blocks import PackedKey
from ucm.layout import GroupLayout

__all__ = ["MatchReason", "MissingBlock", "PrefixMatch"]


class MatchReason(enum.StrEnum):
    """Why a match has the length it has."""

    HIT = "hit"
    MISS = "miss"
    """Not even the first block beyond the computed ones can be loaded."""
    TOO_SHORT = "too_short"
    """No whole block is left beyond the computed ones."""
    PARTIAL_BLOCK = "partial_block"
    """The engine's own hit ends inside a block; a load would overwrite it."""
    LOAD_FAILED = "load_failed"
    """A load failed and named no block; another one might fail for ever."""
    LONG_ID = "long_id"
    """The request's id does not fit into a message."""
    NO_ROOM = "no_room"
    """The loads of others leave no room in the step's plan."""
    LIMITED = "limited"
    """The request says that no more of it is to be loaded."""
    ELSEWHERE = "elsewhere"
    """A rank on another machine has no more of it."""
    SLOWER = "slower"
    """Loading it is predicted to take longer than computing it."""
    UNAVAILABLE = "unavailable"
    """The store did not answer."""
    PAUSED = "paused"
    """The store is not asked for a while."""
    UNKEYED = "unkeyed"
    """It is not known yet what the ranks store under."""
    BYPASS = "bypass"
    """The worker's runtime has failed; nothing is loaded any more."""


class MissingBlock(msgspec.Struct, frozen=True, gc=False):
    """
    Where a prefix ends that can be loaded.

    Args:
        group: Whose block is missing.
        at: Its position in the request's block table.
        block_hash: The engine's.
        keys: Of its parts, if they were made for the look.
    """

    group: GroupLayout
    at: int
    block_hash: bytes
    keys: Sequence[PackedKey] = ()


class PrefixMatch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """
    The answer to one look-up.

    Args:
        tokens: Tokens to load beyond those that are computed.
        reason: Why it is not more.
        wanted: Tokens of all whole blocks beyond those that are computed.
        missing: The block for want of which it is not as many.
    """

    tokens: int
    reason: MatchReason
    wanted: int = 0
    missing: MissingBlock | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixMatch):
            return NotImplemented
        return (self.tokens, self.reason) == (other.tokens, other.reason)

    def __hash__(self) -> int:
        return hash((self.tokens, self.reason))

    @property
    def is_whole(self) -> bool:
        """Whether all that was looked for is there, be it nothing."""
        is_answered = self.reason in (MatchReason.HIT, MatchReason.TOO_SHORT)
        return is_answered and self.missing is None
