# SPDX-License-Identifier: Apache-2.0
"""Mutants of what tenants of one agent have of it: slots, a tier's time, its backlog."""

from tests.mutations.mutant import Mutant

__all__ = ["FAIRNESS"]

_BACKLOG = "ucm/agent/backlog.py"
_BUDGET = "ucm/agent/budget.py"
_FLIGHTS = "ucm/agent/flights.py"
_CHANGES = "ucm/stores/slab/_changes.py"
_FETCH = "tests/agent/test_fetch_tenants.py"
_GONE = (
    "tests/stores/test_slab_changes.py::TestStore::test_block_that_is_gone_is_nobodys"
)
_MODEL = "tests/agent/test_backlog.py::test_backlog_is_its_model"
_ROOM = "tests/agent/test_backlog.py::TestRoom"
_SPILLS = "tests/agent/test_backlog.py::TestSpill"
_TELLS = (
    "tests/stores/test_slab_changes.py::TestStore::test_changes_say_whose_a_block_is"
)
_TENANTS = "tests/agent/test_budget_tenants.py"
_NEXT = f"{_TENANTS}::test_who_comes_next_by_what_another_was_given_is_served"
_TURNS = "tests/agent/test_backlog.py::TestTurns"

FAIRNESS = (
    Mutant(
        name="tenant_with_most_comes_first",
        why="A tenant's flood of prompts keeps all others waiting until their deadlines.",
        file=_BUDGET,
        find="        return self.held[tenant], row.since",
        replace="        return 0, row.since",
        killers=(
            f"{_TENANTS}::test_tenant_that_has_least_comes_before_who_came_first",
            f"{_TENANTS}::test_each_turn_is_whose_it_is",
        ),
    ),
    Mutant(
        name="tenant_stands_where_it_stood",
        why="Who has given all back comes behind those that have something.",
        file=_BUDGET,
        find="        self._catch_up(rows)\n",
        replace="",
        killers=(f"{_TENANTS}::test_each_turn_is_whose_it_is",),
    ),
    Mutant(
        name="changes_too_many_to_know_are_known",
        why="Who has given all back meanwhile comes behind those that have something.",
        file=_BUDGET,
        find="        if num_new > len(self._changed):\n",
        replace="        if False:\n",
        killers=(
            (
                "tests/agent/test_budget_flood.py::"
                "test_tenants_are_known_as_they_are_behind_many_turns_of_others"
            ),
        ),
    ),
    Mutant(
        name="all_tenants_looked_at_for_each_turn",
        why="A flood of salts has the agent's loop stand still for everybody.",
        file=_BUDGET,
        find="        if len(rows.ranks) > 2 * len(rows.of) + _SPARE:\n",
        replace="        if True:\n",
        killers=(
            (
                "tests/agent/test_budget_flood.py::"
                "test_turn_costs_the_same_however_many_tenants_wait"
            ),
        ),
    ),
    Mutant(
        name="ranks_of_before_stay",
        why="An agent grows with each slot that a tenant has while it waits.",
        file=_BUDGET,
        find="        if len(rows.ranks) > 2 * len(rows.of) + _SPARE:\n",
        replace="        if False:\n",
        killers=("tests/agent/test_budget_flood.py::test_what_was_before_is_not_kept",),
    ),
    Mutant(
        name="large_want_passed_over_for_ever",
        why="Small prompts of others keep a large one waiting as long as there are any.",
        file=_BUDGET,
        find="rows.num_granted - row.since >= self.total",
        replace="False",
        killers=(
            f"{_TENANTS}::test_large_want_is_not_passed_over_for_ever",
            f"{_TENANTS}::test_each_turn_is_whose_it_is",
        ),
    ),
    Mutant(
        name="large_want_due_too_soon",
        why="Tenants with little wait for those with much after each grant.",
        file=_BUDGET,
        find="rows.num_granted - row.since >= self.total",
        replace="rows.num_granted - row.since >= self.total // 2",
        killers=(
            f"{_TENANTS}::test_large_want_is_not_passed_over_for_ever",
            f"{_TENANTS}::test_each_turn_is_whose_it_is",
        ),
    ),
    Mutant(
        name="turn_that_was_had_is_not_counted",
        why="Who was due once has all turns from then on.",
        file=_BUDGET,
        find="            row.since = rows.num_granted\n",
        replace="",
        killers=(f"{_TENANTS}::test_each_turn_is_whose_it_is",),
    ),
    Mutant(
        name="who_was_due_stays_the_first",
        why="Whose turn is the longest ago is not found behind the one who has just had it.",
        file=_BUDGET,
        find="            rows.of.move_to_end(place.tenant)\n",
        replace="",
        killers=(f"{_TENANTS}::test_each_turn_is_whose_it_is",),
    ),
    Mutant(
        name="tenants_before_priorities",
        why="What the engine runs next waits for what it runs last.",
        file=_BUDGET,
        find="rows = self._rows[min(self._rows)]",
        replace="rows = self._rows[next(iter(self._rows))]",
        killers=(f"{_TENANTS}::test_priority_comes_before_tenants",),
    ),
    Mutant(
        name="moved_on_behind_its_tenants_others",
        why="A prompt that somebody wants sooner is served later than all that came behind it.",
        file=_BUDGET,
        find="bisect.insort(rows.of[place.tenant].places, place, key=_ARRIVAL)",
        replace="rows.of[place.tenant].places.append(place)",
        killers=(f"{_TENANTS}::test_who_is_moved_on_stands_where_it_came",),
    ),
    Mutant(
        name="moved_on_with_its_slots",
        why="Slots are granted twice for one want, and given back once.",
        file=_BUDGET,
        find="place.count and not place.came.is_set()",
        replace="place.count",
        killers=(f"{_TENANTS}::test_who_has_its_slots_is_moved_on_no_more",),
    ),
    Mutant(
        name="tenants_remembered_for_ever",
        why="An agent grows with each salt that anybody ever sent.",
        file=_BUDGET,
        find="            del self.held[tenant]\n",
        replace="            pass\n",
        killers=(f"{_TENANTS}::test_nothing_is_kept_of_who_has_nothing",),
    ),
    Mutant(
        name="rows_remembered_for_ever",
        why="An agent grows with each priority that anybody ever sent.",
        file=_BUDGET,
        find="            del self._rows[place.priority]\n",
        replace="            pass\n",
        killers=(f"{_TENANTS}::test_nothing_is_kept_of_who_has_nothing",),
    ),
    Mutant(
        name="slots_of_who_gave_up_stay_its_own",
        why="A tenant whose prompts are given up seems to have more and more, and is served last.",
        file=_FLIGHTS,
        find="        self._budget.pass_on(count, place.tenant, to=wants[0].tenant)\n",
        replace="",
        killers=(f"{_FETCH}::test_slots_are_whose_want_has_them",),
    ),
    Mutant(
        name="slots_passed_on_without_a_look",
        why="Slots that are enough for who is next by now lie idle until others are given back.",
        file=_BUDGET,
        find="        self._give(to, count)\n        self._serve()\n",
        replace="        self._give(to, count)\n",
        killers=(f"{_NEXT}[passed on]",),
    ),
    Mutant(
        name="slots_taken_without_a_look",
        why="Slots that are enough for who is next by now lie idle until others are given back.",
        file=_BUDGET,
        find="        self._serve()  # the next one may be another by now\n",
        replace="",
        killers=(f"{_NEXT}[taken]",),
    ),
    Mutant(
        name="slots_for_whoever_came_first",
        why="A tenant that floods the agent has all of its slots, as long as it likes.",
        file=_FLIGHTS,
        find="for want in wants), wants[0].tenant)",
        replace="for want in wants))",
        killers=(f"{_FETCH}::test_flood_of_one_tenant_keeps_no_other_waiting[slots]",),
    ),
    Mutant(
        name="tier_for_whoever_came_first",
        why="A tenant that has all slots for a moment has a slow tier until all of them are filled.",
        file=_FLIGHTS,
        find="for one in wants), want.tenant)",
        replace="for one in wants))",
        killers=(f"{_FETCH}::test_flood_of_one_tenant_keeps_no_other_waiting[tier]",),
    ),
    Mutant(
        name="who_comes_last_is_dropped",
        why="A tenant's flood of saves keeps all that others save from a slow tier.",
        file=_BACKLOG,
        find="            if self._largest <= has + 1:",
        replace="            if has >= 0:",
        killers=(
            f"{_ROOM}::test_tenant_with_most_makes_room",
            f"{_SPILLS}::test_flood_of_one_tenant_keeps_no_other_from_a_tier",
        ),
    ),
    Mutant(
        name="tenants_push_each_other_out",
        why="Of two tenants with as much each drops the other's blocks, and prefixes of both have holes.",
        file=_BACKLOG,
        find="            if self._largest <= has + 1:",
        replace="            if self._largest <= has:",
        killers=(f"{_ROOM}::test_tenants_with_as_much_do_not_push_each_other_out",),
    ),
    Mutant(
        name="heads_dropped_for_others",
        why="What is left of a prompt's blocks is of no use without those before it.",
        file=_BACKLOG,
        find="        key, _ = row.popitem()\n",
        replace="        key, _ = row.popitem(last=False)\n",
        killers=(f"{_ROOM}::test_tenant_with_most_makes_room", _MODEL),
    ),
    Mutant(
        name="flood_spilled_before_all_others",
        why="What others save is evicted from the slab before the flood ahead of it is spilled.",
        file=_BACKLOG,
        find="            self._rows.move_to_end(tenant)\n",
        replace="",
        killers=(f"{_TURNS}::test_tenants_go_in_turn",),
    ),
    Mutant(
        name="largest_of_the_backlog_falls_by_one",
        why="Behind a call of many blocks the wrong tenant makes room, or none is found that has most.",
        file=_BACKLOG,
        find="self._largest = max(self._having, default=0)",
        replace="self._largest = after",
        killers=(
            "tests/agent/test_backlog.py::TestRoom::test_tenant_with_most_is_known_behind_a_call_of_many",
        ),
    ),
    Mutant(
        name="largest_of_the_backlog_only_grows",
        why="A full backlog looks for a tenant that has most, and there is none.",
        file=_BACKLOG,
        find="        elif self._largest not in self._having:",
        replace="        elif False:",
        killers=(_MODEL,),
    ),
    Mutant(
        name="tenants_of_the_backlog_remembered_for_ever",
        why="An agent grows with each salt that anybody ever saved with.",
        file=_BACKLOG,
        find="            del self._rows[tenant]\n",
        replace="            pass\n",
        killers=(_MODEL,),
    ),
    Mutant(
        name="dropped_for_another_uncounted",
        why="Blocks that no tier has are in no count, and no log line says that a tier is too slow.",
        file="ucm/agent/spill.py",
        find="            if self._waiting.add(key, nbytes, tenant) is not None:\n",
        replace="            if self._waiting.add(key, nbytes, tenant) == key:\n",
        killers=(f"{_SPILLS}::test_block_that_is_dropped_for_another_is_counted_once",),
    ),
    Mutant(
        name="saves_are_nobodys",
        why="All tenants' blocks count as one's, and a flood of one drops those of all.",
        file=_CHANGES,
        find="    places[(slots < 0) | (kinds != STORED)] = 0\n",
        replace="    places[:] = 0\n",
        killers=(
            _TELLS,
            f"{_SPILLS}::test_flood_of_one_tenant_keeps_no_other_from_a_tier",
        ),
    ),
    Mutant(
        name="block_that_is_gone_is_somebodys",
        why="Blocks that were removed count for whoever has the slab's last slot.",
        file=_CHANGES,
        find="    places[(slots < 0) | (kinds != STORED)] = 0\n",
        replace="    places[kinds != STORED] = 0\n",
        killers=(_GONE,),
    ),
    Mutant(
        name="prompts_of_transformers_are_nobodys",
        why="A tenant's flood of prompts takes the whole slab, whatever its share.",
        file="ucm/integration/transformers/prompts.py",
        find="            tenant=tenant_of(salt),\n",
        replace="            tenant=0,\n",
        killers=(
            "tests/integration/transformers/test_dynamic.py::TestFound::test_blocks_count_for_the_tenant_of_their_salt",
        ),
    ),
    Mutant(
        name="what_is_staged_is_nobodys",
        why="A tenant's fetches have their turn with those of all others that name none.",
        file="ucm/cache/staged.py",
        find="fetched = self._cache.prefetch(keys, timeout=left, place=self._place)",
        replace="fetched = self._cache.prefetch(keys, timeout=left)",
        killers=(
            "tests/cache/test_fetches.py::test_tiers_are_asked_for_a_tenant_by_the_blocking_face",
        ),
    ),
)
