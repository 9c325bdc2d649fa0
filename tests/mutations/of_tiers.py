# SPDX-License-Identifier: Apache-2.0
"""Mutants of what an agent moves: a slab's changes, spills and fetches."""

from tests.mutations.mutant import Mutant

__all__ = ["TIERS"]

_CHANGES = "ucm/stores/slab/_changes.py"
_TABLES = "ucm/stores/slab/_tables.py"
_FETCH = "ucm/agent/fetch.py"
_FLIGHTS = "ucm/agent/flights.py"
_WANTS = "ucm/agent/wants.py"
_SPILL = "ucm/agent/spill.py"
_RANDOM = "tests/agent/test_core_random.py::TestCore::test_whatever_a_tier_does_no_byte_is_wrong"
_BUDGET = "tests/agent/test_fetch.py::TestBudget"
_FETCHES = "tests/agent/test_fetch.py::TestFetch"
_PINS = "tests/agent/test_fetch.py::TestPin"
_RECYCLED = "tests/agent/test_spill_recycled.py::TestRecycled"
_SPILLS = "tests/agent/test_spill.py::TestSpill"
_TROUBLE = "tests/agent/test_fetch.py::TestTrouble"
_NODE = "tests/agent/test_node.py::TestMain"
_OF_DOOR = "tests/integration/vllm/test_tiers.py"
_HITS = "ucm/agent/hits.py"
_OF_HITS = "tests/agent/test_hits.py"
_FETCH_HITS = "tests/agent/test_fetch_hits.py"
_DISK = "ucm/backends/disk/_backend.py"
_DRIVE = "tests/backends/test_disk_trouble.py::TestTrouble"
_WRAP = "ucm/backends/wrap.py"
_CIRCUIT = "tests/backends/test_wrap.py::TestCircuit"
_MIRROR = "tests/stores/test_slab_changes.py::TestMirror"
_FOLLOWS = f"{_MIRROR}::test_reader_that_follows_has_what_is_stored"

