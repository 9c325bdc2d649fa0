# SPDX-License-Identifier: Apache-2.0
"""Mutants of why a look-up fell short, from the slab's memory to the door."""

from tests.mutations.mutant import Mutant

__all__ = ["WHY"]

_FATES = "ucm/fates.py"
_SLAB_FATES = "ucm/stores/slab/_fates.py"
_LOCK = "tests/integration/vllm/test_life_calls.py::test_life_of_a_request_gives_the_interpreter_lock_to_nobody"
_INDEX = "ucm/stores/slab/_index.py"
_MATCHING = "ucm/scheduler/matching.py"
_MISSES = "ucm/scheduler/misses.py"
_UNSAVED = "ucm/scheduler/unsaved.py"
_LOOKUPS = "ucm/integration/vllm/lookups.py"
_SKETCH = "tests/test_fates.py::TestSketch"
_TOLD = "tests/stores/test_slab_fates.py::TestFates"
_LOSS = "tests/stores/test_slab_fates.py::TestLoss"
_OFFERS = "tests/scheduler/test_misses.py::TestOffers"
_SAVES = "tests/scheduler/test_misses.py::TestSaves"
_LOADS = "tests/scheduler/test_misses.py::TestLoads"
_DECLINED = "tests/scheduler/test_misses.py::TestDeclined"
_WHEREVER = "tests/stores/test_slab_fates.py::TestEverywhere"
_REMEMBERED = "tests/scheduler/test_unsaved.py::TestUnsaved"
_LOOK_UPS = "tests/integration/vllm/test_lookups.py::TestLookUps"
_ROLES = "tests/integration/vllm/test_roles.py::TestRoles"
_ADAPTERS = "tests/integration/vllm/test_adapters.py::TestLookups"
_REASONS = "tests/integration/vllm/test_lookups.py::TestReasons"
_HELD = "test_hit_that_somebody_else_holds_up_is_offered_whole"
_TAKEN = "test_hit_that_the_engine_never_takes_up_is_offered_shorter"
_SLOWER = "tests/integration/vllm/test_paying.py::TestSlower"
_NEIGHBOURS = "tests/stores/test_neighbours.py::TestNeighbours"

