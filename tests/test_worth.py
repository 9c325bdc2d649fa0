# SPDX-License-Identifier: Apache-2.0
"""Whether loading pays: what is learnt, what is declined, and that it is tried again."""

import pytest

from ucm.worth import Choice, Speed


def learnt(*seen: tuple[float, float]) -> Speed:
    """Return a speed that has seen amounts and seconds."""
    speed = Speed()
    for amount, seconds in seen:
        speed.saw(amount, seconds)
    return speed


def choice_of(seconds: float) -> Choice:
    """Return a choice to which 100 have always taken so long."""
    choice = Choice()
    for now in range(4):
        choice.saw(100, seconds, now)
    return choice


class TestSpeed:
    @pytest.mark.parametrize(
        ("seen", "expected"),
        [
            ([(10, 1.1), (20, 1.2), (30, 1.3), (40, 1.4)], 2.0),
            ([(100, 2.0)] * 4, 2.0),
            ([(10, 2.0), (20, 1.0), (30, 1.0), (40, 0.5)], 1.06),
            ([(50, 1.0)] * 4, 2.0),
        ],
    )
    def test_latency_and_rate_are_told_apart(self, seen, expected) -> None:
        """R-59: from amounts that differ; from equal ones only a rate is known, and nothing
        takes less than no time."""
        assert expected == pytest.approx(learnt(*seen).seconds_of(100), rel=0.05)

    def test_few_observations_say_nothing(self) -> None:
        """R-59: a first one may be an accident."""
        assert not learnt(*[(1, 1.0)] * 3).is_known
        assert learnt(*[(1, 1.0)] * 4).is_known

    def test_what_was_seen_last_counts_most(self) -> None:
        """R-59: a drive that became slow is known to be after a few calls."""
        speed = learnt(*[(100, 1.0)] * 50, *[(100, 10.0)] * 12)
        assert 8.0 < speed.seconds_of(100) < 10.0


class TestChoice:
    def test_slower_than_computing_is_declined(self) -> None:
        """R-59: and what is faster is not, nor anything before a measurement."""
        assert choice_of(2.0).declines(100, 1.0, 4.0)
        assert not choice_of(0.5).declines(100, 1.0, 4.0)
        assert not choice_of(2.0).declines(100, 0.0, 4.0)
        assert not Choice().declines(100, 1e-9, 4.0)

    def test_much_more_than_was_ever_seen_is_tried(self) -> None:
        """R-59: loads that are alike tell no latency from a rate; what was large counts for
        less, as it is forgotten, and so does what stands before the one that is asked about."""
        choice = choice_of(2.0)
        assert choice.declines(200, 1.0, 4.0)
        assert not choice.declines(201, 1.0, 4.0)
        assert choice.declines(500, 1.0, 4.0, one=200)
        for now in range(4, 9):
            choice.saw(10, 2.0, now)
        assert not choice.declines(100, 1.0, 9.0)
        assert choice.declines(80, 1.0, 9.0)

    def test_one_in_a_few_is_tried(self) -> None:
        """R-59: a stale estimate meets the truth again, by number or by time; and of those
        that are tried there are no more."""
        choice = choice_of(2.0)
        declined = [choice.declines(100, 1.0, 4.0) for _ in range(48)]
        assert ([True] * 15 + [False]) * 3 == declined
        assert not choice.declines(100, 1.0, 40.0)
        assert choice.declines(100, 1.0, 41.0)

    def test_source_that_is_well_again_is_taken_again(self) -> None:
        """R-59: after a few tries that went well nothing is declined."""
        choice, tries = choice_of(20.0), 0
        for now in range(1000):
            if not choice.declines(100, 1.0, now):
                choice.saw(100, 0.01, now)
                tries += 1
        assert tries > 600
