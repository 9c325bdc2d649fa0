# SPDX-License-Identifier: Apache-2.0
"""Mutants of how few questions tiers are asked for small blocks."""

from tests.mutations.mutant import Mutant

__all__ = ["PACKED"]

_FLIGHTS = "ucm/agent/flights.py"
_LOOKING = "ucm/agent/looking.py"
_SPILL = "ucm/agent/spill.py"
_ALONG = "tests/agent/test_looking.py::TestLookAlong"
_BEFORE = "tests/agent/test_looking.py::TestLookBeforePut"
_LINE = "tests/agent/test_fetch_line.py::TestLine"
_JOINED = "tests/agent/test_fetch_joined.py::TestJoined"
_FETCHES = "tests/agent/test_fetch_few.py::TestFewRequests"
_WRITTEN = "tests/agent/test_fetch_written.py"
_WANTS = "ucm/agent/wants.py"
_TENANT = "tests/agent/test_terms.py::TestTenant"
_ROOM = "tests/backends/test_files_room.py::TestRoom"
_SPILLS = "tests/agent/test_spill.py::TestSpill"

PACKED = (
    Mutant(
        name="each_prompt_has_a_line_of_its_own",
        why="R-53: calls of a burst of prompts are under way at once, and all of them late.",
        file=_FLIGHTS,
        find="self._tiers[number], self._lines[number]",
        replace="(tier := self._tiers[number]), Line(tier.capabilities)",
        killers=(
            f"{_LINE}::test_prompts_that_come_at_once_are_served_one_after_the_other",
        ),
    ),
    Mutant(
        name="given_up_in_the_line_keeps_its_slots",
        why="R-63: behind a tier that hangs slots wait for a turn that nobody wants.",
        file=_FLIGHTS,
        find="not await Turn(batch, line.room, place).comes(share)",
        replace="await line.room.acquire(share, place)",
        killers=(f"{_LINE}::test_who_wants_nothing_any_more_leaves_the_line",),
    ),
    Mutant(
        name="urgent_want_waits_where_a_lesser_one_stands",
        why="R-58: a request whose blocks a batch job wants as well waits as long as that job.",
        file="ucm/agent/register.py",
        find="turn.room.move_on(turn.place, want.priority)",
        replace="pass",
        killers=(
            (
                "tests/agent/test_terms.py::TestPriority::"
                "test_lowest_priority_has_its_slots_first"
            ),
        ),
    ),
    Mutant(
        name="late_blocks_fetched_before_others",
        why="R-54: under load each prompt is served as its time ends, and none is in time.",
        file=_FLIGHTS,
        find="if wants and line.is_late(",
        replace="if not wants and line.is_late(",
        killers=(f"{_LINE}::test_blocks_that_would_come_late_keep_nobody_waiting",),
    ),
    Mutant(
        name="small_calls_one_after_the_other",
        why="A share far away serves two blocks at a time, and not thirty.",
        file="ucm/agent/line.py",
        find="max(1, int(_CALL * share_of_call(self._can, num_blocks, nbytes)))",
        replace="_CALL",
        killers=(f"{_LINE}::test_small_calls_go_side_by_side",),
    ),
    Mutant(
        name="late_blocks_never_fetched",
        why="R-53: a tier that is slower than a prompt's time never brings anything.",
        file="ucm/agent/line.py",
        find="self.room.num_waiting and self._speed.is_known",
        replace="self._speed.is_known",
        killers=(f"{_LINE}::test_blocks_that_come_late_are_there_for_the_next_prompt",),
    ),
    Mutant(
        name="drive_stands_still_while_checksums_are_compared",
        why="A fetch from a drive takes a quarter longer.",
        file=_FLIGHTS,
        find="                turn.close()  # the next ones come while these are looked at\n",
        replace="",
        killers=(
            f"{_FETCHES}::test_next_blocks_come_while_those_before_are_looked_at",
        ),
    ),
    Mutant(
        name="hit_behind_a_probe_lost",
        why="Blocks between the last probe that hit and the first that missed are computed.",
        file=_LOOKING,
        find="                stop, behind = at, answer\n                break\n",
        replace="                return [Presence.PRESENT] * first + [answer] * (len(keys) - first)\n",
        killers=(f"{_ALONG}::test_end_of_what_is_there_is_found",),
    ),
    Mutant(
        name="each_block_looked_for",
        why="A prefix of small blocks costs as many requests to look as to fetch.",
        file=_LOOKING,
        find="step, most = -(-(stop - first) // most), _PROBES",
        replace="step = 1",
        killers=(f"{_ALONG}::test_all_or_nothing_costs_a_few_questions",),
    ),
    Mutant(
        name="first_block_asked_for_last",
        why="A prompt that is nowhere costs three round trips before it is computed.",
        file=_LOOKING,
        find="sorted({first, *range(stop - 1, first, -step)})",
        replace="range(stop - 1, first - 1, -step)[::-1]",
        killers=(f"{_ALONG}::test_all_or_nothing_costs_a_few_questions",),
    ),
    Mutant(
        name="probes_behind_a_deadline",
        why="A tier that hangs costs a request several deadlines.",
        file=_LOOKING,
        find="while first < stop and behind is Presence.ABSENT:",
        replace="while first < stop:",
        killers=(f"{_ALONG}::test_tier_that_answers_no_more_is_asked_no_more",),
    ),
    Mutant(
        name="slab_sent_anew_at_each_restart",
        why="An agent that starts puts all that its slab has, whatever the bucket has.",
        file=_LOOKING,
        find="    if first is last is not Presence.PRESENT and not is_one_away:",
        replace="    if True:",
        killers=(f"{_BEFORE}::test_each_is_asked_for_only_where_an_end_is_there",),
    ),
    Mutant(
        name="each_looked_for_before_its_put",
        why="A small block that is saved costs two requests, not one.",
        file=_LOOKING,
        find="    if len(keys) <= 2 or not tier.capabilities.creates:",
        replace="    if True:",
        killers=(f"{_BEFORE}::test_each_is_asked_for_only_where_an_end_is_there",),
    ),
    Mutant(
        name="fetched_block_offered_back",
        why="A bucket is asked for each block that it has just brought.",
        file="ucm/agent/register.py",
        find="self._brought(medium - 1, list(map(_KEY, alike)))",
        replace="pass",
        killers=(f"{_SPILLS}::test_fetched_block_is_not_offered_where_it_came_from",),
    ),
    Mutant(
        name="brought_for_ever",
        why="A block that was evicted from tier and slab is never spilled again.",
        file=_SPILL,
        find="        self._brought.difference_update(keys)\n",
        replace="",
        killers=(f"{_SPILLS}::test_what_came_and_has_gone_is_offered_again",),
    ),
    Mutant(
        name="brought_without_bound",
        why="An agent that fetches for months grows with every block.",
        file=_SPILL,
        find="        if len(self._brought) + len(keys) > self._most_waiting:\n",
        replace="        if False:\n",
        killers=(f"{_SPILLS}::test_what_came_and_has_gone_is_offered_again",),
    ),
    Mutant(
        name="hop_for_nothing",
        why="Each batch that is fetched costs the slab's threads a call that does nothing.",
        file=_FLIGHTS,
        find="                if not has_landed:\n",
        replace="                if True:\n",
        killers=(f"{_FETCHES}::test_batch_costs_two_calls_of_the_slab",),
    ),
    Mutant(
        name="passed_over_and_joined",
        why="Who wants what others have given up waits for a call that hangs, in vain.",
        file=_FLIGHTS,
        find="            self._register.end_unwanted(batch)\n            flights = open_of(batch)",
        replace="            flights = [flight for flight in batch if flight.wants]",
        killers=(
            f"{_JOINED}::test_part_of_a_batch_that_nobody_wants_in_its_turn_is_not_joined",
        ),
    ),
    Mutant(
        name="block_that_another_writes_taken_for_a_full_store",
        why="R-53: a prompt that another engine is just saving is computed once more.",
        file=_WANTS,
        find="else Left.FREE if key in free else Left.WRITTEN",
        replace="else Left.FREE if key in free else Left.FULL",
        killers=(
            f"{_WRITTEN}::TestWritten::test_block_that_another_commits_meanwhile_is_used",
            f"{_WRITTEN}::TestFull::test_block_that_another_writes_to_a_full_slab_is_told_apart",
        ),
    ),
    Mutant(
        name="writer_that_does_not_end_waited_for_by_nobody",
        why="R-54: a stopped engine's save holds slots of fetches for as long as it is stopped.",
        file=_FLIGHTS,
        find="left = await self._register.wanted(flights)",
        replace="left = open_of(flights)",
        killers=(
            f"{_WRITTEN}::TestWritten::test_writer_that_does_not_end_costs_a_want_its_deadline",
        ),
    ),
    Mutant(
        name="saved_block_measured_as_its_tiers",
        why="A slow tier counts as fast, and requests wait for it that had better compute.",
        file=_FLIGHTS,
        find="each.is_done and each.medium and not each.reason",
        replace="each.is_done and not each.reason",
        killers=(
            f"{_WRITTEN}::TestSpeed::test_block_that_a_save_brought_says_nothing_of_its_tier",
        ),
    ),
    Mutant(
        name="lost_block_told_of",
        why="A rank on another machine promises blocks that it has lost, and the load fails.",
        file="ucm/agent/fetch.py",
        find="                    want.found = there.index(False)\n",
        replace="                    want.found = len(there)\n",
        killers=(
            f"{_WRITTEN}::TestGone::test_block_that_goes_before_the_rest_has_come_is_not_told_of",
        ),
    ),
    Mutant(
        name="share_that_removes_nothing_walked_through_at_each_put",
        why="A full share whose mount refuses removals costs its servers a walk for each call.",
        file="ucm/backends/files/_room.py",
        find="            if seen.is_stuck:",
        replace="            if False:",
        killers=(
            f"{_ROOM}::test_share_that_refuses_to_remove_is_not_walked_through_at_each_put",
        ),
    ),
    Mutant(
        name="fetched_blocks_are_nobodys",
        why="A tenant has all of the slab, by way of a tier.",
        file=_WANTS,
        find="np.full(count, tenant, dtype=np.uint32)",
        replace="np.full(count, 0, dtype=np.uint32)",
        killers=(f"{_TENANT}::test_fetched_blocks_take_their_tenants_share",),
    ),
    Mutant(
        name="fetch_takes_kept_slots",
        why="Requests of one tenant take each other's blocks before they are loaded, for ever.",
        file=_WANTS,
        find="self.uses(len(keys), 0.0, tenant)",
        replace="self.uses(len(keys), 60.0, tenant)",
        killers=(f"{_TENANT}::test_want_beyond_its_tenants_share_takes_no_kept_block",),
    ),
    Mutant(
        name="landed_block_not_kept",
        why="A long prompt's first blocks give way to its last ones, and nothing of it hits.",
        file="ucm/agent/landing.py",
        find="    keep([key for key,",
        replace="    list([key for key,",
        killers=(f"{_TENANT}::test_later_blocks_of_a_want_take_no_slots_of_its_first",),
    ),
    Mutant(
        name="tenant_not_told_to_the_agent",
        why="A tenant has all of the slab, by way of a tier.",
        file="ucm/integration/vllm/tiers.py",
        find="            tenant=wishes.tenant,\n",
        replace="",
        killers=(
            "tests/integration/vllm/test_tiers.py::TestWishes::test_tiers_priority_and_tenant_go_along",
        ),
    ),
    Mutant(
        name="answer_older_than_a_removal_told",
        why="R-57: a router sends prompts to an engine for blocks that its tier has lost.",
        file="ucm/backends/watched.py",
        find="            removed.update(keys)\n",
        replace="            removed.update(())\n",
        killers=(
            "tests/backends/test_watched.py::TestRemovedMeanwhile::test_answer_that_is_older_than_a_removal_is_not_told",
        ),
    ),
    Mutant(
        name="tenant_not_told_to_other_machines",
        why="A tenant has all of the slabs of other machines, by way of a tier.",
        file="ucm/integration/vllm/elsewhere.py",
        find="            tenant=want.tenant,\n",
        replace="",
        killers=(
            "tests/integration/vllm/test_elsewhere.py::TestAsk::test_request_s_terms_go_along",
        ),
    ),
    Mutant(
        name="agent_held_by_a_call",
        why="No agent can take the place of one whose tier's library never returns.",
        file="ucm/agent/__main__.py",
        find="    timer.start()\n",
        replace="",
        killers=(
            "tests/agent/test_drain.py::TestDrain::test_agent_ends_over_a_call_that_nobody_can_end",
        ),
    ),
    Mutant(
        name="second_agent_that_ends_well",
        why="A service manager takes an agent that serves nobody for one that did its work.",
        file="ucm/agent/__main__.py",
        find="        code, problem = exc.code, str(exc)\n",
        replace="        code, problem = 0, str(exc)\n",
        killers=("tests/agent/test_second.py::TestSecond::test_slab_has_one_agent",),
    ),
    Mutant(
        name="engine_told_of_a_second_agent",
        why="Of engines that come together all but one log that they have no agent.",
        file="ucm/agent/__main__.py",
        find="        if arguments.engine_fd is not None:  # an engine's own has met another engine's\n",
        replace="        if False:\n",
        killers=(
            "tests/agent/test_second.py::TestSecond::test_one_that_an_engine_has_started_ends_well_and_in_silence",
        ),
    ),
    Mutant(
        name="host_ended_by_its_agent",
        why="Whoever serves as the agent in a process of his own loses it half a minute later.",
        file="ucm/agent/__main__.py",
        find="    stack.callback(timer.cancel)\n",
        replace="",
        killers=(
            "tests/agent/test_node.py::TestMain::test_agent_serves_until_its_last_engine_is_gone",
        ),
    ),
)
