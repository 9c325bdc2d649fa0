# SPDX-License-Identifier: Apache-2.0
"""Mutants of the door to SGLang, and of what it stages."""

from tests.mutations.mutant import Mutant

__all__ = ["SGLANG"]

_STAGED = "ucm/cache/staged.py"
_ENGINE = "ucm/integration/sglang/engine.py"
_PAGES = "ucm/integration/sglang/pages.py"
_LINKER = "ucm/integration/sglang/linker.py"
_HICACHE = "ucm/integration/sglang/hicache.py"
_OF_STAGED = "tests/cache/test_staged.py::TestStaged"
_OF_ENGINE = "tests/integration/sglang/test_engine.py"
_OF_LINKER = "tests/integration/sglang/test_linker.py"
_OF_HICACHE = "tests/integration/sglang/test_hicache.py"
_OF_STATES = "tests/integration/sglang/test_states.py"

SGLANG = (
    Mutant(
        name="path_of_sglangs_files_is_a_setting_of_ours",
        why="SGLang with --file-storage-path does not start: there is no such setting.",
        file=_HICACHE,
        find='    "file_storage_path",  #',
        replace="    #",
        killers=(f"{_OF_HICACHE}::test_flag_of_sglangs_own_files_is_none_of_ours",),
    ),
    Mutant(
        name="check_of_weights_makes_new_ones_known",
        why="Pages of weights that were written over are loaded, as somebody has looked at them.",
        file=_ENGINE,
        find="            return asked(*args, **kwargs)",
        replace="            found.is_set &= not is_check\n            return asked(*args, **kwargs)",
        killers=(f"{_OF_HICACHE}::test_weights_that_are_read_stay_those_of_the_keys",),
    ),
    Mutant(
        name="weights_that_are_reset_are_the_same",
        why="Pages of weights that were written over are loaded.",
        file=_ENGINE,
        find="""["recv_req"].action in _READS""",
        replace="""["recv_req"].action""",
        killers=(f"{_OF_HICACHE}::test_weights_that_are_read_stay_those_of_the_keys",),
    ),
    Mutant(
        name="what_computes_otherwise_is_in_no_key",
        why="An engine loads what another one's hooks have made of the same weights.",
        file=_ENGINE,
        find="for name in _COUNTED_IF_SET}",
        replace="for name in _COUNTED_IF_SET[:1]}",
        killers=(f"{_OF_ENGINE}::test_whatever_decides_bytes_is_in_the_key",),
    ),
    Mutant(
        name="variables_by_which_others_compute_are_in_no_key",
        why="An engine loads what another one's own model has made of the same weights.",
        file=_ENGINE,
        find="for name in _VARIABLES}",
        replace="for name in ()}",
        killers=(f"{_OF_ENGINE}::test_variables_that_decide_bytes_are_in_the_key",),
    ),
    Mutant(
        name="load_begins_parts_as_long_as_there_are_some",
        why="Behind a slow store SGLang flushes for longer than 10 s, and ends itself.",
        file=_HICACHE,
        find=" or not (seconds := left(until)):",
        replace=" or not (seconds := self.pages.limit):",
        killers=(
            f"{_OF_HICACHE}::test_load_in_parts_begins_none_once_its_time_is_over",
        ),
    ),
    Mutant(
        name="tier_is_waited_for_as_long_as_a_setting_says",
        why="SGLang that flushes ends itself behind 10 s, as a look-up goes on.",
        file=_PAGES,
        find="timeout = min(self._fetch_limit, left(until) / 2)",
        replace="timeout = min(self._fetch_limit, until)",
        killers=(f"{_OF_STATES}::test_look_up_waits_for_no_more_than_sglang_gives_it",),
    ),
    Mutant(
        name="each_question_to_the_slab_has_all_the_time",
        why="SGLang that flushes ends itself behind 10 s, as a look-up goes on.",
        file=_PAGES,
        find="first = self._pool.contains(asked, timeout=left(until))",
        replace="first = self._pool.contains(asked, timeout=self.limit)",
        killers=(f"{_OF_STATES}::test_look_up_waits_for_no_more_than_sglang_gives_it",),
    ),
    Mutant(
        name="tiers_are_asked_for_the_last_state_alone",
        why="Prompts that begin alike are computed on the next machine, though a state is there.",
        file=_PAGES,
        find="_LOOKS: Final = 4",
        replace="_LOOKS: Final = 1",
        killers=(f"{_OF_STATES}::test_states_are_what_a_tier_has",),
    ),
    Mutant(
        name="tier_that_does_not_answer_is_asked_on",
        why="A look-up waits four times as long for a tier that is gone.",
        file=_PAGES,
        find=".reason is not Reason.ABSENT:",
        replace=".found and Reason:",
        killers=(
            f"{_OF_STATES}::test_tier_that_does_not_answer_is_asked_for_one_state",
        ),
    ),
    Mutant(
        name="state_is_there_by_one_of_its_parts",
        why="A prefix is found of which no state comes: its pages are fetched in vain.",
        file=_PAGES,
        find="are_whole = map(all, ",
        replace="are_whole = map(any, ",
        killers=(f"{_OF_STATES}::test_state_that_lacks_a_part_is_none",),
    ),
    Mutant(
        name="parts_of_a_state_are_counted_as_states",
        why="A state counts as loaded that came in part: a request goes on with two halves.",
        file=_PAGES,
        find="return blocks // self._parts",
        replace="return min(blocks, 1)",
        killers=(f"{_OF_STATES}::test_state_that_lacks_a_part_is_none",),
    ),
    Mutant(
        name="what_sglang_chose_itself_is_not_asked_for",
        why="Engines whose kernels differ share their states and pages.",
        file=_ENGINE,
        find="    return resolution_result(args, name)\n",
        replace="    return resolution_result and getattr(args, name)\n",
        killers=(f"{_OF_ENGINE}::test_what_sglang_has_chosen_itself_counts",),
    ),
    Mutant(
        name="first_part_of_a_state_is_its_name",
        why="States of other dtypes are loaded as what they are not.",
        file=_ENGINE,
        find="for row in rows.values()]",
        replace="for row in [first]]",
        killers=(f"{_OF_STATES}::test_shape_and_dtype_of_every_part_are_in_the_key",),
    ),
    Mutant(
        name="slots_of_a_stuck_load_are_given_on",
        why="A copy that ends late writes over blocks that are another's and verified.",
        file=_STAGED,
        find="            with contextlib.suppress(DeviceTimeoutError):\n",
        replace="            self._free += slots\n"
        "            with contextlib.suppress(DeviceTimeoutError):\n",
        killers=(f"{_OF_STAGED}::test_slots_of_a_stuck_load_are_nobodys",),
    ),
    Mutant(
        name="whole_load_counts_as_staged",
        why="Slots that were never written count as a request's blocks.",
        file=_STAGED,
        find="                leading = load.wait().leading\n",
        replace="                leading = load.wait().num_blocks\n",
        killers=(
            f"{_OF_STAGED}::test_slots_of_a_failed_load_are_free",
            f"{_OF_LINKER}::test_lookup_reports_nothing_that_is_not_staged",
        ),
    ),
    Mutant(
        name="held_slots_are_given_on",
        why="A request is given the blocks of another one.",
        file=_STAGED,
        find="            self._idle.pop(key, None)\n",
        replace="            pass\n",
        killers=(f"{_OF_STAGED}::test_room_is_made_of_what_was_used_longest_ago",),
    ),
    Mutant(
        name="what_is_coming_is_loaded_again",
        why="Each look-up of a slow store takes slots anew.",
        file=_STAGED,
        find="if key not in coming and key not in there]",
        replace="if key not in there]",
        killers=(
            f"{_OF_STAGED}::test_load_that_takes_longer_is_staged_for_who_asks_later",
        ),
    ),
    Mutant(
        name="lookup_reports_what_is_stored",
        why="SGLang aborts the request when its load fails.",
        file=_LINKER,
        find="count = self._pages.stage(transfer.keys, self._patience)",
        replace="count = self._pages.num_stored(transfer.keys)",
        killers=(f"{_OF_LINKER}::test_lookup_reports_nothing_that_is_not_staged",),
    ),
    Mutant(
        name="refused_model_is_served",
        why="Of a prompt the pages of one kind are loaded, and those of its windows are not.",
        file=_HICACHE,
        find="            undo.callback(self.close)\n",
        replace="",
        killers=(
            f"{_OF_HICACHE}::test_storage_that_has_refused_a_model_serves_nothing",
        ),
    ),
    Mutant(
        name="layer_is_late_by_one",
        why="Attention reads a layer before its values are there.",
        file=_LINKER,
        find="            self._copy(batch, self._rows_per_layer * (layer + 1))",
        replace="            self._copy(batch, self._rows_per_layer * (layer + 1) - 1)",
        killers=(f"{_OF_LINKER}::test_layers_are_copied_when_they_are_asked_for",),
    ),
    Mutant(
        name="failed_copy_counts_as_whole",
        why="A request goes on with pages that hold something else.",
        file=_LINKER,
        find="            batch.is_failed = True",
        replace="            pass",
        killers=(f"{_OF_LINKER}::test_failed_copy_is_told_at_the_end",),
    ),
    Mutant(
        name="cancelled_load_holds_its_slots",
        why="After some aborted requests nothing can be staged any more.",
        file=_LINKER,
        find="        self._release([copy] if copy is not None else [])\n",
        replace="",
        killers=(
            f"{_OF_LINKER}::test_cancelled_load_writes_nothing_and_holds_nothing",
        ),
    ),
    Mutant(
        name="reset_leaves_loads_queued",
        why="Pages that are another request's by then are written to.",
        file=_LINKER,
        find="        self._queued.clear()\n        for rid",
        replace="        for rid",
        killers=(f"{_OF_LINKER}::test_reset_leaves_nothing_but_what_is_stored",),
    ),
    Mutant(
        name="new_weights_are_not_noticed",
        why="Pages of other weights are loaded, and saved under their name.",
        file=_ENGINE,
        find="            found._asked()\n",
        replace="",
        killers=(f"{_OF_LINKER}::test_weights_that_may_have_changed_end_all_reuse",),
    ),
    Mutant(
        name="each_attached_cache_listens_anew",
        why="New weights are forgotten with the cache that noticed, and calls grow deeper.",
        file=_ENGINE,
        find="        if isinstance(doubt, cls):\n",
        replace="        if False:\n",
        killers=(
            f"{_OF_HICACHE}::test_storages_that_come_and_go_listen_once",
            (
                f"{_OF_HICACHE}::"
                "test_storage_that_is_attached_behind_new_weights_serves_nothing"
            ),
        ),
    ),
    Mutant(
        name="pool_registered_anew_leaves_the_first_open",
        why="Threads and memory of a cache that nobody asks any more stay.",
        file=_HICACHE,
        find="            before.pages.close()\n",
        replace="            pass\n",
        killers=(
            (
                f"{_OF_HICACHE}::"
                "test_pool_that_is_registered_anew_takes_the_place_of_the_first"
            ),
        ),
    ),
    Mutant(
        name="weights_are_in_no_key",
        why="A model that was trained further is given the pages of the one before.",
        file=_ENGINE,
        find="        weights=weights,\n",
        replace='        weights="any",\n',
        killers=(
            f"{_OF_ENGINE}::test_whatever_decides_bytes_is_in_the_key",
            f"{_OF_ENGINE}::test_blocks_of_other_weights_are_not_found",
        ),
    ),
    Mutant(
        name="scaled_pools_are_taken",
        why="Pages come without the scales that say what their bytes mean.",
        file=_ENGINE,
        find='    if (kind not in _POOLS, order, is_scaled) != (False, "nhd", False):',
        replace='    if (kind not in _POOLS, order) != (False, "nhd"):',
        killers=(f"{_OF_ENGINE}::test_model_that_is_not_taken_is_refused_by_name",),
    ),
    Mutant(
        name="any_release_is_taken",
        why="What a release that nobody tried does with a linker is not known.",
        file=_ENGINE,
        find="    if release != _RELEASE:",
        replace="    if not release:",
        killers=(f"{_OF_ENGINE}::test_release_that_nobody_tried_is_refused",),
    ),
    Mutant(
        name="pages_behind_a_missing_one_are_reported",
        why="SGLang reads host pages that nothing was written to.",
        file=_HICACHE,
        find="        return [at < loaded for at in range(len(keys))]",
        replace="        return [True for at in range(len(keys))]",
        killers=(
            f"{_OF_HICACHE}::test_page_that_is_not_as_it_was_saved_is_not_there",
            f"{_OF_HICACHE}::test_pages_behind_a_part_that_is_not_whole_are_not_loaded",
        ),
    ),
    Mutant(
        name="load_is_cut_to_what_has_room",
        why="Of a prompt with windows SGLang takes all or nothing: a long one is never found.",
        file=_HICACHE,
        find="            if loaded < at or not",
        replace="            if at or not",
        killers=(
            (
                f"{_OF_HICACHE}::"
                "test_call_that_carries_more_than_is_staged_at_once_is_whole"
            ),
        ),
    ),
    Mutant(
        name="load_goes_on_behind_a_hole",
        why="What is loaded behind it counts for the page that is missing.",
        file=_HICACHE,
        find="            if loaded < at or not",
        replace="            if loaded < min(at, 1) or not",
        killers=(
            f"{_OF_HICACHE}::test_pages_behind_a_part_that_is_not_whole_are_not_loaded",
        ),
    ),
    Mutant(
        name="large_save_of_hicache_is_refused",
        why="Nothing of a long prefix is stored behind what may wait at a time.",
        file=_HICACHE,
        find=", wait_for_room=True)",
        replace=")",
        killers=(f"{_OF_HICACHE}::test_call_that_saves_more_than_may_wait_is_whole",),
    ),
    Mutant(
        name="side_pools_are_taken",
        why="A request is restored with some kinds of its pages, and without another.",
        file=_HICACHE,
        find="            if host_pool_name not in _KINDS:\n",
        replace="            if host_pool is None:\n                return\n            if not host_pool_name:\n",
        killers=(
            f"{_OF_HICACHE}::test_storage_that_has_refused_a_model_serves_nothing",
        ),
    ),
    Mutant(
        name="window_is_a_page_of_all_tokens",
        why="Layers are numbered alike: a window is computed with other layers' values.",
        file=_HICACHE,
        find='host_rows(host_pool, "" if name == PoolName.KV else f"{name}.")',
        replace="host_rows(host_pool)",
        killers=(
            (
                f"{_OF_HICACHE}::"
                "test_windows_are_restored_beside_pages_of_the_same_hashes"
            ),
        ),
    ),
    Mutant(
        name="window_with_a_hole",
        why="SGLang gives memory to a window that cannot be loaded, and computes it twice.",
        file=_HICACHE,
        find="        run = run + 1 if is_stored else 0\n",
        replace="        run += is_stored\n",
        killers=(f"{_OF_HICACHE}::test_prefix_ends_where_its_last_window_is_whole",),
    ),
    Mutant(
        name="window_behind_the_prefix",
        why="More is found than there are pages of all tokens.",
        file=_HICACHE,
        find="kind.pages.are_stored(keys[:most], ",
        replace="kind.pages.are_stored(keys, ",
        killers=(f"{_OF_HICACHE}::test_window_behind_the_last_page_is_no_hit",),
    ),
    Mutant(
        name="windows_left_to_the_slab",
        why="A window that a tier has is computed, and the prefix before it for nothing.",
        file=_HICACHE,
        find="kind.pages.num_stored(keys[max(0, most - size) : most], until)  # tiers\n",
        replace="pass\n",
        killers=(
            (
                "tests/integration/sglang/test_tiers.py::"
                "test_windows_have_what_a_tier_has"
            ),
        ),
    ),
    Mutant(
        name="door_in_doubt_saves",
        why="Pages of new weights are stored under the name of the old ones.",
        file=_PAGES,
        find="            if not self._doubt.is_set:\n                keys, blocks = ",
        replace="            if True:\n                keys, blocks = ",
        killers=(
            f"{_OF_LINKER}::test_weights_that_may_have_changed_end_all_reuse",
            f"{_OF_HICACHE}::test_weights_that_may_have_changed_end_all_reuse",
        ),
    ),
)
