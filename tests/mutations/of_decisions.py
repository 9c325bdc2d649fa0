# SPDX-License-Identifier: Apache-2.0
"""Mutants of the values and of the scheduler's decisions."""

from tests.mutations.mutant import Mutant

__all__ = ["DECISIONS"]

_ADAPTER = "ucm/scheduler/adapter.py"
_ENDINGS = "ucm/scheduler/endings.py"
_HOLDS = "ucm/scheduler/holds.py"
_LIVES = "ucm/scheduler/lives.py"
_MATCHING = "ucm/scheduler/matching.py"
_REQUESTS = "ucm/scheduler/requests.py"
_SELECTOR = "ucm/scheduler/saves.py"
_TRANSFERS = "ucm/scheduler/transfers.py"
_ENDS = "tests/scheduler/test_adapter.py::TestEnds"
_REPORTS = "tests/scheduler/test_adapter.py::TestReports"
_LEDGER = "tests/scheduler/test_holds.py::TestHoldLedger"
_LOADS = "tests/scheduler/test_loads.py::TestLoads"
_FAILURES = "tests/scheduler/test_loads.py::TestFailures"
_MATCHER = "tests/scheduler/test_matching.py::TestPrefixMatcher"
_SAVES = "tests/scheduler/test_saves.py::TestSaves"
_FENCES = "tests/scheduler/test_saves.py::TestFences"
_OPEN = "tests/scheduler/test_transfers.py::TestOpenTransfers"
_GROUP = "tests/test_layout.py::TestGroupLayout"
_GAPS = "tests/mutations/test_gaps.py"

