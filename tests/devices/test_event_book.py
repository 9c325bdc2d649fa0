# SPDX-License-Identifier: Apache-2.0
"""Whose events are whose: loans of the engine's, and the pool of ours."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from tests.devices.accelerator_kit import make_driver
from tests.kit.accelerator import SimEvent, SimulatedDriver
from tests.kit.accelerator_kit import BOTH
from tests.kit.accelerator_streams import CUDA
from ucm.devices.events import BorrowedEvent, EventBook, Loan
from ucm.errors import (
    DeviceError,
    EventNotRecordedError,
    EventStaleError,
    EventUnreadableError,
    ForeignEventError,
)


class ToldDriver(SimulatedDriver):
    """A runtime whose events have the handle that the test says, or raise."""

    told: object = None

    def handle(self, event):
        """Return or raise what the test says."""
        if isinstance(self.told, BaseException):
            raise self.told
        return self.told


class Slotted:
    """No weak reference to it can be made."""

    __slots__ = ()


class Referable:
    """Weak references to it can be made, and nothing written on it."""

    __slots__ = ("__weakref__",)


class Books:
    """A book on a device, and the engine beside."""

    def __init__(self, semantics=CUDA, driver=SimulatedDriver):
        self.driver = make_driver(semantics, driver=driver)
        self.driver.bind_thread()
        self.hardware = self.driver.hardware
        self.stream = self.driver.make_stream()
        self.book = EventBook(self.driver)

    def event(self, stream=None):
        """Return an event that the engine has recorded."""
        event = SimEvent(self.hardware)
        event.record(stream)
        return event

    def record(self, count):
        """Record events of ours."""
        return [self.book.record(self.stream) for _ in range(count)]


@pytest.fixture
def books():
    """Keep books; at the end nothing was misused and nobody else's event asked."""
    books = Books()
    yield books
    books.hardware.drain()
    books.book.close()
    assert [] == books.hardware.violations
    assert {} == books.driver.foreign_uses
    assert {} == books.book.borrowed


