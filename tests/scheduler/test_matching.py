# SPDX-License-Identifier: Apache-2.0
"""How much of a request's prefix can be loaded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.model import DIGEST, STATE, SetIndex, hashes_of, make_layout
from ucm.blocks import ShardId
from ucm.errors import LayoutError
from ucm.layout import GroupKind, KVLayout
from ucm.scheduler.matches import MatchReason, PrefixMatch
from ucm.scheduler.matching import DeniedKey, PrefixMatcher

HASHES = hashes_of("m", 64)
ONE_FULL = make_layout((4, None))
HYBRID = make_layout((4, None), (8, 10))
RECURRENT = make_layout((4, None), (8, STATE))


def _matcher(
    layout: KVLayout, index: SetIndex, *, shards: int = 1, full_hits: bool = True
) -> PrefixMatcher:
    return PrefixMatcher(
        layout,
        index,
        DIGEST,
        [ShardId(shard) for shard in range(shards)],
        full_hits=full_hits,
    )


def _hit(tokens: int) -> PrefixMatch:
    return PrefixMatch(tokens, MatchReason.HIT)


def _none(reason: MatchReason) -> PrefixMatch:
    return PrefixMatch(0, reason)


class TestPrefixMatcher:
    def test_hit_excludes_computed_tokens(self) -> None:
        """S3-08: The tokens that the engine has itself are neither counted nor asked."""
        index = SetIndex()
        index.put(0, HASHES[2:5])
        assert _hit(12) == _matcher(ONE_FULL, index).match(41, HASHES[:10], 8, ())

    def test_first_missing_block_ends_the_hit(self) -> None:
        """Blocks behind a missing one cannot be used."""
        index = SetIndex()
        index.put(0, HASHES[:3] + HASHES[4:9])
        assert _hit(12) == _matcher(ONE_FULL, index).match(41, HASHES[:10], 0, ())

    def test_nothing_stored_is_a_miss(self) -> None:
        """A request that nobody saved before loads nothing."""
        found = _matcher(HYBRID, SetIndex()).match(41, HASHES[:10], 0, ())
        assert _none(MatchReason.MISS) == found

    @pytest.mark.parametrize(("full_hits", "tokens"), [(True, 16), (False, 12)])
    def test_whole_prompt_hits_only_where_allowed(
        self, full_hits: bool, tokens: int
    ) -> None:
        """H-08: Where the engine does not do it, one token is left to compute."""
        index = SetIndex()
        index.put(0, HASHES[:4])
        matcher = _matcher(ONE_FULL, index, full_hits=full_hits)
        assert _hit(tokens) == matcher.match(16, HASHES[:4], 0, ())

    def test_whole_prompt_never_hits_when_the_last_window_needs_more(self) -> None:
        """H-08: A window that begins one block earlier for the last token is heeded."""
        index = SetIndex()
        index.put(0, HASHES[:4])
        matcher = _matcher(make_layout((4, 9)), index)
        assert _hit(12) == matcher.match(16, HASHES[:4], 0, ())
        assert _hit(16) == matcher.match(17, HASHES[:4], 0, ())

    def test_partial_local_hit_loads_nothing(self) -> None:
        """H-09: A local hit that ends inside a block is declined, without an assert."""
        index = SetIndex()
        index.put(0, HASHES[:8])
        found = _matcher(ONE_FULL, index).match(41, HASHES[:8], 5, ())
        assert _none(MatchReason.PARTIAL_BLOCK) == found

    def test_no_whole_block_beyond_the_computed_ones_is_too_short(self) -> None:
        """A prefix without a further whole block asks the store nothing."""
        index = SetIndex()
        found = _matcher(ONE_FULL, index).match(11, HASHES[:2], 8, ())
        assert _none(MatchReason.TOO_SHORT) == found
        assert 0 == index.calls

    def test_tokens_without_a_hash_are_not_asked_for(self) -> None:
        """The engine's hashes bound the hit, however long the request is."""
        index = SetIndex()
        index.put(0, HASHES)
        assert _hit(12) == _matcher(ONE_FULL, index).match(400, HASHES[:3], 0, ())

    def test_block_counts_only_with_all_shards(self) -> None:
        """A block that misses on one shard is missing, in groups of both kinds."""
        index = SetIndex()
        for group, step in ((0, 1), (1, 2)):
            index.put(group, HASHES[step - 1 : 8 : step], shards=2)
        matcher = _matcher(HYBRID, index, shards=2)
        assert _hit(32) == matcher.match(33, HASHES[:8], 0, ())
        index.drop(1, HASHES[7:8], shard=1)
        assert _hit(24) == matcher.match(33, HASHES[:8], 0, ())
        index.drop(0, HASHES[4:5], shard=1)
        assert _hit(16) == matcher.match(33, HASHES[:8], 0, ())

    def test_denied_block_is_missing(self) -> None:
        """A block whose load failed is not matched, whatever the store says."""
        index = SetIndex()
        index.put(0, HASHES[:8])
        index.put(1, HASHES[1:8:2])
        matcher = _matcher(HYBRID, index)
        assert _hit(24) == matcher.match(33, HASHES[:8], 0, {(0, HASHES[6])})
        assert _hit(16) == matcher.match(33, HASHES[:8], 0, {(1, HASHES[5])})
        assert _hit(32) == matcher.match(33, HASHES[:8], 0, {(0, HASHES[9])})

    def test_window_group_needs_only_its_last_window(self) -> None:
        """Blocks that no attention reaches any more need not be stored."""
        index = SetIndex()
        index.put(0, HASHES[:8])
        index.put(1, HASHES[5:8:2])
        assert _hit(32) == _matcher(HYBRID, index).match(33, HASHES[:8], 0, ())

    def test_computed_window_blocks_are_not_asked_for(self) -> None:
        """A window that reaches into the computed prefix finds it there."""
        index = SetIndex()
        index.put(0, HASHES[:8])
        index.put(1, HASHES[7:8])
        assert _hit(8) == _matcher(HYBRID, index).match(33, HASHES[:8], 24, ())
        found = _matcher(HYBRID, index).match(33, HASHES[:8], 16, ())
        assert _none(MatchReason.MISS) == found

    def test_state_group_needs_the_block_that_ends_with_the_hit(self) -> None:
        """A recurrent layer's state is one block; those before it are of no use."""
        index = SetIndex()
        index.put(0, HASHES[:8])
        index.put(1, HASHES[3:6:2])
        matcher = _matcher(RECURRENT, index)
        assert _hit(24) == matcher.match(33, HASHES[:8], 0, ())
        assert _hit(16) == matcher.match(33, HASHES[:8], 0, {(1, HASHES[5])})
        index.drop(0, HASHES[4:5])
        assert _hit(16) == matcher.match(33, HASHES[:8], 0, ())

    def test_computed_state_is_no_substitute_for_a_stored_one(self) -> None:
        """The engine's own state ends its own prefix; a longer hit needs its own."""
        index = SetIndex()
        index.put(0, HASHES[:8])
        matcher = _matcher(RECURRENT, index)
        found = matcher.match(33, HASHES[:8], 16, ())
        assert _none(MatchReason.MISS) == found
        index.put(1, HASHES[7:8])
        assert _hit(16) == matcher.match(33, HASHES[:8], 16, ())

    def test_whole_prompt_never_hits_with_a_state(self) -> None:
        """H-08: The engine would apply the last token to the loaded state again."""
        index = SetIndex()
        index.put(0, HASHES[:4])
        index.put(1, HASHES[1:4:2])
        matcher = _matcher(RECURRENT, index, full_hits=True)
        assert _hit(8) == matcher.match(16, HASHES[:4], 0, ())
        assert _hit(16) == matcher.match(17, HASHES[:4], 0, ())

    def test_store_that_does_not_answer_is_a_miss(self) -> None:
        """A store that is down stops loads and saves of old blocks only."""
        index = SetIndex()
        index.is_up = False
        matcher = _matcher(ONE_FULL, index)
        found = matcher.match(33, HASHES[:8], 0, ())
        assert _none(MatchReason.UNAVAILABLE) == found
        assert [True] == matcher.stored(ONE_FULL.groups[0], HASHES[:1], ())

    def test_new_prompt_is_told_by_its_first_blocks(self) -> None:
        """However long a prompt is, and on however many shards: one short look-up tells
        that nothing of it is stored."""
        hashes = hashes_of("new", 4096)
        for shards in (1, 8):
            index = SetIndex()
            matcher = _matcher(ONE_FULL, index, shards=shards)
            assert _none(MatchReason.MISS) == matcher.match(4 * 4096, hashes, 0, ())
            assert (1, 32) == (index.calls, index.asked)

    @pytest.mark.parametrize(("blocks", "calls"), [(4, 1), (36, 2), (4096, 34)])
    def test_shards_are_asked_together(self, blocks: int, calls: int) -> None:
        """A hit takes as many look-ups for eight shards as for one with as many keys, and
        asks for each key once."""
        hashes = hashes_of("long", blocks)
        index = SetIndex()
        index.put(0, hashes, shards=8)
        matcher = _matcher(ONE_FULL, index, shards=8)
        assert _hit(4 * blocks) == matcher.match(4 * blocks, hashes, 0, ())
        assert (calls, 8 * blocks) == (index.calls, index.asked)

    def test_layout_that_needs_nothing_is_refused(self) -> None:
        """A hit that restores no block at all would be reported but never loaded."""
        with pytest.raises(LayoutError, match="no block of any group"):
            _matcher(make_layout((4, 1)), SetIndex())

    def test_asking_is_cheap_when_a_window_group_has_nothing(self) -> None:
        """Walking down a long prefix takes few look-ups and asks no block twice."""
        count = 4096
        hashes = hashes_of("long", count)
        index = SetIndex()
        index.put(0, hashes)
        layout = make_layout((4, None), (4, 64), (4, 7), (4, STATE))
        found = _matcher(layout, index).match(4 * count + 1, hashes, 0, ())
        assert _none(MatchReason.MISS) == found
        assert index.asked <= 4 * count
        assert index.calls <= 30

    @pytest.mark.slow
    @settings(deadline=None)
    @given(data=st.data())
    def test_match_equals_the_definition(self, data: st.DataObject) -> None:
        """S3-07: Any match is the longest one, and asking twice gives the same."""
        reach = st.none() | st.just(STATE) | st.integers(2, 40)
        groups = data.draw(
            st.lists(st.tuples(st.sampled_from([4, 8, 12]), reach), min_size=1)
        )
        layout = make_layout(*groups[:3])
        hashes = HASHES[: data.draw(st.integers(0, 40))]
        num_tokens = len(hashes) * 4 + data.draw(st.integers(0, 3))
        full_hits = data.draw(st.booleans())
        shards = data.draw(st.integers(1, 2))
        index = SetIndex()
        denied: set[DeniedKey] = set()
        gaps = data.draw(st.lists(st.integers(0, 200), max_size=8))
        for at, group in enumerate(layout.groups):
            index.put(at, hashes, shards)
            for gap in gaps:
                if gap % 3 == at and hashes:
                    bad = hashes[gap % len(hashes)]
                    if gap % 5 == 0:
                        denied.add((group.group_id, bad))
                    else:
                        index.drop(at, [bad], gap % shards)
        computed = data.draw(st.integers(0, 4)) * layout.alignment_tokens
        matcher = _matcher(layout, index, shards=shards, full_hits=full_hits)
        found = matcher.match(num_tokens, hashes, computed, denied)
        assert found == matcher.match(num_tokens, hashes, computed, denied)
        expected = _longest(
            matcher, num_tokens, hashes, computed, denied, full_hits=full_hits
        )
        assert expected == found.tokens
        assert (expected > 0) is (found.reason is MatchReason.HIT)
        _check_missing(matcher, found, computed, denied)


