# SPDX-License-Identifier: Apache-2.0
"""Mutants of blocks in yuanrong's data system: what its codes say, and whose process ends."""

from tests.mutations.mutant import Mutant

__all__ = ["YUAN"]

_FILE = "ucm/backends/yuanrong.py"
_CLIENT = "ucm/backends/_yuanrong_client.py"
_TESTS = "tests/backends/test_yuanrong.py"
_CODES = f"{_TESTS}::TestCodes"
_PROCESSES = "tests/backends/test_yuanrong_processes.py::TestProcesses"

YUAN = (
    Mutant(
        name="yuanrong_silent_worker_is_a_miss",
        why="Whatever a get says that fails, nobody has the block.",
        file=_CLIENT,
        find="            if _code(exc) != _NOT_FOUND:\n                raise\n",
        replace="",
        killers=(
            f"{_CODES}::test_code_that_says_nothing_of_a_block_is_no_answer[get-Try again]",
        ),
    ),
    Mutant(
        name="yuanrong_inner_code_counts",
        why="A code that is but a detail of another one makes a miss of no answer.",
        file=_CLIENT,
        find='    found = _CODE.search(str(error))\n    return found[1] if found else ""\n',
        replace='    found = _CODE.findall(str(error))\n    return found[-1] if found else ""\n',
        killers=(
            f"{_CODES}::test_code_that_says_nothing_of_a_block_is_no_answer[get-Not ready]",
        ),
    ),
    Mutant(
        name="yuanrong_block_of_another_worker_is_a_miss",
        why="What a worker holds that is away for a moment is not there.",
        file=_CLIENT,
        find='"unavailable" if is_known else "absent"',
        replace='"absent"',
        killers=(f"{_CODES}::test_block_that_is_known_and_does_not_come_is_no_answer",),
    ),
    Mutant(
        name="yuanrong_each_block_waits_for_room",
        why="A full worker takes a time-out for each block of a call.",
        file=_CLIENT,
        find="                    return told + told[-1:] * (len(names) - len(told))\n",
        replace="                    continue\n",
        killers=(f"{_CODES}::test_no_room_is_told_and_asked_for_once",),
    ),
    Mutant(
        name="yuanrong_deletes_what_is_not_there",
        why="An absent block is told as deleted, as the client has it.",
        file=_CLIENT,
        find='dict.fromkeys(names, "absent") | dict',
        replace='dict.fromkeys(names, "done") | dict',
        killers=(f"{_CODES}::test_each_verb_tells_of_each_block",),
    ),
    Mutant(
        name="yuanrong_process_outlives_its_call",
        why="The next call reads the answer of one that was given up, as its own.",
        file=_FILE,
        find="        is_well = False\n        try:\n",
        replace="        is_well = True\n        try:\n",
        killers=(f"{_PROCESSES}::test_call_that_is_given_up_ends_its_process",),
    ),
    Mutant(
        name="yuanrong_other_length_is_read",
        why="A process sends what is there, and the next block's header is read amid it.",
        file=_CLIENT,
        find='told[at] == "done" and memoryview(found[at]).nbytes != nbytes',
        replace="False",
        killers=(f"{_PROCESSES}::test_value_of_another_length_harms_none_beside_it",),
    ),
    Mutant(
        name="yuanrong_process_outlives_its_agent",
        why="Behind a killed agent a process waits for ever for a worker that has gone.",
        file=_CLIENT,
        find="            os._exit(0)\n",
        replace="            line.close()\n",
        killers=(f"{_PROCESSES}::test_process_goes_with_the_agent",),
    ),
    Mutant(
        name="yuanrong_slow_start_begins_anew",
        why="Where a client loads for longer than a call may take, no call ever has one.",
        file=_FILE,
        find="(is_well or helper.is_starting)",
        replace="is_well",
        killers=(
            f"{_PROCESSES}::test_process_that_is_slow_to_start_serves_a_later_call",
        ),
    ),
)
