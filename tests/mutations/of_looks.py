# SPDX-License-Identifier: Apache-2.0
"""Mutants of who is asked for blocks, and how long is waited for what tiers tell."""

from tests.mutations.mutant import Mutant

__all__ = ["LOOKS"]

_FLIGHTS = "ucm/agent/flights.py"
_LOCATES = "tests/agent/test_locating.py"
_LOCATING = "ucm/agent/locating.py"
_FETCHES = "tests/agent/test_fetch_few.py::TestFewRequests"
_WRITTEN = "tests/agent/test_fetch_written.py::TestTiers"
_TERMS = "tests/agent/test_terms.py::TestNextTier"

LOOKS = (
    Mutant(
        name="fetch_behind_a_hole",
        why="Blocks of no use evict others.",
        file=_LOCATING,
        find="there.index(False) if False in there else len(keys)",
        replace="len(keys)",
        killers=(f"{_LOCATES}::test_nothing_is_fetched_behind_a_hole_in_all_tiers",),
    ),
    Mutant(
        name="guess_before_another_tier",
        why="What a tier lacks in the middle of a prefix is not asked of the next one.",
        file=_LOCATING,
        find="is_along = is_prefix and one is last",
        replace="is_along = is_prefix",
        killers=(f"{_FETCHES}::test_tier_before_another_is_asked_for_each_block",),
    ),
    Mutant(
        name="guess_behind_a_gap_taken_for_told",
        why="What a tier has behind blocks that a late one turns out to have is not fetched.",
        file=_LOCATING,
        find="if is_along and Presence.ABSENT in answers:",
        replace="if False:",
        killers=(
            f"{_LOCATES}::test_what_was_guessed_behind_a_gap_is_asked_for_when_the_gap_is_closed",
        ),
    ),
    Mutant(
        name="slow_tier_costs_what_another_has",
        why="Prompts of which a drive has the most wait for a slow share until it is too late for all.",
        file=_LOCATING,
        find="self._half = now + seconds / 2",
        replace="self._half = now + seconds",
        killers=(
            f"{_LOCATES}::test_tier_that_is_slow_to_look_does_not_cost_what_another_has",
            f"{_LOCATES}::test_hit_of_a_fast_tier_is_not_lost_to_a_slow_one",
        ),
    ),
    Mutant(
        name="slow_tier_not_waited_for",
        why="What a slower tier would add in time is computed.",
        file=_LOCATING,
        find="return self._half if is_late else _NOT_WAITED",
        replace="return _NOT_WAITED",
        killers=(
            f"{_LOCATES}::test_tier_that_answers_in_half_of_the_time_is_waited_for",
            f"{_LOCATES}::test_longer_hit_is_waited_for_until_half_of_the_time_is_over",
        ),
    ),
    Mutant(
        name="tier_waited_for_that_has_nothing_to_add",
        why="Prompts whose blocks another tier has all wait for one that hangs.",
        file=_LOCATING,
        find="return self._half if is_late else _NOT_WAITED",
        replace="return self._half if late else _NOT_WAITED",
        killers=(
            f"{_LOCATES}::test_first_tier_that_hangs_does_not_cost_what_the_next_one_has",
        ),
    ),
    Mutant(
        name="tier_passed_over_where_nothing_else_is_there",
        why="A slow tier that alone has a prompt's blocks is never used.",
        file=_LOCATING,
        find="if num_there >= num_needed or not self._is_awaited(keys[num_there]):",
        replace="if True:",
        killers=(f"{_LOCATES}::test_tier_is_waited_for_where_nothing_else_is_there",),
    ),
    Mutant(
        name="hit_given_up_at_half_of_the_time",
        why="So it is with what a model with windows needs.",
        file=_LOCATING,
        find="            if hit or lacked is None or not await self._is_news(gone):\n",
        replace="            if True:\n",
        killers=(f"{_LOCATES}::test_hit_that_no_answer_allows_yet_is_waited_for",),
    ),
    Mutant(
        name="hit_looked_for_twice",
        why="What tiers told when a hit was chosen is asked again before it is fetched.",
        file=_FLIGHTS,
        find="of_tier = await self._locate(group.flights, looks, is_whole=is_whole)",
        replace="of_tier = await self._locate(group.flights, None, is_whole=is_whole)",
        killers=(f"{_LOCATES}::test_hit_that_no_answer_allows_yet_is_waited_for",),
    ),
    Mutant(
        name="part_of_a_hit_instead_of_it",
        why="Blocks are fetched that no layer with a window or a state has any use for.",
        file=_LOCATING,
        find="num_needed = len(keys) if is_whole else 1",
        replace="num_needed = 1",
        killers=(f"{_LOCATES}::test_hit_that_lost_a_tier_is_not_fetched_in_part",),
    ),
    Mutant(
        name="first_tier_that_hangs_costs_all",
        why="Each prompt waits for the first tier's deadline, until its circuit is open.",
        file=_LOCATING,
        find="        return min(one.called + self._late_s, of_question)\n",
        replace="        return self._half * 2\n",
        killers=(
            f"{_LOCATES}::test_first_tier_that_hangs_does_not_cost_what_the_next_one_has",
            f"{_LOCATES}::test_first_tier_that_hangs_costs_no_hit_of_the_next_one",
        ),
    ),
    Mutant(
        name="next_tier_asked_at_once",
        why="What the first tier has is asked of all others as well.",
        file=_LOCATING,
        find="if asked and (late_at := self._late_at(one)) > anyio.current_time():",
        replace="if (late_at := 0.0):",
        killers=(
            f"{_LOCATES}::test_next_tier_is_not_asked_for_what_the_first_one_says_in_time",
        ),
    ),
    Mutant(
        name="many_calls_late_as_one",
        why="A tier that is asked for a long prompt in many calls has all others asked, too.",
        file=_LOCATING,
        find="min(one.called + self._late_s, of_question)",
        replace="one.began + self._late_s",
        killers=(
            f"{_LOCATES}::test_next_tier_is_not_asked_for_what_the_first_one_says_in_time",
        ),
    ),
    Mutant(
        name="many_calls_never_late",
        why="A tier of which each call is in time costs what others have.",
        file=_LOCATING,
        find="min(one.called + self._late_s, of_question)",
        replace="one.called + self._late_s",
        killers=(
            f"{_LOCATES}::test_tier_of_many_slow_calls_does_not_cost_what_another_has",
        ),
    ),
    Mutant(
        name="tier_asked_again_before_it_answers",
        why="A tier that hangs gets a question for each hit of a prompt.",
        file=_LOCATING,
        find="if asked and not one.is_asked:",
        replace="if asked:",
        killers=(f"{_LOCATES}::test_search_goes_on_with_the_tier_that_answers",),
    ),
    Mutant(
        name="later_tier_preferred",
        why="What the first tier has as well is fetched from the next one.",
        file=_LOCATING,
        find="has = [(number, one.has) for number, one in self._tiers.items()]",
        replace="has = [(number, one.has) for number, one in reversed(self._tiers.items())]",
        killers=(f"{_LOCATES}::test_first_tier_that_is_late_brings_what_both_have",),
    ),
    Mutant(
        name="tier_asked_again_for_what_it_did_not_bring",
        why="What a tier did not bring is got from it again, and not from the next one.",
        file=_LOCATING,
        find="                one.told[key] = Presence.ABSENT\n",
        replace="                pass\n",
        killers=(f"{_TERMS}::test_what_no_tier_brings_says_why_the_first_did_not",),
    ),
    Mutant(
        name="question_ends_with_who_waits",
        why="A tier that hangs costs each prompt half of its time, for ever.",
        file=_LOCATING,
        find="            for at in range(0, len(keys), size):  #",
        replace="           with anyio.move_on_at(self._half):\n            for at in range(0, len(keys), size):  #",
        killers=(f"{_LOCATES}::test_tier_that_hangs_is_found_out_though_nobody_waits",),
    ),
    Mutant(
        name="question_without_an_answer_at_the_end",
        why="Who waits for tiers of an agent that ends is in its way.",
        file=_LOCATING,
        find="                one.told.setdefault(key, Presence.UNKNOWN)\n",
        replace="                pass\n",
        killers=(f"{_LOCATES}::test_question_that_ends_with_all_else_tells_nothing",),
    ),
    Mutant(
        name="hit_told_of_meanwhile_missed",
        why="What a late tier has is not brought where its answer comes amid the search for shorter hits.",
        file=_LOCATING,
        find="return is_there or await self._more(told)",
        replace="return await self._more(told)",
        killers=(
            f"{_LOCATES}::test_hit_that_was_told_of_while_shorter_ones_were_looked_for_is_brought",
        ),
    ),
    Mutant(
        name="first_answer_of_many_not_told",
        why="Of a tier of many slow calls all are waited for, and nothing comes in time.",
        file=_LOCATING,
        find="if at == 0 and anyio.current_time() >= self._half:",
        replace="if False:",
        killers=(
            f"{_LOCATES}::test_first_answer_of_many_is_used_where_nothing_else_is_there",
        ),
    ),
    Mutant(
        name="waits_for_what_is_of_no_use",
        why="A block that no tier has costs a prompt all of its time while a tier tells of those behind it.",
        file=_LOCATING,
        find="not self._is_awaited(keys[num_there])",
        replace="not any(one.is_asked for one in self._tiers.values())",
        killers=(f"{_LOCATES}::test_block_that_no_tier_has_is_not_waited_for",),
    ),
    Mutant(
        name="asked_for_a_prompt_whose_time_is_over",
        why="Calls that nobody waits for make a slow tier slower.",
        file=_LOCATING,
        find="if one.called >= self._deadline:",
        replace="if False:",
        killers=(
            f"{_LOCATES}::test_tier_is_asked_nothing_more_for_a_prompt_whose_time_is_over",
        ),
    ),
    Mutant(
        name="search_in_one_go",
        why="Nobody else is served while a long prompt's hits are searched again, with each answer.",
        file=_LOCATING,
        find="                await anyio.lowlevel.checkpoint()  # all may be told already\n",
        replace="",
        killers=(
            "tests/agent/test_searching.py::test_search_among_many_blocks_shares_the_loop",
        ),
    ),
    Mutant(
        name="parts_without_turns",
        why="Nor while all of them are looked through.",
        file="ucm/agent/calls.py",
        find="            await anyio.lowlevel.cancel_shielded_checkpoint()\n",
        replace="            pass\n",
        killers=(
            "tests/agent/test_searching.py::test_search_among_many_blocks_shares_the_loop",
        ),
    ),
    Mutant(
        name="tier_forgotten_with_a_writer",
        why="A late tier is not asked for what a writer and the next tier did not bring.",
        file=_FLIGHTS,
        find="sorted({flight.medium - 1, *flight.tiers})",
        replace="flight.allowed[flight.allowed.index(flight.medium - 1) :]",
        killers=(f"{_WRITTEN}::test_each_tier_has_one_turn_where_a_writer_gives_up",),
    ),
    Mutant(
        name="late_tier_not_asked_for_what_another_failed",
        why="A block that a late tier has is nowhere where the next tier was quicker and did not bring it.",
        file="ucm/agent/flight.py",
        find="for each in tiers if each != number",
        replace="for each in tiers if each > number",
        killers=(
            f"{_LOCATES}::test_late_tier_is_asked_for_what_the_next_one_fails_to_bring",
        ),
    ),
    Mutant(
        name="agent_looks_for_cycles_as_often_as_python",
        why="A sixth of what fetches of small blocks cost goes for nothing.",
        file="ucm/agent/__main__.py",
        find="    collect_rarely()\n",
        replace="",
        killers=(
            "tests/agent/test_process.py::test_agent_looks_for_cycles_of_objects_rarely",
        ),
    ),
    Mutant(
        name="object_without_a_byte_unavailable",
        why="An object that was cut to nothing stays where it is, and counts against a service that is well.",
        file="ucm/backends/object.py",
        find="            return GARBAGE if is_empty else _UNAVAILABLE\n",
        replace="            return _UNAVAILABLE\n",
        killers=(
            "tests/backends/test_object.py::TestService::test_object_that_is_cut_short_is_garbage",
        ),
    ),
    Mutant(
        name="object_of_another_length_fetched",
        why="A foreign object stays where it is, and counts against a service that is well.",
        file="ucm/backends/object.py",
        find="        if len(value) != nbytes:\n            return GARBAGE\n",
        replace="        if len(value) != nbytes:\n            return _UNAVAILABLE\n",
        killers=(
            "tests/backends/test_object.py::TestService::test_huge_object_is_not_fetched",
            "tests/backends/test_object.py::TestService::test_object_that_is_cut_short_is_garbage",
        ),
    ),
    Mutant(
        name="object_read_into_memory_of_another",
        why="What a service sends behind the deadline lands in a slot that is another block's by then.",
        file="ucm/backends/object.py",
        find="opened = self._crew.gate.touch(lambda: Envelope.open(view, key, target))",
        replace="opened = Envelope.open(view, key, target)",
        killers=(
            "tests/backends/test_object.py::TestService::test_nothing_of_a_caller_that_has_left_is_used",
        ),
    ),
    Mutant(
        name="object_deleted_for_who_has_left",
        why="A block that was put anew meanwhile goes behind the deadline of who had it deleted before.",
        file="ucm/backends/object.py",
        find="        if gate.is_left:",
        replace="        if False:",
        killers=(
            "tests/backends/test_object.py::TestService::test_stopped_server_ends_at_the_deadline",
        ),
    ),
    Mutant(
        name="object_bucket_that_is_not_there_opened",
        why="R-51: all that is asked for is a miss, and nobody is told that the address is wrong.",
        file="ucm/backends/object.py",
        find="            if why in _NO_BUCKET:\n",
        replace="            if False:\n",
        killers=(
            "tests/backends/test_object_bucket.py::test_bucket_that_is_not_there_is_refused",
        ),
    ),
)
