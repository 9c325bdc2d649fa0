# SPDX-License-Identifier: Apache-2.0
"""Mutants of the thread that asks whether events have passed, and of its fences."""

from tests.mutations.mutant import Mutant

__all__ = ["POLLER"]

_POLLER = "ucm/devices/poller.py"
_FOR_GOOD = "tests/devices/test_accelerator_failures.py::TestForGood"
_LOOKS = "tests/devices/test_poller.py::TestLooks"
_FENCES = "tests/devices/test_poller.py::TestFences"
_FAILURE = "tests/devices/test_poller.py::TestFailure"
_GAPS = "tests/mutations/test_gaps_devices.py"

POLLER = (
    Mutant(
        name="more_than_heads_asked",
        why="The driver is asked for thousands of events each millisecond.",
        file=_POLLER,
        find="passed = [stream for stream, event in heads if self._driver.is_done(event)]",
        replace="passed = [\n                stream\n                for stream, _ in heads\n                if [self._driver.is_done(each.event) for each in self._streams[stream]][0]\n            ]",
        killers=(f"{_LOOKS}::test_only_the_oldest_of_each_stream_is_asked",),
    ),
    Mutant(
        name="one_stream_asked",
        why="Loads that are over wait for a save that is not.",
        file=_POLLER,
        find="(stream, queue[0].event) for stream, queue in self._streams.items()",
        replace="(stream, queue[0].event) for stream, queue in [*self._streams.items()][:1]",
        killers=(f"{_LOOKS}::test_stream_is_not_held_up_by_another",),
    ),
    Mutant(
        name="poller_spins",
        why="A core is burnt while nothing is under way.",
        file=_POLLER,
        find="                self._changed.wait_for(self._has_work)\n",
        replace="""\
                self._changed.wait_for(self._has_work, 60.0)
                if not self._streams and self._error is None:
                    continue
""",
        killers=(f"{_LOOKS}::test_nobody_spins_when_there_is_nothing_to_ask",),
    ),
    Mutant(
        name="pause_never_grows",
        why="A long kernel costs twenty thousand questions a second.",
        file=_POLLER,
        find="pause = min(pause * 2, _LAST_PAUSE_S)",
        replace="pause = _FIRST_PAUSE_S",
        killers=(
            f"{_LOOKS}::test_event_that_stays_away_is_asked_at_most_each_millisecond",
        ),
    ),
    Mutant(
        name="pause_never_shrinks",
        why="After one long wait each copy is seen a millisecond late.",
        file=_POLLER,
        find="""\
                self._pass(passed)
                pause = _FIRST_PAUSE_S
""",
        replace="                self._pass(passed)\n",
        killers=(f"{_LOOKS}::test_pause_starts_anew_when_something_passed",),
    ),
    Mutant(
        name="passed_event_not_recycled",
        why="Each copy leaves an event behind.",
        file=_POLLER,
        find="            self._recycle(event)\n",
        replace="            pass\n",
        killers=(f"{_FENCES}::test_event_is_recycled_once_it_has_passed",),
    ),
    Mutant(
        name="nobody_woken",
        why="Whoever waits for a fence waits until its time is over.",
        file=_POLLER,
        find="""\
            self._is_calling = False
            self._changed.notify_all()
""",
        replace="            self._is_calling = False\n",
        killers=(f"{_FENCES}::test_wait_ends_when_the_event_has_passed",),
    ),
    Mutant(
        name="callback_lost",
        why="A loan is never given back, or a loop never hears of its copy.",
        file=_POLLER,
        find="""\
            if not self._is_over:
                self._callbacks.append(callback)
                return True
        callback()
""",
        replace="""\
            is_over = self._is_over
        if not is_over:
            self._callbacks.append(callback)
            return True
        callback()
""",
        killers=(
            f"{_FENCES}::test_callback_is_called_once_however_threads_interleave",
        ),
    ),
    Mutant(
        name="failing_fences_not_failed",
        why="Requests wait for ever for copies of a device that is gone.",
        file=_POLLER,
        find="""\
            callbacks = [call for each in watched for call in each.fence.end(error)]
""",
        replace="""\
            callbacks = [call for each in watched[:0] for call in each.fence.end(error)]
""",
        killers=(f"{_FAILURE}::test_closing_fails_what_is_left",),
    ),
    Mutant(
        name="failed_fence_passes",
        why="What a device that is gone did not copy is stored as good.",
        file=_POLLER,
        find="        if self._error is not None:\n            raise",
        replace="        if False:\n            raise",
        killers=(f"{_FAILURE}::test_first_failure_stays",),
    ),
    Mutant(
        name="fence_of_a_failed_device_waits",
        why="A copy that began as the device failed is waited for for ever.",
        file=_POLLER,
        find="                fence.end(self._error)\n",
        replace="                pass\n",
        killers=(f"{_FAILURE}::test_thread_that_cannot_begin_fails_every_fence",),
    ),
    Mutant(
        name="later_failure_wins",
        why="The log names what failed last, and not what broke the device.",
        file=_POLLER,
        find="""\
            if self._error is not None:
                return
            self._error = error""",
        replace="            self._error = error",
        killers=(
            f"{_GAPS}::TestFailure::test_first_failure_is_told_to_fences_to_come",
        ),
    ),
    Mutant(
        name="poller_death_unnoticed",
        why="When the poller has ended nobody hears of any copy.",
        file=_POLLER,
        find="                self._on_failure(failure)\n",
        replace="",
        killers=(
            f"{_FAILURE}::test_thread_that_dies_fails_every_fence",
            f"{_FOR_GOOD}::test_thread_that_dies_is_a_failed_device",
        ),
    ),
    Mutant(
        name="copies_and_events_mixed",
        why="Fences pass for others' copies where threads copy at the same time.",
        file="ucm/devices/accelerator.py",
        find="with self._runtime(visits=copy is None), lane.lock:",
        replace="with self._runtime(visits=copy is None):",
        killers=(
            "tests/devices/test_accelerator_copies.py::TestCopies::test_threads_that_copy_take_turns_at_a_stream",
        ),
    ),
    Mutant(
        name="forked_child_fails_its_parents_fences",
        why="A child of the host hangs as it ends: its parent's thread had the lock.",
        file=_POLLER,
        find="        if self._pid == os.getpid():",
        replace="        if self._pid:",
        killers=(
            "tests/devices/test_poller_waits.py::test_child_ends_though_the_poller_was_at_work_as_it_was_forked",
        ),
    ),
)
