# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a save costs a host's loop, and of doors that are warm through tiers."""

from tests.mutations.mutant import Mutant

__all__ = ["WARM"]

_USERS = "ucm/cache/users.py"
_ORDERS = "ucm/cache/orders.py"
_LOOKUPS = "ucm/integration/vllm/tier_lookups.py"
_TIER = "ucm/integration/vllm/tier.py"
_TIERS = "tests/integration/vllm/test_tier_lookups.py::TestTiers"
_BELOW = "tests/integration/vllm/test_tier_below.py"
_FETCHES = "tests/cache/test_fetches.py"
_OPENING = "ucm/cache/opening.py"
_SETTINGS = "tests/cache/test_opening.py::TestSettings"
_CALLS = "ucm/cache/calls.py"
_ALONE = "tests/cache/test_calls.py"
_INTERRUPTED = "test_interrupted_call_of_the_main_thread_loses_no_end_of_others"
_DOOR = "tests/integration/transformers/"
_WARM = "test_prompts_are_warm_through_a_tier_on_another_machine"
_WRONG = (
    "tests/testing/test_door_contract.py::test_host_that_is_wrong_in_one_way_is_noticed"
)
_LINKER = "ucm/integration/sglang/linker.py"
_OF_LINKER = "tests/integration/sglang/test_linker.py"
_RANKS = "tests/integration/sglang/test_ranks.py"
_PARTS = "tests/cache/test_parts.py"
_MANY = "tests/cache/test_many.py::TestCost"

