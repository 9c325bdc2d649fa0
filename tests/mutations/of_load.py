# SPDX-License-Identifier: Apache-2.0
"""Mutants of loads that are verified beside their copy."""

from tests.mutations.mutant import Mutant

__all__ = ["LOAD"]

_LOAD = "ucm/pipeline/load.py"
_GUARD = "ucm/pipeline/guard.py"
_DEVICE = "ucm/devices/accelerator.py"
_CPU = "ucm/devices/cpu.py"
_TESTS = "tests/pipeline/test_load.py"
_PIECES = f"{_TESTS}::TestPieces"
_BESIDE = f"{_TESTS}::TestBeside"
_PUBLISH = f"{_TESTS}::TestPublish"
_CORRUPT = f"{_PIECES}::test_corrupt_block_anywhere_fails_the_load_and_leaves_zeros"
_BEHIND = f"{_BESIDE}::test_corrupt_load_goes_back_behind_its_copy_and_its_zeros"
_RECYCLED = f"{_PUBLISH}::test_recycled_slot_leaves_zeros"
_ASYNC = "tests/pipeline/test_async_device.py"
_VERIFYING = f"{_ASYNC}::TestVerifying"
_EARLY = "tests/pipeline/test_load_verified.py::TestPublishVerified"
_SEVERAL = "tests/pipeline/test_workers.py::TestSeveral"
_TORN = f"{_BESIDE}::test_copy_that_was_torn_is_zeroed_when_it_is_over"

