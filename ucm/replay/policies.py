# SPDX-License-Identifier: Apache-2.0
"""
Models of a cache of blocks: who is kept when room is short.

Most order blocks by one number, the moment of their use, and differ in that moment only.
These are told apart by ``Stamped.moments``; ``tests/replay/test_policies.py`` holds ``Ours`` and
``Newcomers`` against the stores of the package, request by request.
"""

import heapq
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from ucm.replay.policy import Policy
from ucm.replay.published import ARC, S3FIFO
from ucm.replay.traces import Request, Trace

__all__ = [
    "LRU",
    "POLICIES",
    "Newcomers",
    "Optimal",
    "Ours",
    "SecondUse",
    "Shallow",
    "Stamped",
    "TinyLFU",
]

_LRU_SPAN = 8
_SHALLOW = 16
_GHOSTS = 4
_SKETCH = 8
_NEVER = 1 << 62


class Stamped(Policy):
    """Keeps the blocks with the latest moments; a moment is never lowered."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, block_tokens)
        self.stamps: dict[int, int] = {}
        self._order: list[tuple[int, int]] = []  # and what was true once

    def __contains__(self, block: int) -> bool:
        return block in self.stamps

    @abstractmethod
    def moments(self, request: Request, num_held: int) -> list[int]:
        """Return when each block of a prompt counts as used."""

    def use(self, request: Request, num_held: int) -> None:
        """Touch what is kept; make room for the rest, but not among what is later."""
        self.keep(request.blocks, self.moments(request, num_held))

    def keep(self, blocks: Sequence[int], moments: Sequence[int]) -> None:
        """Touch those of *blocks* that are kept, and take the others in."""
        missing = []
        for block, moment in zip(blocks, moments, strict=True):
            known = self.stamps.get(block)
            if known is None:
                missing.append((moment, block))
            elif known < moment:
                self._stamp(block, moment)
        missing.sort(key=lambda each: -each[0])
        for moment, block in missing:
            if len(self.stamps) >= self.capacity and not self._evict(block, moment):
                break
            self._stamp(block, moment)
            self.num_written += 1

    def oldest(self) -> int:
        """Return the moment of the block that goes first; ``_NEVER`` without one."""
        order, stamps = self._order, self.stamps
        while order and stamps.get(order[0][1]) != order[0][0]:
            heapq.heappop(order)
        return order[0][0] if order else _NEVER

    def _evict(self, block: int, moment: int) -> bool:
        """Make room for a block that counts as used at *moment*, if that is right."""
        if self.oldest() >= moment:
            return False
        del self.stamps[heapq.heappop(self._order)[1]]
        return True

    def _stamp(self, block: int, moment: int) -> None:
        self.stamps[block] = moment
        heapq.heappush(self._order, (moment, block))
        if len(self._order) > 4 * len(self.stamps) + 1024:
            self._order = [(moment, block) for block, moment in self.stamps.items()]
            heapq.heapify(self._order)


class LRU(Stamped):
    """As usual: used when it is used, span after span, in a span the first last."""

    def moments(self, request: Request, num_held: int) -> list[int]:
        """Return later moments for later spans."""
        spans = range(0, len(request.blocks), _LRU_SPAN)
        return [
            request.moment + at
            for start in spans
            for at in reversed(
                range(start, min(start + _LRU_SPAN, len(request.blocks)))
            )
        ]


class Ours(Stamped):
    """One moment for a life, less a nanosecond for each token before a block."""

    def moments(self, request: Request, num_held: int) -> list[int]:
        """Return earlier moments for deeper blocks."""
        step = self.block_tokens
        return [request.moment - at * step for at in range(len(request.blocks))]


class Newcomers(Ours):
    """
    A block's first use counts as if it was earlier, as far as that has paid.

    A table of blocks seen remembers whether each was used once or more often. A miss on
    one that was used often says that newcomers have pushed it out: they count as used
    earlier from now on. A miss on one that was used once says the opposite. Who has been
    seen more seldom counts more, as in ARC.
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, block_tokens)
        self.share = 0.0
        """Of the age of the oldest block, by which newcomers are put back."""
        self._seen: list[tuple[int, int]] = [(-1, 0)] * (_SKETCH * capacity)
        self._counts = [0, 0, 0]

    def moments(self, request: Request, num_held: int) -> list[int]:
        """Return earlier moments for deeper blocks, and for those never seen."""
        known = 0
        for position, block in enumerate(request.blocks):
            uses = self._see(block, is_held=position < num_held)
            if uses:
                known = position + 1  # so was all before it, whatever the table forgot
            if uses and position >= num_held:
                self._learn(uses)
        moments = super().moments(request, num_held)
        if len(self.stamps) < self.capacity:
            return moments
        back = int(self.share * max(0, request.moment - self.oldest()))
        new = slice(max(known, num_held), None)
        moments[new] = [moment - back for moment in moments[new]]
        return moments

    def _see(self, block: int, *, is_held: bool) -> int:
        """Return how often a block was used before: not, once, or more often."""
        at = (block * 0x9E3779B97F4A7C15 & (1 << 64) - 1) % len(self._seen)
        other, uses = self._seen[at]
        self._counts[uses] -= 1
        before = uses if other == block else 0
        after = 2 if before or is_held else 1
        self._seen[at] = (block, after)
        self._counts[after] += 1
        return before

    def _learn(self, uses: int) -> None:
        once, often = max(1, self._counts[1]), max(1, self._counts[2])
        towards = -max(1.0, often / once) if uses == 1 else max(1.0, once / often)
        self.share = min(1.0, max(0.0, self.share + towards / self.capacity))