DECISIONS = (
    # Holds.
    Mutant(
        name="rank_forgotten",
        why="The first rank to release frees blocks that the others still read.",
        file=_HOLDS,
        find="if hold.ranks_left:",
        replace="if False:",
        killers=(f"{_LEDGER}::test_hold_ends_when_the_last_rank_releases",),
    ),
    Mutant(
        name="hold_skipped",
        why="The engine frees and reuses blocks while a save still reads them.",
        file=_SELECTOR,
        find="            self._hold(order)\n",
        replace="            pass\n",
        killers=(f"{_SAVES}::test_saved_blocks_are_held_when_the_plan_is_out",),
    ),
    Mutant(
        name="hold_released_at_settlement",
        why="A hold ends with the store's answer and not with the last device read.",
        file=_ADAPTER,
        find="filter(self._knows_hold, report.released)",
        replace="filter(self._knows_hold, report.settled_saves)",
        killers=(f"{_REPORTS}::test_rank_that_releases_twice_is_a_bug",),
    ),
    # Fences.
    Mutant(
        name="no_fence_after_preemption",
        why="Blocks of a preempted request are overwritten while they are read.",
        file=_REQUESTS,
        find="                written |= new\n",
        replace="                written |= set() if request.is_new else new\n",
        killers=(f"{_ENDS}::test_resumed_request_starts_afresh",),
    ),
    Mutant(
        name="no_fence_for_recycled",
        why="A block that left a window is overwritten while a save reads it.",
        file=_REQUESTS,
        find="                written |= new\n",
        replace="                written |= new if request.is_new else set()\n",
        killers=(f"{_FENCES}::test_recycled_window_block_is_fenced",),
    ),
    Mutant(
        name="no_fence_for_loads",
        why="A load overwrites a block that a save still reads.",
        file="ucm/scheduler/holds.py",
        find="facts.written_blocks(layout, loads)",
        replace="facts.written_blocks(layout)",
        killers=(f"{_FENCES}::test_destination_of_a_load_is_fenced",),
    ),
    Mutant(
        name="shared_prefix_fenced",
        why="The engine waits for saves of a prefix that it only reads.",
        file=_REQUESTS,
        find="new.difference_update(request.tables[at][:shared])",
        replace="pass",
        killers=(f"{_FENCES}::test_shared_prefix_is_only_read",),
    ),
    Mutant(
        name="no_fence_for_loads_of_others",
        why="Another connector loads within a step onto a block that a save still reads.",
        file=_REQUESTS,
        find="own = min(request.computed_tokens, request.own_tokens)",
        replace="own = request.computed_tokens",
        killers=(
            f"{_FENCES}::test_what_another_connector_loads_in_the_step_is_fenced",
        ),
    ),
    # Lives.
    Mutant(
        name="life_ignored",
        why="The holds of a finished request defer another one of the same name.",
        file=_LIVES,
        find="key = request_id, next(self._generations)\n",
        replace="key = request_id, 0\n",
        killers=(f"{_ENDS}::test_used_again_id_starts_a_new_life",),
    ),
    Mutant(
        name="life_that_loads_passed_over",
        why="Blocks of a request whose load is over are never saved.",
        file=_LIVES,
        find="        self._loading.append(life)\n",
        replace="",
        killers=(f"{_REPORTS}::test_validate_sees_a_life_that_loads_andsaved_blocks",),
    ),
    Mutant(
        name="failure_of_a_former_life",
        why="A late failure makes a request that loaded well compute all of it again.",
        file=_LIVES,
        find="failed.told_to(life.key, life.loads)",
        replace="(x for x in failures if x.request_id == life.key[0])",
        killers=(
            f"{_FAILURES}::test_failure_of_a_former_life_leaves_the_present_one_alone",
        ),
    ),
    Mutant(
        name="resumed_in_the_old_life",
        why="A request that comes back saves under block ids that it lost.",
        file=_LIVES,
        find="if life is None or (request.is_new and life.was_scheduled):",
        replace="if life is None:",
        killers=(
            f"{_ENDS}::test_resumption_without_word_of_a_preemption_starts_afresh",
        ),
    ),
    Mutant(
        name="saved_on_an_open_load",
        why="What was computed on a prefix that fails to load is stored as good.",
        file=_SELECTOR,
        find="if life.loads or not life.may_save:",
        replace="if not life.may_save:",
        killers=(f"{_LOADS}::test_blocks_on_top_of_an_open_load_wait",),
    ),
    Mutant(
        name="saved_after_a_reset",
        why="Blocks of the old weights are stored under the keys of the new ones.",
        file=_SELECTOR,
        find="if life.loads or not life.may_save:",
        replace="if life.loads:",
        killers=(
            f"{_FAILURES}::test_doubt_finds_nothing_and_saves_nothing_of_what_was_before",
        ),
    ),
    # Deferral.
    Mutant(
        name="never_deferred",
        why="The blocks of a finished request are reused while they are read.",
        file=_ADAPTER,
        find="is_left or self._ledger.holds_of(life.key) > 0",
        replace="False",
        killers=(f"{_ENDS}::test_deferral_is_answered_and_planned_once",),
    ),
    Mutant(
        name="always_deferred",
        why="The blocks of every request stay until a report that nobody owes.",
        file=_ADAPTER,
        find="is_left or self._ledger.holds_of(life.key) > 0",
        replace="True",
        killers=(f"{_ENDS}::test_request_without_holds_is_free_now",),
    ),
    Mutant(
        name="deferral_never_ends",
        why="An id that is used again is deferred for ever, and its blocks are lost.",
        file=_ENDINGS,
        find="self._deferred.difference_update(request_ids)",
        replace="self._deferred.difference(request_ids)",
        killers=(f"{_ENDS}::test_deferral_is_answered_and_planned_once",),
    ),
    Mutant(
        name="bypass_forgotten",
        why="Plans go on to a worker that is dead because it, or another, said hello.",
        file=_ADAPTER,
        find="        if not report.healthy:\n            self.bypass = True\n",
        replace="        self.bypass = not report.healthy\n        if self.bypass:\n",
        killers=(f"{_REPORTS}::test_failed_runtime_stops_new_work_only",),
    ),
    Mutant(
        name="saved_in_bypass",
        why="Blocks are held for a worker that will never read nor release them.",
        file=_ADAPTER,
        find="self._saves_at_all and is_keyed and not self.bypass",
        replace="self._saves_at_all and is_keyed",
        killers=(f"{_REPORTS}::test_nothing_is_saved_in_bypass",),
    ),
    Mutant(
        name="load_never_over",
        why="A request whose load was told saves nothing any more.",
        file=_ADAPTER,
        find="self._lives.loads_ended(self._transfers.end_loads_of(request_ids))",
        replace="self._transfers.end_loads_of(request_ids)",
        killers=(
            f"{_LOADS}::test_load_that_the_engine_was_told_of_holds_back_no_save",
        ),
    ),
    # Tickets.
    Mutant(
        name="saved_twice_at_once",
        why="Two tickets write one block, and one of them waits for slots in vain.",
        file="ucm/scheduler/transfers.py",
        find="if not saving.isdisjoint(hashes) or len(set(hashes)) < len(hashes):",
        replace="if False:",
        killers=(f"{_SAVES}::test_block_that_another_ticket_writes_is_left_to_it",),
    ),
    Mutant(
        name="ended_by_one_rank",
        why="A load counts as over while other ranks still fill its blocks.",
        file=_TRANSFERS,
        find="if entry is None or entry.ranks_left:",
        replace="if entry is None:",
        killers=(f"{_OPEN}::test_ticket_ends_when_every_rank_has_said_so_once",),
    ),
    Mutant(
        name="failed_load_not_denied",
        why="A damaged block is matched, fails and is matched again without end.",
        file=_TRANSFERS,
        find="            self.denied.deny((group_id, failure.bad_hash))\n",
        replace="",
        killers=(f"{_FAILURES}::test_failed_block_is_a_miss_until_it_is_saved",),
    ),
    Mutant(
        name="forgiven_without_a_save",
        why="A save that failed lets a damaged block be matched again.",
        file=_TRANSFERS,
        find="self.is_stored &= is_stored",
        replace="self.is_stored &= True",
        killers=(
            f"{_FAILURES}::test_denied_block_stays_denied_until_a_save_of_it_is_stored",
        ),
    ),
    # Hits.
    Mutant(
        name="partial_block_hit",
        why="A load overwrites the part of a block that the engine computed itself.",
        file=_MATCHING,
        find="if computed_tokens % self._align:",
        replace="if False:",
        killers=(f"{_MATCHER}::test_partial_local_hit_loads_nothing",),
    ),
    Mutant(
        name="nothing_left_to_compute",
        why="A prompt hits as a whole on an engine that then has no logits to sample.",
        file=_MATCHING,
        find="num_tokens if self._full_hits else num_tokens - 1",
        replace="num_tokens",
        killers=(f"{_MATCHER}::test_whole_prompt_hits_only_where_allowed",),
    ),
    Mutant(
        name="one_shard_is_enough",
        why="A hit is promised although one rank's part of it is missing.",
        file=_MATCHING,
        find="self._index.match(keys) // num_shards",
        replace="self._index.match(keys[::num_shards])",
        killers=(f"{_MATCHER}::test_block_counts_only_with_all_shards",),
    ),
    Mutant(
        name="hit_inside_a_block",
        why="A hit ends inside a block of another group, which was never stored.",
        file=_MATCHING,
        find="top = start * size // self._align * self._align",
        replace="top = start * size",
        killers=(f"{_MATCHER}::test_match_equals_the_definition",),
    ),
    Mutant(
        name="window_wants_everything",
        why="A window group's evicted blocks turn every hit into a miss.",
        file=_MATCHING,
        find="missing.lowest_in(group.window_blocks(top))",
        replace="missing.lowest_in(range(top // group.block_tokens))",
        killers=(f"{_MATCHER}::test_window_group_needs_only_its_last_window",),
    ),
    Mutant(
        name="window_one_block_short",
        why="Attention reads a block of its window that was never restored.",
        file="ucm/layout.py",
        find="return range(first_token // self.block_tokens, stop)",
        replace="return range(-(-first_token // self.block_tokens), stop)",
        killers=(f"{_GROUP}::test_window_blocks_hold_every_token_the_next_one_sees",),
    ),
    Mutant(
        name="window_loads_everything",
        why="A load waits for blocks that no attention reaches and no store has.",
        file="ucm/scheduler/loads.py",
        find="first = max(blocks.start, group.window_blocks(loaded.stop).start)",
        replace="first = blocks.start",
        killers=(f"{_LOADS}::test_blocks_before_the_window_are_not_loaded_into",),
    ),
    Mutant(
        name="half_filled_block_saved",
        why="A block is stored under its hash before its last tokens are computed.",
        file=_LIVES,
        find="whole = min(request.end_tokens, hashed, self.most_saved)",
        replace="whole = min(hashed, self.most_saved)",
        killers=(f"{_SAVES}::test_prompt_computed_in_parts_is_saved_in_parts",),
    ),
    # Keys, messages and settings.
    Mutant(
        name="keyspace_field_dropped",
        why="Engines that differ in one setting load each other's bytes.",
        file="ucm/blocks.py",
        find="for field in sorted(attrs.fields_dict(type(self))):",
        replace="for field in sorted(attrs.fields_dict(type(self)))[1:]:",
        killers=(
            "tests/test_blocks.py::TestKeySpace::test_each_field_changes_the_digest",
        ),
    ),
    Mutant(
        name="keyspace_unprefixed",
        why="Two key spaces whose texts run together the same way share their bytes.",
        file="ucm/blocks.py",
        find='parts.append(struct.pack(">I", len(data)) + data)',
        replace="parts.append(data)",
        killers=(
            f"{_GAPS}::test_name_of_the_next_field_inside_a_value_changes_the_bytes",
        ),
    ),
    Mutant(
        name="shard_left_out",
        why="All ranks store under one key, and each loads another one's heads.",
        file="ucm/blocks.py",
        find="keyspace_digest, group_id, shard_id, BlockHash(bytes(_MIN_HASH_BYTES))",
        replace="keyspace_digest, group_id, ShardId(0), BlockHash(bytes(8))",
        killers=(
            "tests/test_blocks.py::TestKeyPacker::test_packs_what_block_keys_pack",
        ),
    ),
    Mutant(
        name="engine_tag_left_out",
        why="Kernels that order their axes in another way read each other's pages.",
        file="ucm/layout.py",
        find="            self.engine_tag,\n",
        replace="",
        killers=("tests/test_layout.py::TestFingerprint::test_every_field_changes_it",),
    ),
    Mutant(
        name="version_unchecked",
        why="A worker of another release reads a plan as something else.",
        file="ucm/scheduler/messages.py",
        find="if data[:1] != _VERSION_BYTE:",
        replace="if not data:",
        killers=(
            "tests/scheduler/test_messages.py::test_message_of_other_version_is_refused",
        ),
    ),
    Mutant(
        name="unknown_setting_taken",
        why="A misspelt setting is passed over, and its default serves in silence.",
        file="ucm/settings.py",
        find="""\
            known = f"{_meant(str(name), cls, prefix)}Known: {sorted(fields)}."
            raise ConfigError(key, value, "unknown key", _GONE.get(key, known))
""",
        replace="            continue\n",
        killers=(
            "tests/test_config.py::TestUnknownKeys::test_far_name_lists_what_is_known",
        ),
    ),
)
