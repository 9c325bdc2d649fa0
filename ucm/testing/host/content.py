# SPDX-License-Identifier: Apache-2.0
"""
What the blocks of a fake engine hold: a function of tokens, rank, group and row.

A *stream* is an endless text of which requests take a beginning as their prompt and of
which the rest is what the model generates, as greedy decoding would. Streams may share
a prefix. The *state* at a token is a number over all tokens before it; a page holds a
pattern of the state behind the last token in it, so that no two prefixes, ranks,
groups or rows look alike.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ucm.blocks import RowId
from ucm.layout import KVLayout

__all__ = ["POISON", "Memory", "Pages", "Stream", "make_streams"]

POISON = 0xDB
"""The byte in every page that nobody has written."""
_MASK = (1 << 64) - 1

Memory = Sequence[npt.NDArray[np.uint8]]
"""``[rows][blocks, page]`` the KV memory of one rank; one array may hold all rows."""


class Stream:
    """
    A text.

    Args:
        tokens: All of it.
        hash_block_tokens: Tokens covered by one block hash.
    """

    __slots__ = ("hashes", "states", "tokens")

    def __init__(self, tokens: Sequence[int], hash_block_tokens: int) -> None:
        self.tokens = tuple(tokens)
        state, states = 1, [1]
        for token in tokens:
            state = (state * 6364136223846793005 + token + 1) & _MASK
            states.append(state)
        self.states = states
        self.hashes = [
            hashlib.sha256(states[end].to_bytes(8, "big")).digest()
            for end in range(hash_block_tokens, len(states), hash_block_tokens)
        ]


def make_streams(length: int, hash_block_tokens: int, count: int) -> list[Stream]:
    """Return texts, of which each but the first shares a prefix with the first."""
    first = [1 + (at * at + 3 * at) % 997 for at in range(length)]
    forks = [length, 0, *(length * at // (2 * count) for at in range(1, count))]
    return [
        Stream(
            first[:fork] + [1000 * number + at for at in range(fork, length)],
            hash_block_tokens,
        )
        for number, fork in enumerate(forks[:count])
    ]


class Pages:
    """
    The pages of one layout.

    Args:
        layout: Groups and rows.
    """

    weights = 0
    """Version of the engine's weights, on which all bytes depend."""

    def __init__(self, layout: KVLayout) -> None:
        self._ramps = {
            (group.group_id, row.row_id): (
                np.arange(1, -(-row.page_bytes // 8) + 1, dtype=np.uint64)
                * np.uint64(0x9E3779B97F4A7C15)
            )
            for group in layout.groups
            for row in group.rows
        }
        self._rows = [
            [(row.row_id, row.page_bytes) for row in group.rows]
            for group in layout.groups
        ]
        self._groups = [group.group_id for group in layout.groups]

    def write(
        self,
        memory: Memory,
        rank: int,
        at: int,
        blocks: Sequence[int],
        states: Sequence[int],
        only_row: int | None = None,
    ) -> None:
        """Let blocks of the group at position *at* hold what *states* say."""
        for row, page in self._rows_of(at, only_row):
            memory[row][blocks, :page] = self.expected(rank, at, row, page, states)

    def first_wrong(
        self,
        memory: Memory,
        rank: int,
        at: int,
        blocks: Sequence[int],
        states: Sequence[int],
        only_row: int | None = None,
    ) -> tuple[int, int] | None:
        """Return position in *blocks* and row of the first page that is wrong."""
        for row, page in self._rows_of(at, only_row):
            expected = self.expected(rank, at, row, page, states)
            found = memory[row][blocks, :page]
            if not np.array_equal(expected, found):
                return int((expected != found).any(axis=1).argmax()), row
        return None

    def poison(
        self,
        memory: Memory,
        at: int,
        blocks: Sequence[int],
        only_row: int | None = None,
    ) -> None:
        """Overwrite blocks of the group at position *at*."""
        for row, _ in self._rows_of(at, only_row):
            memory[row][blocks] = POISON

    def _rows_of(self, at: int, only_row: int | None) -> list[tuple[RowId, int]]:
        rows = self._rows[at]
        return rows if only_row is None else [r for r in rows if r[0] == only_row]

    def expected(
        self, rank: int, at: int, row: RowId, page: int, states: Sequence[int]
    ) -> npt.NDArray[np.uint8]:
        """Return the pages of a row that hold *states*, one for each."""
        group = self._groups[at]
        salt = np.uint64((self.weights << 50) + (rank << 40) + (group << 20) + row + 1)
        base = (np.array(states, dtype=np.uint64) + salt) * np.uint64(
            0xD1342543DE82EF95
        )
        words = base[:, None] ^ (base[:, None] >> np.uint64(29))
        words = words + self._ramps[group, row]
        pages: npt.NDArray[np.uint8] = words.view(np.uint8)[:, :page]
        return pages