TIERS = (
    Mutant(
        name="calls_of_any_size",
        why="A slow drive is never through with 64 blocks of megabytes: its breaker opens.",
        file="ucm/agent/calls.py",
        find="min(can.batch_blocks, _bytes_per_call(can) // nbytes)",
        replace="can.batch_blocks",
        killers=(
            f"{_FETCHES}::test_a_call_is_of_so_many_bytes_only",
            f"{_SPILLS}::test_a_call_is_of_so_many_bytes_only",
        ),
    ),
    Mutant(
        name="slab_call_not_waited_for",
        why="What a verb of the slab returns is lost with who asked, and the slots that it holds.",
        file="ucm/agent/calls.py",
        find="with anyio.CancelScope(shield=True):",
        replace="with anyio.CancelScope():",
        killers=(
            (
                "tests/agent/test_calls.py::TestThreadCalls::"
                "test_call_that_has_begun_is_waited_for_when_cancelled"
            ),
        ),
    ),
    Mutant(
        name="tier_ended_before_it_gives_up",
        why="A cluster's silent server is asked for ever: each call is ended before it is found out.",
        file="ucm/agent/node.py",
        find="            if limit <= (seconds",
        replace="            if limit < (seconds",
        killers=(
            f"{_NODE}::test_tier_that_would_be_ended_before_it_gives_up_is_one_line",
        ),
    ),
    Mutant(
        name="redis_answers_of_another_kind",
        why="A URL that has answers decoded makes of every answer by redis-py an error.",
        file="ucm/backends/_redis_settings.py",
        find='frozenset({"decode_responses", "protocol"})',
        replace="frozenset()",
        killers=(
            "tests/backends/test_redis.py::TestServer::test_wrong_setting_is_named",
        ),
    ),
    # What a reader of a slab's changes is told.
    Mutant(
        name="change_ring_overflow_unseen",
        why="A follower that was too slow believes in blocks that are gone.",
        file=_CHANGES,
        find="        or not 0 <= newest - cursor.sequence <= len(index.changes)\n",
        replace="",
        killers=(f"{_MIRROR}::test_reader_that_was_left_behind_lists_again",),
    ),
    Mutant(
        name="change_epoch_ignored",
        why="What a killed process had published is never told of.",
        file=_CHANGES,
        find="        or cursor.epoch != epoch\n",
        replace="",
        killers=(f"{_MIRROR}::test_change_that_a_death_left_is_listed",),
    ),
    Mutant(
        name="removed_blocks_untold",
        why="A router is sent to blocks that were evicted long ago.",
        file=_TABLES,
        find="                self.changes.add(REMOVED, removed)\n",
        replace="                pass\n",
        killers=(_FOLLOWS,),
    ),
    Mutant(
        name="reservations_told_as_removed",
        why="A block that another one keeps is told to be gone.",
        file=_TABLES,
        find="            removed = slots[self.state[slots] == COMMITTED]\n",
        replace="            removed = slots\n",
        killers=(f"{_MIRROR}::test_reservation_that_was_given_up_is_not_told",),
    ),
    # What is spilled.
    Mutant(
        name="seal_of_a_recycled_slot",
        why="A tier serves another prompt's bytes, and their checksum holds.",
        file=_SPILL,
        find="                lease.recheck()  # or they were not these blocks that were looked at\n",
        replace="",
        killers=(f"{_RECYCLED}::test_slot_recycled_before_the_seal_is_not_put",),
    ),
    Mutant(
        name="put_of_a_recycled_slot_kept",
        why="A tier keeps a block that will never verify.",
        file=_SPILL,
        find="        if torn:\n            await self._backend.delete(torn)\n",
        replace="",
        killers=(f"{_RECYCLED}::test_slot_recycled_under_the_put_is_taken_back",),
    ),
    Mutant(
        name="spill_keeps_its_leases",
        why="A store that holds what is read has its slots held for good.",
        file=_SPILL,
        find="        with read.lease as lease:\n            return lease.recycled()\n",
        replace="        return read.lease.recycled()\n",
        killers=(f"{_SPILLS}::test_every_lease_is_ended",),
    ),
    Mutant(
        name="spill_undamaged_leases_only",
        why="A store that holds what is read has damaged slots held for good.",
        file=_SPILL,
        find="lease = undo.enter_context(self._store.read(keys))",
        replace="lease = self._store.read(keys)",
        killers=(f"{_SPILLS}::test_every_lease_is_ended",),
    ),
    Mutant(
        name="spill_unverified",
        why="Damage in the slab is sealed as if it were the block.",
        file=_SPILL,
        find="                if not self._can.verifies:\n                    _verify(lease)\n",
        replace="",
        killers=(f"{_RECYCLED}::test_damaged_block_is_not_put",),
    ),
    Mutant(
        name="spill_takes_recycled_for_damaged",
        why="Under pressure a slab that is well seems to rot.",
        file=_SPILL,
        find="        lease.recheck()\n        raise\n",
        replace="        raise\n",
        killers=(
            f"{_RECYCLED}::test_slot_recycled_before_it_is_verified_is_not_damaged",
        ),
    ),
    Mutant(
        name="batch_judged_by_its_worst",
        why="One block that was evicted keeps those beside it from the tier.",
        file=_SPILL,
        find="            if len(keys) == 1:\n",
        replace="            if keys:\n",
        killers=(f"{_RECYCLED}::test_bad_blocks_of_a_batch_cost_no_other",),
    ),
    Mutant(
        name="batch_taken_back_whole",
        why="One slot that is recycled costs a tier all that was put beside it.",
        file=_SPILL,
        find="            return lease.recycled()\n",
        replace="            return ReadLease.recycled(lease)\n",
        killers=(
            f"{_RECYCLED}::test_only_the_recycled_block_of_a_batch_is_taken_back",
        ),
    ),
    Mutant(
        name="fetched_bytes_hashed_twice",
        why="Large blocks come from a tier half as fast as they could.",
        file="ucm/stores/slab/_leases.py",
        find="        return self._sealed(range(start, stop))\n",
        replace="        return super().seals(start, stop)\n",
        killers=(
            "tests/agent/test_fetch_few.py::TestFewRequests::test_bytes_are_hashed_once_on_their_way",
        ),
    ),
    Mutant(
        name="backlog_unbounded",
        why="A slow disk makes the agent grow until the machine has no memory.",
        file="ucm/agent/backlog.py",
        find="return len(self._tenant_of) >= self._most\n",
        replace="return False\n",
        killers=(f"{_SPILLS}::test_backlog_is_bounded_and_conserved",),
    ),
    Mutant(
        name="stopped_spill_uncounted",
        why="Blocks vanish from the count when an agent stops.",
        file=_SPILL,
        find="            if left:\n",
        replace="            if not left:\n",
        killers=(f"{_SPILLS}::test_stop_amid_a_call_is_counted",),
    ),
    Mutant(
        name="backlog_thrown_at_a_dead_tier",
        why="A restart of a server loses all that waited for it.",
        file=_SPILL,
        find="            if (wait_s := self._backend.wait_s) > 0 or is_vain:\n",
        replace="            if (wait_s := self._backend.wait_s) < 0:\n",
        killers=(f"{_SPILLS}::test_backlog_waits_for_a_backend_that_is_down",),
    ),
    # What is fetched.
    Mutant(
        name="fetched_bytes_believed",
        why="A damaged disk writes into answers.",
        file="ucm/agent/landing.py",
        find="seals[at] == answer.checksum",
        replace="True",
        killers=(f"{_TROUBLE}::test_damaged_bytes_are_never_seen", _RANDOM),
    ),
    Mutant(
        name="unknown_taken_for_absent",
        why="A server that is down looks as if it had nothing.",
        file=_FLIGHTS,
        find="                or (looks.is_unknown(each.key) and Reason.UNAVAILABLE)\n",
        replace="",
        killers=(f"{_TROUBLE}::test_could_not_ask_is_no_miss",),
    ),
    Mutant(
        name="each_want_its_own_flight",
        why="Requests that share a prefix fetch it as often as there are of them.",
        file="ucm/agent/register.py",
        find="found = list(filter(None, map(self.by_key.get, names)))",
        replace="found: list[Flight] = []",
        killers=(f"{_FETCHES}::test_block_that_several_want_is_fetched_once",),
    ),
    Mutant(
        name="fetched_blocks_unpinned",
        why="Under load what was fetched is evicted before it is loaded, again and again.",
        file=_WANTS,
        find="until = time.monotonic_ns() + int(hold_s * 1e9)",
        replace="until = time.monotonic_ns()",
        killers=(f"{_PINS}::test_fetched_blocks_outlive_newer_saves",),
    ),
    Mutant(
        name="found_blocks_unpinned",
        why="The head of a prefix is evicted for its tail.",
        file=_WANTS,
        find="        self.store.touch(keys, self.uses(len(keys), hold_s))\n",
        replace="",
        killers=(f"{_PINS}::test_blocks_that_were_there_are_pinned_as_well",),
    ),
    Mutant(
        name="late_want_keeps_its_turn",
        why="Slots are taken for requests that have long gone on.",
        file=_FLIGHTS,
        find="            self._budget.release(count, place.tenant)\n",
        replace="",
        killers=(
            f"{_BUDGET}::test_slots_granted_as_the_last_want_goes_are_given_back",
        ),
    ),
    Mutant(
        name="hanging_calls_give_slots_back",
        why="A drive that hangs takes the whole slab, want by want, and saves get no slot.",
        file=_FLIGHTS,
        find="            try:\n                while any(of_tier):\n",
        replace="            want.num_slots, count = want.num_slots + count, 0\n            try:\n                while any(of_tier):\n",
        killers=(f"{_BUDGET}::test_calls_that_hang_keep_their_slots",),
    ),
    Mutant(
        name="budget_out_of_turn",
        why="Small wants starve a large one for ever.",
        file="ucm/agent/budget.py",
        find="        place.arrival, place.count = next(self._arrivals), count\n",
        replace="        if count:\n            self.left -= count\n            return\n",
        killers=(f"{_BUDGET}::test_wants_have_their_slots_whole_and_in_turn",),
    ),
    # A tier that takes nothing.
    Mutant(
        name="tier_that_takes_nothing_not_read",
        why="A server that is read-only costs all hits of what it has.",
        file=_WRAP,
        find="        if not is_write:\n            told = await self._reads",
        replace="        if True:\n            told = await self._reads",
        killers=(f"{_CIRCUIT}::test_backend_that_takes_nothing_is_read",),
    ),
    Mutant(
        name="backlog_burnt_by_tries",
        why="A tier that takes nothing for an hour loses its backlog, batch by batch.",
        file=_SPILL,
        find="        if unanswered and not self.is_served:",
        replace="        if False:",
        killers=(
            f"{_SPILLS}::test_tier_that_takes_nothing_is_read_and_tried_with_a_block",
        ),
    ),
    Mutant(
        name="slab_listed_faster_than_spilled",
        why="Behind a restart most of a slab is dropped, and is in no tier for good.",
        file="ucm/agent/core.py",
        find="while num_begun == 1 and is_patient and any",
        replace="while False and any",
        killers=(
            f"{_SPILLS}::test_slab_larger_than_the_backlog_is_spilled_whole_behind_a_restart",
        ),
    ),
    Mutant(
        name="drive_that_refuses_writes_emptied",
        why="A drive that takes no blocks for a minute parts with all that it has.",
        file=_DISK,
        find="if is_as_before and slot.previous[0]:",
        replace="if False:",
        killers=(f"{_DRIVE}::test_drive_that_takes_single_pages_only_loses_nothing",),
    ),
    Mutant(
        name="bad_sector_silences_a_drive",
        why="One sector that cannot be read has nobody ask the drive for anything.",
        file=_DISK,
        find="        if drive.answers():\n            return [GARBAGE]\n",
        replace="",
        killers=(
            "tests/backends/test_disk_runs.py::TestTogether::test_bad_spot_harms_its_own_block_only",
        ),
    ),
    Mutant(
        name="drive_that_is_gone_answers_from_memory",
        why="A drive that is away for a minute has its blocks called garbage, and deleted.",
        file="ucm/backends/disk/_drive.py",
        find="                os.posix_fadvise(self._fd, place, PAGE, os.POSIX_FADV_DONTNEED)\n",
        replace="",
        killers=(f"{_DRIVE}::test_memory_of_the_system_is_no_answer_of_a_drive",),
    ),
    # Which hit is brought.
    Mutant(
        name="windows_of_the_longest_hit",
        why="A model with windows never hits what a tier has of another prompt.",
        file="ucm/integration/vllm/tiers.py",
        find="if self._matcher.is_all_full or self.elsewhere.ranks:",
        replace="if True:",
        killers=(
            f"{_OF_DOOR}::TestHits::test_blocks_of_all_hits_are_asked_for_where_groups_have_windows",
        ),
    ),
    Mutant(
        name="hit_behind_a_hole",
        why="A hit is chosen of which a block is nowhere: nothing of it is of use.",
        file=_HITS,
        find="            is_out[self._shortest[lacked] :] = True\n",
        replace="",
        killers=(
            f"{_OF_HITS}::test_longest_hit_of_which_all_is_there_is_chosen",
            f"{_FETCH_HITS}::test_half_of_every_hit_is_nothing",
        ),
    ),
    Mutant(
        name="hit_without_its_windows",
        why="A hit is brought whose windows are nowhere.",
        file=_HITS,
        find="                is_out |= self._counts(gone) > 0\n",
        replace="                pass\n",
        killers=(f"{_OF_HITS}::test_longest_hit_of_which_all_is_there_is_chosen",),
    ),
    Mutant(
        name="hit_larger_than_its_room",
        why="Blocks are brought that are no hit, as there are no slots for its end.",
        file=_HITS,
        find="self._counts(absent) > most",
        replace="self._counts(absent) < 0",
        killers=(f"{_FETCH_HITS}::test_hit_has_no_more_blocks_than_there_are_slots",),
    ),
    Mutant(
        name="looks_that_do_not_double",
        why="A model with states asks a tier a thousand times, one block each.",
        file=_HITS,
        find="            more = min(max(_MORE, 2 * more), _MOST)\n",
        replace="            more = 0\n",
        killers=(
            f"{_OF_HITS}::test_states_that_are_far_between_are_found_with_few_looks",
        ),
    ),
    Mutant(
        name="beginning_of_a_hit_brought",
        why="Half of a hit is fetched, and computed all the same.",
        file=_FLIGHTS,
        find="        if is_whole and kept < most:",
        replace="        if False:",
        killers=(
            f"{_FETCH_HITS}::test_hit_of_which_a_part_would_come_late_is_computed_whole",
        ),
    ),
    # What engines ask, and are told.
)
