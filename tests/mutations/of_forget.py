# SPDX-License-Identifier: Apache-2.0
"""Mutants of forgetting: what a user wants gone is in no tier, and comes back from none."""

from tests.mutations.mutant import Mutant

__all__ = ["FORGET"]

_CLIENT = "ucm/agent/client.py"
_CONNECTION = "ucm/agent/connection.py"
_ELSEWHERE = "tests/scheduler/test_elsewhere.py::TestForget"
_WISHES = "tests/integration/vllm/test_wishes.py::TestHalves"
_CORE = "ucm/agent/core.py"
_LANDING = "ucm/agent/landing.py"
_LIBRARY = "ucm/cache/forgetting.py"
_RM = "ucm/cli/store/change.py"
_RMS = "tests/cli/test_store_tiers.py::TestRm"
_SPILL = "ucm/agent/spill.py"
_FLIGHTS = "tests/agent/test_forget.py::TestFlights"
_HOSTS = "tests/cache/test_forgetting.py"
_KEPT = "tests/agent/test_forget.py::TestKept"
_TIERS = "tests/agent/test_forget.py::TestTiers"
_TOLD = "tests/agent/test_forget_told.py"

FORGET = (
    Mutant(
        name="forgotten_stays_in_tiers",
        why="A prompt that was to be gone is in the tier, and comes back by the next fetch.",
        file=_SPILL,
        find="                    told = await self._backend.delete(some)\n",
        replace="                    told = [Verdict.DONE] * len(some)\n",
        killers=(f"{_TIERS}::test_forgotten_blocks_leave_each_tier",),
    ),
    Mutant(
        name="forgotten_before_its_put",
        why="What a put leaves behind in a tier that did not take it back, nobody knows of.",
        file=_SPILL,
        find="                if not distinct.isdisjoint(moving):\n",
        replace="                if False:\n",
        killers=(f"{_TIERS}::test_tier_is_asked_behind_the_puts_that_are_under_way",),
    ),
    Mutant(
        name="forgotten_all_at_once",
        why="Deletions of many prompts crowd out the puts and gets of a tier.",
        file=_SPILL,
        find="            async with self._forgetting:",
        replace="            if self._forgetting:",
        killers=(f"{_TIERS}::test_tier_has_one_such_call_at_a_time",),
    ),
    Mutant(
        name="unforgotten_untold",
        why="Who looks after tiers does not hear that one has kept what was to be gone.",
        file=_SPILL,
        find="        self.counts.unforgotten += num_left\n",
        replace="",
        killers=(
            f"{_KEPT}::test_tier_that_does_not_answer_is_named_and_costs_no_other",
        ),
    ),
    Mutant(
        name="kept_is_no_trouble",
        why="The agent's log does not name the tier that has kept what was to be gone.",
        file=_CORE,
        find="            found[number, Reason.KEPT] += spiller.counts.unforgotten\n",
        replace="",
        killers=(
            f"{_KEPT}::test_tier_that_does_not_answer_is_named_and_costs_no_other",
        ),
    ),
    Mutant(
        name="forgetting_without_a_bound",
        why="A host that has all forgotten fills the agent's memory while a tier is away.",
        file=_CORE,
        find="for size in sizes) > _MOST_FORGOTTEN:",
        replace="for size in sizes) < 0:",
        killers=(f"{_KEPT}::test_more_than_may_be_forgotten_at_a_time_is_kept",),
    ),
    Mutant(
        name="small_forgetting_costs_nothing",
        why="A million questions of one block each are a million tasks of the agent.",
        file=_CORE,
        find="sum(max(size, _LEAST_FORGOTTEN) for size in sizes)",
        replace="sum(sizes)",
        killers=(f"{_KEPT}::test_more_than_may_be_forgotten_at_a_time_is_kept",),
    ),
    Mutant(
        name="hung_tier_forgets_for_ever",
        why="Behind a put that never ends nothing is forgotten, counted or answered any more.",
        file=_CORE,
        find="spiller.forget(keys, forgetting.taken, LONGEST_S)",
        replace="spiller.forget(keys, forgetting.taken, 2 * LONGEST_S)",
        killers=(
            f"{_KEPT}::test_put_that_nobody_can_end_is_not_waited_for_without_end",
        ),
    ),
    Mutant(
        name="forgetting_ends_with_the_agent",
        why="A server that is stopped leaves in tiers what its users wanted gone.",
        file=_CORE,
        find="            await forgetting.over.wait()\n",
        replace="            pass\n",
        killers=(f"{_KEPT}::test_agent_that_ends_is_through_before",),
    ),
    Mutant(
        name="forgetting_is_idle",
        why="An agent whose last engine goes ends amid what it is to delete.",
        file=_CORE,
        find="return not self._forgettings and not any(",
        replace="return not any(",
        killers=(f"{_KEPT}::test_agent_that_ends_is_through_before",),
    ),
    Mutant(
        name="landed_before_stays",
        why="What a fetch brings between the slab's forgetting and the agent's is found again.",
        file=_CORE,
        find="                        await self._call(partial(self.store.forget, landed))\n",
        replace="                        pass\n",
        killers=(f"{_FLIGHTS}::test_block_that_landed_just_before_goes_again",),
    ),
    Mutant(
        name="on_its_way_lands",
        why="A fetch that has got a block when it is forgotten brings it back.",
        file="ucm/agent/register.py",
        find="                    flight.is_kept_out |= flight.key in kept_out\n",
        replace="                    pass\n",
        killers=(f"{_FLIGHTS}::test_block_that_was_got_before_lands_nowhere",),
    ),
    Mutant(
        name="asked_for_meanwhile_lands",
        why="Who wants a block while tiers are asked to delete it brings it back.",
        file="ucm/agent/register.py",
        find="self.by_key[key, own.tiers].is_kept_out = True",
        replace="pass",
        killers=(f"{_FLIGHTS}::test_block_that_is_asked_for_meanwhile_lands_nowhere",),
    ),
    Mutant(
        name="kept_out_for_ever",
        why="A prompt that was forgotten once is never fetched again, however often it is saved.",
        file="ucm/agent/register.py",
        find="                    if not kept_out[key]:  # else somebody else keeps it out as well\n",
        replace="                    if kept_out[key] < 0:\n",
        killers=(f"{_FLIGHTS}::test_block_that_is_asked_for_meanwhile_lands_nowhere",),
    ),
    Mutant(
        name="kept_out_only_behind",
        why="A block that is kept out is found for a moment, and loaded.",
        file=_LANDING,
        find="    for at in kept_out():\n",
        replace="    for at in ():\n",
        killers=(f"{_FLIGHTS}::test_block_is_kept_out_amid_its_landing",),
    ),
    Mutant(
        name="kept_out_only_before",
        why="A block that is forgotten while it becomes visible stays.",
        file=_LANDING,
        find="        forget([lease.keys[at] for at in late])\n",
        replace="",
        killers=(f"{_FLIGHTS}::test_block_is_kept_out_amid_its_landing",),
    ),
    Mutant(
        name="forgetting_of_anything_taken",
        why="A peer that says what no engine says crashes the agent of all others.",
        file=_CONNECTION,
        find="        if not 0 <= message.deadline_s <= LONGEST_S:\n",
        replace="        if False:\n",
        killers=(
            "tests/agent/test_connection.py::TestStrangers::test_what_makes_no_sense_ends_the_connection",
        ),
    ),
    Mutant(
        name="forgetting_answered_late",
        why="Who waits for an answer has none in its time, and takes the agent for stopped.",
        file=_CONNECTION,
        find="        with anyio.move_on_after(message.deadline_s):\n",
        replace="        with anyio.move_on_after(LONGEST_S):\n",
        killers=(
            f"{_TOLD}::TestConnection::test_who_has_blocks_forgotten_hears_what_became_of_that",
        ),
    ),
    Mutant(
        name="forgetting_answers_nobody",
        why="An engine that waits for nothing is told of a question that it never had.",
        file=_CONNECTION,
        find="        if not message.number:\n",
        replace="        if False:\n",
        killers=(
            f"{_TOLD}::TestConnection::test_who_has_blocks_forgotten_hears_what_became_of_that",
        ),
    ),
    Mutant(
        name="long_prompt_in_one_message",
        why="A prompt that is more than a message takes ends the connection, and all its wants.",
        file=_CLIENT,
        find="list(keys[at : at + MOST_KEYS])",
        replace="list(keys[at:])",
        killers=(f"{_TOLD}::TestClient::test_nobody_waits_unless_it_has_a_name",),
    ),
    Mutant(
        name="host_answered_by_the_first_message",
        why="A host hears that all is gone while a tier is still to be asked for the rest.",
        file=_LIBRARY,
        find="            if len(answers) == len(parts):\n",
        replace="            if answers:\n",
        killers=(f"{_HOSTS}::test_more_keys_than_a_message_takes_are_one_question",),
    ),
    Mutant(
        name="dead_agent_kept_nothing",
        why="A host is told that all is gone though nobody has asked a tier.",
        file=_LIBRARY,
        find="answers.append((0, range(1, 1 + len(health.names))))",
        replace="answers.append((0, ()))",
        killers=(f"{_HOSTS}::test_without_an_agent_all_tiers_may_have_kept_it",),
    ),
    Mutant(
        name="refused_is_forgotten",
        why="A host is told that all is gone where the agent had no room for its question.",
        file=_LIBRARY,
        find="if said is not None and said.reason in FORGETS:",
        replace="if said is not None:",
        killers=(f"{_HOSTS}::test_agent_without_room_has_kept_all",),
    ),
    Mutant(
        name="forgetting_numbers_without_a_bound",
        why="A peer that reads no answers fills the agent with them.",
        file=_CONNECTION,
        find="        elif await self._opens(message.number):\n",
        replace="        else:\n            self._scopes[message.number] = anyio.CancelScope()\n",
        killers=(f"{_TOLD}::TestConnection::test_number_that_is_open_is_no_number",),
    ),
    Mutant(
        name="question_kept_for_ever",
        why="Each question that was answered late stays in the host's memory.",
        file=_LIBRARY,
        find="        at_end(over, partial(_drop, client, tuple(parts)))\n",
        replace="",
        killers=(f"{_HOSTS}::test_agent_that_says_nothing_costs_the_deadline",),
    ),
    Mutant(
        name="agent_untold_by_the_door",
        why="A request that wants its prompt forgotten leaves it in tiers.",
        file="ucm/stores/forgetter.py",
        find="        self._tell(keys)\n",
        replace="",
        killers=(
            "tests/stores/test_forgetter.py::TestForgetter::test_tiers_are_told_behind_the_store",
            "tests/integration/vllm/test_wishes.py::TestHalves::test_forgotten_prompt_is_deleted_when_its_request_ends",
            "tests/integration/vllm/test_elsewhere.py::TestForget::test_rank_deletes_its_own_part",
        ),
    ),
    Mutant(
        name="unasked_uncounted_by_the_door",
        why="An operator does not see that prompts which were to be gone stay in tiers.",
        file="ucm/agent/health.py",
        find="                heard()\n",
        replace="                pass\n",
        killers=(
            "tests/integration/vllm/test_tiers.py::TestForget::test_agent_is_told_what_the_slab_has_no_more",
        ),
    ),
    Mutant(
        name="unanswered_uncounted",
        why="What an agent was told to have forgotten just before it died is in tiers, and nobody sees it.",
        file="ucm/agent/health.py",
        find="        if said is None or said.reason not in FORGETS:\n            self",
        replace="        if False:\n            self",
        killers=(
            "tests/agent/test_health.py::TestRefresh::test_what_an_agent_was_told_and_has_no_answer_for_is_counted",
        ),
    ),
    Mutant(
        name="rm_leaves_what_tiers_have",
        why="What is removed is fetched again with the next request.",
        file=_RM,
        find="                        parting.forget(keys, slot_bytes)\n",
        replace="                        pass\n",
        killers=(
            f"{_RMS}::test_blocks_go_from_the_tiers_of_the_agent_too",
            f"{_RMS}::test_where_no_agent_runs_tiers_may_have_them",
        ),
    ),
    Mutant(
        name="rm_takes_from_tiers_unasked",
        why="Who would keep what tiers have loses it for all machines.",
        file=_RM,
        find="has_tiers = had_agent and in_tiers",
        replace="has_tiers = had_agent",
        killers=(f"{_RMS}::test_blocks_go_from_the_tiers_of_the_agent_too",),
    ),
    Mutant(
        name="rm_well_though_tiers_kept_some",
        why="Nobody hears that a tier has them yet.",
        file=_RM,
        find="return NOT_WELL if parting.kept or parting.unasked else 0",
        replace="return 0",
        killers=(
            f"{_RMS}::test_tier_that_may_have_some_yet_is_named",
            f"{_RMS}::test_where_no_agent_runs_tiers_may_have_them",
        ),
    ),
    Mutant(
        name="rm_asks_a_silent_agent_again",
        why="Each 65 536 blocks cost a minute more.",
        file="ucm/agent/parting.py",
        find="            if not self.problem:\n",
        replace="            if True:\n",
        killers=(f"{_RMS}::test_agent_that_takes_nothing_from_tiers_is_told_of",),
    ),
    Mutant(
        name="nothing_forgotten_in_a_doubt",
        why="A prompt that was to be gone stays if an engine resets its cache just before.",
        file="ucm/scheduler/matching.py",
        find="self.keys_of(group, some, are_old=True)",
        replace="self.keys_of(group, some)",
        killers=(
            f"{_WISHES}::test_forgotten_prompt_is_deleted_when_its_request_ends[True]",
        ),
    ),
    Mutant(
        name="nothing_forgotten_elsewhere_in_a_doubt",
        why="The same, on the machines of the other ranks.",
        file="ucm/scheduler/elsewhere.py",
        find="digest = matcher.stored_digest",
        replace="digest = matcher.keyspace_digest",
        killers=(f"{_ELSEWHERE}::test_prompt_is_forgotten_in_a_doubt_as_well",),
    ),
)
