# SPDX-License-Identifier: Apache-2.0
"""
Which tier has which block of one who wants some: who is asked, for what, and how long is waited.

Each tier is asked for what those before it lack. One of which a call takes an eighth of the time that there
is, is *late*: the next one is asked for the same. What several have the first of them brings; what one has
comes, whether those before it have told or not. For what may be in a late one alone it is waited until half
of the time is over, and on only while nothing that was told is of use. A tier has one question at a time of
each who wants blocks; one that nobody waits for goes on, so that a tier that hangs is found out.
"""

import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel
import attrs
from anyio.abc import TaskGroup

from ucm.agent.calls import Parts
from ucm.agent.hits import Search
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
    has: set[PackedKey] = attrs.Factory(set)
    """What it told that it has."""
    began: float = 0.0
    called: float = 0.0
    """Likewise, the last call of this question."""
    is_asked: bool = False

    async def hear(
        self,
        keys: Sequence[PackedKey],
        answers: Sequence[Presence],
        there: set[PackedKey],
    ) -> None:
        """Take note of what it told; add what it has to what is *there*."""
        async for some in Parts(zip(keys, answers, strict=True)):
            self.told.update(some)
            has = [key for key, each in some if each is Presence.PRESENT]
            self.has.update(has)
            there.update(has)

    async def lacks(
        self, keys: Sequence[PackedKey], untold: set[PackedKey], *, is_along: bool
    ) -> tuple[list[PackedKey], list[PackedKey]]:
        """
        Return of which blocks it has not told, and which it has not as far as it has told.

        Args:
            keys: Those.
            untold: The former are added.
            is_along: Up to the first that it told that it has not.
        """
        asked: list[PackedKey] = []
        lacked: list[PackedKey] = []
        async for some in Parts(keys):
            is_gap = is_along and self._cut_at_gap(some)
            asked += (new := [key for key in some if key not in self.told])
            untold.update(new)
            lacked += [key for key in some if key not in self.has]
            if is_gap:
                break
        return asked, lacked

    def _cut_at_gap(self, keys: list[PackedKey]) -> bool:
        """Leave those up to the first that it told that it has not; return whether there is one."""
        for at, key in enumerate(keys):
            if key in self.told and key not in self.has:
                del keys[at + 1 :]
                return True
        return False


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
        self._there: set[PackedKey] = set()
        """What some tier has, as far as it was told."""

    def pass_over(self, key: PackedKey, numbers: Collection[int]) -> None:
        """Have only these tiers be asked for a block: others did not bring it."""
        for number, one in self._tiers.items():
            if number not in numbers:
                one.told[key] = Presence.ABSENT

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
            told, there = self._told, await self.have(keys)
            num_there = there.index(False) if False in there else len(keys)
            if num_there >= num_needed or not self._is_awaited(keys[num_there]):
                return await self._places_of(keys[:num_there])
            await self._more(told)

    async def choose(
        self, begin: Callable[[], Search], keys: Sequence[PackedKey]
    ) -> tuple[int, int | None]:
        """
        Search among hits, as far as is told in time; while there is none, anew with each answer.

        Args:
            begin: Begins a search.
            keys: Of its blocks.

        Returns:
            What the search does.
        """
        while True:
            hit, lacked, gone = await self._answered(begin(), keys)
            if hit or lacked is None or not await self._is_news(gone):
                return hit, lacked

    async def ask(self, keys: Sequence[PackedKey], *, is_prefix: bool) -> None:
        """
        Ask for blocks, until all is told, or time is over.

        Args:
            keys: Those.
            is_prefix: Nothing is of use behind the first that is nowhere.
        """
        while True:
            told = self._told
            until = await self._next(keys, told, is_prefix=is_prefix)
            if told is self._told:  # else more was told meanwhile
                if until <= anyio.current_time():
                    break
                with anyio.move_on_at(until):
                    await told.wait()

    async def have(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return of each block whether some tier has it, as far as it was told."""
        there: list[bool] = []
        async for some in Parts(keys):
            there += [key in self._there for key in some]
        return there

    async def _answered(
        self, search: Search, keys: Sequence[PackedKey]
    ) -> tuple[int, int | None, list[PackedKey]]:
        """Return what is found, and what was looked for in vain."""
        gone: list[PackedKey] = []
        try:
            question = next(search)
            while True:
                asked = [keys[at] for at in question.blocks]
                await self.ask(asked, is_prefix=question.is_prefix)
                there = await self.have(asked)
                gone += itertools.compress(asked, map(operator.not_, there))
                question = search.send(there)
                await anyio.lowlevel.checkpoint()  # all may be told already
        except StopIteration as over:
            return *over.value, gone

    async def _is_news(self, gone: Sequence[PackedKey]) -> bool:
        """Return whether one of these is there by now, or else once a tier has told more; no: none will."""
        told, is_there = self._told, False
        async for some in Parts(gone):
            is_there = is_there or not self._there.isdisjoint(some)
        return is_there or await self._more(told)

    async def _more(self, told: anyio.Event) -> bool:
        """Wait until a tier has told more than by *told*, however long; return whether any was asked."""
        if told is self._told and not any(one.is_asked for one in self._tiers.values()):
            return False
        await told.wait()
        return True

    async def _places_of(self, keys: Sequence[PackedKey]) -> list[int]:
        """Return of blocks that are there the numbers of the first tiers that have them."""
        places: list[int] = []
        has = [(number, one.has) for number, one in self._tiers.items()]
        async for some in Parts(keys):
            first: dict[PackedKey, int] = {}
            for number, its in reversed(has):
                first.update(
                    zip(filter(its.__contains__, some), itertools.repeat(number))
                )
            places += map(first.__getitem__, some)
        return places

    def _is_awaited(self, key: PackedKey) -> bool:
        tiers = self._tiers.values()
        return any(one.is_asked and key not in one.told for one in tiers)

    async def _next(
        self, keys: Sequence[PackedKey], told: anyio.Event, *, is_prefix: bool
    ) -> float:
        """Ask whose turn it is by *told*; return until when answers are waited for."""
        late: set[PackedKey] = set()
        last = next(reversed(self._tiers.values()), None)
        for one in self._tiers.values():
            is_along = is_prefix and one is last
            asked, keys = await one.lacks(keys, late, is_along=is_along)
            if told is not self._told:  # what is asked for may be told by now
                return _NOT_WAITED
            if asked and not one.is_asked:
                self._begin(one, asked, is_along=is_along)
            if asked and (late_at := self._late_at(one)) > anyio.current_time():
                return late_at
        is_late = False
        async for some in Parts(keys):
            is_late = is_late or not late.isdisjoint(some)
        return self._half if is_late else _NOT_WAITED

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
                    left = keys[at:]
                    unknown = [Presence.UNKNOWN] * len(left)
                    await one.hear(left, unknown, self._there)
                    break
                some = keys[at : at + size]
                look = look_along(tier, some) if is_along else tier.exists(some)
                answers = await look
                if is_along and Presence.ABSENT in answers:  # behind it is a guess
                    answers = answers[: answers.index(Presence.ABSENT) + 1]
                    some = some[: len(answers)]
                await one.hear(some, answers, self._there)
                if at == 0 and anyio.current_time() >= self._half:
                    self._tell()  # the first is of use without those behind it
            left = keys[:0]
        finally:  # also where all ends meanwhile
            for key in left:
                one.told.setdefault(key, Presence.UNKNOWN)
            one.is_asked = False
            self._tell()

    def _tell(self) -> None:
        told, self._told = self._told, anyio.Event()
        told.set()
