# SPDX-License-Identifier: Apache-2.0
"""How the poller waits where its runtime can wait by itself, in virtual time."""

import atexit
import os
import signal

import pytest

from tests.devices.accelerator_kit import TIMEOUT, Watch, running
from tests.kit.accelerator import SimulatedDriver
from ucm.errors import DeviceError


class WaitingDriver(SimulatedDriver):
    """A runtime that waits by itself until an event has passed."""

    def await_any(self, events, news):
        """Wait in virtual time, without asking as ``is_done`` does."""
        while news.number.value == news.seen:
            self.sleep(0.001)
            if any(event.native in self.passed for event in events):
                break
        return True


class TestWaits:
    def waiting(self, body):
        """Run a body beside a poller whose runtime waits by itself."""
        watch = Watch(driver=WaitingDriver)
        watch.driver.sleep, watch.driver.passed = watch.sleep, set()
        watch.run(body)

    def test_runtime_that_waits_is_not_asked_meanwhile(self):
        """At full load there is an event at all times: to ask for it again and again takes
        the interpreter lock from the engine each time."""

        def body(watch):
            ((event, fence),) = watch.watch(0)
            assert 1 == watch.counted(0.5)
            watch.hardware.drain()
            watch.driver.passed.add(event.native)
            assert fence.wait(TIMEOUT)
            assert 2 == event.uses["query"]

        self.waiting(body)

    def test_event_of_another_stream_is_asked_for_at_once(self):
        """A copy's event is not behind the forward pass that is waited for."""

        def body(watch):
            watch.driver.wait(watch.streams[0], watch.book.record(watch.streams[2]))
            ((_, held),) = watch.watch(0)
            watch.sleep()
            ((_, passed),) = watch.watch(1)
            watch.streams[1].ops[0].is_done = True
            assert passed.wait(TIMEOUT)
            assert not held.is_done()
            watch.streams[1].ops.clear()
            watch.hardware.drain()

        self.waiting(body)

    def test_event_that_comes_amid_a_look_is_asked_for_at_once(self):
        """What is watched while the runtime is asked of others is no part of that look, nor
        of the wait behind it."""

        def body(watch):
            late, is_done = [], watch.driver.is_done

            def look(event):
                if not late:
                    late.extend(watch.watch(1))
                return is_done(event)

            watch.driver.wait(watch.streams[0], watch.book.record(watch.streams[2]))
            watch.driver.is_done = look
            ((_, held),) = watch.watch(0)
            watch.sleep(0.01)
            ((event, passed),) = late
            watch.streams[1].ops[0].is_done = True
            watch.driver.passed.add(event.native)
            assert passed.wait(TIMEOUT)
            assert not held.is_done()
            watch.streams[1].ops.clear()
            watch.hardware.drain()

        self.waiting(body)

    def test_nothing_is_asked_for_once_the_process_ends(self, monkeypatch):
        """A wait in native code would go on while the runtime is taken down: it ends before,
        and so does what waits for its events."""
        at_end = []
        monkeypatch.setattr(atexit, "register", at_end.append)
        monkeypatch.setattr(atexit, "unregister", at_end.remove)

        def body(watch):
            ((_, fence),) = watch.watch(0)
            (end,) = at_end
            end()
            with pytest.raises(DeviceError, match="process ends"):
                fence.wait(TIMEOUT)
            assert 0 == watch.counted(0.5)
            watch.hardware.drain()

        self.waiting(body)
        assert [] == at_end


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_ends_though_the_poller_was_at_work_as_it_was_forked(monkeypatch):
    """What is left to do as a process ends waits for no lock of a thread that only the parent
    has."""
    at_end = []
    monkeypatch.setattr(atexit, "register", at_end.append)
    with running() as world:
        (end,) = at_end
        with world.device._poller._changed:
            if not (child := os.fork()):
                signal.alarm(15)
                end()
                os._exit(0)
        assert 0 == os.waitpid(child, 0)[1]
        assert world.device.lease().wait(TIMEOUT)
