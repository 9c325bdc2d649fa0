# SPDX-License-Identifier: Apache-2.0
"""The thread that asks whether events have passed, in virtual time."""

import greenlet
import pytest

from tests.devices.accelerator_kit import TIMEOUT, Watch
from tests.kit.accelerator import SimulatedDriver
from ucm.devices import poller
from ucm.errors import DeviceError, DeviceFailedError

SEEDS = range(20)
LINES = (poller.__file__,)


class DyingDriver(SimulatedDriver):
    """A runtime that ends the thread that asks, without a word, when it is told to."""

    is_deadly = False

    def is_done(self, event):
        """Ask, or end the thread."""
        if self.is_deadly:
            raise SystemExit
        return super().is_done(event)


class TestLooks:
    def test_only_the_oldest_of_each_stream_is_asked(self):
        """Events of a stream pass in order, so that those behind its oldest are not
        asked, however many there are."""

        def body(watch):
            pairs = watch.watch(0, 5), watch.watch(1, 5)
            watch.sleep()
            for events in pairs:
                asked = [event.uses["query"] for event, _ in events]
                assert asked[0] > 10
                assert [0] * 4 == asked[1:]
            watch.hardware.drain()
            watch.sleep()
            for event, fence in pairs[0] + pairs[1]:
                assert fence.is_done()
                assert event.uses["query"] > 0
            assert [1] * 4 == [event.uses["query"] for event, _ in pairs[0][1:]]

        Watch().run(body)

    def test_stream_is_not_held_up_by_another(self):
        """What passes on one stream is seen while another's oldest event stands."""

        def body(watch):
            watch.driver.wait(watch.streams[0], watch.book.record(watch.streams[2]))
            ((_, held),) = watch.watch(0)
            ((_, passed),) = watch.watch(1)
            watch.streams[1].ops[0].is_done = True
            assert passed.wait(TIMEOUT)
            assert not held.is_done()
            watch.streams[1].ops.clear()
            watch.hardware.drain()
            assert held.wait(TIMEOUT)

        Watch().run(body)

    def test_only_its_thread_asks(self):
        """C6 rule 4: fences ask a flag; only the poller's one thread asks the runtime,
        for events of ours."""

        def body(watch):
            for _ in range(5):
                for stream in range(3):
                    ((_, fence),) = watch.watch(stream)
                    fence.is_done()
                    fence.call_when_over(lambda: None)
                    assert fence.wait(TIMEOUT)
            assert 1 == len(watch.driver.pollers)
            assert watch.main not in watch.driver.pollers
            assert {} == watch.driver.foreign_uses

        Watch(pace=(0, 1, 2)).run(body)

    def test_nobody_spins_when_there_is_nothing_to_ask(self):
        """Without events the thread sleeps until there are some: an hour costs neither
        a question nor a turn of it, before the first event and after the last."""

        def body(watch):
            for _ in range(2):
                watch.sleep(1.0)
                turns = watch.simulation.switches
                assert 0 == watch.counted(3600.0)
                assert watch.simulation.switches - turns < 5
                ((_, fence),) = watch.watch()
                watch.hardware.drain()
                assert fence.wait(TIMEOUT)

        Watch().run(body)

    def test_event_that_stays_away_is_asked_at_most_each_millisecond(self):
        """While nothing passes the pauses grow from 50 us to a millisecond, so that a
        long kernel costs a thousand questions a second and not twenty thousand."""
        at_first, later = [], []

        def body(watch):
            watch.watch()
            at_first.append(watch.counted(0.01))
            later.append(watch.counted(0.5))

        for seed in range(6):
            Watch(seed).run(body)
        # The clock leaps now and then, so that some ask less often.
        assert 10 < max(at_first) < 20
        assert 200 < max(later) <= 505

    def test_pause_starts_anew_when_something_passed(self):
        """Who waits for one event after another does not pay the pause that a long wait
        before has led to."""
        counted = []

        def body(watch):
            watch.watch()
            watch.sleep()
            watch.hardware.drain()
            watch.sleep(0.01)
            watch.watch()
            counted.append(watch.counted(0.002))

        for seed in range(6):
            Watch(seed).run(body)
        assert 5 <= max(counted) < 10


