# SPDX-License-Identifier: Apache-2.0
"""
Which of the host's blocks are in use by saves and loads. Pure.

A host's loop stands still while a save takes its blocks: so ``read`` runs no bytecode for
each of them, and whoever has the time counts them.
"""

from collections import deque
from collections.abc import Sequence

from ucm.errors import BlockInUseError

__all__ = ["BlockUsers"]


class BlockUsers:
    """
    Any number of saves may read a block, or one load write it.

    What a save reads while a load writes it would be stored under the wrong key.
    """

    def __init__(self) -> None:
        self._readers: dict[int, int] = {}
        self._written: dict[int, object] = {}  # by whom
        self._uncounted: deque[tuple[Sequence[int], object]] = deque()

    def __len__(self) -> int:
        self._count_all()
        return len(self._readers) + len(self._written)

    def read(self, blocks: Sequence[int], owner: object) -> None:
        """
        Take blocks for reading, all or none; ``count`` is to follow.

        Args:
            blocks: Kept as they are: nobody changes them.
            owner: Who takes them, for ``undo``.

        Raises:
            BlockInUseError: One is being written.
        """
        if not self._written.keys().isdisjoint(blocks):
            raise BlockInUseError(
                next(each for each in blocks if each in self._written)
            )
        self._uncounted.append((blocks, owner))

    def count(self) -> None:
        """Count the blocks of one ``read``; before those are given back."""
        if self._uncounted:
            readers = self._readers
            blocks, _ = self._uncounted.popleft()
            for block in blocks:
                readers[block] = readers.get(block, 0) + 1

    def _count_all(self) -> None:
        while self._uncounted:
            self.count()

    def write(self, blocks: Sequence[int], owner: object) -> None:
        """
        Take blocks for writing, all or none.

        Args:
            blocks: Those.
            owner: Who takes them, for ``undo``.

        Raises:
            BlockInUseError: One is in use, or there twice.
        """
        self._count_all()
        taken: set[int] = set()
        for block in blocks:
            if block in self._readers or block in self._written or block in taken:
                raise BlockInUseError(block)
            taken.add(block)
        self._written.update(dict.fromkeys(taken, owner))

    def undo(self, blocks: Sequence[int], owner: object) -> None:
        """Leave no trace of the last to take blocks, who was refused or interrupted."""
        if self._uncounted and self._uncounted[-1][1] is owner:
            self._uncounted.pop()
        for block in blocks:
            if self._written.get(block) is owner:
                del self._written[block]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Use blocks no more."""
        readers = self._readers
        for block in blocks:
            if block in self._written:
                del self._written[block]
            elif readers[block] > 1:
                readers[block] -= 1
            else:
                del readers[block]
