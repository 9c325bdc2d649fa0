# SPDX-License-Identifier: Apache-2.0
"""Mutants of what requests and measurements decide: wishes, tiers, predictions, admission."""

from tests.mutations.mutant import Mutant

__all__ = ["LIMITS"]

_ADMISSION = "tests/agent/test_admission.py::TestCore"
_ADMITTER = "tests/agent/test_admission.py::TestAdmitter"
_ASKS = "tests/integration/vllm/test_tiers.py"
_FLIGHTS = "ucm/agent/flights.py"
_HALVES = "tests/integration/vllm/test_wishes.py::TestHalves"
_LIMIT = "tests/scheduler/test_decoded.py::TestLimit"
_PENDING = "tests/integration/vllm/test_tiers_pending.py::TestEngine"
_TIERS = "ucm/integration/vllm/tiers.py"
_REFUSED = "tests/agent/test_process.py::TestRefused::test_engine_hears_why_its_agent_cannot_be_used"
_TERMS = "tests/agent/test_terms.py"
_WORLD = "tests/simulation/test_tiers_world.py::TestTiersWorld::test_nothing_that_must_hold_is_broken_whatever_tiers_do"
_WORTH = "ucm/worth.py"
_PAYING = "ucm/scheduler/paying.py"
_PAYS = "tests/scheduler/test_paying.py"
_LOOKUPS = "ucm/integration/vllm/lookups.py"
_SLOWER = "tests/integration/vllm/test_paying.py::TestSlower"
_CHOICE = "tests/test_worth.py::TestChoice"
_SPEED = "tests/test_worth.py::TestSpeed"

