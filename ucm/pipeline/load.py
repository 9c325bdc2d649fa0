# SPDX-License-Identifier: Apache-2.0
"""
The load chain: event wait → fetch → scatter → publish.

``EventWait`` lets the item pass when its destination may be overwritten. ``Fetch``
opens the blocks in the store; ``Scatter`` copies slots into device pages and verifies
their checksums; ``Publish`` makes sure that the device is done and that no slot was
recycled meanwhile. Any doubt fails the whole ticket, and the engine recomputes.

Nobody reads the blocks of a load that brings all rows before ``Publish`` gives them back,
so that checksums need not come first. A device of its own copies while the copy thread
computes them: a load takes the longer of the two. A synchronous one is given piece by
piece, each just verified and still in the CPU's cache. Rows that are loaded layer by
layer are read as soon as they are there: they are verified first.

What such a load has written is zeroed before its blocks are given back if it fails: see
``BlockGuard``.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

import attrs

from ucm.blocks import PackedKey
from ucm.devices.abc import Device, Fence
from ucm.errors import BlockCorruptError, DeviceTimeoutError, StoreError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.save import EventWait, Finished, Queued, Ready, copy_over
from ucm.pipeline.stage import Carrier, Chain, CopyStage, LoopStage
from ucm.pipeline.tickets import Outcome, OutcomeKind, Ticket
from ucm.pipeline.waiting import fence_passed, has_passed
from ucm.reasons import Reason
from ucm.stores.abc import ReadLease, Store

__all__ = [
    "PIECE_BYTES",
    "Fetch",
    "Fetched",
    "Publish",
    "Scatter",
    "ScatterWait",
    "Scattered",
    "load_chain",
]

PIECE_BYTES: Final = 8 << 20
"""Verified and copied at a time on the CPU. Pieces of 4 MB cost as much, 1 and 2 MB up to
a fifth more, in calls, and 16 MB up to a tenth: they leave the last cache. A save is copied
whole: sealed piece by piece it took as long, and held its blocks for longer."""


@attrs.frozen
class Fetched(Carrier):
    """
    Blocks in host slots.

    Args:
        lease: Of the slots.
        is_verified: Their checksums are right.
    """

    lease: ReadLease
    is_verified: bool


@attrs.frozen
class Scattered(Carrier):
    """
    Rows on their way into device pages.

    Args:
        lease: Where they come from.
        fence: Passes when they are there.
        is_whole: The copy is over, and these were the ticket's last rows.
        failure: Why they are not right, though the copy goes on.
    """

    lease: ReadLease
    fence: Fence
    is_whole: bool = False
    failure: Exception | None = None


class Fetch(CopyStage[Ready, Fetched]):
    """Opens blocks; verifies them where rows of theirs are read one by one."""

    name = "fetch"

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, given: Ready) -> Fetched:
        """Open with the first rows."""
        ticket = given.ticket
        lease = ticket.read_lease
        has_rows_to_come = len(given.row_ids) < len(ticket.row_ids)
        if lease is None:
            lease = self._store.read(ticket.span.keys)
            ticket.own(lease)
            if has_rows_to_come:
                _verify(self._store, lease, 0, len(lease.keys))
            ticket.read_lease = lease
        return Fetched(ticket, given.row_ids, lease, has_rows_to_come)


def _verify(store: Store, lease: ReadLease, start: int, stop: int) -> None:
    """Verify some blocks; a corrupt one is forgotten at once."""
    try:
        lease.verify(start, stop)
    except BlockCorruptError:
        lease.recheck()  # bytes of a slot that was recycled are not corrupt
        with contextlib.suppress(StoreError):  # the corruption is the news
            store.forget(_corrupt_keys(lease))
        raise


def _corrupt_keys(lease: ReadLease) -> list[PackedKey]:
    """
    Return every block of a span that does not verify.

    Where one is damaged others may be: each left in the store would cost one more load
    that fails.
    """
    corrupt = []
    for position, key in enumerate(lease.keys):
        try:
            lease.verify(position, position + 1)
        except BlockCorruptError:
            corrupt.append(key)
    return corrupt


@contextlib.contextmanager
def _taken_back_if_failed(given: Carrier) -> Iterator[None]:
    """
    Have blocks zeroed here, on a copy thread, rather than with the last word.

    Not where rows wait elsewhere: they would be ended before it, for no reason.
    """
    whole = False
    try:
        yield
        whole = True
    finally:
        if not whole and len(given.row_ids) == len(given.ticket.row_ids):
            given.ticket.guard.revoke(Reason.OVER)


class Scatter(CopyStage[Fetched, Scattered]):
    """Copies slots into pages, and verifies them."""

    name = "scatter"

    def __init__(self, store: Store, device: Device) -> None:
        self._store = store
        self._device = device

    def run(self, given: Fetched) -> Scattered:
        """Start the copy unless the destination was taken back."""
        with _taken_back_if_failed(given):
            if self._device.is_synchronous:
                return self._copy_pieces(given)
            return self._copy_beside(given)

    def _copy_pieces(self, given: Fetched) -> Scattered:
        """Verify and copy piece by piece."""
        ticket, lease = given.ticket, given.lease
        num_blocks, step = len(lease.keys), len(lease.keys)
        if not given.is_verified:
            step = max(1, PIECE_BYTES // lease.slots.block_bytes)
        for at in range(0, num_blocks, step):
            stop = min(at + step, num_blocks)
            if not given.is_verified:
                _verify(self._store, lease, at, stop)
            fence = self._copy(given, at, stop)
            if stop < num_blocks:
                ticket.guard.end(last=False)  # a store that hangs must hold no blocks
        is_whole = copy_over(ticket, given.row_ids, fence)
        return Scattered(ticket, given.row_ids, lease, fence, is_whole)

    def _copy_beside(self, given: Fetched) -> Scattered:
        """Submit the copy, and verify meanwhile; ``ScatterWait`` waits for the copy."""
        ticket, lease = given.ticket, given.lease
        fence = self._copy(given, 0, len(lease.keys))
        failure = None
        if not given.is_verified:
            # On any thread: a store that hangs must hold no blocks.
            fence.call_when_over(functools.partial(_end_if_passed, fence, ticket))
            try:
                _verify(self._store, lease, 0, len(lease.keys))
            except Exception as exc:  # noqa: BLE001 - ``Publish`` raises it, behind the copy
                failure = exc
        return Scattered(ticket, given.row_ids, lease, fence, failure=failure)

    def _copy(self, given: Fetched, start: int, stop: int) -> Fence:
        ticket, slots = given.ticket, given.lease.slots
        guard, span = ticket.guard, ticket.span
        if not guard.begin():
            raise TicketOverError(guard.torn or guard.revoked or Reason.OVER)
        whole = False
        try:
            fence = self._device.scatter(
                span.group_id,
                given.row_ids,
                slots.part(start, stop),
                span.block_ids[start:stop],
            )
            whole = True
        finally:
            if not whole:
                guard.end(last=False)  # released with the last word
        if not given.is_verified:
            clear = functools.partial(self._device.clear, span.group_id)
            guard.soil(functools.partial(clear, given.row_ids, span.block_ids))
        return fence


def _end_if_passed(fence: Fence, ticket: Ticket) -> None:
    if has_passed(fence):
        ticket.guard.end(last=False)


class ScatterWait(LoopStage[Scattered, Scattered]):
    """Waits for the device's fence behind the copy; runs also on a settled ticket."""

    name = "scatter_wait"
    awaits_copy = True

    async def run(self, given: Scattered) -> Scattered:
        """End the copy; rows that are not right are nobody's."""
        await fence_passed(given.fence)
        if given.failure is not None:
            given.ticket.guard.end(last=False)
            return given
        is_whole = copy_over(given.ticket, given.row_ids, given.fence)
        return attrs.evolve(given, is_whole=is_whole)


class Publish(CopyStage[Scattered, Finished]):
    """Tells whether what landed is the block."""

    name = "publish"

    def run(self, given: Scattered) -> Finished:
        """Recheck the slots once every row is there, and give the blocks back."""
        ticket = given.ticket
        if not given.fence.is_done():
            raise DeviceTimeoutError("blocks were to be published before their copy")
        with _taken_back_if_failed(given):
            if given.failure is not None:
                raise given.failure
            if not given.is_whole:
                return Finished(ticket, given.row_ids, None)
            given.lease.recheck()
            if not ticket.guard.publish():
                guard = ticket.guard
                raise TicketOverError(guard.torn or guard.revoked or Reason.OVER)
        given.lease.close()
        outcome = Outcome(OutcomeKind.COMMITTED, committed=len(ticket.span))
        return Finished(ticket, given.row_ids, outcome)


def load_chain(store: Store, device: Device) -> Chain[Queued, Finished]:
    """Return the load chain for a device: fused where it is synchronous."""
    fetched = Chain.start(EventWait()).then(Fetch(store))
    scattered = fetched.then(Scatter(store, device))
    if not device.is_synchronous:
        scattered = scattered.then(ScatterWait())
    return scattered.then(Publish())
