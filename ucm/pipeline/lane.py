# SPDX-License-Identifier: Apache-2.0
"""
One request's way through a chain.

A lane is one task per segment, joined by bounded anyio streams: while a copy thread
works on one span, the next already waits for its event. Items of a lane pass each stage
in order; lanes do not know each other. A lane lives while it has items.

All of it runs on the loop thread. This is the one place where any error of any stage is
caught: the lane turns it into the ticket's outcome and goes on with the next item.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ucm.blocks import PackedKey
from ucm.errors import (
    BlockCorruptError,
    BlockNotFoundError,
    DeviceError,
    StageFailedError,
    StoreFullError,
    StoreUnavailableError,
    WorkerDiedError,
)
from ucm.pipeline.save import Finished, Queued
from ucm.pipeline.stage import Carrier, Segment
from ucm.pipeline.tickets import (
    Item,
    LaneKey,
    Outcome,
    OutcomeKind,
    Ticket,
    TicketOverError,
)
from ucm.pipeline.workers import CopyThread
from ucm.tracing import STAGE_FAILED

__all__ = ["RequestLane"]

_REASONS: dict[type[Exception], str] = {
    BlockCorruptError: "corrupt",
    BlockNotFoundError: "evicted",
    StoreUnavailableError: "unavailable",
    DeviceError: "device",
    WorkerDiedError: "worker_died",
}


class RequestLane:
    """
    One request's items on their way.

    Args:
        key: Direction, request and life.
        segments: Of the chain.
        copy: The copy threads of this direction, by their segments' worker.
        depth: Items that may be in the lane at once.
        stuck_after: Seconds that a device copy may overrun its ticket's deadline.
        settle: Called with each ticket that ends.
        quarantine: Called with a ticket whose device copy never ended.
        on_left: Called with the ticket of each item that leaves the lane.
    """

    def __init__(
        self,
        key: LaneKey,
        segments: tuple[Segment, ...],
        copy: Mapping[str, CopyThread],
        *,
        depth: int,
        stuck_after: float,
        settle: Callable[[Ticket, Outcome], None],
        quarantine: Callable[[Ticket], None],
        on_left: Callable[["RequestLane", Ticket], None],
    ) -> None:
        self.key = key
        self.num_items = 0
        self._segments = segments
        self._copy = copy
        self._depth = depth
        self._stuck_after = stuck_after
        self._settle = settle
        self._quarantine = quarantine
        self._on_left = on_left
        self._send, self._receive = anyio.create_memory_object_stream[Carrier](depth)

    @property
    def has_room(self) -> bool:
        """Whether one more item may be put in."""
        return self.num_items < self._depth

    def put_nowait(self, item: Item) -> None:
        """Let an item in; the caller has checked ``has_room``."""
        self.num_items += 1
        self._send.send_nowait(Queued(item.ticket, item))

    def close(self) -> None:
        """Let the lane end behind the items it has."""
        self._send.close()

    async def run(self) -> None:
        """Serve until closed and empty."""
        receive = self._receive
        async with self._send, anyio.create_task_group() as group:
            for segment in self._segments[:-1]:
                send, following = anyio.create_memory_object_stream[Carrier](1)
                group.start_soon(self._serve, segment, receive, send)
                receive = following
            group.start_soon(self._serve, self._segments[-1], receive, None)

    async def _serve(
        self,
        segment: Segment,
        receive: MemoryObjectReceiveStream[Carrier],
        send: MemoryObjectSendStream[Carrier] | None,
    ) -> None:
        with receive, send or contextlib.nullcontext():
            async for carrier in receive:
                done = await self._step(segment, carrier)
                if done is not None and send is not None:
                    await send.send(done)
                    continue
                if isinstance(done, Finished) and done.outcome is not None:
                    self._settle(done.ticket, done.outcome)
                self.num_items -= 1
                self._on_left(self, carrier.ticket)

    async def _step(self, segment: Segment, carrier: Carrier) -> Carrier | None:
        """Run one segment on one item; None when its ticket has ended."""
        ticket = carrier.ticket
        if ticket.outcome is not None and not ticket.guard.is_copying:
            return None  # a begun copy is waited for even then
        try:
            return await self._run_to_deadline(segment, carrier)
        except TicketOverError as exc:
            outcome = Outcome(OutcomeKind.CANCELLED, str(exc) or "over")
        except StoreFullError as exc:
            outcome = Outcome(OutcomeKind.REFUSED, "store_full", error=str(exc))
        except Exception as exc:  # noqa: BLE001 - any stage's error ends its ticket, not the lane
            outcome = self._failed(ticket, exc)
        if ticket.guard.is_copying and not segment.is_copy:
            self._quarantine(ticket)  # nobody can tell any more when the copy ends
        self._settle(ticket, outcome)
        return None

    async def _run_to_deadline(
        self, segment: Segment, carrier: Carrier
    ) -> Carrier | None:
        """
        Run one segment, and a begun copy on beyond the ticket's deadline.

        Until the copy is over its blocks cannot be given back; one that overruns
        ``stuck_after`` too is quarantined.
        """
        ticket = carrier.ticket
        copy = self._copy.get(segment.worker)
        job = copy.run(segment.run_copy, carrier) if copy is not None else None

        async def through() -> Carrier:
            return await (asyncio.shield(job) if job else segment.run_loop(carrier))

        with anyio.move_on_after(max(0.0, ticket.deadline - ticket.clock())):
            return await through()
        if ticket.guard.revoke("deadline"):
            raise TicketOverError("deadline")
        limit = ticket.deadline + self._stuck_after  # for all its segments together
        with anyio.move_on_after(max(0.0, limit - ticket.clock())):
            return await through()
        self._quarantine(ticket)
        return None

    def _failed(self, ticket: Ticket, exc: Exception) -> Outcome:
        """Turn a stage's error into an outcome, with the block to blame if known."""
        failure = StageFailedError(ticket.stage, ticket.transfer_id)
        failure.__cause__ = exc
        reason = next(
            (word for kind, word in _REASONS.items() if isinstance(exc, kind)), "error"
        )
        error = f"{failure}: {exc!r}"
        ticket.log.warning(STAGE_FAILED, stage=ticket.stage, error=error)
        bad_key = PackedKey(b"")
        if isinstance(exc, (BlockCorruptError, BlockNotFoundError)):
            bad_key = PackedKey(exc.key)
        return Outcome(OutcomeKind.FAILED, reason, bad_key=bad_key, error=error)
