# SPDX-License-Identifier: Apache-2.0
"""Mutants of what reaches the tiers below a slab, and what is told of them."""

from tests.mutations.mutant import Mutant

__all__ = ["BELOW"]

_POLICY = (
    "tests/integration/vllm/test_tiers_pending.py"
    "::test_engine_s_policy_decides_whose_fetch_is_first"
)
_MOONCAKE = "ucm/backends/mooncake.py"
_READING = "tests/backends/test_files_reading.py::TestReading"
_GATE = "tests/backends/test_files_reading.py::TestGate"
_TIMEOUTS = "tests/backends/test_mooncake.py::TestTimeouts"

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
        find="            is_ranked=setup.is_ranked,\n",
        replace="",
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
    Mutant(
        name="mooncake_waits_amid_a_block",
        why="R-52: a node that stops while bytes come from it holds a call for 30 seconds.",
        file=_MOONCAKE,
        find='            "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,',
        replace="            ",
        killers=(f"{_TIMEOUTS}::test_client_is_told_when_to_give_up",),
    ),
    Mutant(
        name="mooncake_shares_few_connections",
        why="R-52: transfers to a node that has stopped time out four by four.",
        file=_MOONCAKE,
        find='            "MC_TCP_LANES_PER_PEER": str(_LANES),\n',
        replace="",
        killers=(f"{_TIMEOUTS}::test_client_is_told_when_to_give_up",),
    ),
    Mutant(
        name="mooncake_calls_are_long",
        why="R-52: a call waits for one connection after the other, and nobody can end it.",
        file=_MOONCAKE,
        find="_TRANSFERS = 2 * _LANES\n",
        replace="_TRANSFERS = 4 * _LANES\n",
        killers=(f"{_TIMEOUTS}::test_calls_at_a_time_wait_two_time_outs",),
    ),
    Mutant(
        name="signal_hides_a_file_that_is_read",
        why="On a mount over a network a signal makes a block of a tier unavailable.",
        file="ucm/native.c",
        find="        if (file >= 0 || errno != EINTR) return file;\n",
        replace="        return file;\n",
        killers=(f"{_READING}::test_signal_that_comes_meanwhile_changes_nothing",),
    ),
    Mutant(
        name="signal_hides_the_length_of_a_file",
        why="On a mount over a network a signal makes a block of a tier unavailable.",
        file="ucm/native.c",
        find="    while (fstat(file, &is))\n        if (errno != EINTR) return errno;\n",
        replace="    if (fstat(file, &is)) return errno;\n",
        killers=(f"{_READING}::test_signal_that_comes_meanwhile_changes_nothing",),
    ),
    Mutant(
        name="signal_hides_a_file_that_is_looked_for",
        why="On a mount over a network a signal makes a block of a tier unavailable.",
        file="ucm/native.c",
        find="    while (lstat(path, &is))\n        if (errno != EINTR) return errno;\n",
        replace="    if (lstat(path, &is)) return errno;\n",
        killers=(f"{_READING}::test_signal_that_comes_meanwhile_changes_nothing",),
    ),
    Mutant(
        name="late_bytes_written_by_native_code",
        why="A read that hung writes to a slot that is another block's by now.",
        file="ucm/native.c",
        find="    if (!is_left) memcpy(target, source, nbytes);\n",
        replace="    memcpy(target, source, nbytes);\n    is_left = 0;\n",
        killers=(f"{_GATE}::test_who_leaves_amid_a_native_read_gets_nothing_more",),
    ),
    Mutant(
        name="native_copies_are_not_waited_for",
        why="A slot is given back while a thread just writes to it.",
        file="ucm/native.c",
        find="    while (atomic_load(&gate->num_touching)) sched_yield();\n",
        replace="    (void)sched_yield;\n",
        killers=(f"{_GATE}::test_who_leaves_waits_for_a_native_copy",),
    ),
)
