# SPDX-License-Identifier: Apache-2.0
"""Where tickets come from and how they end, and what an error makes of one; pure."""

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

import attrs

from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    DeviceError,
    StoreFullError,
    StoreUnavailableError,
    WorkerDiedError,
    text_of,
)
from ucm.pipeline.guard import TicketOverError
from ucm.reasons import Reason

__all__ = [
    "NOWHERE",
    "Origin",
    "Outcome",
    "OutcomeKind",
    "outcome_of",
    "outcome_of_save",
]


class Origin(NamedTuple):
    """
    Where orders come from, for the log.

    Args:
        step: The engine's step; 0 where there is none.
        traces: By ticket, the W3C ``traceparent`` of the request that it is for.
    """

    step: int
    traces: Mapping[int, str]


NOWHERE: Final = Origin(0, {})


class OutcomeKind(enum.Enum):
    """How blocks end."""

    COMMITTED = "committed"
    SKIPPED = "skipped"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # Enum's own is slow, and every end is counted by it


@attrs.frozen
class Outcome:
    """
    The last word on a ticket.

    Args:
        kind: How the ticket as a whole ended; blocks that are neither committed nor
            skipped ended this way.
        reason: Why it is no plain success.
        committed: Blocks that were stored, or loaded.
        skipped: Blocks that needed no work because the store has them.
        bad_key: For a failed load, the packed key to blame; otherwise empty.
        error: Text of the exception behind a failure.
    """

    kind: OutcomeKind
    reason: Reason = Reason.NONE
    committed: int = attrs.field(default=0, kw_only=True)
    skipped: int = attrs.field(default=0, kw_only=True)
    bad_key: bytes = attrs.field(default=b"", kw_only=True)
    error: str = attrs.field(default="", kw_only=True)


_REASONS: dict[type[Exception], Reason] = {
    BlockCorruptError: Reason.CORRUPT,
    BlockNotFoundError: Reason.EVICTED,
    StoreUnavailableError: Reason.UNAVAILABLE,
    DeviceError: Reason.DEVICE,
    WorkerDiedError: Reason.WORKER_DIED,
}


def outcome_of(error: Exception) -> Outcome:
    """Return what a stage's error makes of its ticket."""
    if isinstance(error, TicketOverError):
        return Outcome(OutcomeKind.CANCELLED, error.reason)
    if isinstance(error, StoreFullError):
        return Outcome(OutcomeKind.REFUSED, Reason.STORE_FULL, error=str(error))
    known = (word for kind, word in _REASONS.items() if isinstance(error, kind))
    bad_key = b""
    if isinstance(error, (BlockCorruptError, BlockNotFoundError)):
        bad_key = error.key
    reason = next(known, Reason.ERROR)
    return Outcome(OutcomeKind.FAILED, reason, bad_key=bad_key, error=text_of(error))


def outcome_of_save(
    num_blocks: int, *, committed: int, stored: int, lost: int, lost_as: Reason
) -> Outcome:
    """
    Return what a commit makes of a save.

    Args:
        num_blocks: Of the save; for those that are in none of the others was no room.
        committed: Blocks that are visible now.
        stored: Blocks that were there before, or came from somebody else meanwhile.
        lost: Blocks in slots that the engine has overwritten.
        lost_as: Why, if any were.
    """
    kind, reason = OutcomeKind.SKIPPED, Reason.STORED
    if lost:
        kind, reason = OutcomeKind.CANCELLED, lost_as
    elif committed + stored < num_blocks:
        kind, reason = OutcomeKind.REFUSED, Reason.STORE_FULL
    elif committed:
        kind, reason = OutcomeKind.COMMITTED, Reason.NONE
    return Outcome(kind, reason, committed=committed, skipped=stored)