LOAD = (
    Mutant(
        name="slots_rechecked_before_the_search_for_damage",
        why="A block that is stored anew during the search is forgotten as damaged.",
        file=_LOAD,
        find="    corrupt = []\n    for position, key",
        replace="    corrupt = []\n    lease.recheck()\n    lease.recheck = int\n"
        "    for position, key",
        killers=(
            (
                "tests/pipeline/test_load_verified.py::"
                "test_slot_recycled_under_the_search_for_damage_is_no_corruption"
            ),
        ),
    ),
    Mutant(
        name="piece_unverified",
        why="The last piece of a load is never looked at, and may be damaged.",
        file=_LOAD,
        find="            _verify(self._store, lease, at, stop)",
        replace="            if stop < num_blocks:\n                _verify(self._store, lease, at, stop)",
        killers=(_CORRUPT,),
    ),
    Mutant(
        name="published_unverified",
        why="A copy ended well, and damaged bytes become the model's context.",
        file=_LOAD,
        find=(
            "        if given.failure is not None:\n            raise given.failure\n"
        ),
        replace="",
        killers=(_BEHIND,),
    ),
    Mutant(
        name="damaged_copy_counts_as_whole",
        why="A row that does not verify is told as there, and a layer reads it.",
        file=_LOAD,
        find="        if given.failure is None and not given.has_failed:\n            copy_over",
        replace="        if True:\n            copy_over",
        killers=(f"{_BESIDE}::test_damaged_copy_is_not_told_as_there",),
    ),
    Mutant(
        name="verified_before_the_copy",
        why="A load takes the sum of verifying and copying, not the longer of the two.",
        file=_LOAD,
        find="            self._copy_at_once(given, is_asked=is_asked)",
        replace="            _verify(self._store, lease, 0, len(lease.keys))\n            self._copy_at_once(given, is_asked=is_asked)",
        killers=(
            f"{_BESIDE}::test_copy_is_submitted_before_checksums_are_computed",
            f"{_TESTS}::TestTime::test_load_takes_the_longer_of_verifying_and_copying",
            f"{_VERIFYING}::test_all_copies_are_submitted_before_any_is_verified",
        ),
    ),
    Mutant(
        name="verified_before_the_first_piece",
        why="Bytes have left the CPU's cache when they are copied.",
        file=_LOAD,
        find="step = max(1, _PIECE_BYTES // lease.slots.block_bytes)",
        replace="step = num_blocks",
        killers=(f"{_PIECES}::test_each_piece_is_copied_as_soon_as_it_is_verified",),
    ),
    Mutant(
        name="held_between_pieces",
        why="A store that hangs in the middle of a load holds the engine's blocks.",
        file=_LOAD,
        find="            if stop < num_blocks:\n",
        replace="            if False:\n",
        killers=(
            f"{_PIECES}::test_blocks_taken_back_between_two_pieces_are_zero_and_stay_so",
        ),
    ),
    Mutant(
        name="not_soiled",
        why="Garbage of a load that failed stays in blocks that are computed into.",
        file=_LOAD,
        find="            guard.soil(functools",
        replace="            str(functools",
        killers=(
            _RECYCLED,
            _TORN,
            f"{_PUBLISH}::test_blocks_go_back_with_their_publication_only",
        ),
    ),
    Mutant(
        name="released_with_the_copy",
        why="A load's blocks are another's while its slots are not looked at again.",
        file=_GUARD,
        find="if not self.torn and (not last or self._clear is not None):",
        replace="if not self.torn and not last:",
        killers=(f"{_PUBLISH}::test_blocks_go_back_with_their_publication_only",),
    ),
    Mutant(
        name="released_before_the_zeros",
        why="Zeros land in blocks that the engine computes into by now.",
        file=_GUARD,
        find="        fence.call_when_over(lambda: self._cleared(fence))\n",
        replace="        self._on_release()\n",
        killers=(_BEHIND, _TORN),
    ),
    Mutant(
        name="zeros_not_waited_for",
        why="Blocks count as released that a device which failed still writes.",
        file=_GUARD,
        find="            self._on_unclean()  # what is in them",
        replace="            self._on_release()  # what is in them",
        killers=(
            (
                f"{_TESTS}::TestBlockGuard::"
                "test_blocks_that_cannot_be_zeroed_are_never_released"
            ),
        ),
    ),
    Mutant(
        name="unclean_blocks_untold",
        why="A request waits for ever, and nobody is told that the device fails.",
        file=_GUARD,
        find="            self._on_unclean()  # what is in them",
        replace="            pass  # what is in them",
        killers=(
            (
                f"{_TESTS}::TestBlockGuard::"
                "test_runtime_fails_whose_device_does_not_zero_blocks"
            ),
        ),
    ),
    Mutant(
        name="zeros_waited_for_ever",
        why="A device that never zeroes blocks keeps a request waiting, unnoticed.",
        file="ucm/pipeline/deadlines.py",
        find="        elif guard.is_clearing:\n",
        replace="        elif False:\n",
        killers=(
            (
                "tests/pipeline/test_async_device.py::TestDeadlines::"
                "test_load_whose_zeros_never_come_ends_the_service"
            ),
        ),
    ),
    Mutant(
        name="zeros_not_watched_when_idle",
        why="The same, until the next request comes.",
        file="ucm/pipeline/deadlines.py",
        find="is_open or is_touched",
        replace="is_open",
        killers=(
            (
                "tests/pipeline/test_async_device.py::TestDeadlines::"
                "test_load_whose_zeros_never_come_ends_the_service"
            ),
        ),
    ),
    Mutant(
        name="zeros_that_fail_untold",
        why="The same, where the device fails behind the call.",
        file=_GUARD,
        find="        if not has_passed(fence):\n            self._on_unclean()\n",
        replace="        if not has_passed(fence):\n",
        killers=(
            (
                "tests/pipeline/test_async_device.py::TestDeadlines::"
                "test_load_whose_blocks_are_not_zeroed_ends_the_service"
            ),
        ),
    ),
    Mutant(
        name="zeroed_under_the_copy",
        why="The device writes garbage over the zeros, and nobody sees it.",
        file=_GUARD,
        find="                self.torn = self.torn or reason\n"
        "                return False\n",
        replace="                self.torn = self.torn or reason\n"
        "                if self._clear is None:\n"
        "                    return False\n",
        killers=(_TORN,),
    ),
    Mutant(
        name="published_though_taken_back",
        why="A load is told as done whose blocks are zero, or somebody else's.",
        file=_GUARD,
        find="            if self.torn or self.revoked or self._copies:\n",
        replace="            if self._copies:\n",
        killers=(
            f"{_PUBLISH}::test_blocks_taken_back_under_the_last_look_are_not_published",
        ),
    ),
    Mutant(
        name="memory_gone_under_zeros",
        why="The device writes zeros into memory that is somebody else's by now.",
        file=_DEVICE,
        find="            return self._cleared.wait(_CLOSE_TIMEOUT_S)\n",
        replace="            return True\n",
        killers=(
            (
                "tests/devices/test_accelerator_copies.py::TestClear::"
                "test_memory_goes_away_behind_its_zeros"
            ),
        ),
    ),
    Mutant(
        name="early_publication_unverified",
        why="A damaged block is given to a request because its copy ended first.",
        file=_LOAD,
        find=".tells_digests or item.failure is not None:",
        replace=".tells_digests:",
        killers=(f"{_EARLY}::test_damaged_copy_is_not_published_by_who_verified",),
    ),
    Mutant(
        name="early_publication_under_the_copy",
        why="A request reads blocks that the device still writes.",
        file=_LOAD,
        find="        return has_passed(copy_of(item))\n",
        replace="        return True\n",
        killers=(f"{_EARLY}::test_copy_that_is_over_is_published_by_who_verified",),
    ),
    Mutant(
        name="copy_forgotten_with_its_verifying_thread",
        why="Nobody waits for a copy whose checksums failed to be computed.",
        file="ucm/pipeline/lane.py",
        find="        is_over = item.has_failed and not self._is_awaited(item, at)\n",
        replace="        is_over = item.has_failed\n",
        killers=(
            (
                "tests/pipeline/test_lane.py::TestErrors::"
                "test_copy_of_an_item_that_failed_beside_it_is_waited_for"
            ),
        ),
    ),
    Mutant(
        name="one_thread_verifies",
        why="Checksums of a load take as long as one core needs for all of them.",
        file="ucm/pipeline/pipeline.py",
        find="self._num_verifying if worker == VERIFY_WORKER else 1",
        replace="1",
        killers=(f"{_VERIFYING}::test_tickets_are_verified_side_by_side",),
    ),
    Mutant(
        name="one_thread_stopped",
        why="Threads that share jobs stay behind when the first of them ends.",
        file="ucm/pipeline/workers.py",
        find="        self._jobs.put(None)  # for the next one: it is to begin nothing more\n",
        replace='        if "died" in self._over:\n            self._jobs.put(None)\n',
        killers=(f"{_SEVERAL}::test_jobs_run_on_as_many_threads_at_once",),
    ),
    Mutant(
        name="jobs_behind_the_end_are_lost",
        why="Where the loop has died others miss slots until the engine ends, too.",
        file="ucm/pipeline/workers.py",
        find="""\
                self._over = self._over or f"copy thread {self.name} has ended"
                self._fail_jobs(job)
""",
        replace="""\
                if self._over:
                    self._fail_jobs(job)
                self._jobs.put(None)
""",
        killers=(
            "tests/pipeline/test_workers.py::TestResults::test_no_job_is_lost_behind_the_end",
            (
                "tests/test_layerwise_gaps.py::TestSlots::"
                "test_slots_of_a_copied_row_are_given_back_when_the_loop_dies"
            ),
        ),
    ),
    Mutant(
        name="threads_outlive_a_dead_one",
        why="Where one thread died others wait for jobs for ever, and a close for them.",
        file="ucm/pipeline/workers.py",
        find="        self._jobs.put(None)  # for the next one: it is to begin nothing more\n",
        replace='        if "died" not in self._over:\n            self._jobs.put(None)\n',
        killers=(
            f"{_SEVERAL}::test_death_of_one_ends_the_others_behind_their_own_job",
        ),
    ),
    Mutant(
        name="slot_read_outside_of_the_pool",
        why="A damaged index ends the engine's process.",
        file="ucm/stores/slab/_digests.py",
        find="if count and not 0 <= min(named)",
        replace="if False and not 0 <= min(named)",
        killers=(
            (
                "tests/stores/test_slab_digests.py::TestMany::"
                "test_slot_outside_of_the_pool_is_not_read"
            ),
        ),
    ),
    Mutant(
        name="native_digests_untried",
        why="With another build of xxhash nothing that others saved verifies.",
        file="ucm/stores/slab/_digests.py",
        find="        self._many = library.digests\n        self._check()\n",
        replace="        self._many = library.digests\n",
        killers=(
            (
                "tests/stores/test_slab_digests.py::TestFind::"
                "test_library_that_says_something_else_is_not_used"
            ),
        ),
    ),
    Mutant(
        name="saves_of_an_accelerator_cut_small",
        why="Our threads take four times the engine's interpreter lock for the same bytes.",
        file="ucm/integration/vllm/setup.py",
        find="is_synchronous=not self.has_accelerator",
        replace="is_synchronous=True",
        killers=(
            (
                "tests/integration/vllm/test_setup.py::TestSetup::"
                "test_tickets_of_an_accelerator_carry_four_spans_and_eight"
            ),
        ),
    ),
    Mutant(
        name="loads_of_an_accelerator_cut_large",
        why="A load has tickets of 256 MB: staging has room for one, and one thread looks at it.",
        file="ucm/scheduler/adapter.py",
        find="OpenTransfers(num_ranks, span_blocks, limits.load_spans)",
        replace="OpenTransfers(num_ranks, span_blocks)",
        killers=(
            (
                "tests/scheduler/test_load_orders.py::TestLoadOrders::"
                "test_loads_are_cut_as_the_limits_say"
            ),
        ),
    ),
    Mutant(
        name="loads_cut_like_saves",
        why="A long prompt goes four times as often through all threads.",
        file="ucm/scheduler/transfers.py",
        find="min(self._load_spans * self.limits[group_id], _MAX_SPAN_BLOCKS)",
        replace="self.limits[group_id]",
        killers=(
            (
                "tests/scheduler/test_transfers.py::TestOpenTransfers::"
                "test_load_carries_as_much_as_four_saves"
            ),
        ),
    ),
    Mutant(
        name="seam_of_a_large_batch_lost",
        why="Blocks behind the first few hundred pages are not copied.",
        file="ucm/devices/_pages.py",
        find="            saved = parts[0] if len(parts) == 1 else CopyBatch.joined(parts)\n",
        replace="            saved = parts[0]\n",
        killers=(
            ("tests/devices/test_pages.py::test_span_of_many_pages_is_copied_whole"),
        ),
    ),
    Mutant(
        name="one_table_zeroed",
        why="Rows that are copied one by one keep garbage.",
        file=_CPU,
        find="            table.clear(pages.blocks)\n",
        replace="            table.clear(pages.blocks)\n            break\n",
        killers=(f"{_TESTS}::test_rows_of_a_block_are_zeroed_one_by_one",),
    ),
    Mutant(
        name="library_of_another_release_is_used",
        why="A call with other arguments than it takes writes anywhere.",
        file="ucm/native.py",
        find="        if library.ucm_version() != _VERSION:\n",
        replace="        if False:\n",
        killers=(
            "tests/stores/test_slab_digests.py::TestFind::test_library_of_another_release_is_not_used",
        ),
    ),
)
