# SPDX-License-Identifier: Apache-2.0
"""What a tier knows of keys, for as long as somebody asks."""

from collections.abc import Iterable

import attrs
import pytest

from ucm.errors import PipelineClosedError, StoreUnavailableError
from ucm.integration.vllm.tier_lookups import Lookups


@attrs.define
class Question:
    """Stands in for ``ucm.cache.sync.Answer``, answered by the test."""

    keys: list[bytes]
    is_over: bool = False
    error: Exception | None = None
    found: list[bool] = attrs.Factory(list)

    def result(self) -> list[bool]:
        """Return what the test has said."""
        assert self.is_over
        if self.error is not None:
            raise self.error
        return self.found

    def say(self, stored: Iterable[bytes]) -> None:
        """Answer."""
        self.found = [key in stored for key in self.keys]
        self.is_over = True


@attrs.define
class Desk:
    """Takes questions; has a clock that stands still."""

    asked: list[Question] = attrs.Factory(list)
    now: float = 100.0
    error: Exception | None = None

    def ask(self, keys: list[bytes]) -> Question:
        """Take a question, or raise."""
        if self.error is not None:
            raise self.error
        self.asked.append(Question(keys))
        return self.asked[-1]


@pytest.fixture
def desk() -> Desk:
    """Where questions go."""
    return Desk()


@pytest.fixture
def lookups(desk: Desk) -> Lookups:
    """What is tested."""
    return Lookups(desk.ask, lambda: desk.now)


def found(lookups: Lookups, keys: Iterable[bytes], name: str) -> list[bool | None]:
    """Ask for several keys."""
    return [lookups.find(key, name) for key in keys]


A, B, C = b"a", b"b", b"c"


class TestQuestions:
    def test_step_asks_once_for_all_that_is_new(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """Of any number of requests, and each key once."""
        assert [None, None] == found(lookups, [A, B], "r")
        assert [None, None] == found(lookups, [B, C], "s")
        assert [] == desk.asked
        lookups.end_step()
        assert [[A, B, C]] == [each.keys for each in desk.asked]
        lookups.end_step()
        assert 1 == len(desk.asked)

    def test_answer_is_taken_when_it_is_there(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """By the first look-up of a step, for all who ask, and nobody asks again."""
        found(lookups, [A, B], "r")
        lookups.end_step()
        assert [None, None] == found(lookups, [A, B], "r")
        lookups.end_step()
        desk.asked[0].say([A])
        assert [True, False] == found(lookups, [A, B], "r")
        assert [True, False] == found(lookups, [A, B], "s")
        lookups.end_step()
        assert 1 == len(desk.asked)

    def test_all_of_a_step_sees_the_same_answers(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """An answer that comes amid a request's look-ups waits for the next step: the
        engine would fetch what lies behind a block of which it knows nothing yet."""
        found(lookups, [A, B], "r")
        lookups.end_step()
        assert lookups.find(A, "r") is None
        desk.asked[0].say([B])
        assert lookups.find(B, "r") is None
        lookups.end_step()
        assert [False, True] == found(lookups, [A, B], "r")

    def test_one_question_is_open_at_a_time(self, lookups: Lookups, desk: Desk) -> None:
        """What comes meanwhile is asked together behind it."""
        found(lookups, [A], "r")
        lookups.end_step()
        found(lookups, [B], "s")
        lookups.end_step()
        found(lookups, [C], "t")
        lookups.end_step()
        assert 1 == len(desk.asked)
        desk.asked[0].say([A])
        lookups.end_step()
        assert [B, C] == desk.asked[1].keys

    @pytest.mark.parametrize("error", [StoreUnavailableError("gone"), None])
    def test_store_that_does_not_answer_has_nothing(
        self, lookups: Lookups, desk: Desk, error: Exception | None
    ) -> None:
        """Whether the answer is an error or the question cannot be asked."""
        if error is None:
            desk.error = PipelineClosedError("closed")
        found(lookups, [A, B], "r")
        lookups.end_step()
        for question in desk.asked:
            question.error, question.is_over = error, True
        assert [False, False] == found(lookups, [A, B], "r")

    def test_rest_asks_nothing(self, lookups: Lookups, desk: Desk) -> None:
        """While it lasts what is new is not found; what is known stays known."""
        found(lookups, [A], "r")
        lookups.end_step()
        desk.asked[0].say([A])
        lookups.rest(10.0)
        assert [True, None] == found(lookups, [A, B], "r")
        lookups.end_step()
        assert [True, False] == found(lookups, [A, B], "r")
        desk.now += 10.0
        found(lookups, [C], "s")
        lookups.end_step()
        assert [[A], [C]] == [each.keys for each in desk.asked]


class TestRequests:
    def test_nothing_is_kept_of_those_that_have_ended(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """Before their question, while it is open, and behind its answer."""
        for steps in range(3):
            found(lookups, [A, B], "r")
            if steps:
                lookups.end_step()
            if steps > 1:
                desk.asked[-1].say([A])
                found(lookups, [A, B], "r")
            lookups.release("r")
            assert 0 == len(lookups)
            for question in desk.asked:
                question.is_over or question.say([A])
            lookups.end_step()
            assert 0 == len(lookups)
        assert 2 == len(desk.asked)

    def test_answer_stays_while_somebody_asked_for_it(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """The last of several takes it along."""
        for name in ("r", "s"):
            found(lookups, [A], name)
        lookups.end_step()
        desk.asked[0].say([A])
        lookups.release("r")
        lookups.release("unknown")
        assert [True] == found(lookups, [A], "s")
        lookups.release("s")
        assert [None] == found(lookups, [A], "t")

    def test_key_that_is_asked_for_again_is_asked_anew(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """An answer that was on its way to somebody who left serves who came."""
        found(lookups, [A], "r")
        lookups.end_step()
        lookups.release("r")
        found(lookups, [A], "s")
        desk.asked[0].say([A])
        lookups.end_step()
        assert [True] == found(lookups, [A], "s")
        desk.asked[-1].say([])
        lookups.end_step()
        assert [True] == found(lookups, [A], "s")

    def test_missed_block_is_not_tried_again(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """By none of those who asked for it; who comes behind them asks anew."""
        for name in ("r", "s"):
            found(lookups, [A, B], name)
        lookups.end_step()
        desk.asked[0].say([A, B])
        assert [True, True] == found(lookups, [A, B], "r")
        lookups.missed([B, C])
        assert [True, False] == found(lookups, [A, B], "r")
        lookups.release("r")
        assert [True, False] == found(lookups, [A, B], "s")
        lookups.release("s")
        assert 0 == len(lookups)
        assert [None] == found(lookups, [B], "t")

    def test_missed_block_stays_missed_when_its_answer_comes(
        self, lookups: Lookups, desk: Desk
    ) -> None:
        """A question that was open says what was so before."""
        found(lookups, [A], "r")
        lookups.end_step()
        lookups.missed([A])
        desk.asked[0].say([A])
        lookups.end_step()
        assert [False] == found(lookups, [A], "r")