class SecondUse(Ours):
    """Takes a block in when it is used again while a list of names remembers it."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, block_tokens)
        self._names: OrderedDict[int, None] = OrderedDict()

    def keep(self, blocks: Sequence[int], moments: Sequence[int]) -> None:
        """Leave out what is neither kept nor remembered."""
        known = [
            (block, moment)
            for block, moment in zip(blocks, moments, strict=True)
            if block in self.stamps or block in self._names
        ]
        super().keep([each[0] for each in known], [each[1] for each in known])
        for block in blocks:
            self._names[block] = None
            self._names.move_to_end(block)
        while len(self._names) > _GHOSTS * self.capacity:
            self._names.popitem(last=False)


class TinyLFU(Ours):
    """Takes a block in if it was used more often of late than the one it pushes out."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, block_tokens)
        self._uses: Counter[int] = Counter()
        self._num_uses = 0

    def keep(self, blocks: Sequence[int], moments: Sequence[int]) -> None:
        """Count first."""
        self._uses.update(blocks)
        self._num_uses += len(blocks)
        if self._num_uses > 10 * self.capacity:
            self._num_uses = 0
            halves = {
                block: uses // 2 for block, uses in self._uses.items() if uses > 1
            }
            self._uses = Counter(halves)
        super().keep(blocks, moments)

    def _evict(self, block: int, moment: int) -> bool:
        if self.oldest() == _NEVER:
            return False
        victim = self._order[0][1]
        return self._uses[block] > self._uses[victim] and super()._evict(block, moment)


class Shallow(Ours):
    """Keeps the beginning of each prompt only."""

    def keep(self, blocks: Sequence[int], moments: Sequence[int]) -> None:
        """Leave out what is deep."""
        super().keep(blocks[:_SHALLOW], moments[:_SHALLOW])


class Optimal(Stamped):
    """
    Knows the future: keeps what is used next, and takes nothing in that never is.

    A block is in each prompt that has a deeper one, so that its next use is never later.
    What this keeps is therefore whole prefixes, its hits are prefix hits, and no policy
    has more blocks hit: of uses that follow each other it covers as many as fit.
    """

    def __init__(self, capacity: int, block_tokens: int, trace: Trace) -> None:
        super().__init__(capacity, block_tokens)
        following: dict[int, int] = {}
        self._next: dict[int, list[int]] = {}
        for number, request in reversed(list(enumerate(trace.requests))):
            self._next[request.moment] = [
                following.get(block, _NEVER) for block in request.blocks
            ]
            following |= dict.fromkeys(request.blocks, number << 32)

    def moments(self, request: Request, num_held: int) -> list[int]:
        """Return earlier moments for later next uses, and for deeper blocks."""
        return [-each - at for at, each in enumerate(self._next[request.moment])]

    def keep(self, blocks: Sequence[int], moments: Sequence[int]) -> None:
        """Forget what these blocks were kept for, and keep those used next."""
        held = [block for block in blocks if self.stamps.pop(block, None) is not None]
        needed = [
            pair for pair in zip(blocks, moments, strict=True) if pair[1] > -_NEVER
        ]
        super().keep([pair[0] for pair in needed], [pair[1] for pair in needed])
        self.num_written -= sum(block in self.stamps for block in held)


POLICIES: dict[str, Callable[[int, Trace], Policy]] = {
    "lru": lambda capacity, trace: LRU(capacity, trace.block_tokens),
    "ours": lambda capacity, trace: Ours(capacity, trace.block_tokens),
    "newcomers": lambda capacity, trace: Newcomers(capacity, trace.block_tokens),
    "arc": lambda capacity, trace: ARC(capacity, trace.block_tokens),
    "s3-fifo": lambda capacity, trace: S3FIFO(capacity, trace.block_tokens),
    "second-use": lambda capacity, trace: SecondUse(capacity, trace.block_tokens),
    "tinylfu": lambda capacity, trace: TinyLFU(capacity, trace.block_tokens),
    "shallow": lambda capacity, trace: Shallow(capacity, trace.block_tokens),
    "optimal": lambda capacity, trace: Optimal(capacity, trace.block_tokens, trace),
}
"""By name; ``optimal`` has to read the whole trace first."""
