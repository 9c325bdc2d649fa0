# SPDX-License-Identifier: Apache-2.0
"""Which of the host's blocks are in use by saves and loads. Pure."""

from collections.abc import Sequence

from ucm.errors import BlockInUseError

__all__ = ["BlockUsers"]

_WRITTEN = -1


class BlockUsers:
    """
    Any number of saves may read a block, or one load write it.

    What a save reads while a load writes it would be stored under the wrong key.
    """

    def __init__(self) -> None:
        self._users: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._users)

    def read(self, blocks: Sequence[int]) -> None:
        """
        Take blocks for reading, all or none.

        Raises:
            BlockInUseError: One is being written.
        """
        users = self._users
        for at, block in enumerate(blocks):
            count = users.get(block, 0)
            if count == _WRITTEN:
                self.give_back(blocks[:at])
                raise BlockInUseError(block)
            users[block] = count + 1

    def write(self, blocks: Sequence[int]) -> None:
        """
        Take blocks for writing, all or none.

        Raises:
            BlockInUseError: One is in use, or there twice.
        """
        seen: set[int] = set()
        for block in blocks:
            if block in self._users or block in seen:
                raise BlockInUseError(block)
            seen.add(block)
        self._users.update(dict.fromkeys(blocks, _WRITTEN))

    def give_back(self, blocks: Sequence[int]) -> None:
        """Use blocks no more."""
        users = self._users
        for block in blocks:
            count = users.pop(block, 0)
            if count > 1:
                users[block] = count - 1
