# SPDX-License-Identifier: Apache-2.0
"""Mutants of what the redis backend asks for with one request."""

from tests.mutations.mutant import Mutant

__all__ = ["REQUESTS"]

_SERVERS = "ucm/backends/_redis_servers.py"
_REDIS = "ucm/backends/redis.py"
_TESTS = "tests/backends/test_redis_requests.py"
_PUTS = f"{_TESTS}::test_request_puts_no_more_than_eight_megabytes"
_GETS = f"{_TESTS}::test_request_gets_no_more_than_eight_megabytes"
_TURN = f"{_TESTS}::test_call_for_no_blocks_waits_for_no_turn"

_MACHINES = "tests/backends/test_redis_machines.py"

REQUESTS = (
    Mutant(
        name="parts_of_two_machines_mix",
        why="X-02: of prompts that two machines compute at once most blocks in Redis are damaged.",
        file=_REDIS,
        find="            seal = seal_of(blocks[at].checksum)",
        replace='            seal = b""',
        killers=(f"{_MACHINES}::test_block_is_that_of_one_of_two_machines",),
    ),
    Mutant(
        name="parts_of_who_is_too_late_stay",
        why="X-02: a server without times to live has bytes that nobody removes.",
        file=_REDIS,
        find="        await self._take_back(",
        replace="        len(",
        killers=(f"{_MACHINES}::test_block_is_that_of_one_of_two_machines",),
    ),
    Mutant(
        name="parts_of_both_are_taken_back",
        why="Prompts that two machines compute at once, to the same bytes, are in Redis for neither.",
        file=_REDIS,
        find=" and head.checksum != block.checksum",
        replace="",
        killers=(f"{_MACHINES}::test_same_bytes_of_two_machines_stay",),
    ),
    Mutant(
        name="requests_are_half_as_large",
        why="R-52: blocks of 4 MB cost the loop a request each.",
        file=_REDIS,
        find="_CALL_BYTES = 8 << 20",
        replace="_CALL_BYTES = 4 << 20",
        killers=(f"{_PUTS}[sizes0-shares0]", f"{_GETS}[sizes0-shares0]"),
    ),
    Mutant(
        name="requests_are_twice_as_large",
        why="R-52: a request takes longer than its timeout, which counts 8 MB.",
        file=_REDIS,
        find="_CALL_BYTES = 8 << 20",
        replace="_CALL_BYTES = 16 << 20",
        killers=(f"{_PUTS}[sizes0-shares0]", f"{_GETS}[sizes0-shares0]"),
    ),
    Mutant(
        name="full_request_is_too_large",
        why="R-52: two blocks of 4 MB are two requests.",
        file=_REDIS,
        find="            if nbytes > _CALL_BYTES:",
        replace="            if nbytes >= _CALL_BYTES:",
        killers=(f"{_PUTS}[sizes0-shares0]", f"{_GETS}[sizes3-shares3]"),
    ),
    Mutant(
        name="first_of_a_request_is_not_counted",
        why="R-52: a request has a block more than it has time for.",
        file=_REDIS,
        find="                nbytes = size\n",
        replace="                nbytes = 0\n",
        killers=(f"{_PUTS}[sizes1-shares1]", f"{_GETS}[sizes5-shares5]"),
    ),
    Mutant(
        name="look_for_no_blocks_waits_for_a_turn",
        why="R-52: what has nothing to ask waits for a server that is slow.",
        file=_REDIS,
        find="        if not keys or not self._is_open:\n            return [Presence.UNKNOWN]",
        replace="        if not self._is_open:\n            return [Presence.UNKNOWN]",
        killers=(_TURN,),
    ),
    Mutant(
        name="delete_of_no_blocks_waits_for_a_turn",
        why="R-52: what has nothing to ask waits for a server that is slow.",
        file=_REDIS,
        find="        if not keys or not self._is_open:\n            return [Verdict.UNAVAILABLE]",
        replace="        if not self._is_open:\n            return [Verdict.UNAVAILABLE]",
        killers=(_TURN,),
    ),
    Mutant(
        name="nothing_is_a_request",
        why="R-52: a put of small blocks, which have no parts, ends an agent.",
        file=_SERVERS,
        find="        if not self._is_open or not commands:",
        replace="        if not self._is_open:",
        killers=(
            f"{_TESTS}::test_redis_py_is_asked_nothing_where_connections_of_ours_have_all",
        ),
    ),
    Mutant(
        name="redis_py_is_asked_for_nothing",
        why="R-52: each request begins one of redis-py's beside it, on the loop.",
        file=_SERVERS,
        find="        if not commands or not self._is_open:",
        replace="        if not self._is_open:",
        killers=(
            f"{_TESTS}::test_redis_py_is_asked_nothing_where_connections_of_ours_have_all",
        ),
    ),
)
