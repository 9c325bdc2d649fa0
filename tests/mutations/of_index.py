# SPDX-License-Identifier: Apache-2.0
"""Mutants of a slab's index: what it looks at, who goes, and what a death leaves."""

from tests.mutations.mutant import Mutant

__all__ = ["INDEX"]

_DIRECTORY = "ucm/stores/slab"
_INDEX = f"{_DIRECTORY}/_index.py"
_OLDEST = f"{_DIRECTORY}/_oldest.py"
_RESERVING = f"{_DIRECTORY}/_reserving.py"
_TABLES = f"{_DIRECTORY}/_tables.py"
_TENANTS = f"{_DIRECTORY}/_tenants.py"
_USED = f"{_DIRECTORY}/_used.py"
_TESTS = "tests/stores/test_slab_index.py"
_BOUNDS = f"{_TESTS}::TestBounds"
_SLAB = "tests/stores/test_slab.py::TestSlabStore"
_MEMORY = "tests/stores/test_memory.py::TestMemoryStore"
_DEATH = "tests/stores/test_slab_crash.py::test_death_at_any_line_leaves_a_whole_slab"
_EVICTED = f"{_DEATH}[evicting_save]"
_OLDER = f"{_SLAB}::test_no_block_goes_for_one_that_was_used_before_it"
_RETAINED = f"{_SLAB}::test_retained_blocks_stay_within_the_budget"
_OWN = f"{_SLAB}::test_tenant_makes_room_among_its_own"

