# SPDX-License-Identifier: Apache-2.0
"""
The one place where the engine's thread meets the loop.

One loop thread per process runs the pipeline; copy threads do what blocks. The
engine's thread calls ``submit`` once per step (one append and one wake-up of the loop,
never a wait), ``poll`` for what has happened, and ``fence`` when it is about to reuse
blocks that a save may still read.

Threading: all public methods belong to the engine's thread. What it submits waits in
``_batches`` until ``_take_in`` makes tickets of it, in turn under ``_taking``: as a rule
on the loop, on the engine's thread where that needs the tickets at once. ``_open`` maps
the tickets whose end was not told; they are added by ``_take_in`` and removed on
``poll``. ``_failure`` is set once, from any thread. When the loop or a copy thread dies,
``_fail`` settles everything that is open, later offers are refused, and ``failure`` says
why; nothing ever waits for a dead thread.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import anyio
import attrs

from ucm.affinity import AffinityPlan, bind_thread, format_cpulist
from ucm.blocks import BlockSpan, RequestId, RowId, TransferId
from ucm.config import UCMConfig
from ucm.devices.abc import Device, Fence
from ucm.errors import PipelineClosedError
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pipeline.pipeline import Pipeline
from ucm.pipeline.recorder import Notice, NoticeKind, Recorder
from ucm.pipeline.tickets import (
    Admission,
    Direction,
    Item,
    Outcome,
    OutcomeKind,
    Ticket,
)
from ucm.stores.abc import Store
from ucm.threads import SYSTEM, Threads
from ucm.tracing import (
    MEMORY_UNPINNED,
    RUNTIME_CLOSED,
    RUNTIME_FAILED,
    RUNTIME_STARTED,
    THREAD_BOUND,
    Log,
)
from ucm.waker import Waker

__all__ = ["Order", "Runtime"]

_START_TIMEOUT_S = 10.0


@attrs.frozen(kw_only=True)
class Order:
    """
    What the engine's thread asks for: one ticket.

    Args:
        transfer_id: Unique within this runtime.
        direction: Save or load.
        request_id: Whose blocks.
        generation: Which life of the request.
        span: Blocks and keys.
        row_ids: Rows of the span's group.
        block_bytes: Bytes of one block over these rows.
    """

    transfer_id: TransferId
    direction: Direction
    request_id: RequestId
    generation: int
    span: BlockSpan
    row_ids: tuple[RowId, ...]
    block_bytes: int


class _Batch(NamedTuple):
    """What one call of ``submit`` brought."""

    orders: Iterable[Order]
    fence: Fence
    submitted_at: float


class Runtime:
    """
    Runs one pipeline on its own thread.

    Args:
        store: Opened by the caller, closed by ``close``.
        device: Registered by the caller, closed by ``close``.
        config: Bounds and deadlines.
        counters: Where totals go.
        log: The process's log.
        threads: Where the clock, threads and locks come from.
        affinity: Where copy threads run; as the system pleases if not given.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        *,
        config: UCMConfig,
        counters: Counters,
        log: Log,
        threads: Threads = SYSTEM,
        affinity: AffinityPlan | None = None,
    ) -> None:
        self._store = store
        self._device = device
        self._timeout = config.timeout
        self._staging_bytes = config.queue.staging_bytes
        self._log = log
        self._counters = counters
        self._threads = threads
        self._affinity = affinity
        self._clock = threads.monotonic
        self._mailbox: Mailbox[Notice] = Mailbox(threads)
        self._recorder = Recorder(counters, self._mailbox, log)
        self._changed = threads.condition()
        self._pipeline = Pipeline(
            store,
            device,
            queue=config.queue,
            timeout=config.timeout,
            recorder=self._recorder,
            on_failure=self._fail,
            take_in=self._take_in,
            threads=threads,
            on_copy_thread=self._bind_copy_thread,
        )
        self._batches: deque[_Batch] = deque()
        self._taking = threads.lock()
        self._open: dict[TransferId, Ticket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waker: Waker | None = None
        self._started = threads.event()
        self._failure_lock = threads.lock()
        self._failure = ""
        self._closed = False
        self._thread = threads.thread(self._main, "ucm-loop")

    @property
    def failure(self) -> str:
        """Why nothing is served any more; empty while all is well."""
        return self._failure

    @property
    def num_open(self) -> int:
        """Tickets whose end ``poll`` has not told, and batches without tickets yet."""
        return len(self._open) + len(self._batches)

    def start(self) -> None:
        """
        Pin the store's memory and start the loop thread; blocks until it serves.

        Raises:
            ConfigError: ``queue.staging_bytes`` is less than a block.
            PipelineClosedError: The loop did not come up.
        """
        self._pin()
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S) or self._failure:
            raise PipelineClosedError(f"the loop did not start: {self._failure}")
        self._log.info(
            RUNTIME_STARTED,
            store=type(self._store).__name__,
            device=type(self._device).__name__,
            **self._device.describe(),
        )

    def _pin(self) -> None:
        """See that the device reaches the store's slots, or memory in between."""
        problems = [self._device.pin(memory) for memory in self._store.buffers]
        if not problems or any(problems):
            largest = self._store.capabilities.max_block_bytes
            problems.append(self._device.stage(self._staging_bytes, largest))
        for problem in filter(None, problems):
            self._log.warning(MEMORY_UNPINNED, reason=problem)

    def submit(self, orders: Iterable[Order], fence: Fence) -> None:
        """
        Ask for tickets; never blocks, wakes the loop once.

        An order that the queue refuses is settled at once; ``poll`` tells of it like of
        any other.

        Args:
            orders: In the order in which they are to be served. As a rule iterated on
                the loop, so that an iterator can spare the engine's thread the work of
                making them; it must not depend on anything that changes meanwhile.
            fence: Behind everything the engine has done to the blocks so far.
        """
        self._batches.append(_Batch(orders, fence, self._clock()))
        self._wake()

    def poll(self) -> list[Notice]:
        """Return what has happened since the last call. Never blocks."""
        if self._started.is_set() and not self._thread.is_alive() and not self._closed:
            self._fail("the loop thread has died")
        if self._failure or self._closed:
            self._take_in()  # nobody else does
        notices = self._mailbox.drain()
        for notice in notices:
            if notice.kind is NoticeKind.SETTLED:
                self._open.pop(notice.ticket.transfer_id, None)
        return notices

    def wait_for_notice(self, timeout: float) -> None:
        """
        Block until there is something to poll, at most *timeout* seconds.

        For an engine that has nothing to compute before a load is over: a thread that
        spins takes the interpreter away from the threads it waits for.
        """
        if self.num_open and not self._failure:
            self._mailbox.wait(timeout)

    def fence(self, transfer_ids: Sequence[int]) -> None:
        """
        Make sure that no save is stored with bytes the engine now overwrites.

        Blocks until the named saves have read their blocks, at most the configured
        time. A save that has not begun by then is dropped; one that is still copying
        is marked torn and will not be committed. Unknown ids are over already.
        """
        if not transfer_ids:
            return
        self._take_in()
        tickets = [
            ticket
            for transfer_id in transfer_ids
            if (ticket := self._open.get(TransferId(transfer_id))) is not None
            and not ticket.guard.is_released
        ]
        if not tickets:
            return
        started = self._clock()
        for ticket in tickets:
            self._pipeline.queue.promote(ticket.lane_key)
        self._wake()
        for ticket in tickets:
            left = started + self._timeout.fence - self._clock()
            if self._failure or not ticket.guard.wait_released(max(0.0, left)):
                ticket.guard.revoke("recycled")
        self._wake()
        self._counters.observe("ucm_fence_wait_seconds", self._clock() - started)

    def flush(self, timeout: float) -> bool:
        """Block until all accepted tickets are settled; False after *timeout* seconds."""
        limit = self._clock() + timeout
        self._take_in()
        return all(
            ticket.wait_told(max(0.0, limit - self._clock()))
            for ticket in list(self._open.values())
        )

    def close(self) -> None:
        """
        Drain for the configured time, cancel the rest, and end all threads.

        Idempotent. Store and device are closed only if no thread uses them any more,
        and no copy was given up that may still go on.
        """
        if self._closed:
            return
        self._take_in()
        self._closed = True
        self._pipeline.queue.refuse(Admission.CLOSED)
        drained = not self._failure and self.flush(self._timeout.shutdown)
        abandoned = sum(ticket.outcome is None for ticket in self._open.values())
        if not drained:
            self._call_loop(self._cancel_waiting)
        self._call_loop(self._pipeline.stop)
        self._thread.join(self._timeout.shutdown)
        quiet = not self._thread.is_alive()
        quiet = quiet and self._pipeline.join_threads(self._timeout.shutdown)
        self._settle_open("closed", OutcomeKind.CANCELLED)
        if quiet and not self._pipeline.has_quarantined:
            self._device.close()  # first: it may have pinned memory of the store
            self._store.close()
        self._log.info(RUNTIME_CLOSED, abandoned=abandoned, quiet=quiet)

    def _take_in(self) -> None:
        """
        Make tickets of what was submitted, and offer them.

        Should an order turn out to be none, a bug of the caller, the runtime fails: the
        engine would wait for its end for ever.
        """
        with self._taking:
            while self._batches:
                whole = False
                try:
                    self._offer(self._batches[0])
                    whole = True
                finally:
                    self._batches.popleft()
                    if not whole:
                        self._fail("a batch of orders could not be taken in")

    def _offer(self, batch: "_Batch") -> None:
        orders = list(batch.orders)  # should one be none, no ticket was made
        tickets = [self._ticket(order, batch.submitted_at) for order in orders]
        self._recorder.offered(tickets)  # before any of them can end
        queue = self._pipeline.queue
        for ticket in tickets:
            # First the log, so that nothing is told of the ticket before; then the
            # list of what a failure ends; then the queue, which a failure closes first.
            admission = queue.admits(ticket)
            self._recorder.admitted(ticket, admission, queue)
            if admission is Admission.ACCEPTED:
                self._open[ticket.transfer_id] = ticket
                item = Item(ticket, ticket.row_ids, batch.fence)
                if queue.offer(item) is not Admission.ACCEPTED:  # closed in between
                    outcome = Outcome(OutcomeKind.CANCELLED, "late")
                    self._recorder.settle(ticket, outcome)

    def _ticket(self, order: Order, submitted_at: float) -> Ticket:
        save = order.direction is Direction.SAVE
        limit = self._timeout.save if save else self._timeout.load
        return Ticket(
            transfer_id=order.transfer_id,
            direction=order.direction,
            request_id=order.request_id,
            generation=order.generation,
            span=order.span,
            row_ids=order.row_ids,
            block_bytes=order.block_bytes,
            accepted_at=submitted_at,
            deadline=submitted_at + limit,
            on_release=self._recorder.released,
            log=self._log,
            changed=self._changed,
            clock=self._clock,
        )

    def _bind_copy_thread(self) -> None:
        if self._affinity is not None:
            bound = bind_thread(self._affinity)
            cpus = format_cpulist(bound.cpus)
            self._log.info(THREAD_BOUND, cpus=cpus, reason=bound.reason)

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def _call_loop(self, function: Callable[[], None]) -> None:
        if self._loop is None or self._loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):  # closed between test and call
            self._loop.call_soon_threadsafe(function)

    def _cancel_waiting(self) -> None:
        self._pipeline.cancel_waiting("shutdown")

    def _main(self) -> None:
        """Run the loop thread; whatever ends it early fails all that is open."""
        try:
            anyio.run(
                self._serve,
                backend_options={"loop_factory": self._threads.event_loop},
            )
        finally:
            if not self._closed:
                self._fail("the loop thread has died")
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waker = self._threads.waker(self._loop, self._pipeline.wake)
        try:
            await self._pipeline.run(self._started.set)
        finally:
            self._waker.close()

    def _fail(self, why: str) -> None:
        """Fail everything once; called on the thread that noticed."""
        with self._failure_lock:
            if self._failure:
                return
            self._failure = why
        self._counters.set("ucm_healthy", 0)
        self._pipeline.queue.close(Admission.FAILED)
        self._settle_open("runtime_failed", OutcomeKind.FAILED)
        self._log.error(RUNTIME_FAILED, error=why)

    def _settle_open(self, reason: str, kind: OutcomeKind) -> None:
        for ticket in list(self._open.values()):
            self._recorder.settle(ticket, Outcome(kind, reason))
