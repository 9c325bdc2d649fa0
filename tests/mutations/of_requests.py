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
_HEADS = "tests/backends/test_redis_heads.py"
_VALUES = "ucm/backends/_redis_values.py"
_ANEW = f"{_HEADS}::test_block_that_is_put_anew_meanwhile_is_read_again"

REQUESTS = (
    Mutant(
        name="parts_of_two_machines_mix",
        why="X-02: of prompts that two machines compute at once most blocks in Redis are damaged.",
        file=_REDIS,
        find="self._parts(key, len(data), seal_of(blocks[at].checksum))",
        replace='self._parts(key, len(data), b"")',
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
        find=" and not is_its:",
        replace=":",
        killers=(f"{_MACHINES}::test_same_bytes_of_two_machines_stay",),
    ),
    Mutant(
        name="parts_stay_whose_head_has_gone",
        why="X-02: a server without times to live has bytes that nobody can name.",
        file=_REDIS,
        find="if silence_of(head) is None and not is_its:",
        replace="if isinstance(head, Envelope) and not is_its:",
        killers=(
            f"{_HEADS}::test_parts_of_who_is_too_late_go_with_the_head_of_the_other",
        ),
    ),
    Mutant(
        name="parts_of_nobody_knows_whom_are_taken_back",
        why="X-02: a block of another machine is damaged where a server did not answer for a moment.",
        file=_REDIS,
        find="if silence_of(head) is None and not is_its:",
        replace="if not is_its:",
        killers=(f"{_HEADS}::test_parts_stay_where_nobody_says_whose_they_are",),
    ),
    Mutant(
        name="parts_without_room_for_all_stay",
        why="A full server is filled with parts of blocks that it does not have.",
        file=_REDIS,
        find="if told[at] is not Verdict.DONE]",
        replace="if told[at] is Verdict.PRESENT]",
        killers=(
            "tests/backends/test_redis.py::TestParts::test_block_of_which_a_part_is_refused_gets_no_head",
        ),
    ),
    Mutant(
        name="block_is_deleted_without_its_parts",
        why="R-51: where a look had no answer its parts stay, and nobody can name them.",
        file=_REDIS,
        find="if (silence := silence_of(head)) is not None:",
        replace="if (silence := silence_of(head)) is Verdict.DONE:",
        killers=(f"{_HEADS}::test_block_whose_head_has_no_answer_is_not_deleted",),
    ),
    Mutant(
        name="block_put_anew_meanwhile_is_damaged",
        why="R-51: a good block is deleted as damaged, as it was put anew while somebody read the one before.",
        file=_REDIS,
        find="[at for at in anew if at in large]",
        replace="[]",
        killers=(f"{_ANEW}[True]",),
    ),
    Mutant(
        name="bytes_are_taken_for_those_of_another_head",
        why="R-51: bytes of one block come with the checksum of another, which is deleted as damaged.",
        file=_VALUES,
        find="    if there != known:",
        replace="    if known is None:",
        killers=(f"{_ANEW}[False]",),
    ),
    Mutant(
        name="block_put_anew_twice_is_damaged",
        why="R-51: a good block is deleted as damaged, as others were too quick.",
        file=_REDIS,
        find="            told[at] = ABSENT  # what",
        replace="            pass  # what",
        killers=(
            f"{_HEADS}::test_block_that_is_put_anew_twice_meanwhile_is_not_there",
        ),
    ),
    Mutant(
        name="value_without_a_byte_is_none",
        why="It is there for who puts, and absent for who gets, so that no block ever takes its place.",
        file=_REDIS,
        find="None if head == ABSENT else head",
        replace="head",
        killers=(f"{_HEADS}::test_value_without_a_byte_is_garbage",),
    ),
    Mutant(
        name="verdict_of_a_deletion_is_that_of_its_parts",
        why="R-52: a block without parts was not there, though it was deleted.",
        file=_REDIS,
        find="ask([*heads, *parts]",
        replace="ask([*parts, *heads]",
        killers=(
            "tests/backends/test_redis.py::TestServer::test_value_of_another_kind_is_garbage",
        ),
    ),
    Mutant(
        name="parts_stay_while_a_slot_moves",
        why="A cluster that is given another server has bytes on that nobody can name.",
        file=_VALUES,
        find="[(name,) for name in names] if is_cluster else [names]",
        replace="[names]",
        killers=(
            "tests/backends/test_redis_cluster.py::test_block_whose_slot_moves_is_deleted_with_its_parts",
        ),
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
    Mutant(
        name="block_without_a_part_stays",
        why="R-51: what a server let go of a part of is a hit that never comes, and never put again.",
        file=_REDIS,
        find="        await self._delete([pairs[at][0] for at in left])",
        replace="        assert left is not None",
        killers=(
            "tests/backends/test_redis.py::TestParts::test_block_without_one_of_its_parts_is_none[2]",
        ),
    ),
    Mutant(
        name="block_of_another_length_is_removed",
        why="R-51: a good block goes as somebody asks for one of another length, and is told as absent.",
        file="ucm/backends/_redis_values.py",
        find=" and there.nbytes == nbytes else GARBAGE",
        replace=" else GARBAGE",
        killers=(
            "tests/backends/test_redis_heads.py::test_block_of_another_length_is_garbage_and_stays",
        ),
    ),
    Mutant(
        name="redis_says_no_reason",
        why="R-51: a certificate that is over is a server that is down.",
        file="ucm/backends/_redis_servers.py",
        find='            self.trouble = f"',
        replace='            _ = f"',
        killers=(
            "tests/backends/test_redis_dialer.py::test_tls_that_fails_is_told_without_secrets",
        ),
    ),
    Mutant(
        name="certificates_are_looked_for_later",
        why="A wrong path is taken for a server that is down, for as long as the agent runs.",
        file="ucm/backends/_redis_settings.py",
        find="SSLConnection(**ours).ssl_context.get()",
        replace="SSLConnection(**ours)",
        killers=(
            "tests/backends/test_redis.py::TestServer::test_wrong_setting_is_named[settings12-url]",
            "tests/backends/test_redis.py::TestServer::test_wrong_setting_is_named[settings13-url]",
        ),
    ),
)
