# SPDX-License-Identifier: Apache-2.0
"""Edits of how a want of many blocks shares the agent's loop."""

from typing import Final

from tests.mutations.mutant import Mutant

__all__ = ["SHARING"]

_FETCH: Final = "ucm/agent/fetch.py"
_FLIGHTS: Final = "ucm/agent/flights.py"
_REGISTER: Final = "ucm/agent/register.py"
_RACES: Final = "tests/agent/test_sharing.py::TestRaces"
_TURNS: Final = "tests/agent/test_sharing.py::TestTurns"
_MANY: Final = f"{_TURNS}::test_want_of_many_blocks_shares_the_loop"
_JOINED: Final = f"{_TURNS}::test_who_joins_many_blocks_and_leaves_them_shares_the_loop"

SHARING = (
    Mutant(
        name="ending_group_joined",
        why="What another has given up ends as it is joined: a prompt computes what tiers have.",
        file=_REGISTER,
        find="        group.is_over = True\n        async for",
        replace="        async for",
        killers=(f"{_RACES}::test_want_that_is_dropped_leaves_nothing_behind",),
    ),
    Mutant(
        name="batch_of_who_gave_up_stays_in_line",
        why="A prompt waits for a tier behind blocks that nobody wants.",
        file=_FLIGHTS,
        find="                    turn.scope.cancel()\n                    self",
        replace="                    self",
        killers=(
            "tests/agent/test_fetch_line.py::TestLine::test_who_wants_nothing_any_more_leaves_the_line",
        ),
    ),
    Mutant(
        name="batch_of_who_gave_up_joined",
        why="Who wants blocks that another has given up in a tier's line joins what will not be got.",
        file=_FLIGHTS,
        find="                    self._register.end_open(turn.flights)\n",
        replace="",
        killers=(
            "tests/agent/test_fetch_joined.py::TestJoined::test_block_that_was_passed_over_is_fetched_for_who_wants_it_next",
        ),
    ),
    Mutant(
        name="counted_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_FETCH,
        find="async for some in Parts(flights[: want.found]):",
        replace="for some in [flights[: want.found]]:",
        killers=(_MANY,),
    ),
    Mutant(
        name="stands_in_line_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_FLIGHTS,
        find="async for begun in Parts(cut, len(cut[0])):",
        replace="for begun in [cut]:",
        killers=(
            _MANY,
            _JOINED,
        ),
    ),
    Mutant(
        name="measured_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_FLIGHTS,
        find="async for some in Parts(found):",
        replace="for some in [found]:",
        killers=(_MANY,),
    ),
    Mutant(
        name="weighed_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_FLIGHTS,
        find="async for some in Parts(of_tier[number]):",
        replace="for some in [of_tier[number]]:",
        killers=(
            _MANY,
            _JOINED,
        ),
    ),
    Mutant(
        name="kept_out_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_REGISTER,
        find="async for on_their_way in Parts(flights):",
        replace="for on_their_way in [flights]:",
        killers=(f"{_TURNS}::test_many_blocks_that_are_forgotten_share_the_loop",),
    ),
    Mutant(
        name="joined_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_FETCH,
        find="async for some in Parts(zip(want.keys, want.sizes, there, strict=True)):",
        replace="for some in [list(zip(want.keys, want.sizes, there, strict=True))]:",
        killers=(
            _MANY,
            _JOINED,
        ),
    ),
    Mutant(
        name="looked_for_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_FLIGHTS,
        find="async for some in Parts(flights[len(places) :]):",
        replace="for some in [flights[len(places) :]]:",
        killers=(_MANY,),
    ),
    Mutant(
        name="given_up_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_REGISTER,
        find="async for some in Parts(group.flights):",
        replace="for some in [group.flights]:",
        killers=(f"{_TURNS}::test_many_blocks_whose_slots_do_not_come_share_the_loop",),
    ),
    Mutant(
        name="left_in_one_go",
        why="While it does, the agent serves nobody else: of sixty thousand blocks for a tenth of a second.",
        file=_FLIGHTS,
        find="async for some in Parts(filter(None, flights)):",
        replace="for some in [list(filter(None, flights))]:",
        killers=(
            _MANY,
            _JOINED,
        ),
    ),
    Mutant(
        name="turns_amid_which_one_is_cancelled",
        why="A prompt whose time is over amid counting its blocks loses what had come, and one that goes amid joining leaves flights behind that never end.",
        file="ucm/agent/calls.py",
        find="await anyio.lowlevel.cancel_shielded_checkpoint()",
        replace="await anyio.lowlevel.checkpoint()",
        killers=(
            f"{_RACES}::test_want_that_is_dropped_leaves_nothing_behind",
            f"{_RACES}::test_what_came_in_time_is_told_of",
        ),
    ),
    Mutant(
        name="two_join_at_a_time",
        why="Each has begun what the other one joins, and waits for its slots to the deadline.",
        file=_FETCH,
        find="        async with self._joining:\n            async for",
        replace="        if True:\n            async for",
        killers=(
            f"{_RACES}::test_two_that_join_each_other_do_not_wait_for_each_other",
        ),
    ),
    Mutant(
        name="group_that_is_over_joined",
        why="What has given up its turn ends without having been asked for: a prompt computes what tiers have.",
        file=_REGISTER,
        find="if each.group.is_over]",
        replace="if False]",
        killers=(f"{_RACES}::test_what_is_given_up_is_not_joined",),
    ),
    Mutant(
        name="flight_of_a_group_that_is_over_not_ended",
        why="It is counted as begun, and never as ended: what becomes of blocks does not add up any more.",
        file=_REGISTER,
        find="        self.end_open([each for each in found if each.group.is_over])\n        joined = open_of(found)\n",
        replace="        joined = [each for each in found if not each.group.is_over]\n",
        killers=(f"{_RACES}::test_what_is_given_up_is_not_joined",),
    ),
    Mutant(
        name="end_of_the_agent_cuts_a_join",
        why="R-53: SIGTERM amid a long prompt ends the agent with an error, and a want without an answer.",
        file=_FETCH,
        find="                    async with self._joining:\n                        pass\n",
        replace="                    pass\n",
        killers=(f"{_RACES}::test_agent_that_ends_amid_joining_says_nothing_else",),
    ),
)