LIMITS = (
    Mutant(
        name="failed_get_is_the_end",
        why="A damaged disk hides what the next tier has whole.",
        file=_FLIGHTS,
        find=" for each in flights if each.reason not in _OF_TIERS or not each.tiers\n",
        replace=" for each in flights\n",
        killers=(
            f"{_TERMS}::TestNextTier::test_what_one_tier_fails_to_bring_the_next_one_brings",
        ),
    ),
    Mutant(
        name="failed_tier_asked_for_ever",
        why="R-53: two damaged copies are fetched until the request's time is up.",
        file="ucm/agent/flight.py",
        find="            flight.tiers = left\n",
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
        file="ucm/agent/register.py",
        find="names = list(zip(sizes, itertools.repeat(own.tiers), strict=False))",
        replace="names = [next((of for of in self.by_key if of[0] == key), (key, own.tiers)) for key in sizes]",
        killers=(f"{_TERMS}::TestOnly::test_restricted_want_does_not_fail_another",),
    ),
    Mutant(
        name="slots_in_order_of_arrival_only",
        why="R-58: a batch job's fetches go before those of whom the engine runs first.",
        file=_FLIGHTS,
        find="place = Place(min(want.priority for want in wants), wants[0].tenant)",
        replace="place = Place(0, wants[0].tenant)",
        killers=(f"{_TERMS}::TestPriority::test_lowest_priority_has_its_slots_first",),
    ),
    Mutant(
        name="first_in_turn_waits_for_the_last",
        why="R-53: an urgent want of one block waits behind a large one, though slots are free.",
        file="ucm/agent/budget.py",
        find="        self._serve()  # also where others wait: it may come before them all\n",
        replace="        if self.num_waiting == 1:\n            self._serve()\n",
        killers=(
            "tests/agent/test_budget.py::test_who_comes_first_does_not_wait_behind_a_large_one",
        ),
    ),
    Mutant(
        name="waits_for_what_the_engine_has",
        why="A prompt in the engine's own cache waits for a tier that is slow or hangs.",
        file=_TIERS,
        find="            return computed_tokens <= question.computed\n",
        replace="            return True\n",
        killers=(
            f"{_PENDING}::test_what_the_engine_has_itself_holds_nobody",
            f"{_ASKS}::TestEarly::test_what_the_engine_has_itself_is_not_waited_for",
        ),
    ),
    Mutant(
        name="waits_for_less_than_the_engine_has",
        why="A request with a limit waits for blocks that it has, and not for those it lacks.",
        file=_TIERS,
        find="if is_worth and computed_tokens < question.wanted.ends[-1]:",
        replace="if is_worth:",
        killers=(
            f"{_ASKS}::TestEarly::test_what_is_behind_an_early_question_is_asked_for",
        ),
    ),
    Mutant(
        name="priority_of_anybody",
        why="Where requests run in order of arrival, one that says so is fetched before all.",
        file="ucm/integration/vllm/wishes.py",
        find='getattr(request, "priority", 0) if self._is_ranked else 0',
        replace='getattr(request, "priority", 0)',
        killers=(
            "tests/integration/vllm/test_wishes.py::TestReader::test_priority_is_the_engines",
        ),
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
        find="                kept = of_tier[number][0].at\n",
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
    # What a tier takes.
    Mutant(
        name="seen_once_spilled",
        why="R-56: a drive wears for what never comes back, against its setting.",
        file="ucm/agent/spill.py",
        find="not (self.admitter.takes_all or self.admitter.admits(key))",
        replace="False",
        killers=(f"{_ADMISSION}::test_seen_once_is_kept_from_one_tier_and_said_so",),
    ),
    Mutant(
        name="listed_twice_is_seen_twice",
        why="R-56: a reader that was left behind spills all that the slab has.",
        file="ucm/agent/admission.py",
        find="        if self._is_gone.get(key, False):\n",
        replace="        if key in self._is_gone:\n",
        killers=(f"{_ADMITTER}::test_block_is_taken_when_it_comes_again",),
    ),
    Mutant(
        name="admission_remembers_all",
        why="R-56: an agent grows with every block that is ever stored.",
        file="ucm/agent/admission.py",
        find="        if len(self._is_gone) > self._most_keys:\n",
        replace="        if False:\n",
        killers=(f"{_ADMITTER}::test_memory_is_bounded",),
    ),
    Mutant(
        name="admission_untold",
        why="R-56: a miss for want of admission looks like any other.",
        file="ucm/agent/core.py",
        find="Reason.ADMISSION if refused and all(refused) else Reason.ABSENT",
        replace="Reason.ABSENT",
        killers=(f"{_ADMISSION}::test_seen_once_is_kept_from_one_tier_and_said_so",),
    ),
    # What a request says, and when it asks.
    Mutant(
        name="load_limit_ignored",
        why="R-58: a request that limits its loads is loaded whole.",
        file="ucm/scheduler/adapter.py",
        find="        limit = min(room, wishes.most_loaded)\n",
        replace="        limit = room\n",
        killers=(f"{_HALVES}::test_request_is_loaded_as_far_as_it_says",),
    ),
    Mutant(
        name="limited_request_looked_at_for_ever",
        why="R-18: a request beyond its limit costs time in each step.",
        file="ucm/scheduler/lives.py",
        find="            if due <= self.most_saved:\n",
        replace="            if True:\n",
        killers=(
            f"{_LIMIT}::test_limited_request_is_saved_so_far_and_not_looked_at_again",
        ),
    ),
    Mutant(
        name="limit_ends_with_the_request",
        why="R-58: what was not to be saved is saved when the request ends.",
        file="ucm/scheduler/lives.py",
        find="        tokens = min(end.accepted_tokens, hashed, self.most_saved)\n",
        replace="        tokens = min(end.accepted_tokens, hashed)\n",
        killers=(
            f"{_LIMIT}::test_limited_request_is_saved_so_far_and_not_looked_at_again",
        ),
    ),
    Mutant(
        name="wishes_read_in_each_step",
        why="R-58: one request that is not understood counts as often as it is asked about.",
        file="ucm/integration/vllm/running.py",
        find="        if known is None or known.request is not request:\n",
        replace="        if True:\n",
        killers=(f"{_HALVES}::test_wish_is_read_once_in_a_life",),
    ),
    Mutant(
        name="wanted_beyond_the_limit",
        why="R-58: blocks are fetched that the request will not load.",
        file=_TIERS,
        find="            request.num_tokens, computed_tokens, wishes.most_loaded\n",
        replace="            request.num_tokens, computed_tokens, request.num_tokens\n",
        killers=(f"{_ASKS}::TestWishes::test_request_that_loads_less_asks_for_less",),
    ),
    Mutant(
        name="early_question_is_the_last",
        why="R-54: a request that waits long for its turn has its fetch cut, and computes.",
        file=_TIERS,
        find="        return question.reason in _AGAIN or self._clock() > kept_until\n",
        replace="        return False\n",
        killers=(
            f"{_ASKS}::TestEarly::test_early_question_that_came_to_nothing_is_asked_once_more",
            f"{_ASKS}::TestEarly::test_what_is_no_longer_kept_is_asked_for_again",
        ),
    ),
    Mutant(
        name="burst_asks_early",
        why="R-54: a thousand arriving requests take the agent from those whose turn it is.",
        file=_TIERS,
        find="len(self._questions) < _MOST_EARLY and ",
        replace="",
        killers=(f"{_ASKS}::TestEarly::test_early_questions_are_few",),
    ),
    Mutant(
        name="arrival_unheard",
        why="R-54: fetching begins when a request is scheduled, not when it arrives.",
        file="ucm/integration/vllm/scheduler.py",
        find="            self._look_up(known, 0, is_early=True)\n",
        replace="            pass\n",
        killers=(f"{_PENDING}::test_request_that_arrives_is_fetched_for",),
    ),
    Mutant(
        name="layerwise_wants_kept",
        why="R-53: layer by layer, a long answer keeps the slots of its prompt's fetch.",
        file=_TIERS,
        find="if question.state is _State.BEGUN and not is_loading(request_id)",
        replace="if False",
        killers=(
            f"{_ASKS}::TestDrop::test_request_whose_loads_are_over_drops_its_want",
        ),
    ),
    Mutant(
        name="plan_ahead_taken_for_speed",
        why="R-59: an engine that plans two steps at once seems to compute in no time.",
        file="ucm/scheduler/prompts.py",
        find="            if self._behind == self._batches:\n",
        replace="            if self._behind == 1:\n",
        killers=(
            "tests/scheduler/test_prompts.py::TestPromptSpeed::test_run_of_prompts_is_measured_to_the_second_plan_behind_it",
        ),
    ),
    # Who cannot be used.
    Mutant(
        name="refused_agent_started_for_ever",
        why="R-63: of two slabs with one disk the second starts a process every ten seconds.",
        file="ucm/agent/launch.py",
        find="        if self._clock() >= self._not_before:\n",
        replace="        if True:\n",
        killers=(_REFUSED,),
    ),
    Mutant(
        name="refusal_of_an_agent_untold",
        why="X-09: an engine without its tiers does not say why.",
        file="ucm/agent/client.py",
        find="                    self._tell_refusal(self._launch())\n",
        replace="                    self._launch()\n",
        killers=(_REFUSED,),
    ),
    # In the simulated world.
    Mutant(
        name="native_write_behind_its_lease",
        why="A client that cannot be cancelled writes into the slots of another block.",
        file=_FLIGHTS,
        find="                    with anyio.CancelScope(shield=True):\n                        await self._slab.call(lease.discard)\n",
        replace="                    pass\n",
        killers=(_WORLD,),
    ),
    Mutant(
        name="retried_flight_behind_a_deadline",
        why="R-53: a flight that has ended is tried at every tier.",
        file="ucm/agent/flight.py",
        find="    return list(itertools.filterfalse(_IS_DONE, flights))\n",
        replace="    return list(flights)\n",
        killers=(_WORLD,),
    ),
    Mutant(
        name="checksum_of_a_lie",
        why="The right bytes of another block, with their checksum, are served as this one's.",
        file="ucm/seals.py",
        find="list(map(xxh3_64_intdigest, keys))",
        replace="[0 for _ in keys]",
        killers=(_WORLD,),
    ),
    # What a hit of the slab is worth.
    Mutant(
        name="hits_always_loaded",
        why="R-59: a prompt waits for a load that is slower than computing it.",
        file=_PAYING,
        find="        if not self._choice.declines(nbytes, compute_s, now, one=one):\n            return False\n",
        replace="        if True:\n            return False\n",
        killers=(
            f"{_PAYS}::TestDeclines::test_load_that_is_slower_than_computing_is_not_taken",
            f"{_SLOWER}::test_hit_that_does_not_pay_is_computed_and_says_so",
        ),
    ),
    Mutant(
        name="hits_weighed_in_each_step",
        why="R-59: one request that waits for sixteen steps has its slow load all the same.",
        file=_LOOKUPS,
        find="            if known.weighed[0] != hit:\n",
        replace="            if True:\n",
        killers=(f"{_SLOWER}::test_hit_that_does_not_pay_is_computed_and_says_so",),
    ),
    Mutant(
        name="hit_weighed_once_for_ever",
        why="R-59: a request that is preempted goes by what was true when it came.",
        file=_LOOKUPS,
        find="        known.weighed = UNWEIGHED\n",
        replace="",
        killers=(f"{_SLOWER}::test_next_life_is_decided_anew",),
    ),
    Mutant(
        name="loads_ahead_passed_over",
        why="R-59: a load behind ten others is predicted to take as long as one alone.",
        file=_PAYING,
        find="nbytes = self._nbytes_ahead + one",
        replace="nbytes = one",
        killers=(f"{_PAYS}::TestDeclines::test_loads_that_are_on_their_way_count",),
    ),
    Mutant(
        name="prompts_ahead_passed_over",
        why="R-59: a busy engine computes what it could load beside its work.",
        file=_PAYING,
        find="self.prompts.seconds_of(self._ahead + len(loaded))",
        replace="self.prompts.seconds_of(len(loaded))",
        killers=(f"{_PAYS}::TestDeclines::test_prompts_that_are_computed_first_count",),
    ),
    Mutant(
        name="loads_charged_with_those_before",
        why="R-59: after a burst of hits loads seem slow, and are not taken.",
        file=_PAYING,
        find="max(self._heard_at, began)",
        replace="began",
        killers=(
            f"{_PAYS}::TestLearns::test_load_behind_another_is_not_charged_with_it",
        ),
    ),
    Mutant(
        name="failed_loads_learnt_from",
        why="R-59: a load that fails at its deadline makes all others seem as slow.",
        file="ucm/integration/vllm/scheduler.py",
        find="            self._paying.forget(failure.request_id)\n",
        replace="            pass\n",
        killers=(f"{_SLOWER}::test_loads_of_the_engine_are_learnt_from",),
    ),
    Mutant(
        name="window_weighed_as_a_whole",
        why="R-59: with a sliding window a long hit is a short load, and is not taken.",
        file=_PAYING,
        find="            needed = group.window_blocks(loaded.stop)\n",
        replace="            needed = range(loaded.stop // group.block_tokens)\n",
        killers=(f"{_PAYS}::TestDeclines::test_only_what_a_hit_brings_counts",),
    ),
)
