# SPDX-License-Identifier: Apache-2.0
"""Mutants of how faults of tiers and agents are found out and named."""

from tests.mutations.mutant import Mutant

__all__ = ["FAULTS"]

_HEALTH = "ucm/agent/health.py"
_TROUBLES = "ucm/agent/troubles.py"
_CLIENT = "ucm/agent/client.py"
_FETCH = "ucm/agent/fetch.py"
_SLOTS = "tests/agent/test_fetch_slots.py"
_SPILL = "ucm/agent/spill.py"
_AGAIN = "tests/agent/test_spill_again.py"
_REFRESH = "tests/agent/test_health.py::TestRefresh"
_LOOK = "tests/agent/test_health.py::TestLook"
_TOLD = (
    "tests/agent/test_troubles.py::test_trouble_is_told_at_once_and_then_once_a_minute"
)
_COUNTED = "tests/agent/test_troubles.py::test_what_a_tier_damages_or_does_not_take_is_counted_by_its_number"
_NONSENSE = (
    "tests/backends/test_redis.py::TestServer::test_words_of_no_server_are_no_answer"
)

FAULTS = (
    Mutant(
        name="agents_totals_are_added_at_each_look",
        why="A tier that refused once seems to refuse for ever.",
        file=_HEALTH,
        find="add_all(self._totals - before)",
        replace="add_all(self._totals)",
        killers=(
            f"{_REFRESH}::test_what_a_tier_does_not_take_is_told_with_the_reason",
        ),
    ),
    Mutant(
        name="agents_totals_go_down",
        why="vLLM's front end ends, as its counters refuse it.",
        file=_HEALTH,
        find="self._totals, self._totals | totals",
        replace="self._totals, totals",
        killers=(f"{_REFRESH}::test_what_an_agent_counts_no_more_is_not_taken_back",),
    ),
    Mutant(
        name="next_agent_counts_from_the_last_ones_totals",
        why="What a new agent spills is not counted, or taken back.",
        file=_HEALTH,
        find="self._agent, self._totals = (told.pid, told.nonce), Counter()",
        replace="self._agent = (told.pid, told.nonce)",
        killers=(f"{_REFRESH}::test_totals_go_on_over_the_next_agent",),
    ),
    Mutant(
        name="agents_are_told_apart_by_process_id",
        why="In a container a successor is taken for the one before, and its counts go back.",
        file=_HEALTH,
        find="        if (told.pid, told.nonce) != self._agent:\n",
        replace="        if told.pid != self._agent[0]:\n",
        killers=(
            f"{_REFRESH}::test_successor_of_the_same_process_id_is_another_agent",
        ),
    ),
    Mutant(
        name="agents_counted_as_one",
        why="An agent that dies as it starts, again and again, is no news in metrics.",
        file="ucm/agent/dialing.py",
        find="if not self.count or welcome.nonce != self._nonce:",
        replace="if not self.count:",
        killers=(f"{_REFRESH}::test_every_agent_is_counted_that_was_there",),
    ),
    Mutant(
        name="agent_of_another_user",
        why="Who can make a socket in a slab's directory says to engines what is in the slab.",
        file="ucm/agent/dialing.py",
        find="if peer_uid(own) != os.geteuid():",
        replace="if False:",
        killers=(
            "tests/agent/test_dialing.py::test_agent_of_another_user_is_not_believed",
        ),
    ),
    Mutant(
        name="agent_that_does_not_say_which_it_is",
        why="All agents are one to who meets them.",
        file="ucm/agent/connection.py",
        find="Welcome(PROTOCOL_VERSION, self._media, self._nonce)",
        replace="Welcome(PROTOCOL_VERSION, self._media)",
        killers=(
            "tests/agent/test_connection.py::TestTalk::test_want_is_answered_with_what_was_found",
        ),
    ),
    Mutant(
        name="asked_the_dead",
        why="As an agent dies under load, asyncio writes a line for each question.",
        file="ucm/agent/client.py",
        find="self._writer is None or self._writer.is_closing() or",
        replace="self._writer is None or",
        killers=(
            "tests/agent/test_client_brief.py::test_nothing_is_sent_to_one_that_is_seen_to_be_gone",
        ),
    ),
    Mutant(
        name="one_tier_of_a_medium_stands_for_all",
        why="A tier that is down is not seen beside one of its kind that is up.",
        file=_HEALTH,
        find="not any(tier.silent",
        replace="not all(tier.silent",
        killers=(f"{_REFRESH}::test_tiers_of_one_medium_are_up_together",),
    ),
    Mutant(
        name="silent_agent_is_told_of_at_each_look",
        why="An agent that is stopped fills the log.",
        file=_CLIENT,
        find="elif self._is_up and not self._is_told_silent:",
        replace="elif self._is_up:",
        killers=(f"{_LOOK}::test_agent_that_does_not_answer_is_told_of_once",),
    ),
    Mutant(
        name="any_word_excuses_an_agent",
        why="One that is stopped behind a word is asked again and again, in vain.",
        file=_CLIENT,
        find="if at > now and one != number)",
        replace="if False)",
        killers=(f"{_LOOK}::test_agent_that_does_not_answer_is_told_of_once",),
    ),
    Mutant(
        name="trouble_is_told_each_time",
        why="A full tier fills the agent's log.",
        file=_TROUBLES,
        find="if total > told and now - at >= _PAUSE_S:",
        replace="if total > told:",
        killers=(_TOLD,),
    ),
    Mutant(
        name="trouble_is_told_with_what_was_told_before",
        why="The log's numbers add up to more than there was.",
        file=_TROUBLES,
        find="blocks=total - told",
        replace="blocks=total",
        killers=(_TOLD,),
    ),
    Mutant(
        name="damage_that_another_tier_makes_up_for_is_not_seen",
        why="A tier rots unseen until the other one has lost the block too.",
        file="ucm/agent/flights.py",
        find="            self._counts.damaged[number] += len(wrong)\n",
        replace="",
        killers=(_COUNTED,),
    ),
    Mutant(
        name="host_that_is_scraped_does_not_look",
        why="A host has no word of its agent.",
        file="ucm/cache/measuring.py",
        find="    asked.fetches.refresh()\n",
        replace="",
        killers=("tests/cache/test_fetches.py::test_metrics_tell_of_the_agent",),
    ),
    Mutant(
        name="nonsense_of_a_server_is_a_bug_of_ours",
        why="A server that talks garbage is the end of the agent.",
        file="ucm/backends/_redis_answers.py",
        find="OSError, *_NONSENSE)",
        replace="OSError)",
        killers=(_NONSENSE,),
    ),
    Mutant(
        name="number_is_taken_for_bytes",
        why="What a server that is away has is deleted as damaged.",
        file="ucm/backends/_redis_values.py",
        find="    if not all(answer is None or isinstance(answer, Bulk) for answer in answers):\n        return Fetched(Verdict.UNAVAILABLE)\n",
        replace="",
        killers=(
            "tests/backends/test_redis.py::TestServer::test_killed_server_is_no_miss_and_joins_again",
        ),
    ),
    Mutant(
        name="look_ends_with_its_want",
        why="A tier that hangs is never found out, and each request of a model with windows waits for it.",
        file="ucm/agent/locating.py",
        find="            for at in range(0, len(keys), size):  #",
        replace="           with anyio.move_on_after(8 * self._late_s):\n            for at in range(0, len(keys), size):  #",
        killers=(
            "tests/agent/test_fetch_hits.py::test_tier_that_hangs_is_found_out_by_wants_that_wait_for_less",
        ),
    ),
    Mutant(
        name="block_never_taken_tried_first",
        why="A cluster of which one server is away takes nothing for the others.",
        file=_SPILL,
        find="waiting = self._waiting.first(can.batch_blocks) or self._again",
        replace="waiting = self._again or self._waiting.first(can.batch_blocks)",
        killers=(
            f"{_AGAIN}::test_blocks_that_a_tier_never_takes_keep_no_other_from_it",
        ),
    ),
    Mutant(
        name="blocks_that_wait_on_keep_their_room",
        why="Blocks that no server takes have all of the backlog in time, and the others none.",
        file=_SPILL,
        find="                del self._again[next(iter(self._again))]\n",
        replace="                self.counts.dropped[Reason.QUEUE_BYTES] += 1\n                continue\n",
        killers=(
            f"{_AGAIN}::test_blocks_that_a_tier_never_takes_keep_no_other_from_it",
        ),
    ),
    Mutant(
        name="block_that_waits_on_wakes_nobody",
        why="Behind a pause a tier is given one batch at a time, until nothing waits.",
        file=_SPILL,
        find="        if taken and not self._waiting:  # else",
        replace="        if taken and not self.num_waiting:  # else",
        killers=(
            f"{_AGAIN}::test_tier_that_takes_blocks_again_is_given_several_batches_at_a_time",
        ),
    ),
    Mutant(
        name="hit_with_a_gap_is_none",
        why="A block that a server of Redis parted with costs all hits of its prompt, each fetched in vain.",
        file=_FETCH,
        find="            if reason not in _NOWHERE and not is_full:\n",
        replace="            if True:\n",
        killers=(
            "tests/agent/test_fetch_hits.py::test_hit_with_a_gap_gives_way_to_the_one_before_it",
            "tests/agent/test_fetch_hits.py::test_damaged_block_costs_no_shorter_hit",
        ),
    ),
    Mutant(
        name="block_that_waits_on_tried_before_readers",
        why="One block of which a tier says nothing has it taken for silent for good.",
        file=_SPILL,
        find="later_s = 0.0 if self._waiting else _LATER_S",
        replace="later_s = 0.0",
        killers=(
            f"{_AGAIN}::test_block_that_a_tier_says_nothing_of_keeps_nobody_from_reading_it",
        ),
    ),
    Mutant(
        name="listing_that_never_ends",
        why="Behind a restart under load a tier is given old blocks again and again, and hardly a new one.",
        file="ucm/agent/core.py",
        find="while num_begun == 1 and is_patient",
        replace="while num_begun and is_patient",
        killers=(
            "tests/agent/test_spill.py::TestSpill::test_slab_that_changes_faster_than_it_is_spilled_is_followed",
        ),
    ),
    Mutant(
        name="shorter_hit_waits_for_itself",
        why="A hit is waited for whose slots the longer one before it has, and nobody gets any meanwhile.",
        file="ucm/agent/line.py",
        find="                if self.has_some():\n",
        replace="                if False:\n",
        killers=(
            f"{_SLOTS}::TestHits::test_two_that_try_shorter_hits_do_not_wait_for_each_other",
        ),
    ),
    Mutant(
        name="shorter_hit_has_more_than_is_left",
        why="A hit is tried for which there are no slots now, and the one before it is not found.",
        file=_FETCH,
        find="most = self._budget.left if want.taken.is_set() else self._budget.total",
        replace="most = self._budget.total",
        killers=(
            "tests/agent/test_fetch_hits.py::test_hit_behind_a_damaged_one_does_not_wait_for_slots_of_its_own",
            f"{_SLOTS}::TestHits::test_two_that_try_shorter_hits_do_not_wait_for_each_other",
        ),
    ),
    Mutant(
        name="slots_before_those_of_who_was_joined",
        why="Two prompts with one beginning wait for each other's slots, and have nothing by their deadline.",
        file=_FETCH,
        find="want.stand_behind, [group.seated for group in joined])",
        replace="want.stand_behind, [])",
        killers=(
            f"{_SLOTS}::TestJoined::test_who_joined_others_takes_no_slots_that_these_wait_for",
        ),
    ),
    Mutant(
        name="who_inherits_slots_stands_behind_others",
        why="Who waits for others' slots has some that those wait for, each until a deadline.",
        file="ucm/agent/wants.py",
        find="                    tasks.start_soon(first, self.taken)\n",
        replace="",
        killers=(
            f"{_SLOTS}::TestJoined::test_who_inherits_slots_stands_behind_nobody_who_waits_for_them",
        ),
    ),
    Mutant(
        name="blocks_of_who_waits_are_waited_for",
        why="Who has slots waits for the blocks of one who waits for those, each until a deadline.",
        file=_FETCH,
        find="group is own or await want.stand_behind([group.seated])",
        replace="True",
        killers=(
            f"{_SLOTS}::TestJoined::test_who_inherits_slots_stands_behind_nobody_who_waits_for_them",
        ),
    ),
    Mutant(
        name="given_up_and_behind_others",
        why="What somebody had begun, and has given up, waits for the slots of what he had joined.",
        file="ucm/agent/line.py",
        find="        for flight in self.flights:\n            flight.turn = self\n",
        replace="        for others in self.behind:\n            await others.wait()\n"
        "        for flight in self.flights:\n            flight.turn = self\n",
        killers=(
            f"{_SLOTS}::TestJoined::test_blocks_that_wait_behind_others_wait_for_nobody",
        ),
    ),
    Mutant(
        name="block_of_two_calls_ends_once",
        why="Blocks that a tier gave no answer for are neither dropped nor waiting.",
        file=_SPILL,
        find="if not (key in waiting or key in self._again)",
        replace="if key not in waiting",
        killers=(
            f"{_AGAIN}::test_block_of_two_calls_without_an_answer_has_an_end_for_each",
        ),
    ),
)
