# SPDX-License-Identifier: Apache-2.0
"""Mutants of what is left behind by who gives up, and what is said of it."""

from tests.mutations.mutant import Mutant

__all__ = ["KILLS"]

_CORE = "ucm/agent/core.py"
_FLIGHTS = "ucm/agent/flights.py"
_ADMISSION = "tests/agent/test_admission.py::TestCore"
_SAID = f"{_ADMISSION}::test_seen_once_is_kept_from_one_tier_and_said_so"
_TAKEN = "tests/backends/test_disk_changing.py::TestTaken"
_RESERVING = "ucm/stores/slab/_reserving.py"
_SHARES = "tests/stores/test_slab_reserving.py::TestShares"
_TENANTS = "ucm/stores/slab/_tenants.py"
_NODE = "ucm/agent/node.py"
_PROCESS = "tests/agent/test_process.py::TestAgent"
_CALLS = "tests/agent/test_calls.py::TestThreadCalls"
_BUDGET = "tests/agent/test_fetch.py::TestBudget"

KILLS = (
    Mutant(
        name="agent_ends_without_another_thread",
        why="A machine that is short of threads for a moment has the agent end, and all that it was at.",
        file="ucm/agent/calls.py",
        find="            if not self._threads:\n                raise\n",
        replace="            raise\n",
        killers=(f"{_CALLS}::test_calls_share_the_threads_that_the_system_starts",),
    ),
    Mutant(
        name="slow_drive_has_calls_without_end",
        why="A drive with 8 ms a request and one thread is through with no call of 256 blocks in time.",
        file="ucm/backends/disk/_backend.py",
        find="min(_LEAST_BATCH, _FEW_BATCHED * threads)",
        replace="_LEAST_BATCH",
        killers=(
            (
                "tests/backends/test_disk_runs.py::TestTogether::"
                "test_call_has_much_of_small_blocks[1-65536-32]"
            ),
        ),
    ),
    Mutant(
        name="tier_ends_without_another_thread",
        why="A machine that is short of threads for a moment has the agent end, and all that it was at.",
        file="ucm/backends/_crew.py",
        find="                if not self._threads:\n                    raise\n                break\n",
        replace="                raise\n",
        killers=(
            (
                "tests/backends/test_crew.py::TestRun::"
                "test_items_are_for_the_threads_that_the_system_starts"
            ),
        ),
    ),
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
        file="ucm/agent/address.py",
        find="                os.unlink(name)",
        replace="                pass",
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
        find="if not self._puts.await_end(key, lambda: gate.is_left):",
        replace="if False:",
        killers=(
            "tests/backends/test_object.py::TestService::test_deletion_is_behind_a_put_whose_caller_has_left",
        ),
    ),
    Mutant(
        name="file_lands_behind_its_deletion",
        why="What a user had forgotten is on the share again, and nobody was told.",
        file="ucm/backends/files/_backend.py",
        find="if not self._puts.await_end(key, lambda: gate.is_left):",
        replace="if False:",
        killers=(
            "tests/backends/test_files_late.py::test_deletion_is_behind_a_put_whose_caller_is_gone",
        ),
    ),
    Mutant(
        name="own_list_is_of_the_prompt_itself",
        why="A tenant's conversation is stored no more once it goes on, though it has older blocks.",
        file=_RESERVING,
        find="num_others = int((~np.isin(slots, held)).sum())",
        replace="num_others = len(slots)",
        killers=(
            f"{_SHARES}::test_blocks_of_the_same_prompt_do_not_hide_what_goes_for_it",
        ),
    ),
    Mutant(
        name="lists_of_a_batch_drop_each_other",
        why="Of a batch of many tenants only the last eight have anything stored.",
        file=_TENANTS,
        find="[place for place in self._lists if place not in needed]",
        replace="list(self._lists)",
        killers=(f"{_SHARES}::test_each_tenant_of_a_batch_makes_room_among_its_own",),
    ),
    Mutant(
        name="own_list_of_a_few_for_many",
        why="A long prompt of a tenant is stored in part, though it has older blocks.",
        file=_TENANTS,
        find="count = max(count, _LEAST_LISTED,",
        replace="count = max(_LEAST_LISTED,",
        killers=(f"{_SHARES}::test_prompt_that_is_longer_than_a_list_is_stored_whole",),
    ),
    Mutant(
        name="own_list_of_the_piece_before",
        why="A prompt of thousands of blocks of a tenant is stored up to its first thousand.",
        file=_RESERVING,
        find="        self._listed.clear()\n",
        replace="",
        killers=(f"{_SHARES}::test_prompt_that_is_longer_than_a_list_is_stored_whole",),
    ),
    Mutant(
        name="lists_change_under_others_feet",
        why="An agent dies as two of its threads save for tenants at once.",
        file=_RESERVING,
        find="            with self._index.locked():\n                own.keep(made, self._listed)\n",
        replace="            own.keep(made, self._listed)\n            with self._index.locked():\n",
        killers=(f"{_SHARES}::test_lists_are_changed_within_the_lock_only",),
    ),
    Mutant(
        name="extent_taken_in_vain_comes_back",
        why="Blocks that a user had forgotten are there again behind a restart.",
        file="ucm/backends/disk/_backend.py",
        find="        if not await self._keeper.mark_taken():\n",
        replace="        if False:\n",
        killers=(f"{_TAKEN}::test_blocks_that_went_for_nothing_are_deleted",),
    ),
    Mutant(
        name="refused_mark_is_none",
        why="R-51: blocks that a drive would not part with are said to be gone.",
        file="ucm/backends/disk/_keeping.py",
        find="        return all(told)\n",
        replace="        return True\n",
        killers=(f"{_TAKEN}::test_blocks_that_a_drive_may_have_yet_are_not_absent",),
    ),
    Mutant(
        name="panic_of_obstore_ends_the_agent",
        why="An engine starts one agent after the other, and is told of no option that is wrong.",
        file="ucm/backends/object.py",
        find="            if type(exc).__name__ != _PANIC:\n",
        replace="            if True:\n",
        killers=(
            "tests/backends/test_object.py::TestService::test_wrong_setting_is_named[settings10-url]",
        ),
    ),
    Mutant(
        name="service_has_no_word_for_a_refusal",
        why="Whoever has a wrong clock looks for other credentials.",
        file="ucm/backends/object.py",
        find="*_CODE.findall(str(exc))[:1]",
        replace="*_CODE.findall(str(exc))[:0]",
        killers=(
            "tests/backends/test_object.py::TestService::test_wrong_credentials_are_refused_without_being_told",
        ),
    ),
)
