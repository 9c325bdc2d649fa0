# SPDX-License-Identifier: Apache-2.0
"""Mutants of leases and of the book of events."""

from tests.mutations.mutant import Mutant

__all__ = ["EVENTS"]

_EVENTS = "ucm/devices/events.py"
_DEVICE = "ucm/devices/accelerator.py"
_RELAY = "ucm/devices/_relay.py"
_SAVE = "ucm/pipeline/save.py"
_LEASE = "tests/devices/test_accelerator.py::TestLease"
_LOANS = "tests/devices/test_accelerator_loans.py::TestLoans"
_BORROW = "tests/devices/test_event_book.py::TestBorrow"
_LOAN = "tests/devices/test_event_book.py::TestLoan"
_OWN = "tests/devices/test_event_book.py::TestOwn"
_BOOK_ENDS = "tests/devices/test_event_book.py::TestClose"
_GAPS = "tests/mutations/test_gaps_devices.py"

EVENTS = (
    Mutant(
        name="failed_device_drops_loans",
        why="A stream that nobody can ask any more waits for an event that is gone.",
        file=_EVENTS,
        find="            loan.abandon()\n",
        replace="            loan.release()\n",
        killers=(
            f"{_LOANS}::test_loan_outlives_a_device_that_failed_before_a_late_wait",
        ),
    ),
    # Leases.
    Mutant(
        name="fence_not_waited_for",
        why="A save reads blocks that the engine has not written yet.",
        file="ucm/pipeline/stage.py",
        find="        return self.passed(given) if has_passed(self.awaited(given)) else None\n",
        replace="        return self.passed(given)\n",
        killers=(f"{_GAPS}::TestSave::test_save_without_its_fence_is_not_ready",),
    ),
    Mutant(
        name="lease_without_a_fence",
        why="A save reads blocks that the engine has not written yet.",
        file=_DEVICE,
        find="return self._fence_on(self._driver.current_stream())",
        replace="return DoneFence()",
        killers=(f"{_LEASE}::test_save_waits_for_the_engines_work",),
    ),
    Mutant(
        name="relay_does_not_wait",
        why="The fence of a borrowed event passes before the event does.",
        file=_RELAY,
        find="                loan.hold_back(self._stream)\n",
        replace="                pass\n",
        killers=(f"{_GAPS}::TestLease::test_fence_of_a_borrowed_event_waits_for_it",),
    ),
    Mutant(
        name="relay_waits_for_another_event",
        why="The engine's own work stands behind what it lent us.",
        file=_DEVICE,
        find="return self._relay.fence_behind(self.events.borrow(event))",
        replace="return self._fence_on(self._driver.current_stream())",
        killers=(f"{_LEASE}::test_lease_waits_for_nothing_else_than_its_event",),
    ),
    Mutant(
        name="borrowed_event_polled",
        why="We ask an event that its owner records again, or has destroyed.",
        file=_DEVICE,
        find="return self._relay.fence_behind(self.events.borrow(event))",
        replace="return self._poller.watch(self._relay._stream, event)",
        killers=(f"{_LEASE}::test_save_waits_for_the_engines_event",),
    ),
    Mutant(
        name="loan_released_early",
        why="The engine destroys an event for which our stream still waits.",
        file=_RELAY,
        find="                if self._captures_waits:",
        replace="                if True:",
        killers=(f"{_LEASE}::test_event_is_on_loan_until_the_wait_has_looked",),
    ),
    Mutant(
        name="loan_released_behind_a_wait_that_failed",
        why="The engine destroys an event for which a stream may still wait.",
        file=_RELAY,
        find="                if self._captures_waits:",
        replace='                if self._captures_waits or loan.state.value == "borrowed":',
        killers=(
            f"{_LOANS}::test_loan_outlives_a_wait_that_failed_once_it_was_submitted",
        ),
    ),
    Mutant(
        name="loan_kept_behind_a_captured_wait",
        why="The engine's events pile up while saves wait.",
        file=_RELAY,
        find="                if self._captures_waits:",
        replace="                if False:",
        killers=(f"{_LEASE}::test_event_recorded_again_does_not_hold_the_fence",),
    ),
    Mutant(
        name="loan_outlives_a_synchronized_device",
        why="Where events are scarce each step keeps an event of the engine's for ever.",
        file=_RELAY,
        find="        give_back(loans, DoneFence())\n",
        replace="",
        killers=(
            f"{_LOANS}::test_loan_without_an_event_behind_it_ends_when_all_was_waited_for",
        ),
    ),
    Mutant(
        name="loan_never_released",
        why="Each step keeps an event of the engine's for ever.",
        file=_RELAY,
        find="        fence.call_when_over(functools.partial(give_back, held_back, fence))\n",
        replace="",
        killers=(f"{_LEASE}::test_many_leases_leave_nothing",),
    ),
    Mutant(
        name="loans_of_several_threads_mixed",
        why="A loan ends with the fence of another thread's, before its own wait has looked.",
        file=_RELAY,
        find="""\
        with self._lock:
            try:
""",
        replace="""\
        if True:
            try:
""",
        killers=(
            f"{_LOANS}::test_leases_of_several_threads_end_behind_their_own_waits",
        ),
    ),
    Mutant(
        name="closed_amid_a_call_back",
        why="A device that is closed as its last event passes stays open, and memory pinned.",
        file="ucm/devices/poller.py",
        find="lambda: not (self._streams or self._is_calling), timeout",
        replace="lambda: not self._streams, timeout",
        killers=(f"{_LOANS}::test_loan_that_is_just_being_given_back_keeps_no_device",),
    ),
    Mutant(
        name="capture_not_refused",
        why="A lease ends the graph that the engine records.",
        file=_DEVICE,
        find="""\
            if self._driver.is_capturing():
                raise GraphCaptureError("no fence""",
        replace="""\
            if False:
                raise GraphCaptureError("no fence""",
        killers=(f"{_LEASE}::test_graph_that_is_recorded_is_left_alone",),
    ),
    Mutant(
        name="capture_synchronized",
        why="A fallback ends the graph that the engine records.",
        file=_DEVICE,
        find="""\
            if self._driver.is_capturing():
                raise GraphCaptureError("no wait""",
        replace="""\
            if False:
                raise GraphCaptureError("no wait""",
        killers=(f"{_LEASE}::test_graph_that_is_recorded_is_left_alone",),
    ),
    Mutant(
        name="step_not_begun",
        why="An event of an earlier step is good for ever.",
        file=_DEVICE,
        find="        self.events.begin_step(step)\n",
        replace="        pass\n",
        killers=(f"{_LEASE}::test_event_of_an_earlier_step_is_refused",),
    ),
    # The book of events.
    Mutant(
        name="stale_event_used",
        why="The event of an earlier step proves nothing of what is written now.",
        file=_EVENTS,
        find="        if seen != self._step:",
        replace="        if False:",
        killers=(
            f"{_BORROW}::test_event_is_stale_one_step_later",
            f"{_LEASE}::test_event_of_an_earlier_step_is_refused",
        ),
    ),
    Mutant(
        name="unrecorded_event_used",
        why="An event that passes at once lets unwritten bytes be saved.",
        file=_EVENTS,
        find="        if not value:",
        replace="        if False:",
        killers=(
            f"{_BORROW}::test_event_that_was_never_recorded_is_refused",
            f"{_LEASE}::test_event_of_an_earlier_step_is_refused",
        ),
    ),
    Mutant(
        name="none_is_ready",
        why="An event that is missing is taken for one that has passed.",
        file=_EVENTS,
        find="        if value is None:\n            raise",
        replace="""\
        if value is None:
            return 1
        if value is None:
            raise""",
        killers=(f"{_BORROW}::test_handle_that_cannot_be_read_is_told_with_its_type",),
    ),
    Mutant(
        name="foreign_event_accepted",
        why="Another device's progress is taken for this one's.",
        file=_EVENTS,
        find="if index is not None and index != self._driver.index:",
        replace="if False:",
        killers=(
            f"{_BORROW}::test_event_of_another_device_is_refused",
            f"{_LEASE}::test_event_of_another_device_is_refused",
        ),
    ),
    Mutant(
        name="wrong_type_ends_the_step",
        why="An object that is no event ends the forward pass.",
        file=_EVENTS,
        find="_UNREADABLE = (AttributeError, TypeError, ValueError)",
        replace="_UNREADABLE = (TypeError, ValueError)",
        killers=(f"{_BORROW}::test_handle_that_cannot_be_read_is_told_with_its_type",),
    ),
    Mutant(
        name="loan_used_after_its_end",
        why="Our stream waits for an event that its owner has destroyed.",
        file=_EVENTS,
        find="            if self.state is Loan.RELEASED:\n                raise",
        replace="            if False:\n                raise",
        killers=(f"{_LOAN}::test_states_follow_each_other",),
    ),
    Mutant(
        name="event_kept_after_its_release",
        why="The engine's events live until the process ends.",
        file=_EVENTS,
        find="            event, self._event = self._event, None\n",
        replace="            event = self._event\n",
        killers=(f"{_LOAN}::test_loans_of_one_event_are_counted",),
    ),
    Mutant(
        name="borrowed_event_not_kept",
        why="The engine drops an event for which our stream still waits.",
        file=_EVENTS,
        find="        self._event = event\n",
        replace="        self._event = weakref.proxy(event)\n",
        killers=(f"{_BORROW}::test_event_lives_until_its_release",),
    ),
    Mutant(
        name="borrowed_event_recycled",
        why="An event of the engine's is recorded by us.",
        file=_EVENTS,
        find="            is_ours = self._own.pop(id(event), None) is not None\n",
        replace="""\
            is_ours = True
            self._own.pop(id(event), None)
""",
        killers=(f"{_OWN}::test_own_and_borrowed_events_are_kept_apart",),
    ),
    Mutant(
        name="event_recycled_before_it_passed",
        why="A fence passes with the work of another copy.",
        file=_EVENTS,
        find="            self._own[id(event)] = event\n",
        replace="""\
            self._own[id(event)] = event
            self._free.append(event)
""",
        killers=(f"{_OWN}::test_event_that_has_passed_is_used_again",),
    ),
    Mutant(
        name="own_events_pile_up",
        why="A burst of copies keeps its events for good.",
        file=_EVENTS,
        find="if is_ours and len(self._free) < _MOST_FREE:",
        replace="if is_ours:",
        killers=(f"{_OWN}::test_pool_is_bounded",),
    ),
    Mutant(
        name="own_events_never_used_again",
        why="Each copy makes and destroys an event.",
        file=_EVENTS,
        find="event = self._free.pop() if self._free else None",
        replace="event = None",
        killers=(f"{_OWN}::test_event_that_has_passed_is_used_again",),
    ),
    Mutant(
        name="loans_outlive_the_book",
        why="A device that was closed goes on counting what it has on loan.",
        file=_EVENTS,
        find="""\
        for loan in loans:
            loan.abandon()
""",
        replace="",
        killers=(f"{_BOOK_ENDS}::test_both_sides_are_empty",),
    ),
    Mutant(
        name="seen_events_kept_alive",
        why="Every event that the engine ever lent lives until the end.",
        file=_EVENTS,
        find="= weakref.WeakKeyDictionary()",
        replace="= {}  # type: ignore[assignment]",
        killers=(f"{_LOAN}::test_many_loans_leave_nothing",),
    ),
    Mutant(
        name="released_amid_a_wait",
        why="The engine destroys an event while we make a stream wait for it.",
        file=_EVENTS,
        find="""\
        with self._lock:
            if self.state is Loan.RELEASED:
                raise""",
        replace="""\
        if True:
            if self.state is Loan.RELEASED:
                raise""",
        killers=(
            "tests/devices/test_event_book_threads.py::test_release_waits_for_a_wait_under_way",
        ),
    ),
)