class TestBorrow:
    def test_event_lives_until_its_release(self, books):
        """S0-18, C6 rule 2: a loan keeps the engine's event alive when everybody else has
        dropped it, and no longer than until its release."""
        event = books.event()
        alive, native = weakref.ref(event), event.native
        loan = books.book.borrow(event)
        del event
        gc.collect()
        assert native == loan.handle == alive().native
        assert native in books.hardware.live_events
        loan.release()
        gc.collect()
        assert alive() is None
        assert {} == books.book.borrowed

    def test_handle_is_the_native_one(self, books):
        """S0-18: the handle of an event is the native one, as an int."""
        event = books.event()
        assert event.native == books.book.handle_of(event)
        told = Books(driver=ToldDriver)
        told.driver.told = "77"
        assert 77 == told.book.handle_of(object())

    def test_event_that_was_never_recorded_is_refused(self, books):
        """S0-19, C6 rule 1: an event without a handle proves nothing, is not kept, and
        may be borrowed when it has been recorded."""
        event = SimEvent(books.hardware)
        with pytest.raises(EventNotRecordedError, match="SimEvent was never recorded"):
            books.book.borrow(event)
        assert {} == books.book.borrowed
        event.record()
        books.book.borrow(event).release()
        alive = weakref.ref(event)
        del event
        gc.collect()
        assert alive() is None

    def test_none_is_no_event(self, books):
        """C6 rule 1: None is never taken for ready."""
        with pytest.raises(EventUnreadableError, match="NoneType has no handle"):
            books.book.borrow(None)

    @pytest.mark.parametrize(
        "told",
        [AttributeError("a"), TypeError("b"), ValueError("c"), "no number", None],
    )
    def test_handle_that_cannot_be_read_is_told_with_its_type(self, told):
        """S0-20: no attribute, another type or no number is an event that cannot be read;
        the error names its type and nothing is kept."""
        books = Books(driver=ToldDriver)
        books.driver.told = told
        with pytest.raises(EventUnreadableError, match="Slotted has no handle"):
            books.book.borrow(Slotted())
        assert {} == books.book.borrowed

    @pytest.mark.parametrize(
        "told", [KeyError("a"), RuntimeError("b"), KeyboardInterrupt(), SystemExit()]
    )
    def test_other_errors_go_their_way(self, told):
        """S0-20: any other error, and whatever ends the process, is not caught."""
        books = Books(driver=ToldDriver)
        books.driver.told = told
        with pytest.raises(type(told)):
            books.book.borrow(object())

    def test_event_that_cannot_be_watched_is_refused(self):
        """S0-24: an event whose age cannot be known proves nothing, whatever handle it
        has."""
        books = Books(driver=ToldDriver)
        books.driver.told = 5
        books.driver.device_index = lambda event: None
        with pytest.raises(EventUnreadableError, match="Slotted cannot be watched"):
            books.book.borrow(Slotted())
        assert {} == books.book.borrowed

    def test_event_is_stale_one_step_later(self, books):
        """S0-24: an event is good all through the step in which it was first seen and
        never after it, recorded again or not; another event is not affected."""
        event = books.event()
        books.book.begin_step(1)
        for _ in range(3):
            books.book.borrow(event).release()
        books.book.begin_step(2)
        event.record()
        with pytest.raises(EventStaleError, match="seen in step 1 and this is 2"):
            books.book.borrow(event)
        assert {} == books.book.borrowed
        books.book.borrow(books.event()).release()

    def test_engines_event_is_not_referred_to_weakly(self):
        """S0-24: weak references outlive a dead torch.cuda.Event, and the next event at
        its address would be taken for it; what was seen is written on the event, for
        each book apart."""
        books = Books(driver=ToldDriver)
        books.driver.told, books.driver.device_index = 5, lambda event: None
        event, other = SimpleNamespace(), EventBook(books.driver)
        books.book.begin_step(1)
        books.book.borrow(event).release()
        assert 0 == weakref.getweakrefcount(event)
        other.begin_step(2)
        other.borrow(event).release()
        books.book.begin_step(2)
        with pytest.raises(EventStaleError, match="seen in step 1 and this is 2"):
            books.book.borrow(event)

    def test_event_that_takes_no_attributes_is_watched_too(self):
        """S0-24: a plain torch.Event has no place to write on."""
        books = Books(driver=ToldDriver)
        books.driver.told, books.driver.device_index = 5, lambda event: None
        event = Referable()
        books.book.begin_step(1)
        books.book.borrow(event).release()
        books.book.begin_step(2)
        with pytest.raises(EventStaleError, match="seen in step 1 and this is 2"):
            books.book.borrow(event)

    def test_event_of_another_device_is_refused(self, books):
        """S0-26, C6 rule 7: the device is compared at the borrow; a runtime that cannot
        say is believed."""
        event = books.event(books.hardware.make_stream(3))
        with pytest.raises(ForeignEventError, match="device 3, not 0"):
            books.book.borrow(event)
        assert {} == books.book.borrowed
        books.driver.device_index = lambda event: None
        books.book.borrow(event).release()
        assert {"record": 1} == event.uses


class TestLoan:
    @BOTH
    def test_nothing_is_done_to_a_borrowed_event_but_wait(self, semantics):
        """S0-30, C6 rule 3: a loan from its begin to its end, and the book's, neither
        record nor query nor destroy the engine's event."""
        books = Books(semantics)
        event = books.event()
        loan = books.book.borrow(event)
        loan.hold_back(books.stream)
        books.hardware.drain()
        loan.release()
        books.book.recycle(event)
        books.book.close()
        gc.collect()
        assert {"record": 1, "wait": 1} == event.uses
        assert event.native in books.hardware.live_events
        assert {} == books.driver.foreign_uses

    def test_loans_of_one_event_are_counted(self, books):
        """S0-31: an event that is borrowed several times is kept until the last release,
        in whatever order they come."""
        event = books.event()
        alive, native = weakref.ref(event), event.native
        loans = [books.book.borrow(event) for _ in range(4)]
        del event
        for left, at in ((3, 1), (2, 0), (1, 2)):
            loans[at].release()
            loans[at].release()
            assert {native: left} == books.book.borrowed
            assert alive() is not None
        loans[3].release()
        gc.collect()
        assert {} == books.book.borrowed
        assert alive() is None

    def test_states_follow_each_other(self, books):
        """C6 rule 6: a loan is borrowed, fenced and released; after that it may only be
        released again."""
        loan = books.book.borrow(books.event())
        assert Loan.BORROWED is loan.state
        loan.hold_back(books.stream)
        assert Loan.FENCED is loan.state
        loan.hold_back(books.stream)
        loan.release()
        assert Loan.RELEASED is loan.state
        with pytest.raises(
            DeviceError, match=f"loan of event {loan.handle:#x} is over"
        ):
            loan.hold_back(books.stream)
        loan.release()
        assert Loan.RELEASED is loan.state

    def test_release_is_once(self, books):
        """S0-33: a second release of a loan does nothing, also not to another loan of
        the same event."""
        event = books.event()
        one, other = books.book.borrow(event), books.book.borrow(event)
        one.release()
        one.release()
        assert {event.native: 1} == books.book.borrowed
        other.hold_back(books.stream)
        other.release()
        released = []
        loan = BorrowedEvent(event, event.native, books.driver, released.append)
        loan.release()
        loan.release()
        assert [loan] == released

    def test_many_loans_leave_nothing(self, books):
        """S0-28: when each loan is given back, nothing is left of any, and of the
        engine's events neither."""
        for _ in range(200):
            books.book.borrow(books.event()).release()
        gc.collect()
        assert {} == books.book.borrowed
        assert 0 == len(books.book._seen)
        books.hardware.drain()
        assert set() == books.hardware.live_events


