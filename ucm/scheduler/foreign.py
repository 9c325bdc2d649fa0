# SPDX-License-Identifier: Apache-2.0
"""
Blocks that another connector loads within a step. Pure.

Beside others, a request may be served by one of them, and run in the same step. Whether its blocks
came shows in the step's output, which the engine may have only some plans later. If not, the
engine goes back and computes them again. Until then these blocks are *in doubt*, and so is what is
computed on top of them: nothing is saved of a life that stands on any, also of another request
that the engine lets share them, whose own blocks are in doubt as well. A doubt is like a load of
ours that such lives wait for.

Blocks that did not come are *bad* until somebody computes them again, and so are those that were computed
on top of them. An engine goes on to share them meanwhile, so that of lives that read one nothing is saved;
of one that goes back to before them, what it computes from there on is.

An engine takes blocks back only where there is one group. So nothing is in doubt where
there are several, nor where that one holds states.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ucm.layout import GroupKind, KVLayout
from ucm.scheduler.lives import Life, Lives
from ucm.scheduler.messages import SpanOrder
from ucm.scheduler.requests import NO_LIMIT, NULL_BLOCK, ScheduledRequest, StepFacts

__all__ = ["Foreign"]


class _Doubt(msgspec.Struct, eq=False):
    """
    Blocks of one life.

    Args:
        life: For which they are loaded.
        until: The plan by which the output of the step that loads them has come.
        start: Index of the first one.
        tokens: That are there if they came.
        block_ids: Which, and those that become whole behind them.
        on: Doubts on which these stand, if nobody loads them: they are computed on top.
        is_unsure: Some are in another doubt as well: the engine took them from one that ended. Of
            which an output speaks is not known, so that its own may be under way.
    """

    life: tuple[str, int]
    until: int
    start: int
    tokens: int
    block_ids: Sequence[int] = ()
    on: Collection[int] = ()
    is_unsure: bool = False


class Foreign:
    """
    What is in doubt, and what is bad.

    Used by ``SchedulerAdapter`` on the scheduler's thread, and only while somebody is served so: an engine
    without such a connector asks nothing here. ``lost`` is called by the door.

    Args:
        layout: The engine's groups.
        lives: Told what they wait for.
        batches: Steps that the engine plans before it has the output of the first of them.
    """

    def __init__(self, layout: KVLayout, lives: Lives, batches: int) -> None:
        group = layout.groups[0]
        is_told = len(layout.groups) == 1 and group.kind is not GroupKind.STATE
        self._size = group.block_tokens if is_told else 0
        """Tokens of a block; 0: nothing is ever in doubt."""
        self._layout, self._lives, self._batches = layout, lives, batches
        self._ids = itertools.count(-1, -1)  # those of our own loads are above 0
        self.doubts: dict[int, _Doubt] = {}
        """Those that are open, by a number below 0."""
        self.bad: set[int] = set()
        """Blocks that did not come or were computed on top of such, and that nobody has computed anew."""

    def plan_begins(self, step: int, facts: StepFacts | None) -> None:
        """End the doubts that no output has borne out by the plan of this number."""
        over = [at for at, doubt in self.doubts.items() if doubt.until <= step]
        self._end(over)
        self.bad.difference_update(facts.allocated if facts else ())

    def look(
        self,
        step: int,
        facts: StepFacts,
        lives: Sequence[Life],
        loads: Iterable[SpanOrder],
    ) -> None:
        """
        Take note of what others load in a step, and of who stands on it.

        Args:
            step: Number of the plan.
            facts: Of the step.
            lives: Of those who are looked at.
            loads: Our own of the step.
        """
        if not (size := self._size):
            return
        looks = list(zip(facts.scheduled, lives, strict=True))
        for request, life in looks:
            if request.computed_tokens > request.own_tokens:
                self._open(step, request, life)
            elif self.doubts:
                self._follow(request, life)
        spoiled = [each for each, life in looks if self._spoils(step, each, life)]
        if self.bad:
            self.bad -= facts.written_blocks(self._layout, loads)
            for request, life in looks:
                whole = request.computed_tokens // size, request.end_tokens // size
                if life.may_save:  # else it may compute them on top of bad ones
                    self.bad.difference_update(request.tables[0][slice(*whole)])
        # Whoever shares what these compute later shares what they have by now, too.
        for request in spoiled:
            self.bad.update(request.tables[0][request.computed_tokens // size :])
        self.bad.discard(NULL_BLOCK)

    def look_again(self, facts: StepFacts, lives: Sequence[Life]) -> None:
        """Have who is yet to compute bad blocks anew be looked at in the next step, though nothing is saved."""
        for request, life in zip(facts.scheduled, lives, strict=True):
            rest = request.tables[0][request.end_tokens // self._size :]
            if life.may_save and not self.bad.isdisjoint(rest):
                life.due = 0

    def lost(self, block_ids: Collection[int]) -> None:
        """Take note that these blocks did not come, as the engine has heard by now."""
        first = {}
        for number, doubt in self.doubts.items():
            lost = [each in block_ids for each in doubt.block_ids]
            if any(lost):
                first[number] = doubt.start + lost.index(True)
        self._take_back(first)

    def _spoils(self, step: int, request: ScheduledRequest, life: Life) -> bool:
        """Look at what a request stands on; return whether that is bad, and so what it computes."""
        is_bad = request.computed_tokens > life.good_tokens
        life.good_tokens = NO_LIMIT  # it went back, or is not saved any more
        if request.is_new:
            prefix = set(request.prefix_blocks(self._layout.groups[0], 0))
            prefix.discard(NULL_BLOCK)
            if on := self._standing_on(prefix) - life.loads:
                self._lives.waits(life, on)
                self._open(step, request, life, on)
            is_bad |= not self.bad.isdisjoint(prefix)
        life.may_save &= not is_bad
        return is_bad

    def _open(
        self,
        step: int,
        request: ScheduledRequest,
        life: Life,
        on: Collection[int] = (),
    ) -> None:
        tokens = request.computed_tokens
        start = min(request.own_tokens, tokens) // self._size
        doubt = _Doubt(life.key, step + self._batches, start, tokens, on=on)
        self._grow(doubt, request)
        number = next(self._ids)
        self.doubts[number] = doubt
        self._lives.waits(life, [number])
        self.bad.difference_update(doubt.block_ids)

    def _follow(self, request: ScheduledRequest, life: Life) -> None:
        """Look at one that goes on: whether it went back, and what it computes on top."""
        first = {}
        for number, doubt in self.doubts.items():
            if doubt.life != life.key:
                continue
            if request.computed_tokens < doubt.tokens:
                first[number] = max(doubt.start, request.computed_tokens // self._size)
            else:
                self._grow(doubt, request)
        self._take_back(first)

    def _grow(self, doubt: _Doubt, request: ScheduledRequest) -> None:
        """Take in what a step of its request makes whole."""
        stop = max(-(-doubt.tokens // self._size), request.end_tokens // self._size)
        doubt.block_ids = request.tables[0][doubt.start : stop]
        others = [each for each in self.doubts.values() if each.life != doubt.life]
        mine = set(doubt.block_ids)
        doubt.is_unsure |= any(not mine.isdisjoint(one.block_ids) for one in others)

    def _standing_on(self, block_ids: set[int]) -> set[int]:
        doubts = self.doubts.items()
        return {at for at, each in doubts if not block_ids.isdisjoint(each.block_ids)}

    def _take_back(self, first: Mapping[int, int]) -> None:
        """End doubts that were right; of each is told which block is the first bad one."""
        if not first:
            return
        first = dict(first)
        for number, doubt in self.doubts.items():  # in the order in which they stand
            if number not in first and not first.keys().isdisjoint(doubt.on):
                first[number] = doubt.start
        for number, at in first.items():
            doubt = self.doubts[number]
            self.bad.update(doubt.block_ids[at - doubt.start :])
        self.bad.discard(NULL_BLOCK)
        for life in self._lives.loading():
            if on := [first[number] for number in life.loads if number in first]:
                good = min(on) * self._size
                life.good_tokens = min(life.good_tokens, good)
                life.may_save &= not life.is_over  # nobody computes it again
        self._end([at for at in first if not self.doubts[at].is_unsure])

    def _end(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self.doubts[number]
        self._lives.loads_ended(numbers)
