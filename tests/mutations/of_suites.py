# SPDX-License-Identifier: Apache-2.0
"""Mutants of the shipped contracts: what is no store, device or backend passes for one; and of refusals."""

from tests.mutations.mutant import Mutant

__all__ = ["SUITES"]

_FENCES = "ucm/testing/fence_contract.py"
_LOANS = "ucm/testing/loan_contract.py"
_STORES = "ucm/testing/store_contract.py"
_WRONG = "tests/testing/test_wrong_ones.py"

SUITES = (
    Mutant(
        name="block_of_more_bits_than_there_are",
        why="A host's mistake is told as one of ours.",
        file="ucm/devices/_paged.py",
        find="except OverflowError as exc:",
        replace="except NotImplementedError as exc:",
        killers=(
            "tests/devices/test_cpu.py::TestCPUDevice::test_an_id_out_of_range_is_refused_before_a_byte_moves",
        ),
    ),
    Mutant(
        name="buffer_in_reverse_unnamed",
        why="Of eighty layers nobody knows which is the wrong one.",
        file="ucm/devices/_buffers.py",
        find="if array.strides[0] < row.page_bytes:",
        replace="if array.strides[0] < 0 < -row.page_bytes:",
        killers=(
            "tests/devices/test_buffers.py::TestRefusals::test_buffer_that_does_not_fit_is_named",
        ),
    ),
    Mutant(
        name="suite_of_deaf_devices",
        why="Blocks of a load that failed never come back to the engine.",
        file=_FENCES,
        find="""\
                assert over.wait(TIMEOUT)
                assert fence.is_done()
                over = Event()
                assert fence.call_when_over(over.set)
                assert over.wait(TIMEOUT)
            assert calls == [False] * 2
""",
        replace="                assert fence.wait(TIMEOUT)\n",
        killers=(f"{_WRONG}::test_device_that_is_none_fails",),
    ),
    Mutant(
        name="suite_of_devices_that_guess",
        why="Each load of such a device fails, or wrong bytes pass for right ones.",
        file=_FENCES,
        find="assert list(fence.digests()) == wanted",
        replace="assert len(fence.digests()) == len(wanted)",
        killers=(f"{_WRONG}::test_device_that_is_none_fails",),
    ),
    Mutant(
        name="suite_of_backends_that_borrow",
        why="What a tier keeps of a block is what its slot in the slab became.",
        file=_LOANS,
        find="slot[:] = bytes(BLOCK)",
        replace="slot[:] = bytes(slot)",
        killers=(f"{_WRONG}::test_backend_that_is_none_fails",),
    ),
    Mutant(
        name="suite_of_seals_of_whatever_comes",
        why="Bytes that were overwritten behind their copy are sealed, and served.",
        file=_STORES,
        find="lease.slots.block(1)[5] ^= 1",
        replace="lease.slots.block(1)[5] ^= 0",
        killers=(f"{_WRONG}::test_store_that_is_none_fails",),
    ),
)
