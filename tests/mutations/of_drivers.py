# SPDX-License-Identifier: Apache-2.0
"""Mutants of the drivers: what CUDA and CANN are asked for, and on which CPUs."""

from tests.mutations.mutant import Mutant

__all__ = ["DRIVERS"]

_LIBCUDA = "ucm/devices/_libcuda.py"
_CUDA = "ucm/devices/cuda.py"
_NPU = "ucm/devices/npu.py"
_AFFINITY = "ucm/affinity.py"
_BATCHES = "tests/devices/test_libcuda.py::TestBatches"
_SINGLES = "tests/devices/test_libcuda.py::TestSingleCopies"
_PINNING = "tests/devices/test_libcuda.py::TestPinning"
_TORCH = "tests/devices/test_cuda_driver.py::TestTorch"
_OF_CUDA = "tests/devices/test_cuda_driver.py::TestEvents"
_OF_NPU = "tests/devices/test_npu_driver.py::TestEventsAndStreams"
_COPY = "tests/devices/test_npu_driver.py::TestCopy"
_PIN = "tests/devices/test_npu_driver.py::TestPin"
_PLAN = "tests/test_affinity.py::TestPlan"
_BINDING = "tests/test_affinity.py::TestBinding"
_NO_THREAD_STAYS = "tests/test_affinity.py::TestThisMachine::test_no_thread_of_ours_stays_on_the_one_cpu_of_who_starts_it"

