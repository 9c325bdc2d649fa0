# SPDX-License-Identifier: Apache-2.0
"""What a tier knows of keys, for as long as somebody asks."""

from collections.abc import Iterable

import attrs
import pytest

from ucm.cache.fetches import Fetched
from ucm.errors import PipelineClosedError, StoreUnavailableError
from ucm.integration.vllm.tier_lookups import Lookups
from ucm.reasons import Reason


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
class Fetch:
    """Stands in for ``ucm.cache.sync.Fetching``, ended by the test."""

    keys: list[bytes]
    since: float
    found: int | None = None
    is_given_up: bool = False

    @property
    def is_over(self) -> bool:
        """Whether the test has ended it."""
        return self.found is not None

    def result(self) -> Fetched:
        """Return what the test has said; below 0: the cache was closed."""
        assert self.found is not None
        if self.found < 0:
            raise PipelineClosedError("closed")
        return Fetched(self.found, Reason.ABSENT, self.give_up)

    def give_up(self) -> None:
        """Take note of it."""
        self.is_given_up = True


@attrs.define
class Desk:
    """Takes questions; has a clock that stands still."""

    asked: list[Question] = attrs.Factory(list)
    fetches: list[Fetch] = attrs.Factory(list)
    now: float = 100.0
    error: Exception | None = None

    def ask(self, keys: list[bytes]) -> Question:
        """Take a question, or raise."""
        if self.error is not None:
            raise self.error
        self.asked.append(Question(keys))
        return self.asked[-1]

    def fetch(self, keys: list[bytes], since: float) -> Fetch:
        """Take what tiers are to bring, or raise."""
        if self.error is not None:
            raise self.error
        self.fetches.append(Fetch(list(keys), since))
        return self.fetches[-1]


@pytest.fixture
def desk() -> Desk:
    """Where questions go."""
    return Desk()


@pytest.fixture
def lookups(desk: Desk) -> Lookups:
    """What is tested."""
    return Lookups(desk.ask, lambda: desk.now)


@pytest.fixture
def tiered(desk: Desk) -> Lookups:
    """What is tested, where there are tiers."""
    return Lookups(desk.ask, lambda: desk.now, desk.fetch)


def found(lookups: Lookups, keys: Iterable[bytes], name: str) -> list[bool | None]:
    """Ask for several keys."""
    return [lookups.find(key, name) for key in keys]


A, B, C, D, E = b"a", b"b", b"c", b"d", b"e"


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


class TestTiers:
    def test_tiers_are_asked_for_what_the_store_lacks(
        self, tiered: Lookups, desk: Desk
    ) -> None:
        """R-53: one request's keys in the order of its prompt, however the engine asks; the
        head that is stored is told at once, what lies behind the first gap with the
        answer, as nobody may load it before."""
        places = {A: 1, B: 2, C: 3, D: 4, E: 5}
        for key in (E, D, C, B, A):
            assert tiered.find(key, "r", places.get) is None
        tiered.end_step()
        desk.now = 103.0
        desk.asked[0].say([A, C, E])
        tiered.end_step()
        (fetch,) = desk.fetches
        assert ([A, B, C, D, E], 100.0) == (fetch.keys, fetch.since)
        assert [True, *[None] * 4] == found(tiered, places, "r")
        tiered.end_step()
        fetch.found = 2
        assert [True, True, True, False, True] == found(tiered, places, "r")
        assert 1 == len(desk.fetches)

    def test_nobody_asks_tiers_for_what_the_store_has(
        self, tiered: Lookups, desk: Desk
    ) -> None:
        """R-53: nor for a request that has gone, nor while the store is left alone."""
        found(tiered, [A], "r")
        tiered.end_step()
        desk.asked[0].say([A])
        tiered.end_step()
        found(tiered, [B], "s")
        tiered.end_step()
        tiered.release("s")
        desk.asked[1].say([])
        tiered.end_step()
        found(tiered, [C], "t")
        tiered.end_step()
        tiered.rest(10.0)
        desk.asked[2].say([])
        tiered.end_step()
        assert [False] == found(tiered, [C], "t")
        assert [] == desk.fetches

    @pytest.mark.parametrize("closed", ["before", "meanwhile"])
    def test_closed_cache_has_what_the_store_said(
        self, tiered: Lookups, desk: Desk, closed: str
    ) -> None:
        """R-54: nobody waits for tiers that are not asked any more."""
        found(tiered, [A, B, C], "r")
        tiered.end_step()
        if closed == "before":
            desk.error = PipelineClosedError("closed")
        desk.asked[0].say([A, C])
        tiered.end_step()
        for fetch in desk.fetches:
            fetch.found = -1
        tiered.end_step()
        assert [True, False, True] == found(tiered, [A, B, C], "r")

    def test_each_request_has_a_fetch_of_its_own(
        self, tiered: Lookups, desk: Desk
    ) -> None:
        """R-53: one that is slow holds up no other; what both want is fetched once."""
        found(tiered, [A, B], "r")
        found(tiered, [A, C], "s")
        tiered.end_step()
        desk.asked[0].say([])
        tiered.end_step()
        assert [[A, B], [C]] == [each.keys for each in desk.fetches]
        desk.fetches[1].found = 1
        tiered.end_step()
        assert [None, True] == found(tiered, [A, C], "s")
        desk.fetches[0].found = 1
        tiered.end_step()
        assert [True, False, True] == found(tiered, [A, B, C], "s")

    def test_request_that_ends_gives_up_what_is_fetched_for_it(
        self, tiered: Lookups, desk: Desk
    ) -> None:
        """R-53: who waits for the same blocks asks anew, and nothing else is kept."""
        found(tiered, [A, B], "r")
        found(tiered, [A], "s")
        tiered.end_step()
        desk.asked[0].say([])
        tiered.end_step()
        tiered.release("r")
        assert desk.fetches[0].is_given_up
        tiered.end_step()
        assert [A] == desk.asked[1].keys
        desk.asked[1].say([])
        tiered.end_step()
        assert [A] == desk.fetches[1].keys
        tiered.close()
        assert (True, 0) == (desk.fetches[1].is_given_up, len(tiered))

    def test_key_whose_asker_has_gone_is_fetched_for_who_is_left(
        self, tiered: Lookups, desk: Desk
    ) -> None:
        """R-53: whether it goes before the question, or before its answer."""
        for name in ("r", "s", "t"):
            found(tiered, [A], name)
        tiered.release("r")
        tiered.end_step()
        tiered.release("s")
        desk.asked[0].say([])
        tiered.end_step()
        assert [False] == [each.is_given_up for each in desk.fetches]
        tiered.release("t")
        assert [True] == [each.is_given_up for each in desk.fetches]

    def test_block_that_was_missed_meanwhile_stays_missed(
        self, tiered: Lookups, desk: Desk
    ) -> None:
        """R-54: a load of it has failed; what a tier brings is what has failed."""
        found(tiered, [A], "r")
        tiered.end_step()
        desk.asked[0].say([])
        tiered.end_step()
        tiered.missed([A])
        desk.fetches[0].found = 1
        tiered.end_step()
        assert [False] == found(tiered, [A], "r")
