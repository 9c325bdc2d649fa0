# SPDX-License-Identifier: Apache-2.0
"""Mutants of blocks in a Mooncake Store: what its codes say."""

from tests.mutations.mutant import Mutant

__all__ = ["MOONCAKE"]

_FILE = "ucm/backends/mooncake.py"
_TESTS = "tests/backends/test_mooncake.py"
_CODES = f"{_TESTS}::TestCodes"
_SILENT = f"{_CODES}::test_code_that_says_nothing_of_a_block_is_no_answer"
_CONTRACT = f"{_TESTS}::TestFakeClient"
_LATE = "tests/backends/test_mooncake_late.py"
_CLIENT = "ucm/backends/_mooncake_client.py"
_BEGUN = "tests/backends/test_mooncake_begun.py::TestBegun"

MOONCAKE = (
    Mutant(
        name="mooncake_could_not_ask_is_there",
        why="A master that is away makes a hit of everything: its code is true.",
        file=_FILE,
        find="_PRESENCE.get(code, Presence.UNKNOWN)",
        replace="Presence.PRESENT if code else Presence.ABSENT",
        killers=(_SILENT,),
    ),
    Mutant(
        name="mooncake_short_object_is_no_answer",
        why="What is cut is never deleted, and opens the circuit of a healthy store.",
        file=_FILE,
        find="                code = client.get_size(names[at])\n",
        replace="",
        killers=(f"{_CONTRACT}::test_block_of_another_length_is_garbage",),
    ),
    Mutant(
        name="mooncake_dead_node_is_garbage",
        why="Blocks of a node that is away for a moment are deleted as damaged.",
        file=_FILE,
        find="    if code == HEADER_BYTES + nbytes:\n        return _UNAVAILABLE\n",
        replace="",
        killers=(_SILENT,),
    ),
    Mutant(
        name="mooncake_asks_a_silent_master",
        why="R-52: a call that nobody can end waits a time-out for each of its blocks.",
        file=_FILE,
        find="is_silent = code < 0 and code not in (_NOT_THERE, _BEGUN)",
        replace="is_silent = False",
        killers=(f"{_CODES}::test_master_that_is_silent_is_asked_once",),
    ),
    Mutant(
        name="mooncake_put_is_absent",
        why="A master that forgets is no fault of the tier's, and is asked on and on.",
        file=_FILE,
        find="_PUT = {0: Verdict.DONE, -200: Verdict.FULL}",
        replace="_PUT = {0: Verdict.DONE, -200: Verdict.FULL, _NOT_THERE: Verdict.ABSENT}",
        killers=(f"{_CODES}::test_put_that_its_master_forgets_is_no_answer",),
    ),
    Mutant(
        name="mooncake_full_is_away",
        why="A store without room is not asked any more.",
        file=_FILE,
        find=", -200: Verdict.FULL",
        replace="",
        killers=(f"{_CODES}::test_no_room_is_told",),
    ),
    Mutant(
        name="mooncake_joins_once",
        why="A master that was down at the start is never found.",
        file=_FILE,
        find="if self._joining is None or self._joining.is_over:",
        replace="if self._joining is None:",
        killers=(f"{_TESTS}::TestJoining::test_master_that_comes_later_is_found",),
    ),
    Mutant(
        name="mooncake_joins_for_nobody",
        why="A store that takes longer to join than a verb may is joined again for ever.",
        file=_FILE,
        find="        if self._client is None and self._is_open:\n",
        replace="        if (self._joining is None or self._joining.is_over) and self._is_open:\n",
        killers=(f"{_TESTS}::TestJoining::test_join_that_outlasts_who_asked_counts",),
    ),
    Mutant(
        name="mooncake_asks_behind_its_end",
        why="A verb behind the end crashes the agent.",
        file="ucm/backends/_crew.py",
        find="        if not items or self._is_closing:\n",
        replace="        if not items:\n",
        killers=(f"{_CONTRACT}::test_closed_backend_answers_that_it_does_not",),
    ),
    Mutant(
        name="mooncake_knows_no_early_memory",
        why="A network card refuses all that was registered before the store was joined.",
        file=_FILE,
        find="        for memory in self._memory:\n            _register(client, memory)\n",
        replace="",
        killers=(f"{_TESTS}::TestJoining::test_network_cards_know_the_memory",),
    ),
    Mutant(
        name="begun_called_done",
        why="What a killed agent had begun to put is counted as spilled, and told to routers; it is in no tier.",
        file=_FILE,
        find="0: Verdict.AWAY}",
        replace="0: Verdict.DONE}",
        killers=(f"{_BEGUN}::test_block_that_another_has_begun_is_not_called_done",),
    ),
    Mutant(
        name="silence_behind_a_put_called_done",
        why="Blocks are told as put of which nobody knows whether they are there.",
        file=_FILE,
        find="_WRITTEN.get(code, Verdict.UNAVAILABLE)",
        replace="_WRITTEN.get(code, Verdict.DONE)",
        killers=(
            f"{_BEGUN}::test_block_of_which_a_master_does_not_say_that_it_is_there_is_not_called_done",
        ),
    ),
    Mutant(
        name="begun_is_silence",
        why="Of several blocks that a killed agent had begun the second one has the tier taken for silent.",
        file=_FILE,
        find="is_silent = code < 0 and code not in (_NOT_THERE, _BEGUN)",
        replace="is_silent = code < 0 and code != _NOT_THERE",
        killers=(f"{_BEGUN}::test_block_that_another_has_begun_is_a_miss",),
    ),
    Mutant(
        name="begun_is_no_answer",
        why="Prompts that meet what a killed agent had begun have the whole tier taken for silent.",
        file=_FILE,
        find="    if code in (_NOT_THERE, _BEGUN):",
        replace="    if code == _NOT_THERE:",
        killers=(f"{_BEGUN}::test_block_that_another_has_begun_is_a_miss",),
    ),
    Mutant(
        name="mooncake_trusts_what_it_gave_up",
        why="R-52: transfers that the client has given up write into slots that are others' by then.",
        file=_CLIENT,
        find="            is_late = self._clock() - began >= _TRUSTED_S\n",
        replace="            is_late = False\n",
        killers=(
            f"{_LATE}::test_read_that_goes_on_writes_into_nobody_s_memory",
            f"{_LATE}::test_write_that_goes_on_reads_nobody_s_memory",
        ),
    ),
    Mutant(
        name="mooncake_closes_amid_calls",
        why="R-52: a client that is closed amid another call crashes the agent.",
        file=_CLIENT,
        find="if self.is_over and not self._num_calls:",
        replace="if self.is_over:",
        killers=(f"{_LATE}::test_client_is_closed_behind_the_calls_of_others",),
    ),
    Mutant(
        name="mooncake_shares_memory_that_is_written_to",
        why="R-52: others' blocks are staged where transfers go on that were given up.",
        file=_FILE,
        find="            try:\n                client.call(use)\n            finally:\n                self._rooms.put(room)\n",
        replace="            self._rooms.put(room)\n            client.call(use)\n",
        killers=(
            f"{_LATE}::test_memory_for_staging_is_lent_again_behind_its_transfers",
        ),
    ),
)
