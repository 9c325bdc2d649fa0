# SPDX-License-Identifier: Apache-2.0
"""Mutants of what requests and measurements decide: wishes, tiers, predictions, admission."""

from tests.mutations.mutant import Mutant

__all__ = ["LIMITS"]

_FLIGHTS = "ucm/agent/flights.py"
_TERMS = "tests/agent/test_terms.py"
_WORTH = "ucm/worth.py"
_CHOICE = "tests/test_worth.py::TestChoice"
_SPEED = "tests/test_worth.py::TestSpeed"

LIMITS = (
    Mutant(
        name="failed_get_is_the_end",
        why="A damaged disk hides what the next tier has whole.",
        file=_FLIGHTS,
        find="            if reason not in _OF_TIERS or not flights[key].tiers:\n",
        replace="            if True:\n",
        killers=(
            f"{_TERMS}::TestNextTier::test_what_one_tier_fails_to_bring_the_next_one_brings",
        ),
    ),
    Mutant(
        name="failed_tier_asked_for_ever",
        why="R-53: two damaged copies are fetched until the request's time is up.",
        file=_FLIGHTS,
        find="            flight.tiers = flight.tiers[flight.tiers.index(number) + 1 :]\n",
        replace="            pass\n",
        killers=(
            f"{_TERMS}::TestNextTier::test_what_no_tier_brings_says_why_the_first_did_not",
        ),
    ),
    Mutant(
        name="any_tier_for_any_want",
        why="R-58: a request that names its tiers is fetched for from others.",
        file="ucm/agent/wants.py",
        find="            if self.only is None or _is_one_of(tier.capabilities, self.only)\n",
        replace="",
        killers=(f"{_TERMS}::TestOnly::test_only_tiers_that_are_meant_are_asked",),
    ),
    Mutant(
        name="restricted_flight_joined_by_all",
        why="R-58: one request that may use no tier makes the others miss.",
        file="ucm/agent/fetch.py",
        find="flight = None if is_there else self._flights.by_key.get((key, tiers))",
        replace="flight = None if is_there else next((each for (of, _), each in self._flights.by_key.items() if of == key), None)",
        killers=(f"{_TERMS}::TestOnly::test_restricted_want_does_not_fail_another",),
    ),
    Mutant(
        name="slots_in_order_of_arrival_only",
        why="R-58: a batch job's fetches go before those of whom the engine runs first.",
        file=_FLIGHTS,
        find="await self._budget.acquire(count, priority)",
        replace="await self._budget.acquire(count)",
        killers=(f"{_TERMS}::TestPriority::test_lowest_priority_has_its_slots_first",),
    ),
    Mutant(
        name="slow_fetch_taken",
        why="R-59: a request waits a second for what it computes in half of one.",
        file=_FLIGHTS,
        find="            if self._choices[number].declines(nbytes, each_s * kept, now):\n",
        replace="            if False:\n",
        killers=(
            f"{_TERMS}::TestSlower::test_fetch_that_is_slower_than_computing_is_not_taken",
        ),
    ),
    Mutant(
        name="fast_part_declined_with_the_slow_one",
        why="R-59: a slow tier that has the end of a prefix keeps its start from being used.",
        file=_FLIGHTS,
        find="                kept = at[found[0]]\n",
        replace="                kept = 0\n",
        killers=(
            f"{_TERMS}::TestSlower::test_part_of_a_prefix_on_a_fast_tier_is_taken",
        ),
    ),
    Mutant(
        name="estimate_never_tried_again",
        why="R-59: a tier that was slow once is never used again.",
        file=_WORTH,
        find="        if is_slower and self._num_declined < _MOST_DECLINED and not is_stale:\n",
        replace="        if is_slower:\n",
        killers=(
            f"{_CHOICE}::test_one_in_a_few_is_tried",
            f"{_TERMS}::TestSlower::test_slow_tier_is_tried_again_and_believed",
        ),
    ),
    Mutant(
        name="tries_without_bound",
        why="R-59: once it is time for a try, all that follows is fetched from a slow tier.",
        file=_WORTH,
        find="        self._num_declined, self._tried_at = 0, now\n",
        replace="",
        killers=(f"{_CHOICE}::test_one_in_a_few_is_tried",),
    ),
    Mutant(
        name="declined_without_a_measurement",
        why="R-59: the first accident of a new engine is taken for the rule.",
        file=_WORTH,
        find="return self.num_seen >= _LEAST_SEEN and self._amounts > 0",
        replace="return self._amounts > 0",
        killers=(f"{_SPEED}::test_few_observations_say_nothing",),
    ),
)
