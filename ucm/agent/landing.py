# SPDX-License-Identifier: Apache-2.0
"""What came from a tier into slots becomes visible there, once its checksum was compared."""

from collections.abc import Sequence
from typing import Final

from ucm.backends.abc import Fetched, Verdict, block_checksum
from ucm.blocks import PackedKey
from ucm.reasons import Reason
from ucm.stores.abc import Store, WriteLease

__all__ = ["REASONS", "land"]

REASONS: Final = {
    Verdict.ABSENT: Reason.ABSENT,
    Verdict.GARBAGE: Reason.CORRUPT,
    Verdict.UNAVAILABLE: Reason.UNAVAILABLE,
}
"""What a tier says of a block that did not come."""


def land(
    store: Store,
    lease: WriteLease,
    answers: Sequence[Fetched],
    left: Sequence[PackedKey],
) -> tuple[list[Reason], list[bool]]:
    """
    Make visible what came whole, on a thread.

    Returns:
        Why the others did not, and which of those *left* are there.
    """
    reasons = []
    for at, (key, answer) in enumerate(zip(lease.keys, answers, strict=True)):
        reason = Reason.NONE
        if answer.verdict is not Verdict.DONE:
            reason = REASONS.get(answer.verdict, Reason.ERROR)
        elif block_checksum(key, lease.slots.block(at).data) != answer.checksum:
            reason = Reason.CORRUPT
        else:
            lease.seal(at, at + 1)
        reasons.append(reason)
    lease.commit(without=[at for at, reason in enumerate(reasons) if reason])
    return reasons, store.contains(left) if left else []
