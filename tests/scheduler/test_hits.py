# SPDX-License-Identifier: Apache-2.0
"""From where the tokens of a hit came."""

from hypothesis import given
from hypothesis import strategies as st

from ucm.scheduler.hits import tokens_by_medium

ENDS = [16, 32, 48, 64]


class TestTokens:
    def test_tokens_are_told_apart_by_their_blocks(self) -> None:
        """R-57: what the slab had, and what each tier brought."""
        assert {0: 16, 1: 32, 2: 16} == tokens_by_medium(range(64), ENDS, b"\0\1\1\2")

    def test_only_the_hit_counts(self) -> None:
        """R-57: the engine has the first block itself, and takes no more than the third."""
        assert {1: 16, 2: 16} == tokens_by_medium(range(16, 48), ENDS, b"\1\1\2\2")

    def test_outermost_medium_of_a_token_counts(self) -> None:
        """R-57: a token is in several groups and parts; the slowest of them is its tier."""
        ends = [16, 16, 32, 32, 32]
        assert {0: 16, 2: 16} == tokens_by_medium(range(32), ends, b"\0\0\1\2\0")

    def test_what_nobody_asked_for_was_in_the_slab(self) -> None:
        """R-57: tokens before and behind the blocks that were asked for."""
        assert {0: 64} == tokens_by_medium(range(64), [], b"")
        assert {0: 32, 1: 32} == tokens_by_medium(range(64), ENDS, b"\1\1")
        assert {} == tokens_by_medium(range(5, 5), ENDS, b"\1\1")

    @given(
        st.integers(0, 8),
        st.integers(0, 8),
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=12),
    )
    def test_sum_is_that_of_the_hit(self, start, length, blocks) -> None:
        """R-57: the engine throws away what does not add up."""
        blocks = sorted(blocks)
        ends = [end * 16 for end, _ in blocks]
        tokens = range(start * 16, (start + length) * 16)
        found = tokens_by_medium(tokens, ends, bytes(medium for _, medium in blocks))
        assert len(tokens) == sum(found.values())
        assert all(count > 0 for count in found.values())
