# SPDX-License-Identifier: Apache-2.0
"""What came from a tier into slots becomes visible there, once its checksum was compared."""

import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from ucm.backends.abc import Fetched, Verdict
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

    Bytes are hashed once: what seals a slot is what travelled with the block, or is not it. Where
    a tier compared them as they came, not again.

    Returns:
        Why the others did not, and which of those *left* are there.
    """
    seals: dict[int, int] = {}
    for run in _runs(answers):
        checksums = [answers[at].checksum for at in run]
        if answers[run.start].is_checked:
            lease.seal_as(run.start, checksums)
        else:
            lease.seal(run.start, run.stop)
            checksums = lease.seals(run.start, run.stop)
        seals |= zip(run, checksums, strict=True)
    reasons = [
        REASONS.get(answer.verdict, Reason.ERROR)
        if at not in seals
        else (Reason.NONE if seals[at] == answer.checksum else Reason.CORRUPT)
        for at, answer in enumerate(answers)
    ]
    lease.commit(without=[at for at, reason in enumerate(reasons) if reason])
    return reasons, store.contains(left) if left else []


def _runs(answers: Sequence[Fetched]) -> Iterator[range]:
    """Yield blocks side by side that came, and that a tier compared or did not."""
    start = 0
    for _, alike in itertools.groupby(answers, attrgetter("verdict", "is_checked")):
        run = list(alike)
        if run[0].verdict is Verdict.DONE:
            yield range(start, start + len(run))
        start += len(run)
