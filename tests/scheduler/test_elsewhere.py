# SPDX-License-Identifier: Apache-2.0
"""What ranks on other machines have: asked with plans, told with reports."""

import attrs
import pytest

from tests.testing.host_kit import ONE_FULL
from ucm.blocks import ShardId
from ucm.scheduler.budget import WANT_NBYTES
from ucm.scheduler.elsewhere import Elsewhere, News
from ucm.scheduler.matching import PrefixMatcher
from ucm.scheduler.messages import (
    MAX_MESSAGE_BYTES,
    StepPlan,
    decode_plan,
    encode,
)
from ucm.scheduler.requests import NO_WISHES

SIZE = ONE_FULL.groups[0].block_tokens
HASHES = [bytes([number]) * 32 for number in range(1, 5)]
DIGEST = bytes(range(16))
MATCHER = PrefixMatcher(ONE_FULL, None, DIGEST, [ShardId(0)], full_hits=True)
WHOLE = range(4 * SIZE)
TIMES = (5.0, 10.0, 0.0)


@pytest.fixture
def elsewhere():
    """Return two ranks elsewhere."""
    made = Elsewhere()
    made.ranks = (2, 3)
    return made


def ask(elsewhere, name="r", hashes=HASHES, tokens=WHOLE):
    """Ask for a request."""
    return elsewhere.ask(name, MATCHER, hashes, tokens, TIMES, NO_WISHES)


def number_of(elsewhere):
    """Return the number of the one want of the next plan."""
    (want,) = elsewhere.take().wants
    return want.number


class TestReach:
    def test_least_of_all_counts(self, elsewhere) -> None:
        """R-60: a block is found exactly when each machine has its part; who has not
        answered has nothing."""
        assert ask(elsewhere)
        number = number_of(elsewhere)
        elsewhere.told(2, {number: 3 * SIZE})
        assert (True, 0) == (elsewhere.is_pending("r"), elsewhere.reach("r", DIGEST, 0))
        elsewhere.told(3, {number: SIZE})
        assert (False, SIZE) == (
            elsewhere.is_pending("r"),
            elsewhere.reach("r", DIGEST, 0),
        )

    def test_the_order_of_answers_does_not_count(self, elsewhere) -> None:
        """R-60: whoever answers last, the least counts."""
        ask(elsewhere)
        number = number_of(elsewhere)
        elsewhere.told(3, {number: SIZE})
        elsewhere.told(2, {number: 3 * SIZE})
        assert SIZE == elsewhere.reach("r", DIGEST, 0)

    def test_a_rank_answers_once_and_for_itself(self, elsewhere) -> None:
        """R-60: neither a rank that was not asked nor a second answer counts."""
        ask(elsewhere)
        number = number_of(elsewhere)
        for rank in (0, 2, 2):
            elsewhere.told(rank, {number: 4 * SIZE})
        assert elsewhere.is_pending("r")

    def test_answer_to_what_was_dropped_is_passed_over(self, elsewhere) -> None:
        """R-60: an answer of a former life says nothing of this one."""
        ask(elsewhere)
        former = number_of(elsewhere)
        elsewhere.drop("r")
        ask(elsewhere)
        for rank in (2, 3):
            elsewhere.told(rank, {former: 4 * SIZE, 99: SIZE})
        assert (True, 0) == (elsewhere.is_pending("r"), elsewhere.reach("r", DIGEST, 0))

    def test_answer_under_other_keys_is_none(self, elsewhere) -> None:
        """R-60: what was found for other weights says nothing of these."""
        ask(elsewhere)
        number = number_of(elsewhere)
        for rank in (2, 3):
            elsewhere.told(rank, {number: 4 * SIZE})
        assert 0 == elsewhere.reach("r", bytes(16), 0)

    def test_question_that_is_asked_anew_takes_the_place_of_the_former(
        self, elsewhere
    ) -> None:
        """R-60: a late answer to the former one is passed over, whether the request is
        still there or not; ranks are told to let go of it, and nothing of it is left."""
        ask(elsewhere)
        former = number_of(elsewhere)
        ask(elsewhere)
        (want,), dropped, _ = elsewhere.take()
        assert (former,) == dropped
        elsewhere.told(2, {former: 4 * SIZE})
        elsewhere.told(3, {former: 4 * SIZE})
        assert elsewhere.is_pending("r")
        elsewhere.drop("r")
        elsewhere.told(2, {former: SIZE, want.number: SIZE})
        assert ({}, 0) == (elsewhere._part_of, len(elsewhere))

    def test_question_that_no_plan_has_taken_is_taken_back(self, elsewhere) -> None:
        """R-60: ranks hear neither of it nor of its end."""
        ask(elsewhere)
        elsewhere.drop("r")
        assert not any(elsewhere.take())

    def test_answer_holds_from_the_token_of_its_question_on(self, elsewhere) -> None:
        """R-60: an engine that has lost what it had by itself promises nothing of it."""
        ask(elsewhere, tokens=range(SIZE, 4 * SIZE))
        number = number_of(elsewhere)
        for rank in (2, 3):
            elsewhere.told(rank, {number: 3 * SIZE})
        assert (0, 3 * SIZE) == (
            elsewhere.reach("r", DIGEST, 0),
            elsewhere.reach("r", DIGEST, SIZE),
        )

    def test_nobody_who_was_not_asked_has_anything(self, elsewhere) -> None:
        """R-60: of a request that has not asked nothing is known."""
        assert (False, 0) == (
            elsewhere.is_pending("r"),
            elsewhere.reach("r", DIGEST, 0),
        )


