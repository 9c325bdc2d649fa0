# SPDX-License-Identifier: Apache-2.0
"""Policies as others have published them, a prompt's deepest block first."""

from collections import OrderedDict
from collections.abc import Iterable

from ucm.replay.policy import Policy
from ucm.replay.traces import Request

__all__ = ["ARC", "S3FIFO"]


class S3FIFO(Policy):
    """Three queues: a tenth for newcomers, the rest for what came back, and names."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, block_tokens)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._names: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._small or block in self._main

    def use(self, request: Request, num_held: int) -> None:
        """Count what is kept, deepest first; queue the rest."""
        for block in reversed(request.blocks):
            queue = self._small if block in self._small else self._main
            if block in queue:
                queue[block] = min(3, queue[block] + 1)
                continue
            while len(self._small) + len(self._main) >= self.capacity:
                self._make_room()
            target = self._main if block in self._names else self._small
            self._names.pop(block, None)
            target[block] = 0
            self.num_written += 1

    def _make_room(self) -> None:
        if self._main and len(self._small) < max(1, self.capacity // 10):
            block, uses = self._main.popitem(last=False)
            if uses:
                self._main[block] = uses - 1
            return
        block, uses = self._small.popitem(last=False)
        if uses:
            self._main[block] = 0
            return
        self._names[block] = None
        if len(self._names) > self.capacity:
            self._names.popitem(last=False)


class ARC(Policy):
    """Two LRU lists, used once and used again, whose sizes two lists of names learn."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity, block_tokens)
        lists: Iterable[OrderedDict[int, None]] = (OrderedDict() for _ in range(4))
        self._once, self._again, self._once_gone, self._again_gone = lists
        self._target = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def use(self, request: Request, num_held: int) -> None:
        """Use the deepest first."""
        for block in reversed(request.blocks):
            if block in self:
                self._once.pop(block, None)
                self._again[block] = None
                self._again.move_to_end(block)
                continue
            self.num_written += 1
            if block in self._once_gone or block in self._again_gone:
                self._come_back(block)
            else:
                self._come(block)

    def _come_back(self, block: int) -> None:
        once, again = len(self._once_gone), len(self._again_gone)
        if block in self._once_gone:
            self._target = min(self.capacity, self._target + max(1, again / once))
            del self._once_gone[block]
            self._replace(is_again=False)
        else:
            self._target = max(0, self._target - max(1, once / again))
            del self._again_gone[block]
            self._replace(is_again=True)
        self._again[block] = None

    def _come(self, block: int) -> None:
        once = len(self._once) + len(self._once_gone)
        total = once + len(self._again) + len(self._again_gone)
        if once >= self.capacity:
            if len(self._once) < self.capacity:
                self._once_gone.popitem(last=False)
                self._replace(is_again=False)
            else:
                self._once.popitem(last=False)
        elif total >= self.capacity:
            if total >= 2 * self.capacity:
                self._again_gone.popitem(last=False)
            self._replace(is_again=False)
        self._once[block] = None

    def _replace(self, *, is_again: bool) -> None:
        """Make a name of the last block of one of the two lists."""
        size = len(self._once)
        is_over = size > self._target or (is_again and size == self._target)
        if size and (is_over or not self._again):
            self._once_gone[self._once.popitem(last=False)[0]] = None
        else:
            self._again_gone[self._again.popitem(last=False)[0]] = None
