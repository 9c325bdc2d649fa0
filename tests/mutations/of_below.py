# SPDX-License-Identifier: Apache-2.0
"""Mutants of what reaches the tiers below a slab, and what is told of them."""

from tests.mutations.mutant import Mutant

__all__ = ["BELOW"]

_POLICY = (
    "tests/integration/vllm/test_tiers_pending.py"
    "::test_engine_s_policy_decides_whose_fetch_is_first"
)

BELOW = (
    Mutant(
        name="policy_is_not_looked_at",
        why="R-58: an engine that runs requests by priority has them fetched as they come.",
        file="ucm/integration/vllm/setup.py",
        find="            is_ranked=_is_ranked(vllm_config),\n",
        replace="",
        killers=(f"{_POLICY}[priority--3]",),
    ),
    Mutant(
        name="policy_does_not_reach_the_reader",
        why="R-58: the policy is read, and nothing comes of it.",
        file="ucm/integration/vllm/scheduler.py",
        find=", is_ranked=is_ranked\n",
        replace="\n",
        killers=(f"{_POLICY}[priority--3]",),
    ),
    Mutant(
        name="everybody_is_ranked",
        why="R-58: in an engine that serves in order of arrival anybody may push in front.",
        file="ucm/integration/vllm/setup.py",
        find='return getattr(scheduling, "policy", "") == "priority"',
        replace="return True",
        killers=(f"{_POLICY}[fcfs-0]",),
    ),
)