def _check_missing(
    matcher: PrefixMatcher,
    found: PrefixMatch,
    computed: int,
    denied: set[DeniedKey],
) -> None:
    """R-71: a block is told if and only if it falls short; it is not there, and is within
    the first length beyond the hit that some group rules out."""
    is_short = found.tokens < found.wanted
    assert is_short is (found.missing is not None)
    if found.missing is not None:
        group, at = found.missing.group, found.missing.at
        is_there, *_ = matcher.stored(group, [found.missing.block_hash], denied)
        assert not is_there
        align = matcher.layout.alignment_tokens
        end = (at + 1) * group.block_tokens
        assert computed < end <= computed + found.wanted
        last = max(each.block_tokens for each in matcher.layout.groups)
        reach = group.window_tokens or last
        assert end > computed + found.tokens - reach - align


def _longest(
    matcher: PrefixMatcher,
    num_tokens: int,
    hashes: list[bytes],
    computed: int,
    denied: set[DeniedKey],
    *,
    full_hits: bool,
) -> int:
    """Return the tokens to load by trying every length from the longest."""
    layout = matcher.layout
    for group in layout.groups:
        full_hits &= group.kind is not GroupKind.STATE
        if group.window_tokens is not None:
            full_hits &= (group.window_tokens - 1) % group.block_tokens != 0
    limit = min(num_tokens if full_hits else num_tokens - 1, len(hashes) * 4)
    align = layout.alignment_tokens
    for length in range(limit // align * align, computed, -align):
        if all(
            matcher.stored(group, [hashes[layout.hash_index(group, i)]], denied)[0]
            for group in layout.groups
            for i in group.window_blocks(length)
            if i >= computed // group.block_tokens
        ):
            return length - computed
    return 0