class TestFences:
    def test_fence_passes_once_and_stays_so(self):
        """A fence is done when its event has passed and not before, and stays so when
        the event is recorded again for another."""

        def body(watch):
            ((event, fence),) = watch.watch()
            watch.sleep()
            assert not fence.is_done()
            watch.hardware.drain()
            assert fence.wait(TIMEOUT)
            watch.sleep()
            ((again, other),) = watch.watch()
            assert again is event
            watch.sleep()
            assert fence.is_done()
            assert not other.is_done()
            watch.hardware.drain()
            assert other.wait(TIMEOUT)

        Watch().run(body)

    def test_event_is_recycled_once_it_has_passed(self):
        """S0-28: each event is taken back once, after it has passed, and in order."""

        def body(watch):
            events = [event for event, _ in watch.watch(0, 4)]
            watch.sleep()
            assert [] == watch.recycled
            watch.hardware.drain()
            watch.sleep()
            assert events == watch.recycled
            assert 0 == watch.book.num_own

        Watch().run(body)

    def test_wait_is_bounded(self):
        """A fence that does not pass is waited for as long as was said, and no longer."""

        def body(watch):
            ((_, fence),) = watch.watch()
            start = watch.simulation.now
            assert not fence.wait(5.0)
            assert 5.0 <= watch.simulation.now - start < 5.5
            assert not fence.wait(0.0)
            watch.hardware.drain()
            assert fence.wait(TIMEOUT)

        Watch().run(body)

    def test_wait_ends_when_the_event_has_passed(self):
        """Who waits is woken within a millisecond or so, not at the end of its time."""

        def body(watch):
            ((_, fence),) = watch.watch()
            watch.sleep()
            watch.hardware.drain()
            start = watch.simulation.now
            assert fence.wait(3600.0)
            assert watch.simulation.now - start < 0.2

        Watch().run(body)

    def test_callbacks_are_called_once_when_it_is_over(self):
        """Each call-back is called once, in order, after its fence has passed."""

        def body(watch):
            ((_, fence),) = watch.watch()
            called = []
            for number in range(3):
                assert fence.call_when_over(
                    lambda n=number: called.append((n, fence.is_done()))
                )
            watch.sleep()
            assert [] == called
            watch.hardware.drain()
            watch.sleep()
            assert [(0, True), (1, True), (2, True)] == called

        Watch().run(body)

    def test_callback_that_comes_late_is_called_at_once(self):
        """A call-back for a fence that is over is called before the call returns, by
        the caller; also when the fence has failed."""

        def body(watch):
            (_, passed), (_, failed) = watch.watch(0)[0], watch.watch(1)[0]
            watch.hardware.run(1)
            watch.sleep()
            watch.poller.fail(DeviceFailedError("gone"))
            for fence in (passed, failed):
                called = []
                assert fence.call_when_over(
                    lambda: called.append(greenlet.getcurrent())  # noqa: B023
                )
                assert [watch.main] == called

        Watch().run(body)

    def test_callback_is_called_once_however_threads_interleave(self):
        """No call-back is lost or called twice when it is registered while its fence
        passes, and the callback may use fences itself."""
        for seed in SEEDS:
            called = []

            def body(watch, called=called):
                for number in range(10):
                    ((_, fence),) = watch.watch(number % 3)
                    for _ in range(3):
                        fence.call_when_over(
                            lambda f=fence, n=number: f.call_when_over(
                                lambda: called.append(n)
                            )
                        )
                        watch.simulation.pause()
                watch.sleep(1.0)

            Watch(seed, lines=LINES, pace=(0, 1, 2)).run(body)
            assert [number for number in range(10) for _ in range(3)] == sorted(called)


class TestFailure:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_failed_runtime_fails_every_fence(self, seed):
        """C6 rule 10: when the runtime raises, all fences fail, those to come too; who
        waits is woken, call-backs are called once, and the failure is told once."""
        called = []

        def body(watch):
            fences = [fence for _, fence in watch.watch(0, 2) + watch.watch(1, 2)]
            for fence in fences:
                fence.call_when_over(lambda: called.append(1))
            watch.driver.fail_at("is_done", 3)
            for fence in fences:
                with pytest.raises(DeviceFailedError, match="is_done failed"):
                    fence.wait(3600.0)
                with pytest.raises(DeviceFailedError):
                    fence.is_done()
            late = watch.poller.watch(watch.streams[2], object())
            with pytest.raises(DeviceFailedError, match="is_done failed"):
                late.is_done()
            assert late.call_when_over(lambda: called.append(1))
            watch.sleep()
            assert 0 == watch.counted(10.0)

        watch = Watch(seed, lines=LINES)
        watch.run(body)
        assert 5 == len(called)
        assert 1 == len(watch.failures)
        assert [] == watch.recycled

    def test_thread_that_dies_fails_every_fence(self):
        """A thread that ends for whatever reason leaves nobody waiting: its fences fail,
        and so do later ones."""

        def body(watch):
            ((_, fence),) = watch.watch()
            watch.sleep()
            watch.driver.is_deadly = True
            with pytest.raises(DeviceFailedError, match="poller has ended"):
                fence.wait(3600.0)
            ((_, late),) = watch.watch(1)
            with pytest.raises(DeviceFailedError, match="poller has ended"):
                late.is_done()

        watch = Watch(driver=DyingDriver)
        watch.run(body)
        assert 1 == len(watch.failures)

    def test_thread_that_cannot_begin_fails_every_fence(self):
        """A device that cannot be made the thread's current one is a failed device."""

        def body(watch):
            watch.sleep()
            with pytest.raises(DeviceFailedError, match="bind_thread failed"):
                watch.poller.watch(watch.streams[0], object()).wait(3600.0)

        watch = Watch()
        watch.driver.fail_at("bind_thread", 2)
        watch.run(body)

    def test_first_failure_stays(self):
        """Who fails a poller that has failed changes nothing."""

        def body(watch):
            ((_, fence),) = watch.watch()
            watch.poller.fail(DeviceFailedError("first"))
            watch.poller.fail(DeviceFailedError("second"))
            ((_, late),) = watch.watch()
            for each in (fence, late):
                with pytest.raises(DeviceFailedError, match="first"):
                    each.is_done()

        watch = Watch()
        watch.run(body)
        assert [] == watch.failures

    def test_closing_fails_what_is_left(self):
        """S2-18: closing ends the thread in no time and fails the fences it leaves; it
        is no failure of the device."""

        def body(watch):
            ((_, fence),) = watch.watch()
            start = watch.simulation.now
            assert watch.poller.close(TIMEOUT)
            assert watch.simulation.now - start < 0.5
            assert "events" not in watch.simulation.names()
            with pytest.raises(DeviceError, match="closed"):
                fence.wait(TIMEOUT)
            assert watch.poller.close(TIMEOUT)

        watch = Watch()
        watch.run(body)
        assert [] == watch.failures
