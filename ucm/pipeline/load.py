# SPDX-License-Identifier: Apache-2.0
"""
The load chain: event wait → fetch → scatter → publish.

``EventWait`` lets the item pass when its destination may be overwritten. ``Fetch``
opens the blocks in the store and verifies their checksums; ``Scatter`` copies slots
into device pages; ``Publish`` makes sure that the device is done and that no slot was
recycled meanwhile. Any doubt fails the whole ticket, and the engine recomputes.
"""

import contextlib

import attrs

from ucm.blocks import PackedKey
from ucm.devices.abc import Device, Fence
from ucm.errors import BlockCorruptError, DeviceTimeoutError, StoreError
from ucm.pipeline.guard import TicketOverError
from ucm.pipeline.save import EventWait, Finished, Queued, Ready, copy_over
from ucm.pipeline.stage import Carrier, Chain, CopyStage, LoopStage
from ucm.pipeline.tickets import Outcome, OutcomeKind
from ucm.pipeline.waiting import fence_passed
from ucm.reasons import Reason
from ucm.stores.abc import ReadLease, Store

__all__ = [
    "Fetch",
    "Fetched",
    "Publish",
    "Scatter",
    "ScatterWait",
    "Scattered",
    "load_chain",
]


@attrs.frozen
class Fetched(Carrier):
    """Verified blocks in host slots."""

    lease: ReadLease


@attrs.frozen
class Scattered(Carrier):
    """
    Rows on their way into device pages.

    Args:
        lease: Where they come from.
        fence: Passes when they are there.
        is_whole: The copy is over, and these were the ticket's last rows.
    """

    lease: ReadLease
    fence: Fence
    is_whole: bool = False


class Fetch(CopyStage[Ready, Fetched]):
    """Opens and verifies blocks."""

    name = "fetch"

    def __init__(self, store: Store) -> None:
        self._store = store

    def run(self, given: Ready) -> Fetched:
        """Verify with the first rows; a corrupt block is forgotten at once."""
        ticket = given.ticket
        lease = ticket.read_lease
        if lease is None:
            lease = self._store.read(ticket.span.keys)
            ticket.own(lease)
            try:
                lease.verify(0, len(lease.keys))
            except BlockCorruptError:
                lease.recheck()  # bytes of a slot that was recycled are not corrupt
                with contextlib.suppress(StoreError):  # the corruption is the news
                    self._store.forget(_corrupt_keys(lease))
                raise
            ticket.read_lease = lease
        return Fetched(ticket, given.row_ids, lease)


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


class Scatter(CopyStage[Fetched, Scattered]):
    """Copies slots into pages."""

    name = "scatter"

    def __init__(self, device: Device) -> None:
        self._device = device

    def run(self, given: Fetched) -> Scattered:
        """Start the copy unless the destination was taken back."""
        ticket = given.ticket
        if not ticket.guard.begin():
            raise TicketOverError(
                ticket.guard.torn or ticket.guard.revoked or Reason.OVER
            )
        whole = False
        try:
            fence = self._device.scatter(
                ticket.span.group_id,
                given.row_ids,
                given.lease.slots,
                ticket.span.block_ids,
            )
            whole = True
        finally:
            if not whole:
                ticket.guard.end(last=False)  # released with the last word
        scattered = Scattered(ticket, given.row_ids, given.lease, fence)
        if not self._device.is_synchronous:  # ``ScatterWait`` waits
            return scattered
        return attrs.evolve(scattered, is_whole=copy_over(ticket, given.row_ids, fence))


class ScatterWait(LoopStage[Scattered, Scattered]):
    """Waits for the device's fence behind the copy; runs also on a settled ticket."""

    name = "scatter_wait"
    awaits_copy = True

    async def run(self, given: Scattered) -> Scattered:
        """Let go of the destination with the last row."""
        await fence_passed(given.fence)
        is_whole = copy_over(given.ticket, given.row_ids, given.fence)
        return attrs.evolve(given, is_whole=is_whole)


class Publish(CopyStage[Scattered, Finished]):
    """Tells whether what landed is the block."""

    name = "publish"

    def run(self, given: Scattered) -> Finished:
        """Recheck the slots once every row is there."""
        ticket = given.ticket
        if not given.fence.is_done():
            raise DeviceTimeoutError("blocks were to be published before their copy")
        if not given.is_whole:
            return Finished(ticket, given.row_ids, None)
        if ticket.guard.torn:
            raise TicketOverError(ticket.guard.torn)
        given.lease.recheck()
        given.lease.close()
        outcome = Outcome(OutcomeKind.COMMITTED, committed=len(ticket.span))
        return Finished(ticket, given.row_ids, outcome)


def load_chain(store: Store, device: Device) -> Chain[Queued, Finished]:
    """Return the load chain for a device: fused where it is synchronous."""
    fetched = Chain.start(EventWait()).then(Fetch(store))
    scattered = fetched.then(Scatter(device))
    if not device.is_synchronous:
        scattered = scattered.then(ScatterWait())
    return scattered.then(Publish())
