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

import anyio
from anyio.abc import TaskGroup

from ucm.backends.abc import Backend, Presence
from ucm.backends.wrap import WrapperBackend
from ucm.blocks import PackedKey

__all__ = ["LastingLooks", "look_along", "look_before_put", "look_through"]

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


async def look_through(
    tiers: Sequence[Backend], keys: Sequence[PackedKey], *, is_prefix: bool
) -> list[Presence]:
    """Return which blocks some tier has, asking each for what those before it lack."""
    told = [Presence.ABSENT] * len(keys)
    for tier in tiers:
        left = [at for at, one in enumerate(told) if one is not Presence.PRESENT]
        asked = [keys[at] for at in left]
        if is_prefix and tier is tiers[-1]:
            answers = await look_along(tier, asked)
        else:  # in calls that are over in time, also where each look is a request
            size, answers = tier.capabilities.batch_blocks, []
            for at in range(0, len(asked), size):
                answers += await tier.exists(asked[at : at + size])
        for at, answer in zip(left, answers, strict=True):
            if answer is Presence.PRESENT or told[at] is Presence.ABSENT:
                told[at] = answer
    return told


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


class LastingLooks(WrapperBackend):
    """
    A tier whose looks go on when who has asked is gone.

    Who wants blocks waits for less than a call of a tier may take. Were its looks ended with it, it
    would never be seen that a tier hangs, and all who come behind would wait for it, too.

    Args:
        inner: The tier, whose calls end.
        tasks: In which they go on.
    """

    def __init__(self, inner: Backend, tasks: TaskGroup) -> None:
        super().__init__(inner)
        self._tasks = tasks

    async def exists(self, keys: Sequence[PackedKey]) -> list[Presence]:
        """Forward; unknown where all ends meanwhile."""
        told: list[Presence] = []
        over = anyio.Event()

        async def ask() -> None:
            try:
                told.extend(await self.inner.exists(keys))
            finally:
                over.set()

        self._tasks.start_soon(ask)
        await over.wait()
        return told or [Presence.UNKNOWN] * len(keys)
