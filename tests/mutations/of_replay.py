# SPDX-License-Identifier: Apache-2.0
"""Mutants of the replay: models that say something else than the stores do."""

from tests.mutations.mutant import Mutant

__all__ = ["REPLAY"]

_POLICIES = "ucm/replay/policies.py"
_TRACES = "ucm/replay/traces.py"
_SCENARIOS = "benchmarks/scenarios.py"
_TESTS = "tests/replay/test_policies.py"
_COMMAND = "tests/replay/test_command.py"

REPLAY = (
    Mutant(
        name="replayed_later_evicted_for_earlier",
        why="The page promises hits to prompts whose tail has pushed their head out.",
        file=_POLICIES,
        find="if self.oldest() >= moment:",
        replace="if self.oldest() == _NEVER:",
        killers=(
            f"{_TESTS}::TestPolicies::test_block_used_earlier_is_not_taken_in_for_one_used_later",
            f"{_TESTS}::TestStores::test_model_and_store_agree_on_each_request",
        ),
    ),
    Mutant(
        name="replayed_touch_lowers",
        why="A deep use of a block makes it go before others in the model, not in a store.",
        file=_POLICIES,
        find="elif known < moment:",
        replace="elif known != moment:",
        killers=(
            f"{_TESTS}::TestPolicies::test_block_used_earlier_is_not_taken_in_for_one_used_later",
        ),
    ),
    Mutant(
        name="replayed_depth_forgotten",
        why="Of a prefix any block goes first, and the policy is measured as it is not.",
        file=_POLICIES,
        find="return [request.moment - at * step for at",
        replace="return [request.moment + at * step for at",
        killers=(
            f"{_TESTS}::TestPolicies::test_prompt_above_the_capacity_keeps_its_head_with_ours_only",
        ),
    ),
    Mutant(
        name="optimum_keeps_what_is_never_used",
        why="Ours is held against an optimum that is none.",
        file=_POLICIES,
        find="following |= dict.fromkeys(request.blocks, number << 32)",
        replace="following |= dict.fromkeys(request.blocks, -number << 32)",
        killers=(f"{_TESTS}::TestOptimal::test_nobody_finds_more",),
    ),
    Mutant(
        name="newcomers_never_learn_back",
        why="Where a second use is the last one, most hits are lost for good.",
        file=_POLICIES,
        find="towards = -max(1.0, often / once) if uses == 1 else",
        replace="towards = max(1.0, often / once) if uses == 1 else",
        killers=(
            f"{_TESTS}::TestNewcomers::test_where_each_comes_twice_newcomers_are_as_good_as_any",
        ),
    ),
    Mutant(
        name="newcomer_before_its_child",
        why="A block's child stays when the block goes, and no prompt reaches it.",
        file=_POLICIES,
        find="known = position + 1  #",
        replace="known += 1  #",
        killers=(f"{_TESTS}::TestNewcomers::test_block_before_a_known_one_is_known",),
    ),
    Mutant(
        name="trace_no_prefix",
        why="A file of other hashes is replayed as if its blocks were prefixes.",
        file=_TRACES,
        find="if before.setdefault(block, previous) != previous:",
        replace="if before.setdefault(block, previous) == before:",
        killers=(f"{_COMMAND}::TestTrace::test_what_is_no_trace_is_told_in_one_line",),
    ),
    Mutant(
        name="trace_all_at_once",
        why="Lives that begin together share their moments, and room is made across them.",
        file=_TRACES,
        find="moments += [start + at * step for at",
        replace="moments += [start + at for at",
        killers=(
            f"{_COMMAND}::TestTrace::test_file_is_read_and_requests_of_a_millisecond_lie_apart",
        ),
    ),
    Mutant(
        name="part_counts_as_block",
        why="Parts that leave apart look as good as blocks that leave together.",
        file=_SCENARIOS,
        find="num_broken += any(0 < number < _RANKS for number in present)",
        replace="num_broken += any(0 < number > _RANKS for number in present)",
        killers=(
            f"{_TESTS}::TestScenarios::test_parts_with_one_moment_leave_together",
        ),
    ),
)