class TestPlan:
    def test_want_says_which_blocks_and_who(self, elsewhere) -> None:
        """R-60: the hashes of the wanted tokens, for the ranks elsewhere only; once."""
        ask(elsewhere, tokens=range(SIZE, 3 * SIZE))
        (want,), dropped, _ = elsewhere.take()
        assert ((2, 3), SIZE, 3 * SIZE) == (want.ranks, want.start, want.stop)
        assert (tuple(HASHES[1:3]), ()) == (want.hashes, dropped)
        assert not any(elsewhere.take())

    def test_drop_goes_out_once(self, elsewhere) -> None:
        """R-53, R-60: what is over is let go of elsewhere as well."""
        ask(elsewhere)
        number = number_of(elsewhere)
        elsewhere.drop("r")
        elsewhere.drop("r")
        assert News(dropped=(number,)) == elsewhere.take()
        assert (News(), 0) == (elsewhere.take(), len(elsewhere))

    def test_what_has_no_room_is_not_asked_for(self, elsewhere) -> None:
        """H-12, R-60: the wants of a plan are bounded; the next plan takes more."""
        each = WANT_NBYTES // 3 // 32
        hashes, tokens = [bytes(32)] * each, range(each * SIZE)
        asked = [ask(elsewhere, name, hashes, tokens) for name in "abcd"]
        assert [True, True, False, False] == asked
        wants = elsewhere.take().wants
        assert WANT_NBYTES >= len(encode(StepPlan(step=1, wants=wants)))
        assert ask(elsewhere, "c", hashes, tokens)

    def test_tiers_that_a_request_names_count(self, elsewhere) -> None:
        """H-12, R-60: what a client may write takes room in a plan like hashes do."""
        words = tuple(
            ("\N{GRINNING FACE}" * 64, "\N{GRINNING FACE}" * 64) for _ in range(32)
        )
        wishes = attrs.evolve(NO_WISHES, tiers=words)
        names = iter(range(2000))
        while elsewhere.ask(str(next(names)), MATCHER, HASHES, WHOLE, TIMES, wishes):
            pass
        wants = elsewhere.take().wants
        assert WANT_NBYTES >= len(encode(StepPlan(step=1, wants=wants)))

    def test_prompt_beyond_a_plan_is_asked_for_in_parts(self, elsewhere) -> None:
        """H-12, R-60: one plan after the other, none beyond its bound, and all of it."""
        hashes = [number.to_bytes(32) for number in range(WANT_NBYTES // 16)]
        assert ask(elsewhere, hashes=hashes, tokens=range(len(hashes) * SIZE))
        wants = []
        while news := elsewhere.take().wants:
            assert WANT_NBYTES >= len(encode(StepPlan(step=1, wants=news)))
            wants += news
        assert 2 < len(wants)
        assert hashes == [each for want in wants for each in want.hashes]
        starts = [want.start for want in wants]
        assert [0, *(want.stop for want in wants[:-1])] == starts
        assert WANT_NBYTES < MAX_MESSAGE_BYTES

    def test_parts_reach_as_far_as_the_first_that_falls_short(self, elsewhere) -> None:
        """R-60: what is behind a missing block counts for nothing; what came before a part
        that nobody has answered yet counts."""
        hashes = [number.to_bytes(32) for number in range(WANT_NBYTES // 16)]
        whole = range(len(hashes) * SIZE)
        assert ask(elsewhere, hashes=hashes, tokens=whole)
        wants = []
        while news := elsewhere.take().wants:
            wants += news
        first, second, *rest = wants
        for want in (first, *rest):
            for rank in (2, 3):
                elsewhere.told(rank, {want.number: want.stop})
        assert elsewhere.is_pending("r")
        assert first.stop == elsewhere.reach("r", DIGEST, 0)
        elsewhere.told(2, {second.number: second.stop})
        elsewhere.told(3, {second.number: second.start + SIZE})
        assert not elsewhere.is_pending("r")
        assert second.start + SIZE == elsewhere.reach("r", DIGEST, 0)

    def test_parts_in_no_plan_are_taken_back(self, elsewhere) -> None:
        """R-60: of a request that is over nobody hears more than that."""
        hashes = [number.to_bytes(32) for number in range(WANT_NBYTES // 16)]
        assert ask(elsewhere, hashes=hashes, tokens=range(len(hashes) * SIZE))
        (first,) = elsewhere.take().wants
        elsewhere.drop("r")
        assert News(dropped=(first.number,)) == elsewhere.take()
        assert (News(), {}) == (elsewhere.take(), elsewhere._part_of)


class TestForget:
    def test_engine_is_asked_for_a_step_until_all_is_told(self, elsewhere) -> None:
        """What does not fit into a plan goes with the next, though nobody runs any more."""
        assert not elsewhere.awaits_plan()
        hashes = [number.to_bytes(32) for number in range(WANT_NBYTES // 16)]
        elsewhere.forget(MATCHER, hashes, len(hashes) * SIZE)
        plans = []
        while elsewhere.awaits_plan():
            plans += [elsewhere.take()]
        assert 1 < len(plans)
        assert not any(elsewhere.take())

    def test_prompt_is_forgotten_once_in_bounded_plans(self, elsewhere) -> None:
        """H-12: whatever its length, and beside what is wanted."""
        hashes = [number.to_bytes(32) for number in range(WANT_NBYTES // 16)]
        elsewhere.forget(MATCHER, hashes, len(hashes) * SIZE + 3)
        assert ask(elsewhere)
        told = []
        while any(news := elsewhere.take()):
            plan = StepPlan(step=1, **news._asdict())
            assert plan == decode_plan(encode(plan))
            assert 2 * WANT_NBYTES >= len(encode(plan))
            told += news.forgotten
        assert hashes == [each for one in told for each in one.hashes]
        assert {(2, 3)} == {one.ranks for one in told}

    def test_prompt_is_forgotten_in_a_doubt_as_well(self, elsewhere) -> None:
        """Its blocks are under the keys of before, whatever the weights are now."""
        matcher = PrefixMatcher(ONE_FULL, None, DIGEST, [ShardId(0)], full_hits=True)
        matcher.rekey(b"")
        elsewhere.forget(matcher, HASHES, 4 * SIZE)
        assert [DIGEST] == [each.keyspace_digest for each in elsewhere.take().forgotten]

    def test_nobody_is_told_who_is_here_or_while_no_key_is_known(self) -> None:
        """Ranks of this machine share the store in which it is deleted."""
        elsewhere = Elsewhere()
        elsewhere.forget(MATCHER, HASHES, 4 * SIZE)
        elsewhere.ranks = (1,)
        unkeyed = PrefixMatcher(ONE_FULL, None, b"", [ShardId(0)], full_hits=True)
        elsewhere.forget(unkeyed, HASHES, 4 * SIZE)
        assert not any(elsewhere.take())