class TestOwn:
    def test_own_and_borrowed_events_are_kept_apart(self, books):
        """S0-27: an event is ours or borrowed; one that the engine owns never gets into
        our pool, so that nobody records it."""
        event, (own,) = books.event(), books.record(1)
        loan = books.book.borrow(event)
        assert {event.native: 1} == books.book.borrowed
        assert 1 == books.book.num_own
        books.hardware.drain()
        books.book.recycle(event)
        books.book.recycle(own)
        assert {event.native: 1} == books.book.borrowed
        assert [own] == books.record(2)[:1]
        assert 1 == event.uses["record"]
        loan.release()

    def test_event_that_has_passed_is_used_again(self, books):
        """Events of ours are pooled: as many are made as are on their way at once."""
        for _ in range(5):
            for event in books.record(3):
                books.book.recycle(event)
        assert 3 == books.driver.calls["make_event"]

    def test_event_comes_back_once(self, books):
        """S0-33: an event that is recycled twice is not given to two users."""
        (event,) = books.record(1)
        books.book.recycle(event)
        books.book.recycle(event)
        one, other = books.record(2)
        assert one is not other
        assert 2 == books.book.num_own

    def test_pool_is_bounded(self, books):
        """S0-30: events of ours that the pool has no room for are destroyed when they
        have passed, and the rest at the end; each once, by being dropped."""
        own = books.record(70)
        books.hardware.drain()
        for event in own:
            books.book.recycle(event)
        assert 0 == books.book.num_own
        assert {0} == {event.uses["destroy"] for event in own}
        del own, event
        gc.collect()
        assert 64 == len(books.hardware.live_events)
        books.book.close()
        gc.collect()
        assert set() == books.hardware.live_events

    @pytest.mark.parametrize("is_pooled", [False, True], ids=["new", "pooled"])
    def test_event_that_cannot_be_recorded_is_dropped(self, books, is_pooled):
        """X-07: an event whose record fails is destroyed and in no book, new or not."""
        if is_pooled:
            books.book.recycle(*books.record(1))
            books.hardware.drain()
        books.driver.fail_at("record", 1, stays=False)
        with pytest.raises(RuntimeError, match="record failed"):
            books.record(1)
        gc.collect()
        assert 0 == books.book.num_own
        assert set() == books.hardware.live_events
        assert not books.book._free

    def test_event_that_cannot_be_made_is_in_no_book(self, books):
        """X-07: where no event can be made there is nothing to drop."""
        books.driver.fail_at("make_event", 1, stays=False)
        with pytest.raises(RuntimeError, match="make_event failed"):
            books.record(1)
        assert 0 == books.book.num_own


class TestClose:
    def test_both_sides_are_empty(self, books):
        """S0-29: after ``close`` no event is ours and none is on loan; loans are over,
        their events live on, and closing again does nothing."""
        own = books.record(3)
        books.book.recycle(own.pop())
        loans = [books.book.borrow(books.event()) for _ in range(3)]
        books.hardware.drain()
        books.book.close()
        books.book.close()
        del own
        gc.collect()
        assert 0 == books.book.num_own
        assert {} == books.book.borrowed
        assert {Loan.RELEASED} == {loan.state for loan in loans}
        assert {loan.handle for loan in loans} == books.hardware.live_events

    def test_runtime_is_not_asked(self, books):
        """C6 rule 12: closing drops references and calls nothing of the runtime, which
        may be gone."""
        own = books.record(2)
        books.book.recycle(own[0])
        loan = books.book.borrow(books.event())
        books.hardware.drain()
        before = books.driver.calls.copy()
        books.book.close()
        loan.release()
        books.book.recycle(own[1])
        assert before == books.driver.calls
