# SPDX-License-Identifier: Apache-2.0
"""How fast the engine computes prompts, as its steps tell."""

import pytest

from ucm.scheduler.prompts import PromptSpeed


def plans(speed: PromptSpeed, *steps: tuple[int, float]) -> None:
    """Tell of plans, by tokens and moments."""
    for tokens, now in steps:
        speed.planned(tokens, now)


class TestPromptSpeed:
    def test_run_of_prompts_is_measured_to_the_second_plan_behind_it(self) -> None:
        """R-59: an engine that plans ahead has not computed what it has planned."""
        speed = PromptSpeed()
        for at in range(4):
            plans(speed, (1000, at * 10), (1000, at * 10), (1, at * 10 + 1))
            plans(speed, (1, at * 10 + 2))
        assert 1.0 == speed.seconds_of(1000)

    def test_stages_have_more_steps_under_way(self) -> None:
        """R-59: an engine of two stages makes three plans before it waits for the first."""
        speed = PromptSpeed(3)
        for at in range(4):
            plans(speed, (1000, at * 10), (0, at * 10), (0, at * 10), (0, at * 10 + 2))
        assert 2.0 == speed.seconds_of(1000)

    def test_nothing_is_said_before_enough_was_seen(self) -> None:
        """R-59: without a measurement nothing is declined; decoding says nothing."""
        speed = PromptSpeed()
        for at in range(3):
            plans(speed, (1000, at * 10), (1, at * 10 + 1), (1, at * 10 + 2))
        for at in range(30, 100):
            plans(speed, (1, at))
        assert 0.0 == speed.seconds_of(1000)

    def test_pause_makes_nothing_slow_at_once(self) -> None:
        """R-59: an engine with nothing to do looks slow, and is believed bit by bit; one
        that is fast is believed at once."""
        speed = PromptSpeed()
        for at in range(4):
            plans(speed, (1000, at * 10), (1, at * 10 + 1), (1, at * 10 + 2))
        plans(speed, (1000, 50), (1, 51), (1, 5000))
        assert 2.0 == pytest.approx(speed.seconds_of(1000), rel=0.12)
        plans(speed, (1000, 6000), (1, 6000.5), (1, 6001))
        assert 1.0 == pytest.approx(speed.seconds_of(1000))

    def test_long_run_is_told_of_before_it_ends(self) -> None:
        """R-59: under load there may be no step without prompts."""
        speed = PromptSpeed()
        for at in range(60):
            speed.planned(1000, float(at))
        assert 1.125 == pytest.approx(speed.seconds_of(1000), rel=0.2)
