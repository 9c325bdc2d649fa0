# SPDX-License-Identifier: Apache-2.0
"""Which blocks are asked of tiers, in which order, and when it is worth a question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.host_kit import HYBRID, ONE_FULL, RECURRENT, make_layout
from ucm.blocks import BlockKey, ShardId
from ucm.layout import GroupKind
from ucm.scheduler.matching import MatchReason, PrefixMatch, PrefixMatcher
from ucm.scheduler.wanting import (
    falls_short,
    tokens_by_medium,
    wanted_blocks,
    wanted_hits,
)

DIGEST = bytes(range(16))
ENDS = [16, 32, 48, 64]
UNEVEN = make_layout((16, None), (4, 5), (4, GroupKind.STATE), (8, 1))
"""Several blocks of windows and states in one of the others, most of which no hit needs."""


def matcher_of(layout, index=None, num_shards=1):
    """Return what names the keys of a layout."""
    shards = [ShardId(number) for number in range(num_shards)]
    return PrefixMatcher(layout, index, DIGEST, shards, full_hits=True)


def hashes_of(count):
    """Return so many hashes."""
    return [bytes([number]) * 32 for number in range(1, count + 1)]


class Everything:
    """An index over some keys."""

    def __init__(self, keys):
        self._keys = set(keys)

    def match(self, keys):
        """Return how many from the start are there."""
        there = [key in self._keys for key in keys]
        return there.index(False) if False in there else len(there)

    def contains(self, keys):
        """Return which are there."""
        return [key in self._keys for key in keys]


class TestWantedBlocks:
    def test_all_parts_of_a_block_stand_together(self) -> None:
        """R-53: blocks in order, each with the parts of all ranks and their own sizes."""
        size = ONE_FULL.groups[0].block_tokens
        wanted = wanted_blocks(
            matcher_of(ONE_FULL, num_shards=2),
            hashes_of(4),
            range(size, 4 * size),
            {ShardId(0): [10], ShardId(1): [20]},
        )
        parts = [BlockKey.unpack(key) for key in wanted.keys]
        expected = [(hash_, shard) for hash_ in hashes_of(4)[1:] for shard in (0, 1)]
        assert expected == [(part.block_hash, part.shard_id) for part in parts]
        assert [10, 20] * 3 == wanted.sizes
        assert [end * size for end in (2, 2, 3, 3, 4, 4)] == wanted.ends

    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID])
    def test_what_is_wanted_makes_the_longest_hit(self, layout) -> None:
        """R-54: with exactly the wanted blocks in the slab a request hits as far as it
        may, whatever windows and states its groups have."""
        matcher = matcher_of(layout)
        hashes = hashes_of(24)
        tokens = 24 * layout.hash_block_tokens
        longest = matcher.longest(tokens, hashes)
        sizes = {ShardId(0): [7] * len(layout.groups)}
        wanted = wanted_blocks(matcher, hashes, range(longest), sizes)
        assert len(set(wanted.keys)) == len(wanted.keys) == len(wanted.sizes)
        full = matcher_of(layout, Everything(wanted.keys))
        assert longest == full.match(tokens, hashes, 0, ()).tokens
        for at in range(len(wanted.keys)):
            rest = [*wanted.keys[:at], *wanted.keys[at + 1 :]]
            less = matcher_of(layout, Everything(rest))
            assert longest > less.match(tokens, hashes, 0, ()).tokens

    def test_groups_take_turns(self) -> None:
        """R-54: what came in time is of use: blocks of all groups come as they end."""
        layout = HYBRID
        matcher, hashes = matcher_of(layout), hashes_of(24)
        longest = matcher.longest(24 * layout.hash_block_tokens, hashes)
        sizes = {ShardId(0): [7] * len(layout.groups)}
        keys = wanted_blocks(matcher, hashes, range(longest), sizes).keys
        of_group = [BlockKey.unpack(key).group_id for key in keys]
        assert sorted(of_group) != of_group

    def test_nothing_is_wanted_of_an_engine_without_keys(self) -> None:
        """R-54: while the key space is not known there is nothing to ask for."""
        matcher = matcher_of(ONE_FULL)
        matcher.rekey(b"")
        wanted = wanted_blocks(matcher, hashes_of(4), range(64), {ShardId(0): [1]})
        assert ([], [], [], None) == wanted


class TestWantedHits:
    @pytest.mark.parametrize("layout", [ONE_FULL, HYBRID, RECURRENT, UNEVEN])
    @pytest.mark.parametrize("computed", [0, 2])
    def test_each_hit_needs_what_it_would_be_asked_for_alone(
        self, layout, computed
    ) -> None:
        """R-54: whatever windows and states groups have, of each hit exactly the blocks are named
        that it needs, in the order in which they end, and none that no hit needs."""
        matcher, hashes = matcher_of(layout, num_shards=2), hashes_of(48)
        sizes = {ShardId(at): [7 + at] * len(layout.groups) for at in range(2)}
        align = layout.alignment_tokens
        start = computed * align
        longest = matcher.longest(48 * layout.hash_block_tokens, hashes)
        wanted = wanted_hits(matcher, hashes, range(start, longest), sizes, 1 << 16)
        of_use = set()
        for hit in range(1, (longest - start) // align + 1):
            alone = wanted_blocks(
                matcher, hashes, range(start, start + hit * align), sizes
            )
            needed = [
                at
                for at, (first, last) in enumerate(zip(*wanted.hits, strict=True))
                if first <= hit and (hit <= last or not last)
            ]
            assert alone.keys == [wanted.keys[at] for at in needed]
            assert alone.sizes == [wanted.sizes[at] for at in needed]
            assert alone.ends == wanted.ends_of(hit)
            of_use |= set(needed)
        assert of_use == set(range(len(wanted.keys)))
        assert [] == wanted.ends_of(0)

    def test_whole_hits_are_asked_for_where_a_message_takes_no_more(self) -> None:
        """R-54: the longest hit that is asked for has all its blocks in the question."""
        matcher, hashes = matcher_of(HYBRID), hashes_of(48)
        sizes = {ShardId(0): [7] * len(HYBRID.groups)}
        longest = matcher.longest(48 * HYBRID.hash_block_tokens, hashes)
        every = wanted_hits(matcher, hashes, range(longest), sizes, 1 << 16)
        for most in (0, 3, len(every.keys) // 2):
            some = wanted_hits(matcher, hashes, range(longest), sizes, most)
            assert len(some.keys) <= most
            top = max(some.hits[0], default=0)
            alone = wanted_blocks(
                matcher, hashes, range(top * HYBRID.alignment_tokens), sizes
            )
            assert alone.ends == some.ends_of(top)
            assert bool(top) is (most > 3)


class TestFallsShort:
    @pytest.mark.parametrize(
        ("match", "is_so"),
        [
            (PrefixMatch(0, MatchReason.MISS), True),
            (PrefixMatch(16, MatchReason.HIT), True),
            (PrefixMatch(48, MatchReason.HIT), False),
            (PrefixMatch(0, MatchReason.TOO_SHORT), False),
            (PrefixMatch(0, MatchReason.UNKEYED), False),
            (PrefixMatch(0, MatchReason.BYPASS), False),
            (PrefixMatch(0, MatchReason.LOAD_FAILED), False),
            (PrefixMatch(0, MatchReason.UNAVAILABLE), False),
        ],
    )
    def test_only_what_was_looked_up_and_missed_is_asked_for(
        self, match, is_so
    ) -> None:
        """R-54: a request whose load would come to nothing asks nobody."""
        assert is_so is falls_short(match, 16, 64)


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
