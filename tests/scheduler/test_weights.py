# SPDX-License-Identifier: Apache-2.0
"""What is known of the weights, from what the engine does and its ranks tell."""

import itertools

import pytest

from ucm.scheduler.messages import WeightsNews
from ucm.scheduler.weights import Weights, WeightsState

OLD, NEW, NEWER = b"old", b"new", b"newer"
MIXED, ASKED, PROVEN = WeightsState.MIXED, WeightsState.ASKED, WeightsState.PROVEN


def make(num_ranks: int = 2) -> Weights:
    """Return the weights of an engine whose ranks have told what they began with."""
    tokens = itertools.count()
    weights = Weights(num_ranks, lambda: str(next(tokens)))
    for rank in range(num_ranks):
        assert not weights.told(rank, WeightsNews(epoch=0, digest=OLD, base=OLD))
    return weights


def answer(weights: Weights, *digests: bytes | None) -> None:
    """Let a plan go out and ranks answer it."""
    weights.sent(in_use=True)
    for rank, digest in enumerate(digests):
        news = WeightsNews(epoch=weights.epoch, digest=digest, base=OLD)
        weights.told(rank, news)


def changed(*digests: bytes) -> Weights:
    """Return the weights of an engine that went on with others, in the right order."""
    weights = make(len(digests))
    weights.doubt(emptied=True)
    answer(weights, *digests)
    return weights


class TestSame:
    @pytest.mark.parametrize("emptied", [False, True])
    def test_same_digests_keep_the_name(self, emptied: bool) -> None:
        """R-08: a doubt that all ranks answer with what they began with ends with the
        very same name, whatever it was raised by."""
        weights = make()
        weights.doubt(emptied=emptied)
        assert ASKED is weights.state
        answer(weights, OLD, OLD)
        assert (PROVEN, "") == (weights.state, weights.name)

    def test_nothing_is_proven_before_the_last_rank_has_answered(self) -> None:
        """R-07: one rank's part may have changed though another's has not."""
        weights = make()
        weights.doubt(emptied=True)
        answer(weights, OLD)
        assert ASKED is weights.state

    def test_answers_to_an_earlier_doubt_prove_nothing(self) -> None:
        """R-07: what a rank read before the latest doubt may have changed since."""
        weights = make(1)
        weights.doubt(emptied=True)
        answer(weights, OLD)
        weights.doubt(emptied=True)
        stale = WeightsNews(epoch=1, digest=OLD, base=OLD)
        assert not weights.told(0, stale)
        weights.sent(in_use=True)
        assert not weights.told(0, stale)
        assert ASKED is weights.state

    def test_answer_before_the_number_went_out_proves_nothing(self) -> None:
        """R-07: the ranks cannot have read for a number that no plan has carried."""
        weights = make(1)
        weights.doubt(emptied=True)
        assert not weights.told(0, WeightsNews(epoch=1, digest=OLD, base=OLD))
        assert ASKED is weights.state


class TestChanged:
    def test_other_digests_have_a_name_of_their_own(self) -> None:
        """R-07: new weights get another name, the same in each engine that has them,
        and the former weights their former name again."""
        one, other = changed(NEW, NEW), changed(NEW, NEW)
        assert PROVEN is one.state
        assert one.name == other.name != ""
        assert one.name != changed(NEW, NEWER).name != changed(NEWER, NEW).name
        one.doubt(emptied=True)
        answer(one, OLD, OLD)
        assert (PROVEN, "") == (one.state, one.name)

    def test_ranks_that_hide_a_border_have_names_of_their_own(self) -> None:
        """R-07: which rank has which bytes is part of the name."""
        assert changed(b"ab", b"c").name != changed(b"a", b"bc").name

    def test_rank_that_cannot_tell_makes_a_name_that_nobody_has(self) -> None:
        """R-07: what cannot be proven equal is unequal, each time anew, until all can
        tell again."""
        weights = changed(NEW, b"")
        first = weights.name
        assert (PROVEN, True) == (weights.state, weights.is_unreadable)
        weights.doubt(emptied=True)
        answer(weights, NEW, b"")
        assert first != weights.name
        weights.doubt(emptied=True)
        answer(weights, OLD, OLD)
        assert ("", False) == (weights.name, weights.is_unreadable)

    def test_engine_that_never_could_tell_has_no_name_of_the_start(self) -> None:
        """R-07: two ranks without a digest are not as they were at the start."""
        weights = Weights(1, lambda: "token")
        weights.told(0, WeightsNews(epoch=0, digest=b"", base=b""))
        weights.doubt(emptied=True)
        answer(weights, b"")
        assert "unknown-token" == weights.name


