# SPDX-License-Identifier: Apache-2.0
"""Mutants of what a host's thread finds behind a call, and of who waits beside it."""

from tests.mutations.mutant import Mutant

__all__ = ["VISITS"]

VISITS = (
    Mutant(
        name="first_gpu_opened_by_every_rank",
        why="Each rank of a model takes some hundred MB of the first GPU, which has none left.",
        file="ucm/devices/cuda.py",
        find="        _cuda._maybe_exchange_device(index)",
        replace="        _cuda.set_device(index)",
        killers=(
            "tests/devices/test_cuda_driver.py::TestTorch::test_thread_has_its_own_device_again",
        ),
    ),
    Mutant(
        name="first_npu_opened_by_every_rank",
        why="Each rank of a model takes memory of the first NPU.",
        file="ucm/devices/npu.py",
        find="        visit.prev_idx = index\n        visit.__exit__(None, None, None)\n",
        replace="        self._npu.set_device(max(0, index or 0))\n",
        killers=(
            "tests/devices/test_npu_threads.py::test_thread_has_its_own_device_again_and_none_is_opened",
        ),
    ),
    Mutant(
        name="lease_behind_who_waits_for_the_device",
        why="The engine's thread stands still while another one waits for all there is.",
        file="ucm/devices/_relay.py",
        find="            loans = list(self._held_back)\n        wait()\n",
        replace="            loans = list(self._held_back)\n            wait()\n",
        killers=(
            "tests/devices/test_accelerator_loans.py::TestLoans::test_lease_waits_for_nobody_who_waits_for_the_device",
        ),
    ),
    Mutant(
        name="ended_loans_kept",
        why="Where events are scarce each step leaves a loan in a list, for ever.",
        file="ucm/devices/_relay.py",
        find="if each.state is not Loan.RELEASED",
        replace="if each",
        killers=(
            "tests/devices/test_accelerator_loans.py::TestLoans::test_loan_without_an_event_behind_it_ends_when_all_was_waited_for",
        ),
    ),
    Mutant(
        name="zeros_unpinned_under_a_copy",
        why="A close stands still in the driver, behind a copy that does not end.",
        file="ucm/devices/accelerator.py",
        find="        if not self._await_clear():\n",
        replace="        if self._await_clear():\n",
        killers=(
            "tests/devices/test_accelerator_copies.py::TestClear::test_zeros_that_do_not_end_stay_pinned",
        ),
    ),
    Mutant(
        name="device_of_a_host_lost_as_ours_is_bound",
        why="What a host computes next is on another device, where ours fails just then.",
        file="ucm/devices/accelerator.py",
        find="        try:\n"
        '            if not (is_own and getattr(self._bound, "is_bound", False)):\n'
        "                driver.bind_thread()\n"
        "            self._bound.is_bound = is_own\n",
        replace="        driver.bind_thread()\n"
        "        self._bound.is_bound = is_own\n        try:\n",
        killers=(
            "tests/devices/test_accelerator_visits.py::test_threads_own_device_is_there_again_where_it_was_bound_in_part",
        ),
    ),
    Mutant(
        name="npu_streams_told_apart_by_their_hash",
        why="A look at an event stops the engine until torch_npu's queue is empty.",
        file="ucm/devices/npu.py",
        find="        number: int = stream.stream_id\n",
        replace="        number = hash(stream)\n",
        killers=("tests/devices/test_npu_threads.py::test_fence_waits_for_no_queue",),
    ),
)
