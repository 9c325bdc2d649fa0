# SPDX-License-Identifier: Apache-2.0
"""Mutants of pages, copies, and the device of any accelerator."""

from tests.mutations.mutant import Mutant

__all__ = ["DEVICES"]

_PLAN = "ucm/plan.py"
_PAGED = "ucm/devices/_paged.py"
_TENSORS = "ucm/devices/_torch.py"
_REGIONS = "ucm/devices/_regions.py"
_BATCHES = "tests/test_plan.py::TestCopyBatch"
_CPU = "tests/devices/test_cpu.py::TestCPUDevice"
_SHAPES = "tests/devices/test_cpu.py::TestShapes"
_REFUSALS = "tests/devices/test_cpu.py::TestRefusals"
_DEVICE = "ucm/devices/accelerator.py"
_PAGES = "ucm/devices/_pages.py"
_SAVE = "ucm/pipeline/save.py"
_COPIES = "tests/devices/test_accelerator_copies.py::TestCopies"
_CLOSE = "tests/devices/test_accelerator_copies.py::TestClose"
_FOR_GOOD = "tests/devices/test_accelerator_failures.py::TestForGood"
_FOR_ONCE = "tests/devices/test_accelerator_failures.py::TestForOnce"
_STAGED = "tests/devices/test_staged_copies.py::TestGather"
_VISITS = "tests/devices/test_accelerator_visits.py"
_GAPS = "tests/mutations/test_gaps_devices.py"

