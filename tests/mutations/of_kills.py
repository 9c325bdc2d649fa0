# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is left behind by who gives up, and what is said of it."""

from tests.mutations.mutant import Mutant

__all__ = ["KILLS"]

_CORE = "ucm/agent/core.py"
_FLIGHTS = "ucm/agent/flights.py"
_ADMISSION = "tests/agent/test_admission.py::TestCore"
_SAID = f"{_ADMISSION}::test_seen_once_is_kept_from_one_tier_and_said_so"
_NODE = "ucm/agent/node.py"
_PROCESS = "tests/agent/test_process.py::TestAgent"
_BUDGET = "tests/agent/test_fetch.py::TestBudget"

KILLS = (
    Mutant(
        name="one_tiers_rule_explains_all",
        why="A block that one tier took and lost is blamed on the rule of another.",
        file=_CORE,
        find="refused and all(refused)",
        replace="any(refused)",
        killers=(_SAID,),
    ),
    Mutant(
        name="rule_of_a_tier_that_may_not_be_used",
        why="A request that may use one tier only hears of what the others have lost.",
        file=_CORE,
        find="for number in tiers]",
        replace="for number in range(len(self.spillers))]",
        killers=(_SAID,),
    ),
    Mutant(
        name="turn_of_who_gave_up_is_kept",
        why="Requests wait for slots behind a large one that has long been answered.",
        file=_FLIGHTS,
        find="                group.turn.scope.cancel()\n",
        replace="",
        killers=(
            f"{_BUDGET}::test_flights_that_nobody_wants_any_more_give_up_their_turn",
        ),
    ),
    Mutant(
        name="given_up_flights_are_joined",
        why="A request that comes just then gets nothing of what it could have had.",
        file=_FLIGHTS,
        find="                group.is_over = True  # now: nobody may join what has given up\n                group.turn.scope.cancel()\n",
        replace="                pass\n",
        killers=(
            f"{_BUDGET}::test_want_that_comes_as_another_gives_up_has_flights_of_its_own",
        ),
    ),
    Mutant(
        name="agent_leaves_its_socket",
        why="Who looks at a slab finds the socket of an agent that ended long ago.",
        file=_NODE,
        find="        os.unlink(SOCKET_NAME, dir_fd=directory)",
        replace="        pass",
        killers=(f"{_PROCESS}::test_told_to_end_it_spills_what_waits",),
    ),
    Mutant(
        name="core_for_each_size_that_is_said",
        why="Blocks that a command has forgotten come back by what an engine fetches just then.",
        file=_NODE,
        find="                slot_bytes = store.capabilities.max_block_bytes\n",
        replace="                slot_bytes = block_bytes\n",
        killers=(
            "tests/agent/test_node.py::TestMain::test_blocks_of_several_sizes_in_slots_of_one_have_one_core",
        ),
    ),
    Mutant(
        name="object_lands_behind_its_deletion",
        why="What a user had forgotten is in the bucket again, and nobody was told.",
        file="ucm/backends/object.py",
        find="        self._puts.await_end(_path(key))\n",
        replace="",
        killers=(
            "tests/backends/test_object.py::TestService::test_deletion_is_behind_a_put_whose_caller_has_left",
        ),
    ),
)
