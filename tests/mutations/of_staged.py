# SPDX-License-Identifier: Apache-2.0
"""Mutants of copies by way of staging memory."""

from tests.mutations.mutant import Mutant

__all__ = ["STAGED"]

_STAGED_COPIES = "ucm/devices/_staged.py"
_SCATTERED = "tests/devices/test_staged_copies.py::TestScatter"
_GAPS = "tests/mutations/test_gaps_devices.py"
_STAGED = "tests/devices/test_staged_copies.py::TestGather"

STAGED = (
    Mutant(
        name="staged_copy_not_quarantined",
        why="Staging memory is lent while the device still reads it.",
        file=_STAGED_COPIES,
        find="        lease.quarantine(fence)\n",
        replace="",
        killers=(
            f"{_STAGED}::test_copy_that_is_given_up_keeps_its_memory_until_its_fence",
            f"{_GAPS}::TestStaging::test_staging_memory_of_a_load_is_kept_until_its_fence",
        ),
    ),
    Mutant(
        name="large_load_not_staged",
        why="A ticket that is larger than the staging memory is always copied slowly.",
        file=_STAGED_COPIES,
        find="        step = max(1, len(self._pool.memory) // _PARTS)\n",
        replace="        step = count\n",
        killers=(f"{_SCATTERED}::test_bytes_reach_the_pages_by_way_of_pinned_memory",),
    ),
    Mutant(
        name="each_part_waits_for_memory",
        why="A load that gets no memory waits once for each of its parts.",
        file=_STAGED_COPIES,
        find=(
            "                    rest = part_of(copy, at, count)\n"
            "                    return self._submit(rest, Direction.TO_DEVICE)\n"
        ),
        replace=(
            "                    fence = self._submit(part, Direction.TO_DEVICE)\n"
            "                    continue\n"
        ),
        killers=(f"{_SCATTERED}::test_parts_that_get_no_memory_in_time_go_straight",),
    ),
    Mutant(
        name="failed_part_frees_those_before_it",
        why="Blocks are given back while the device still writes them.",
        file=_STAGED_COPIES,
        find="                if not at:\n                    raise\n",
        replace="                raise\n",
        killers=(
            f"{_SCATTERED}::test_failure_behind_the_first_part_gives_no_block_back",
        ),
    ),
    Mutant(
        name="part_that_met_no_device_error_frees_those_before_it",
        why="Where memory is short, blocks are given back while the device still writes them.",
        file=_STAGED_COPIES,
        find="except Exception as exc:",
        replace="except DeviceError as exc:",
        killers=(
            f"{_SCATTERED}::test_part_that_is_not_submitted_gives_those_before_it_no_block_back",
        ),
    ),
    Mutant(
        name="copy_behind_which_memory_is_short_given_back",
        why="Where memory is short, blocks and slots are another's while a copy is under way.",
        file="ucm/devices/accelerator.py",
        find="except Exception as exc:",
        replace="except RuntimeError as exc:",
        killers=(
            "tests/devices/test_accelerator_failures.py::TestForGood::test_copy_behind_which_memory_is_short_is_a_fence_that_fails",
        ),
    ),
    Mutant(
        name="zeros_not_pinned",
        why="The loop stands still behind a copy that does not end, and looks at no deadline.",
        file="ucm/devices/accelerator.py",
        find="        is_pinned = address_of(zeros) in self._pinned.pieces and",
        replace="        is_pinned = False and",
        killers=(
            "tests/devices/test_accelerator_copies.py::TestClear::test_zeros_wait_for_no_copy_before_them",
        ),
    ),
    Mutant(
        name="staged_span_refused",
        why="A span larger than the staging memory is never saved.",
        file="ucm/devices/staging.py",
        find="        if count > len(self.memory):\n            return None\n",
        replace="        if count > len(self.memory):\n            raise DeviceError\n",
        killers=(f"{_STAGED}::test_more_than_the_budget_goes_straight_to_the_slots",),
    ),
)