WHY = (
    Mutant(
        name="store_that_cannot_say_why_ends_the_engine",
        why="R-71: what became of a block is asked on the scheduler's thread, of any store.",
        file=_MISSES,
        find="        except BaseException as exc:  # noqa: BLE001 - a store of others, on the engine's thread\n",
        replace="        except TimeoutError as exc:\n",
        killers=(
            "tests/scheduler/test_misses.py::TestOffers::test_store_that_cannot_say_why_ends_nobody",
        ),
    ),
    Mutant(
        name="half_an_entry_believed",
        why="R-71: what one process has half written is told as another block's fate.",
        file=_FATES,
        find="if not value or self._check[at] ^ value != fingerprint:",
        replace="if not value:",
        killers=(
            f"{_SKETCH}::test_entry_that_does_not_hold_together_says_nothing",
            f"{_SKETCH}::test_later_word_takes_the_place_of_an_earlier_one",
        ),
    ),
    Mutant(
        name="evicted_together_not_remembered",
        why="R-71: where a prompt makes room for itself, nobody knows what went.",
        file="ucm/stores/slab/_reserving.py",
        find="            index.part_with(victims, Fate.EVICTED)\n",
        replace="",
        killers=(
            f"{_TOLD}::test_evictions_one_by_one_and_together_are_remembered[python-5]",
            f"{_TOLD}::test_each_fate_is_told",
        ),
    ),
    Mutant(
        name="withdrawn_not_remembered",
        why="R-71: what goes with memory that another class takes was never offered.",
        file=_INDEX,
        find="            self.part_with(committed, Fate.EVICTED)\n",
        replace="",
        killers=(
            f"{_TOLD}::test_blocks_go_with_the_memory_that_another_class_takes",
            f"{_REASONS}::test_block_that_went_for_others_was_evicted",
        ),
    ),
    Mutant(
        name="corrupt_told_as_forgotten",
        why="R-71: damaged memory looks as if somebody had deleted blocks.",
        file=_INDEX,
        find="self.part_with(found, fate)",
        replace="self.part_with(found, Fate.FORGOTTEN)",
        killers=(f"{_TOLD}::test_each_fate_is_told",),
    ),
    Mutant(
        name="cut_file_believed",
        why="R-71: who cuts a file that is for people ends every engine of the node.",
        file=_SLAB_FATES,
        find="if self._sketch is not None and seek(self._fd, 0, os.SEEK_END) < self._nbytes:",
        replace="if self._sketch is None:",
        killers=(f"{_LOSS}::test_file_that_is_cut_in_use_is_let_go[python-cut]",),
    ),
    Mutant(
        name="lock_given_up_to_explain",
        why="R-18: to say why a block is missing an engine waits until our threads let it go on.",
        file=_SLAB_FATES,
        find="if sketch is None or seek(self._fd, 0, os.SEEK_END) < self._nbytes",
        replace="if sketch is None or os.fstat(self._fd).st_size < self._nbytes",
        killers=(_LOCK,),
    ),
    Mutant(
        name="link_followed",
        why="R-71: a link in a slab's directory has another file overwritten.",
        file=_SLAB_FATES,
        find="    except ConfigError:  # a link, or somebody else's\n        return True\n",
        replace="    except ConfigError:\n        return False\n",
        killers=(
            f"{_LOSS}::test_what_is_not_ours_is_left_alone[python-swap_for_a_link]",
        ),
    ),
    Mutant(
        name="first_missing_is_one_too_late",
        why="R-71: the block that is named is one that nobody asked for.",
        file=_MATCHING,
        find="missing = MissingBlock(group, start, named[found], keys)",
        replace="missing = MissingBlock(group, min(start + 1, stop - 1), named[found], keys)",
        killers=(f"{_OFFERS}::test_hit_that_falls_short_says_at_which_block",),
    ),
    Mutant(
        name="key_of_another_block_told",
        why="R-71: the reason, and the key that a command is given, are of a block that is there.",
        file=_MATCHING,
        find="keys = keys[found * num_shards :][:num_shards]",
        replace="keys = keys[:num_shards]",
        killers=(
            (
                "tests/integration/vllm/test_lookups.py::TestLookUps::"
                "test_hit_that_falls_short_names_its_first_missing_block"
            ),
        ),
    ),
    Mutant(
        name="other_part_asked_about",
        why="R-71: of a block that one rank has lost it is said that it is being stored.",
        file=_MISSES,
        find="if each.fate is not Fate.STORED:",
        replace="if each.fate is Fate.STORED:",
        killers=(f"{_OFFERS}::test_part_that_is_missing_is_asked_about",),
    ),
    Mutant(
        name="older_word_counts",
        why="R-71: a block that was refused, saved and evicted was refused.",
        file=_MISSES,
        find="(known is None or age_s <= known[1])",
        replace="(known is None or age_s > known[1])",
        killers=(f"{_SAVES}::test_more_recent_word_counts",),
    ),
    Mutant(
        name="asked_elsewhere_each_time",
        why="R-71: each partial hit looks through the key spaces of others.",
        file=_MISSES,
        find="if reason is MissReason.NEVER_OFFERED and not match.tokens:",
        replace="if reason is MissReason.NEVER_OFFERED:",
        killers=(
            f"{_OFFERS}::test_block_under_another_key_space_is_told_with_what_differs",
        ),
    ),
    Mutant(
        name="corrupt_is_denied",
        why="R-71: damaged memory cannot be told from a block that was evicted.",
        file=_MISSES,
        find="return MissReason.CORRUPT if is_corrupt else MissReason.DENIED, detail",
        replace="return MissReason.DENIED, detail",
        killers=(f"{_LOADS}::test_block_whose_load_failed_is_denied_or_corrupt",),
    ),
    Mutant(
        name="refusals_fail",
        why="R-71: a queue that is too short looks like a store that fails.",
        file=_UNSAVED,
        find="Why(MissReason.QUEUE if reason in _QUEUE else MissReason.FAILED, reason)",
        replace="Why(MissReason.FAILED, reason)",
        killers=(
            f"{_REMEMBERED}::test_end_of_a_ticket_says_why_its_blocks_are_missing",
            f"{_REASONS}::test_worker_says_why_a_save_was_not_stored",
        ),
    ),
    Mutant(
        name="prompts_were_not_to_be_saved",
        why="R-71: with save_decoded: never each evicted prompt was not admitted.",
        file=_UNSAVED,
        find="start = min(wish, setting) // size",
        replace="start = 0",
        killers=(
            f"{_REMEMBERED}::test_what_is_not_to_be_saved_is_put_down_when_its_request_ends",
        ),
    ),
    Mutant(
        name="one_request_fills_all",
        why="R-71: a long request that wishes no save wipes out what is known of others.",
        file=_UNSAVED,
        find="min(stop, start + _MOST_OF_ONE)",
        replace="stop",
        killers=(f"{_REMEMBERED}::test_one_request_takes_a_bounded_part",),
    ),
    Mutant(
        name="unsaved_kept_under_other_keys",
        why="R-71: after an update of weights blocks are missing for reasons of before.",
        file="ucm/scheduler/transfers.py",
        find="            self.unsaved = Unsaved()\n",
        replace="            pass\n",
        killers=(f"{_DECLINED}::test_what_is_known_is_forgotten_with_the_keys",),
    ),
    Mutant(
        name="reason_of_a_save_not_told",
        why="R-71: the scheduler never hears why a save was refused.",
        file="ucm/progress.py",
        find="outbox.why_unstored[ticket.transfer_id] = notice.outcome.reason",
        replace="pass",
        killers=(f"{_REASONS}::test_worker_says_why_a_save_was_not_stored",),
    ),
    Mutant(
        name="never_looked_up_and_silent",
        why="R-71: a producer's request was computed, and no look-up is said to fall short.",
        file=_LOOKUPS,
        find="None if known.life else _UNASKED",
        replace="None",
        killers=(f"{_ROLES}::test_who_was_never_looked_up_is_told_so",),
    ),
    Mutant(
        name="own_cache_of_the_not_looked_up_untold",
        why="A producer's log says of what its engine had itself that it was computed.",
        file="ucm/integration/vllm/scheduler.py",
        find="known.own_tokens = known.computed_tokens = computed_tokens",
        replace="known.own_tokens = computed_tokens",
        killers=(f"{_ROLES}::test_producer_tells_what_the_engine_had_itself",),
    ),
    Mutant(
        name="each_question_counts",
        why="R-71: a request that waits for room is a miss in each step.",
        file=_LOOKUPS,
        find="match, known.match = known.match, None",
        replace="match = known.match",
        killers=(
            f"{_LOOK_UPS}::test_each_life_is_counted_and_told_once_however_often_it_was_asked",
        ),
    ),
    Mutant(
        name="late_is_unkeyed",
        why="R-71: an adapter that is read slowly looks like one that cannot be known.",
        file=_LOOKUPS,
        find="reason = MissReason.LATE if problem == LATE else MissReason.UNKEYED",
        replace="reason = MissReason.UNKEYED",
        killers=(f"{_ADAPTERS}::test_adapter_that_is_not_known_says_why",),
    ),
    Mutant(
        name="unkeyed_wanted_nothing",
        why="R-71: of adapters that are passed over no token counts as missed.",
        file=_LOOKUPS,
        find="known.wanted_tokens = max(0, wanted - known.computed_tokens)",
        replace="known.wanted_tokens = 0",
        killers=(f"{_ADAPTERS}::test_adapter_that_is_not_known_says_why",),
    ),
    Mutant(
        name="paused_is_unavailable",
        why="R-71: a store that nobody asks looks like one that does not answer.",
        file="ucm/stores/bypass.py",
        find="            raise StoreBypassedError(\n",
        replace="            raise StoreUnavailableError(\n",
        killers=(
            f"{_REASONS}::test_store_that_hangs_is_unavailable_and_then_bypassed",
        ),
    ),
    Mutant(
        name="any_neighbour_asked",
        why="R-71: after many updates of weights the one that matters is never asked.",
        file="ucm/stores/neighbours.py",
        find="key=lambda each: len(own.diff(each[1]))",
        replace="key=lambda each: -len(own.diff(each[1]))",
        killers=(f"{_NEIGHBOURS}::test_those_most_like_ours_are_asked_and_no_more",),
    ),
    Mutant(
        name="neighbours_read_each_time",
        why="R-71: each new prompt has all descriptions read.",
        file="ucm/stores/neighbours.py",
        find="if (now := self._threads.monotonic()) >= self._read_at + _READ_EVERY_S:",
        replace="if now := self._threads.monotonic():",
        killers=(
            f"{_NEIGHBOURS}::test_others_that_come_later_are_read_behind_the_caller",
        ),
    ),
    Mutant(
        name="own_class_only",
        why="R-71: an engine whose blocks have another size is no neighbour.",
        file="ucm/stores/slab/_store.py",
        find="or any(peer.fate_of(key).fate is Fate.STORED for peer in self._peers)",
        replace="",
        killers=(
            f"{_WHEREVER}::test_blocks_of_other_sizes_are_found_once_they_were_seen",
        ),
    ),
    Mutant(
        name="miss_without_its_request",
        why="R-71: the line of a request does not say why it was slow.",
        file="ucm/integration/vllm/lifelog.py",
        find="            record.miss = miss.reason\n",
        replace="",
        killers=(
            f"{_LOOK_UPS}::test_hit_that_falls_short_names_its_first_missing_block",
        ),
    ),
    Mutant(
        name="keys_that_go_end_the_step",
        why="Weights that come into doubt behind a look-up end the engine.",
        file=_MISSES,
        find="        if not matcher.keyspace_digest:",
        replace="        if matcher is None:",
        killers=(f"{_DECLINED}::test_keys_that_go_behind_the_look_up_leave_no_reason",),
    ),
    Mutant(
        name="hit_without_room_offered_for_ever",
        why="An engine that keeps no room for a load hangs, and all its requests with it.",
        file=_LOOKUPS,
        find="            offered.most, self.has_limits = match.tokens * 7 // 8, True\n",
        replace="            pass\n",
        killers=(f"{_REASONS}::{_TAKEN}",),
    ),
    Mutant(
        name="hit_of_a_busy_engine_shortened",
        why="Requests that wait for their turn lose their hits, an eighth a second.",
        file=_LOOKUPS,
        find="if offered is None or match is None or not is_idle:",
        replace="if offered is None or match is None:",
        killers=(f"{_REASONS}::{_TAKEN}",),
    ),
    Mutant(
        name="hit_that_another_connector_holds_up_shortened",
        why="Half of a hit is computed because another connector took three seconds to answer.",
        file=_LOOKUPS,
        find="        if self._has_ample_room(num_tokens):",
        replace="        if not num_tokens:",
        killers=(f"{_REASONS}::{_HELD}",),
    ),
    Mutant(
        name="memory_as_large_as_a_request_is_ample",
        why="An engine that keeps some blocks free hangs with the request that needs them.",
        file=_LOOKUPS,
        find="count() >= 2 * needed + _AMPLE",
        replace="count() >= needed",
        killers=(f"{_REASONS}::{_HELD}",),
    ),
    Mutant(
        name="short_hit_blamed_for_a_long_prompt",
        why="R-71: who shares a system prompt is told that all of each prompt was there.",
        file=_LOOKUPS,
        find="            is_most = 2 * match.tokens >= match.wanted\n",
        replace="            is_most = True\n",
        killers=(
            f"{_SLOWER}::test_hit_that_does_not_pay_is_the_reason_where_it_is_most",
        ),
    ),
    Mutant(
        name="short_hit_not_told_as_found",
        why="R-71: tokens that were there are counted as missing.",
        file=_LOOKUPS,
        find="            match = PrefixMatch(slower, match.reason, match.wanted, match.missing)\n",
        replace="",
        killers=(
            f"{_SLOWER}::test_hit_that_does_not_pay_is_the_reason_where_it_is_most",
        ),
    ),
    Mutant(
        name="short_hit_computed_without_a_word",
        why="R-71: tokens are told as found, none are loaded, and no line says why.",
        file=_LOOKUPS,
        find="        if slower and known.miss is not None:\n",
        replace="        if False:\n",
        killers=(
            f"{_SLOWER}::test_short_hit_that_does_not_pay_is_told_beside_the_reason",
        ),
    ),
)
