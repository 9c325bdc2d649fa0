# SPDX-License-Identifier: Apache-2.0
"""
Events: ours, which are pooled, and the engine's, which are borrowed.

Only events of our own are ever polled. One that the engine lends is held back by a
stream of ours and given back (``BorrowedEvent``): never recorded, reset, polled or
destroyed by us, so that an owner who records it again or drops it cannot hurt us.

A borrowed event must prove that it was recorded in this step. torch makes an event when
it is first recorded; until then its handle is 0, ``query`` says True and waiting for it
does nothing, so that bytes copied behind it would be torn without any error. The handle
tells whether it was ever recorded, not when: an event that was seen in an earlier step
is *stale* from then on.

Threading: ``EventBook`` may be used from any thread; one lock covers it. A
``BorrowedEvent`` has a lock of its own, under which it is used and released.
"""

import contextlib
import enum
import weakref
from collections import Counter
from collections.abc import Callable, Iterable

from ucm.devices.abc import Fence
from ucm.devices.driver import Driver, Event, Stream
from ucm.errors import (
    DeviceError,
    EventNotRecordedError,
    EventStaleError,
    EventUnreadableError,
    ForeignEventError,
    text_of,
)
from ucm.threads import SYSTEM, Threads

__all__ = [
    "BorrowedEvent",
    "DoneFence",
    "EventBook",
    "FailedFence",
    "Loan",
    "anew",
    "give_back",
]

_MOST_FREE = 64
"""Events kept for the next record; more are destroyed when they have passed."""
_SEEN = "_ucm_seen"
"""Attribute of an engine's event: the step in which each book has first seen it."""
_UNREADABLE = (AttributeError, TypeError, ValueError)
_ABANDONED: list[Event] = []
"""Engines' events that a stream of a failed device may still wait for."""


def anew(error: DeviceError) -> DeviceError:
    """
    Return the same error as if it had never been raised.

    One that is raised again and again collects tracebacks, and with them everything
    that was on the stack each time: events, slots, the engine's metadata.
    """
    return type(error)(*error.args)


class DoneFence(Fence):
    """A fence behind work that was over before the fence was made."""

    __slots__ = ()

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self, timeout: float) -> bool:
        """Return True at once; *timeout* is never used up."""
        return True

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        """Call at once."""
        callback()
        return True


class FailedFence(Fence):
    """
    A fence that will never pass.

    Args:
        error: Why; raised by whoever looks at the fence.
    """

    __slots__ = ("_error",)

    def __init__(self, error: DeviceError) -> None:
        self._error = anew(error)

    @classmethod
    def of(cls, error: Exception) -> "FailedFence":
        """Return one for whatever a device, which may be somebody else's, has raised."""
        if not isinstance(error, DeviceError):
            error = DeviceError(text_of(error))
        return cls(error)

    def is_done(self) -> bool:
        """Raise why it never passes."""
        raise anew(self._error)

    def wait(self, timeout: float) -> bool:
        """Raise why it never passes."""
        raise anew(self._error)

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        """Call at once: there is nothing to wait for."""
        callback()
        return True


class Loan(enum.Enum):
    """How far a loan has come."""

    BORROWED = "borrowed"
    FENCED = "fenced"
    RELEASED = "released"


class BorrowedEvent:
    """
    Our short loan of an event that the engine owns.

    Args:
        event: The engine's; kept alive until the release.
        handle: Its native handle.
        driver: Of its device.
        on_release: Called once.
    """

    __slots__ = ("_driver", "_event", "_lock", "_on_release", "handle", "state")

    def __init__(
        self,
        event: Event,
        handle: int,
        driver: Driver,
        on_release: Callable[["BorrowedEvent"], None],
        threads: Threads = SYSTEM,
    ) -> None:
        self._event = event
        self._driver = driver
        self._on_release = on_release
        self._lock = threads.lock()
        self.handle = handle
        self.state = Loan.BORROWED

    def hold_back(self, stream: Stream) -> None:
        """
        Let *stream*, one of ours, wait for the event.

        Raises:
            DeviceError: The loan is over; a bug of the caller.
        """
        with self._lock:
            if self.state is Loan.RELEASED:
                raise DeviceError(f"the loan of event {self.handle:#x} is over")
            self._driver.wait(stream, self._event)
            self.state = Loan.FENCED

    def release(self) -> None:
        """Give the event back. Idempotent; the event itself is its owner's."""
        self._end()

    def abandon(self) -> None:
        """
        End the loan, and keep the event alive for the life of the process.

        For one that a stream waits for and nobody can tell any more for how long.
        """
        event = self._end()
        if event is not None:
            _ABANDONED.append(event)

    def _end(self) -> Event | None:
        """End the loan, if it is not over; return the event that it was for."""
        with self._lock:
            if self.state is Loan.RELEASED:
                return None
            self.state = Loan.RELEASED
            event, self._event = self._event, None
        self._on_release(self)
        return event