DRIVERS = (
    # CUDA's batches.
    Mutant(
        name="cuda_reads_pages_any_time",
        why="A save reads blocks before the engine's kernels have written them.",
        file=_LIBCUDA,
        find="Direction.TO_HOST: np.array([_READ_IN_STREAM_ORDER,",
        replace="Direction.TO_HOST: np.array([_READ_ANY_TIME,",
        killers=(f"{_BATCHES}::test_pinned_copies_are_one_call_with_all_of_them",),
    ),
    Mutant(
        name="cuda_batch_too_large",
        why="Drivers of 2026 crash, and the engine with them.",
        file=_LIBCUDA,
        find="_MOST_COPIES = 128",
        replace="_MOST_COPIES = 50000",
        killers=(f"{_BATCHES}::test_many_copies_are_few_calls",),
    ),
    Mutant(
        name="cuda_first_copies_again",
        why="Behind the first few thousand pages nothing of a span is copied.",
        file=_LIBCUDA,
        find="address + start * 8 for",
        replace="address + start * 0 for",
        killers=(f"{_BATCHES}::test_many_copies_are_few_calls",),
    ),
    Mutant(
        name="cuda_last_copy_left_out",
        why="The last page of each call is never copied, and stored as good.",
        file=_LIBCUDA,
        find="count = min(_MOST_COPIES, len(batch) - start)",
        replace="count = min(_MOST_COPIES, len(batch) - start - 1)",
        killers=(f"{_BATCHES}::test_many_copies_are_few_calls",),
    ),
    Mutant(
        name="cuda_sides_swapped",
        why="Saves overwrite the engine's blocks, and loads the store's.",
        file=_LIBCUDA,
        find="(batch.targets, batch.sources, batch.nbytes)",
        replace="(batch.sources, batch.targets, batch.nbytes)",
        killers=(f"{_BATCHES}::test_pinned_copies_are_one_call_with_all_of_them",),
    ),
    Mutant(
        name="cuda_lists_with_gaps",
        why="The driver reads every second address as the next one.",
        file=_LIBCUDA,
        find="np.ascontiguousarray(each, np.int64)",
        replace="np.asarray(each, np.int64)",
        killers=(f"{_BATCHES}::test_arrays_with_gaps_are_passed_without_them",),
    ),
    Mutant(
        name="cuda_refusal_ignored",
        why="Blocks that were never copied are stored as good.",
        file=_LIBCUDA,
        find="        if code:\n            start = begun",
        replace="        if False:\n            start = begun",
        killers=(
            f"{_BATCHES}::test_refused_batch_names_the_error_and_what_is_known_of_the_copy",
        ),
    ),
    Mutant(
        name="cuda_wrong_parameters",
        why="On drivers before 13.0 every batch is called with too few parameters.",
        file=_LIBCUDA,
        find="prototype(address.value), prototype is _BATCH_BEFORE_13",
        replace="prototype(address.value), False",
        killers=(f"{_BATCHES}::test_pinned_copies_are_one_call_with_all_of_them",),
    ),
    Mutant(
        name="cuda_refused_copy_ignored",
        why="Without batches, blocks that were never copied are stored as good.",
        file=_LIBCUDA,
        find='            if code:\n                self._check(f"a copy',
        replace='            if False:\n                self._check(f"a copy',
        killers=(f"{_SINGLES}::test_refused_copy_names_the_error",),
    ),
    Mutant(
        name="cuda_pageable_batch",
        why="A batch from memory that is not pinned is refused, or reads freed pages.",
        file=_CUDA,
        find="is_batched = is_pinned and self._library.is_batched",
        replace="is_batched = self._library.is_batched",
        killers=(f"{_SINGLES}::test_without_batches_each_copy_is_a_call",),
    ),
    Mutant(
        name="cuda_default_stream",
        why="Copies are ordered by the stream with which all others wait.",
        file=_CUDA,
        find="if not stream.cuda_stream:",
        replace="if False:",
        killers=(f"{_BATCHES}::test_default_stream_is_refused",),
    ),
    # CUDA's graphs, threads and memory.
    Mutant(
        name="cuda_copies_end_a_graph",
        why="A copy invalidates the graph that another thread records.",
        file=_LIBCUDA,
        find="_RELAXED = 2",
        replace="_RELAXED = 0",
        killers=(f"{_BATCHES}::test_copies_have_nothing_to_do_with_graphs",),
    ),
    Mutant(
        name="cuda_thread_stays_relaxed",
        why="The engine's own mistakes under a graph are not caught any more.",
        file=_LIBCUDA,
        find="""\
        finally:
            self._check(name, self._exchange_mode(ctypes.byref(mode)))""",
        replace="        finally:\n            pass",
        killers=(f"{_BATCHES}::test_copies_have_nothing_to_do_with_graphs",),
    ),
    Mutant(
        name="cuda_question_ends_a_graph",
        why="The poller invalidates the graph that the engine records.",
        file=_CUDA,
        find="""\
        with self._library.apart_from_graphs():
            return bool(event.query())""",
        replace="        return bool(event.query())",
        killers=(f"{_TORCH}::test_events_are_recorded_and_asked_apart_from_graphs",),
    ),
    Mutant(
        name="cuda_copies_first",
        why="Copies stand before the engine's kernels.",
        file=_CUDA,
        find="lowest, _ = _cuda",
        replace="_, lowest = _cuda",
        killers=(f"{_TORCH}::test_streams_yield_and_events_do_not_spin",),
    ),
    Mutant(
        name="cuda_events_spin",
        why="Whoever waits for an event burns a core.",
        file=_CUDA,
        find="_cuda.Event(blocking=True)",
        replace="_cuda.Event(blocking=False)",
        killers=(f"{_TORCH}::test_streams_yield_and_events_do_not_spin",),
    ),
    Mutant(
        name="cuda_thread_without_context",
        why="The first copy of each thread fails on device 0.",
        file=_LIBCUDA,
        find="""\
        self._check("cuCtxSetCurrent", self._set_context(self._contexts[index]))
""",
        replace="",
        killers=(
            "tests/devices/test_libcuda.py::TestDevice::test_bound_thread_has_the_devices_context",
            f"{_TORCH}::test_thread_is_bound_in_torch_and_in_cuda",
        ),
    ),
    Mutant(
        name="cuda_pins_too_little",
        why="The last page of a pool is not pinned, and batches with it fail.",
        file=_LIBCUDA,
        find="_page_start(address + nbytes + mmap.PAGESIZE - 1)",
        replace="_page_start(address + nbytes)",
        killers=(
            f"{_PINNING}::test_pages_that_the_memory_touches_are_registered_and_no_more",
        ),
    ),
    Mutant(
        name="cuda_pin_refusal_ignored",
        why="Memory is taken for pinned that is not.",
        file=_LIBCUDA,
        find="        if code:\n            raise OSError(",
        replace="        if False:\n            raise OSError(",
        killers=(
            f"{_PINNING}::test_memory_that_cannot_be_pinned_is_an_os_error_with_cudas_name",
        ),
    ),
    Mutant(
        name="cuda_takes_any_event",
        why="The number of another runtime's event is waited for as if it were ours.",
        file=_CUDA,
        find='if device is not None and device.type != "cuda":',
        replace="if False:",
        killers=(f"{_OF_CUDA}::test_event_of_another_runtime_is_refused",),
    ),
    # NPUs.
    Mutant(
        name="npu_directions_swapped",
        why="Loads read the blocks that they are to write, and the reverse.",
        file=_NPU,
        find="{Direction.TO_DEVICE: 0, Direction.TO_HOST: 1}",
        replace="{Direction.TO_DEVICE: 1, Direction.TO_HOST: 0}",
        killers=(f"{_COPY}::test_copies_are_one_call",),
    ),
    Mutant(
        name="npu_batch_on_an_old_cann",
        why="Copies from memory that is not locked do anything, without an error.",
        file=_NPU,
        find="if _version(self._cann) < _FIRST_CANN_TO_BATCH or not hasattr(",
        replace="if not hasattr(",
        killers=(f"{_COPY}::test_operator_is_left_alone_with_an_old_cann",),
    ),
    Mutant(
        name="npu_operator_of_another_kind",
        why="An operator takes the direction for something else.",
        file=_NPU,
        find="return operator if types == _SWAP_BLOCKS_BATCH_TYPES else None",
        replace="return operator",
        killers=(f"{_COPY}::test_operator_with_other_arguments_is_left_alone",),
    ),
    Mutant(
        name="npu_copies_in_the_engines_stream",
        why="Copies stand in the engine's way, and their event passes without them.",
        file=_NPU,
        find="with self._npu.stream(stream):",
        replace="with self._npu.stream(self._npu.current_stream(self.index)):",
        killers=(f"{_COPY}::test_copies_are_one_call",),
    ),
    Mutant(
        name="npu_never_blocks",
        why="A copy from memory that is not pinned goes on when it seems over.",
        file=_NPU,
        find="non_blocking=is_pinned",
        replace="non_blocking=True",
        killers=(f"{_COPY}::test_torch_copies_on_the_stream_and_blocks_where_it_must",),
    ),
    Mutant(
        name="npu_copies_any_format",
        why="Torch reorders the bytes of a cache that the NPU keeps in its own order.",
        file=_NPU,
        find="if self._torch_npu.get_npu_format(view) not in _PLAIN_FORMATS:",
        replace="if False:",
        killers=(f"{_COPY}::test_order_of_the_npus_own_is_not_copied_by_torch",),
    ),
    Mutant(
        name="npu_copies_beyond_the_cache",
        why="A copy reads memory of the device that is not the engine's cache.",
        file=_NPU,
        find="if storage is None or address + nbytes > storage.data_ptr() + storage.nbytes():",
        replace="if storage is None:",
        killers=(
            f"{_COPY}::test_memory_that_nobody_adopted_is_refused_before_any_byte_moves",
        ),
    ),
    Mutant(
        name="npu_lists_with_gaps",
        why="The operator reads other addresses than those of the pages.",
        file=_NPU,
        find="torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))",
        replace="torch.from_numpy(values)",
        killers=(f"{_COPY}::test_addresses_may_lie_apart",),
    ),
    Mutant(
        name="npu_waits_taken_for_snapshots",
        why="An event is given back while a queued wait will still look at it.",
        file=_NPU,
        find="captures_waits = False",
        replace="captures_waits = True",
        killers=(f"{_OF_NPU}::test_wait_is_not_taken_for_a_snapshot",),
    ),
    Mutant(
        name="npu_takes_any_event",
        why="The number of another runtime's event is waited for as if it were ours.",
        file=_NPU,
        find="if device is not None and device.type != self.device_type:",
        replace="if False:",
        killers=(f"{_OF_NPU}::test_event_of_another_runtime_is_refused",),
    ),
    Mutant(
        name="npu_asks_old_kernels",
        why="Locking memory under an old kernel takes the machine down.",
        file=_NPU,
        find="if _version(release) <= _NEWEST_KERNEL_THAT_CANNOT_PIN:",
        replace="if False:",
        killers=(f"{_PIN}::test_old_kernel_is_not_asked",),
    ),
    Mutant(
        name="npu_pin_refusal_ignored",
        why="Memory is taken for locked that is not.",
        file=_NPU,
        find='        if code:\n            raise OSError(f"npuHostRegister',
        replace='        if False:\n            raise OSError(f"npuHostRegister',
        killers=(f"{_PIN}::test_refusal_is_an_error_of_the_system",),
    ),
    # CPUs.
    Mutant(
        name="copies_on_foreign_cpus",
        why="Copies run on CPUs that the operator gave to others.",
        file=_AFFINITY,
        find="near = of_node & frozenset(allowed)",
        replace="near = of_node",
        killers=(f"{_PLAN}::test_cpus_that_are_not_allowed_or_offline_are_left_out",),
    ),
    Mutant(
        name="copies_on_the_engines_cpu",
        why="Copies take the time of the thread that schedules requests.",
        file=_AFFINITY,
        find="free = near - bound\n",
        replace="free = near\n",
        killers=(f"{_PLAN}::test_engine_on_all_cpus_of_the_node_is_left_alone",),
    ),
    Mutant(
        name="copies_on_the_engines_core",
        why="Copies share a core with the thread that schedules requests.",
        file=_AFFINITY,
        find="beside = free - _siblings(bound, sysfs)",
        replace="beside = free",
        killers=(f"{_PLAN}::test_engine_keeps_its_core",),
    ),
    Mutant(
        name="no_cpu_beside_the_engine",
        why="Where all others share the engine's core, copies run on the far socket.",
        file=_AFFINITY,
        find="AffinityPlan(beside or free, reason)",
        replace="AffinityPlan(beside, reason)",
        killers=(f"{_PLAN}::test_sibling_is_better_than_nothing",),
    ),
    Mutant(
        name="process_bound_with_its_thread",
        why="The engine itself is moved to the copies' CPUs.",
        file=_AFFINITY,
        find="os.sched_setaffinity(0, plan.cpus)",
        replace="os.sched_setaffinity(os.getpid(), plan.cpus)",
        killers=(f"{_BINDING}::test_copy_thread_binds_itself_alone",),
    ),
    Mutant(
        name="lost_cpus_not_told",
        why="The log names CPUs on which nothing runs.",
        file=_AFFINITY,
        find="    if cpus == plan.cpus:\n",
        replace="    if True:\n",
        killers=(f"{_BINDING}::test_cpus_that_are_lost_are_told",),
    ),
    Mutant(
        name="threads_stay_on_the_engines_core",
        why="R-18: on a CPU all threads take the time of the worker's main thread.",
        file="ucm/threads.py",
        find="            leave_one_cpu()\n",
        replace="",
        killers=(_NO_THREAD_STAYS,),
    ),
    Mutant(
        name="log_written_on_the_engines_core",
        why="R-18: lines take the time of the worker's main thread.",
        file="ucm/line_writer.py",
        find="        leave_one_cpu()\n",
        replace="",
        killers=(_NO_THREAD_STAYS,),
    ),
    Mutant(
        name="memory_comes_on_the_engines_core",
        why="R-18: a large slab takes seconds of the worker's main thread.",
        file="ucm/stores/slab/_populate.py",
        find="        leave_one_cpu()\n",
        replace="",
        killers=(
            "tests/stores/test_slab_populate.py::TestJoining::test_memory_comes_beside_the_cpu_of_a_bound_engine",
        ),
    ),
    Mutant(
        name="other_node_is_as_good",
        why="Threads of a rank that is bound to a core copy across the link between sockets.",
        file=_AFFINITY,
        find="                return engine & near\n",
        replace="                return engine\n",
        killers=(
            "tests/test_affinity.py::TestBesideOne::test_thread_on_one_cpu_gets_those_of_the_engine_on_its_node",
        ),
    ),
)
