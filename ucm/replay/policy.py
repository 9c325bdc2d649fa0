# SPDX-License-Identifier: Apache-2.0
"""What a model of a cache of blocks answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ucm.replay.traces import Request

__all__ = ["Policy"]


class Policy(ABC):
    """
    A cache of blocks.

    Args:
        capacity: Blocks that it holds at most.
        block_tokens: Of a whole block.
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.num_written = 0

    @abstractmethod
    def __contains__(self, block: int) -> bool:
        """Return whether a block is kept."""

    @abstractmethod
    def use(self, request: Request, num_held: int) -> None:
        """Count the blocks of a request as used, and keep what it pays to keep."""

    def held(self, blocks: Sequence[int], start: int = 0) -> int:
        """Return the first position from *start* whose block is not kept."""
        for position in range(start, len(blocks)):
            if blocks[position] not in self:
                return position
        return len(blocks)

    def ask(self, request: Request) -> int:
        """Return how many blocks of a prompt are found, then count all as used."""
        num_held = self.held(request.blocks)
        self.use(request, num_held)
        return num_held
