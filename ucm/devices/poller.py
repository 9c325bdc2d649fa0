# SPDX-License-Identifier: Apache-2.0
"""
The one thread of a device that asks whether events have passed.

Events on one stream pass in order, so only the oldest of each stream is asked for.
Everybody else looks at a flag, waits for a condition or is called back: no other thread
calls the driver for that, and none spins. Where the driver can it waits without the
interpreter lock (``await_any``): at full load there is an event to be waited for at all
times, and each look from Python takes the lock from the engine's thread. Elsewhere the
thread pauses between two looks, 50 us at first and up to a millisecond while nothing passes.
Without events it sleeps.

When the driver raises, or the thread ends for any other reason, all fences fail: nobody
can tell any more when they pass.

Threading: ``watch`` and the fences may be used from any thread; events are recycled and
call-backs called on the poller's.
"""

import atexit
import ctypes
import os
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from ucm.devices.abc import Fence
from ucm.devices.driver import Driver, Event, News
from ucm.devices.events import anew
from ucm.errors import DeviceError, DeviceFailedError
from ucm.threads import SYSTEM, Condition, Threads

__all__ = ["EventFence", "EventPoller"]

_FIRST_PAUSE_S = 50e-6
_LAST_PAUSE_S = 1e-3


class EventFence(Fence):
    """
    A fence behind an event of ours.

    Args:
        changed: The poller's.
    """

    __slots__ = ("_callbacks", "_changed", "_error", "_is_over")

    def __init__(self, changed: Condition) -> None:
        self._changed = changed
        self._is_over = False
        self._error: DeviceError | None = None
        self._callbacks: list[Callable[[], None]] = []

    def is_done(self) -> bool:
        """Return whether the poller has seen the event pass."""
        if self._error is not None:
            raise anew(self._error)
        return self._is_over

    def wait(self, timeout: float) -> bool:
        """Block the thread up to *timeout* seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, timeout)
        return self.is_done()

    def call_when_over(self, callback: Callable[[], None]) -> bool:
        """Call on the poller's thread; at once if it is over."""
        with self._changed:
            if not self._is_over:
                self._callbacks.append(callback)
                return True
        callback()
        return True

    def end(self, error: DeviceError | None) -> list[Callable[[], None]]:
        """Mark as over, with the condition held; return whom to call without it."""
        self._error = error
        self._is_over = True
        callbacks, self._callbacks = self._callbacks, []
        return callbacks


class _Watched(NamedTuple):
    event: Event
    fence: EventFence


class EventPoller:
    """
    Watches events.

    Args:
        driver: Of their device.
        recycle: Called with each event that has passed.
        on_failure: Called once, on the poller's thread, when the device has failed.
        name: Of the thread.
        threads: Where the thread and its condition come from.
    """

    def __init__(
        self,
        driver: Driver,
        recycle: Callable[[Event], None],
        on_failure: Callable[[DeviceError], None],
        name: str,
        threads: Threads = SYSTEM,
    ) -> None:
        self._driver = driver
        self._recycle = recycle
        self._on_failure = on_failure
        self._changed = threads.condition()
        self._streams: dict[Hashable, deque[_Watched]] = {}
        self._is_calling = False
        """Whether some that have passed are still to be recycled, and told to call-backs."""
        self._error: DeviceError | None = None
        self._news = ctypes.c_int()
        """Changes when there is another event to be asked for."""
        self._thread = threads.thread(self._main, name)
        self._pid = 0

    def start(self) -> None:
        """Start the thread."""
        atexit.register(self._end_with_process)
        self._pid = os.getpid()
        self._thread.start()

    def watch(self, stream: Hashable, event: Event) -> EventFence:
        """
        Return the fence behind *event*, which was just recorded.

        Calls for one stream come in the order of the records.

        Args:
            stream: The key of the one that it was recorded on.
            event: Ours.
        """
        fence = EventFence(self._changed)
        with self._changed:
            if self._error is None:
                queue = self._streams.setdefault(stream, deque())
                queue.append(_Watched(event, fence))
                if len(queue) == 1:
                    self._tell()
            else:
                fence.end(self._error)
        return fence

    def wait_idle(self, timeout: float) -> None:
        """Block up to *timeout* seconds until nothing is watched, and all were called back."""
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._streams or self._is_calling), timeout
            )

    def fail(self, error: DeviceError) -> None:
        """Let all fences fail, those to come as well. The first error stays."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            watched = [each for queue in self._streams.values() for each in queue]
            self._streams.clear()
            callbacks = [call for each in watched for call in each.fence.end(error)]
            self._tell()
        for call in callbacks:
            call()

    def close(self, timeout: float) -> bool:
        """Fail what is left and end the thread; False if it has not ended in time."""
        self.fail(DeviceError("the device is closed"))
        atexit.unregister(self._end_with_process)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _end_with_process(self) -> None:
        """Ask no more: the runtime goes, and a wait in native code would outlast it."""
        if self._pid == os.getpid():  # in a forked child the lock may be held for ever
            self.fail(DeviceError("the process ends"))

    def _main(self) -> None:
        error = "the poller has ended"
        try:
            self._driver.bind_thread()
            self._poll()
        except RuntimeError as exc:
            error = str(exc)
        finally:
            if self._error is None:
                failure = DeviceFailedError(f"the device has failed: {error}")
                self._on_failure(failure)
                self.fail(failure)

    def _poll(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._error is not None:
                    return
                heads = [
                    (stream, queue[0].event) for stream, queue in self._streams.items()
                ]
                news = News(self._news, self._news.value)
            passed = [stream for stream, event in heads if self._driver.is_done(event)]
            if not passed and self._driver.await_any([each for _, each in heads], news):
                continue
            heads.clear()  # or an event would outlive its recycling
            if passed:
                self._pass(passed)
                pause = _FIRST_PAUSE_S
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._error is not None, pause)
            pause = min(pause * 2, _LAST_PAUSE_S)

    def _tell(self) -> None:
        """Have the thread look anew, with the condition held."""
        self._news.value = (self._news.value + 1) & 0x7FFFFFFF
        self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._streams) or self._error is not None

    def _pass(self, streams: list[Hashable]) -> None:
        """Let the oldest fence of each stream go."""
        callbacks: list[Callable[[], None]] = []
        events: list[Event] = []
        with self._changed:
            for stream in streams:
                queue = self._streams.get(stream)
                if queue is None:  # failed meanwhile
                    continue
                event, fence = queue.popleft()
                if not queue:
                    del self._streams[stream]
                events.append(event)
                callbacks += fence.end(None)
            self._is_calling = True
        for event in events:
            self._recycle(event)
        for call in callbacks:
            call()
        with self._changed:
            self._is_calling = False
            self._changed.notify_all()