WARM = (
    Mutant(
        name="readers_counted_on_the_hosts_loop",
        why="A host's loop stands still for longer the more blocks it saves.",
        file=_USERS,
        find="        self._uncounted.append((blocks, owner))\n",
        replace="        self._uncounted.append((blocks, owner))\n        self._count_all()\n",
        killers=(f"{_MANY}::test_save_costs_the_same_however_many_blocks_it_has",),
    ),
    Mutant(
        name="keys_looked_at_one_by_one",
        why="A host's loop stands still for longer the more blocks it saves.",
        file=_ORDERS,
        find="    sizes = set(map(len, keys))\n",
        replace="    sizes = {len(key) for key in keys}\n",
        killers=(f"{_MANY}::test_save_costs_the_same_however_many_blocks_it_has",),
    ),
    Mutant(
        name="reader_that_is_not_counted_yet_overlooked",
        why="A load overwrites blocks of a save that was asked for a moment before.",
        file=_USERS,
        find="        self._count_all()\n        taken",
        replace="        taken",
        killers=(f"{_PARTS}::TestBlockUsers::test_many_read_and_one_writes",),
    ),
    Mutant(
        name="tiers_asked_in_the_engines_order",
        why="Of a model with windows the end of a prompt is fetched, which nobody loads.",
        file=_LOOKUPS,
        find="            keys.sort(key=self._keys[name].__getitem__)\n",
        replace="",
        killers=(f"{_TIERS}::test_tiers_are_asked_for_what_the_store_lacks",),
    ),
    Mutant(
        name="blocks_behind_a_gap_told_before_it_is_filled",
        why="The engine promotes what lies behind a block that turns out to be missing.",
        file=_LOOKUPS,
        find="            self._note(dict.fromkeys(keys[:missing], True))\n",
        replace="            self._note({key: True for key in keys if stored[key]})\n",
        killers=(f"{_TIERS}::test_tiers_are_asked_for_what_the_store_lacks",),
    ),
    Mutant(
        name="head_of_a_prompt_waits_for_tiers",
        why="What the slab has is promoted only when the tiers have answered.",
        file=_LOOKUPS,
        find="            self._note(dict.fromkeys(keys[:missing], True))\n",
        replace="            self._note(dict.fromkeys(keys if missing is None else [], True))\n",
        killers=(f"{_TIERS}::test_tiers_are_asked_for_what_the_store_lacks",),
    ),
    Mutant(
        name="fetch_of_an_ended_request_goes_on",
        why="What nobody wants keeps slots that others wait for.",
        file=_LOOKUPS,
        find="            coming.fetching.give_up()\n",
        replace="",
        killers=(f"{_TIERS}::test_request_that_ends_gives_up_what_is_fetched_for_it",),
    ),
    Mutant(
        name="keys_of_an_ended_request_never_answered",
        why="Another request that waits for the same blocks waits for ever.",
        file=_LOOKUPS,
        find="                    heir = self._new[key] = self._asker(key, heir)\n",
        replace="                    heir = self._asker(key, heir)\n",
        killers=(f"{_TIERS}::test_request_that_ends_gives_up_what_is_fetched_for_it",),
    ),
    Mutant(
        name="tiers_asked_while_the_store_is_left_alone",
        why="Each request waits for a store that hangs, by way of its tiers.",
        file=_LOOKUPS,
        find="self._fetch is None or self._clock() < self._quiet_until",
        replace="self._fetch is None",
        killers=(f"{_TIERS}::test_nobody_asks_tiers_for_what_the_store_has",),
    ),
    Mutant(
        name="tiers_below_a_tier_not_asked",
        why="What was evicted from the slab is computed, though a tier has it.",
        file=_TIER,
        find="self._fetch if self._has_tiers else None",
        replace="None",
        killers=(f"{_BELOW}::test_chunks_of_one_machine_are_promoted_on_another",),
    ),
    Mutant(
        name="begun_fetch_without_end",
        why="A request waits for an agent that says nothing for ever.",
        file="ucm/cache/fetches.py",
        find="return self._fetch.over.is_done or not self._fetch.left",
        replace="return self._fetch.over.is_done",
        killers=(
            f"{_FETCHES}::test_fetch_that_is_begun_is_looked_at_and_not_waited_for",
        ),
    ),
    Mutant(
        name="blocks_of_the_slab_counted_as_fetched",
        why="A tier seems to be of use that brought nothing.",
        file="ucm/cache/fetches.py",
        find='answer.media.replace(b"\\0", b"")',
        replace="answer.media",
        killers=(f"{_FETCHES}::test_what_the_slab_had_is_no_tiers",),
    ),
    Mutant(
        name="prompts_of_transformers_looked_for_in_the_slab",
        why="What another machine has computed is computed again.",
        file="ucm/integration/transformers/dynamic.py",
        find="self.cache.prefetch(row.keys, place=place)",
        replace="self.cache.prefetch(row.keys, timeout=0.0)",
        killers=(f"{_DOOR}test_contract.py::TestTransformersDoor::{_WARM}",),
    ),
    Mutant(
        name="batches_of_transformers_looked_for_in_the_slab",
        why="What another machine has computed is computed again.",
        file="ucm/cache/staged.py",
        find="self._cache.prefetch(keys, timeout=left, place=self._place)",
        replace="self._cache.prefetch(keys, timeout=0.0)",
        killers=(f"{_DOOR}test_continuous_contract.py::TestContinuousDoor::{_WARM}",),
    ),
    Mutant(
        name="slab_of_another_machine_is_the_same",
        why="The contract holds what the slab has for what came from a tier.",
        file="ucm/testing/door.py",
        find="        self._num_left += 1\n",
        replace="",
        killers=(f"{_WRONG}[Homebound-{_WARM}]",),
    ),
    Mutant(
        name="tier_damaged_beside_its_blocks",
        why="The contract says that damaged blocks are computed, and damages none.",
        file="ucm/testing/door_tiers.py",
        find="        content[len(content) // 2] ^= 0x40\n",
        replace="",
        killers=(f"{_DOOR}test_contract.py::TestTransformersDoor::{_WARM}",),
    ),
    Mutant(
        name="reported_pages_make_room_for_others",
        why="A load fails behind its look-up, and SGLang aborts the request.",
        file=_LINKER,
        find="            self._reported[rid] = keys\n",
        replace="            self._pages.staged.release(keys)\n",
        killers=(
            f"{_OF_LINKER}::test_what_a_lookup_has_reported_stays_until_the_next_batch",
        ),
    ),
    Mutant(
        name="reported_pages_stay_for_ever",
        why="Of requests that were given up in the queue the stage is full one day.",
        file=_LINKER,
        find="        for rid in list(self._reported):\n            self._let_go(rid)\n        if",
        replace="        if",
        killers=(f"{_RANKS}::test_rank_that_has_lost_a_page_fails_the_load_of_all",),
    ),
    Mutant(
        name="rank_computes_what_others_load",
        why="Ranks take different ways, and wait for each other for ever.",
        file=_LINKER,
        find="        elif self._num_ranks > 1:\n            self._queued[rid] = _Copy()\n",
        replace="",
        killers=(f"{_RANKS}::test_rank_that_has_lost_a_page_fails_the_load_of_all",),
    ),
    Mutant(
        name="missing_pages_count_as_loaded",
        why="A rank goes on with pages that hold something else: wrong tokens.",
        file=_LINKER,
        find="        is_failed = len(staged) < len(copies)\n",
        replace="        is_failed = False\n",
        killers=(f"{_RANKS}::test_rank_that_has_lost_a_page_fails_the_load_of_all",),
    ),
    Mutant(
        name="refused_save_leaves_the_line",
        why="Ranks tell SGLang of the end of different saves as if of one.",
        file=_LINKER,
        find="        self._saves.append(save)\n        return True\n",
        replace="        if save is not None:\n            self._saves.append(save)\n"
        "        return True\n",
        killers=(f"{_RANKS}::test_rank_that_refuses_a_save_says_so_when_it_is_over",),
    ),
    Mutant(
        name="parts_of_ranks_taken_for_replicas",
        why="A rank loads the heads of another one: wrong tokens.",
        file="ucm/integration/sglang/pages.py",
        find="shard=0 if are_replicas(rows) else ranks[0]",
        replace="shard=0",
        killers=(f"{_RANKS}::test_ranks_have_parts_of_their_own",),
    ),
    Mutant(
        name="replicas_stored_by_each_rank",
        why="A slab has room for as many prompts less as there are ranks.",
        file="ucm/integration/sglang/pages.py",
        find="shard=0 if are_replicas(rows) else ranks[0]",
        replace="shard=ranks[0]",
        killers=(f"{_RANKS}::test_replicas_are_stored_once",),
    ),
    Mutant(
        name="fetched_for_nobody",
        why="What one tenant has fetched takes the slots of all others.",
        file="ucm/cache/fetches.py",
        find="            tenant=fetch.tenant,\n",
        replace="",
        killers=(
            f"{_FETCHES}::test_tiers_are_asked_for_whom_the_place_names",
            f"{_FETCHES}::test_tiers_are_asked_for_a_tenant_by_the_blocking_face",
        ),
    ),
    Mutant(
        name="latent_layers_counted_as_pairs",
        why="Two layers are copied for each that is asked for.",
        file=_LINKER,
        find="1 if are_replicas(pool) else 2",
        replace="2",
        killers=(f"{_RANKS}::test_latent_pages_are_restored_in_another_process",),
    ),
    Mutant(
        name="call_of_a_host_not_alone",
        why="A host's closed loop loses the ends of other saves and loads.",
        file=_CALLS,
        find="        threading.excepthook(threading.ExceptHookArgs(told))\n",
        replace="        threading.excepthook(threading.ExceptHookArgs(told))\n        raise\n",
        killers=(
            f"{_ALONE}::TestRaises::test_call_that_raises_is_told_and_harms_nobody",
        ),
    ),
    Mutant(
        name="ctrl_c_taken_for_a_calls_own",
        why="Ctrl-C is swallowed, and the host goes on.",
        file=_CALLS,
        find="            raise  # meant for the host, not for its call\n",
        replace="            return\n",
        killers=(f"{_ALONE}::TestRaises::{_INTERRUPTED}",),
    ),
    Mutant(
        name="notices_lost_behind_one_that_fails",
        why="Saves of others are never over, and their blocks stay in use.",
        file="ucm/cache/core.py",
        find="in reversed(notices):\n                each.callback(self._note, notice)\n",
        replace="in notices:\n                self._note(notice)\n",
        killers=(f"{_ALONE}::TestRaises::{_INTERRUPTED}",),
    ),
    Mutant(
        name="waiters_lost_behind_one_that_fails",
        why="Who waits for the same save waits out its limit.",
        file="ucm/cache/pending.py",
        find="in reversed(waiters):\n                each.callback(wake)\n",
        replace="in waiters:\n                wake()\n",
        killers=(
            f"{_ALONE}::TestRaises::test_waiter_that_raises_keeps_no_other_from_being_called",
        ),
    ),
    Mutant(
        name="blocking_verbs_let_into_a_call",
        why="The library's loop waits for itself, and everybody for it.",
        file=_CALLS,
        find="    if getattr(_HERE",
        replace="    if not getattr(_HERE",
        killers=(f"{_ALONE}::TestBlocks::test_verb_that_blocks_is_refused_in_a_call",),
    ),
    Mutant(
        name="affinity_of_a_host_ignored",
        why="Copy threads take the CPUs that a host has kept for itself.",
        file=_OPENING,
        find="            affinity=plan_beside_engine(settings.threads.affinity, device.numa_node),\n",
        replace="",
        killers=(f"{_SETTINGS}::test_copy_threads_run_on_the_cpus_that_are_set",),
    ),
    Mutant(
        name="setting_of_engines_ignored_without_a_word",
        why="A host believes that its weights have a name in the keys.",
        file=_OPENING,
        find="        _tell_ignored(read, log)\n",
        replace="",
        killers=(f"{_SETTINGS}::test_setting_of_engines_is_warned_of",),
    ),
)