def give_back(loans: Iterable[BorrowedEvent], fence: Fence) -> None:
    """End loans whose events nothing waits for behind *fence*, or keep them."""
    with contextlib.suppress(DeviceError):  # it failed, and a stream may wait for ever
        if fence.is_done():
            for loan in loans:
                loan.release()


class EventBook:
    """
    Which events are ours, and which we have on loan.

    Args:
        driver: Of the device they belong to.
        threads: Where locks come from.
    """

    def __init__(self, driver: Driver, threads: Threads = SYSTEM) -> None:
        self._driver = driver
        self._threads = threads
        self._lock = threads.lock()
        self._free: list[Event] = []
        self._own: dict[int, Event] = {}
        self._loans: set[BorrowedEvent] = set()
        self._step = 0
        self._seen: weakref.WeakKeyDictionary[Event, int] = weakref.WeakKeyDictionary()

    @property
    def num_own(self) -> int:
        """Events of ours that were recorded and not recycled."""
        with self._lock:
            return len(self._own)

    @property
    def borrowed(self) -> dict[int, int]:
        """How many loans there are of each native handle."""
        with self._lock:
            return dict(Counter(loan.handle for loan in self._loans))

    def record(self, stream: Stream) -> Event:
        """
        Return an event of ours that passes when all work now in *stream* is done.

        It stays in the book until ``recycle``.

        Raises:
            RuntimeError: The runtime could not record it; the event is destroyed.
        """
        with self._lock:
            event = self._free.pop() if self._free else None
        if event is None:
            event = self._driver.make_event()
        self._driver.record(event, stream)
        with self._lock:
            self._own[id(event)] = event
        return event

    def recycle(self, event: Event) -> None:
        """Take back an event of ours that has passed. Others are none of our business."""
        with self._lock:
            is_ours = self._own.pop(id(event), None) is not None
            if is_ours and len(self._free) < _MOST_FREE:
                self._free.append(event)

    def begin_step(self, step: int) -> None:
        """Make everything seen so far stale."""
        with self._lock:
            self._step = step

    def handle_of(self, event: Event) -> int:
        """
        Return an event's native handle.

        Raises:
            EventUnreadableError: It has none that could be read; names its type.
            EventNotRecordedError: It was never recorded.
        """
        kind = type(event).__qualname__
        try:
            handle = self._driver.handle(event)
            value = None if handle is None else int(handle)
        except _UNREADABLE as exc:
            raise EventUnreadableError(f"a {kind} has no handle: {exc}") from exc
        if value is None:
            raise EventUnreadableError(f"a {kind} has no handle")
        if not value:
            raise EventNotRecordedError(f"a {kind} was never recorded")
        return value

    def borrow(self, event: Event) -> BorrowedEvent:
        """
        Take an event on loan that the engine has recorded in this step.

        Raises:
            EventNotRecordedError: It proves nothing; subclasses say why.
            ForeignEventError: It is another device's.
        """
        handle = self.handle_of(event)
        index = self._driver.device_index(event)
        if index is not None and index != self._driver.index:
            raise ForeignEventError(
                f"event {handle:#x} is of device {index}, not {self._driver.index}"
            )
        with self._lock:
            self._check_fresh(event, handle)
            loan = BorrowedEvent(
                event, handle, self._driver, self._given_back, self._threads
            )
            self._loans.add(loan)
        return loan

    def close(self) -> None:
        """
        Forget all events of ours, and abandon those that are still on loan.

        Nothing is asked of the driver, which may be gone; dropping the last reference
        to an event of ours destroys it. Idempotent.
        """
        with self._lock:
            loans = list(self._loans)
            self._free.clear()
            self._own.clear()
        for loan in loans:
            loan.abandon()

    def _check_fresh(self, event: Event, handle: int) -> None:
        try:
            seen = self._first_seen(event)
        except TypeError as exc:
            kind = type(event).__qualname__
            raise EventUnreadableError(f"a {kind} cannot be watched: {exc}") from exc
        if seen != self._step:
            raise EventStaleError(
                f"event {handle:#x} was seen in step {seen} and this is {self._step}"
            )

    def _first_seen(self, event: Event) -> int:
        """
        Return the step in which an event was first seen; now, if never before.

        It is written on the event where it takes attributes. A weak reference would
        outlive a ``torch.cuda.Event``, whose destructor does not end them (torch 2.11):
        the next event may lie at the same address, and would be taken for the dead one.
        A plain ``torch.Event`` takes no attributes, and does end them.
        """
        if hasattr(event, "__dict__"):
            books = event.__dict__.setdefault(_SEEN, weakref.WeakKeyDictionary())
            step: int = books.setdefault(self, self._step)
            return step
        return self._seen.setdefault(event, self._step)

    def _given_back(self, loan: BorrowedEvent) -> None:
        with self._lock:
            self._loans.discard(loan)
