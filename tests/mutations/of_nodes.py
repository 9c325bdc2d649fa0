# SPDX-License-Identifier: Apache-2.0
"""Mutants of ranks on several machines."""

from tests.mutations.mutant import Mutant

__all__ = ["NODES"]

_ELSEWHERE = "ucm/scheduler/elsewhere.py"
_RANK = "ucm/integration/vllm/elsewhere.py"
_DOOR = "ucm/integration/vllm/tiers.py"
_REACH = "tests/scheduler/test_elsewhere.py::TestReach"
_PLAN = "tests/scheduler/test_elsewhere.py::TestPlan"
_ANSWER = "tests/integration/vllm/test_elsewhere.py::TestAnswer"
_ASK = "tests/integration/vllm/test_elsewhere.py::TestAsk"
_MACHINES = "tests/integration/vllm/test_machines.py::TestMachines"

NODES = (
    Mutant(
        name="first_machine_speaks_for_all",
        why="R-60: a prefix counts that one machine has in part only.",
        file=_ELSEWHERE,
        find="part.reach = min(part.reach, token)",
        replace="part.reach = token",
        killers=(f"{_REACH}::test_the_order_of_answers_does_not_count",),
    ),
    Mutant(
        name="silent_machine_has_all",
        why="R-60: a hit is promised that a machine has not confirmed.",
        file=_ELSEWHERE,
        find="if part.silent or part.want.keyspace_digest != keyspace_digest:",
        replace="if part.want.keyspace_digest != keyspace_digest:",
        killers=(f"{_REACH}::test_least_of_all_counts",),
    ),
    Mutant(
        name="answer_under_former_keys",
        why="R-60: a hit is promised that other weights had.",
        file=_ELSEWHERE,
        find="if part.silent or part.want.keyspace_digest != keyspace_digest:",
        replace="if part.silent:",
        killers=(f"{_REACH}::test_answer_under_other_keys_is_none",),
    ),
    Mutant(
        name="wants_beyond_a_message",
        why="A long prompt breaks the plan that asks for it, and all of ours ends.",
        file=_ELSEWHERE,
        find="        step = max(align, longest // align * align)\n",
        replace="        step = len(tokens)\n",
        killers=(f"{_PLAN}::test_prompt_beyond_a_plan_is_asked_for_in_parts",),
    ),
    Mutant(
        name="every_rank_is_asked",
        why="Ranks beside the scheduler ask an agent for what the scheduler sees.",
        file=_RANK,
        find="            if self._rank in want.ranks:\n                self._ask(want)\n",
        replace="            self._ask(want)\n",
        killers=(f"{_ASK}::test_ranks_of_the_scheduler_s_machine_are_not_asked",),
    ),
    Mutant(
        name="reach_behind_the_gap",
        why="R-60: the block that a machine lacks counts as there, and its load fails.",
        file=_RANK,
        find="return asked.ends[found] - 1",
        replace="return asked.ends[found]",
        killers=(f"{_ANSWER}::test_part_of_a_prefix_reaches_so_far",),
    ),
    Mutant(
        name="windows_of_a_longer_hit",
        why="R-60: a shorter hit is promised whose windows nobody has fetched.",
        file=_RANK,
        find="        if not asked.is_all_full:\n",
        replace="        if False:\n",
        killers=(f"{_ANSWER}::test_part_of_a_prefix_with_windows_is_none",),
    ),
    Mutant(
        name="hit_of_one_machine_is_a_hit",
        why="R-60: what the scheduler's own slab has is loaded where others lack it.",
        file=_DOOR,
        find="        reach = self._reach(request_id, computed_tokens) - computed_tokens\n",
        replace="        reach = wishes.most_loaded\n",
        killers=(f"{_MACHINES}::test_part_that_one_machine_lacks_is_a_miss",),
    ),
    Mutant(
        name="part_of_others_looked_for_here",
        why="R-60: the scheduler's machine fetches, keeps and looks for what others load.",
        file=_DOOR,
        find="            self._matcher.reshard(sorted(self._part_bytes))\n",
        replace="",
        killers=(f"{_MACHINES}::test_prompt_is_found_where_each_machine_has_its_part",),
    ),
    Mutant(
        name="machines_without_a_common_tier",
        why="R-60: an engine saves in vain, and nobody says so.",
        file="ucm/agent/joining.py",
        find='    if all(tier["type"] in _OF_ONE_MACHINE for tier in config.tiers):\n',
        replace="    if False:\n",
        killers=(
            (
                "tests/integration/vllm/test_machines.py::TestRefused::"
                "test_ranks_elsewhere_need_a_tier_that_all_see"
            ),
        ),
    ),
    Mutant(
        name="former_question_stays",
        why="R-60: its late answer ends the engine, and each such request leaves one.",
        file=_ELSEWHERE,
        find="        self.drop(request_id)\n",
        replace="",
        killers=(
            (
                f"{_REACH}::test_question_that_is_asked_anew_takes_the_place_of_"
                "the_former"
            ),
        ),
    ),
    Mutant(
        name="answer_for_tokens_nobody_asked_for",
        why="R-60: a load is promised of blocks that other machines never looked for.",
        file=_ELSEWHERE,
        find="if not parts or parts[0].want.start > computed_tokens:",
        replace="if not parts:",
        killers=(f"{_REACH}::test_answer_holds_from_the_token_of_its_question_on",),
    ),
    Mutant(
        name="wishes_beyond_a_message",
        why="A client's list of tiers breaks the plan, and with it the engine.",
        file=_ELSEWHERE,
        find="    return nbytes + sum(_NUMBER + len(word.encode()) for word in words)\n",
        replace="    return nbytes\n",
        killers=(f"{_PLAN}::test_tiers_that_a_request_names_count",),
    ),
    Mutant(
        name="nobody_is_here",
        why="The first prompt ends an engine whose ranks are all on other machines.",
        file=_DOOR,
        find="            if not self._part_bytes:\n",
        replace="            if False:\n",
        killers=(
            (
                "tests/integration/vllm/test_tiers.py::TestAgree::"
                "test_engine_without_a_rank_here_is_refused"
            ),
        ),
    ),
    Mutant(
        name="neighbour_taken_for_a_machine",
        why="Two entries inside of MultiConnector keep an engine from starting.",
        file="ucm/integration/vllm/setup.py",
        find='place_of(self.config.store) if self.is_spread else ""',
        replace="place_of(self.config.store)",
        killers=(
            (
                "tests/integration/vllm/test_setup.py::TestSetup::"
                "test_place_is_told_where_ranks_may_be_on_other_machines[mp-False]"
            ),
        ),
    ),
)
