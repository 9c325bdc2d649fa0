# SPDX-License-Identifier: Apache-2.0
"""
The engine's block pool: reference counts, and which free blocks still are a cache.

A free block keeps its content, and its place in the prefix cache, until it is handed
out again. Block 0 is the null block; it is never handed out.
"""

from collections.abc import Iterable

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
_Name = tuple[int, bytes]


class BlockPool:
    """
    All blocks of an engine.

    Args:
        num_blocks: Blocks in memory, the null block included.
    """

    __slots__ = ("_cached", "_free", "_names", "_refs", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = dict.fromkeys(range(1, num_blocks))
        self._refs = [0] * num_blocks
        self._cached: dict[_Name, int] = {}
        self._names: dict[int, _Name] = {}

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody has."""
        return self.num_blocks - 1 - len(self._free)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of *blocks* nobody has."""
        return sum(block in self._free for block in blocks)

    def allocate(self, *, newest: bool) -> int:
        """
        Hand a block out; the prefix cache forgets it.

        Args:
            newest: The block that was freed last, instead of first.
        """
        if newest:
            block, _ = self._free.popitem()
        else:
            block = next(iter(self._free))
            del self._free[block]
        self._refs[block] = 1
        name = self._names.pop(block, None)
        if name is not None and self._cached[name] == block:
            del self._cached[name]
        return block

    def is_used(self, block: int) -> bool:
        """Return whether somebody has a block."""
        return self._refs[block] > 0

    def touch(self, block: int) -> None:
        """Let one more request have a block that was found in the cache."""
        self._free.pop(block, None)
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """Let one request less have a block."""
        self._refs[block] -= 1
        if not self._refs[block]:
            self._free[block] = None

    def cache(self, block: int, group: int, block_hash: bytes) -> None:
        """Let prefixes hit a full block, unless there is one of that name."""
        if block not in self._names and (group, block_hash) not in self._cached:
            self._names[block] = group, block_hash
            self._cached[group, block_hash] = block

    def find(self, group: int, block_hash: bytes) -> int:
        """Return the block of that name, or the null block."""
        return self._cached.get((group, block_hash), NULL_BLOCK)

    @property
    def cached_block_hash_to_block(self) -> object:
        """What a connector may look at: another object after each ``forget``."""
        return self._cached

    def forget(self) -> None:
        """Forget the prefix cache."""
        self._cached = {}
        self._names.clear()
