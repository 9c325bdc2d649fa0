# SPDX-License-Identifier: Apache-2.0
"""
What came from a tier into slots becomes visible there, once its checksum was compared.

Unless it is kept out, as somebody wants it forgotten. That is looked at before and behind: whoever
keeps it out later takes it out of the slab behind that.
"""

from collections.abc import Callable, Sequence
from typing import Final

from ucm.backends.abc import Fetched, Verdict
from ucm.blocks import PackedKey
from ucm.reasons import Reason
from ucm.stores.abc import WriteLease

__all__ = ["REASONS", "land"]

REASONS: Final = {
    Verdict.ABSENT: Reason.ABSENT,
    Verdict.GARBAGE: Reason.CORRUPT,
    Verdict.UNAVAILABLE: Reason.UNAVAILABLE,
}
"""What a tier says of a block that did not come."""


def land(
    lease: WriteLease,
    answers: Sequence[Fetched],
    keep: Callable[[Sequence[PackedKey]], None],
    kept_out: Callable[[], Sequence[int]],
    forget: Callable[[Sequence[PackedKey]], object],
) -> list[Reason]:
    """
    Make visible what came whole, on a thread, and *keep* it; return why the others did not.

    What is *kept_out*, by its number, does not become visible; or is taken back by *forget*.
    Bytes are hashed once, here or where they were read: what seals a slot is what travelled with
    the block, or is not it.
    """
    done = [at for at, each in enumerate(answers) if each.verdict is Verdict.DONE]
    seals = dict(zip(done, _seal(lease, answers, done), strict=True))
    reasons = [
        REASONS.get(answer.verdict, Reason.ERROR)
        if at not in seals
        else (Reason.NONE if seals[at] == answer.checksum else Reason.CORRUPT)
        for at, answer in enumerate(answers)
    ]
    for at in kept_out():
        reasons[at] = Reason.ABSENT
    lease.commit(without=[at for at, reason in enumerate(reasons) if reason])
    keep([key for key, why in zip(lease.keys, reasons, strict=True) if not why])
    if late := [at for at in kept_out() if not reasons[at]]:
        forget([lease.keys[at] for at in late])
        for at in late:
            reasons[at] = Reason.ABSENT
    return reasons


def _seal(
    lease: WriteLease, answers: Sequence[Fetched], done: Sequence[int]
) -> list[int]:
    """Take the bytes of what came as final; return their checksums."""
    digests = [answer.digest for answer in answers]
    known = [each for each in map(digests.__getitem__, done) if each is not None]
    if done and lease.takes_digests and len(known) == len(done):
        # What did not come is left out by the commit.
        lease.seal_with([each or 0 for each in digests])
        return known
    is_all = len(done) == len(answers)
    seals: list[int] = []
    for run in [range(len(done))] if is_all else [range(at, at + 1) for at in done]:
        lease.seal(run.start, run.stop)
        seals += lease.seals(run.start, run.stop)
    return seals
