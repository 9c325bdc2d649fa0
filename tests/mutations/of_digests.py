# SPDX-License-Identifier: Apache-2.0
"""Mutants of checksums that the device computes."""

from tests.mutations.mutant import Mutant

__all__ = ["DIGESTS"]

_DEVICE = "ucm/devices/accelerator.py"
_DIGESTS = "ucm/devices/digests.py"
_SAVE = "ucm/pipeline/save.py"
_LOAD = "ucm/pipeline/load.py"
_TESTS = "tests/devices/test_digests.py"
_TELLS = f"{_TESTS}::test_copies_tell_the_checksums_of_what_the_device_has"
_HOST = f"{_TESTS}::test_the_host_computes_what_the_device_cannot"
_ROUND = f"{_TESTS}::test_memory_for_digests_goes_round"
_WRONG = f"{_TESTS}::test_a_device_whose_checksums_are_wrong_is_not_asked"
_PIPELINE = "tests/pipeline/test_digests.py"
_DAMAGED = f"{_PIPELINE}::test_what_the_device_finds_damaged_is_computed"
_ALONE = (
    f"{_PIPELINE}::test_a_device_that_is_alone_with_its_checksums_is_not_asked_again"
)
_NONE = f"{_PIPELINE}::test_the_host_computes_no_checksum_of_what_the_device_has_read"
_LEASES = "ucm/stores/slab/_leases.py"
_SLAB = "tests/stores/test_slab.py::TestSlabStore"
_KERNEL = "tests/devices/test_digest_kernel.py"
_AT_ONCE = "tests/pipeline/test_load_verified.py::TestAtOnce"
_NATIVE_LOADS = "tests/devices/test_native_loads.py"
_LOADS = "ucm/devices/_loads.py"
_DOUBTS = f"{_PIPELINE}::test_a_doubt_in_each_of_two_groups_is_none_in_the_device"
_LIES = f"{_PIPELINE}::test_a_device_that_lies_at_once_seals_nothing"
_LOST = f"{_PIPELINE}::test_a_lost_block_costs_the_others_no_checksum"

