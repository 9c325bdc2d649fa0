# SPDX-License-Identifier: Apache-2.0
"""
The pipeline: queue, lanes and copy threads put together on one event loop.

All that is not waiting is done in ``wake``, a plain call on the loop: it moves items into
lanes, takes back what is over and lets it go on, and looks at deadlines every 50 ms
(``deadlines``). The window bounds the items that hold blocks of the engine; what the store
still has to do with others holds slots only.

Threading: ``run`` and everything it calls stay on the loop thread. ``offer`` and
``promote`` come from the engine's thread and only touch the queue, which has its own
lock. Notices for the engine go through the mailbox, once each: *released* (or
*quarantined*), and *settled*; while a copy is under way the latter may come first.
"""

import asyncio
from collections.abc import Callable, Iterator

from ucm.config import QueueConfig, TimeoutConfig
from ucm.devices.abc import Device
from ucm.errors import PipelineClosedError
from ucm.pipeline.deadlines import Deadlines
from ucm.pipeline.dump_queue import DumpQueue
from ucm.pipeline.lane import RequestLane
from ucm.pipeline.load import load_chain
from ucm.pipeline.recorder import Recorder
from ucm.pipeline.runner import Runner
from ucm.pipeline.save import OwnStages, save_chain
from ucm.pipeline.stage import VERIFY_WORKER, CopyStage
from ucm.pipeline.tickets import (
    Direction,
    LaneKey,
    Listener,
    Outcome,
    OutcomeKind,
    Ticket,
)
from ucm.pipeline.workers import CopyThread
from ucm.reasons import Reason
from ucm.stores.abc import Store
from ucm.threads import SYSTEM, Threads

__all__ = ["Pipeline"]

_SWEEP_S = 0.05