class TestMixed:
    def test_changed_weights_with_the_old_cache_stop_all(self) -> None:
        """R-07: with blocks of the former weights in the engine's own cache nothing is
        found or saved, until it was emptied and the ranks have answered again."""
        weights = make(1)
        weights.doubt(emptied=False)
        answer(weights, NEW)
        assert MIXED is weights.state
        weights.doubt(emptied=False)
        answer(weights, OLD)
        assert MIXED is weights.state
        weights.doubt(emptied=True)
        assert ASKED is weights.state
        answer(weights, NEW)
        assert (PROVEN, changed(NEW).name) == (weights.state, weights.name)

    def test_rank_that_saw_writing_raises_a_doubt(self) -> None:
        """R-07: weights that are written while the engine serves are asked for; equal
        ones go on, others stop all."""
        for digest, state in ((OLD, PROVEN), (NEW, MIXED)):
            weights = make(1)
            assert weights.told(0, WeightsNews(epoch=0, is_written=True, base=OLD))
            assert (ASKED, 1) == (weights.state, weights.epoch)
            answer(weights, digest)
            assert state is weights.state

    def test_emptying_in_the_same_breath_ends_with_the_first_proof(self) -> None:
        """R-08: reset of both caches is one doubt, in whichever order it is seen."""
        for order in ((True, False), (False, True)):
            weights = make(1)
            for emptied in order:
                weights.doubt(emptied=emptied)
            assert 1 == weights.epoch
            answer(weights, NEW)
            assert PROVEN is weights.state

    def test_steps_with_weights_that_nobody_has_read_count_as_mixed(self) -> None:
        """R-07: such steps have left blocks in the engine's own cache, unless it was
        emptied since."""
        for emptied, state in ((False, MIXED), (True, PROVEN)):
            weights = make(1)
            weights.doubt(emptied=emptied)
            weights.sent(in_use=True)
            news = WeightsNews(epoch=1, is_torn=True, digest=OLD, base=OLD)
            assert weights.told(0, news)
            assert state is weights.state

    def test_doubt_that_interrupts_another_counts_as_mixed(self) -> None:
        """R-07: weights that changed and changed back before anybody had read them have
        left blocks in the engine's own cache."""
        weights = make(1)
        weights.doubt(emptied=False)
        weights.sent(in_use=True)
        weights.told(0, WeightsNews(epoch=1, is_written=True, base=OLD))
        answer(weights, OLD)
        assert MIXED is weights.state
        weights.doubt(emptied=True)
        answer(weights, OLD)
        assert (PROVEN, "") == (weights.state, weights.name)

    def test_resets_of_a_busy_engine_are_answered_one_after_the_other(self) -> None:
        """R-08: a reset that empties nothing and comes while the ranks read turns nothing
        off; they read again behind it, as it may have come with other weights."""
        weights = make(1)
        weights.doubt(emptied=False)
        weights.sent(in_use=True)
        weights.doubt(emptied=False)
        assert 1 == weights.epoch
        answer(weights, OLD)
        assert (ASKED, 2) == (weights.state, weights.epoch)
        answer(weights, OLD)
        assert (PROVEN, 2, "") == (weights.state, weights.epoch, weights.name)

    def test_reset_that_brought_other_weights_meanwhile_is_noticed(self) -> None:
        """R-07: what the ranks read behind such a reset counts, not what they read
        before; other weights beside the blocks of the former ones are mixed."""
        weights = make(1)
        weights.doubt(emptied=False)
        weights.sent(in_use=True)
        weights.doubt(emptied=False)
        answer(weights, OLD)
        answer(weights, NEW)
        assert MIXED is weights.state
        weights.doubt(emptied=True)
        answer(weights, NEW)
        assert (PROVEN, changed(NEW).name) == (weights.state, weights.name)

    def test_steps_after_the_cache_was_emptied_are_of_weights_that_nobody_read(
        self,
    ) -> None:
        """R-07: a reset answers for what was computed before it; weights that computed
        since, and were replaced before the ranks had read them, have left blocks."""
        weights = make(1)
        weights.doubt(emptied=True)
        weights.sent(in_use=True)
        weights.told(0, WeightsNews(epoch=1, is_written=True, base=OLD))
        answer(weights, OLD)
        assert MIXED is weights.state

    @pytest.mark.parametrize("answered", [False, True])
    def test_weights_written_into_an_idle_engine_need_no_second_reset(
        self, *, answered: bool
    ) -> None:
        """R-08: who pauses with an empty cache and writes then has blocks of one kind,
        also if a step without requests came in between."""
        weights = make(1)
        weights.doubt(emptied=True)
        weights.sent(in_use=False)
        if answered:
            weights.told(0, WeightsNews(epoch=1, digest=OLD, base=OLD))
        weights.told(0, WeightsNews(epoch=1, is_written=True, base=OLD))
        answer(weights, NEW)
        assert (PROVEN, changed(NEW).name) == (weights.state, weights.name)
