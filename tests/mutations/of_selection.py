# SPDX-License-Identifier: Apache-2.0
"""Mutants of the choice of an event, and of staging memory."""

from tests.mutations.mutant import Mutant

__all__ = ["SELECTION"]

_SELECTION = "ucm/devices/selection.py"
_STAGING = "ucm/devices/staging.py"
_FIND = "tests/devices/test_selection.py::TestFind"
_OFF = "tests/devices/test_selection.py::TestOff"
_STEP = "tests/devices/test_selection.py::TestStep"
_LAYER = "tests/devices/test_selection.py::TestLayer"
_HOOK = "tests/devices/test_selection.py::TestHook"
_ERRORS = "tests/devices/test_selection.py::TestErrors"
_BUDGET = "tests/devices/test_staging.py::TestBudget"
_QUARANTINE = "tests/devices/test_staging.py::TestQuarantine"
_ENDS = "tests/devices/test_staging.py::TestClose"
_WAITS = "tests/devices/test_staging_waits.py::TestWaiting"
_GAPS = "tests/mutations/test_gaps_devices.py"

SELECTION = (
    # The choice of an event, link by link.
    Mutant(
        name="hook_passed_over",
        why="A layer waits for more than its write although the engine said when it was.",
        file=_SELECTION,
        find="        if written is not None:",
        replace="        if False:",
        killers=(f"{_HOOK}::test_hook_is_preferred_to_all_else",),
    ),
    Mutant(
        name="event_of_the_layer_passed_over",
        why="The event for all layers, which may be older, is taken for this one's.",
        file=_SELECTION,
        find="    if layer_name:\n        try:",
        replace="    if False:\n        try:",
        killers=(f"{_FIND}::test_event_of_the_layer_wins",),
    ),
    Mutant(
        name="direct_event_passed_over",
        why="An engine with one event for all layers is made to wait.",
        file=_SELECTION,
        find='event = getattr(metadata, "reshape_cache_event", None)',
        replace="event = None",
        killers=(f"{_LAYER}::test_event_of_the_engine_is_used",),
    ),
    Mutant(
        name="metadata_ends_the_step",
        why="Metadata of another shape ends the forward pass.",
        file=_SELECTION,
        find="except (AttributeError, KeyError, TypeError):",
        replace="except (AttributeError, KeyError):",
        killers=(
            f"{_FIND}::test_search_goes_on_where_the_layer_has_none",
            f"{_FIND}::test_event_of_one_part_of_a_step_is_not_taken",
        ),
    ),
    Mutant(
        name="entry_without_a_name",
        why="An event that is nobody's is taken for a layer's.",
        file=_SELECTION,
        find="    if layer_name:\n        try:",
        replace="    if True:\n        try:",
        killers=(f"{_FIND}::test_layer_without_a_name_is_not_looked_up",),
    ),
    Mutant(
        name="current_stream_passed_over",
        why="Each step without an event of the engine's blocks it.",
        file=_SELECTION,
        find="        if self._uses_events:\n            try:",
        replace="        if False:\n            try:",
        killers=(
            f"{_STEP}::test_whole_blocks_are_saved_behind_the_stream",
            f"{_LAYER}::test_event_that_is_missing_is_counted_and_made_up_for",
        ),
    ),
    Mutant(
        name="nothing_is_waited_for",
        why="Where no event can be recorded, bytes that were not written are saved.",
        file=_SELECTION,
        find="        self._device.synchronize()\n",
        replace="",
        killers=(
            f"{_STEP}::test_whole_blocks_are_saved_behind_the_stream",
            f"{_LAYER}::test_event_that_is_missing_is_counted_and_made_up_for",
            f"{_OFF}::test_without_events_the_device_is_synchronized",
        ),
    ),
    Mutant(
        name="refused_event_trusted",
        why="An event that proves nothing lets unwritten bytes be saved.",
        file=_SELECTION,
        find="        fence = self.for_step()\n",
        replace="        fence = DoneFence()\n",
        killers=(
            f"{_LAYER}::test_event_that_is_refused_is_counted_and_made_up_for",
            "tests/devices/test_selection_simulated.py::TestChoice::test_event_that_was_never_recorded_is_not_believed",
        ),
    ),
    Mutant(
        name="events_though_switched_off",
        why="An operator who turned events off still depends on them.",
        file=_SELECTION,
        find="enable_event_sync and enable_reshape_cache_event_sync",
        replace="enable_reshape_cache_event_sync",
        killers=(f"{_OFF}::test_without_events_the_device_is_synchronized",),
    ),
    Mutant(
        name="reshape_events_though_switched_off",
        why="Turning the feature off does not bring the former path back.",
        file=_SELECTION,
        find="enable_event_sync and enable_reshape_cache_event_sync",
        replace="enable_event_sync",
        killers=(f"{_OFF}::test_former_path_is_taken",),
    ),
    Mutant(
        name="failed_device_synchronized",
        why="A device that has failed hangs the engine's thread.",
        file=_SELECTION,
        find="""\
                fence = self._device.lease(None)
            except (DeviceFailedError, GraphCaptureError):
                raise
""",
        replace="                fence = self._device.lease(None)\n",
        killers=(f"{_ERRORS}::test_error_that_forbids_a_fallback_goes_to_the_caller",),
    ),
    Mutant(
        name="graph_taken_for_a_refusal",
        why="A save while a graph is recorded is taken for an event in doubt.",
        file=_SELECTION,
        find="""\
                fence = self._device.lease(event)
            except (DeviceFailedError, GraphCaptureError):
                raise
""",
        replace="                fence = self._device.lease(event)\n",
        killers=(f"{_ERRORS}::test_such_an_error_is_no_refusal",),
    ),
    Mutant(
        name="hook_of_an_earlier_step",
        why="What was written a step ago proves the write of this step.",
        file=_SELECTION,
        find="        self._written.clear()\n        self._device",
        replace="        self._device",
        killers=(f"{_HOOK}::test_hook_of_an_earlier_step_is_forgotten",),
    ),
    Mutant(
        name="step_not_passed_on",
        why="Events of earlier steps stay good for ever.",
        file=_SELECTION,
        find="        self._device.begin_step(step)\n",
        replace="",
        killers=(
            f"{_STEP}::test_same_step_begins_once",
            "tests/devices/test_selection_simulated.py::TestChoice::test_event_of_an_earlier_step_is_not_believed",
        ),
    ),
    Mutant(
        name="step_begins_twice",
        why="A step that is announced twice forgets what its hooks told.",
        file=_SELECTION,
        find="""\
        if step == self._step:
            return
""",
        replace="",
        killers=(f"{_STEP}::test_same_step_begins_once",),
    ),
    Mutant(
        name="earlier_fence_kept",
        why="A write that got no fence stands behind the fence of an earlier one.",
        file=_SELECTION,
        find="            self._written.pop(layer_name, None)\n",
        replace="",
        killers=(
            f"{_HOOK}::test_hook_that_cannot_be_fenced_ends_nothing_and_proves_nothing",
        ),
    ),
    Mutant(
        name="hook_without_a_name_for_all",
        why="The fence of one layer is taken for all layers behind it.",
        file=_SELECTION,
        find='self._written.pop("", None) or',
        replace='self._written.get("") or',
        killers=(f"{_HOOK}::test_hook_without_a_name_belongs_to_the_next_layer",),
    ),
    Mutant(
        name="hook_ends_the_forward_pass",
        why="A device error within a hook ends the engine's step.",
        file=_SELECTION,
        find="with contextlib.suppress(Exception):",
        replace="with contextlib.suppress(KeyError):",
        killers=(
            f"{_HOOK}::test_hook_that_cannot_be_fenced_ends_nothing_and_proves_nothing",
        ),
    ),
    Mutant(
        name="stale_counted_as_unrecorded",
        why="Operators look for an engine that records nothing.",
        file=_SELECTION,
        find='    (EventStaleError, "ucm_dump_event_reshape_cache_stale_total"),\n',
        replace="",
        killers=(f"{_LAYER}::test_event_that_is_refused_is_counted_and_made_up_for",),
    ),
    # Staging memory.
    Mutant(
        name="slot_freed_before_its_fence",
        why="A slot is lent while the device still writes into it.",
        file=_STAGING,
        find="            if has_passed:\n",
        replace="            if True:\n",
        killers=(f"{_QUARANTINE}::test_slots_under_a_copy_are_never_lent",),
    ),
    Mutant(
        name="slot_freed_after_its_first_fence",
        why="A slot is lent while a second copy still writes into it.",
        file=_STAGING,
        find="for fence in self.fences)\n        except",
        replace="for fence in self.fences[:1])\n        except",
        killers=(f"{_QUARANTINE}::test_slots_under_a_copy_are_never_lent",),
    ),
    Mutant(
        name="failed_fence_frees_slots",
        why="Slots of a device that failed are lent while it may write into them.",
        file=_STAGING,
        find="""\
        except DeviceError:
            return False
""",
        replace="""\
        except DeviceError:
            return True
""",
        killers=(f"{_QUARANTINE}::test_fence_that_failed_keeps_its_slots_for_good",),
    ),
    Mutant(
        name="quarantine_never_ends",
        why="Each copy that outlives its borrower costs its slots for good.",
        file=_STAGING,
        find="[lease for lease in waiting if lease.has_passed()]",
        replace="[lease for lease in waiting[:0] if lease.has_passed()]",
        killers=(f"{_QUARANTINE}::test_slots_under_a_copy_are_never_lent",),
    ),
    Mutant(
        name="fence_not_kept",
        why="A slot is lent while the device still writes into it.",
        file=_STAGING,
        find="        self.fences += (fence,)\n",
        replace="",
        killers=(f"{_QUARANTINE}::test_slots_under_a_copy_are_never_lent",),
    ),
    Mutant(
        name="fence_on_anothers_slots",
        why="A borrower that is late puts a copy on slots of the next one.",
        file=_STAGING,
        find="            if lease not in self._borrowed:\n                raise",
        replace="            if False:\n                raise",
        killers=(f"{_QUARANTINE}::test_lease_that_has_ended_takes_no_fence",),
    ),
    Mutant(
        name="slots_freed_by_two",
        why="A slot is lent to two borrowers at once.",
        file=_STAGING,
        find="""\
                if lease in self._quarantined:  # or another thread was quicker
                    self._quarantined.remove(lease)
""",
        replace="""\
                if True:
                    self._quarantined.discard(lease)
""",
        killers=(f"{_QUARANTINE}::test_fence_that_two_see_pass_frees_its_slots_once",),
    ),
    Mutant(
        name="lease_ended_twice",
        why="A slot is lent to two borrowers at once.",
        file=_STAGING,
        find="""\
            if lease not in self._borrowed:
                return
            self._borrowed.remove(lease)
""",
        replace="            self._borrowed.discard(lease)\n",
        killers=(
            f"{_GAPS}::TestStaging::test_lease_that_ends_twice_frees_its_slots_once",
        ),
    ),
    Mutant(
        name="same_slots_lent_again",
        why="A slot is lent to two borrowers at once.",
        file=_STAGING,
        find="taken, self._free = self._free[:count], self._free[count:]",
        replace="taken = self._free[:count]",
        killers=(f"{_BUDGET}::test_lease_is_a_span_of_neighbours",),
    ),
    Mutant(
        name="budget_exceeded",
        why="More memory is pinned than the operator allowed.",
        file=_STAGING,
        find="num_slots = budget_bytes // slot_bytes\n",
        replace="num_slots = -(-budget_bytes // slot_bytes)\n",
        killers=(f"{_BUDGET}::test_rest_of_the_budget_is_not_allocated",),
    ),
    Mutant(
        name="budget_of_nothing",
        why="A pool without slots makes every transfer wait in vain.",
        file=_STAGING,
        find="        if num_slots < 1:\n",
        replace="        if False:\n",
        killers=(f"{_BUDGET}::test_budget_below_one_slot_is_refused",),
    ),
    Mutant(
        name="large_request_overtaken",
        why="Many small borrowers keep a large one waiting for ever.",
        file=_STAGING,
        find="self._line[0] is me and len",
        replace="len",
        killers=(f"{_WAITS}::test_large_request_is_not_overtaken",),
    ),
    Mutant(
        name="waits_too_long",
        why="A copy thread waits for slots far beyond its ticket's deadline.",
        file=_STAGING,
        find="limit = self._clock() + timeout",
        replace="limit = self._clock() + 10 * timeout",
        killers=(f"{_WAITS}::test_wait_ends_at_its_deadline",),
    ),
    Mutant(
        name="memory_freed_under_a_copy",
        why="Memory is unpinned while the device writes into it.",
        file=_STAGING,
        find="return not self._borrowed and not self._quarantined",
        replace="return not self._borrowed",
        killers=(f"{_ENDS}::test_close_tells_whether_memory_is_unused",),
    ),
    Mutant(
        name="lent_after_the_end",
        why="Slots are lent of memory that is about to be unpinned.",
        file=_STAGING,
        find="                    if self._is_closed:\n",
        replace="                    if False:\n",
        killers=(f"{_ENDS}::test_closed_pool_lends_nothing",),
    ),
)