DEVICES = (
    # Pages and copies.
    Mutant(
        name="merged_over_a_gap",
        why="A copy reads on into a neighbour's slot, or writes into it.",
        file=_PLAN,
        find="""\
continues = (sources[1:] == sources[:-1] + nbytes[:-1]) & (
            targets[1:] == targets[:-1] + nbytes[:-1]
        )""",
        replace="continues = sources[1:] == sources[:-1] + nbytes[:-1]",
        killers=(f"{_BATCHES}::test_neighbours_on_one_side_stay_apart",),
    ),
    Mutant(
        name="merged_sizes_lost",
        why="Of pages that are copied as one only the first arrives.",
        file=_PLAN,
        find="np.add.reduceat(nbytes, starts)",
        replace="nbytes[starts]",
        killers=(f"{_BATCHES}::test_neighbours_on_both_sides_make_one_copy",),
    ),
    Mutant(
        name="nothing_merged",
        why="A dense span takes a descriptor for each page.",
        file=_PLAN,
        find="np.concatenate(([True], ~continues))",
        replace="np.concatenate(([True], continues | True))",
        killers=(f"{_BATCHES}::test_neighbours_on_both_sides_make_one_copy",),
    ),
    Mutant(
        name="wrong_row_offset",
        why="Rows lie over each other in a slot, and each load is garbage.",
        file=_PAGED,
        find="region.block_stride, nbytes, offset))",
        replace="region.block_stride, nbytes, 0))",
        killers=(f"{_SHAPES}::test_attention_layers_in_one_storage_are_gathered",),
    ),
    Mutant(
        name="all_rows_copied",
        why="A layer's save copies layers that are not written yet.",
        file=_PAGED,
        find="is_whole = len(wanted) == len(group.row_ids)",
        replace="is_whole = True",
        killers=(f"{_CPU}::test_gather_copies_the_pages_asked_for_and_nothing_else",),
    ),
    Mutant(
        name="slot_out_of_range",
        why="A copy writes behind the store's memory.",
        file=_PAGED,
        find='        _check_range("slot", slots.slots, len(slots.pool))\n',
        replace="",
        killers=(f"{_CPU}::test_an_id_out_of_range_is_refused_before_a_byte_moves",),
    ),
    Mutant(
        name="below_zero_in_range",
        why="An id below zero is taken from the end of the pool.",
        file=_PAGED,
        find="ids[(ids < 0) | (ids >= count)]",
        replace="ids[ids >= count]",
        killers=(f"{_CPU}::test_an_id_out_of_range_is_refused_before_a_byte_moves",),
    ),
    Mutant(
        name="rows_on_the_same_bytes",
        why="A load of one layer overwrites another one's pages.",
        file=_REGIONS,
        find="            if not _are_apart(mine, theirs, apart):",
        replace="            if False:",
        killers=(f"{_CPU}::test_rows_on_the_same_bytes_are_refused",),
    ),
    Mutant(
        name="page_behind_the_storage",
        why="A copy reads and writes behind the engine's memory.",
        file=_TENSORS,
        find="    if region.end > nbytes:",
        replace="    if False:",
        killers=(f"{_REFUSALS}::test_a_tensor_that_does_not_fit_is_named",),
    ),
    Mutant(
        name="storage_offset_ignored",
        why="All layers of one storage are copied from the first one's pages.",
        file=_TENSORS,
        find="offset=int(tensor.storage_offset()) * item",
        replace="offset=0",
        killers=(f"{_SHAPES}::test_attention_layers_in_one_storage_are_gathered",),
    ),
    # Copies.
    Mutant(
        name="copy_without_a_fence",
        why="Slots are sealed, and loads are told, before their bytes are there.",
        file=_DEVICE,
        find="                fence = self._fence_behind_copy(lane.stream)\n",
        replace="""\
                self._fence_behind_copy(lane.stream)
                fence = DoneFence()
""",
        killers=(f"{_COPIES}::test_fence_passes_behind_the_whole_copy",),
    ),
    Mutant(
        name="fence_before_its_copy",
        why="Slots are sealed, and loads are told, before their bytes are there.",
        file=_DEVICE,
        find="""\
                self._driver.copy(batch, direction, lane.stream, is_pinned=is_pinned)
                told""",
        replace="""\
                early = self._fence_on(lane.stream)
                self._driver.copy(batch, direction, lane.stream, is_pinned=is_pinned)
                return early
                told""",
        killers=(f"{_COPIES}::test_fence_passes_behind_the_whole_copy",),
    ),
    Mutant(
        name="copies_in_one_stream",
        why="Loads that users wait for stand behind saves.",
        file=_DEVICE,
        find="self._lanes[direction], self._digests",
        replace="self._lanes[Direction.TO_HOST], self._digests",
        killers=(f"{_COPIES}::test_each_direction_has_a_stream_of_its_own",),
    ),
    Mutant(
        name="gather_raises",
        why="Blocks and slots are given back while half of a copy is under way.",
        file=_DEVICE,
        find="""\
                # No error, or the caller would give blocks and slots back.
                return FailedFence(self._fail(exc))
""",
        replace="                raise self._fail(exc) from exc\n",
        killers=(f"{_FOR_GOOD}::test_copy_that_failed_half_way_is_a_fence_that_fails",),
    ),
    Mutant(
        name="no_event_no_wait",
        why="A copy without an event counts as over while it is under way.",
        file=_DEVICE,
        find="            return self._synchronized()\n",
        replace="            return DoneFence()\n",
        killers=(f"{_FOR_ONCE}::test_copy_without_an_event_is_waited_for",),
    ),
    Mutant(
        name="failed_wait_passes",
        why="What a device that is gone did not copy is stored as good.",
        file=_DEVICE,
        find="""\
        except RuntimeError as exc:
            return FailedFence(self._fail(exc))
        return DoneFence()""",
        replace="""\
        except RuntimeError as exc:
            self._fail(exc)
        return DoneFence()""",
        killers=(
            f"{_GAPS}::TestFailure::test_copy_that_cannot_be_waited_for_is_no_success",
        ),
    ),
    Mutant(
        name="failure_not_sticky",
        why="Work goes on on a device about whose bytes nothing is known.",
        file=_DEVICE,
        find="        if self._failure is None:\n            self._failure = error",
        replace="        pass",
        killers=(f"{_FOR_GOOD}::test_failure_on_one_thread_is_known_to_all",),
    ),
    Mutant(
        name="failure_kept_from_the_poller",
        why="Requests wait for copies of a device that is known to be gone.",
        file=_DEVICE,
        find="        self._poller.fail(error)\n",
        replace="",
        killers=(
            f"{_GAPS}::TestFailure::test_failure_of_one_call_fails_what_is_pending",
        ),
    ),
    Mutant(
        name="missing_event_ends_the_device",
        why="One event that cannot be made ends the service.",
        file=_DEVICE,
        find='            raise DeviceError(f"no event could be recorded: {exc}") from exc',
        replace="            raise self._fail(exc) from exc",
        killers=(f"{_FOR_ONCE}::test_lease_without_an_event_is_no_failure",),
    ),
    Mutant(
        name="thread_not_bound",
        why="The first copy of a thread goes to another device.",
        file=_DEVICE,
        find="""\
                self._driver.bind_thread()
                self._bound.is_bound""",
        replace="                self._bound.is_bound",
        killers=(f"{_COPIES}::test_copy_on_any_thread_binds_it_first_and_once",),
    ),
    Mutant(
        name="hosts_thread_left_on_our_device",
        why="What a host makes next is on the device of its cache, and its model ends.",
        file=_DEVICE,
        find="                driver.make_current(before)\n",
        replace="                pass\n",
        killers=(
            f"{_VISITS}::test_thread_of_a_host_has_its_own_device_behind_each_verb",
        ),
    ),
    Mutant(
        name="visitor_taken_for_bound",
        why="A thread that was on another device copies there.",
        file=_DEVICE,
        find="self._bound.is_bound = is_own",
        replace="self._bound.is_bound = True",
        killers=(f"{_VISITS}::test_thread_that_visits_is_bound_when_it_copies",),
    ),
    Mutant(
        name="pageable_memory_as_pinned",
        why="The device reads memory that the system may move.",
        file=_DEVICE,
        find="is_pinned = self._pinned.holds(copy.slots)",
        replace="is_pinned = True",
        killers=(
            f"{_COPIES}::test_memory_that_cannot_be_pinned_is_copied_all_the_same",
        ),
    ),
    Mutant(
        name="partly_pinned_as_pinned",
        why="The device reads memory that the system may move.",
        file="ucm/devices/_pinned.py",
        find="begin <= start and stop <= end",
        replace="begin <= start < end",
        killers=(f"{_COPIES}::test_memory_is_pinned_only_where_all_of_it_is",),
    ),
    Mutant(
        name="copy_of_two_pinned_pieces",
        why="The driver refuses it, and the device has failed for good.",
        file="ucm/devices/_pinned.py",
        find="if before_edges.isdisjoint(slots.slots.tolist()):",
        replace="if True:",
        killers=("tests/devices/test_pinned.py::test_no_copy_is_of_two_pieces",),
    ),
    Mutant(
        name="copies_not_cut_at_pieces",
        why="The driver refuses a copy of two pieces, and the device has failed for good.",
        file=_DEVICE,
        find="self._pinned.cut(batch, copy.slots, direction)",
        replace="batch",
        killers=(f"{_COPIES}::test_no_copy_is_within_a_piece_in_part",),
    ),
    Mutant(
        name="unpinnable_memory_ends_the_device",
        why="A limit on locked memory ends the service.",
        file=_DEVICE,
        find="""\
            except OSError as exc:
                return str(exc)
""",
        replace="""\
            except OSError as exc:
                raise self._fail(RuntimeError(exc)) from exc
""",
        killers=(
            f"{_COPIES}::test_memory_that_cannot_be_pinned_is_copied_all_the_same",
        ),
    ),
    Mutant(
        name="row_in_anothers_place",
        why="A layer's save overwrites the rows of another one.",
        file=_PAGES,
        find="places = first[:, None] + self.offsets[chosen]",
        replace="places = first[:, None] + self.offsets[chosen] - self.offsets[chosen][:1]",
        killers=(f"{_COPIES}::test_one_row_has_its_pages_only",),
    ),
    Mutant(
        name="pages_without_their_stride",
        why="Each block is read from where another one is.",
        file=_PAGES,
        find="self.starts[chosen] + blocks * self.strides[chosen]",
        replace="self.starts[chosen] + blocks * self.strides[:1]",
        killers=(f"{_COPIES}::test_one_call_has_the_addresses_of_all_pages",),
    ),
    Mutant(
        name="directions_swapped",
        why="Saves overwrite the engine's blocks.",
        file=_PAGES,
        find="if direction is Direction.TO_HOST:",
        replace="if direction is Direction.TO_DEVICE:",
        killers=(f"{_COPIES}::test_one_call_has_the_addresses_of_all_pages",),
    ),
    # Staged copies.
    Mutant(
        name="staged_save_not_landed",
        why="What is stored is not the block but what the slot held before.",
        file=_SAVE,
        find="        fence.land()\n",
        replace="",
        killers=(
            f"{_GAPS}::TestSave::test_slots_are_sealed_behind_the_landing_of_their_copy",
        ),
    ),
    Mutant(
        name="staged_copy_lands_everywhere",
        why="Rows of other layers are overwritten with what was there before.",
        file=_PAGES,
        find="        if copy.is_whole:\n            return [(0",
        replace="        if True:\n            return [(0",
        killers=(f"{_STAGED}::test_rows_that_were_not_asked_for_stay",),
    ),
    Mutant(
        name="staging_memory_never_back",
        why="Each staged save costs its memory for good.",
        file=_PAGES,
        find="""\
        self._land()
        self._lease.close()
""",
        replace="        self._land()\n",
        killers=(
            f"{_GAPS}::TestStaging::test_staging_memory_is_free_when_its_copy_has_landed",
        ),
    ),
    Mutant(
        name="staging_unpinned_on_loan",
        why="Memory is unpinned and freed that a save has still to be read from.",
        file=_DEVICE,
        find="""\
            self._pinned = self._pinned.without(self._staging.memory.ctypes.data)
""",
        replace="            pass\n",
        killers=(
            f"{_GAPS}::TestStaging::test_staging_memory_that_is_on_loan_stays_pinned",
        ),
    ),
    # The end.
    Mutant(
        name="unpinned_on_a_failed_device",
        why="Memory is unpinned while a lost copy may write into it.",
        file=_DEVICE,
        find="        if self._failure is None:\n            # The process",
        replace="        if True:\n            # The process",
        killers=(f"{_FOR_GOOD}::test_copy_that_failed_half_way_is_a_fence_that_fails",),
    ),
    Mutant(
        name="closed_under_the_poller",
        why="Memory is unpinned while a thread is inside the runtime.",
        file=_DEVICE,
        find="""\
        if not self._poller.close(_CLOSE_TIMEOUT_S):
            return
""",
        replace="        self._poller.close(_CLOSE_TIMEOUT_S)\n",
        killers=(f"{_CLOSE}::test_thread_that_does_not_end_is_waited_for_in_bounds",),
    ),
    Mutant(
        name="events_dropped_under_the_poller",
        why="An event is destroyed while the poller asks it.",
        file=_DEVICE,
        find="        super().close()\n",
        replace="""\
        super().close()
        self.events.close()
""",
        killers=(f"{_CLOSE}::test_thread_ends_before_events_are_dropped",),
    ),
    Mutant(
        name="pins_outlive_the_device",
        why="The store's memory stays locked.",
        file=_DEVICE,
        find="                    self._driver.unpin(address)\n",
        replace="                    pass\n",
        killers=(f"{_CLOSE}::test_memory_is_unpinned_once",),
    ),
)