class Pipeline(Listener):
    """
    Saves and loads what the queue accepts.

    Args:
        store: Where blocks go; the caller's.
        device: Where blocks come from; the caller's, registered.
        queue: Bounds.
        timeout: Deadlines.
        recorder: Told of everything.
        on_failure: Called once when a copy thread has died or is stuck; any thread.
        take_in: Called on the loop before the queue is looked at; offers what is new.
        confirms: See ``save_chain``.
        before_commit: See ``save_chain``.
        threads: Where the clock, threads and locks come from.
        on_copy_thread: Called on each copy thread before its first job.
        num_hashing: Threads that compute checksums, of whatever a device copies by itself
            and of loads where it does not.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        *,
        queue: QueueConfig,
        timeout: TimeoutConfig,
        recorder: Recorder,
        on_failure: Callable[[str], None],
        take_in: Callable[[], None],
        confirms: bool = False,
        before_commit: OwnStages | None = None,
        threads: Threads = SYSTEM,
        on_copy_thread: Callable[[], None] = lambda: None,
        num_hashing: int = 1,
    ) -> None:
        self.queue = DumpQueue(
            max_tickets=queue.tickets, max_nbytes=queue.nbytes, threads=threads
        )
        self.recorder = recorder
        self.mark = recorder.ring.mark
        saves = save_chain(
            store, device, confirms=confirms, before_commit=before_commit
        )
        self._segments = {
            Direction.SAVE: saves.segments(),
            Direction.LOAD: load_chain(store, device).segments(),
        }
        self._window = queue.window
        self._deadlines = Deadlines(
            self.queue, stuck_after=timeout.stuck, on_failure=on_failure
        )
        self._on_failure = on_failure
        self._take_in = take_in
        self._threads = threads
        self._on_copy_thread = on_copy_thread
        self._device = device
        self._has_digests = device.tells_digests
        self._num_verifying = min(num_hashing, queue.window)
        if device.is_synchronous:
            device.hash_on(num_hashing)
        else:
            store.hash_on(num_hashing)
        self._lanes: dict[LaneKey, RequestLane] = {}
        self._holding = dict.fromkeys(Direction, 0)
        """Items in lanes that hold blocks of the engine."""
        self._copy: dict[Direction, dict[str, CopyThread]] = {}
        self._runner: Runner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Future[None] | None = None
        """The end of ``run``; None before its start."""
        self._alarm: asyncio.TimerHandle | None = None
        self._is_serving = False
        self._has_more = False
        self._stopping = False
        self._next_sweep = 0.0
        self.has_quarantined = False
        """Whether the device may still use slots of the store."""

    def wake(self) -> None:
        """
        Move what can be moved; once more if something calls for it meanwhile.

        Loop thread only. Whatever goes wrong ends ``run``.
        """
        self._has_more = True
        if self._is_serving or self._over is None or self._over.done():
            return
        self._is_serving = True
        try:
            while self._has_more:
                self._serve()
        except Exception as exc:  # noqa: BLE001 - raised by ``run``, whose thread dies of it
            self._over.set_exception(exc)
        finally:
            self._is_serving = False

    def stop(self) -> None:
        """End ``run`` once queue and lanes are empty. Loop thread only."""
        self._stopping = True
        self.wake()

    def cancel_waiting(self, reason: Reason) -> None:
        """Settle everything that has not reached a copy. Loop thread only."""
        for item in self.queue.close():
            item.ticket.end(Outcome(OutcomeKind.CANCELLED, reason))

    async def run(
        self, on_started: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        """
        Serve until stopped and empty: the loop's main task, where *wake* wakes it.

        Raises:
            PipelineClosedError: The system has no thread for it.
        """
        self._loop = loop = asyncio.get_running_loop()
        for direction, segments in self._segments.items():
            workers = {segment.worker for segment in segments if segment.is_copy}
            self._copy[direction] = {
                worker: CopyThread(
                    f"ucm-{direction.value}-{worker}",
                    self._on_failure,
                    self._threads,
                    self._on_copy_thread,
                    self._num_verifying if worker == VERIFY_WORKER else 1,
                )
                for worker in sorted(workers)
            }
        try:
            self._start_threads()
            async with asyncio.TaskGroup() as group:
                self._runner = Runner(self._copy, group, wake)
                self._over = loop.create_future()
                on_started()
                self.wake()
                await self._over
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            for thread in self._copy_threads():
                thread.stop()

    def _start_threads(self) -> None:
        try:
            for thread in self._copy_threads():
                thread.start()
        except RuntimeError as exc:  # the system has no more of them
            raise PipelineClosedError(f"a copy thread did not start: {exc}") from exc

    def join_threads(self, timeout: float) -> bool:
        """Block until the copy threads have ended; any thread but the loop's."""
        clock = self._threads.monotonic
        limit = clock() + timeout
        return all(
            thread.join(max(0.0, limit - clock())) for thread in self._copy_threads()
        )

    def _copy_threads(self) -> list[CopyThread]:
        return [
            thread for threads in self._copy.values() for thread in threads.values()
        ]

    def _worked_on(self) -> Iterator[Ticket]:
        """Yield the tickets that copy threads are at."""
        for thread in self._copy_threads():
            for job in filter(None, thread.at):
                yield job if isinstance(job, Ticket) else job.ticket

    def _is_empty(self) -> bool:
        return not self._lanes and not self.queue.num_items

    def _serve(self) -> None:
        assert self._runner is not None  # there is an end only while run() is
        assert self._loop is not None
        assert self._over is not None
        self._runner.hand_back()
        if self._has_digests and not self._device.tells_digests:
            self._has_digests = False
            self.recorder.left_checksums(self._device)
        self._deadlines.look_at_hung()
        self._take_in()
        now = self._threads.monotonic()
        if now >= self._next_sweep:  # looks at all there is: not at each wake-up
            self._next_sweep = now + _SWEEP_S
            self._sweep(now)
        self._has_more = False
        for direction in (Direction.LOAD, Direction.SAVE):
            self._fill_lanes(direction)
        if self._has_more:
            return
        if self._stopping and self._is_empty():
            self._over.set_result(None)
        elif self._alarm is None and (
            not self._is_empty() or self._deadlines.num_watched
        ):
            self._alarm = self._loop.call_later(_SWEEP_S, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.wake()

    def _fill_lanes(self, direction: Direction) -> None:
        while self._holding[direction] < self._window:
            item = self.queue.take_nowait(direction)
            if item is None:
                return
            self._deadlines.end_if_over(item.ticket, self._threads.monotonic())
            if item.ticket.outcome is None:
                self._holding[direction] += 1
                self._lane(item.ticket.lane_key).put_nowait(item)

    def _lane(self, key: LaneKey) -> RequestLane:
        lane = self._lanes.get(key)
        if lane is None:
            assert self._runner is not None  # lanes exist only while run() does
            lane = self._lanes[key] = RequestLane(
                key,
                self._segments[key[0]],
                self._runner,
                on_copied=self._copied,
                on_empty=self._lanes.pop,
            )
        return lane

    def _copied(self, direction: Direction) -> None:
        """Free a place in the window."""
        self._holding[direction] -= 1
        self._has_more = True

    def _sweep(self, now: float) -> None:
        """End what is over by now, and let it go."""
        self.queue.tick()
        # One that has ended is not open, and the store may hang all the same.
        tickets = dict.fromkeys([*self.queue.open.values(), *self._worked_on()])
        self._deadlines.look_through(self._threads.slowly(tickets), now)
        for lane in list(self._lanes.values()):
            lane.drop_ended()
        self.queue.drop_ended()

    # What tickets tell, on any thread.

    def released(self, ticket: Ticket) -> None:
        """Count and tell it."""
        self.queue.released(ticket)
        self.recorder.released(ticket)

    def given_up(self, ticket: Ticket) -> None:
        """Take note that the device may write on; a save's engine has its blocks back."""
        self.has_quarantined = True
        if ticket.direction is Direction.SAVE:
            self.recorder.quarantined(ticket)

    def ended(self, ticket: Ticket, outcome: Outcome) -> None:
        """Count and tell it."""
        self.queue.over(ticket)
        self.recorder.ended(ticket, outcome)

    def failed(self, why: str) -> None:
        """Serve nothing more."""
        self._on_failure(why)

    def unwind(self, ticket: Ticket) -> None:
        """Give slots back where they are reserved: the next save finds them there."""
        self._copy[ticket.direction][CopyStage.worker].put(Ticket.unwind, ticket)
