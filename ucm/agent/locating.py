# SPDX-License-Identifier: Apache-2.0
"""
Which tier has which block of one who wants some: who is asked, for what, and how long is waited.

Each tier is asked for what those before it lack. One of which a call takes an eighth of the time that there
is, is *late*: the next one is asked for the same. What several have the first of them brings; what one has
comes, whether those before it have told or not. For what may be in a late one alone it is waited until half
of the time is over, and on only while nothing that was told is of use. A tier has one question at a time of
each who wants blocks; one that nobody waits for goes on, so that a tier that hangs is found out.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

import anyio
import attrs
from anyio.abc import TaskGroup

from ucm.agent.looking import look_along
from ucm.backends.abc import Backend, Presence
from ucm.blocks import PackedKey

__all__ = ["Looks"]

_LATE: Final = 8
"""A call has this part of the time, where another tier could be asked."""
_NOT_WAITED: Final = 0.0


@attrs.define
class _Tier:
    """What one has told so far, and when it was asked what it has not."""

    tier: Backend
    told: dict[PackedKey, Presence] = attrs.Factory(dict)
    began: float = 0.0
    called: float = 0.0
    """Likewise, the last call of this question."""
    is_asked: bool = False


class Looks:
    """
    What tiers tell of the blocks that somebody wants.

    Args:
        tiers: In the order in which they are asked. Their calls end.
        numbers: Of those that may be asked.
        deadline: Until which these blocks are of use.
        tasks: In which questions go on that are not waited for.
    """

    def __init__(
        self,
        tiers: Sequence[Backend],
        numbers: Sequence[int],
        deadline: float,
        tasks: TaskGroup,
    ) -> None:
        now = anyio.current_time()
        seconds = max(0.0, deadline - now)
        self._tiers = {number: _Tier(tiers[number]) for number in numbers}
        self._late_s = seconds / _LATE
        self._half = now + seconds / 2
        self._deadline = deadline
        self._tasks = tasks
        self._told = anyio.Event()

    def pass_over(self, key: PackedKey, numbers: Collection[int]) -> None:
        """Have only these tiers be asked for a block: others did not bring it."""
        for number, one in self._tiers.items():
            if number not in numbers:
                one.told[key] = Presence.ABSENT

    def place_of(self, key: PackedKey) -> int | None:
        """Return the number of the first tier that has a block, as far as it was told."""
        for number, one in self._tiers.items():
            if one.told.get(key) is Presence.PRESENT:
                return number
        return None

    def is_unknown(self, key: PackedKey) -> bool:
        """Return whether some tier has not told of a block that was asked for, and may have it."""
        told = (one.told.get(key) for one in self._tiers.values())
        return Presence.UNKNOWN in told or self._is_awaited(key)

    async def find(self, keys: Sequence[PackedKey], *, is_whole: bool) -> list[int]:
        """
        Return which tiers have the blocks of a prefix, as far as it is found in time.

        Args:
            keys: In the order in which they are of use.
            is_whole: Only all of them are of any use; else the first is.
        """
        num_needed = len(keys) if is_whole else 1
        while True:
            await self.ask(keys, is_prefix=True)
            places: list[int] = []
            for key in keys:
                if (place := self.place_of(key)) is None:
                    break
                places.append(place)
            if len(places) >= num_needed or not self._is_awaited(keys[len(places)]):
                return places
            await self.more()

    async def ask(self, keys: Sequence[PackedKey], *, is_prefix: bool) -> None:
        """
        Ask for blocks, until all is told, or time is over.

        Args:
            keys: Those.
            is_prefix: Nothing is of use behind the first that is nowhere.
        """
        while (until := self._next(keys, is_prefix=is_prefix)) > anyio.current_time():
            await self._wait(until)

    async def more(self) -> bool:
        """Wait until a tier has told more, however long; return whether any was asked."""
        if not any(one.is_asked for one in self._tiers.values()):
            return False
        await self._told.wait()
        return True

    def _is_awaited(self, key: PackedKey) -> bool:
        tiers = self._tiers.values()
        return any(one.is_asked and key not in one.told for one in tiers)

    def _next(self, keys: Sequence[PackedKey], *, is_prefix: bool) -> float:
        """Ask whose turn it is by now; return until when answers are waited for."""
        late: set[PackedKey] = set()
        last = next(reversed(self._tiers.values()), None)
        for one in self._tiers.values():
            is_along = is_prefix and one is last
            keys = _up_to_gap(keys, one.told) if is_along else keys
            asked = [key for key in keys if key not in one.told]
            keys = [key for key in keys if one.told.get(key) is not Presence.PRESENT]
            if asked and not one.is_asked:
                self._begin(one, asked, is_along=is_along)
            if asked and (late_at := self._late_at(one)) > anyio.current_time():
                return late_at
            late.update(asked)
        return _NOT_WAITED if late.isdisjoint(keys) else self._half

    def _late_at(self, one: _Tier) -> float:
        """Return when a call is late; in the second half of the time, when a question is."""
        of_question = max(one.began + self._late_s, self._half)
        return min(one.called + self._late_s, of_question)

    def _begin(self, one: _Tier, keys: Sequence[PackedKey], *, is_along: bool) -> None:
        one.is_asked, one.began = True, anyio.current_time()
        one.called = one.began
        self._tasks.start_soon(partial(self._question, one, keys, is_along=is_along))

    async def _question(
        self, one: _Tier, keys: Sequence[PackedKey], *, is_along: bool
    ) -> None:
        tier, left = one.tier, keys
        size = len(keys) if is_along else tier.capabilities.batch_blocks
        try:
            for at in range(0, len(keys), size):  # in calls that are over in time
                one.called = anyio.current_time()
                if one.called >= self._deadline:  # of no use to anybody
                    break
                some = keys[at : at + size]
                look = look_along(tier, some) if is_along else tier.exists(some)
                answers = await look
                told = list(zip(some, answers, strict=True))
                if is_along and Presence.ABSENT in answers:  # behind it is a guess
                    told = told[: answers.index(Presence.ABSENT) + 1]
                one.told.update(told)
                if at == 0 and anyio.current_time() >= self._half:
                    self._tell()  # the first is of use without those behind it
            else:
                left = keys[:0]
        finally:  # also where all ends meanwhile
            for key in left:
                one.told.setdefault(key, Presence.UNKNOWN)
            one.is_asked = False
            self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, anyio.Event()
        told.set()

    async def _wait(self, until: float) -> None:
        with anyio.move_on_at(until):
            await self._told.wait()


def _up_to_gap(
    keys: Sequence[PackedKey], told: Mapping[PackedKey, Presence]
) -> Sequence[PackedKey]:
    """Return those up to the first that is not there, as far as it was told."""
    there = Presence.PRESENT
    for at, key in enumerate(keys):
        if told.get(key, there) is not there:
            return keys[: at + 1]
    return keys
