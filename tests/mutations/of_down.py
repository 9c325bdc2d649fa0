# SPDX-License-Identifier: Apache-2.0
"""Mutants of a cluster that is down, or of which a server that is cut off says so."""

from tests.mutations.mutant import Mutant

__all__ = ["DOWN"]

_SERVERS = "ucm/backends/_redis_servers.py"
_ANSWERS = "ucm/backends/_redis_answers.py"
_SLOTS = "ucm/backends/_redis_slots.py"
_DOWN = "tests/backends/test_redis_down.py"
_COSTS = f"{_DOWN}::test_server_that_is_cut_off_costs_its_own_blocks_alone"
_READS = f"{_DOWN}::test_server_that_is_cut_off_and_answers_reads_takes_nothing"
_STANDS = f"{_DOWN}::test_who_stands_in_for_a_server_that_is_cut_off_is_asked"
_GONE = f"{_DOWN}::test_cluster_whose_majority_is_gone_is_a_tier_without_an_answer"
_ASKED = "tests/backends/test_redis_servers.py"
_WELL = f"{_ASKED}::test_those_that_are_well_are_asked_who_stands_in_for_one_that_is_cut_off"
_LEARN = "tests/backends/test_redis_slots.py"
_ALONE = f"{_LEARN}::test_those_alone_are_asked_that_are_well"
_END = f"{_LEARN}::test_one_is_asked_at_a_time_and_nobody_behind_the_end"

DOWN = (
    Mutant(
        name="tier_is_blamed_for_who_is_cut_off",
        why="X-14: a tier of six servers is gone with the first that a switch cuts off from the others.",
        file=_ANSWERS,
        find="        return _READS not in str(answer)",
        replace="        return False",
        killers=(_COSTS,),
    ),
    Mutant(
        name="majority_that_is_gone_is_well",
        why="X-14: a cluster that is down as a whole is a tier of which one server is well.",
        file=_ANSWERS,
        find="isinstance(answer, ResponseError) and _DOWN in str(answer)",
        replace="False",
        killers=(_GONE,),
    ),
    Mutant(
        name="who_answers_reads_alone_is_silent",
        why="R-51: what a server has that is set to answer reads is computed while it is cut off.",
        file=_ANSWERS,
        find="        return _READS not in str(answer)",
        replace="        return True",
        killers=(_READS,),
    ),
    Mutant(
        name="who_answers_reads_alone_takes_blocks",
        why="X-14: a tier of six servers takes nothing while one of them is cut off.",
        file=_ANSWERS,
        find="        return not is_silence(answer)",
        replace="        return False",
        killers=(_READS,),
    ),
    Mutant(
        name="who_is_cut_off_is_asked_who_stands_in",
        why="R-51: a replica that has taken over is not found while the old server says that all is down.",
        file=_SERVERS,
        find="            await self._slots.learn(well)\n",
        replace="            pass\n",
        killers=(f"{_STANDS}[False]",),
    ),
    Mutant(
        name="who_stands_in_later_is_not_found",
        why="R-51: a replica that takes over behind a second, as they do, is never asked.",
        file=_SERVERS,
        find="                    await self._follow(server, answers)\n",
        replace="",
        killers=(f"{_STANDS}[True]",),
    ),
    Mutant(
        name="two_that_are_cut_off_speak_for_each_other",
        why="R-51: slots that a call has found with who stands in go back to who is cut off with the next one.",
        file=_SERVERS,
        find="if one is not server and one.is_well(for_writes=True)",
        replace="if one is not server",
        killers=(_WELL,),
    ),
    Mutant(
        name="who_is_cut_off_is_sent_all_twice",
        why="R-52: megabytes go to a server by a second connection, to be refused again.",
        file=_SERVERS,
        find="is_down(answers[at]) and self._server_of(commands[at]) is server",
        replace="False",
        killers=(_WELL,),
    ),
    Mutant(
        name="who_stands_in_is_sent_nothing",
        why="R-55: what was put as the server was replaced is dropped.",
        file=_SERVERS,
        find="is_down(answers[at]) and self._server_of(commands[at]) is server",
        replace="is_down(answers[at])",
        killers=(
            f"{_ASKED}::test_who_stands_in_is_sent_what_one_that_is_cut_off_refused",
        ),
    ),
    Mutant(
        name="slots_are_asked_for_behind_the_end",
        why="R-52: an agent that ends waits for a server that does not say whose the slots are.",
        file=_SERVERS,
        find="        self._slots.close()\n",
        replace="",
        killers=(
            f"{_ASKED}::test_nobody_waits_for_what_a_server_is_asked_behind_the_end",
        ),
    ),
    Mutant(
        name="anybody_is_asked_whose_slots_are",
        why="R-51: one that is cut off as well names itself.",
        file=_SLOTS,
        find=" if name in names}",
        replace="}",
        killers=(_ALONE,),
    ),
    Mutant(
        name="those_that_were_not_asked_are_forgotten",
        why="A connection of each look stays open, and redis-py asks few in place of all.",
        file=_SLOTS,
        find="nodes.startup_nodes = asked | before",
        replace="nodes.startup_nodes = asked",
        killers=(_ALONE,),
    ),
    Mutant(
        name="who_came_to_the_cluster_is_forgotten",
        why="R-51: redis-py asks those alone that were there at the start, which may all have left.",
        file=_SLOTS,
        find="nodes.startup_nodes = asked | before",
        replace="nodes.startup_nodes = before",
        killers=(_ALONE,),
    ),
    Mutant(
        name="all_are_asked_where_nobody_is_well",
        why="R-52: a call waits for servers that are known to be silent.",
        file=_SLOTS,
        find="        if not asked:\n            return\n",
        replace="",
        killers=(f"{_LEARN}::test_nobody_is_asked_where_nobody_is_well[names0]",),
    ),
    Mutant(
        name="slots_that_nobody_tells_are_a_bug",
        why="R-52: an agent ends, with all its tiers, as the last server that was well falls silent.",
        file=_SLOTS,
        find="contextlib.suppress(*ERRORS):",
        replace="contextlib.suppress(KeyError):",
        killers=(
            f"{_LEARN}::test_what_is_known_stays_where_nobody_answers[error0]",
            f"{_LEARN}::test_what_is_known_stays_where_nobody_answers[error1]",
        ),
    ),
    Mutant(
        name="slots_are_waited_for_without_an_end",
        why="R-52: what others have said of their blocks waits for a server that does not say whose the slots are.",
        file=_SLOTS,
        find="with anyio.move_on_after(self._seconds) as scope",
        replace="with anyio.move_on_after(3600.0) as scope",
        killers=(f"{_LEARN}::test_silence_has_an_end",),
    ),
    Mutant(
        name="two_ask_whose_slots_are_at_a_time",
        why="R-52: whom the first has put aside stays aside, for ever.",
        file=_SLOTS,
        find="                async with self._turn:\n",
        replace="                if True:\n",
        killers=(_END,),
    ),
    Mutant(
        name="who_asks_whose_slots_are_goes_on",
        why="R-52: what is under way at the end of a backend connects anew, and nobody ends that one.",
        file=_SLOTS,
        find="            scope.cancel()\n",
        replace="            pass\n",
        killers=(_END,),
    ),
    Mutant(
        name="slots_are_asked_for_once_more",
        why="R-52: a call that was cut off by the end of its backend connects anew.",
        file=_SLOTS,
        find="        self._is_open = False\n",
        replace="",
        killers=(_END,),
    ),
)
