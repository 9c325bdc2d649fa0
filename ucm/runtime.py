# SPDX-License-Identifier: Apache-2.0
"""
The one place where the engine's thread meets the loop.

One loop per process runs the pipeline, as a rule on a thread of its own; copy threads do
what blocks. The engine's thread calls ``submit`` once per step (one append and one
wake-up of the loop, never a wait), ``poll`` for what has happened, and ``fence`` when it
is about to reuse blocks that a save may still read.

Threading: all public methods belong to the engine's thread; see ``Intake`` for what it
submits. When the loop or a copy thread dies, everything that is open is settled, later
offers are refused, and ``failure`` says why; nothing ever waits for a dead thread.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ucm.affinity import AffinityPlan, bind_thread, num_hashing
from ucm.blocks import RowId, ShardId, TransferId
from ucm.config import UCMConfig
from ucm.devices.abc import Device, Fence
from ucm.devices.events import DoneFence
from ucm.errors import PipelineClosedError
from ucm.intake import Intake
from ucm.layout import KVLayout
from ucm.loop import PipelineLoop
from ucm.mailbox import Mailbox
from ucm.metrics import Counters
from ucm.pinning import Pinning
from ucm.pipeline.engine_waits import EngineWaits
from ucm.pipeline.outcomes import Origin
from ucm.pipeline.pipeline import Pipeline
from ucm.pipeline.recorder import Notice, NoticeKind, Recorder
from ucm.pipeline.ring import EdgeRing
from ucm.pipeline.save import OwnStages
from ucm.pipeline.tickets import Outcome, OutcomeKind
from ucm.reasons import Reason
from ucm.scheduler.messages import SpanOrder
from ucm.stores.abc import Store
from ucm.threads import SYSTEM, Threads
from ucm.tracing import RUNTIME_CLOSED, Log

__all__ = ["Runtime"]

_BRIEF_S = 0.002
_ONLY_SHARD: Final = ShardId(0)
_NOTHING: Final[Mapping[int, Sequence[int]]] = {}


class Runtime:
    """
    Runs one pipeline on its own thread.

    Args:
        store: Opened by the caller, closed by ``close``.
        device: Registered by the caller, closed by ``close``.
        layout: As the device was given it.
        config: Bounds and deadlines.
        counters: Where totals go.
        log: The process's log.
        shard: Which part of a block this rank holds.
        threads: Where the clock, threads and locks come from.
        affinity: Where copy threads run; as the system pleases if not given.
        confirms: The engine overwrites blocks before it says so: ``poll`` confirms saves.
        before_commit: Stages of the host's own; see ``save_chain``.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        *,
        layout: KVLayout,
        config: UCMConfig,
        counters: Counters,
        log: Log,
        shard: ShardId = _ONLY_SHARD,
        threads: Threads = SYSTEM,
        affinity: AffinityPlan | None = None,
        confirms: bool = False,
        before_commit: OwnStages | None = None,
    ) -> None:
        self._store = store
        self._device = device
        self._timeout = config.timeout
        self._pinning = Pinning(
            store,
            device,
            staging_bytes=config.queue.staging_bytes,
            log=log,
            threads=threads,
        )
        self._log, self._counters, self._affinity = log, counters, affinity
        self._mailbox: Mailbox[Notice] = Mailbox(threads)
        tier = store.capabilities.tier
        self._recorder = Recorder(counters, self._mailbox, log, threads.monotonic, tier)
        self._pipeline = Pipeline(
            store,
            device,
            queue=config.queue,
            timeout=config.timeout,
            recorder=self._recorder,
            on_failure=self._fail,
            # The intake needs the pipeline's queue.
            take_in=lambda: self._take_in(gives_way=True),
            confirms=confirms,
            before_commit=before_commit,
            threads=threads,
            on_copy_thread=self._bind_copy_thread,
            num_hashing=num_hashing(
                config.threads.verify, affinity, share=1 if device.is_synchronous else 2
            ),
        )
        self._intake = Intake(
            layout,
            shard,
            self._pipeline.queue,
            self._recorder,
            self._pipeline,
            timeout=config.timeout,
            log=log,
            threads=threads,
            on_failure=self._fail,
        )
        self._take_in = self._intake.take_in
        self._loop = PipelineLoop(self._pipeline, threads, self._loop_ended)
        self._open = self._intake.open
        self._waits = EngineWaits(
            self._open,
            self._pipeline.queue,
            counters,
            changed=self._intake.changed,
            timeout=config.timeout,
            clock=threads.monotonic,
            wake=self._loop.wake,
        )
        self._confirms = confirms
        self._failure_lock, self._closing = threads.lock(), threads.lock()
        self._failure = ""
        self._closed = self._is_over = False

    @property
    def failure(self) -> str:
        """Why nothing is served any more; empty while all is well."""
        return self._failure

    @property
    def num_open(self) -> int:
        """Tickets of which ``poll`` tells the end, or that of a copy; and new batches."""
        return self._intake.num_open

    def start(self) -> None:
        """
        Start the loop thread; blocks until it serves. Memory is pinned behind it.

        Raises:
            ConfigError: ``queue.staging_bytes`` is less than a block.
            PipelineClosedError: The loop did not come up.
        """
        self._pinning.begin()
        if not self._loop.start() or self._failure:
            raise PipelineClosedError(f"the loop did not start: {self._failure}")
        self._recorder.started(self._store, self._device)

    async def serve(self, on_notice: Callable[[], None]) -> None:
        """
        Serve on the running loop until ``close``, instead of ``start``.

        Args:
            on_notice: Called on any thread when there is something to poll; must be brief.

        Raises:
            ConfigError: As ``start``.
            PipelineClosedError: It was closed before, or the system has no thread for it.
        """
        self._mailbox.on_put = on_notice
        await self._loop.serve(self._begin)

    def _begin(self) -> None:
        if self._closed:  # or whoever closes it from now on waits
            raise PipelineClosedError("the runtime is closed")
        self._pinning.begin()
        self._recorder.started(self._store, self._device)

    @property
    def ring(self) -> EdgeRing:
        """What stages did last."""
        return self._recorder.ring

    def begin_step(self, step: int, traces: Mapping[int, str]) -> None:
        """Say of which step of the engine's is what is submitted from now on."""
        self._intake.origin = Origin(step, traces)

    def submit(
        self,
        digest: bytes,
        orders: Sequence[SpanOrder],
        fence: Fence,
        row_ids: Sequence[RowId] | None = None,
    ) -> None:
        """
        Ask for tickets; never blocks, wakes the loop once. Refusals ``poll`` tells.

        Args:
            digest: Key space of their keys, which are packed on the loop.
            orders: In the order of service; must not change any more.
            fence: Behind everything the engine has done to the blocks so far.
            row_ids: The rows that are ready, at least one of each order; ``add_rows``
                brings the others. All if not given.
        """
        self._intake.submit(digest, orders, fence, row_ids)
        self._loop.wake()

    def add_rows(
        self, transfer_ids: Sequence[int], row_ids: Sequence[RowId], fence: Fence
    ) -> None:
        """
        Bring more rows of tickets, each row once; never blocks, wakes the loop once.

        Args:
            transfer_ids: Submitted before; those that came to an end are passed over.
            row_ids: Rows that are ready now; each ticket takes those of its group.
            fence: Behind everything the engine has done to these rows.
        """
        self._intake.add_rows(transfer_ids, row_ids, fence)
        self._loop.wake()

    def decline(
        self, digest: bytes, orders: Sequence[SpanOrder], reason: Reason
    ) -> None:
        """Take orders that nothing is to be done for: they are counted and end at once."""
        self._intake.submit(digest, orders, DoneFence(), None, reason)
        self._take_in()

    def abandon(self, transfer_ids: Iterable[int], reason: Reason) -> None:
        """Cancel tickets whose missing rows will not come."""
        self._take_in()
        for transfer_id in transfer_ids:
            ticket = self._open.get(TransferId(transfer_id))
            if ticket is not None:
                ticket.end(Outcome(OutcomeKind.CANCELLED, reason))
        self._loop.wake()

    def wait_rows(
        self, transfer_ids: Iterable[int], row_ids: Sequence[RowId]
    ) -> list[int]:
        """
        Block until rows of loads are in the engine's blocks, for a layer that reads them.

        Returns:
            The tickets that ended without success: their blocks hold anything.

        Raises:
            DeviceTimeoutError: A copy goes on that was given up long ago; what the
                engine would compute into its blocks might be overwritten.
        """
        self._take_in()
        return self._waits.for_loads(transfer_ids, row_ids)

    def wait_loaded(self, transfer_ids: Iterable[int]) -> list[int]:
        """Block until loads are over and nothing writes their blocks; as ``wait_rows``."""
        self._take_in()
        return self._waits.for_loads(transfer_ids)

    def poll(self) -> list[Notice]:
        """Return what has happened since the last call. Never blocks."""
        if self._failure or self._closed:
            self._take_in()  # nobody else does
        notices = self._mailbox.drain()
        for notice in notices:
            ticket = notice.ticket
            if notice.kind is NoticeKind.SETTLED:
                ticket.is_noticed = True
            elif notice.kind is NoticeKind.RELEASED:
                ticket.guard.is_confirmed = True
            # Not while a copy still touches its blocks: it is to be waited for.
            if ticket.is_noticed and not ticket.guard.is_touched:
                self._open.pop(ticket.transfer_id, None)
        return notices

    def wait_for_notice(self, timeout: float) -> None:
        """
        Block until there is something to poll, at most *timeout* seconds.

        Briefly where every end is told: whoever waits for a stuck copy must not spin.
        """
        is_open = self.num_open and not self._failure
        self._mailbox.wait(timeout if is_open else min(timeout, _BRIEF_S))

    def fence(
        self,
        transfer_ids: Sequence[int],
        overwritten: Sequence[int] = (),
        lost: Mapping[int, Sequence[int]] = _NOTHING,
    ) -> None:
        """
        Make sure that no save is stored with bytes the engine now overwrites.

        Blocks until the named saves have read their blocks, at most the configured
        time. One that has not begun by then is dropped; one that still copies is torn
        and will not be committed. Unknown ids are over already.

        Args:
            transfer_ids: Saves whose blocks are overwritten when this returns.
            overwritten: Saves whose blocks may be overwritten already. Nothing is
                waited for: what they copied counts only if ``poll`` told of it before.
            lost: The positions of the blocks that are overwritten, for saves of several
                requests. All of the others' are.
        """
        if transfer_ids or overwritten:
            self._take_in()
            self._waits.tear(overwritten, lost)
            self._waits.for_saves(transfer_ids, lambda: self._failure, lost)

    def quiesce(self) -> bool:
        """Take all blocks back as ``fence`` does; False if a copy still touches some."""
        self._take_in()
        return self._waits.for_blocks(lambda: self._failure)

    def flush(self, timeout: float) -> bool:
        """Block until all accepted tickets are settled; False after *timeout* seconds."""
        self._take_in()
        return self._waits.for_ends(timeout)

    def close(self, tell: Callable[[], None] = lambda: None) -> None:
        """
        Drain for the configured time, cancel the rest, and end all threads. Idempotent.

        Blocks: not to be called on the loop that ``serve`` runs on.
        Store and device are closed only if no copy or thread may still use them. That may take
        long, or fail: *tell* is called before, once every ticket has its end.
        """
        with self._closing:  # who comes second waits: nothing runs any more behind it
            if not self._is_over:
                self._close(tell)
                self._is_over = True

    def _close(self, tell: Callable[[], None]) -> None:
        """Do each step of a close, also one that was begun before and broke off."""
        self._take_in()
        rowwise = self._pipeline.queue.unfinished()
        self.abandon([each.transfer_id for each in rowwise], Reason.UNFINISHED)
        if self._confirms:  # no step will tell any more what it overwrites
            self.abandon(self._waits.unconfirmed(), Reason.UNCONFIRMED)
        self._closed = True
        self._pipeline.queue.refuse(Reason.CLOSED)
        drained = not self._failure and self.flush(self._timeout.shutdown)
        abandoned = sum(ticket.outcome is None for ticket in self._open.values())
        if not drained:
            self._loop.call(lambda: self._pipeline.cancel_waiting(Reason.SHUTDOWN))
        self._loop.call(self._pipeline.stop)
        quiet = self._loop.join(self._timeout.shutdown)
        quiet = quiet and self._pipeline.join_threads(self._timeout.shutdown)
        quiet = self._pinning.close(self._timeout.shutdown) and quiet
        quiet = quiet and not self._pipeline.has_quarantined  # it may end after all
        self._settle_open(Reason.CLOSED, OutcomeKind.CANCELLED)
        tell()
        if quiet:
            with contextlib.closing(self._store):  # also behind a device that fails
                self._device.close()  # first: it may have pinned memory of the store
        self._log.info(RUNTIME_CLOSED, abandoned=abandoned, quiet=quiet)

    def _bind_copy_thread(self) -> None:
        if self._affinity is not None:
            self._recorder.bound(self._affinity, bind_thread(self._affinity))

    def _loop_ended(self) -> None:
        """Fail, and give up the copies that only the loop would have seen to end."""
        if self._closed:
            return
        tickets = list(self._open.values())
        try:
            self._fail("the loop thread has died")
        finally:
            if not self._device.is_synchronous:
                for ticket in tickets:
                    ticket.give_up()

    def _fail(self, why: str) -> None:
        """Fail everything once; called on the thread that noticed."""
        with self._failure_lock:
            if self._failure:
                return
            self._pipeline.queue.refuse(Reason.FAILED)  # before anyone sees it
            self._failure = why
        with self._intake.changed.lock:
            self._intake.changed.notify()  # who waits for what has ended asks for this
        self._counters.set("ucm_healthy", 0)
        self._pipeline.queue.close(Reason.FAILED)
        try:
            self._settle_open(Reason.RUNTIME_FAILED, OutcomeKind.FAILED)
        finally:
            self._recorder.failed(why)

    def _settle_open(self, reason: Reason, kind: OutcomeKind) -> None:
        with contextlib.ExitStack() as ends:  # one that raises keeps none from its end
            for ticket in reversed(list(self._open.values())):
                ends.callback(ticket.end, Outcome(kind, reason))