DIGESTS = (
    Mutant(
        name="told_checksums_not_compared",
        why="What arrived damaged on a GPU becomes the model's context.",
        file=_LOAD,
        find="        if copy_of(given).tells_digests:\n            self._compare",
        replace="        if False:\n            self._compare",
        killers=(_DAMAGED,),
    ),
    Mutant(
        name="host_verifies_beside_the_device",
        why="A slow host's cores are the limit of loads again.",
        file=_LOAD,
        find="        if item.is_partial or copy_of(item).tells_digests:\n            return False",
        replace="        if item.is_partial:\n            return False",
        killers=(_NONE,),
    ),
    Mutant(
        name="lying_device_is_believed",
        why="A device that computes wrong checksums makes every load fail, for ever.",
        file=_LOAD,
        find="            self._device.tells_digests = False\n",
        replace="",
        killers=(_ALONE,),
    ),
    Mutant(
        name="damage_is_the_device_s_fault",
        why="One damaged block has the host compute all checksums from then on.",
        file=_LOAD,
        find="            if found == list(digests):\n",
        replace="            if False:\n",
        killers=(_DAMAGED,),
    ),
    Mutant(
        name="saves_sealed_by_the_host",
        why="A slow host's cores are the limit of saves again.",
        file=_SAVE,
        find="fence.digests() if fence.tells_digests else ()",
        replace="()",
        killers=(_NONE,),
    ),
    Mutant(
        name="seeds_of_other_blocks",
        why="A save that loses a block ends the thread that seals.",
        file=_SAVE,
        find="is_all = not given.is_partial and len(block_ids) == len(lease.keys)",
        replace="is_all = not given.is_partial",
        killers=(f"{_LOST}[before its copy]",),
    ),
    Mutant(
        name="checksums_before_their_copy",
        why="A load is compared with what its blocks had before.",
        file=_DEVICE,
        find="""\
                self._driver.copy(batch, direction, lane.stream, is_pinned=is_pinned)
                told = None if digest is None else digest(lane.stream)
""",
        replace="""\
                told = None if digest is None else digest(lane.stream)
                self._driver.copy(batch, direction, lane.stream, is_pinned=is_pinned)
""",
        killers=(_TELLS,),
    ),
    Mutant(
        name="checksums_unchecked",
        why="A device whose checksums are wrong seals saves that no load takes.",
        file=_DIGESTS,
        find="    check(digester, stream, driver.synchronize)\n",
        replace="",
        killers=(f"{_WRONG}[WrongDriver-wrong]",),
    ),
    Mutant(
        name="old_tables_kept",
        why="Checksums are of memory that the engine has given up.",
        file=_DEVICE,
        find="        super().unregister()\n        if self._digests is not None:\n",
        replace="        super().unregister()\n        if False:\n",
        killers=(f"{_TESTS}::test_engine_memory_that_comes_anew_is_read_where_it_is",),
    ),
    Mutant(
        name="digests_read_late",
        why="Who looks late finds the checksums of another copy.",
        file=_DIGESTS,
        find="                self._read()\n",
        replace="                self._give_back(self._memory)\n",
        killers=(_ROUND,),
    ),
    Mutant(
        name="digests_never_given_back",
        why="After sixteen copies that nobody looked at the host computes all again.",
        file=_DIGESTS,
        find="                self._read()\n",
        replace="                pass\n",
        killers=(_ROUND,),
    ),
    Mutant(
        name="rows_taken_for_blocks",
        why="A layer's copy is compared with the checksum of whole blocks.",
        file=_DIGESTS,
        find="or table is None or not copy.is_whole:",
        replace="or table is None:",
        killers=(f"{_HOST}[rows]",),
    ),
    Mutant(
        name="odd_pages_cut",
        why="Checksums leave out the end of each page.",
        file=_DIGESTS,
        find="if sizes.any() or (",
        replace="if (",
        killers=(f"{_HOST}[odd]",),
    ),
    Mutant(
        name="too_many_blocks",
        why="A copy of many small blocks raises.",
        file=_DIGESTS,
        find="        if count > _MOST_BLOCKS:\n            return None\n",
        replace="",
        killers=(f"{_HOST}[too many]",),
    ),
    Mutant(
        name="abandoned_memory_freed",
        why="A kernel that was given up writes into memory of somebody else.",
        file=_DIGESTS,
        find="        if len(self._free) < _NUM_JOBS:\n",
        replace="        if False:\n",
        killers=(f"{_TESTS}::test_memory_that_may_be_written_still_stays[True]",),
    ),
    Mutant(
        name="told_checksums_of_a_slab_not_compared",
        why="What arrived damaged on a GPU from a slab becomes the model's context.",
        file=_LEASES,
        find="        self._compare(range(start, stop), digests)\n",
        replace="",
        killers=(f"{_SLAB}::test_checksums_that_are_told_are_compared",),
    ),
    Mutant(
        name="told_checksums_of_other_sizes",
        why="A block of another size is read as if it were one of this.",
        file=_LEASES,
        find="""\
        stop = start + len(digests)
        self._check_sizes(start, stop)
""",
        replace="        stop = start + len(digests)\n",
        killers=(f"{_SLAB}::test_block_of_another_size_is_corrupt",),
    ),
    Mutant(
        name="early_publication_uncompared",
        why="A load whose copy ends early is published without a look at its checksums.",
        file=_LOAD,
        find="        if item.is_partial or copy_of(item).tells_digests or item",
        replace="        if item.is_partial or item",
        killers=(
            (
                "tests/pipeline/test_load_verified.py::TestPublishVerified::"
                "test_what_the_device_compares_is_not_published_before"
            ),
        ),
    ),
    Mutant(
        name="digests_before_their_copy_has_ended",
        why="Memory is given back while a kernel writes it, and zeros are told.",
        file=_DIGESTS,
        find="        if not self._fence.is_done():\n            raise",
        replace="        if False:\n            raise",
        killers=(_ROUND,),
    ),
    Mutant(
        name="no_event_no_checksums",
        why="Sixteen times without an event, and the host computes all again.",
        file=_DEVICE,
        find="return fence if told is None else told(fence)",
        replace="return told(fence) if told and not isinstance(fence, DoneFence) else fence",
        killers=(f"{_TESTS}::test_copies_without_an_event_tell_theirs_too",),
    ),
    Mutant(
        name="chunks_anywhere",
        why="A kernel that reads eight bytes at no multiple of eight ends the context.",
        file=_DIGESTS,
        find="if sizes.any() or (pages.starts % _WORD_BYTES + pages.strides % _WORD_BYTES).any():",
        replace="if sizes.any():",
        killers=(f"{_HOST}[unaligned]",),
    ),
    Mutant(
        name="checked_by_a_short_block",
        why="A kernel that is wrong behind the first chunks seals what no load takes.",
        file=_DIGESTS,
        find="num_chunks, seeds = 67,",
        replace="num_chunks, seeds = 1,",
        killers=(f"{_WRONG}[ShortDriver-wrong]",),
    ),
    Mutant(
        name="every_processor_for_checksums",
        why="A forward pass stands behind the checksums of a large load.",
        file="ucm/devices/_cuda_digester.py",
        find="groups = min(count, _MOST_GROUPS)",
        replace="groups = count",
        killers=(f"{_KERNEL}::TestCalls::test_many_blocks_take_turns",),
    ),
    Mutant(
        name="kernel_loaded_into_a_graph",
        why="A graph that the engine records is lost when a KV cache is registered.",
        file="ucm/devices/cuda.py",
        find="""\
        with self._library.apart_from_graphs():
            return CudaDigester""",
        replace="""\
        if True:
            return CudaDigester""",
        killers=(f"{_KERNEL}::TestCalls::test_the_kernel_is_loaded_apart_from_graphs",),
    ),
    Mutant(
        name="device_unproven",
        why="A kernel that reads half of each block seals what was never looked at.",
        file=_SAVE,
        find="        if digests[0] == wanted:\n",
        replace="        if True:\n",
        killers=(_LIES,),
    ),
    Mutant(
        name="doubts_forgotten",
        why="A device that lies is asked, and answered by the host, for ever.",
        file=_SAVE,
        find="        self._doubted.add(group_id)\n",
        replace="",
        killers=(_LIES,),
    ),
    Mutant(
        name="too_few_checksums_compared",
        why="Blocks of which a device tells nothing are published as they came.",
        file=_LOAD,
        find="lease.verify_with(0, aligned(digests, lease.keys))",
        replace="lease.verify_with(0, digests)",
        killers=(
            (
                "tests/pipeline/test_load_verified.py::TestPublishVerified::"
                "test_what_the_device_compares_is_not_published_before"
            ),
        ),
    ),
    Mutant(
        name="torn_saves_are_doubts",
        why="Two saves that the engine overwrites have the host compute all checksums.",
        file=_SAVE,
        find="        if guard.torn or guard.lost:  #",
        replace="        if False:  #",
        killers=(_DOUBTS,),
    ),
    Mutant(
        name="refused_launch_fails_the_device",
        why="A driver that does not launch the kernel ends saves and loads for good.",
        file=_DIGESTS,
        find="    except RuntimeError as exc:  # one",
        replace="    except ZeroDivisionError as exc:  # one",
        killers=(
            f"{_KERNEL}::TestCalls::test_a_first_launch_that_is_refused_is_no_failure",
        ),
    ),
    Mutant(
        name="silent_change_to_the_host",
        why="Loads take twice as long from one day on, and nobody sees why.",
        file="ucm/pipeline/pipeline.py",
        find="            self.recorder.left_checksums(self._device)\n",
        replace="",
        killers=(_ALONE, _LIES),
    ),
    Mutant(
        name="untold_load_is_published_unseen",
        why="A device may tell no checksums: what is damaged becomes the model's context.",
        file=_LOAD,
        find="        if is_asked and not fence.tells_digests:\n",
        replace="        if False:\n",
        killers=(f"{_AT_ONCE}::test_what_a_device_does_not_tell_is_verified",),
    ),
    Mutant(
        name="known_blocks_are_digested_again",
        why="`store.verify: once` costs as much as always.",
        file=_LOAD,
        find="is_asked and not lease.skips_verified",
        replace="is_asked",
        killers=(f"{_AT_ONCE}::test_what_was_verified_before_is_not_digested_again",),
    ),
    Mutant(
        name="loads_have_no_helpers",
        why="An engine that computes on all its CPUs waits for one of them.",
        file="ucm/pipeline/pipeline.py",
        find="            device.hash_on(num_hashing)\n",
        replace="            pass\n",
        killers=(
            (
                "tests/pipeline/test_load_verified.py::"
                "test_checksums_of_saves_take_further_threads_beside_a_device_only"
            ),
        ),
    ),
    Mutant(
        name="saves_are_held_for_their_checksums",
        why="Blocks of an engine on the CPU go back later.",
        file="ucm/pipeline/save.py",
        find="            if is_all and is_beside and asks",
        replace="            if is_all and asks",
        killers=(
            f"{_PIPELINE}::test_a_device_that_copies_at_once_is_asked_for_none_of_a_save",
        ),
    ),
    Mutant(
        name="long_loads_keep_the_lock",
        why="An engine's thread waits for milliseconds.",
        file=_LOADS,
        find="is_brief = count * slots.block_bytes <= KEPT_BYTES",
        replace="is_brief = True",
        killers=(f"{_NATIVE_LOADS}::test_only_a_brief_load_keeps_the_lock",),
    ),
    Mutant(
        name="some_rows_are_told_as_a_block",
        why="Pages of rows that nobody asked for are overwritten.",
        file="ucm/devices/cpu.py",
        find="copy.seeds and copy.is_whole and",
        replace="copy.seeds and",
        killers=(f"{_NATIVE_LOADS}::TestLoads::test_some_rows_have_no_checksum",),
    ),
    Mutant(
        name="neighbours_overrun",
        why="Pages that do not follow each other are copied as one.",
        file="ucm/native.c",
        find="parts->starts[at] + block * parts->strides[at] == page + nbytes)",
        replace="nbytes)",
        killers=(
            (
                f"{_NATIVE_LOADS}::TestLoads::"
                "test_all_bytes_arrive_and_their_checksums_are_told"
            ),
        ),
    ),
    Mutant(
        name="loads_are_not_tried_before",
        why="With another build of xxhash every load fails.",
        file=_LOADS,
        find="        self._check()\n",
        replace="",
        killers=(
            f"{_NATIVE_LOADS}::test_a_library_that_says_something_else_is_not_used",
        ),
    ),
    Mutant(
        name="loads_stay_on_one_thread",
        why="A prompt waits for one core while all others stand still.",
        file="ucm/devices/cpu.py",
        find="        self._most_hashing = most_threads\n",
        replace="        del most_threads\n",
        killers=(
            f"{_NATIVE_LOADS}::test_a_load_has_the_threads_that_its_device_was_given",
        ),
    ),
    Mutant(
        name="half_the_cpus_wait_for_a_load",
        why="An engine that computes on all its CPUs waits for some of them.",
        file="ucm/runtime.py",
        find="share=1 if device.is_synchronous else 2",
        replace="share=2",
        killers=(
            (
                "tests/pipeline/test_load_verified.py::"
                "test_loads_on_the_cpu_have_all_cpus_and_checksums_beside_a_device_half"
            ),
        ),
    ),
)
