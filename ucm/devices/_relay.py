# SPDX-License-Identifier: Apache-2.0
"""
The stream that waits for events which the engine lends, and the loans that it waits for.

Hosts lease on several threads at once. One lock makes a wait, the fence behind it and the loans
that end with that fence one step: behind a fence that is older than its wait a loan would
end while the stream has still to look at the event.

Threading: any thread.
"""

import contextlib
import functools
from collections.abc import Callable

from ucm.devices.abc import Fence
from ucm.devices.driver import Driver, Stream
from ucm.devices.events import BorrowedEvent, DoneFence, Loan, give_back
from ucm.errors import DeviceError
from ucm.threads import Threads

__all__ = ["Relay"]


class Relay:
    """
    One for each device.

    Args:
        driver: Of the device.
        fence_on: Records an event of ours on a stream, and has it watched.
        threads: Where the lock comes from.
    """

    def __init__(
        self, driver: Driver, fence_on: Callable[[Stream], Fence], threads: Threads
    ) -> None:
        self._stream = driver.make_stream()
        self._captures_waits = driver.captures_waits
        self._fence_on = fence_on
        self._lock = threads.lock()
        self._held_back: list[BorrowedEvent] = []
        """What the stream waits for without a fence of ours behind it."""

    def fence_behind(self, loan: BorrowedEvent) -> Fence:
        """
        Return a fence behind an event, and give that back when nothing waits for it.

        Raises:
            DeviceError: No event of ours could be recorded behind the wait.
            RuntimeError: The device has failed.
        """
        with self._lock:
            try:
                loan.hold_back(self._stream)
            finally:
                if self._captures_waits:
                    loan.release()
                else:  # also if it failed: the stream may wait all the same
                    self._held_back.append(loan)
            return self._fence()

    def end_loans(self, wait: Callable[[], object]) -> None:
        """See that each has a fence behind it, or that *wait* has waited for all there is."""
        with self._lock, contextlib.suppress(DeviceError):  # no event to be had
            if self._held_back:
                self._fence()
        if self._held_back:
            self.end_loans_behind(wait)

    def end_loans_behind(self, wait: Callable[[], object]) -> None:
        """
        End the loans there are when *wait* has waited for all that the device has.

        An engine's thread may lend others meanwhile, and does not wait.
        """
        with self._lock:
            loans = list(self._held_back)
        wait()
        give_back(loans, DoneFence())
        with self._lock:
            self._held_back = [
                each for each in self._held_back if each.state is not Loan.RELEASED
            ]

    def _fence(self) -> Fence:
        fence = self._fence_on(self._stream)
        self._end_behind(fence)
        return fence

    def _end_behind(self, fence: Fence) -> None:
        held_back, self._held_back = self._held_back, []
        fence.call_when_over(functools.partial(give_back, held_back, fence))
