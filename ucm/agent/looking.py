# SPDX-License-Identifier: Apache-2.0
"""
Looking for blocks in a tier with fewer questions than there are blocks.

Where each look is a request of its own, it costs as much as moving a small block. What is looked
for is a prefix, so that blocks are mostly there up to one, and not behind it; and what was
computed is mostly in no tier, or it would have been fetched. A guess that was wrong does no harm:
who gets a block, or puts one, is told.
"""

from collections.abc import Sequence
from typing import Final

from ucm.backends.abc import Backend, Presence
from ucm.blocks import PackedKey

__all__ = ["look_along", "look_before_put"]

_PROBES: Final = 16
_SHARE: Final = 8
"""Of so many blocks one is asked for at first: mostly all of them are there, or none."""


async def look_along(tier: Backend, keys: Sequence[PackedKey]) -> list[Presence]:
    """
    Return which blocks of a prefix are there, as if none were missing before one that is.

    What is told first as absent is so; what is missing before that is passed over. Asks in a
    few rounds, of some blocks each, and not on where it gets no answer. A tier of this
    machine, whose looks cost next to nothing, is asked for each.
    """
    if not tier.capabilities.shared:
        return await tier.exists(keys)
    first, stop = 0, len(keys)
    behind = Presence.ABSENT
    most = max(2, min(_PROBES, len(keys) // _SHARE))
    while first < stop and behind is Presence.ABSENT:
        step, most = -(-(stop - first) // most), _PROBES
        probes = sorted({first, *range(stop - 1, first, -step)})
        answers = await tier.exists([keys[at] for at in probes])
        for at, answer in zip(probes, answers, strict=True):
            if answer is not Presence.PRESENT:
                stop, behind = at, answer
                break
            first = at + 1
    return [Presence.PRESENT] * first + [behind] * (len(keys) - first)


async def look_before_put(tier: Backend, keys: Sequence[PackedKey]) -> list[Presence]:
    """
    Return which blocks need not be put; where neither end is there, none is taken to be.

    Of ends that a server of several would have which is away nothing follows for the others.
    """
    if len(keys) <= 2 or not tier.capabilities.creates:
        return await tier.exists(keys)
    first, last = await tier.exists([keys[0], keys[-1]])
    is_one_away = first is Presence.UNKNOWN and tier.away
    if first is last is not Presence.PRESENT and not is_one_away:
        return [first] * len(keys)
    return [first, *await tier.exists(keys[1:-1]), last]