INDEX = (
    # What a death leaves.
    Mutant(
        name="every_death_a_rebuild",
        why="A dead process costs all others seconds at a terabyte.",
        file=_TABLES,
        find="        if count == EVERYTHING:\n",
        replace="        if count:\n",
        killers=(_EVICTED,),
    ),
    Mutant(
        name="shares_not_repaired",
        why="A tenant pays for ever for what it lost when a process died.",
        file=_TABLES,
        find="            self._recount_tenants(slots)\n        self.tally.add_up()\n",
        replace="        self.tally.add_up()\n",
        killers=(f"{_DEATH}[tenants_save]",),
    ),
    Mutant(
        name="repair_does_not_link",
        why="What others write is lost for look-ups once somebody has died.",
        file=_TABLES,
        find="            self.chains.relink(slots)\n",
        replace="",
        killers=(_EVICTED,),
    ),
    # What is done under the lock.
    Mutant(
        name="forgotten_at_once",
        why="Who forgets a long prompt stops every rank meanwhile.",
        file=_INDEX,
        find="        for start in range(0, len(batch), MOST):\n"
        "            part = batch.part(start, start + MOST)\n",
        replace="        for start in range(0, 1):\n"
        "            part = batch.part(start, len(batch))\n",
        killers=(
            f"{_BOUNDS}::test_change_touches_no_more_slots_than_a_death_may_leave",
        ),
    ),
    Mutant(
        name="looks_until_it_is_done",
        why="After a time of hits one save holds the lock while it looks at all stamps.",
        file=_OLDEST,
        find="            gives_up = looked_at >= MOST_LOOKED_AT\n",
        replace="            gives_up = False\n",
        killers=(f"{_BOUNDS}::test_bounds_out_of_date_are_put_right_in_pieces",),
    ),
    Mutant(
        name="looks_at_all_groups",
        why="Each eviction reads every stamp of the slab.",
        file=_OLDEST,
        find="        width, looked_at = max(4, 4 * count // GROUP), 0",
        replace="        width, looked_at = len(self._groups), 0",
        killers=(f"{_BOUNDS}::test_victim_is_found_without_looking_at_all",),
    ),
    Mutant(
        name="scheduler_waits_for_ranks",
        why="Every request of an engine stands still while a rank holds the lock.",
        file=f"{_DIRECTORY}/_store.py",
        find="_SCHEDULER_WAITS = 0.004\n",
        replace="_SCHEDULER_WAITS = 0.05\n",
        killers=(f"{_BOUNDS}::test_scheduler_waits_for_the_lock_no_longer_than_told",),
    ),
    # Who goes.
    Mutant(
        name="bounds_not_lowered",
        why="A block that is stored late is taken for young, and never goes.",
        file=_OLDEST,
        find="        below = stamps < self._bounds[groups]\n",
        replace="        below = stamps < -(1 << 62)\n",
        killers=(f"{_TESTS}::test_oldest_are_what_sorting_all_finds",),
    ),
    Mutant(
        name="younger_block_evicted",
        why="A prompt that does not fit evicts its own head.",
        file=_RESERVING,
        find="        younger = np.flatnonzero(stamps >= self._before",
        replace="        younger = np.flatnonzero(stamps > 1e18 + 0 * self._before",
        killers=(_OLDER,),
    ),
    Mutant(
        name="own_block_evicted",
        why="A save evicts the blocks before it that it has found stored.",
        file=_RESERVING,
        find="            others = ~np.isin(slots, kept)\n",
        replace="            others = slots >= 0\n",
        killers=(f"{_SLAB}::test_nothing_goes_for_what_is_asked_for_with_it",),
    ),
    Mutant(
        name="keys_never_put_in_order",
        why="Where there is little room a shared head of prompts is not kept before their ends.",
        file=_RESERVING,
        find="            if (moments[1:] > moments[:-1]).any():",
        replace="            if (moments[1:] > moments[:-1]).all():",
        killers=(_OLDER,),
    ),
    Mutant(
        name="grant_in_any_order",
        why="A lease has the keys of a span in an order in which nobody's bytes lie.",
        file=_RESERVING,
        find="positions, slots = _ascending(positions), _ascending(slots)",
        replace="positions, slots = positions, _ascending(slots)",
        killers=(
            "tests/stores/test_slab_index.py::TestBounds::test_slots_are_granted_in_the_order_of_the_keys",
        ),
    ),
    Mutant(
        name="first_come_first_served",
        why="Where there is little room the end of a prompt is kept and not its head.",
        file=_RESERVING,
        find='wanted[(-moments).argsort(kind="stable")]',
        replace="wanted[np.argsort(wanted)]",
        killers=(_OLDER,),
    ),
    Mutant(
        name="touched_block_made_older",
        why="A prompt that is asked for again loses its place to those never used since.",
        file=_USED,
        find="np.maximum(stamps, self.within_budget(moments, stamps))",
        replace="self.within_budget(moments, stamps)",
        killers=(f"{_SLAB}::test_touch_never_makes_a_block_older",),
    ),
    # What one user may claim.
    Mutant(
        name="budget_ignored",
        why="Who asks for retention of everything leaves no room for anybody else.",
        file=_USED,
        find="        most = int(self.limits.retained * self.num_to_have())",
        replace="        most = int(9 * self.num_to_have())",
        killers=(_RETAINED,),
    ),
    Mutant(
        name="retained_counted_twice",
        why="A prefix that is used all the time loses its retention.",
        file=_USED,
        find="            later &= stamps <= now\n",
        replace="            pass\n",
        killers=(_RETAINED,),
    ),
    Mutant(
        name="share_ignored",
        why="One tenant evicts the blocks of all others.",
        file=_RESERVING,
        find="        if self._places is None or limit >= 1:\n",
        replace="        if True:\n",
        killers=(_OWN,),
    ),
    Mutant(
        name="list_of_own_outlives_its_truth",
        why="A tenant evicts what it uses and keeps what it has not used for longer.",
        file=_TENANTS,
        find="                del self._lists[place]\n",
        replace="                pass\n",
        killers=(
            f"{_TESTS}::TestTenants::test_list_of_its_own_is_ended_by_an_older_block",
        ),
    ),
    Mutant(
        name="nobody_is_a_tenant",
        why="A tenant of an unlucky number has no share to keep to.",
        file=_TENANTS,
        find="tenants % (NUM_TENANTS - 1) + 1)",
        replace="tenants % NUM_TENANTS)",
        killers=(f"{_TESTS}::TestTenants::test_places_are_never_nobodys",),
    ),
    # Memory that comes and goes.
    Mutant(
        name="half_withdrawn",
        why="Slots are used by nobody, because somebody was writing one of them.",
        file=_INDEX,
        find="                    self.admit(part)\n",
        replace="                    pass\n",
        killers=(
            f"{_TESTS}::TestWithdrawal::test_slot_being_written_is_not_withdrawn",
        ),
    ),
    Mutant(
        name="model_evicts_its_own",
        why="The model that all stores are held to evicts what it was asked for.",
        file="ucm/stores/memory.py",
        find="            if key not in kept\n",
        replace="",
        killers=(f"{_MEMORY}::test_nothing_goes_for_what_is_asked_for_with_it",),
    ),
)
